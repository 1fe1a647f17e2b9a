"""Serves a finished run: mlx_lm.server with its adapter, behind a gateway that may be exposed.

    make serve RUN=runs/NAME                                      http://127.0.0.1:8080/v1, for this machine alone
    python -m lib.server --make-key ALICE --keys keys             a key for ALICE, shown once; only its hash is kept
    python -m lib.server --run runs/NAME serve.keys=keys serve.host=0.0.0.0 serve.port=8443 serve.tls_certificate=...
    python -m lib.server --run runs/NAME serve.hostfile=hostfile  one backend on each host, over ssh
    python -m lib.server --model PATH                             a model without an adapter

Settings are key=value words; limits, times and the name may stand in the `serve` section of the run's config.yaml,
The log is one JSON record a
line, on standard output. SIGTERM finishes requests under way and ends; SIGHUP reads the keys again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import gc
import ipaddress
import json
import logging
import math
import os
import resource
import shutil
import signal
import socket
import ssl
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import uvicorn

from lib.config import command_line, help, load, read_file
from lib.config.schema import Config
from lib.config.serve_settings import ServeSettings
from lib.data import chat_template
from lib.errors import UserError, shown
from lib.launch import hostfile, ssh
from lib.serve import api_keys
from lib.serve.backend_link import client_of, socket_folder
from lib.serve.backend_pool import Backend, Pool
from lib.serve.backend_supervisor import Keeper, Recipe
from lib.serve.event_log import LibraryRecords, log
from lib.serve.feedback import Feedback, open_file
from lib.serve.gateway import Gateway
from lib.serve.openai_requests import Kind, Limits
from lib.serve.readers import Readers
from lib.serve.request_reading import Told
from lib.serve.tls_listener import BACKLOG, Listener
from lib.system import model_folder, mpi_and_blas

FILES_BESIDE_CONNECTIONS = 512  # of processes, libraries, and what is left of connections that end


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    if options.make_key is not None:
        if _is_lost(sys.stdout):
            raise UserError("--make-key: standard output is closed or /dev/null, and a key is shown only once")
        print(api_keys.make(options.make_key, Path(options.keys)), flush=True)
        return 0
    serve(_read_config(options), None if options.run is None else Path(options.run))
    return 0


def serve(settings: Config, run: Path | None) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        UserError: something that was asked for cannot be served.
        Stopped: a backend does not start.
    """
    options = settings.serve
    _check(settings, run)
    ring = None if options.keys is None else api_keys.read(Path(options.keys))
    if ring is not None and not ring.digests:
        adds = f"python -m lib.server --make-key NAME --keys {options.keys}"
        raise UserError(f"serve.keys {options.keys} holds no key; {adds} adds one")
    listening = bind(options.host, options.port)
    is_public = not ipaddress.ip_address(listening.getsockname()[0]).is_loopback
    if is_public and options.tls_certificate is None and ring is not None:
        print(
            "warning: without serve.tls_certificate keys and texts travel readable by everybody on the way",
            file=sys.stderr,
        )
    if is_public and ring is None:
        listening.close()
        raise UserError(
            f"serve.host={options.host} can be reached from other machines, and there are no keys: "
            "python -m lib.server --make-key NAME --keys FILE, then serve.keys=FILE"
        )
    name = options.name or (run or Path(settings.model.path)).resolve().name
    folder = model_folder.resolve(settings.model.path, settings.model.revision)
    named = recipes(settings, run, folder)
    requests = options.concurrency * len(named)  # each has a connection to its backend
    _allow_connections(options.max_connections + requests + FILES_BESIDE_CONNECTIONS, options.max_connections)
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryRecords()])
    sockets = socket_folder()
    try:
        asyncio.run(_serve(settings, run, name, folder, named, ring, listening, sockets))
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def bind(host: str, port: int) -> socket.socket:
    """The listening socket.

    Raises:
        UserError: the address is not this machine's, or somebody listens there already.
    """
    try:
        family, kind, protocol_number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With its protocol's number, by which asyncio knows TCP and turns Nagle's algorithm off: 40 ms an answer.
        listening = socket.socket(family, kind, protocol_number)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
        return listening
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"serve.host={host} serve.port={port}: {reason}; serve.port=0 takes a free port") from None


