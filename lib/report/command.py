"""The dashboard: runs as they go, in a browser.

    python -m lib.dashboard                          the newest run of runs/, at the address that it prints
    python -m lib.dashboard runs/A runs/B            these, compared
    python -m lib.dashboard --export runs/A          writes report.html, curves.png, model card; serves nothing

It reads the logs that ranks write (./launch brings those of other hosts along), so it may be started and ended at any
time, on the launching machine. All that the page needs comes from this process. The printed address holds a token of
this process, without which nobody is answered. It listens on the loopback only; from elsewhere,
`ssh -L 8050:127.0.0.1:8050 HOST`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.config import command_line
from lib.errors import UserError, shown
from lib.report import run_report
from lib.report.app import make_app
from lib.report.history import runs_in
from lib.report.watcher import Watcher
from lib.system import mpi_and_blas
from lib.system.network import own_addresses


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    options = _parse(arguments)
    if options.export:
        for path in run_report.write(Path(options.export)):
            print(shown(str(path)))
        return 0
    watcher = Watcher(Path(options.runs), [Path(run) for run in options.run])
    token = secrets.token_urlsafe(24)
    app = make_app(watcher, token)
    is_empty = not options.run and not runs_in(Path(options.runs))
    note = f"dashboard: no run in {options.runs}/ yet; one that starts is shown" if is_empty else None
    with contextlib.suppress(KeyboardInterrupt):
        _serve(app, options.host, options.port, token, note)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line.Parser(
        prog="python -m lib.dashboard",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("run", nargs="*", metavar="RUN", help="folders of runs (default: the newest of --runs)")
    parser.add_argument("--runs", metavar="DIR", default="runs", help="folder that holds runs (default: runs)")
    parser.add_argument(
        "--export", metavar="RUN", help="write its report.html, curves.png and README.md, serve nothing"
    )
    parser.add_argument("--port", type=int, default=8050, help="default: 8050; 0 takes a free one")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at (default: the loopback)")
    options = parser.parse_args(arguments)
    for run in options.run:
        if not Path(run).is_dir():
            raise UserError(f"{run} is not a run's folder; runs/ has those of this machine")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port} is not in 0 to 65535")
    return options


def _serve(app: Any, host: str, port: int, token: str, note: str | None = None) -> None:
    """Serves until it is interrupted; `note` is printed below the address, which holds the token.

    Raises:
        UserError: the port is taken.
    """
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(
            f"cannot listen at {host}:{port} ({os.strerror(error.errno or 0)}); give another --port"
        ) from None
    port = listener.getsockname()[1]
    server = make_server(host, port, app.server, threaded=True, fd=listener.fileno())
    # A page of somebody else's that names this address by its own domain gets no answer (DNS rebinding).
    names = [host] if host not in ("", "0.0.0.0") else own_addresses()
    app.server.config["TRUSTED_HOSTS"] = ["localhost", "127.0.0.1", "[::1]", *names]
    print(f"dashboard: http://{host}:{port}/?token={token}    (Ctrl-C ends it)", flush=True)
    if note:
        print(note, flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("dashboard: what it shows, and its token, travel unencrypted; ssh -L does better", file=sys.stderr)
    server.serve_forever()
