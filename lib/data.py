"""Records ➜ token ids ➜ batches, in numpy: what the model is shown, and which tokens it is scored on.

A completion is tokenised as the model meets it when it generates. At inference the prompt is tokenised alone
and tokens are appended to it; so here too the prompt is tokenised alone and the completion apart from it,
without the special tokens that open a text. Tokenising the whole and cutting it would let a token straddle
the boundary, and the model would learn from a prompt that it is never given.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from lib import records, sources
from lib.config import Data, UserError
from lib.records import Chat, Kind, Message, Plain, Tokens, Unusable, Unwanted
from lib.shapes import Shape, first_that_holds, need_of, real_tokens, shape_of

T = TypeVar("T")

# Records tokenised at a time: enough for a fast tokenizer's threads, little enough to keep in memory.
CHUNK_RECORDS = 2048
# Of a tokenizer that cannot be written down, this text's tokens have to do.
SPECIMEN = "The quick brown fox jumps over 13 lazy dogs. Ünïcödé, 漢字, кириллица;\n\tdef f(x): return x ** 2  # 🦊"


@dataclass(frozen=True, eq=False)
class Example:
    """One training example, tokenised."""

    row: int
    """Its index in the data set, the same in every run over the same file and settings."""
    prompt_ids: np.ndarray
    """int32 [P]; empty for plain text, except for the tokens that the tokenizer opens a text with."""
    completions: tuple[np.ndarray, ...]
    """int32 [C_k] each, the end token included: one for SFT, (chosen, rejected) for preferences."""


class Sized:
    """What is known of a data set's rows without their tokens, from the sizes of their pieces."""

    kind: Kind

    @property
    def completions_per_example(self) -> int:
        """K: 2 for preferences, 1 for SFT."""
        return 2 if self.kind == "preference" else 1

    @property
    def lengths(self) -> np.ndarray:
        """int64 [n]: positions that the model sees of a row's longest sequence, prompt + completion - 1."""
        lengths: np.ndarray = self.seen.max(axis=1)
        return lengths

    @property
    def prompts(self) -> np.ndarray:
        """int64 [n]: tokens of each prompt."""
        return self.pieces[:, 0]

    @property
    def seen(self) -> np.ndarray:
        """int64 [n, K]: positions that the model sees of each sequence."""
        return self.pieces[:, :1] + self.pieces[:, 1:] - 1

    @property
    def scored_tokens(self) -> np.ndarray:
        """int64 [n, K]: completion tokens with a log-probability; a text's first has none (see collate)."""
        return self.pieces[:, 1:] - (self.pieces[:, :1] == 0)

    @property
    def pieces(self) -> np.ndarray:
        """int64 [n, 1 + K]: tokens of each prompt and of its completions."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Dataset(Sized):
    """Examples in memory, in the files' order; index them with the rows of lib/order.py."""

    path: str
    kind: Kind
    columns: str
    """What was read, for people: `prompt + chosen + rejected`."""
    truncated_count: int
    """Rows that lost tokens to data.max_length."""
    skipped: list[str]
    """`file:line: why` for every record left out (data.skip_invalid)."""
    digest: str
    """sha256 over kind, token ids and lengths, in order: covers tokenizer, template, data and truncation."""
    tokens: np.ndarray
    """int32 [T]: prompt, completions of row 0, prompt, completions of row 1, ..."""
    bounds: np.ndarray
    """int64 [n * (1 + K) + 1]: where each of these pieces begins in `tokens`, and the end."""
    unwanted_count: int = 0
    """Records that the filters left out: lengths, duplicates."""

    is_estimated = False

    @property
    def pieces(self) -> np.ndarray:
        return np.diff(self.bounds).reshape(len(self), 1 + self.completions_per_example)

    def __len__(self) -> int:
        return (len(self.bounds) - 1) // (1 + self.completions_per_example)

    def __getitem__(self, row: int) -> Example:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        width = 1 + self.completions_per_example
        bounds = self.bounds[row * width : (row + 1) * width + 1]
        prompt, *completions = (self.tokens[a:b] for a, b in zip(bounds[:-1], bounds[1:], strict=True))
        return Example(int(row), prompt, tuple(completions))

    def __iter__(self) -> Iterator[Example]:
        return map(self.__getitem__, range(len(self)))

    def examples(self, rows: Sequence[int]) -> list[Example]:
        """The examples of some rows."""
        return [self[row] for row in rows]

    @property
    def skipped_count(self) -> int:
        return len(self.skipped)

    def __str__(self) -> str:
        """One line that says what was read, cut and left out."""
        unit = "pairs" if self.kind == "preference" else "examples"
        parts = [f"{self.path}: {len(self):,} {unit} from {self.columns}"]
        if self.truncated_count:
            parts.append(f"{self.truncated_count:,} cut to data.max_length")
        if self.skipped:
            parts.append(f"{len(self.skipped):,} records left out")
        if self.unwanted_count:
            parts.append(f"{self.unwanted_count:,} filtered")
        return ", ".join(parts)


