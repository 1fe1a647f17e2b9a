"""A process that reads the bodies of requests: parses, checks, renders and counts them, and says what a backend gets.

    python -m lib.serve.request_reading

The first line of its standard input is a JSON object, `Told`; then come bodies, each behind a line with its kind and
size. Each gets an answer of the same form. What a body costs is paid here: the event loop of the gateway, and with it
everybody else's requests, goes on meanwhile. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from lib.data.text_tokens import is_panic
from lib.errors import UserError
from lib.serve import openai_requests
from lib.serve.openai_requests import JSON, BackendRequest, ChatRequest, Kind, Limits, RequestError, TextRequest
from lib.system.limits import limit_memory

MEMORY_BYTES = 2 * 2**30  # that bodies may take, on Linux: templates and tokenizers are programs of somebody's
NICE = 5  # after the gateway and its backends
LETTERS_OF_TOKEN = 8  # more than most texts have; of a prompt with more a part is counted first
CUT_TOKENS = 64  # more than a cut in the middle of a word can add
TOLD_OF_REQUEST = ("stream", "include_usage", "is_streamed", "prompt_tokens", "max_tokens")
Count = Callable[[JSON], int]  # tokens of a backend's body, as the model will see them


@dataclass(frozen=True)
class Told:
    """What the process needs to know: the model's tokenizer, how prompts are rendered, and the limits."""

    path: str
    trust_remote_code: bool
    chat_template: str | None  # a file of one, in the place of the model's
    chat_template_args: JSON
    limits: JSON

    def line(self) -> bytes:
        """As the process's first line."""
        return json.dumps(dataclasses.asdict(self)).encode() + b"\n"


def main() -> None:
    """Reads until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    with contextlib.suppress(OSError):
        os.nice(NICE)
    bodies = sys.stdin.buffer
    told = Told(**json.loads(bodies.readline()))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it reads one at a time, and threads would take of its memory
    try:
        limits, count = Limits(**told.limits), counter(told)
    except (UserError, OSError) as error:
        write(answers, {"failed": str(error)}, b"")
        return
    limit_memory(MEMORY_BYTES)
    write(answers, {}, b"")
    while line := bodies.readline():
        asked = json.loads(line)
        try:
            request = read(asked["kind"], bodies.read(asked["bytes"]), limits, count)
            fields = {name: getattr(request, name) for name in TOLD_OF_REQUEST}
            write(answers, fields, request.content)
        except RequestError as error:
            write(answers, {"error": [error.status, error.message, error.code, error.param]}, b"")
        except Exception:  # a fault of ours; the next body is read all the same
            traceback.print_exc()
            write(answers, {"error": [500, "an internal error", "internal_error", None]}, b"")


def read(kind: Kind, raw: bytes, limits: Limits, count: Count) -> BackendRequest:
    """What a backend is asked for by a body.

    Raises:
        RequestError: the body is malformed, or beyond a limit.
    """
    request: ChatRequest | TextRequest = openai_requests.parse(kind, raw)
    return openai_requests.backend_request(kind, request, limits, count(request.upstream()))


def counter(told: Told) -> Count:
    """Counts the tokens of prompts as mlx_lm.server makes them; their bytes, never fewer, without a tokenizer."""
    import mlx_lm.server  # noqa: F401  (now: when `_tokens` needs it there is a limit on memory)

    from lib.config.schema import ModelSettings
    from lib.data.tokenizer import load_tokenizer_of

    vocab_size, most = told.limits.get("vocab_size"), told.limits.get("max_prompt_tokens")
    settings = ModelSettings(path=told.path, trust_remote_code=told.trust_remote_code)
    tokenizer = cast(Any, load_tokenizer_of(settings))
    if tokenizer is None:
        return lambda body: len(json.dumps(body, ensure_ascii=False).encode())
    if told.chat_template is not None:
        tokenizer.chat_template = Path(told.chat_template).read_text(encoding="utf-8")

    def count(body: JSON) -> int:
        try:
            if most is not None and _begins_too_long(tokenizer, body, told.chat_template_args, most):
                raise openai_requests.too_long(f"the prompt has more than the {most} tokens that are allowed")
            ids = _tokens(tokenizer, body, told.chat_template_args)
        except RequestError:
            raise
        except BaseException as error:  # whatever a template raises: of roles, of arguments that are no JSON
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise RequestError(400, f"the model cannot take this: {error}", "invalid_request") from None
        if not ids:  # of a role that a template leaves out, or spaces that a tokenizer strips: nothing can follow them
            why = "the model's template and tokenizer make no tokens of this"
            raise RequestError(400, f"the model cannot take this: {why}", "invalid_request")
        if vocab_size is not None and max(ids) >= vocab_size:  # MLX would read beyond the embedding
            why = f"the tokenizer makes id {max(ids)} of this, and the model's vocabulary has {vocab_size}"
            raise RequestError(400, f"the model cannot take this: {why}", "invalid_request")
        return len(ids)

    return count


def _begins_too_long(tokenizer: Any, body: JSON, arguments: JSON, most: int) -> bool:
    """Whether the beginning of a long prompt has more tokens than are allowed, whatever follows.

    A text of 1 MB takes a tokenizer seconds, for which others would wait: it is counted in pieces, up to the last that
    can be in the prompt.
    """
    size = most * LETTERS_OF_TOKEN
    if len(json.dumps(body)) <= size:
        return False
    text = _rendered(tokenizer, body, arguments, tokenize=False)
    tokens = 0
    for start in range(0, len(text) - size, size):
        tokens += len(tokenizer.encode(text[start : start + size])) - CUT_TOKENS
        if tokens > most:
            return True
    return False


def _tokens(tokenizer: Any, body: JSON, arguments: JSON) -> list[int]:
    """As mlx_lm.server's `_tokenize`."""
    made = _rendered(tokenizer, body, arguments, tokenize=True)
    return list(tokenizer.encode(made) if isinstance(made, str) else made)


def _rendered(tokenizer: Any, body: JSON, arguments: JSON, tokenize: bool) -> Any:
    """The text of a prompt; where a template makes it, and `tokenize`, its tokens."""
    from mlx_lm import server

    if "prompt" in body:
        return body["prompt"]
    messages = json.loads(json.dumps(body["messages"]))  # it changes them
    if not tokenizer.has_chat_template and getattr(tokenizer, "chat_template", None) is None:
        return server.convert_chat(messages, None)
    server.process_message_content(messages)
    tools = body.get("tools")
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tools=tools, tokenize=tokenize, **arguments
    )


def write(stream: BinaryIO, fields: JSON, raw: bytes) -> None:
    """A line of JSON with the size of what follows, and that."""
    stream.write(json.dumps(fields | {"bytes": len(raw)}).encode() + b"\n" + raw)
    stream.flush()


if __name__ == "__main__":
    main()
