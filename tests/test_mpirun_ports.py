"""Who connects to mpirun's ports and says nothing keeps no run from ending."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from lib.launch import mpirun_ports
from tests.tiny import ROOT

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux lets a port's strangers be shut out"
)


def listening(pid: int) -> list[int]:
    """The ports at which a process listens on the loopback."""
    sockets = mpirun_ports._sockets_of(pid)
    entries = [one for one in mpirun_ports._entries() if one.inode in sockets and one.state == mpirun_ports.LISTENING]
    return [int(one.local.partition(":")[2], 16) for one in entries]


def test_silent_connections_to_mpirun_do_not_keep_a_run_from_ending(tmp_path: Path) -> None:
    """Without an end to them Open MPI's server reads from the first one for ever, and the launch hangs."""
    held: list[socket.socket] = []
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set() and not held:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    if re.search(rb"(mpirun|prterun)\0.*OWN=1", path.read_bytes(), re.DOTALL):
                        for port in listening(int(path.parent.name)):
                            held.extend(socket.create_connection(("127.0.0.1", port), 1) for _ in range(3))
            time.sleep(0.02)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    words = [
        "--hosts",
        "localhost:2",
        "--backend",
        "mpi",
        "--no-preflight",
        "--env",
        "OWN=1",
        "--mpi-arg",
        "--tag-output",
    ]
    command = [sys.executable, str(ROOT / "launch"), *words, "--", "sh", "-c", "sleep 2 # OWN=1"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    finally:
        over.set()
        stranger.join()
        for connection in held:
            connection.close()
    assert held, "nobody disturbed it"
    assert done.returncode == 0 and "every such connection is shut down" in done.stderr, done.stderr
