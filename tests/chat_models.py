"""Small tokenizers with the chat templates and special tokens of real models (tests/templates/README.md)."""

import functools
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent / "templates"
# GPT-4's way to split a text, which Llama 3, Qwen and most that came after have.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What stands in a template as one token of its model.
TOKENS = re.compile(
    r"<[|｜][^\s'\"{}<>]{1,40}[|｜]>|\[/?[A-Z_]{3,20}\]|</?(?:seed:|mm:)?think>|<(?:start|end)_of_turn>|</?tool_call>"
    r"|</?tool_response>|\]~b\]|\]~!b\[|\[e~\[|\[gMASK\]|<sop>|<role>|</role>|<\|[a-z_]+>|<[a-z_]+\|>|</?assistant>|</?user>|</?system>"
)


@functools.cache
def registry() -> dict[str, dict[str, Any]]:
    """What is known of each model: its bos, eos, further end tokens, kind of vocabulary."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "models.json").read_text())
    return found


@functools.cache
def _vocabulary(kind: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / f"{kind}.json").read_text())
    return found


def tokenizer_of(name: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """The tokenizer of a model of the registry; `template` stands for its own."""
    about = registry()[name]
    text = template if template is not None else (FOLDER / f"{about.get('template', name)}.jinja").read_text()
    return build(text, about)


def build(template: str, about: dict[str, Any]) -> PreTrainedTokenizerFast:
    """A tokenizer with the template's special tokens and a small vocabulary."""
    kind = about["kind"]
    stored = _vocabulary("metaspace" if kind.startswith("metaspace") else "byte_level")
    merges = [tuple(merge) for merge in stored["merges"]]
    model = models.BPE(stored["vocab"], merges, byte_fallback=kind.startswith("metaspace"), fuse_unk=True)
    made = Tokenizer(model)
    if kind == "byte_level":
        of_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), of_bytes])
        made.decoder = decoders.ByteLevel()
    elif kind == "metaspace":  # Llama 2's, Mistral's and Phi-3's: a space before the first word of a text
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        made.decoder = _spm_decoder()
    elif kind == "metaspace-legacy":  # and before every word behind a special token
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.decoder = _spm_decoder()
    else:  # metaspace-bare, Gemma's: none
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = _spm_decoder(opens=False)
    texts = dict.fromkeys([about.get("bos"), about["eos"], *about.get("ends", ()), *TOKENS.findall(template)])
    rstrip = about.get("rstrip", ())
    for text in filter(None, texts):
        special = not re.search(r"think|tool_call>|tool_response>", text)
        made.add_tokens([AddedToken(text, special=special, normalized=False, rstrip=text in rstrip)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=made, bos_token=about.get("bos"), eos_token=about["eos"])
    wrapped.chat_template = template
    return wrapped


def end_ids(tokenizer: PreTrainedTokenizerFast, about: dict[str, Any]) -> set[int]:
    """Where generation stops: by the tokenizer and by generation_config.json."""
    return {tokenizer.convert_tokens_to_ids(text) for text in (about["eos"], *about.get("ends", ()))}


def _spm_decoder(opens: bool = True) -> decoders.Decoder:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*parts, *([decoders.Strip(" ", 1, 0)] if opens else [])])
