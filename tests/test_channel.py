"""The stream between a launcher and its agents bears whatever else is written into it: nothing in it ends the reading but its end."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lib.launch.agent_messages import ForeignTexts, decoded, encoded

from lib.launch import agent_link, agent_messages, host_agent
from lib.launch.hostfile import Host
from lib.launch.job import Job
from tests.test_launch import python, words
from tests.test_local_launch import FAR, launch, stand_in
from tests.tiny import ROOT

EXIT = {"kind": "exit", "rank": 0, "status": 7}
LINE = encoded("exit", rank=0, status=7)


@pytest.mark.parametrize(
    ("line", "foreign"),
    [
        (LINE, ""),
        (LINE.rstrip(), ""),  # the last one, without its end
        (b"warning: slow {disk}" + LINE, "warning: slow {disk}"),
        (LINE.rstrip() + b"Connection closed\r\n", "Connection closed"),
        (b'{"kind": "output", "text": "cut o' + LINE, ""),
        (LINE.rstrip() + b'{"kind": "outp\n', ""),
        (b"\xff\xfe" + LINE, "\ufffd\ufffd"),
    ],
)
def test_a_message_is_found_in_whatever_stands_around_it(line: bytes, foreign: str) -> None:
    assert decoded(line) == ([EXIT], foreign)


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"null\n", b"[1, 2]\n", b'{"a": 1}\n', b'{"kind": 3}\n', b"[" * 100_000, b"\x00\xff\n", b"{" * 9],
    ids=range(9),
)
def test_what_is_no_message_is_text(line: bytes) -> None:
    messages, foreign = decoded(line)
    assert not messages and foreign == line.decode(errors="replace").strip()


@pytest.mark.parametrize(
    "line", [LINE[:20], LINE[:-5], b'{"kind": "' + b'{"kind": "' * 1000, b'{"kind": "x", "y": ' + b"[" * 10**5]
)
def test_of_a_message_that_was_cut_off_nothing_is_shown(line: bytes) -> None:
    assert decoded(line) == ([], "")


def test_what_is_shown_of_foreign_texts_is_bounded() -> None:
    texts = ForeignTexts(limit=2)
    assert texts.shown("") is None
    assert texts.shown("\033[2Ja\tb" + "c" * 10**6) == " [2Ja b" + "c" * (agent_messages.TEXT_CHARACTERS - 7) + " ..."
    assert texts.shown("last") == "last (more of this kind is not shown)" and texts.shown("more") is None


LONG = "import sys; sys.stdout.write('a\\n' + 'x' * 40 * 2**20 + '\\nb\\nc')"


def test_a_line_that_is_too_long_is_passed_over() -> None:
    async def read() -> list[bytes]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", LONG, stdout=subprocess.PIPE, limit=agent_messages.LINE_BYTES
        )
        assert process.stdout is not None
        found = [line async for line in agent_messages.lines(process.stdout)]
        await process.wait()
        return found

    found = asyncio.run(read())
    assert found[0] == b"a\n" and found[-2:] == [b"b\n", b"c"] and sum(map(len, found)) < 40 * 2**20


# Another process of the host writes beside the agent as long as that lives: half lines, what is no text, what looks like a message.
NOISE = r"""
(while kill -0 $$ 2>/dev/null; do
  printf 'warning: {half a line\n\377\376\n[1, 2]\n{"kind": "exit"}\n{"kind": "answer", "number": []}\n{"kind": "outp\n'
  sleep 0.02
done) &
for last; do :; done
exec sh -c "$last"
"""
# Breaks off somewhere in what follows the hello, as a connection does.
CUT = 'for last; do :; done; sh -c "$last" | { dd bs=1 count=400 2>/dev/null; kill $$; }'


def test_a_launch_bears_what_else_a_host_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, NOISE, monkeypatch)
    code = python("[print(i, 'x' * 1000) for i in range(2000)]; sys.exit(7)")
    process = launch(*words(FAR.name), *code)
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 7 and "ended with status 7" in errors and "Traceback" not in errors, errors
    numbers = [int(line.split()[2]) for line in output.splitlines()]
    # What is written into the middle of a line of the agent's takes that one.
    assert len(numbers) > 1900 and numbers == sorted(set(numbers))
    said = [line for line in errors.splitlines() if f"{FAR.name} says: " in line]
    assert 0 < len(said) <= agent_messages.TEXTS and any("{half a line" in line for line in said), errors


def test_an_agent_whose_last_line_is_cut_off_is_lost_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, CUT, monkeypatch)
    process = launch(*words(FAR.name), *python("[print(i) for i in range(2000)]; time.sleep(1000)"))
    _, errors = process.communicate(timeout=120)
    assert (
        process.returncode == 1 and f"lost: the connection to {FAR.name} ended" in errors and "Traceback" not in errors
    ), errors


def test_a_question_under_way_ends_with_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, CUT, monkeypatch)

    async def ask() -> None:
        link = await agent_link.connect(Job((FAR,), "ring", ("true",)), FAR)
        closed = asyncio.Event()
        link.on_message = lambda kind, _: closed.set() if kind == "closed" else None
        asking = [asyncio.ensure_future(link.ask("probe", 1000.0, address="", port=0, seconds=0)) for _ in range(20)]
        answers = await asyncio.gather(*asking, return_exceptions=True)
        await closed.wait()
        assert link.closed and all(isinstance(answer, ConnectionError) for answer in answers)
        assert "its agent is gone" in str(answers[-1])
        await link.close()

    asyncio.run(asyncio.wait_for(ask(), 60))


def test_an_agent_goes_on_after_lines_that_are_not_the_launchers() -> None:
    agent = subprocess.Popen(
        [sys.executable, "-m", "lib.agent"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    sent = [
        b"hello\n",
        b"\xff\n",
        b"[]\n",
        b'{"kind": "start"}\n',
        b'{"kind": "ask", "question"\n',
        b'{"kind": "end", "x": 1}\n',
    ]
    questions = [
        encoded("ask", question="listen", number=1),
        encoded("ask", question="listen", number=2, port=0, token="", seconds=1),
    ]
    assert agent.stdin is not None and agent.stdout is not None
    agent.stdin.write(b"".join([*sent, *questions]))
    agent.stdin.flush()
    said = [json.loads(agent.stdout.readline())]
    while said[-1].get("number") != 2:
        said.append(json.loads(agent.stdout.readline()))
    output, errors = agent.communicate(b'{"kind": "sta', timeout=60)
    assert agent.returncode == 0 and not output and not errors and said[0]["kind"] == "hello"
    assert [message["kind"] for message in said].count("warning") == 5, said
    answers = {message["number"]: message for message in said if message["kind"] == "answer"}
    assert "error" in answers[1] and answers[2]["answer"] == 0


def test_a_greeting_that_is_json_or_endless_is_no_hello(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    greeting = """echo '{"motd": 1}'; head -c 20000000 /dev/zero | tr '\\0' x; echo; for last; do :; done; exec sh -c "$last" """
    stand_in(tmp_path, greeting, monkeypatch)

    async def reach() -> str:
        link = await agent_link.connect(Job((FAR,), "ring", ("true",)), Host(FAR.name))
        await link.close()
        return link.machine

    assert asyncio.run(reach())


def test_of_questions_that_come_in_a_heap_none_keeps_a_port() -> None:
    """Over a slow link an agent is told to listen, to listen again and to start a rank there, all at once."""

    async def story() -> None:
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        agent = host_agent.Agent(None)  # type: ignore[arg-type]
        questions = [agent.answer("listen", port=port, token="00" * 32, seconds=1) for _ in range(2)]
        asked = [asyncio.ensure_future(question) for question in questions]
        await asyncio.sleep(0)  # both have begun, as the next message is read
        await agent._change_listener()
        assert await asyncio.gather(*asked) == [port, port]
        socket.create_server(("", port)).close()

    asyncio.run(story())


def test_a_probed_port_is_given_back_where_nobody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_agent, "PROBES", 0.2)

    async def story() -> None:
        agent = host_agent.Agent(None)  # type: ignore[arg-type]
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        await agent.answer("listen", port=port, token="00" * 32, seconds=0.0)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("", port)).close()
        await asyncio.sleep(0.6)
        socket.create_server(("", port)).close()

    asyncio.run(story())
