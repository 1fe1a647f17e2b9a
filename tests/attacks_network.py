"""What somebody on the network, or another user of the machine, does to a run's listeners: each line an attack.

As tests/attacks.py: an attack gives why it fell, or nothing where the program held. None needs a model.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import os
import re
import socket
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

import mlx.core as mx
import numpy as np

from lib.distributed import ring_start
from lib.distributed.checked_sums import CheckedSums
from lib.distributed.peer_messages import PeerMessages
from lib.errors import Stopped, UserError
from lib.evaluate.work_journal import Journal
from lib.evaluate.work_queue import Dispatcher, Remote, Server, work
from lib.launch import host_agent, host_ranks, link_probe, mpirun_ports, rendezvous
from lib.launch.hostfile import Host
from lib.system import handshake, key_file
from lib.system.handshake import Channel, Listener, NotTrusted
from tests.forked import free_port
from tests.tiny import ROOT

Attack = Callable[[Path], str | None]
SECRET, OTHER = b"the secret of this run".ljust(32), b"the secret of another run".ljust(32)
MOMENT = 2.0  # that a stranger may cost, on a busy machine
WORDS = {
    "nothing": b"",
    "one byte": b"t",
    "HTTP": b"GET / HTTP/1.0\r\n\r\n",
    "a TLS hello": bytes([22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3]) + bytes(32),
    "a greeting": handshake.GREETING,
    "a greeting and zeros": handshake.GREETING + bytes(64),
    "noise": np.random.default_rng(0).bytes(4096),
    "a line without end": b"x" * 100_000,
    "old words": b"tandem: ready?\n" * 3,
    "JSON": b'{"secret": "0000", "rank": 1}\n{"here": "mac-b", "hosts": []}\n',
}


def free_ports(count: int) -> list[int]:
    ports: set[int] = set()
    while len(ports) < count:
        ports.add(free_port())
    return list(ports)


@contextlib.contextmanager
def strangers(ports: Sequence[int], says: bytes, count: int = 3) -> Iterator[None]:
    """Somebody who is at these ports all the time, before anybody else, and hangs up never."""
    over, held = threading.Event(), []

    def disturb(port: int) -> None:
        made = 0
        while not over.is_set() and made < count:
            with contextlib.suppress(OSError):
                connection = socket.create_connection(("127.0.0.1", port), 1)
                held.append(connection)
                made += 1
                connection.sendall(says)
            time.sleep(0.001)

    threads = [threading.Thread(target=disturb, args=(port,), daemon=True) for port in ports]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()
        for connection in held:
            connection.close()


def meet(
    nodes: Sequence[Sequence[ring_start.Address]], views: Sequence[Sequence[Sequence[ring_start.Address]]] = ()
) -> list[object]:
    """What every rank has after the meeting: neighbours, or an error. views: the addresses as each rank knows them."""
    results: list[object] = [None] * len(nodes)

    def run(rank: int) -> None:
        try:
            results[rank] = ring_start.meet(rank, views[rank] if views else nodes, SECRET)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(nodes))]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join(10)
    return results


def ring(says: bytes, count: int = 3) -> Attack:
    """Strangers at every rank's port while the ring starts."""

    def attack(_: Path) -> str | None:
        ports = free_ports(3)
        began = time.monotonic()
        with strangers(ports, says, count):
            time.sleep(0.05)
            results = meet([[("127.0.0.1", port)] for port in ports])
        seconds = time.monotonic() - began
        if not all(isinstance(one, ring_start.Neighbours) for one in results):
            return f"the ring did not start: {results}"
        return f"it was held up for {seconds:.1f} s" if seconds > MOMENT else None

    return attack


def relay(change: Callable[[bytes, int], bytes], target: int) -> int:
    """A port whose connections are handed on to another port; `change` gets what passes, and which connection it is."""
    server = socket.create_server(("127.0.0.1", 0))

    def hand_on(one: socket.socket, other: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(65536):
                other.sendall(change(piece, number))
        for end in (one, other):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)  # the other direction's thread ends, too

    def accept() -> None:
        number = 0
        while True:
            one = server.accept()[0]
            try:
                other = socket.create_connection(("127.0.0.1", target), 2)
            except OSError:
                one.close()
                continue
            other.settimeout(None)
            for ends in ((one, other), (other, one)):  # a thread each: both may be full at once
                threading.Thread(target=hand_on, args=(*ends, number), daemon=True).start()
            number += 1

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def relayed_ring(_: Path) -> str | None:
    """Somebody has the port that rank 0 calls, and hands all on to rank 1: he reads and changes what he likes."""
    ports = free_ports(2)
    false = relay(lambda piece, _: piece, ports[1])
    real = [[("127.0.0.1", port)] for port in ports]
    with mock.patch.object(ring_start, "CONNECT_SECONDS", 1.0):
        first = meet(real, [[real[0], [("127.0.0.1", false)]], real])[0]
    return None if isinstance(first, UserError) and "relays" in str(first) else f"rank 0 went on: {first!r}"


