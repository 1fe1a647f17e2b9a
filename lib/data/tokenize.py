"""Prompts and completions ➜ token ids, through the chat template where there is one; and cut to data.max_length."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from lib.config.settings import DataSettings
from lib.data.chat import ChatTemplate, ChatTokens, Encoded, ended
from lib.data.record_formats import JSON, Chat, Message, Plain, Record, Tokens, Unusable, check_messages, check_tools
from lib.data.tokenizer import SPECIMEN, TextTokens, Tokenizer
from lib.errors import UserError

# ---- What is too long

LEAST_REST = 8  # a chat's answer keeps an eighth of max_length, or all of it where it is shorter


def _prompt_room(prompt: int, longest: int, max_length: int) -> int:
    """Tokens that a prompt of so many may keep beside the longest completion: at least a quarter of max_length."""
    return max(max_length - longest, min(prompt, max(1, max_length // 4)))


def truncate(
    prompt: list[int], completions: list[list[int]], max_length: int, bos_token_id: int | None
) -> tuple[list[int], list[list[int]], bool]:
    """Fit prompt + each completion into max_length tokens: (prompt, completions, whether anything was cut).

    The prompt is cut at its beginning, except for a leading BOS; a quarter of max_length is kept for it. A completion
    longer than the rest is cut at its end, and has no end token. All completions share one prompt.
    """
    longest = max(map(len, completions))
    if len(prompt) + longest <= max_length:
        return prompt, completions, False
    kept = _prompt_room(len(prompt), longest, max_length)
    if kept < len(prompt):
        has_bos = prompt[0] == bos_token_id
        prompt = prompt[:has_bos] + prompt[len(prompt) - kept + has_bos :]
    return prompt, [completion[: max_length - kept] for completion in completions], True


def _most_of_prompt(longest: int, max_length: int) -> int:
    """Tokens that a chat's prompt may have at most, so that its answer is not cut to nothing."""
    return max_length - min(longest, max(1, max_length // LEAST_REST))


def _shortened(chat: Chat, size: Callable[[Chat], int], longest: int, max_length: int) -> Chat:
    """The chat without the oldest exchanges, then without the beginning of its last question, as far as needed.

    size: tokens of a chat's prompt. longest: tokens of the longest completion.
    """
    asked = [index for index, message in enumerate(chat.prompt) if message["role"] == "user"]
    opening = [m for m in chat.prompt[: (asked or [0])[0]] if m["role"] in ("system", "developer")]
    without = [replace(chat, prompt=[*opening, *chat.prompt[start:]]) for start in asked[1:]]
    last = [chat, *without][-1]
    at = max((i for i, message in enumerate(last.prompt) if message["role"] == "user"), default=-1)
    text = last.prompt[at]["content"] if asked else None
    question = text if isinstance(text, str) else ""
    words = [i for i in range(1, len(question)) if question[i - 1].isspace() and not question[i].isspace()]
    starts = words or list(range(1, len(question)))  # some languages write without spaces

    def cut(number: int) -> Chat:
        shorter: Message = {**last.prompt[at], "content": question[starts[number] :]}
        return replace(last, prompt=[*last.prompt[:at], shorter, *last.prompt[at + 1 :]])

    def first_that_fits(count: int, form: Callable[[int], Chat], room: int) -> Chat | None:
        number = bisect_left(range(count), True, key=lambda number: size(form(number)) <= room)
        return form(number) if number < count else None

    most, exchanges = _most_of_prompt(longest, max_length), [chat, *without]
    if any(len(answer) > 1 for answer in chat.completions):
        shorter = first_that_fits(len(without), without.__getitem__, max_length - longest)
        shorter = shorter or first_that_fits(len(exchanges), exchanges.__getitem__, most)
    else:
        room = _prompt_room(size(chat), longest, max_length)
        shorter = first_that_fits(len(exchanges), exchanges.__getitem__, room)
        shorter = shorter or first_that_fits(len(starts), cut, room)
        shorter = shorter or first_that_fits(1, lambda _: last, most)
    return shorter or first_that_fits(len(starts), cut, most) or last


# ---- Text ➜ ids


def encode_records(parsed: Sequence[Record | Unusable], encoder: Encoder | None, path: str) -> list[Encoded | Unusable]:
    """Token ids for each record; what is text goes through the tokenizer in one batch."""
    texts = [record for record in parsed if isinstance(record, Plain | Chat)]
    if texts and encoder is None:
        raise UserError(
            f"{path}: its records are text, and the model has no tokenizer; add one to the model's folder, "
            "or give token ids (prompt_ids, chosen_ids, rejected_ids)"
        )
    encoded = iter(encoder.encode(texts) if encoder else ())
    result: list[Encoded | Unusable] = []
    for record in parsed:
        if isinstance(record, Tokens):
            learnt = None if record.learnt is None else list(record.learnt)
            result.append(Encoded(record.prompt, list(record.completions), learnt))
        else:
            result.append(record if isinstance(record, Unusable) else next(encoded))
    return result


class Encoder:
    """Prompts and completions ➜ token ids, through the tokenizer's chat template where there is one.

    eos_token_id: ends a completion that its template has not ended; by default the tokenizer's. Raises UserError: there
    is no end token, or data.chat_template cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, eos_token_id: int | None) -> None:
        self.tokenizer, self.tokens = tokenizer, TextTokens(tokenizer)
        self.template = ChatTemplate(tokenizer, settings)
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        of_tokenizer: int | None = getattr(tokenizer, "eos_token_id", None)
        end_id = of_tokenizer if eos_token_id is None else eos_token_id
        if end_id is None:
            raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self._eos_token_id: int = end_id
        end_ids = getattr(tokenizer, "eos_token_ids", None)
        ends = {end_id, of_tokenizer, *(end_ids if isinstance(end_ids, set) else ())}
        self._known_ends: set[int] = {token for token in ends if token is not None}
        self.chats = ChatTokens(self.template, self.tokens, self._known_ends, end_id) if self.template.is_used else None
        self.notes: dict[str, None] = {}  # what was noticed of texts and template, a line each
        marks = [mark for mark in self.template.marks if mark.startswith("<")]
        unknown = [mark for mark, ids in zip(marks, self.tokens.ids(marks), strict=True) if len(ids) > 1]
        if unknown:
            names = ", ".join(sorted(unknown))
            self.notes[
                f"marks of the chat template are no tokens of the tokenizer: {names}; it writes each as several tokens"
            ] = None

    @property
    def end_ids(self) -> set[int]:
        """Tokens at which generation has to stop: those of the model, or the template's end of turn."""
        return self.chats.end_ids if self.chats else self._known_ends

    def fingerprint(self) -> str:
        """A digest, equal for tokenizers that make the same tokens of the same text, as far as that can be known."""
        inner = getattr(self.tokens.inner, "backend_tokenizer", None)
        stored = "" if inner is None else inner.to_str()
        template = self.template.fingerprint() if self.template.is_used else ""
        made = [self.tokens.ids([SPECIMEN])[0], self.tokens.opening, self._eos_token_id, sorted(self.end_ids)]
        return hashlib.sha256(f"{stored} {template} {made}".encode()).hexdigest()

    def stop_generation(self) -> None:
        """Makes mlx-lm's wrapper end answers at the template's end of turn, too."""
        if isinstance(getattr(self.tokenizer, "eos_token_ids", None), set):
            self.tokenizer.eos_token_ids |= self.end_ids  # type: ignore[misc, operator]

    def prompt_ids(self, prompt: str | list[Message]) -> list[int]:
        """Token ids of a prompt alone, as training encodes it. Raises UserError: the chat template refuses it."""
        (encoded,) = self.encode([Plain(prompt, (), "") if isinstance(prompt, str) else Chat(prompt, (), "")])
        if isinstance(encoded, Unusable):
            raise UserError(f"prompt {str(prompt)[:60]!r}: {encoded}")
        return encoded.prompt

    def encode(self, examples: Sequence[Plain | Chat]) -> list[Encoded | Unusable]:
        """Ids of each example's prompt and of its completions, end token included; or why there are none."""
        forms = [self._choose_form(example) for example in examples]
        of_chats = iter(self.chats.encode([form for form in forms if isinstance(form, Chat)]) if self.chats else ())
        of_plain = iter(self._encode_plain([form for form in forms if isinstance(form, Plain)]))
        return [
            form if isinstance(form, Unusable) else next(of_chats if isinstance(form, Chat) else of_plain)
            for form in forms
        ]

    def shorten(self, example: Plain | Chat, encoded: Encoded, max_length: int) -> Encoded:
        """A chat that is too long, without its middle messages; other text as it was. Raises Unusable."""
        chat = self._choose_form(example)
        if not isinstance(chat, Chat) or not encoded.completions:
            return encoded
        longest = max(map(len, encoded.completions))

        def size(other: Chat) -> int:
            try:
                return len(
                    encoded.prompt if other is chat else self.tokens.ids([self.template.render(other).prompt])[0]
                )
            except Unusable:
                return len(encoded.prompt)

        shorter = _shortened(chat, size, longest, max_length)
        if shorter is not chat:
            (made,) = self.encode([shorter])
            encoded = encoded if isinstance(made, Unusable) else made
        tokens, most = len(encoded.prompt), _most_of_prompt(longest, max_length)
        if tokens > most:
            raise Unusable(
                f"the prompt alone has {tokens} tokens, and what is not cut of it (system prompt, tools) leaves less "
                f"than {max_length - most} of data.max_length={max_length} for the answer; raise it"
            )
        room, masks = max_length - tokens, encoded.learnt
        learnt = None if masks is None else [mask[:room] for mask in masks]
        return Encoded(encoded.prompt, [ids[:room] for ids in encoded.completions], learnt)

    def _choose_form(self, example: Plain | Chat) -> Plain | Chat | Unusable:
        """Chat where there is a template, and a prompt to put into it; plain otherwise."""
        prompt, answers, template = example.prompt, example.completions, self.template
        if not template.is_used:
            if isinstance(example, Plain):
                return example
            parts = [example.prompt, *example.completions]
            is_text = all(len(part) == 1 and isinstance(part[0].get("content"), str) for part in parts)
            if template.settings.chat_template is not False or not is_text or example.tools:
                return Unusable(
                    "a chat needs a chat template; give one with data.chat_template=FILE (data.chat_template=false "
                    "takes a question and an answer as plain text)"
                )
            asked, *texts = (part[0]["content"] for part in parts)
            return Plain(asked, tuple(texts), example.columns)
        if isinstance(example, Chat):
            messages = (message for part in (example.prompt, *example.completions) for message in part)
            texts = [message.get("content") or "" for message in messages]
        elif template.is_rendered(str(answers[0] if prompt is None else prompt)):
            self.notes["texts carry the chat template's marks already: taken as they are, not rendered again"] = None
            return example
        else:
            texts = [] if prompt is None else [*map(str, answers)]
        if (bad := next(filter(template.is_rendered, texts), None)) is not None:
            return Unusable(
                f"{bad[:40]!r} carries the chat template's marks already; give the whole prompt so, or no part of it"
            )
        if isinstance(example, Chat) or example.prompt is None:
            return example
        said = tuple([Message(role="assistant", content=text)] for text in example.completions)
        return Chat([{"role": "user", "content": example.prompt}], said, example.columns)

    def _encode_plain(self, examples: Sequence[Plain]) -> list[Encoded]:
        """Text as it is: the prompt alone, as inference sends it, and each completion as its continuation."""
        prompts = self.tokens.ids([example.prompt or "" for example in examples])
        continued = iter(self.tokens.continued([text for example in examples for text in example.completions]))
        result, opening = [], self.tokens.opening
        for example, prompt in zip(examples, prompts, strict=True):
            completions = [next(continued) for _ in example.completions]
            # No text gets BOS twice, wherever it was written.
            if not prompt and opening:
                completions = [c[len(opening) :] if c[: len(opening)] == opening else c for c in completions]
            if prompt[: len(opening)] != opening:
                prompt = opening + prompt
            # A text that is nothing stays so: it is refused.
            ends = [ended(c, self.end_ids, self.tokens, self._eos_token_id) if c else c for c in completions]
            result.append(Encoded(prompt, ends))
        return result


class RenderedPrompt(NamedTuple):
    """A prompt as a model is sent it."""

    text: str
    ids: list[int]


def render_prompt(
    encoder: Encoder, messages: list[Message], tools: list[JSON] | None = None, arguments: JSON | None = None
) -> RenderedPrompt:
    """The prompt of a conversation, rendered by the code that renders training rows: for serving, evaluation, export.

    messages, tools: as OpenAI has them. arguments: further ones of the chat template. Raises UserError: the template
    refuses it or leaves part of it out.
    """
    try:
        checked, known = check_messages(messages, "messages"), check_tools(tools, "tools")
        (encoded,) = encoder.encode([Chat(checked, (), "messages", None, known, arguments or {})])
        if isinstance(encoded, Unusable):
            raise encoded
    except Unusable as why:
        raise UserError(str(why)) from None
    return RenderedPrompt(encoder.tokenizer.decode(encoded.prompt), encoded.prompt)
