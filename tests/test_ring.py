"""The ranks of a ring wait for each other, in whatever order they start, whoever else connects."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from lib.distributed import ring_start
from lib.errors import UserError
from lib.system import handshake
from tests.tiny import ROOT


def free_addresses(count: int) -> list[tuple[str, int]]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [("127.0.0.1", one.getsockname()[1]) for one in sockets]


SECRET = b"of this run"


def meet(addresses: Sequence[tuple[str, int]], order: Sequence[int], pause: float) -> dict[int, float]:
    """When each rank went on, in seconds since the last of them began."""
    ended: dict[int, float] = {}

    def run(rank: int) -> None:
        met = ring_start.meet(rank, [[address] for address in addresses], SECRET)
        ended[rank] = time.monotonic()
        texts = met.messages.gather(f"rank {rank}".encode())
        assert texts == [f"rank {other}".encode() for other in range(len(addresses))]

    threads = []
    for rank in order:
        time.sleep(pause)
        threads.append(threading.Thread(target=run, args=(rank,), daemon=True))
        began = time.monotonic()  # before the start: where the machine is busy, all may be over when it returns
        threads[-1].start()
    for thread in threads:
        thread.join(20)
    assert len(ended) == len(order), f"{sorted(ended)} of {len(order)} went on"
    return {rank: at - began for rank, at in ended.items()}


@pytest.mark.parametrize("count", [2, 3, 5])
def test_ranks_may_start_in_any_order_and_none_goes_on_alone(count: int) -> None:
    orders = list(itertools.permutations(range(count)))
    for order in orders[:: max(1, len(orders) // 6)]:
        ended = meet(free_addresses(count), order, pause=0.05)
        assert ended[0] > 0, "rank 0 knows that all are there; MLX's first to be waited for is the last rank"
        assert ended[count - 1] > 0, "which connects first"


def test_strangers_are_passed_over_and_delay_nobody() -> None:
    addresses = free_addresses(3)
    over = threading.Event()

    def disturb(address: tuple[str, int], says: bytes) -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=1) as stranger:
                stranger.settimeout(0.2)
                if says == b"another run's":
                    handshake.connect(address, b"of another run", "rank 2 calls rank 0", 1.0)
                elif says:
                    stranger.sendall(says)
                stranger.recv(1)
            time.sleep(0.05)

    kinds = (b"GET / HTTP/1.0\r\n\r\n", b"", handshake.GREETING, handshake.GREETING + bytes(32), b"another run's")
    strangers = [
        threading.Thread(target=disturb, args=pair, daemon=True) for pair in itertools.product(addresses, kinds)
    ]
    for stranger in strangers:
        stranger.start()
    try:
        assert max(meet(addresses, (2, 1, 0), pause=0.3).values()) < handshake.STRANGER_SECONDS, "one was waited for"
    finally:
        over.set()
        for stranger in strangers:
            stranger.join(5)


def test_who_relays_what_ranks_send_is_found_out_unless_the_user_means_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A local user who took a port, or a tunnel: it hands on every byte, the proofs among them."""
    real = free_addresses(2)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        relayed = ("127.0.0.1", taken.getsockname()[1])

        def relay() -> None:
            while True:
                with contextlib.suppress(OSError):
                    one = taken.accept()[0]
                    threading.Thread(
                        target=splice, args=(one, socket.create_connection(real[1], 2)), daemon=True
                    ).start()

        threading.Thread(target=relay, daemon=True).start()

        def both() -> list[BaseException | None]:
            found: dict[int, BaseException | None] = {}

            def run(rank: int, nodes: list[list[tuple[str, int]]]) -> None:
                try:
                    found[rank] = None
                    ring_start.meet(rank, nodes, SECRET)
                except UserError as error:
                    found[rank] = error

            views = ([[real[0]], [relayed]], [[real[0]], [real[1]]])
            threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(views)]
            for thread in threads:
                thread.start()
            threads[0].join(20)
            return [found[0]]

        (error,) = both()
        assert error is not None and "relays" in str(error) and "TANDEM_RELAYED=1" in str(error)
        monkeypatch.setenv(ring_start.RELAYED, "1")
        real[:] = free_addresses(2)
        assert both() == [None]