def changed_messages(_: Path) -> str | None:
    """The same, where relays are allowed, and one bit of the ranks' messages is changed."""
    ports, over = free_ports(2), threading.Event()

    def change(piece: bytes, number: int) -> bytes:
        return piece[:-1] + bytes([piece[-1] ^ 1]) if number == 0 and over.is_set() else piece

    false = relay(change, ports[1])
    real = [[("127.0.0.1", port)] for port in ports]
    os.environ[ring_start.RELAYED] = "1"
    try:
        met = meet(real, [[real[0], [("127.0.0.1", false)]], real])
    finally:
        del os.environ[ring_start.RELAYED]
    assert isinstance(met[0], ring_start.Neighbours) and isinstance(met[1], ring_start.Neighbours), met
    over.set()
    threading.Thread(target=met[0].messages.gather, args=(b"mine",), daemon=True).start()
    try:
        return f"rank 1 got {met[1].messages.gather(b'mine')}"
    except Stopped as error:
        return None if "somebody sits between" in str(error) else str(error)


# ---- Sums that somebody changes on their way


def channels() -> tuple[Channel, Channel]:
    """Both ends of a channel."""
    with Listener(socket.create_server(("127.0.0.1", 0)), SECRET, "test") as listener:
        made: list[Channel] = []
        port = listener.port
        calling = threading.Thread(
            target=lambda: made.append(handshake.connect(("127.0.0.1", port), SECRET, "test", 5.0))
        )
        calling.start()
        accepted = listener.accept(5.0)
        calling.join()
        return made[0], accepted


