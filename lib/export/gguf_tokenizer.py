"""A tokenizer in GGUF: its tokens, their kinds, merges or scores, and how llama.cpp splits a text before them.

llama.cpp has no regular expressions in its files: it knows the splitters of many models by name. Here the name follows
from the splitter itself, as tokenizer.json has it, and one that llama.cpp does not have is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lib.errors import UserError
from lib.export.trained_run import ChatForm

if TYPE_CHECKING:
    from gguf import GGUFWriter

SPACE = "▁"  # what SentencePiece writes for a space
# Special tokens by their names in transformers, and in GGUF's writer.
SPECIAL = ("bos", "eos", "unk", "sep", "pad", "mask")


@dataclass(frozen=True)
class TokenizerFacts:
    """A tokenizer as GGUF stores it.

    Args:
        model: gpt2: byte-level BPE by merges; llama: SentencePiece's BPE by scores.
        pre: llama.cpp's name of the splitter.
        types: of every token, gguf.TokenType.
        merges: pairs in their order, "left right" each.
        scores: of every token: of two possible merges llama.cpp makes that of the higher score.
        ids: of special tokens by their names in GGUF: bos, eos, eot ...
        adds_bos, adds_eos: whether a text gets them.
        adds_space: whether a text, and what follows a special token, begins with a space; None where it is no question.
        strips_right: special tokens swallow the white space behind them.
        chat_template: Jinja, or None.
    """

    model: Literal["gpt2", "llama"]
    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    adds_bos: bool = False
    adds_eos: bool = False
    adds_space: bool | None = None
    strips_right: bool = False
    chat_template: str | None = None

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self.tokens)


def facts_of(chat: ChatForm, where: str) -> TokenizerFacts:
    """A tokenizer's facts, with the chat template and the end of turn that were trained.

    Args:
        where: the model's folder, for messages.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
    tokenizer: Any = chat.tokenizer
    # mlx-lm's wrapper cannot be called; the tokenizer inside it can.
    inner = tokenizer if callable(tokenizer) else tokenizer._tokenizer
    if not getattr(inner, "is_fast", False):
        raise UserError(f"--to gguf: {where}: its tokenizer has no tokenizer.json, which GGUF's tokens come from")
    stored = json.loads(inner.backend_tokenizer.to_str())
    if stored["model"]["type"] != "BPE":
        raise UserError(f"--to gguf: {where}: its tokenizer is a {stored['model']['type']}; GGUF takes BPE here")
    vocabulary: dict[str, int] = stored["model"]["vocab"]
    added = {token["id"]: token for token in stored["added_tokens"]}
    tokens, types = _tokens(vocabulary, added, stored["model"])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in stored["model"]["merges"]]
    ids = {name: index for name in SPECIAL if (index := getattr(inner, f"{name}_token_id", None)) is not None}
    if further := sorted(set(chat.end_ids) - {ids.get("eos")}):
        ids["eot"] = further[0]
    opened = inner("a")["input_ids"]
    common: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "ids": ids,
        "adds_bos": "bos" in ids and opened[:1] == [ids["bos"]],
        "adds_eos": "eos" in ids and opened[-1:] == [ids["eos"]],
        "strips_right": any(token["rstrip"] for token in added.values()),
        "chat_template": chat.template,
    }
    if stored["model"].get("byte_fallback"):
        scores = _scores(tokens, merges)
        space = _adds_space(stored, chat.template)
        return TokenizerFacts(model="llama", pre="default", scores=scores, adds_space=space, **common)
    return TokenizerFacts(model="gpt2", pre=_pre(stored, where), merges=merges, **common)


def write_tokenizer(writer: GGUFWriter, facts: TokenizerFacts | None, vocab_size: int) -> None:
    """Writes a tokenizer for embeddings of `vocab_size` tokens; those without a token are named [PAD17] and unused."""
    from gguf import TokenType

    if facts is None:
        writer.add_tokenizer_model("none")
        return
    unused = range(facts.size, vocab_size)
    writer.add_tokenizer_model(facts.model)
    writer.add_tokenizer_pre(facts.pre)
    writer.add_token_list([*facts.tokens, *(f"[PAD{index}]" for index in unused)])
    writer.add_token_types([*facts.types, *(TokenType.UNUSED for _ in unused)])
    if facts.merges:
        writer.add_token_merges(facts.merges)
    if facts.scores:
        writer.add_token_scores([*facts.scores, *(0.0 for _ in unused)])
    for name, index in facts.ids.items():
        getattr(writer, f"add_{name}_token_id")(index)
    writer.add_add_bos_token(facts.adds_bos)
    writer.add_add_eos_token(facts.adds_eos)
    if facts.adds_space is not None:
        writer.add_add_space_prefix(facts.adds_space)
    if facts.chat_template is not None:
        writer.add_chat_template(facts.chat_template)


def name_with(facts: TokenizerFacts, name: str) -> str:
    """A model's name in its file; "phi-3" in it tells llama.cpp that special tokens swallow the space behind them."""
    return f"Phi-3 {name}" if facts.strips_right and "phi-3" not in name.lower() else name


