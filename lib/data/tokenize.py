"""Prompts and completions ➜ token ids, through the chat template where there is one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NotRequired, TypedDict

from lib.config.schema import DataSettings
from lib.data.chat_template import ChatTemplate
from lib.data.chat_tokens import ChatTokens, Encoded, ended
from lib.data.model_limits import ModelLimits
from lib.data.record_formats import Chat, Message, Plain, Tokens, Unusable
from lib.data.text_tokens import SPECIMEN, TextTokens, Tokenizer
from lib.data.truncate import most_of_prompt, shortened
from lib.errors import UserError

TOKENS_VERSION = 2  # of what is made of a record: tokens that another version has kept are made again


class Vocabulary(TypedDict):
    """What a model knows of ids and positions."""

    eos_token_id: int | None
    vocab_size: NotRequired[int | None]
    """None: any id is taken."""
    positions: NotRequired[int | None]
    """Of a table of learned positions; None: there is none, and a row may have any length."""


def limits_of(vocabulary: Vocabulary) -> ModelLimits:
    """What ids and lengths are checked by."""
    return ModelLimits(vocabulary.get("vocab_size"), vocabulary.get("positions"))


def encode_records(
    parsed: Sequence[Tokens | Plain | Chat | Unusable], encoder: Encoder | None, path: str
) -> list[Encoded | Unusable]:
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
            learnt = None if record.learnt is None or all(record.learnt) else [record.learnt]
            result.append(Encoded(record.prompt, list(record.completions), learnt))
        else:
            result.append(record if isinstance(record, Unusable) else next(encoded))
    return result


class Encoder:
    """Prompts and completions ➜ token ids, through the tokenizer's chat template where there is one.

    Args:
        settings: data.chat_template and what it is given.
        eos_token_id: ends a completion that its template has not ended; by default the tokenizer's.

    Raises:
        UserError: there is no end token, or data.chat_template cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, settings: DataSettings, eos_token_id: int | None) -> None:
        self.tokenizer = tokenizer
        self.tokens = TextTokens(tokenizer)
        self.template = ChatTemplate(tokenizer, settings)
        self.bos_token_id: int | None = getattr(tokenizer, "bos_token_id", None)
        end_id = eos_token_id if eos_token_id is not None else getattr(tokenizer, "eos_token_id", None)
        if end_id is None:
            raise UserError("the tokenizer has no end token; set eos_token in its tokenizer_config.json")
        self._eos_token_id: int = end_id
        end_ids = getattr(tokenizer, "eos_token_ids", None)
        known = {end_id, *(end_ids if isinstance(end_ids, set) else ())}
        known |= {own for own in [getattr(tokenizer, "eos_token_id", None)] if own is not None}
        self.chats = ChatTokens(self.template, self.tokens, known, end_id) if self.template.is_used else None
        self._known_ends = known

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
        """Token ids of a prompt alone, exactly as the training data's prompts are encoded.

        Raises:
            UserError: the chat template refuses it.
        """
        (encoded,) = self.encode([Plain(prompt, (), "") if isinstance(prompt, str) else Chat(prompt, (), "")])
        if isinstance(encoded, Unusable):
            raise UserError(f"prompt {str(prompt)[:60]!r}: {encoded}")
        return encoded.prompt

    def encode(self, examples: Sequence[Plain | Chat]) -> list[Encoded | Unusable]:
        """Ids of each example's prompt and of its completions, end token included; or why there are none."""
        forms = [self._choose_form(example) for example in examples]
        chats = [form for form in forms if isinstance(form, Chat)]
        plain = [form for form in forms if isinstance(form, Plain)]
        of_chats = iter(self.chats.encode(chats) if self.chats else ())
        of_plain = iter(self._encode_plain(plain))
        return [
            form if isinstance(form, Unusable) else next(of_chats) if isinstance(form, Chat) else next(of_plain)
            for form in forms
        ]

    def shorten(self, example: Plain | Chat, encoded: Encoded, max_length: int) -> Encoded:
        """A chat that is too long, without its middle messages (lib/data/truncate.py); other text as it was.

        Raises:
            Unusable: what cannot be cut of its prompt leaves too little for an answer.
        """
        chat = self._choose_form(example)
        if not isinstance(chat, Chat) or not encoded.completions:
            return encoded
        longest = max(map(len, encoded.completions))

        def size(other: Chat) -> int:
            return len(encoded.prompt if other is chat else self._prompt_of(other) or encoded.prompt)

        shorter = shortened(chat, size, longest, max_length)
        again = encoded
        if shorter is not None and shorter is not chat:
            (made,) = self.encode([shorter])
            again = encoded if isinstance(made, Unusable) else made
        tokens, most = len(again.prompt), most_of_prompt(longest, max_length)
        if tokens > most:
            raise Unusable(
                f"the prompt alone has {tokens} tokens, and what is not cut of it (system prompt, tools) leaves less "
                f"than {max_length - most} of data.max_length={max_length} for the answer; raise it"
            )
        return _without_ends(again, max_length - tokens)

    def _prompt_of(self, chat: Chat) -> list[int] | None:
        """Ids of the prompt alone, with the arguments that its answers call for."""
        (made,) = self.template.render([chat])
        return None if isinstance(made, Unusable) else self.tokens.ids([made.prompt])[0]

    def _choose_form(self, example: Plain | Chat) -> Plain | Chat | Unusable:
        """Chat where there is a template, and a prompt to put into it; plain otherwise."""
        if isinstance(example, Plain):
            if example.prompt is None or not self.template.is_used:
                return example
            answers = tuple([Message(role="assistant", content=text)] for text in example.completions)
            return Chat([{"role": "user", "content": example.prompt}], answers, example.columns)
        if self.template.is_used:
            return example
        count = len(example.prompt) + max(map(len, example.completions), default=1)
        messages = [*example.prompt, *(message for answer in example.completions for message in answer)]
        has_text = all(isinstance(message.get("content"), str) for message in messages)
        if count != 2 or not example.prompt or not has_text or example.tools:
            what = "a chat with tools" if example.tools or not has_text else f"a conversation of {count} messages"
            return Unusable(f"{what} needs a chat template, and the tokenizer has none or data.chat_template is false")
        content = example.prompt[0]["content"]
        return Plain(content, tuple(answer["content"] for (answer,) in example.completions), example.columns)

    def _encode_plain(self, examples: Sequence[Plain]) -> list[Encoded]:
        """Text as it is: the prompt alone, as inference sends it, and each completion as its continuation."""
        prompts = self.tokens.ids([example.prompt or "" for example in examples])
        continued = iter(self.tokens.continued([text for example in examples for text in example.completions]))
        result = []
        for example, prompt in zip(examples, prompts, strict=True):
            completions = [next(continued) for _ in example.completions]
            # No text gets BOS twice, wherever it was written.
            if not prompt:
                completions = [*map(self._without_opening, completions)]
            if prompt[: len(self.tokens.opening)] != self.tokens.opening:
                prompt = self.tokens.opening + prompt
            result.append(Encoded(prompt, [*map(self._end, completions)]))
        return result

    def _without_opening(self, ids: list[int]) -> list[int]:
        """A text without BOS, which was rendered with one and gets its own."""
        opening = self.tokens.opening
        return ids[len(opening) :] if ids[: len(opening)] == opening else ids

    def _end(self, ids: list[int]) -> list[int]:
        """With the end token, unless the record has ended the completion already, with a line break behind it or not.

        A text that is nothing stays so: it is refused.
        """
        return ended(ids, self.end_ids, self.tokens, self._eos_token_id) if ids else ids


def _without_ends(encoded: Encoded, room: int) -> Encoded:
    """With completions of at most so many tokens."""
    learnt = None if encoded.learnt is None else [mask[:room] for mask in encoded.learnt]
    return Encoded(encoded.prompt, [ids[:room] for ids in encoded.completions], learnt)