def compared(note: Callable[[CheckedSums, int], None], size: int = 2) -> list[str]:
    """How the comparison ended for every rank, where each notes what `note` has it note; "" where all was right."""
    links = [channels() for _ in range(size)]  # from each rank to the next
    ends = [""] * size

    def run(rank: int) -> None:
        checks = CheckedSums(PeerMessages(rank, size, links[rank - 1][1], links[rank][0]), SECRET)
        try:
            note(checks, rank)
            checks.compare()
        except Stopped as error:
            ends[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return ends


def changed_sum(dtype: mx.Dtype, alike: bool, numbers: int = 100_000) -> Attack:
    """One number of a sum is changed, for one rank or for all alike: the weights then stay equal on all of them."""

    def attack(_: Path) -> str | None:
        ends = compared(lambda checks, rank: note_sum(checks, rank, dtype, 1.0, alike, numbers))
        right = compared(lambda checks, rank: note_sum(checks, rank, dtype, 0.0, alike, numbers))
        if any(right):
            return f"a right sum was refused: {right}"
        return None if all("got another result of the test" in end for end in ends) else f"it was not seen: {ends}"

    return attack


def note_sum(checks: CheckedSums, rank: int, dtype: mx.Dtype, change: float, alike: bool, numbers: int) -> None:
    draw = np.random.default_rng(1)
    parts = [
        draw.normal(size=numbers) if dtype in (mx.float32, mx.bfloat16) else draw.integers(-9, 9, numbers) for _ in "ab"
    ]
    gave = [mx.array(part).astype(dtype) for part in parts]
    total = gave[0] + gave[1]
    if change and (alike or rank == 1):
        index = numbers // 2
        total[index] = total[index] + (change if dtype == mx.int32 else 60.0 * change)
    mx.eval(total)
    checks.note_sum("the test", gave[rank], total)


def changed_gather(_: Path) -> str | None:
    """The sign of one number that a rank gathered is changed."""

    def note(checks: CheckedSums, rank: int) -> None:
        own = [np.random.default_rng(index).bytes(4096) for index in range(2)]
        got = bytearray(own[0] + own[1])
        if rank == 1:
            got[403] ^= 0x80
        checks.note_gather(
            "the test", mx.array(np.frombuffer(own[rank], np.uint8)), mx.array(np.frombuffer(bytes(got), np.uint8))
        )

    ends = compared(note)
    return None if all("rank 1" in end for end in ends) else f"it was not seen: {ends}"


def changed_message(bits: int, dtype: mx.Dtype, numbers: int) -> Attack:
    """What one rank sends another is changed on its way, in so many bits; other messages come late, and as they were."""

    def attack(_: Path) -> str | None:
        arrays = [
            mx.array(np.random.default_rng(number).normal(size=(numbers, 1))).astype(dtype) for number in range(9)
        ]

        mx.eval(arrays)  # a thread evaluates nothing of another's

        def note(change: int) -> Callable[[CheckedSums, int], None]:
            def noted(checks: CheckedSums, rank: int) -> None:
                for number, array in enumerate(arrays[:6], 1):
                    if rank == 0:
                        checks.note_sent(array, number, 1)
                    else:
                        checks.note_received(array, number, 0)
                if rank == 0:  # which are not there yet when ranks compare
                    checks.note_sent(arrays[6], 7, 1)
                checks.compare()
                came = bytearray(np.array(mx.view(arrays[6].reshape(-1), mx.uint8)))
                came[numbers] ^= change
                if rank == 1:
                    checks.note_received(mx.array(np.frombuffer(bytes(came), np.uint8)), 7, 0)

            return noted

        if any(right := compared(note(0))):
            return f"what came as it was sent is refused: {right}"
        ends = compared(note(bits))
        return None if all("rank 1 on" in end and "than rank 0 sent" in end for end in ends) else f"not seen: {ends}"

    return attack


def unlike_weights(_: Path) -> str | None:
    ends = compared(lambda checks, rank: checks.require_equal("weights", f"digest {min(rank, 1)}"), 3)
    return None if all("rank 1 on" in end and "other weights than rank 0" in end for end in ends) else str(ends)


# ---- The work queue


def queue(says: bytes, count: int = 3) -> Attack:
    """Strangers at the queue's port while ranks work, and when all ends."""

    def attack(folder: Path) -> str | None:
        journal = Journal(folder / f"queue-{os.urandom(4).hex()}.partial", "key", 20)
        server = Server(Dispatcher(journal), everywhere=False)
        began = time.monotonic()
        with strangers([server.address["port"]], says, count):
            time.sleep(0.05)
            work(Remote(server.address, 1, 10.0), lambda chunk: [str(chunk)])
            server.close(30.0)
        seconds = time.monotonic() - began
        if not journal.done.all():
            return "not all was done"
        return f"it was held up for {seconds:.1f} s" if seconds > MOMENT else None

    return attack


def false_queue(_: Path) -> str | None:
    """Somebody listens where the queue is expected: he learns nothing that opens it, and gives no work."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen() -> None:
            connection = server.accept()[0]
            heard.append(connection.recv(4096))
            connection.sendall(bytes(64))
            connection.settimeout(5)
            heard.append(connection.recv(4096))

        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        address = server.getsockname()[1]
        try:
            Remote({"port": address, "secret": SECRET.hex(), "hosts": ["127.0.0.1"]}, 1, 5.0)
            return "a rank takes work from whoever listens"
        except UserError:
            thread.join(5)
    said = b"".join(heard)
    return f"it was told {said!r}" if SECRET in said or SECRET.hex().encode() in said or len(said) > 64 else None


# ---- Machines that are started by hand; links; agents


def by_hand(says: bytes, count: int = 3) -> Attack:
    """Strangers at the primary's port while it waits."""

    def attack(_: Path) -> str | None:
        hosts = tuple(Host(name, addresses=("127.0.0.1",)) for name in ("mac-a", "mac-b"))
        meeting = rendezvous.Meeting(free_ports(1)[0], 10.0, SECRET, Path("key"))

        async def story() -> list[bytes]:
            primary = asyncio.ensure_future(rendezvous.gather(hosts, hosts[0], meeting, ("", ""), lambda _: None))
            await asyncio.sleep(0.3)
            secondary = rendezvous.gather(hosts, hosts[1], meeting, ("", ""), lambda _: None)
            return list(await asyncio.gather(primary, secondary))

        began = time.monotonic()
        with strangers([meeting.port], says, count):
            secrets = asyncio.run(story())
        seconds = time.monotonic() - began
        if len(set(secrets)) != 1:
            return "the machines have unlike secrets"
        return f"it was held up for {seconds:.1f} s" if seconds > 2 * MOMENT else None

    return attack


def echo(says: bytes) -> Attack:
    """Who has no token gets no byte back from a link that is measured, and does not disturb the measurement."""

    def attack(_: Path) -> str | None:
        port = link_probe.listen(0, SECRET)
        with strangers([port], says), socket.create_connection(("127.0.0.1", port), 2) as stranger:
            stranger.sendall(b"       8tandem!!")
            stranger.settimeout(0.3)
            with contextlib.suppress(TimeoutError, ConnectionError):
                if stranger.recv(100):
                    return "it answered a stranger"
            report = link_probe.answer({"address": "127.0.0.1", "port": port, "token": SECRET.hex()})
        return report.get("error")

    return attack


def false_link(_: Path) -> str | None:
    """Somebody else listens at the port at which an agent is to be reached: the host does not count as reached."""

    async def story() -> str | None:
        agent = host_agent.Agent(None)  # type: ignore[arg-type]
        server = await asyncio.start_server(lambda _, writer: writer.write(bytes(64)), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            await agent.answer("probe", address="127.0.0.1", port=port, seconds=1.0, token=SECRET.hex())
            return "a stranger's listener counts as the host's"
        except (OSError, TimeoutError):
            return None
        finally:
            server.close()

    return asyncio.run(story())


# ---- Proofs


def proof(attempt: Callable[[socket.socket], None]) -> Attack:
    """Something else than a proof, at a listener: nobody is let in."""

    def attack(_: Path) -> str | None:
        with Listener(socket.create_server(("127.0.0.1", 0)), SECRET, "test") as listener:
            address = ("127.0.0.1", listener.port)

            def call() -> None:
                with contextlib.suppress(OSError), socket.create_connection(address, 2) as connection:
                    connection.settimeout(2)
                    attempt(connection)

            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            try:
                listener.accept(0.5)
                return "it was let in"
            except TimeoutError:
                return None

    return attack


def reflected(connection: socket.socket) -> None:
    """The listener's own nonce and proof, sent back."""
    connection.sendall(handshake.GREETING + bytes(32))
    answer = connection.recv(64)
    connection.sendall(answer[32:])


def replayed(connection: socket.socket) -> None:
    """All that a caller who was let in sent, once more."""
    sent = bytearray()
    with Listener(socket.create_server(("127.0.0.1", 0)), SECRET, "test") as other:

        def record(piece: bytes, _: int) -> bytes:
            sent.extend(piece if len(piece) != 64 else b"")
            return piece

        port = relay(record, other.port)
        caller = threading.Thread(
            target=lambda: handshake.connect(("127.0.0.1", port), SECRET, "test", 2.0), daemon=True
        )
        caller.start()
        other.accept(2.0)
    connection.sendall(bytes(sent))


def called_for(secret: bytes, purpose: str) -> Callable[[socket.socket], None]:
    """A proof by another secret, or for another purpose, of a caller who does not mind who listens."""

    def attempt(connection: socket.socket) -> None:
        mine = os.urandom(handshake.NONCE_BYTES)
        connection.sendall(handshake.GREETING + mine)
        nonces = mine + connection.recv(64, socket.MSG_WAITALL)[: handshake.NONCE_BYTES]
        connection.sendall(handshake._code(secret, "caller", purpose, nonces))
        connection.recv(1)

    return attempt


def repeated_message(_: Path) -> str | None:
    """A message that was sent once is put in a second time."""
    one, other = channels()
    text = one._seals.sealed(b"pay 1")
    one.connection.sendall(text + text)
    other.receive()
    try:
        return f"it was taken again: {other.receive()!r}"
    except NotTrusted:
        return None


def long_message(_: Path) -> str | None:
    """A length of 4 GB in front of a message."""
    one, other = channels()
    one.connection.sendall(b"\xff" * 40)
    try:
        return f"{len(other.receive())} bytes were read"
    except NotTrusted:
        return None


# ---- Files and folders that somebody else made first


def taken_folder(make: Callable[[Path], None]) -> Attack:
    def attack(folder: Path) -> str | None:
        path = folder / f"tandem-{os.urandom(8).hex()}"
        make(path)
        try:
            host_ranks.own_folder(path)
        except OSError:
            return None
        found = path.lstat()
        private = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        return None if private else "a folder that others can look into was taken"

    return attack


def open_folder(path: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


def open_key(folder: Path) -> str | None:
    path = folder / f"key-{os.urandom(4).hex()}"
    path.write_text("0" * 64)
    path.chmod(0o644)
    try:
        key_file.read(path)
    except UserError:
        return None
    return "a key that everybody can read was taken"


def crowded_out(_: Path) -> str | None:
    """Somebody connects without a pause, and hangs up never; a rank whose every packet takes half a second gets in."""
    if not sys.platform.startswith("linux"):
        return None  # which alone has all of 127.0.0.0/8
    over = threading.Event()
    with Listener(socket.create_server(("127.0.0.1", 0)), SECRET, "test") as listener:
        address = ("127.0.0.1", listener.port)

        def disturb() -> None:
            held: deque[socket.socket] = deque(maxlen=500)
            while not over.is_set():
                with contextlib.suppress(OSError):
                    held.append(socket.create_connection(address, 1, source_address=("127.0.0.2", 0)))
                    held[-1].sendall(handshake.GREETING)

        def call() -> None:
            with socket.create_connection(address, 5) as connection:
                steps = handshake.calling(SECRET, "test")
                sent, wanted = next(steps)
                with contextlib.suppress(StopIteration, OSError):
                    while True:
                        time.sleep(0.5)
                        connection.sendall(sent)
                        sent, wanted = steps.send(connection.recv(wanted, socket.MSG_WAITALL))
                over.wait(10)

        threads = [threading.Thread(target=one, daemon=True) for one in (disturb, call)]
        for thread in threads:
            thread.start()
        try:
            listener.accept(8.0)
            return None
        except TimeoutError:
            return "it was never let in"
        finally:
            over.set()
            for thread in threads:
                thread.join()


def secrets_in_words(_: Path) -> str | None:
    """What `ps` shows of a launch and its ranks holds nothing of the run's secret, and nor does a rank's environment."""
    code = (
        "import contextlib, os, sys; from lib.distributed.run_secret import run_secret; secret = run_secret().hex()\n"
        "words = open('/proc/self/environ').read()\n"
        "for process in filter(str.isdecimal, os.listdir('/proc')):\n"
        "    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended\n"
        "        words += open(f'/proc/{process}/cmdline').read()\n"
        "mode = os.stat(os.path.join(os.environ['TANDEM_AGENT'] + '-' + __import__('lib.system.network').system.network.own_name())).st_mode\n"
        "print('held' if secret not in words and not mode & 0o077 else 'fell')"
    )
    words = ["--hosts", "localhost", "--no-preflight", "--", sys.executable, "-c", code]
    done = subprocess.run([sys.executable, "launch", *words], cwd=ROOT, capture_output=True, text=True, timeout=50)
    return None if "held" in done.stdout else done.stdout + done.stderr


# ---- Ports of others' programs, and the dashboard


def silent_at_mpirun(_: Path) -> str | None:
    """One connection to mpirun that says nothing, and Open MPI's server reads from it for ever: the launch never ends."""
    if not sys.platform.startswith("linux"):
        return None  # docs/security.md says so
    held: list[socket.socket] = []
    over, mark = threading.Event(), f"MARK={os.urandom(4).hex()}"

    def disturb() -> None:
        while not over.is_set() and not held:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    words = path.read_bytes().split(b"\0")
                    if Path(os.fsdecode(words[0])).name in ("mpirun", "prterun") and mark in os.fsdecode(
                        b" ".join(words)
                    ):
                        for port in listening(int(path.parent.name)):
                            held.extend(socket.create_connection(("127.0.0.1", port), 1) for _ in range(3))
            time.sleep(0.02)

    stranger = threading.Thread(target=disturb)
    stranger.start()
    words = ["--hosts", "localhost:2", "--backend", "mpi", "--no-preflight", "--", "sh", "-c", f"sleep 1 # {mark}"]
    try:
        done = subprocess.run([sys.executable, "launch", *words], cwd=ROOT, capture_output=True, text=True, timeout=50)
    except subprocess.TimeoutExpired:
        return "the launch hangs"
    finally:
        over.set()
        stranger.join()
        for connection in held:
            connection.close()
    if not held:
        return "mpirun listened nowhere"
    return None if done.returncode == 0 and "is shut down" in done.stderr else done.stderr


def listening(pid: int) -> list[int]:
    """The ports at which a process listens."""
    sockets = mpirun_ports._sockets_of(pid)
    entries = [one for one in mpirun_ports._entries() if one.inode in sockets and one.state == mpirun_ports.LISTENING]
    return [int(one.local.rpartition(":")[2], 16) for one in entries]


def dashboard(attempt: Callable[[int], str | None]) -> Attack:
    """Somebody at the dashboard's port who has no token."""

    def attack(folder: Path) -> str | None:
        words = [sys.executable, "-m", "lib.dashboard", "--runs", str(folder), "--port", "0"]
        process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            port, token = re.findall(r":(\d+)/\?token=(\S+)", process.stdout.readline())[0]
            if (why := attempt(int(port))) is not None:
                return why
            return None if status(int(port), f"/?token={token}") == 302 else "its owner is not let in"
        finally:
            process.terminate()
            process.wait(10)

    return attack


def status(port: int, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=15)
    connection.request("GET", path, headers=headers)
    return connection.getresponse().status


def without_token(port: int) -> str | None:
    for path in ("/", "/_dash-layout", "/_dash-dependencies", "/?token=", "/?token=a&token=b", "//", "/%2e/", "/x"):
        for cookie in ("", f"tandem-dashboard-{port}=", "tandem-dashboard=x", "\xff"):
            if (found := status(port, path, Cookie=cookie)) != 401:
                return f"{path} with {cookie!r} is answered by {found}"
    return None


def many_silent(port: int) -> str | None:
    with strangers([port], b"GET / HTTP/1.1\r\n", 600):
        time.sleep(1.5)
        began = time.monotonic()
        found = status(port, "/")
        seconds = time.monotonic() - began
    return None if found == 401 and seconds < MOMENT else f"{found} after {seconds:.1f} s"


ATTACKS: dict[str, Attack] = {
    **{f"ring: a stranger says {name}": ring(says) for name, says in WORDS.items()},
    "ring: 300 connections that say nothing": ring(b"", 300),
    "ring: somebody relays a connection": relayed_ring,
    "ring: a bit of the ranks' messages is changed": changed_messages,
    "ring: a float of a sum is changed for one rank": changed_sum(mx.float32, False),
    "ring: a float of a sum is changed for all ranks alike": changed_sum(mx.float32, True),
    "ring: a float of a sum that travels as bfloat16 is changed": changed_sum(mx.bfloat16, True, 500),
    "ring: an integer of a sum is changed by one": changed_sum(mx.int32, True),
    "ring: a sign of what was gathered is changed": changed_gather,
    "ring: a rank has other weights": unlike_weights,
    "pipeline: one bit of what a rank sends another": changed_message(1, mx.float32, 1000),
    "pipeline: a byte of what a rank sends another, of 2 bytes a number": changed_message(255, mx.bfloat16, 333),
    "pipeline: a sign of what a rank sends another, of half a million numbers": changed_message(
        128, mx.bfloat16, 500_000
    ),
    **{f"queue: a stranger says {name}": queue(says) for name, says in WORDS.items()},
    "queue: 300 connections that say nothing": queue(b"", 300),
    "queue: somebody else listens in its place": false_queue,
    **{f"machines by hand: a stranger says {name}": by_hand(says) for name, says in WORDS.items()},
    "machines by hand: 300 connections that say nothing": by_hand(b"", 300),
    **{f"link: a stranger says {name}": echo(says) for name, says in WORDS.items()},
    "link: somebody else listens for an agent": false_link,
    "proof: the listener's own, sent back": proof(reflected),
    "proof: a caller's, sent again": proof(replayed),
    "proof: of another run": proof(called_for(OTHER, "test")),
    "proof: for another purpose": proof(called_for(SECRET, "another")),
    "proof: of no secret": proof(called_for(b"", "test")),
    "proof: of one far away, beside somebody who connects without a pause": crowded_out,
    "message: sent again": repeated_message,
    "message: of 4 GB": long_message,
    "agent's folder: everybody may write into it": taken_folder(open_folder),
    "agent's folder: a link to another": taken_folder(lambda path: path.symlink_to("/tmp")),
    "agent's folder: a file": taken_folder(lambda path: path.touch()),
    "agent's folder: a pipe": taken_folder(lambda path: os.mkfifo(path)),
    "key: a file that everybody may read": open_key,
    "mpirun: connections that say nothing": silent_at_mpirun,
    "dashboard: nobody's token": dashboard(without_token),
    "dashboard: 600 requests that never end": dashboard(many_silent),
    "secret: in the words or variables of a process": secrets_in_words,
}