def splice(one: socket.socket, other: socket.socket) -> None:
    """Hands on all bytes between two connections, both ways."""
    with one, other, contextlib.suppress(OSError):
        while True:
            for ready in select.select([one, other], [], [], 20)[0]:
                piece = ready.recv(65536)
                if not piece:
                    return
                (other if ready is one else one).sendall(piece)


def test_an_address_that_is_not_this_hosts_is_one_line() -> None:
    with pytest.raises(UserError, match=r"cannot listen at 192.0.2.7:32323: .*--starting-port") as error:
        ring_start.meet(1, [[("127.0.0.1", 1)], [("192.0.2.7", 32323)]], SECRET)
    assert "\n" not in str(error.value)


def test_a_port_that_becomes_free_in_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as before:
        address = before.getsockname()
        threading.Timer(0.3, before.close).start()
        with ring_start._listening(address) as listening:
            assert listening.getsockname() == address
            monkeypatch.setattr(ring_start, "IN_USE_SECONDS", 0.1)
            with pytest.raises(UserError, match=r"Address already in use.*--starting-port"):
                ring_start._listening(address)


def test_mlxs_ring_of_three_comes_up_whoever_is_late(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    ports = [f"{host}:{port}" for host, port in free_addresses(6)]
    path.write_text(json.dumps([ports[:2], ports[2:4], ports[4:]]))  # two connections between neighbours
    code = (
        "from lib.system import mpi_and_blas; mpi_and_blas.prepare()\n"
        "import time, mlx.core as mx; from lib.distributed import world as worlds\n"
        "init, calls = mx.distributed.init, []\n"
        "mx.distributed.init = lambda *a, **k: (calls.append(time.monotonic()), init(*a, **k))[1]\n"
        "began = time.monotonic()\n"
        "world = worlds.start(mpi_and_blas.launch_environment(), 30)\n"
        "own = mx.full(2**19, 2**world.rank)  # smaller ones are messages\n"
        "print(world.all_sum(own, 'the sum')[0].item(), began, calls[0])"
    )
    started = []
    for rank in (2, 1, 0):
        own = {**os.environ, "MLX_HOSTFILE": str(path), "MLX_RANK": str(rank)}
        started.append(subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=own, stdout=subprocess.PIPE))
        time.sleep(1.8)  # MLX's last rank would ask again only 3.4 s after the first is there
    told = [process.communicate(timeout=120)[0].split() for process in started]
    assert [words[0] for words in told] == [b"7"] * 3
    came, began_mlx = ([float(words[at]) for words in told] for at in (1, 2))
    assert max(came) <= min(began_mlx), "MLX looks for its neighbours before all are there"


def test_a_jaccl_rank_ends_in_order_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "devices.json").write_text('[[null, "rdma_en5"], ["rdma_en5", null]]')
    code = (
        "from lib.system import mpi_and_blas; mpi_and_blas.prepare()\n"
        "import os, signal; from lib.distributed import world as worlds\n"
        "try: worlds.start(mpi_and_blas.launch_environment(), 5)\n"
        "except (RuntimeError, ValueError): pass  # no RDMA here\n"
        "try: os.kill(os.getpid(), signal.SIGTERM); signal.pause()\n"
        "except KeyboardInterrupt: print('in order')"
    )
    own = {"MLX_IBV_DEVICES": f"{tmp_path}/devices.json", "MLX_JACCL_COORDINATOR": "127.0.0.1:9", "MLX_RANK": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, **own}, capture_output=True, text=True, timeout=30
    )
    assert done.stdout == "in order\n", done.stderr
