"""Prompts and completions ➜ token ids, through the chat template where there is one."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NotRequired, Protocol, TypedDict

from lib.config.schema import DataSettings
from lib.data.record_formats import Chat, Message, Plain, Tokens, Unusable
from lib.errors import UserError

# Of a tokenizer that cannot be written down, this text's tokens have to do.
SPECIMEN = "The quick brown fox jumps over 13 lazy dogs. Ünïcödé, 漢字, кириллица;\n\tdef f(x): return x ** 2  # 🦊"


Ids = tuple[list[int], list[list[int]]]
"""Token ids of a prompt, and of each completion."""


class Vocabulary(TypedDict):
    """The ids that a model knows."""

    eos_token_id: int | None
    vocab_size: NotRequired[int | None]
    """None: any id is taken."""


class Tokenizer(Protocol):
    """What is needed of a transformers tokenizer, or of mlx-lm's TokenizerWrapper around one."""

    @property
    def eos_token_ids(self) -> Collection[int]:
        """mlx-lm's wrapper alone has them: greedy answers end there."""

    def encode(self, text: str, **options: Any) -> list[int]: ...
    def decode(self, ids: list[int]) -> str: ...
    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...


def encode_records(
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


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut).

    The prompt is cut first, at its beginning (the last question is at its end), except for a leading BOS, without
    which many models fail. A quarter of max_length is kept for it: a completion longer
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


def encode_prompt(
    prompt: str | list[Message], settings: DataSettings, tokenizer: Tokenizer, eos_token_id: int | None
) -> list[int]:
    """Token ids of a prompt alone, exactly as the training data's prompts are encoded.

    Raises UserError where the chat template refuses it.
    """
    encoder = Encoder(tokenizer, settings.chat_template, eos_token_id)
    record = (
        Plain(prompt, ("a",), "")
        if isinstance(prompt, str)
        else Chat(prompt, ([Message(role="assistant", content="a")],), "")
    )
    (encoded,) = encoder.encode([record])
    if isinstance(encoded, Unusable):
        raise UserError(f"prompt {str(prompt)[:60]!r}: {encoded}")
    return encoded[0]


class Encoder:
    """Prompts and completions ➜ token ids, through the tokenizer's chat template where there is one."""

    def __init__(self, tokenizer: Tokenizer, use_chat_template: bool, eos_token_id: int | None) -> None:
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
        """A digest, equal for tokenizers that make the same tokens of the same text, as far as that can be known."""
        inner = getattr(self._batch, "backend_tokenizer", None)
        stored = "" if inner is None else inner.to_str()
        template = str(getattr(self.tokenizer, "chat_template", None)) if self.use_chat_template else ""
        made = [self._tokenise([SPECIMEN])[0], self._opening, self._eos_token_id, sorted(self._end_ids)]
        return hashlib.sha256(f"{stored} {template} {made}".encode()).hexdigest()

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
            answers = tuple([Message(role="assistant", content=text)] for text in example.completions)
            return Chat([{"role": "user", "content": example.prompt}], answers, example.columns)
        if self.use_chat_template:
            return example
        content = example.prompt[0]["content"]
        if len(example.prompt) > 1 or not isinstance(content, str):
            return Unusable(
                f"a conversation of {len(example.prompt) + 1} messages needs a chat template, and the "
                "tokenizer has none or data.chat_template is false"
            )
        return Plain(content, tuple(answer["content"] for (answer,) in example.completions), example.columns)

    def _render(self, chats: Sequence[Chat]) -> Iterator[Plain | Unusable]:
        """The prompt as the model is given it, and what the template makes of each answer.

        The answer is what the rendering of the whole conversation adds to that of the prompt, up to its end
        token.
        """
        prompts = self._apply_template([chat.prompt for chat in chats], add_generation_prompt=True)
        conversations = [[*chat.prompt, *answer] for chat in chats for answer in chat.completions]
        wholes = iter(self._apply_template(conversations, add_generation_prompt=False))
        for chat, prompt in zip(chats, prompts, strict=True):
            rendered = [prompt, *islice(wholes, len(chat.completions))]
            if unusable := [text for text in rendered if isinstance(text, Unusable)]:
                yield unusable[0]
                continue
            start, *texts = (text for text in rendered if isinstance(text, str))
            if not all(whole.startswith(start) for whole in texts):
                yield Unusable(
                    "the chat template does not begin the conversation with the prompt that it gives the "
                    "model; set data.chat_template=false"
                )
                continue
            yield Plain(start, tuple(self._strip_after_end(whole[len(start) :]) for whole in texts), chat.columns)

    def _apply_template(self, conversations: list[list[Message]], add_generation_prompt: bool) -> list[str | Unusable]:
        """Text of each conversation, or Unusable."""
        options: dict[str, object] = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
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

    def _apply_template_once(self, conversation: list[Message], options: dict[str, object]) -> str | Unusable:
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
