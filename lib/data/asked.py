"""What a record asks: the prompt that training reads of it, for a model to answer, and for judges and people to see."""

from __future__ import annotations

from lib.config.schema import DataSettings
from lib.data.column_readers import TEMPLATE_ARGUMENTS
from lib.data.parse_records import parse
from lib.data.record_formats import JSON, Chat, Message, Plain, Tokens, Unusable
from lib.data.stamped_tokens import stamp_of
from lib.data.text_tokens import Tokenizer
from lib.data.tokenize import Encoder, encode_records


def asked_of(record: JSON, data: DataSettings, tokenizer: Tokenizer) -> str | list[Message]:
    """A record's prompt, whatever its format: text, or messages up to the one that is to be answered.

    A text that its template alone makes a message of stays a text. Raises Unusable.
    """
    return shown(parse(record, data, "prompt"), record.get(data.prompt), tokenizer)


def shown(parsed: Tokens | Plain | Chat, stored: object, tokenizer: Tokenizer) -> str | list[Message]:
    """The prompt of a parsed record. stored: what its column has."""
    if isinstance(parsed, Tokens):
        return str(tokenizer.decode(parsed.prompt))
    if isinstance(parsed, Plain):
        return parsed.prompt or ""
    is_text = isinstance(stored, str) and parsed.prompt == [{"role": "user", "content": stored}]
    return str(stored) if is_text else parsed.prompt


def columns_of(record: JSON, data: DataSettings, tokenizer: Tokenizer) -> JSON:
    """The columns of a prompt, under the names that every reader knows: training renders what was answered.

    Raises Unusable.
    """
    parsed = parse(record, data, "prompt")
    columns: JSON = {"prompt": shown(parsed, record.get(data.prompt), tokenizer)}
    if isinstance(parsed, Tokens):
        columns |= {"prompt_ids": parsed.prompt, **stamp_of(tokenizer)}
    if isinstance(parsed, Chat) and parsed.tools:
        columns["tools"] = parsed.tools
    if isinstance(parsed, Chat) and parsed.template_arguments:
        columns[TEMPLATE_ARGUMENTS] = parsed.template_arguments
    return columns


def ids_of(parsed: Tokens | Plain | Chat, encoder: Encoder) -> list[int]:
    """The tokens that a model is sent for a parsed prompt, with its tools and the record's own template arguments.

    Raises Unusable.
    """
    (encoded,) = encode_records([parsed], encoder, "")
    if isinstance(encoded, Unusable):
        raise encoded
    if not encoded.prompt:
        raise Unusable("the prompt is empty")
    return encoded.prompt


def last_text(prompt: str | list[Message]) -> str:
    """What is said last in a prompt."""
    return prompt if isinstance(prompt, str) else str(prompt[-1]["content"] if prompt else "")
