"""Serves a finished run to OpenAI's clients.

    make serve RUN=runs/NAME                                      http://127.0.0.1:8080/v1, for this machine alone
    python -m lib.server --make-key ALICE --keys keys             a key for ALICE, shown once; only its hash is kept
    python -m lib.server --run runs/NAME serve.keys=keys serve.host=0.0.0.0
    python -m lib.server --model PATH                             a model without an adapter
    python -m lib.server --emit nginx --hosts a:8080,b:8080       the file of an nginx in front of several servers

Settings are key=value words; limits, times and the name may stand in the `serve` section of the run's config.yaml. The
log is one JSON record a line, on standard output. SIGTERM finishes requests under way and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from lib.config import command_line, help, load
from lib.config.settings import Config, DataSettings, ModelSettings, ServeSettings
from lib.errors import Stopped, UserError
from lib.plan.calibration import read_calibration
from lib.serve import api_keys
from lib.system import model_folder, mpi_and_blas

DRAIN_SECONDS = 30  # after SIGTERM, for requests under way to finish
SWITCH_SECONDS = 0.0005  # the generating thread does not wait long for the event loop


@mpi_and_blas.reported
def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit status."""
    options = _parse(arguments)
    if options.make_key is not None:
        print(api_keys.make(options.make_key, Path(options.keys)), flush=True)
    elif options.emit is not None:
        print(nginx_file(options.hosts.split(","), Path(options.calibration)), end="")
    else:
        config = _read_config(options)
        serve(config.serve, config.model, config.data, None if options.run is None else Path(options.run))
    return 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m lib.server", description=__doc__, epilog=help.help_text("serve"))
    add = parser.add_argument
    add("--run", metavar="RUN", help="folder of a finished run")
    add("--model", metavar="PATH", help="a model without an adapter")
    add("--make-key", metavar="NAME", help="add a key to --keys, print it, and end")
    add("--keys", metavar="FILE", default="keys", help="for --make-key (default: %(default)s)")
    add("--emit", choices=["nginx"], help="print the file of a proxy in front of --hosts, and end")
    add("--hosts", metavar="HOST:PORT,...", help="for --emit: where servers of this model listen")
    add("--calibration", metavar="FOLDER", default="calibration", help="for --emit: speeds (default: %(default)s)")
    add("overrides", nargs="*", metavar="key=value", help="settings, as listed below")
    options = parser.parse_intermixed_args(arguments)
    if options.emit is not None and not options.hosts:
        raise UserError("--emit nginx needs --hosts HOST:PORT,HOST:PORT")
    if options.make_key is None and options.emit is None and (options.run is None) == (options.model is None):
        raise UserError("give either --run RUN or --model PATH (make serve RUN=runs/NAME)")
    return options


def _read_config(options: argparse.Namespace) -> Config:
    if options.run is None:
        return load.load(None, options.overrides, base={"model": {"path": options.model}, "data": {"train": "none"}})
    for name in ("config.yaml", model_folder.ADAPTER_WEIGHTS):
        if not (Path(options.run) / name).is_file():
            raise UserError(f"--run {options.run}: no run there that has ended: {name} is missing")
    return load.of_run(Path(options.run) / "config.yaml", options.overrides)


