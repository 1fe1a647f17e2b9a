"""mlx_lm.server at a Unix socket: for its gateway alone, and able to stop a request before its end.

A request has an id, in a header. `DELETE /requests/ID` stops it at the next
token, and answers when nothing is left of it; a request that was stopped before it came is not begun.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hmac
import io
import json
import socket
import socketserver
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

from mlx_lm import server
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer

from lib.serve import memory_room
from lib.serve.backend_link import ID_HEADER, OWNER_HEADER, ROOM_PATH, SECRET_HEADER
from lib.serve.intake import Intake
from lib.serve.openai_answers import DEATH, FAILURE
from lib.serve.prompt_cache import OwnedTokens, PromptCache
from lib.serve.prompt_pace import Batches, mend_window_caches
from lib.serve.samplers import make_sampler

SIGN_SECONDS = 5.0  # between two signs of life of an answer, where what is generated is not told yet
PASS_SECONDS = 0.1  # of generating, between two looks for requests that were stopped
MOST_AUTOMATA = 8  # of clients' own stop strings
REMEMBERED = 4096  # ids that were stopped before they came

ToolParser = Callable[[str, Any], Any]  # of what a model wrote, and the tools, one call or several


class Stopped(Exception):
    """Somebody stopped this request."""


class Requests:
    """The requests under way, by their ids."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way: set[str] = set()
        self._stopped: OrderedDict[str, None] = OrderedDict()

    @contextlib.contextmanager
    def under_way(self, id: str) -> Iterator[None]:
        """A request from its beginning to its end.

        Raises:
            Stopped: it was stopped before.
        """
        with self._changed:
            if id in self._stopped:
                raise Stopped
            self._under_way.add(id)
        try:
            yield
        finally:
            with self._changed:
                self._under_way.discard(id)
                self._changed.notify_all()

    def is_stopped(self, id: str) -> bool:
        return id in self._stopped

    def stop(self, id: str) -> None:
        """Stops a request, and waits until it is over."""
        with self._changed:
            self._stopped[id] = None
            while len(self._stopped) > REMEMBERED:
                self._stopped.popitem(last=False)
            self._changed.wait_for(lambda: id not in self._under_way)


class _Few(OrderedDict[Any, Any]):
    """A dictionary that forgets all but the last few."""

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > MOST_AUTOMATA:
            self.popitem(last=False)


class Generator(server.ResponseGenerator):  # type: ignore[misc]
    """mlx_lm.server's, that looks for new requests as soon as there are some, not twice a second.

    Of many that come at once it takes in one a step, so that those under way wait for one of them and not for all;
    whose, lib/serve/intake.py says.
    A prompt of no tokens fails by itself: inserted into a batch, it would end the thread that generates for everybody.
    """

    room_tokens: int | None = None  # of all requests together (lib/serve/memory_room.py); None: not known
    _has_taken = False  # a request, since the last step
    _is_loaded = False  # the model

    def __init__(self, *arguments: Any, intake: Intake):
        self.intake = intake  # before the thread starts, which asks for it
        super().__init__(*arguments)
        # mlx_lm.server keeps 100, each of some thousand objects, and then drops all while nobody is answered.
        self._state_machine_cache = _Few()

    def prepare(self, request: Any, arguments: Any) -> None:
        """Makes what mlx_lm.server would make for a request's stop strings while nobody is answered; in any thread."""
        since = time.thread_time()
        if arguments.stop_words and (tokenizer := self.model_provider.tokenizer) is not None:
            self._make_state_machine(self.model_provider.model_key, tokenizer, arguments.stop_words)
        request.prepare_seconds = time.thread_time() - since

    def _next_request(self, timeout: float | None = None) -> Any:
        """As mlx_lm.server's. timeout: None while requests are under way."""
        if not self._is_loaded:
            self._is_loaded = True
            self.room_tokens, kept_bytes = memory_room.room(self.model_provider.model)
            self.model_provider.cli_args.prompt_cache_bytes = kept_bytes
            gc.collect()
            gc.freeze()  # the model stays, and is not looked through again and again while somebody waits for a token
        if timeout is None and self._has_taken:
            self._has_taken = False
            return None
        if timeout is not None:
            self.intake.under_way.clear()
        while (come := super()._next_request(None if self.intake.is_due else timeout)) is not None:
            self.intake.put(come[1].owner, come)
            self.intake.charge([come[1].owner], come[1].prepare_seconds)
        request = self.intake.take()
        self._has_taken = request is not None
        return request

    def _tokenize(self, tokenizer: Any, request: Any, arguments: Any) -> Any:
        """As mlx_lm.server's, with the prompt as its owner's.

        Raises:
            ValueError: the prompt has no tokens.
        """
        prompt, *rest = super()._tokenize(tokenizer, request, arguments)
        if not prompt:
            raise ValueError("the prompt has no tokens")
        return OwnedTokens(prompt, request.owner), *rest

    @property  # type: ignore[override]
    def _time_budget(self) -> Iterator[None]:
        """A pass over the requests under way: until somebody waits to join them, and not for long."""
        ends = time.monotonic() + PASS_SECONDS
        yield
        while self.requests.empty() and not self.intake.is_due and time.monotonic() < ends:
            yield

    @_time_budget.setter
    def _time_budget(self, budget: object) -> None:
        """mlx_lm.server's own is not needed."""


