"""Machines that are started by hand say for whom they wait, and begin together once all are there."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lib.errors import UserError
from lib.launch import command, rendezvous
from lib.launch.hostfile import Host
from lib.system import handshake, key_file
from tests.cluster import Host as Machine
from tests.ports import free_port
from tests.test_launch import words

HOSTS = tuple(Host(name, addresses=("127.0.0.1",)) for name in ("mac-a", "mac-b", "mac-c"))
COMMANDS = ("COME FIRST", "COME SECOND")
WAIT_SECONDS = 60.0  # on a busy machine
KEY = b"0123456789abcdef0123456789abcdef"


def meeting(port: int, limit_seconds: float, key: bytes = KEY) -> rendezvous.Meeting:
    return rendezvous.Meeting(port, limit_seconds, key, Path("THE KEY"))


@pytest.fixture
def port() -> int:
    return free_port()


class Desk:
    """The three machines: what each was told, and when it went on."""

    def __init__(self, port: int):
        self.port, self.notes = port, {host.name: [] for host in HOSTS}  # type: ignore[var-annotated]

    def sit(self, place: int, hosts: tuple[Host, ...] = HOSTS, key: bytes = KEY) -> asyncio.Task[bytes]:
        note = self.notes[HOSTS[place].name].append
        gathering = rendezvous.gather(hosts, HOSTS[place], meeting(self.port, 20, key), COMMANDS, note)
        return asyncio.ensure_future(gathering)

    async def said(self, place: int, text: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not any(text in note for note in self.notes[HOSTS[place].name]):
            assert time.monotonic() < deadline, self.notes
            await asyncio.sleep(0.01)


def test_each_says_who_is_missing_and_all_go_on_together(port: int) -> None:
    desk = Desk(port)

    async def story() -> None:
        early = desk.sit(1)  # before the primary
        await desk.said(1, "waiting for mac-a, the primary, 20 s at most; there: COME FIRST")
        first = desk.sit(0)
        await desk.said(0, "waiting for mac-b, mac-c, 20 s at most; there: COME SECOND")
        await desk.said(0, "waiting for mac-c, ")
        await desk.said(1, "mac-a is there; it says when all are")
        await asyncio.sleep(0.2)
        assert not early.done() and not first.done()
        late = desk.sit(2)
        secrets = await asyncio.wait_for(asyncio.gather(early, first, late), WAIT_SECONDS)
        assert len(set(secrets)) == 1 and secrets[0] != KEY, "the ranks of all have one secret, which is this run's"
        with socket.create_server(("127.0.0.1", port)):
            pass  # rank 0 can listen here at once

    asyncio.run(story())
    assert desk.notes["mac-a"][-1] == "all hosts are there"


def test_one_that_goes_away_is_waited_for_again_and_a_stranger_is_nobody(port: int) -> None:
    desk = Desk(port)

    async def story() -> None:
        first, second = desk.sit(0), desk.sit(1)
        await desk.said(0, "waiting for mac-c, ")
        second.cancel()
        await asyncio.sleep(0.3)
        assert desk.notes["mac-a"][-1].startswith("waiting for mac-b, mac-c, ")
        _, stranger = await asyncio.open_connection("127.0.0.1", port)
        stranger.write(b"\xff{not ours\n")
        others = asyncio.gather(desk.sit(1), desk.sit(2))
        await asyncio.wait_for(asyncio.gather(first, others), WAIT_SECONDS)
        stranger.close()

    asyncio.run(story())


def test_who_has_another_key_is_nobody_and_learns_it(port: int) -> None:
    desk, two = Desk(port), HOSTS[:2]

    async def story() -> None:
        first, foreign = desk.sit(0, hosts=two), desk.sit(1, hosts=two, key=bytes(32))
        await desk.said(1, f"what listens at 127.0.0.1:{port} has another key than THE KEY; copy the primary's")
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(handshake.STRANGERS + 10)]
        assert not first.done() and not foreign.done()
        foreign.cancel()
        await asyncio.wait_for(asyncio.gather(first, desk.sit(1, hosts=two)), handshake.STRANGER_SECONDS - 1)
        for _, writer in silent:
            writer.close()

    asyncio.run(story())


def test_a_key_is_made_once_for_this_user_alone_and_waited_for(tmp_path: Path) -> None:
    path, notes = tmp_path / "config" / "key", []
    with pytest.raises(UserError, match="key file .*: No such file or directory; copy it from the machine that has it"):
        rendezvous.key_of(path, False, 0.2, notes.append)
    key = rendezvous.key_of(path, True, 0.2, notes.append)
    assert rendezvous.key_of(path, True, 0.2, notes.append) == rendezvous.key_of(path, False, 0.2, notes.append) == key
    assert len(key) == 64 and path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]
    assert [note.split()[0] for note in notes] == ["waiting", "made"]
    path.chmod(0o644)
    with pytest.raises(UserError, match=r"others may read or change it \(mode 0644\); chmod 600"):
        rendezvous.key_of(path, True, 0.2, print)
    path.chmod(0o600)
    path.write_text("guess me\n")
    with pytest.raises(UserError, match="it holds 8 characters, not one line of 32 or more"):
        rendezvous.key_of(path, True, 0.2, print)


def test_the_first_of_the_network_with_most_strangers_makes_room(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert handshake.to_push_out({1: "a", 2: "b", 3: "c", 4: "b", 5: "b", 6: "a"}) == 2
    monkeypatch.setattr(handshake, "STRANGERS", 2)
    listening = socket.create_server(("127.0.0.1", 0))
    with handshake.Listener(listening, KEY, "test") as listener, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", listener.port)
        silent = [stack.enter_context(socket.create_connection(address, WAIT_SECONDS)) for _ in range(4)]
        threading.Thread(target=handshake.connect, args=(address, KEY, "test", WAIT_SECONDS), daemon=True).start()
        stack.enter_context(listener.accept(WAIT_SECONDS).connection)
        assert [one.recv(1) for one in silent[:3]] == [b""] * 3
        assert [one.network for one in listener._strangers.values()] == ["127.0.0.1"], "whatever their ports"

    async def nobody(channel: handshake.StreamChannel) -> None:
        raise AssertionError("nobody proves anything here")

    async def story() -> None:
        streams = handshake.StreamListener(KEY, "test", nobody)
        await streams.start(port)
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        for reader, writer in silent[:2]:
            assert await asyncio.wait_for(reader.read(1), WAIT_SECONDS) == b""
            writer.close()
        assert list(streams._strangers.values()) == ["127.0.0.1"] * 2
        await streams.close()

    asyncio.run(story())


def test_a_primary_that_is_started_again_finds_its_secondaries(port: int) -> None:
    desk, two = Desk(port), HOSTS[:2]

    async def story() -> None:
        third = desk.sit(0)
        second = desk.sit(1)
        await desk.said(1, "mac-a is there")
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        second.cancel()
        again = desk.sit(1, hosts=two)
        await asyncio.sleep(0.1)
        await asyncio.wait_for(asyncio.gather(desk.sit(0, hosts=two), again), WAIT_SECONDS)

    asyncio.run(story())


def test_nobody_waits_longer_than_the_limit(port: int) -> None:
    with pytest.raises(rendezvous.Absent, match="mac-b, mac-c did not come within the time of --wedged-seconds"):
        asyncio.run(rendezvous.gather(HOSTS, HOSTS[0], meeting(port, 0.2), COMMANDS, print))
    with pytest.raises(rendezvous.Absent, match=f"mac-a, the primary, did not come .* port {port}"):
        asyncio.run(rendezvous.gather(HOSTS, HOSTS[1], meeting(port, 0.2), COMMANDS, print))


def test_other_hosts_and_a_taken_port_are_the_users_to_mend(port: int) -> None:
    desk = Desk(port)

    async def story() -> None:
        first = desk.sit(0)
        with pytest.raises(UserError, match="was started with the hosts mac-a, mac-b, mac-c; give the same"):
            await desk.sit(1, hosts=HOSTS[:2])
        with pytest.raises(UserError, match=f"port {port} cannot be listened at .*--starting-port {port + 1000}"):
            await desk.sit(0)
        first.cancel()

    asyncio.run(story())


def test_the_command_for_the_others_is_this_one_with_the_other_role() -> None:
    given = ["--hosts", "a,b", "--role", "primary", "--env", "A=b c", "--", "train.py", "--role", "x"]
    primary, secondary = command.role_commands(given)
    assert secondary == "./launch --role secondary --hosts a,b --env 'A=b c' -- train.py --role x"
    assert primary == secondary.replace("secondary", "primary")
    assert command.role_commands(["--role=primary", "--hosts", "a,b"])[1] == "./launch --role secondary --hosts a,b"


@pytest.mark.long
def test_three_machines_by_hand_with_one_that_comes_late(three_hosts: list[Machine]) -> None:
    show = ["sh", "-c", "cat $MLX_HOSTFILE; echo"]
    key = three_hosts[0].disk.parent / "by-hand-key"  # on a disk that all of them see

    def role_words(role: str, *options: str) -> list[str]:
        return words(three_hosts, "--role", role, "--key", str(key), *options)

    def start(place: int, role: str, *options: str) -> Any:
        return three_hosts[place].start([*role_words(role, *options), *show])

    key_file.make(key)

    hands = [start(0, "primary"), start(2, "secondary")]
    line = hands[0].stderr.readline()
    assert line.startswith("launch: waiting for host-b, host-c, 600 s at most; there: ./launch --role secondary "), line
    assert "host-b" in hands[0].stderr.readline()
    hands.append(start(1, "secondary"))
    for hand in hands:
        output, errors = hand.communicate(timeout=60)
        assert hand.returncode == 0 and output.count("10.77.0.") == 3, output + errors
    alone = three_hosts[0].run([*role_words("primary", "--wedged-seconds", "1"), *show])
    assert alone.returncode == 1 and alone.stderr.count("\n") == 2 and "did not come" in alone.stderr, alone
    waiting = start(1, "secondary")
    assert "waiting for host-a, the primary" in waiting.stderr.readline()
    pid = next(pid for pid, line in three_hosts[1].processes().items() if "launch" in line)
    three_hosts[1].signal(pid, signal.SIGINT)
    _, errors = waiting.communicate(timeout=60)
    assert waiting.returncode == 130 and "Traceback" not in errors, errors
