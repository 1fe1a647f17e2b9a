"""A tokenizer in GGUF: its tokens, their kinds, merges or scores, and how llama.cpp splits a text before them.

llama.cpp has no regular expressions in its files: it knows the splitters of many models by name. Here the name follows
from the splitter itself, as tokenizer.json has it, and one that llama.cpp does not have is refused.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from lib.errors import UserError
from lib.export.gguf_splitters import KNOWN, Splitter, splitter_of

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


def facts_of(tokenizer: Any, chat_template: str | None, where: str) -> TokenizerFacts:
    """A tokenizer's facts.

    Args:
        tokenizer: mlx-lm's wrapper around one of transformers.
        chat_template: that of the run's rows.
        where: the model's folder, for messages.

    Raises:
        UserError: llama.cpp has no such tokenizer.
    """
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
    further = sorted(set(getattr(tokenizer, "eos_token_ids", None) or ()) - {ids.get("eos")})
    if further:
        ids["eot"] = further[0]
    opened = inner("a")["input_ids"]
    common: dict[str, Any] = {
        "tokens": tokens,
        "types": types,
        "ids": ids,
        "adds_bos": "bos" in ids and opened[:1] == [ids["bos"]],
        "adds_eos": "eos" in ids and opened[-1:] == [ids["eos"]],
        "strips_right": any(token["rstrip"] for token in added.values()),
        "chat_template": chat_template,
    }
    if stored["model"].get("byte_fallback"):
        scores = _scores(tokens, merges)
        space = _adds_space(stored, chat_template)
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
