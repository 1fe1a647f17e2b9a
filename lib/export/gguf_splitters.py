"""How texts are split before byte-level BPE: as tokenizer.json says it, and llama.cpp's name of the same splitter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
