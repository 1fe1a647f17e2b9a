"""The dashboard: runs as they go, in a browser.

    python -m lib.dashboard                          the newest run of runs/, at the address that it prints
    python -m lib.dashboard runs/A runs/B            these, compared
    python -m lib.dashboard --export runs/A          writes report.html, curves.png, model card; serves nothing

It reads the logs that ranks write, so it may be started and ended at any time, on the launching machine. All that the
page needs comes from this process. The printed address holds a token of this process, without which it answers nothing.
It listens on the loopback only; from elsewhere, `ssh -L 8050:127.0.0.1:8050 HOST`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from lib.config import command_line
from lib.errors import UserError, shown
from lib.system import mpi_and_blas


@mpi_and_blas.reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0 done, 2 wrong input."""
    parser = command_line.Parser(prog="python -m lib.dashboard", description=__doc__)
    add = parser.add_argument
    add("run", nargs="*", type=Path, metavar="RUN", help="folders of runs (default: the newest of --runs)")
    add("--runs", type=Path, metavar="DIR", default="runs", help="folder that holds runs (default: runs)")
    add("--export", type=Path, metavar="RUN", help="write its report.html, curves.png and README.md, serve nothing")
    add("--port", type=int, default=8050, help="default: 8050; 0 takes a free one")
    add("--host", default="127.0.0.1", help="address to listen at (default: the loopback)")
    options = parser.parse_args(arguments)
    for run in options.run:
        if not run.is_dir():
            raise UserError(f"{run} is not a run's folder; runs/ has those of this machine")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port {options.port} is not in 0 to 65535")
    if options.export:
        from lib.report import run_report

        for path in run_report.write(options.export):
            print(shown(str(path)))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        serve(options.runs, options.run, options.host, options.port)
    return 0


def serve(runs: Path, selected: Sequence[Path], host: str, port: int) -> None:
    """Serves until it is interrupted. Raises UserError: the port is taken, or Dash is not installed."""
    try:
        from werkzeug.serving import make_server

        from lib.report import dashboard_page
    except ImportError as error:
        raise UserError("the dashboard needs Dash; run pip install -c constraints.txt dash") from error
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    watcher, token = dashboard_page.Watcher(runs, selected), secrets.token_urlsafe(24)
    if not watcher.listed():
        print(f"dashboard: no run in {runs}/ yet; one that starts is shown", flush=True)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise UserError(f"cannot listen at {host}:{port} ({why}); give another --port") from None
    port = listener.getsockname()[1]
    app = dashboard_page.make_app(watcher, token)
    server = make_server(host, port, app.server, threaded=True, fd=listener.fileno())
    print(f"dashboard: http://{host}:{port}/?token={token}    (Ctrl-C ends it)", flush=True)
    if host not in ("127.0.0.1", "localhost", "::1"):
        print("dashboard: figures and token travel unencrypted; ssh -L does better", file=sys.stderr)
    server.serve_forever()