Record = Tokens | Plain | Chat
Pieces = list[np.ndarray]
"""int32: the ids of a prompt, and of its completions."""


def load_dataset(
    path: str | Mapping[str, float],
    settings: Data,
    kind: Kind,
    tokenizer: Any | None,
    *,
    eos_token_id: int | None,
    vocab_size: int | None = None,
    held_out: bool | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Dataset:
    """Read, tokenise, truncate and check every record of `path`, or of several sources with their weights.

    kind: `preference` wants pairs; `sft` wants completions, and takes the chosen one of preference records
    (then `columns` says so). tokenizer: a transformers tokenizer or mlx-lm's wrapper; None will do for
    records that come tokenised. eos_token_id: ends each completion that its template has not ended.
    vocab_size: ids from there on are refused. held_out: which side of data.holdout; None for all rows.

    Raises UserError for a file that cannot be read or has no records, for text without a tokenizer, and,
    unless settings.skip_invalid, when any record is unusable: it names the first and counts the others.
    """
    weights = sources.weights_of(path)
    name = " + ".join(weights)
    encoder = None if tokenizer is None else Encoder(tokenizer, settings.chat_template, eos_token_id)
    pieces: Pieces = []
    skipped: list[str] = []
    columns: dict[str, None] = {}
    truncated_count = unwanted_count = 0
    met: set[int] = set()
    for source, weight in weights.items():
        found: list[tuple[Pieces, int]] = []
        for file in sources.files_of(source, settings, tell):
            for place, record, result in tokenised(_parsed(file, settings, kind), settings, encoder, vocab_size):
                if isinstance(result, Unwanted):
                    unwanted_count += 1
                    continue
                if isinstance(result, Unusable):
                    skipped.append(f"{place}: {result}")
                    continue
                assert not isinstance(record, Unusable)
                prompt_key, key = sources.keys_of(record)
                if settings.deduplicate and key in met:
                    unwanted_count += 1
                    continue
                met.add(key)
                if held_out is not None and held_out != sources.is_held_out(prompt_key, settings.holdout):
                    continue
                columns[record.columns] = None
                truncated_count += result[1]
                found.append((result[0], key))
        times = int(weight) if not held_out else 1
        once_more = 0 if held_out else int(weight % 1 * 2**64)
        chosen = [example for _ in range(times) for example, _ in found]
        chosen += [example for example, key in found if key < once_more]
        pieces += [piece for example in chosen for piece in example]
    if skipped and not settings.skip_invalid:
        raise UserError(records.refusal(skipped[0], len(skipped)))
    if not pieces:
        if unwanted_count or held_out is not None:
            side = "held out" if held_out else "left"
            raise UserError(
                f"{name}: no row is {side} (data.holdout={settings.holdout:g}, {unwanted_count:,} records filtered)"
            )
        raise UserError(records.nothing_in(name, skipped[0] if skipped else "", len(skipped)))
    return in_memory(name, kind, "; ".join(columns), pieces, truncated_count, skipped, unwanted_count)


def in_memory(
    name: str, kind: Kind, columns: str, pieces: Pieces, truncated_count: int, skipped: list[str], unwanted_count: int
) -> Dataset:
    """A data set of these pieces: prompt, completions of row 0, prompt, completions of row 1, ..."""
    tokens = np.concatenate(pieces)
    bounds = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    digest = hashlib.sha256(kind.encode())
    for array, dtype in ((bounds, "<i8"), (tokens, "<i4")):  # In one byte order, so that all hosts agree.
        digest.update(array.astype(dtype, copy=False).data)
    return Dataset(name, kind, columns, truncated_count, skipped, digest.hexdigest(), tokens, bounds, unwanted_count)


def _parsed(file: Path, settings: Data, kind: Kind) -> Iterator[tuple[str, Record | Unusable]]:
    """`file:line` and form of each record."""
    for line, record in records.read(str(file), settings):
        yield f"{file}:{line}", record if isinstance(record, Unusable) else parse(record, settings, kind)


def parse(record: dict[str, Any], settings: Data, kind: Kind) -> Record | Unusable:
    """The record's form, or why it has none."""
    try:
        return records.parse(record, settings, kind)
    except Unusable as why:
        return why


def tokenised(
    source: Iterable[tuple[str, Record | Unusable]], settings: Data, encoder: Encoder | None, vocab_size: int | None
) -> Iterator[tuple[str, Record | Unusable, tuple[Pieces, bool] | Unusable]]:
    """Place, record, and its ids with whether they were cut; or why there are none. Some thousand records at a time.

    Raises UserError for text without a tokenizer.
    """
    iterator = iter(source)
    while chunk := list(islice(iterator, CHUNK_RECORDS)):
        encoded = _encode([record for _, record in chunk], encoder, chunk[0][0].rpartition(":")[0])
        for (place, record), ids in zip(chunk, encoded, strict=True):
            try:
                yield place, record, _finish(ids, settings, encoder, vocab_size)
            except Unusable as why:
                yield place, record, why


Ids = tuple[list[int], list[list[int]]]
"""Token ids of a prompt, and of its completions."""


def _encode(
    parsed: Sequence[Tokens | Plain | Chat | Unusable], encoder: Encoder | None, path: str
) -> list[Ids | Unusable]:
    """Token ids for each record; what is text goes through the tokenizer in one batch."""
    texts = [record for record in parsed if isinstance(record, Plain | Chat)]
    if texts and encoder is None:
        raise UserError(
            f"{path}: its records are text, and the model has no tokenizer; add one to the model's folder, "
            "or give token ids (prompt_ids, chosen_ids, rejected_ids)"
        )
    encoded = iter(encoder.encode(texts) if encoder else ())
    result: list[Ids | Unusable] = []
    for record in parsed:
        if isinstance(record, Tokens):
            result.append((record.prompt, list(record.completions)))
        else:
            result.append(record if isinstance(record, Unusable) else next(encoded))
    return result


def _finish(
    ids: Ids | Unusable, settings: Data, encoder: Encoder | None, vocab_size: int | None
) -> tuple[Pieces, bool]:
    """Check and truncate one example: ([prompt, completion, ...] int32, was it cut). Raises Unusable."""
    if isinstance(ids, Unusable):
        raise ids
    prompt, completions = ids
    max_length, whole = settings.max_length, len(prompt) + max(map(len, completions))
    if whole < settings.shortest or whole > (settings.longest or whole):
        raise Unwanted(f"{whole} tokens: data.shortest={settings.shortest}, data.longest={settings.longest}")
    limit = min(vocab_size or 2**31, 2**31)
    largest = max(map(max, filter(None, (prompt, *completions))), default=0)
    if largest >= limit:
        raise Unusable(f"token id {largest} is not below the vocabulary's size, {limit}")
    if not all(completions):
        raise Unusable("empty completion: the tokenizer makes no tokens of it")
    if len(prompt) > max_length:
        raise Unusable(f"the prompt alone has {len(prompt)} tokens, more than data.max_length={max_length}; raise it")
    if len(completions) > 1 and completions[0] == completions[1]:
        raise Unusable("chosen and rejected are the same tokens: nothing to prefer")
    bos_token_id = encoder.bos_token_id if encoder else None
    prompt, cut, is_cut = truncate(prompt, completions, max_length, bos_token_id)
    if len(cut) > 1 and cut[0] == cut[1]:
        raise Unusable(f"chosen and rejected are equal once cut to data.max_length={max_length}; raise it")
    if not prompt and min(map(len, cut)) < 2:  # a mean over no tokens would make the whole step NaN
        raise Unusable("one token and no prompt: nothing comes before it to predict it from")
    return [np.asarray(piece, np.int32) for piece in (prompt, *cut)], is_cut


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut).

    The prompt gives way first, from its beginning (what was asked last stands at its end), except for a
    leading BOS, without which many models derail. A quarter of max_length is kept for it: a completion longer
    than the rest is cut at its end, and then has no end token, because it does not end there. All completions
    of an example share one prompt.
    """
    longest = max(map(len, completions))
    if len(prompt) + longest <= max_length:
        return prompt, completions, False
    kept = max(max_length - longest, min(len(prompt), max(1, max_length // 4)))
    if kept < len(prompt):
        has_bos = prompt[0] == bos_token_id
        prompt = prompt[:has_bos] + prompt[len(prompt) - kept + has_bos :]
    return prompt, [completion[: max_length - kept] for completion in completions], True


def encode_prompt(prompt: str | list[Message], settings: Data, tokenizer: Any, eos_token_id: int | None) -> list[int]:
    """Token ids of a prompt alone, exactly as the training data's prompts are encoded.

    Raises UserError where the chat template refuses it.
    """
    encoder = Encoder(tokenizer, settings.chat_template, eos_token_id)
    answer: Any = "a" if isinstance(prompt, str) else {"role": "assistant", "content": "a"}
    record = Plain(prompt, (answer,), "") if isinstance(prompt, str) else Chat(prompt, (answer,), "")
    (encoded,) = encoder.encode([record])
    if isinstance(encoded, Unusable):
        raise UserError(f"prompt {str(prompt)[:60]!r}: {encoded}")
    return encoded[0]


class Encoder:
    """Prompts and completions ➜ token ids, through the tokenizer's chat template where there is one.

    tokenizer: a transformers tokenizer, or mlx-lm's TokenizerWrapper around one.
    """

    def __init__(self, tokenizer: Any, use_chat_template: bool, eos_token_id: int | None) -> None:
        self.tokenizer = tokenizer
        # mlx-lm's wrapper passes attributes on, but cannot be called; the tokenizer inside it can.
        self._batch = tokenizer if callable(tokenizer) else getattr(tokenizer, "_tokenizer", None)
        has_template = getattr(tokenizer, "chat_template", None) is not None
        has_template = getattr(tokenizer, "has_chat_template", has_template)
        self.use_chat_template = use_chat_template and has_template
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        end_id = eos_token_id if eos_token_id is not None else getattr(tokenizer, "eos_token_id", None)
        if end_id is None:
            raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self._eos_token_id: int = end_id
        end_ids = getattr(tokenizer, "eos_token_ids", None)
        self._end_ids = {end_id, *(end_ids if isinstance(end_ids, set) else ())}
        # The token that ends a turn in the template may be another special token than the model's end token.
        added = getattr(tokenizer, "added_tokens_decoder", {}).items()
        special = {token.content for index, token in added if token.special or index in self._end_ids}
        self._end_texts = tuple(special | {tokenizer.decode([index]) for index in self._end_ids} - {""})
        self._opening = self._find_opening()
        self._anchor = self._find_anchor()

    def fingerprint(self) -> str:
        """Equal for tokenizers that make the same tokens of the same text, as far as they tell."""
        inner = getattr(self._batch, "backend_tokenizer", None)
        told = "" if inner is None else inner.to_str()
        template = str(getattr(self.tokenizer, "chat_template", None)) if self.use_chat_template else ""
        made = [self._tokenise([SPECIMEN])[0], self._opening, self._eos_token_id, sorted(self._end_ids)]
        return hashlib.sha256(f"{told} {template} {made}".encode()).hexdigest()

    def encode(self, examples: Sequence[Plain | Chat]) -> list[Ids | Unusable]:
        """Ids of each example's prompt and of its completions, end token included; or why there are none."""
        chosen_form = [self._choose_form(example) for example in examples]
        rendered = self._render([example for example in chosen_form if isinstance(example, Chat)])
        plain = [next(rendered) if isinstance(example, Chat) else example for example in chosen_form]
        usable = [example for example in plain if isinstance(example, Plain)]
        prompts = iter(self._tokenise([example.prompt or "" for example in usable]))
        completions = iter(self._continue([text for example in usable for text in example.completions]))
        result: list[Ids | Unusable] = []
        for example, form in zip(plain, chosen_form, strict=True):
            if isinstance(example, Unusable):
                result.append(example)
                continue
            prompt = next(prompts)
            # A template writes BOS itself where the model wants one; no text gets it twice.
            if isinstance(form, Plain) and prompt[: len(self._opening)] != self._opening:
                prompt = self._opening + prompt
            ended = [self._end(next(completions), text) for text in example.completions]
            result.append((prompt, ended))
        return result

    def _choose_form(self, example: Plain | Chat) -> Plain | Chat | Unusable:
        """Chat where there is a template, and a prompt to put into it; plain otherwise."""
        if isinstance(example, Plain):
            if example.prompt is None or not self.use_chat_template:
                return example
            answers = tuple({"role": "assistant", "content": text} for text in example.completions)
            return Chat([{"role": "user", "content": example.prompt}], answers, example.columns)
        if self.use_chat_template:
            return example
        content = example.prompt[0]["content"]
        if len(example.prompt) > 1 or not isinstance(content, str):
            return Unusable(
                f"a conversation of {len(example.prompt) + 1} messages needs a chat template, and the "
                "tokenizer has none or data.chat_template is false"
            )
        return Plain(content, tuple(answer["content"] for answer in example.completions), example.columns)

    def _render(self, chats: Sequence[Chat]) -> Iterator[Plain | Unusable]:
        """The prompt as the model is given it, and what the template makes of each answer.

        The answer is what the rendering of the whole conversation adds to that of the prompt, up to its end
        token.
        """
        prompts = self._apply_template([chat.prompt for chat in chats], add_generation_prompt=True)
        conversations = [[*chat.prompt, answer] for chat in chats for answer in chat.completions]
        wholes = iter(self._apply_template(conversations, add_generation_prompt=False))
        for chat, prompt in zip(chats, prompts, strict=True):
            answers = list(islice(wholes, len(chat.completions)))
            failure = next((text for text in (prompt, *answers) if isinstance(text, Unusable)), None)
            if failure is not None:
                yield failure
                continue
            if not all(whole.startswith(prompt) for whole in answers):
                yield Unusable(
                    "the chat template does not begin the conversation with the prompt that it gives the "
                    "model; set data.chat_template=false"
                )
                continue
            yield Plain(prompt, tuple(self._strip_after_end(whole[len(prompt) :]) for whole in answers), chat.columns)

    def _apply_template(self, conversations: list[list[Message]], add_generation_prompt: bool) -> list[Any]:
        """Text of each conversation, or Unusable."""
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        if "date_string" in str(getattr(self.tokenizer, "chat_template", None)):
            # Llama's templates print the day's date otherwise: tomorrow's tokens, digest and log-probs would
            # differ.
            options["date_string"] = "26 Jul 2024"
        try:
            texts = self.tokenizer.apply_chat_template(conversations, **options)
            if isinstance(texts, list) and len(texts) == len(conversations):
                return texts
        except Exception:  # One conversation that the template refuses: find it below.
            pass
        return [self._apply_template_once(conversation, options) for conversation in conversations]

    def _apply_template_once(self, conversation: list[Message], options: dict[str, Any]) -> Any:
        try:
            return self.tokenizer.apply_chat_template(conversation, **options)
        except Exception as error:  # A template raises whatever its author chose.
            return Unusable(f"the chat template refuses the conversation: {' '.join(str(error).split())}")

    def _strip_after_end(self, answer: str) -> str:
        """Without the white space that a template writes after the end token; the model stops before it."""
        stripped = answer.rstrip()
        return stripped if stripped.endswith(self._end_texts) else answer

    def _end(self, ids: list[int], text: str) -> list[int]:
        """With the end token, unless the template or the record has ended the completion already."""
        if not ids or ids[-1] in self._end_ids or (self.use_chat_template and text.endswith(self._end_texts)):
            return ids
        return [*ids, self._eos_token_id]

    def _tokenise(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text, without the special tokens that open or close one."""
        if not texts:
            return []
        if self._batch is not None and getattr(self._batch, "is_fast", False):
            options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            return self._batch(texts, **options)["input_ids"]
        return [list(self.tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def _continue(self, texts: list[str]) -> list[list[int]]:
        """Ids of each text as the continuation of another."""
        anchor_ids, anchor = self._anchor
        if not anchor:
            return self._tokenise(texts)
        anchored = self._tokenise([anchor + text for text in texts])
        assert all(ids[: len(anchor_ids)] == anchor_ids for ids in anchored)
        return [ids[len(anchor_ids) :] for ids in anchored]

    def _find_opening(self) -> list[int]:
        """The special tokens that the tokenizer puts before a text (BOS, mostly)."""
        with_special = list(self.tokenizer.encode("a"))
        plain = self._tokenise(["a"])[0]
        if not plain:
            return with_special[:1] if with_special[:1] == [self.bos_token_id] else []
        starts = range(len(with_special) - len(plain) + 1)
        return with_special[: next((i for i in starts if with_special[i : i + len(plain)] == plain), 0)]

    def _find_anchor(self) -> tuple[list[int], str]:
        """A text to put before a continuation, and its ids, for tokenizers that open every text with a space.

        SentencePiece in Llama 2's style turns both "a" and the "a" in " a" into "▁a": tokenised apart, a
        completion would begin with a space that it does not have. After a line break, which nothing merges
        with there, it does not.
        """
        anchor, letter, both = self._tokenise(["\n", "a", "\na"])
        is_needed = anchor + letter != both and both[: len(anchor)] == anchor and len(anchor) > 0
        return (anchor, "\n") if is_needed else ([], "")


@dataclass(frozen=True, eq=False)
class Batch:
    """Examples of K completions as one stream of N tokens, each computed once: b rows, of which the last may be padding.

    The stream begins with the first P tokens of every prompt, b * P of them, row by row. What follows is
    either dense, the other T tokens of each of the b * K sequences (a prompt's end once for each completion),
    or ragged: what is left of a prompt, then its completions, without padding between them; `slots` then tells
    where each sequence's tokens are. Without shared prompts P is 0 and the stream is dense: whole rows of T
    tokens, one after the other. Sequences come without their last token, which nothing is predicted from.
    """

    rows: np.ndarray
    """int64: the examples' rows in the data set, one for each row that is not padding."""
    prefix_length: int
    """P."""
    tokens: np.ndarray
    """int32 [N]."""
    offsets: np.ndarray
    """int32 [N]: each token's position in its sequence; 0 for padding."""
    slots: np.ndarray | None
    """int32 [b, K, T]: where a sequence's tokens from P on are, counted behind the prefixes; -1 past its end."""
    sources: np.ndarray | None
    """int32 [N - b * P, 1 or K]: the inverse, where in b * K * T a token is used; -1 for nowhere."""
    scored: np.ndarray
    """int32 [M]: where in the stream the scored tokens are predicted; 0 for padding."""
    targets: np.ndarray
    """int32 [M]: the tokens that are scored; 0 for padding."""
    places: np.ndarray
    """int32 [b, K, C]: where in M a completion's scored tokens are; 0 where masked."""
    mask: np.ndarray
    """bool [b, K, C]: true where `places` means a token."""
    completion_tokens: int
    """Tokens scored."""
    computed_tokens: int
    """Positions that the model runs over, N."""
    real_tokens: int
    """The fewest that would do: every prompt once, every completion without its last token."""

    @property
    def inputs(self) -> dict[str, Any]:
        """What the model needs of it; absent entries left out."""
        names = (
            "prefix_length",
            "tokens",
            "offsets",
            "slots",
            "sources",
            "scored",
            "targets",
            "places",
            "mask",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def padded(self, figures: np.ndarray) -> np.ndarray:
        """Figures of the examples, [examples, ...], with zeros for rows of padding: [b, ...]."""
        whole = np.zeros((len(self.mask), *figures.shape[1:]), figures.dtype)
        whole[: len(figures)] = figures
        return whole

    @property
    def shapes(self) -> tuple[Any, ...]:
        """Equal for batches that a compiled step needs no new trace for."""
        return (
            self.prefix_length,
            *(value.shape for value in self.inputs.values() if isinstance(value, np.ndarray)),
            len(self.inputs),
        )


def collate(
    examples: Sequence[Example], length_multiple: int, shared_prompts: bool, shapes: Sequence[Shape] = ()
) -> Batch:
    """One micro-batch, padded to the first of `shapes` that holds it; to one of its own, where none does.

    Padding stands on the right, where a causal model's real positions do not see it; rows of padding come last
    and have no scored token. The first completion token of an empty prompt has no position before it: it is not
    scored.
    """
    assert examples, "a rank without rows has no batch"
    sequences = [(e.prompt_ids, completion) for e in examples for completion in e.completions]
    count = len(examples[0].completions)
    seen = np.array([len(prompt) + len(completion) - 1 for prompt, completion in sequences])
    prompts = np.array([len(e.prompt_ids) for e in examples])
    counts = np.array([len(completion) - (not len(prompt)) for prompt, completion in sequences])  # scored
    need = need_of(prompts, seen.reshape(-1, count), counts.reshape(-1, count))
    shape = first_that_holds(shapes, need) or shape_of(need[None], count, length_multiple, shared_prompts)
    rows, prefix, length, behind = shape.rows, shape.prefix, shape.length, shape.behind

    tails = np.maximum(seen - prefix, 0)
    inside = np.arange(length) < tails[:, None]
    shared_tails = np.repeat(prompts - prefix, count)  # tokens behind the prefix that the completions share
    if shape.is_dense:
        slots = np.arange(len(sequences) * length).reshape(-1, length)
    else:
        first = np.arange(len(sequences)) % count == 0
        own = tails - shared_tails  # tokens of a completion alone
        starts = np.cumsum(own + first * shared_tails) - own  # of these, in the stream
        ends_of_prompts = np.repeat(starts[::count], count)
        at = np.arange(length)
        slots = (
            np.where(
                at < shared_tails[:, None],
                ends_of_prompts[:, None] - shared_tails[:, None],
                starts[:, None] - shared_tails[:, None],
            )
            + at
        )
    tokens = np.zeros(rows * prefix + behind, np.int32)
    offsets = np.zeros_like(tokens)
    head = tokens[: rows * prefix].reshape(rows, prefix)
    for row, e in enumerate(examples):
        head[row] = e.prompt_ids[:prefix]
    offsets[: len(examples) * prefix] = np.tile(np.arange(prefix), len(examples))
    for index, (prompt, completion) in enumerate(sequences):
        where = rows * prefix + slots[index, : tails[index]]
        tokens[where] = np.concatenate([prompt[prefix:], completion[:-1]])
        offsets[where] = np.arange(prefix, seen[index])

    scored, targets = np.zeros((2, shape.scored), np.int32)
    mask = np.arange(shape.width) < counts[:, None]
    places = np.where(mask, (np.cumsum(counts) - counts)[:, None] + np.arange(shape.width), 0)
    for index, (_, completion) in enumerate(sequences):
        positions = np.arange(seen[index] - counts[index], seen[index])
        behind_prefix = rows * prefix + slots[index, np.maximum(positions - prefix, 0)]
        where = places[index, : counts[index]]
        scored[where] = np.where(positions < prefix, index // count * prefix + positions, behind_prefix)
        targets[where] = completion[len(completion) - counts[index] :]

    def with_padding(array: np.ndarray, filler: int) -> np.ndarray:
        """[sequences, ...] ➜ [b, K, ...], rows of padding at the end."""
        whole = np.full((rows * count, *array.shape[1:]), filler, array.dtype)
        whole[: len(array)] = array
        return whole.reshape(rows, count, -1)

    sources = None
    if not shape.is_dense:
        slots = with_padding(np.where(inside, slots, -1), -1)
        sources = _invert(slots, behind, shape.uses)
    return Batch(
        rows=np.array([e.row for e in examples], np.int64),
        prefix_length=prefix,
        tokens=tokens,
        offsets=offsets,
        slots=None if shape.is_dense else slots.astype(np.int32),
        sources=sources,
        scored=scored,
        targets=targets,
        places=with_padding(places, 0).astype(np.int32),
        mask=with_padding(mask, False),
        completion_tokens=int(counts.sum()),
        computed_tokens=len(tokens),
        real_tokens=int(need["tokens"]),
    )


def _invert(slots: np.ndarray, size: int, uses: int) -> np.ndarray:
    """For each of `size` tokens the places in `slots` [b, K, T] that use it, in order: int32 [size, uses]."""
    sources = np.full((size, uses), -1, np.int32)
    flat = np.arange(slots.size).reshape(slots.shape)
    for k in reversed(range(slots.shape[1])):
        inside = slots[:, k] >= 0
        used = slots[:, k][inside]
        if uses > 1:
            sources[used, 1:] = sources[used, :-1]
        sources[used, 0] = flat[:, k][inside]
    return sources


def tokens_to_deal(
    dataset: Sized, length_multiple: int, shared_prompts: bool
) -> tuple[np.ndarray, Callable[[np.ndarray], float]]:
    """What `deal` needs: each row's length, int [n], and what a micro-batch of given rows costs, in tokens."""
    prompts, seen, scored = dataset.prompts, dataset.seen, dataset.scored_tokens
    lengths = real_tokens(prompts, seen) if shared_prompts else seen.max(axis=1)

    def cost(rows: np.ndarray) -> float:
        need = need_of(prompts[rows], seen[rows], scored[rows])
        return shape_of(need[None], seen.shape[1], length_multiple, shared_prompts).cost

    return lengths, cost


def prefetch(iterable: Iterable[T], depth: int) -> Generator[T, None, None]:
    """The items of `iterable`, up to `depth` of them made ahead in one thread.

    Its exceptions are raised here, in place. The thread ends with the last item, when this generator is
    closed, and with the program; it is never waited for longer than one item takes.
    """
    iterator, end = iter(iterable), object()
    pool = ThreadPoolExecutor(1, thread_name_prefix="prefetch")
    try:
        pending = deque(pool.submit(next, iterator, end) for _ in range(max(depth, 1)))
        while (item := pending.popleft().result()) is not end:
            pending.append(pool.submit(next, iterator, end))
            yield item  # type: ignore[misc]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


if __name__ == "__main__":
    import sys

    from lib.inspection import main

    sys.exit(main())
