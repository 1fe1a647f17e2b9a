"""Who connects to an mpirun's ports: its own processes are left alone, also while the kernel's table is being written."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
from lib.launch.host_ranks import signal_group

from lib.launch import mpirun_ports

# Like mpirun: it listens, and a process that it started connects to it and stays.
SERVER = """
import os, socket, sys, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
if os.fork() == 0:
    connection = socket.create_connection(server.getsockname())
    print(len(connection.recv(1)), flush=True)
else:
    connections = [server.accept()[0] for _ in range(2)]
    time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lends a process its child's socket")
@pytest.mark.parametrize("comes_up", [0, 1])
def test_a_stranger_is_hung_up_on_and_its_own_process_never(monkeypatch: pytest.MonkeyPatch, comes_up: int) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, start_new_session=True)
    whole_table = mpirun_ports._entries
    tables: list[list[mpirun_ports.Entry]] = []

    def written_piece_by_piece() -> list[mpirun_ports.Entry]:
        """Its own connection comes up before or between the two first looks, and has one end in the table then."""
        look, entries = len(tables), whole_table()
        theirs, ours = f":{port:04X}", f":{other:04X}"  # the ends of the ports
        own = {one.local for one in entries if one.remote.endswith(theirs) and not one.local.endswith(ours)}
        is_late = {one for one in entries if one.local in own or (look < comes_up and one.remote in own)}
        tables.append([one for one in entries if look > comes_up or one not in is_late])
        return tables[-1]

    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.settimeout(60)
            while len(mpirun_ports._sockets_of(server.pid)) < 3:  # it has accepted both
                time.sleep(0.01)
            trusted: set[str] = set()
            other = stranger.getsockname()[1]
            monkeypatch.setattr(mpirun_ports, "_entries", written_piece_by_piece)
            assert mpirun_ports.hang_up_on_strangers(server.pid, trusted) == 1
            assert stranger.recv(1) == b""
            assert len(trusted) == 1
            assert mpirun_ports.hang_up_on_strangers(server.pid, trusted) == 0
    finally:
        signal_group(server.pid, 9)
        rest, _ = server.communicate(timeout=60)
    assert rest == "", "its own process was hung up on"
