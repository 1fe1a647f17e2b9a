"""Log-probabilities by peft and transformers, for lib/export/peft_adapter.py: a script for a Python that has them.

    python peft_reader.py BASE ADAPTER ROWS.json OUT.npz [--trust-remote-code]

It imports nothing of this project. float32, on the CPU, one row at a time: row0, row1 ... of OUT.npz are the
log-probabilities of every token but the first; base0, base1 ... the same without the adapter.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(base: str, adapter: str, rows: str, out: str, *options: str) -> None:
    """Reads, computes, writes."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"  # all that is read lies in two folders
    import numpy as np
    import peft
    import torch
    import transformers

    trusts = "--trust-remote-code" in options
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=trusts)
    adapted = peft.PeftModel.from_pretrained(model, adapter).float().eval()

    def logps_of(ids: list[int]) -> Any:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            logps = torch.log_softmax(adapted(tokens[:, :-1]).logits[0].float(), dim=-1)
        return logps.gather(1, tokens[0, 1:, None])[:, 0].numpy()

    found = {}
    for index, ids in enumerate(json.loads(Path(rows).read_text(encoding="utf-8"))):
        found[f"row{index}"] = logps_of(ids)
        with adapted.disable_adapter():
            found[f"base{index}"] = logps_of(ids)
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
