"""Chat templates rendered by a process of its own: each is a program of somebody's, and gets so much time and memory.

A template may wait for certain messages before it begins to loop, to double a text, or to count up to 10^10^10, where
Python cannot be interrupted. So transformers renders in a process (template_worker.py) that is ended when it takes too
long, and on Linux when it takes too much memory. It starts with the first template, and ends with this process.
"""

from __future__ import annotations

import datetime
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lib.errors import Stopped, UserError
from lib.system.worker_process import Ended, NotStarted, WorkerProcess

ROOT = Path(__file__).resolve().parent.parent.parent
RENDERER, KNOWN_VERSION = "render_jinja_template", "5"  # what transformers' tokenizers call
RENDER_SECONDS = 30.0  # for some conversations, each of which takes a millisecond
RENDER_BYTES = 2**30
TOGETHER_BYTES = 2**22  # of conversations that are rendered at a time
_dates: dict[str, str] = {}  # by the text of a template: the day that its strftime_now says


class Refused(Exception):
    """What a template raises; its author chose the words."""


class NoTemplate(Refused):
    """Its text is not a template."""


def install() -> None:
    """Makes every tokenizer of transformers render here, from now on.

    Raises:
        Stopped: this version of transformers renders in another way.
    """
    import transformers
    from transformers import tokenization_utils_base

    if not hasattr(tokenization_utils_base, RENDERER):  # else templates would be rendered there, without limits
        raise Stopped(
            f"transformers {transformers.__version__} renders chat templates by another name than {RENDERER}, which "
            f"Tandem knows of transformers {KNOWN_VERSION}: make setup installs one that it knows"
        )
    setattr(tokenization_utils_base, RENDERER, render)


def pin_date(template: str, date: datetime.date) -> None:
    """Makes a template's strftime_now say this date: else tomorrow's tokens would be others."""
    _dates[template] = date.isoformat()


def render(
    conversations: Sequence[Any], chat_template: str = "", **options: Any
) -> tuple[list[str], list[list[list[int]]]]:
    """As transformers' render_jinja_template: the text of each conversation, and where it marks the model's own.

    Raises:
        Refused: by the template.
        UserError: it takes more than RENDER_SECONDS or RENDER_BYTES.
        Stopped: what renders cannot be started.
    """
    rest = _json({"chat_template": chat_template, **options})
    date = _json(_dates.get(chat_template))
    texts: list[str] = []
    marked: list[list[list[int]]] = []
    for some in _slices([_json(conversation) for conversation in conversations]):
        question = b'{"date": %s, "options": %s, "conversations": [%s]}' % (date, rest, b", ".join(some))
        answer = _asked(question, len(some))
        texts += answer["texts"]
        marked += answer["marked"]
    return texts, marked


def _asked(question: bytes, count: int) -> Any:
    what = f"the chat template, on {count:,} conversation{'s' * (count != 1)},"
    try:
        answer = _renderer().ask(question, RENDER_SECONDS)
    except NotStarted as error:
        raise Stopped(f"the process that renders chat templates does not start: {error}") from None
    except TimeoutError:
        raise UserError(f"{what} takes more than {RENDER_SECONDS:g} s") from None
    except Ended as error:
        why = f"takes more than {RENDER_BYTES:,} bytes" if error.lacked_memory else f"is not rendered: {error}"
        raise UserError(f"{what} {why}") from None
    if "refused" in answer:
        raise (Refused if answer["is_template"] else NoTemplate)(answer["refused"])
    return answer


def _slices(conversations: Sequence[bytes]) -> Iterator[list[bytes]]:
    """One after the other, together as long as they are short."""
    some, size = list[bytes](), 0
    for conversation in conversations:
        if some and size + len(conversation) > TOGETHER_BYTES:
            yield some
            some, size = [], 0
        some.append(conversation)
        size += len(conversation)
    if some:
        yield some


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, default=_plain).encode("utf-8", "surrogatepass")


def _plain(value: Any) -> Any:
    """What JSON does not have: a mapping or a number of another type as such, else its type's name, as transformers."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.item() if hasattr(value, "item") else f"<{type(value).__name__}>"


@functools.cache
def _renderer() -> WorkerProcess:
    limits = [str(RENDER_BYTES), str(RENDER_SECONDS)]
    return WorkerProcess([sys.executable, "-m", "lib.data.template_worker", *limits], ROOT)