def recipes(settings: Config, run: Path | None, folder: Path | None = None) -> dict[str, Recipe | None]:
    """Every backend by its name, and how it is started; None for those that run already. folder: the model's.

    Raises:
        UserError: the host file is wrong.
    """
    options, model = settings.serve, settings.model
    if options.backends:
        return dict.fromkeys(options.backends)
    path = Path(model.path)
    words = ["--model", str(path.resolve()) if path.exists() else model.path, "--concurrency", str(options.concurrency)]
    words += ["--revision", model.revision] if model.revision else []
    words += ["--adapter", str(run.resolve())] if run is not None else []
    words += ["--fuse"] * options.fuse + ["--trust-remote-code"] * model.trust_remote_code
    words += ["--wired", settings.metal.wired, *_template_words(settings, run, folder)]
    if options.hostfile is None:
        return {"local": Recipe(tuple(words))}
    hosts = hostfile.read(Path(options.hostfile)).hosts
    return {host.name: Recipe(tuple(words), None if ssh.is_this_machine(host) else host) for host in hosts}


def _template_words(settings: Config, run: Path | None, folder: Path | None) -> list[str]:
    """What makes a backend render prompts as the run's were; a request's own chat_template_kwargs come before it."""
    data = settings.data
    own = chat_template.template_of(data)
    words = [] if own is None else ["--chat-template", str(Path(str(data.chat_template)).resolve())]
    files = [] if folder is None else [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    text = "".join([*(file.read_text(encoding="utf-8") for file in files if file.is_file()), own or ""])
    given = data.chat_template_kwargs if run is None else chat_template.arguments_at_inference(data, text)
    return words + (["--chat-template-args", json.dumps(given)] if given else [])


def limits_of(settings: ServeSettings, name: str, folder: Path) -> Limits:
    """What the model allows, by its config.json, and its server."""
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = stored.get("text_config") or {}
    vocab_size = stored.get("vocab_size") or text.get("vocab_size")
    context = model_folder.context_tokens(stored)
    return Limits(name, settings.max_prompt_tokens, settings.max_tokens, vocab_size, context)


def told(settings: Config, run: Path | None, folder: Path, limits: Limits) -> Told:
    """What a process needs that reads requests as a backend of `recipes` does."""
    words = _template_words(settings, run, folder)
    options = dict(zip(words[::2], words[1::2], strict=True))
    return Told(
        path=str(folder),
        trust_remote_code=settings.model.trust_remote_code,
        chat_template=options.get("--chat-template"),
        chat_template_args=json.loads(options.get("--chat-template-args", "{}")),
        limits=dataclasses.asdict(limits),
    )


def labelled_kind(settings: Config, folder: Path) -> Kind:
    """Which completions training gives the tokens that they were served with: a template makes chats of all records."""
    stored = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").exists() or (
        stored.exists() and read_file.read_object(stored, "model.path").get("chat_template") is not None
    )
    wanted = settings.data.chat_template  # false, true for the model's own, or a file
    return "chat" if isinstance(wanted, str) or (wanted and has_template) else "text"


async def _serve(
    settings: Config,
    run: Path | None,
    name: str,
    folder: Path,
    named: Mapping[str, Recipe | None],
    ring: api_keys.Keys | None,
    listening: socket.socket,
    sockets: Path,
) -> None:
    options = settings.serve
    backends = [Backend(name, options.concurrency) for name in named]
    pool = Pool(backends, options.max_queue)
    own = {f"backend-{number}": sockets / str(number) for number, one in enumerate(named.values()) if one is not None}
    client = client_of(own)
    feedback = None
    if options.feedback is not None:
        feedback = Feedback(options, open_file(Path(options.feedback)), labelled_kind(settings, folder))
    readers = Readers(told(settings, run, folder, limits_of(options, name, folder)), log)
    gateway = Gateway(options, name, readers.read, pool, client, ring, log, feedback)
    keepers = []
    for number, (backend, recipe) in enumerate(zip(backends, named.values(), strict=True)):
        backend.url = backend.name if recipe is None else f"http://backend-{number}"
        socket_path = own.get(f"backend-{number}")
        keepers.append(
            Keeper(backend, recipe, pool, client, log, options.start_seconds, options.stall_seconds, socket_path)
        )
    listener = _listener(gateway, options)
    if options.keys is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _read_keys_again, gateway, Path(options.keys))
    serving = asyncio.create_task(listener.serve([listening]))
    await asyncio.sleep(0)  # signals are the listener's from now on: whoever reads that it serves may end it
    host, port = listening.getsockname()[:2]
    address = f"{'https' if options.tls_certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"
    log("start", address=address, port=port, model=name, backends=list(named), keys=len(ring.digests) if ring else 0)
    who = f"keys: {len(ring.digests)}" if ring else "no keys: for this machine alone"
    print(shown(f"{name} at {address}/v1 ({', '.join(named)}; {who})"), file=sys.stderr)
    gc.collect()
    gc.freeze()  # what is here stays: to look through it again and again takes 30 ms in which nobody is served
    keeping = [asyncio.create_task(keeper.run()) for keeper in keepers]
    keeping.append(asyncio.create_task(readers.run()))
    try:
        await asyncio.wait([serving, *keeping], return_when=asyncio.FIRST_COMPLETED)
        for task in keeping:
            if task.done():
                listener.should_exit = listener.force_exit = True
                task.result()
    finally:
        await serving
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        await client.aclose()
        log("end")


