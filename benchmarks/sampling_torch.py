"""The generation that TRL's GRPO uses, transformers', timed in an environment of its own; benchmarks/sampling.py starts it.

Reads one JSON object from the standard input, and prints one with tokens a second. Its `way` is one of WAYS: how TRL's GRPOConfig
generates without vLLM (the default; cache_implementation="static"; use_transformers_continuous_batching), and the static cache
with torch.compile, which TRL itself turns off.
"""

from __future__ import annotations

import json
import sys
import time

sys.path.pop(0)  # the other files here are benchmarks

import torch  # noqa: E402
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM  # noqa: E402

WAYS = ("dynamic", "static", "compiled", "continuous")

work = json.load(sys.stdin)
way = work["way"]
assert way in WAYS, way
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(work["seed"])
settings = {name: value for name, value in work["config"].items() if name != "model_type"}
with torch.device(device):
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(getattr(torch, work["dtype"])).eval()
ends, pad = work["ends"], 0
model.generation_config.eos_token_id = None  # random weights end nowhere but there
asked = [prompt for prompt in work["prompts"] for _ in range(work["samples"])]
prompts = torch.tensor(asked, device=device)
options = GenerationConfig(
    max_new_tokens=work["tokens"],
    do_sample=True,
    temperature=1.0,
    top_p=work["top_p"],
    top_k=0,
    eos_token_id=ends or None,
    pad_token_id=pad,
    cache_implementation="static" if way in ("static", "compiled") else None,
    disable_compile=way != "compiled",
)


def run() -> int:
    """Tokens of the answers, without what was drawn behind their end."""
    if way == "continuous":
        with torch.no_grad():
            outputs = model.generate_batch(asked, generation_config=options, progress_bar=False)
        return sum(len(output.generated_tokens) for output in outputs.values())
    with torch.no_grad():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=options)
    answers = out[:, prompts.shape[1] :]
    if device == "cuda":
        torch.cuda.synchronize()
    if not ends:
        return answers.numel()
    is_end = torch.isin(answers, torch.tensor(ends, device=device))
    until = torch.where(is_end.any(dim=1), is_end.int().argmax(dim=1) + 1, answers.shape[1])
    return int(until.sum())


began = time.perf_counter()
run()
first, began = time.perf_counter() - began, time.perf_counter()
if device == "cuda":
    torch.cuda.reset_peak_memory_stats()
tokens = run()
seconds = time.perf_counter() - began
peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0
print(
    json.dumps(
        {
            "tokens_per_second": tokens / seconds,
            "tokens": tokens,
            "seconds": seconds,
            "first_seconds": first,
            "peak_gb": peak,
        }
    )
)