def _tokens(
    vocabulary: dict[str, int], added: dict[int, dict[str, Any]], model: dict[str, Any]
) -> tuple[list[str], list[int]]:
    """Every token's text and type, by id; ids that have none are unused."""
    from gguf import TokenType

    texts = {index: text for text, index in vocabulary.items()} | {i: token["content"] for i, token in added.items()}
    tokens, types = [], []
    for index in range(max(texts) + 1):
        text = texts.get(index)
        if text is None:
            text, kind = f"[PAD{index}]", TokenType.UNUSED
        elif index in added:
            is_unknown = text == model.get("unk_token") and bool(model.get("byte_fallback"))
            plain = TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED
            kind = TokenType.UNKNOWN if is_unknown else plain
        elif model.get("byte_fallback") and re.fullmatch("<0x[0-9A-F]{2}>", text):
            kind = TokenType.BYTE
        else:
            kind = TokenType.NORMAL
        # A token that a user added is compared with the text itself, in which a space is a space.
        tokens.append(text.replace(SPACE, " ") if kind == TokenType.USER_DEFINED else text)
        types.append(int(kind))
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Minus the place of the first merge that makes a token; a token that none makes is never asked for its own."""
    place: dict[str, int] = {}
    for index, merge in enumerate(merges):
        place.setdefault(merge.replace(" ", ""), index)
    return [-float(place.get(token, len(merges))) for token in tokens]


def _adds_space(stored: dict[str, Any], chat_template: str | None) -> bool:
    """Whether llama.cpp is to put a space before a text and behind special tokens.

    A scheme that does so before the first word of a text alone is none of llama.cpp's. Where there is a chat template
    texts begin with a special token, so that there is no such word.
    """
    for step in _steps(stored.get("pre_tokenizer"), "pretokenizers"):
        if step["type"] == "Metaspace":
            scheme = step.get("prepend_scheme", "always")
            return bool(scheme == "always" or (scheme == "first" and chat_template is None))
    return any(step["type"] == "Prepend" for step in _steps(stored.get("normalizer"), "normalizers"))


def _steps(stored: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """The parts of a normaliser or splitter, one after another."""
    if stored is None:
        return []
    return [part for each in stored[key] for part in _steps(each, key)] if stored["type"] == "Sequence" else [stored]


def _pre(stored: dict[str, Any], where: str) -> str:
    """llama.cpp's name of a byte-level BPE's splitter.

    Raises:
        UserError: it has none that splits so.
    """
    changes = {step["type"] for step in _steps(stored.get("normalizer"), "normalizers")} - {"NFC"}
    if changes:
        raise UserError(
            f"--to gguf: {where}: its tokenizer changes texts ({', '.join(sorted(changes))}), llama.cpp's do not"
        )
    splitter = splitter_of(_steps(stored.get("pre_tokenizer"), "pretokenizers"), bool(stored["model"]["ignore_merges"]))
    for name, known in KNOWN.items():
        if splitter is not None and known.matches(splitter):
            return name
    what = "its tokenizer splits texts in a way" if splitter is None else _described(splitter)
    raise UserError(f"--to gguf: {where}: {what} that llama.cpp does not know; there are {', '.join(KNOWN)}")


def _described(splitter: Splitter) -> str:
    whole = " and takes a whole word that is a token" if splitter.ignores_merges else ""
    return f"its tokenizer splits texts by {' then '.join(splitter.patterns)}{whole}, a way"


# ---- Splitters ----

# What the tokenizers library's ByteLevel(use_regex=true) splits by, GPT-2's.
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
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


@dataclass(frozen=True)
class Splitter:
    """Patterns that split a text, each what the one before has left.

    Args:
        ignores_merges: a whole word that is a token is taken, without looking at merges.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False


@dataclass(frozen=True)
class KnownSplitter:
    """One of llama.cpp's.

    Args:
        spellings: of its patterns, as models' tokenizer.json have them; the first is used to read a file.
    """

    spellings: tuple[tuple[str, ...], ...]
    ignores_merges: bool = False

    def matches(self, splitter: Splitter) -> bool:
        """Whether it splits every text so."""
        return splitter.patterns in self.spellings and splitter.ignores_merges == self.ignores_merges

    @property
    def splitter(self) -> Splitter:
        return Splitter(self.spellings[0], self.ignores_merges)


# By llama.cpp's names (llama-vocab.cpp); where several names mean the same, the best known.
KNOWN = {
    "llama-bpe": KnownSplitter(((_GPT4,), (_CL100K,)), ignores_merges=True),
    "dbrx": KnownSplitter(((_GPT4,), (_CL100K,))),
    "qwen2": KnownSplitter(((_QWEN2,),)),
    "qwen35": KnownSplitter(((_QWEN35,),)),
    "gpt-2": KnownSplitter(((GPT2,),)),
    "smollm": KnownSplitter(((DIGIT, GPT2),)),
    "tekken": KnownSplitter(((_TEKKEN,),), ignores_merges=True),
    "gpt-4o": KnownSplitter(((_GPT4O,),)),
    "deepseek-v3": KnownSplitter((_DEEPSEEK_V3,)),
}


def splitter_of(steps: Sequence[dict[str, Any]], ignores_merges: bool) -> Splitter | None:
    """What the steps of tokenizer.json's pre_tokenizer split by; None where a step does anything else."""
    patterns: list[str] = []
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT2] if step["use_regex"] else []
        elif step["type"] == "Digits" and step["individual_digits"]:
            patterns.append(DIGIT)
        elif step["type"] == "Split" and step["behavior"] == "Isolated" and "Regex" in step["pattern"]:
            patterns.append(step["pattern"]["Regex"])
        else:
            return None
    return Splitter(tuple(patterns), ignores_merges)