def _listener(gateway: Gateway, settings: ServeSettings) -> Listener:
    options = uvicorn.Config(
        gateway,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=math.ceil(settings.idle_seconds),
        # What still reads after a drain that waited for every answer will not be waited for any longer.
        timeout_graceful_shutdown=math.ceil(settings.write_seconds),
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    try:
        options.load()
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            f"serve.tls_certificate={settings.tls_certificate} serve.tls_key={settings.tls_key}: {error}"
        ) from None
    if options.ssl is not None:  # a key exchange in a field of 8,192 bits takes the event loop a tenth of a second
        options.ssl.set_ecdh_curve("prime256v1")
    return Listener(options, gateway, settings, log)


def keys_again(path: Path) -> api_keys.Keys:
    """The keys of the file as it is now; of one that is empty or gone, none: whoever takes the last one out means it.

    Raises:
        UserError: a line is of another form.
    """
    return api_keys.read(path) if path.exists() else api_keys.Keys(())


def _read_keys_again(gateway: Gateway, path: Path) -> None:
    try:
        keys = keys_again(path)
        gateway.use_keys(keys)
        log("keys", count=len(keys.digests))
    except UserError as error:  # a slip of the pen: those that were good stay so
        log("keys", error=str(error))


def _allow_connections(files: int, connections: int) -> None:
    """Every client and every request on a backend is an open file; macOS grants 256 until it is asked for more.

    Raises:
        UserError: the system does not grant as many.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        raise UserError(
            f"serve.max_connections={connections} needs {files} open files, and this system allows {hard}: "
            f"serve.max_connections={max(1, connections - (files - hard))}, or a higher `ulimit -Hn`"
        )
    if soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def _is_lost(stream: IO[str]) -> bool:
    """Whether what is written there goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # no file of the system: nobody knows
        return os.path.samestat(os.fstat(stream.fileno()), Path(os.devnull).stat())
    return False


def _check(settings: Config, run: Path | None) -> None:
    if run is not None and not (run / model_folder.ADAPTER_WEIGHTS).is_file():
        raise UserError(f"--run {run}: no finished run there ({model_folder.ADAPTER_WEIGHTS} is missing)")
    if settings.model.random_init:
        raise UserError("model.random_init=true: mlx_lm.server cannot draw the run's weights; they are in no file")
    if settings.serve.backends and settings.serve.hostfile:
        raise UserError("serve.backends run already, serve.hostfile starts its own; give one of them")
    if settings.serve.fuse and run is not None and _is_quantised(settings):
        raise UserError(
            f"serve.fuse=true: {settings.model.path} is quantised, and merged weights rounded to as few bits may lose "
            f"what was trained; leave it out, or python -m lib.export {run} --to fused --dequantize and serve that"
        )
    if settings.model.attention_window is not None:
        print(
            "warning: mlx_lm.server knows nothing of model.attention_window; it attends to everything", file=sys.stderr
        )


def _is_quantised(settings: Config) -> bool:
    path = model_folder.resolve(settings.model.path, settings.model.revision) / "config.json"
    return not {"quantization", "quantization_config"}.isdisjoint(read_file.read_object(path, "the model's"))


def _read_config(options: argparse.Namespace) -> Config:
    if options.run is None:
        return load.load(None, options.overrides, base={"model": {"path": options.model}, "data": {"train": "none"}})
    path = Path(options.run) / "config.yaml"
    if not path.is_file():
        raise UserError(f"--run {options.run}: no run there (it has no config.yaml); runs are folders in run.dir")
    return load.of_run(path, options.overrides)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m lib.server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=help.help_text("serve"),
        allow_abbrev=False,
    )
    parser.add_argument("--run", metavar="RUN", help="folder of a finished run")
    parser.add_argument("--model", metavar="PATH", help="a model without an adapter")
    parser.add_argument("--make-key", metavar="NAME", help="add a key to --keys, print it, and end")
    parser.add_argument("--keys", metavar="FILE", default="keys", help="for --make-key (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, as listed below")
    options = parser.parse_intermixed_args(arguments)
    if options.make_key is None and (options.run is None) == (options.model is None):
        raise UserError("give either --run RUN or --model PATH (make serve RUN=runs/NAME)")
    return options


if __name__ == "__main__":
    sys.exit(main())