def serve(options: ServeSettings, base: ModelSettings, data: DataSettings, run: Path | None) -> None:
    """Serves until SIGTERM or Ctrl-C. Raises UserError: the settings ask for something that cannot be served. Stopped:
    the model cannot be loaded."""
    mpi_and_blas.prepare()  # before MLX is imported: its own BLAS is 17 times as slow
    from lib.serve.app import Server  # brings uvicorn, MLX and transformers: --help answers at once
    from lib.serve.feedback import Feedback
    from lib.serve.generation import Generator, ServedModel

    if base.random_init:
        raise UserError("model.random_init=true: the base's weights are in no file; export it by --to fused first")
    if base.attention_window is not None:
        print("warning: the server ignores model.attention_window; it attends to everything", file=sys.stderr)
    sys.setswitchinterval(SWITCH_SECONDS)
    keys = None if options.keys is None else api_keys.KeyFile(Path(options.keys))
    with bind(options.host, options.port) as listening:
        host, port = listening.getsockname()[:2]
        if not ipaddress.ip_address(host).is_loopback:
            if keys is None:
                remedy = "python -m lib.server --make-key NAME --keys FILE, then serve.keys=FILE"
                raise UserError(
                    f"serve.host={host} can be reached from other machines, and there are no keys: {remedy}"
                )
            print("warning: keys and texts travel unencrypted; --emit nginx writes a proxy's file", file=sys.stderr)
        name = options.name or (run or Path(base.path)).resolve().name
        folder = model_folder.resolve(base.path, base.revision)
        model = ServedModel(base, data, folder, run, options.fuse)
        if model.computes.note:
            print(model.computes.note, file=sys.stderr)
        feedback = None if options.feedback is None else Feedback(Path(options.feedback))
        generator = Generator(model.load, options.concurrency)
        address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        log("start", address=address, model=name, run=run and str(run))
        generator.start()
        generator.is_ready.wait()  # the port opens when the model is loaded
        if generator.failure is None:
            listening.listen(128)
            log("up")
            asyncio.run(_serve(Server(options, name, generator, model, keys, feedback, log), listening))
    if generator.failure is not None:
        raise Stopped(f"the model cannot be served: {generator.failure}")
    log("end")


async def _serve(server: Any, listening: socket.socket) -> None:
    """Runs uvicorn until a signal or a failure of the generator; requests under way may finish for a while."""
    import uvicorn

    options: dict[str, Any] = {"log_level": "warning", "lifespan": "off", "server_header": False}
    web = uvicorn.Server(uvicorn.Config(server.app(), timeout_graceful_shutdown=DRAIN_SECONDS, **options))
    server.generator.deliver = asyncio.get_running_loop().call_soon_threadsafe
    server.generator.on_failure = lambda: setattr(web, "should_exit", True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again after its end, which is no failure
    await web.serve([listening])
    server.generator.close()  # while the loop still takes its pieces


def bind(host: str, port: int) -> socket.socket:
    """The socket that uvicorn will listen at. Raises UserError: the address is not this machine's, or is taken."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        return listening
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"serve.host={host} serve.port={port}: {reason}; serve.port=0 takes a free port") from None


def log(kind: str, **fields: object) -> None:
    """Writes one JSON record a line."""
    print(json.dumps({"kind": kind, "time": round(time.time(), 3), **fields}), flush=True)


def nginx_file(servers: list[str], calibration: Path) -> str:
    """The file of an nginx in front of servers, HOST:PORT each: TLS, and the server with the fewest requests for its
    speed, its best pairs/s in calibration/HOST.json. Raises UserError: a server or a calibration is malformed."""
    speeds = {}
    for server in servers:
        host, _, port = server.rpartition(":")
        if not host or not port.isdigit():
            raise UserError(f"--hosts {server}: not of the form HOST:PORT, e.g. mac-a:8080,mac-b:8080")
        file = calibration / f"{host}.json"
        curves = read_calibration(file).curves if file.exists() else ()
        speeds[server] = max((curve.best_point.pairs_per_second for curve in curves), default=0.0)
    least = min(filter(None, speeds.values()), default=1.0)
    weights = {server: max(1, round(10 * (speed or least) / least)) for server, speed in speeds.items()}
    return NGINX.format(servers="\n".join(f"    server {name} weight={weight};" for name, weight in weights.items()))


NGINX = """# nginx in front of several servers of one model: /etc/nginx/conf.d/tandem.conf
# The same file of keys belongs on every host (serve.keys). Weights are measured speeds.
upstream tandem {{
    least_conn;
{servers}
    keepalive 64;
}}
limit_req_zone $http_authorization zone=keys:10m rate=20r/s;
server {{
    listen 443 ssl;
    server_name example.org;
    ssl_certificate /etc/ssl/tandem.pem;
    ssl_certificate_key /etc/ssl/tandem.key;
    client_max_body_size 1m;
    client_body_timeout 10s;
    location / {{
        limit_req zone=keys burst=64 nodelay;
        proxy_pass http://tandem;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_buffering off;
        proxy_read_timeout 600s;
        proxy_next_upstream error timeout http_503;
    }}
}}
"""
