"""Token ids of chats against TRL's, for every chat template and kind of row: how many differ, and which.

    python benchmarks/chat_templates.py --trl PYTHON [--templates FOLDER --models MODELS.json] [--write-golden]

PYTHON is the interpreter of an environment with TRL 1.16. By default the templates are those of tests/templates. Both
sides get the same tokenizer, template arguments and date. A row counts as a difference unless

- the prompt is, id for id, what TRL makes of it with add_generation_prompt=True;
- the completion is what stands behind the prompt in TRL's ids of the whole conversation, where the prompt begins them,
  else it is the end of the whole and has the answer in it; each up to the first token that ends the turn;
- and it is not refused, unless TRL refuses it, too, or would lose thinking or a call without a word.

--quick takes 8 templates. --write-golden keeps TRL's ids in tests/templates/golden.json.gz.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from lib import environment

environment.enter()

# Runs in TRL's environment: stdin has a list of {name, tokenizer, bos, eos, template, rows}.
REFERENCE = """
import datetime, json, sys
import transformers.utils.chat_template_utils as rendering
from transformers import PreTrainedTokenizerFast
from trl.data_utils import _tokenize
class Day(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2024, 7, 26)
rendering.datetime = Day
made = {}
for job in json.load(sys.stdin):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=job["tokenizer"], bos_token=job["bos"], eos_token=job["eos"])
    tokenizer.chat_template = job["template"]
    for name, row in job["rows"].items():
        given = {"tools": row["tools"], **row["chat_template_kwargs"]}
        try:
            prompt = _tokenize(tokenizer, row["prompt"], add_generation_prompt=True, **given)["input_ids"]
            wholes, masks = [], []
            for answer in row["completions"]:
                extra = {"return_assistant_tokens_mask": True} if job["has_marks"] else {}
                both = _tokenize(tokenizer, row["prompt"] + answer, **given, **extra)
                wholes.append(both["input_ids"])
                masks.append(both.get("assistant_masks"))
            made[job["name"] + " " + name] = {"prompt": prompt, "wholes": wholes, "masks": masks}
        except Exception as error:
            made[job["name"] + " " + name] = {"error": str(error)}
json.dump(made, sys.stdout)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", required=True, help="the Python of an environment with TRL 1.16")
    parser.add_argument("--templates", type=Path, default=ROOT / "tests" / "templates")
    parser.add_argument("--models", type=Path, help="bos, eos and further end tokens of each template")
    parser.add_argument("--write-golden", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0, help="nothing here is random")
    options = parser.parse_args()

    from tests import chat_models, chat_rows

    models = json.loads((options.models or options.templates / "models.json").read_text())
    models = dict(list(models.items())[:8]) if options.quick else models
    texts = {name: (options.templates / f"{name}.jinja").read_text() for name in models}
    tokenizers = {name: chat_models.build(texts[name], about) for name, about in models.items()}
    golden = reference(options.trl, models, tokenizers, chat_rows.rows())
    if options.write_golden:
        with gzip.GzipFile(chat_models.FOLDER / "golden.json.gz", "wb", mtime=0) as file:
            file.write(json.dumps(golden, separators=(",", ":")).encode())
    found: dict[str, dict[str, str]] = {}
    for name, about in models.items():
        found[name] = {}
        for kind, why in chat_rows.differences(name, tokenizers[name], about, golden).items():
            found[name][kind] = why
            print(f"{name:52} {kind:24} {why}")
    count, rows = sum(map(len, found.values())), len(models) * len(chat_rows.rows())
    print(f"{count} of {rows:,} rows ({len(models)} templates) differ from TRL")
    print(json.dumps({"templates": len(models), "rows": rows, "differences": count, "by_template": found}))


def reference(
    python: str, models: dict[str, Any], tokenizers: dict[str, Any], rows: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """TRL's ids of every row with every template, by "TEMPLATE ROW"."""
    with tempfile.TemporaryDirectory() as folder:
        jobs = []
        for index, (name, about) in enumerate(models.items()):
            file = Path(folder) / f"{index}.json"
            tokenizers[name].backend_tokenizer.save(str(file))
            template = tokenizers[name].chat_template
            jobs.append(
                {
                    "name": name,
                    "tokenizer": str(file),
                    "bos": about.get("bos"),
                    "eos": about["eos"],
                    "template": template,
                    "has_marks": "generation %}" in template.replace("generation -%}", "generation %}"),
                    "rows": rows,
                }
            )
        done = subprocess.run(
            [python, "-c", REFERENCE], input=json.dumps(jobs), capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    main()