def mend_detokenizers() -> None:
    """Mends a fault of mlx-lm 0.32: a token that the tokenizer lacks ends the thread that generates for everybody.

    Models have such ids where their vocabulary is padded. Other detokenizers bear with them.
    """
    add_token = SPMStreamingDetokenizer.add_token

    def add_known(detokenizer: SPMStreamingDetokenizer, token: int) -> None:
        if token < len(detokenizer.tokenmap):
            add_token(detokenizer, token)

    SPMStreamingDetokenizer.add_token = add_known  # type: ignore[method-assign]


class _Stoppable:
    """A generator for one request of an owner, that looks before each token whether it still has to generate."""

    def __init__(self, generator: Generator, owner: str, is_stopped: Callable[[], bool]):
        self._generator, self._owner, self._is_stopped = generator, owner, is_stopped
        self.context: Any = None
        self.has_failed = False  # itself, and not only what is made of its tokens

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, arguments: Any, progress_callback: Callable[[int, int], None]) -> Any:
        def progress(processed: int, total: int) -> None:
            self._look()
            progress_callback(processed, total)

        request.owner = self._owner
        self._generator.prepare(request, arguments)
        self.context, tokens = self._generator.generate(request, arguments, progress)
        if self.context.tool_parser is not None:
            self.context.tool_parser = checked(self.context.tool_parser)
        return self.context, self._looking(tokens, progress_callback)

    def _looking(self, tokens: Iterable[Any], give_sign: Callable[[int, int], None]) -> Iterator[Any]:
        """The tokens; and in between a sign of life: mlx_lm.server writes nothing before a tool call is whole."""
        signed_at = time.monotonic()
        try:
            for token in tokens:
                self._look()
                if time.monotonic() - signed_at > SIGN_SECONDS:
                    signed_at = time.monotonic()
                    give_sign(0, 0)
                yield token
        except Stopped:
            raise
        except Exception:
            self.has_failed = True
            raise

    def _look(self) -> None:
        if self._is_stopped():
            raise Stopped


def checked(parse: ToolParser) -> ToolParser:
    """A parser of tool calls that raises ValueError, and nothing else, for what is none: mlx_lm.server leaves it out.

    A model may write anything between the tokens of a call, and a client may have it do so.
    """

    def parser(text: str, tools: Any) -> Any:
        try:
            found = parse(text, tools)
            for call in found if isinstance(found, list) else [found]:
                json.dumps({**call, "arguments": call["arguments"]})
        except Exception as error:
            raise ValueError(f"no tool call: {error!r}") from None
        return found

    return parser


