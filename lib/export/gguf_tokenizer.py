"""A tokenizer in GGUF: its tokens, their kinds, merges or scores, and llama.cpp's name of how it splits a text.

llama.cpp knows the splitters of many models by name. The name follows from the splitter itself, as tokenizer.json has
it; one that llama.cpp does not have is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gguf import GGUFWriter, TokenType

from lib.errors import UserError
from lib.export.trained_run import ChatForm

SPACE = "▁"  # what SentencePiece writes for a space
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")  # by their names in transformers, and in GGUF's writer


@dataclass(frozen=True)
class GgufTokenizer:
    """A tokenizer as GGUF stores it."""

    tokens: list[tuple[str, int]]  # every token's text and gguf.TokenType, by id
    merges: list[str]  # pairs in their order, "left right" each
    is_sentencepiece: bool  # BPE by scores ("llama"), not byte-level BPE by merges ("gpt2")
    pre: str  # llama.cpp's name of the splitter
    ids: dict[str, int]  # of special tokens by their names in GGUF: bos, eos, eot ...
    adds: dict[str, bool]  # whether a text gets bos and eos, and begins with a space
    strips_right: bool  # special tokens swallow the white space behind them
    chat_template: str | None

    def write(self, writer: GGUFWriter, vocab_size: int) -> None:
        """Writes it for embeddings of `vocab_size` tokens; those without a token are named [PAD17] and unused."""
        unused = [(f"[PAD{index}]", int(TokenType.UNUSED)) for index in range(len(self.tokens), vocab_size)]
        texts, types = zip(*self.tokens, *unused, strict=True)
        writer.add_tokenizer_model("llama" if self.is_sentencepiece else "gpt2")
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(list(texts))
        writer.add_token_types(list(types))
        if self.is_sentencepiece:  # of two possible merges llama.cpp makes that of the higher score: the earlier one
            order = {merge.replace(" ", ""): index for index, merge in reversed([*enumerate(self.merges)])}
            scores = [-float(order.get(text, len(self.merges))) for text, _ in self.tokens]
            writer.add_token_scores(scores + [0.0] * len(unused))
        else:
            writer.add_token_merges(self.merges)
        for name, index in self.ids.items():
            getattr(writer, f"add_{name}_token_id")(index)
        for name, is_added in self.adds.items():
            getattr(writer, f"add_add_{name}")(is_added)
        if self.chat_template is not None:
            writer.add_chat_template(self.chat_template)


def tokenizer_of(chat: ChatForm, where: str) -> GgufTokenizer:
    """A tokenizer with the chat template and the end of turn that were trained. where: the model's folder. Raises
    UserError: llama.cpp has no such tokenizer."""
    wrapper: Any = chat.tokenizer  # of mlx-lm, which cannot be called; the tokenizer inside it can
    tokenizer = wrapper if callable(wrapper) else wrapper._tokenizer
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"--to gguf: {where}: its tokenizer has no tokenizer.json, which GGUF's tokens come from")
    stored = json.loads(tokenizer.backend_tokenizer.to_str())
    model, added = stored["model"], {token["id"]: token for token in stored["added_tokens"]}
    if model["type"] != "BPE":
        raise UserError(f"--to gguf: {where}: its tokenizer is a {model['type']}; GGUF takes BPE here")
    ids = {name: index for name in SPECIAL if (index := getattr(tokenizer, f"{name}_token_id", None)) is not None}
    if further := sorted(set(chat.end_ids) - {ids.get("eos")}):
        ids["eot"] = further[0]
    opened, is_sentencepiece = tokenizer("a")["input_ids"], bool(model.get("byte_fallback"))
    adds = {
        "bos_token": "bos" in ids and opened[:1] == [ids["bos"]],
        "eos_token": "eos" in ids and opened[-1:] == [ids["eos"]],
    }
    if is_sentencepiece:
        adds["space_prefix"] = _adds_space(stored, chat.template)
    return GgufTokenizer(
        tokens=_tokens(model, added, is_sentencepiece),
        merges=[merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        is_sentencepiece=is_sentencepiece,
        pre="default" if is_sentencepiece else _pre(stored, where),
        ids=ids,
        adds=adds,
        strips_right=any(token["rstrip"] for token in added.values()),
        chat_template=chat.template,
    )


def _tokens(
    model: Mapping[str, Any], added: Mapping[int, Mapping[str, Any]], is_sentencepiece: bool
) -> list[tuple[str, int]]:
    """Every token's text and type, by id; ids that have none are unused."""
    texts = {index: text for text, index in model["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    tokens = []
    for index in range(max(texts) + 1):
        text, kind = texts.get(index, f"[PAD{index}]"), TokenType.NORMAL
        if index not in texts:
            kind = TokenType.UNUSED
        elif index in added and is_sentencepiece and text == model.get("unk_token"):
            kind = TokenType.UNKNOWN
        elif index in added:
            kind = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
        elif is_sentencepiece and re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = TokenType.BYTE
        # A token that a user added is compared with the text itself, in which a space is a space.
        tokens.append((text.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else text, int(kind)))
    return tokens


def _adds_space(stored: Mapping[str, Any], chat_template: str | None) -> bool:
    """Whether llama.cpp is to put a space before a text and behind special tokens. It cannot do so before the first
    word of a text alone; with a chat template texts begin with a special token, so that there is no such word."""
    for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return bool(scheme == "always" or (scheme == "first" and chat_template is None))
    return any(step["type"] == "Prepend" for step in _steps(stored.get("normalizer"), "normalizers"))


def _steps(stored: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """The parts of a normaliser or splitter, one after another."""
    if stored is None:
        return []
    return [part for each in stored[key] for part in _steps(each, key)] if stored["type"] == "Sequence" else [stored]


def _pre(stored: Mapping[str, Any], where: str) -> str:
    """llama.cpp's name of a byte-level BPE's splitter. Raises UserError: it has none that splits so."""
    changes = {step["type"] for step in _steps(stored.get("normalizer"), "normalizers")} - {"NFC"}
    patterns: list[str] = []
    for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT2] if step["use_regex"] else []
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(r"\p{N}")
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        else:
            patterns.append(step["type"])
    takes_words = bool(stored["model"]["ignore_merges"])
    name = SPLITTERS.get((tuple(patterns), takes_words))
    if name is None or changes:
        how = [*sorted(changes), *patterns, *["whole words that are tokens"] * takes_words]
        raise UserError(f"--to gguf: {where}: llama.cpp knows no tokenizer that splits texts by {', then '.join(how)}")
    return name


# What the tokenizers library's ByteLevel(use_regex=true) splits by, GPT-2's.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT4 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _END
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _END
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
_TEKKEN = "|".join(_CASED) + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
_GPT4O = "|".join(f"{each}{_CONTRACTIONS}?" for each in _CASED) + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _END
# tiktoken's own spelling of GPT-4's, with possessive quantifiers: it splits the same texts.
_CL100K = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    + _END,
)
# llama.cpp's names (llama-vocab.cpp; the best known, where several mean the same) by what splits a text, each pattern
# what the one before has left, and whether a whole word that is a token is taken without a look at merges.
SPLITTERS: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT4,), True): "llama-bpe",
    ((_CL100K,), True): "llama-bpe",
    ((_GPT4,), False): "dbrx",
    ((_CL100K,), False): "dbrx",
    ((_QWEN2,), False): "qwen2",
    ((_QWEN35,), False): "qwen35",
    ((GPT2,), False): "gpt-2",
    ((r"\p{N}", GPT2), False): "smollm",
    ((_TEKKEN,), True): "tekken",
    ((_GPT4O,), False): "gpt-4o",
    (_DEEPSEEK_V3, False): "deepseek-v3",
}