class Handler(server.APIHandler):  # type: ignore[misc]
    """mlx_lm.server's request handler, for requests that bring the secret."""

    secret: str
    requests: Requests
    has_begun = False  # the answer

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if hmac.compare_digest(self.headers.get(SECRET_HEADER, "").encode("latin-1"), self.secret.encode()):
            return True
        self.send_error(403)
        return False

    def do_POST(self) -> None:
        id = self.headers.get(ID_HEADER, "")
        owner, whole = self.headers.get(OWNER_HEADER, ""), cast(Generator, self.response_generator)
        generator = _Stoppable(whole, owner, lambda: self.requests.is_stopped(id))
        self.response_generator = generator  # type: ignore[assignment]
        try:
            if not self._has_body():
                raise Stopped
            with self.requests.under_way(id):
                try:
                    super().do_POST()
                finally:
                    # It does so itself, but not where the client left before the first byte of the answer.
                    if generator.context is not None:
                        generator.context.stop()
        except (Stopped, ConnectionError):
            self.close_connection = True
        except Exception:  # of this request alone, where its tokens came
            self.close_connection = True
            if not whole.generation_available():
                self._end_with(DEATH)
            if generator.has_failed or not whole.generation_available():
                raise
            traceback.print_exc()
            self._end_with(FAILURE)

    def _has_body(self) -> bool:
        """Whether the request came whole: of one whose client has left mlx_lm.server would log what came."""
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.rfile.close()  # nothing else comes
        self.rfile = io.BytesIO(body)
        return len(body) == length

    def end_headers(self) -> None:
        super().end_headers()
        self.has_begun = True

    def _end_with(self, why: bytes) -> None:
        """Tells the gateway that the answer cannot be made, or its rest."""
        if self.has_begun:
            self.wfile.write(b"data: " + why + b"\n\n")
            return
        self._headers_buffer: list[bytes] = []  # those of an answer
        self._set_completion_headers(400)
        self.end_headers()
        self.wfile.write(why)

    def do_GET(self) -> None:
        if self.path != ROOM_PATH:
            super().do_GET()
            return
        self._set_completion_headers(200)
        self.end_headers()
        self.wfile.write(json.dumps({"tokens": cast(Generator, self.response_generator).room_tokens}).encode())

    def do_DELETE(self) -> None:
        self.requests.stop(self.path.removeprefix("/requests/"))
        self.send_response(204)
        self.end_headers()


def handler(secret: str) -> type[Handler]:
    """The handler of a server with this secret."""
    return type("Handler", (Handler,), {"secret": secret, "requests": Requests()})


class _UnixServer(ThreadingHTTPServer):
    address_family = socket.AF_UNIX
    request_queue_size = 128  # of a burst of more, the rest would be refused

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        connection, _ = super().get_request()
        return connection, ("gateway", 0)  # a Unix socket has no address for the log


def run_at(path: Path, secret: str) -> Callable[..., None]:
    """What takes the place of mlx_lm.server's `run`: the same, at a Unix socket."""

    def run(host: str, port: int, provider: Any) -> None:
        server.make_sampler = make_sampler  # type: ignore[assignment]
        intake = Intake()
        server.BatchGenerator = functools.partial(Batches, intake=intake)  # type: ignore[misc, assignment]
        mend_window_caches()
        mend_detokenizers()
        generator = Generator(provider, PromptCache(provider.cli_args.prompt_cache_size), intake=intake)
        fingerprint, answers = server.get_system_fingerprint(), handler(secret)

        def answer(*arguments: Any) -> Any:
            return answers(generator, *arguments, system_fingerprint=fingerprint)

        _UnixServer(str(path), answer).serve_forever()  # type: ignore[arg-type]

    return run
