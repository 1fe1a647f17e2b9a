"""The gateway's decisions: who gets the next request, who waits, what a backend is told, what a key is."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config import load
from lib.config.serve_settings import ServeSettings
from lib.errors import Stopped, UserError
from lib.launch.hostfile import Host
from lib.serve import api_keys, backend_pool, openai_answers, openai_requests, request_reading
from lib.serve import command as server
from lib.serve.backend_pool import HALVING_SECONDS, SLOT_TOKENS, Backend, Pool, QueueFull, choose, slots_of
from lib.serve.backend_supervisor import Keeper, Process, Recipe, pause_seconds
from lib.serve.completions import LOGPROBS_SLOTS
from lib.serve.connections import LONGEST_DELAY_SECONDS, PROBE_DELAY_SECONDS
from lib.serve.gateway import STRANGERS, Gateway
from lib.serve.openai_requests import BackendRequest, Limits, RequestError
from lib.serve.readers import Reader
from lib.serve.request_reading import Told
from tests.tiny import ROOT

LIMITS = Limits("tiny", max_prompt_tokens=100, max_tokens=50, vocab_size=283, context_tokens=120)
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def ups(*capacities: int) -> list[Backend]:
    return [Backend(str(number), capacity, is_up=True) for number, capacity in enumerate(capacities)]


# ---- Slots and the queue -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("milliseconds", "parts"), [(26, (2.5, 3.8)), (500, (8.0, 1000.0))])
def test_requests_go_to_backends_by_their_speed(milliseconds: int, parts: tuple[float, float]) -> None:
    """A minute of requests for ten tokens: near what both can do the parts are the speeds'; the slow one rests before that."""
    backends, speeds, now, done = ups(32, 32), (300.0, 100.0), 0.0, [0, 0]
    left: tuple[list[float], list[float]] = ([], [])
    for tick in range(60_000):
        now += 0.001
        if tick % milliseconds == 0:
            chosen = choose(backends)
            assert chosen is not None
            chosen.count(0, now)
            chosen.held.append(0)
            left[int(chosen.name)].append(10.0)
            done[int(chosen.name)] += tick > 20_000  # once both are measured
        for backend, speed, tokens in zip(backends, speeds, left, strict=True):
            if tokens:
                tokens[:] = [one - 0.001 * speed / len(tokens) for one in tokens]
                backend.count(0.001 * speed, now)  # type: ignore[arg-type]
                tokens[:] = [one for one in tokens if one > 0]
                backend.held = [0] * len(tokens)
    assert [backend.tokens_per_second for backend in backends] == pytest.approx(speeds, rel=0.1)
    assert parts[0] < done[0] / max(1, done[1]) < parts[1], done


def test_choosing_takes_what_is_free_and_up_and_measures_the_unknown_first() -> None:
    slow, fast, new, down = ups(4, 4, 4, 4)
    slow.tokens_per_second, fast.tokens_per_second, down.is_up = 100.0, 300.0, False
    fast.held = [0] * 1
    assert choose([slow, fast, new, down]) is new
    new.held = [0] * 4
    assert choose([slow, fast, new, down]) is fast  # 2 / 300 before 1 / 100
    fast.held = [0] * 3
    assert choose([slow, fast, new, down]) is slow
    fast.held, slow.held = [0] * 4, [0] * 4
    assert choose([slow, fast, new, down]) is None
    stuck = ups(4)[0]
    stuck.tokens_per_second = 0.0  # slower than anything, and not "not measured"
    fast.held = [0] * 3
    assert choose([stuck, fast]) is fast


def test_the_queue_is_fair_and_forgets_who_leaves() -> None:
    async def story() -> None:
        [backend] = ups(1)
        pool = Pool([backend], max_queue=4)
        order: list[str] = []

        async def one(name: str) -> None:
            got = await pool.take(name[0], 5)
            order.append(name)
            await asyncio.sleep(0)
            pool.give_back(got, name[0], 0.1)

        held = await pool.take("a", 5)
        waiting = [asyncio.create_task(one(name)) for name in ("a1", "a2", "gone", "b1")]
        await asyncio.sleep(0)
        assert pool.queue_length == 4
        waiting[2].cancel()
        await asyncio.sleep(0)
        assert pool.queue_length == 3
        pool.give_back(held, "a", 0.1)
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == ["b1", "a1", "a2"] and backend.in_flight == 0
        with pytest.raises(TimeoutError):
            held = await pool.take("a", 5)
            await pool.take("b", 0.01)
        assert pool.queue_length == 0

    asyncio.run(story())


def test_nobody_fills_the_places_for_others() -> None:
    """The newest request of whoever has most makes room; who has most is refused itself; what has a backend stays."""

    async def story() -> None:
        pool, lost = Pool(ups(2), max_queue=4), []

        async def one(name: str, has_backend: bool = False) -> None:
            try:
                with pool.place(name[0]) as place:
                    place.has_backend = has_backend
                    await asyncio.sleep(3600)
            except QueueFull as full:
                assert 1 <= full.retry_seconds <= 60
                lost.append(name)

        served = [asyncio.create_task(one(name, True)) for name in ("a-served", "a-served-too")]
        waiting = [asyncio.create_task(one(name)) for name in ("a1", "a2", "a3", "a4", "a5", "b1", "c1", "c2", "b2")]
        await asyncio.sleep(0.01)
        # a5 finds all taken; b1 and c1 push out a4 and a3; c2 would have as many as a then, and so would b2.
        assert sorted(lost) == ["a3", "a4", "a5", "b2", "c2"]
        assert not any(task.done() for task in served)
        for task in [*served, *waiting]:
            task.cancel()
        await asyncio.gather(*served, *waiting, return_exceptions=True)
        with pool.place("a"):
            pass

    asyncio.run(story())


def test_one_of_several_keys_leaves_slots_to_the_others() -> None:
    async def story() -> None:
        now = [0.0]
        pool = Pool(ups(8), max_queue=99, clock=lambda: now[0])
        whole = [await pool.take("greedy", 1) for _ in range(8)]  # nobody else has a key
        for backend in whole:
            pool.give_back(backend, "greedy", 0.1)
        pool.is_shared = True
        with pool.place("refused"):
            pass  # whose request was malformed
        more = [asyncio.create_task(pool.take("greedy", 60)) for _ in range(12)]
        await asyncio.sleep(0.01)
        alone = [task.result() for task in more if task.done()]
        assert len(alone) == 6, "a quarter of the slots is for whoever comes next"
        late = await pool.take("modest", 0.1)
        for backend in alone[:4]:
            pool.give_back(backend, "greedy", 0.1)
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in more) == 6, "it has its quarter still"
        pool.give_back(alone[4], "greedy", 0.1)
        await asyncio.sleep(0.01)
        assert sum(task.done() for task in more) == 7
        pool.give_back(late, "modest", 0.1)
        now[0] = 120.0  # nobody else asked for a while
        pool.give_back(alone[5], "greedy", 0.1)
        await asyncio.sleep(0.01)
        assert all(task.done() for task in more)

    asyncio.run(story())


def test_a_backend_holds_no_more_tokens_than_it_has_memory_for() -> None:
    """Rows of a batch are as long as its longest."""

    async def story() -> None:
        backend = Backend("a", 8, room_tokens=1000, is_up=True)
        pool = Pool([backend], max_queue=99)
        held = [await pool.take("a", 1, tokens=300), await pool.take("a", 1, tokens=200)]
        long = asyncio.create_task(pool.take("b", 60, tokens=400))  # three of 400 are too many
        await asyncio.sleep(0.01)
        short = asyncio.create_task(pool.take("c", 60, tokens=10))  # three of 300 would fit, but one came before
        await asyncio.sleep(0.01)
        assert not long.done() and not short.done() and backend.held == [300, 200]
        pool.give_back(held[0], "a", 0.1, tokens=300)
        await asyncio.sleep(0.01)
        assert long.done() and not short.done() and backend.held == [200, 400], "three of 400"
        pool.give_back(held[1], "a", 0.1, tokens=200)
        await asyncio.sleep(0.01)
        assert short.done() and backend.held == [400, 10]
        for tokens in (400, 10):
            pool.give_back(backend, "b" if tokens == 400 else "c", 0.1, tokens=tokens)
        assert await pool.take("a", 1, tokens=5000) is backend, "alone it may try"
        pool.give_back(backend, "a", 0.1, tokens=5000)
        await pool.take("a", 1, tokens=300)
        long, short = [asyncio.create_task(pool.take(name, 60, tokens=n)) for name, n in (("b", 900), ("c", 10))]
        await asyncio.sleep(0.01)
        assert not short.done()
        long.cancel()
        await asyncio.sleep(0.01)
        assert short.done(), "who waited before it has left"

    asyncio.run(story())


def test_long_prompts_count_as_several_slots_of_their_owner_until_they_are_read() -> None:
    async def play() -> None:
        pool, long = Pool(ups(16), max_queue=50), slots_of(3 * SLOT_TOKENS + 5)
        pool.is_shared = True
        held = [await pool.take("greedy", 1, long) for _ in range(12)]
        assert long == 4, "but nobody else asks: three quarters of 16, of whatever length"
        for backend in held:
            pool.give_back(backend, "greedy", 0.1, slots=long)
        await pool.take("modest", 1)
        held = [await pool.take("greedy", 1, long)]
        more = [asyncio.create_task(pool.take("greedy", 60, long)) for _ in range(4)]
        await asyncio.sleep(0.01)
        assert not any(one.done() for one in more), "a quarter of 16 is taken"
        pool.has_read("greedy", long)
        await asyncio.sleep(0.01)
        assert [one.done() for one in more] == [True, False, False, False]
        pool.give_back(held[0], "greedy", 0.1, slots=1)
        await asyncio.sleep(0.01)
        assert [one.done() for one in more] == [True, False, False, False], "of 4 slots one still reads with 4"
        pool.is_shared = False
        pool._admit_waiting()
        await asyncio.sleep(0.01)
        assert all(one.done() for one in more) and pool.backends[0].in_flight == 5, "nobody else is there to wait"

    asyncio.run(play())


def test_long_answers_count_as_several_slots_by_those_before_them() -> None:
    async def play() -> None:
        now: list[Any] = [100.0]
        pool = Pool(ups(16), 50, clock=lambda: now[0])
        assert pool.expected_tokens("brief", 1) == 1 and pool.expected_tokens("wordy", 20) == 20
        assert pool.expected_tokens("brief", 5000) == 4096, (
            "that it asked for one token says nothing of its next answer"
        )
        for _ in range(2):
            now[0] += HALVING_SECONDS
            for _ in range(100):
                pool.has_answered("wordy", 2 * SLOT_TOKENS)
                pool.has_answered("brief", 10)
        assert pool.expected_tokens("brief", 5000) == 1024 and pool.expected_tokens("wordy", 20) == 20
        now[0] += 10 * HALVING_SECONDS
        pool.has_answered("wordy", 2 * SLOT_TOKENS)
        assert pool.expected_tokens("brief", 5000) == 1
        slots, left = slots_of(SLOT_TOKENS + pool.expected_tokens("wordy", 5000)), slots_of(2 * SLOT_TOKENS)
        assert (slots, left) == (4, 3)
        pool.is_shared = True
        await pool.take("brief", 1)
        held = await pool.take("wordy", 1, slots)
        pool.has_read("wordy", slots, left)
        more = asyncio.create_task(pool.take("wordy", 60, 1))
        late = asyncio.create_task(pool.take("wordy", 60, 1))
        await asyncio.sleep(0.01)
        assert more.done() and not late.done(), "a quarter of 16 is taken: 3 and 1"
        pool.give_back(held, "wordy", 0.1, slots=left)
        await asyncio.wait_for(late, 60)

    asyncio.run(play())


def test_who_leaves_answers_again_and_again_is_charged_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(backend_pool, "CHARGED_SECONDS", 0.2)
        [backend] = ups(8)
        pool = Pool([backend], max_queue=99)
        pool.is_shared = True
        for name in ("modest", "hasty"):
            pool.give_back(await pool.take(name, 1), name, 0.1)
        for _ in range(2):  # its quarter
            pool.give_back(await pool.take("hasty", 1), "hasty", 0.1, is_abandoned=True)
        assert backend.in_flight == 0, "the slots are free for others"
        await pool.take("modest", 0.01)
        waiting = asyncio.create_task(pool.take("hasty", 60))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await asyncio.wait_for(waiting, 60)
        assert backend.in_flight == 2

    asyncio.run(story())


def test_a_slot_that_comes_as_its_taker_leaves_is_not_lost() -> None:
    async def story() -> None:
        pool = Pool(ups(1), max_queue=1)
        held = await pool.take("a", 5)
        late = asyncio.create_task(pool.take("b", 5))
        await asyncio.sleep(0)
        pool.give_back(held, "a", 0.1)
        late.cancel()
        with pytest.raises(asyncio.CancelledError):
            await late
        assert held.in_flight == 0 and await pool.take("c", 0.1) is held

    asyncio.run(story())


def test_who_has_least_in_flight_comes_next() -> None:
    async def story() -> None:
        pool = Pool(ups(2), max_queue=9)
        held = [await pool.take("greedy", 5) for _ in range(2)]
        waiting = [asyncio.create_task(pool.take(name, 5)) for name in ("greedy", "greedy", "modest")]
        await asyncio.sleep(0)
        pool.give_back(held[0], "greedy", 0.1)
        await asyncio.sleep(0.01)
        assert [task.done() for task in waiting] == [False, False, True]
        for task in waiting:
            task.cancel()

    asyncio.run(story())


def test_keys_take_turns_at_a_backend_of_one_slot() -> None:
    """However many requests one of them has waiting, and whoever came first."""

    async def story() -> None:
        [backend] = ups(1)
        pool = Pool([backend], max_queue=99)
        pool.is_shared = True
        order: list[str] = []

        async def ask(name: str, times: int) -> None:
            for _ in range(times):
                got = await pool.take(name, 60)
                order.append(name)
                await asyncio.sleep(0.001)
                pool.give_back(got, name, 0.1)

        greedy = [asyncio.create_task(ask("greedy", 1)) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.gather(ask("modest", 3), ask("other", 3))
        assert len(order) <= 10, order  # the three by turns, and one more at the end
        await asyncio.gather(*greedy)

    asyncio.run(story())


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("tgcud"), st.integers(0, 7)), max_size=60))
def test_no_slot_is_lost_or_doubled_whatever_happens(acts: list[tuple[str, int]]) -> None:
    async def story() -> None:
        backends = ups(1, 2)
        pool = Pool(backends, max_queue=3)
        tasks: list[asyncio.Task[Backend]] = []
        held: list[Backend] = []
        for act, number in acts:
            if act == "t":
                tasks.append(asyncio.create_task(pool.take(str(number % 2), 60)))
            elif act == "g" and held:
                pool.give_back(held.pop(number % len(held)), "0", 0.1)
            elif act == "c" and tasks:
                tasks[number % len(tasks)].cancel()
            elif act in "ud":
                pool.set_up(backends[number % 2], act == "u")
            if number % 3:
                await asyncio.sleep(0)
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    held.append(task.result())
            assert all(0 <= backend.in_flight <= backend.capacity for backend in backends)
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        held += [backend for backend in ended if isinstance(backend, Backend)]
        assert sum(backend.in_flight for backend in backends) == len(held) and pool.queue_length == 0

    asyncio.run(story())


# ---- What a backend is told --------------------------------------------------------------------------------------------


def told(tokens: int = 1, **words: Any) -> dict[str, Any]:
    raw = json.dumps(CHAT | words).encode()
    return request_reading.read("chat", raw, LIMITS, lambda body: tokens).body


def calling(arguments: str, calls: int = 1) -> list[dict[str, Any]]:
    """Messages with calls of a tool."""
    one = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "assistant", "content": "", "tool_calls": [one] * calls}, {"role": "user", "content": "go on"}]


def test_a_backend_hears_nothing_but_what_is_known() -> None:
    assert told() == {
        "messages": CHAT["messages"],
        "model": "default_model",
        "max_tokens": 50,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    everything = told(
        model="tiny", max_completion_tokens=7, max_tokens=9, user="u", metadata={"a": "b"}, n=1, seed=None
    )
    assert everything["max_tokens"] == 7 and everything.keys() == told().keys()
    called = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": called, "refusal": None, "audio": None},
    ]
    heard = told(messages=messages, tools=[{"type": "function", "function": {"name": "f"}}], tool_choice="none")
    assert heard["messages"][0] == {"role": "user", "content": "ab"} and "tools" not in heard
    assert heard["messages"][1] == {"role": "assistant", "content": "", "tool_calls": called}
    assert told(tokens=100)["max_tokens"] == 20  # what the context has room for
    assert "stream" not in told(logprobs=True)


def test_arguments_of_tools_are_handed_on_as_they_are() -> None:
    for arguments in ('{"a": [1, 2]}', "no json", "{", ""):
        assert told(messages=calling(arguments))["messages"] == calling(arguments)


@pytest.mark.parametrize(("tokens", "words"), [(101, {}), (100, {"max_tokens": 21}), (1, {"max_tokens": 51})])
def test_limits_on_tokens(tokens: int, words: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as refused:
        told(tokens, **words)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"messages": [5] * 60_000}, "more than 50000 values"),
        ({f"key{number}": 1 for number in range(5000)}, "more than 5000 keys"),
        ({"logit_bias": {str(number): 0 for number in range(5001)}}, "more than 5000 keys"),
        ({"messages": calling(json.dumps([0] * 50_001))}, "more than 50000 values"),
        ({"messages": calling(json.dumps([0] * 6000), calls=9)}, "more than 50000 values"),
        ({"messages": calling("[" * 70 + "]" * 70)}, "nested more than 64 deep"),
        ({"tools": [[[[5] * 15_000] * 4]]}, "more than 50000 values"),
        ({"metadata": functools.reduce(lambda inside, _: [inside], range(100), [])}, "nested more than 64 deep"),
    ],
)
def test_what_takes_long_to_check_is_not_checked(words: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        told(**words)
    assert refused.value.status == 400


@pytest.mark.parametrize("template", [True, False])
def test_prompts_are_counted_as_the_model_will_see_them(tmp_path: Path, template: bool) -> None:
    """By mlx_lm.server itself: messages without a word, tools, calls, parts."""
    from mlx_lm import server as mlx_server

    from lib.data.tokenizer import load_tokenizer_of

    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/quickstart/model", folder)
    if not template:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        stored = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**stored, "chat_template": None}))
    own = Told(str(folder), False, None, {"enable_thinking": False}, {})
    count = request_reading.counter(own)
    settings = load.load(None, [], {"model": {"path": str(folder)}, "data": {"train": "none"}})
    tokenizer = load_tokenizer_of(settings.model)
    assert tokenizer is not None and tokenizer.has_chat_template == template
    provider = SimpleNamespace(processor=None, cli_args=SimpleNamespace(chat_template_args={"enable_thinking": False}))
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    for body in (
        {"messages": [{"role": "user", "content": ""}] * 50},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": "", "tool_calls": [call]}]},
        {"messages": CHAT["messages"], "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"prompt": "Add 1"},
    ):
        kind = "text" if "prompt" in body else "chat"
        counted = count(body)
        copied = json.loads(json.dumps(body))
        asked = mlx_server.CompletionRequest(
            kind, copied.get("prompt", ""), copied.get("messages", []), copied.get("tools"), None
        )
        arguments = SimpleNamespace(chat_template_kwargs=None)
        seen = mlx_server.ResponseGenerator._tokenize(
            SimpleNamespace(model_provider=provider), tokenizer, asked, arguments
        )
        assert counted == len(seen[0]) > 0, body


def test_a_long_text_is_refused_by_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it begins with: 1 MB would keep the process from others for seconds."""
    from transformers import PreTrainedTokenizerBase

    limits = {"max_prompt_tokens": 1000, "vocab_size": 283}
    count = request_reading.counter(Told(str(ROOT / "configs/quickstart/model"), False, None, {}, limits))
    longest: list[int] = []
    transformers_encode = PreTrainedTokenizerBase.encode

    def encode(tokenizer: Any, text: str, *words: Any, **more: Any) -> Any:
        longest.append(len(text))
        return transformers_encode(tokenizer, text, *words, **more)

    monkeypatch.setattr(PreTrainedTokenizerBase, "encode", encode)
    for text in ("12 " * 300_000, " " * 8000 + "1234" * 200_000):
        with pytest.raises(RequestError, match="more than the 1000 tokens that are allowed") as refused:
            count({"messages": [{"role": "user", "content": text}]})
        assert refused.value.code == "context_length_exceeded" and max(longest) <= 8000
    assert count({"messages": [{"role": "user", "content": "12 " * 300}]}) > 500


def test_a_prompt_of_no_tokens_is_refused(tmp_path: Path) -> None:
    """mlx_lm.server's thread that generates would end with it, for everybody."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "configs/quickstart/model", folder)
    stored = json.loads((folder / "tokenizer.json").read_text())
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    (folder / "tokenizer.json").write_text(json.dumps(stored | {"normalizer": strip}))
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages if message.role == 'user' %}{{ message.content }}{% endfor %}")
    count = request_reading.counter(Told(str(folder), False, str(template), {}, {}))
    assert count({"prompt": " a "}) == count({"messages": [{"role": "user", "content": "a"}]}) == 1
    for body in ({"prompt": " "}, {"messages": [{"role": "system", "content": "a"}]}):
        with pytest.raises(RequestError, match="make no tokens of this") as refused:
            count(body)
        assert refused.value.status == 400


@settings(max_examples=60)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_json_is_a_request_or_a_clean_refusal(tree: Any) -> None:
    for raw in (json.dumps(tree).encode(), json.dumps(CHAT | {"stop": tree, "tools": tree, "messages": tree}).encode()):
        try:
            openai_requests.parse("chat", raw)
        except RequestError as error:
            assert 400 <= error.status < 500 and json.loads(error.body)["error"]["message"]


def test_no_key_learns_what_was_read_for_another() -> None:
    """How much of a prompt a backend has in its cache would tell it, token by token."""
    usage = b'{"choices": [], "usage": {"prompt_tokens": 9, "total_tokens": 9%s}}'
    told = openai_answers.for_clients(usage % b', "prompt_tokens_details": {"cached_tokens": 7}', "m")
    assert told == usage % b""
    assert openai_answers.for_clients(b": keepalive 2/3", "m") == b":"
    said = json.dumps({"content": ', "prompt_tokens_details": {"cached_tokens": 7}'}).encode()
    assert openai_answers.for_clients(said, "m") == said


def test_the_models_name_is_put_in_its_place_alone() -> None:
    said = json.dumps({"content": '"model": "default_model"'})
    event = b'{"model": "default_model", "x": %s}' % said.encode()
    changed = json.loads(openai_answers.for_clients(event, 'a"b'))
    assert changed == {"model": 'a"b', "x": json.loads(said)}


def test_a_stream_is_put_together_as_the_whole_answer_would_be() -> None:
    base = {"id": "i", "system_fingerprint": "s", "object": "chat.completion.chunk", "model": "m", "created": 1}
    call = {"function": {"name": "f", "arguments": "{}"}, "type": "function", "id": "c"}
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "reasoning": "hm"},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call | {"index": 0}]},
    ]
    choices = [{"index": 0, "finish_reason": None, "delta": delta} for delta in deltas]
    choices[-1]["finish_reason"] = "tool_calls"
    events = [base | {"choices": [choice]} for choice in choices] + [
        base | {"choices": [], "usage": {"total_tokens": 3}}
    ]
    assembly = openai_answers.Assembly()
    assembly.add([b": keepalive 1/2"])
    for event in events:
        assembly.add([b"data: " + json.dumps(event).encode()])
    assembly.add([b"data: [DONE]"])
    whole = assembly.answer()
    message = {"role": "assistant", "content": "ab", "reasoning": "hm", "tool_calls": [call]}
    choice = {"index": 0, "finish_reason": "tool_calls", "logprobs": None, "message": message}
    assert whole == base | {"object": "chat.completion", "choices": [choice], "usage": {"total_tokens": 3}}


@pytest.mark.parametrize("details", [{}, {"prompt_tokens_details": {"cached_tokens": 7}}])
@pytest.mark.parametrize("said", ["", '"usage": {"prompt_tokens": 9}}', "}" * 2000])
@pytest.mark.parametrize("separators", [None, (",", ":")])
def test_the_usage_is_that_of_the_answers_end(details: Any, said: str, separators: Any) -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8, **details}
    answer = {"choices": [{"message": {"content": said}}], "usage": usage}
    assert openai_answers.usage_of(json.dumps(answer, separators=separators).encode()) == usage


# ---- Keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_kept_as_hashes(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    alice = api_keys.make("alice", path)
    path.write_text(path.read_text().rstrip("\n"))  # as an editor may leave it
    bob = api_keys.make("bob@home", path)
    ring = api_keys.read(path)
    assert (ring.owner(alice), ring.owner(bob)) == ("alice", "bob@home") and alice != bob
    assert [ring.owner(key) for key in ("", alice[:-1], alice + "x", alice.upper(), "\ud800")] == [None] * 5
    assert alice not in path.read_text() and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_key_file_that_others_may_change_lets_nobody_in(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    api_keys.make("alice", path)
    for mode in (0o602, 0o620, 0o666):
        path.chmod(mode)
        with pytest.raises(UserError, match=rf"others may write a key of theirs into it .mode {mode:04o}"):
            api_keys.read(path)
    path.chmod(0o644)
    assert dict(api_keys.read(path).digests).keys() == {"alice"}


@pytest.mark.parametrize(
    ("text", "said"),
    [("alice sk-secret\n", ":1: not of the form"), ("a sha256:" + "0" * 64 + "\n" + "a sha256:" + "1" * 64, ":2: a is there twice")],
)  # fmt: skip
def test_a_wrong_key_file_is_told_without_its_content(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError) as error:
        api_keys.read(tmp_path / "keys")
    assert said in str(error.value) and "secret" not in str(error.value)
    for name in ("two words", "", "a\nb"):
        with pytest.raises(UserError):
            api_keys.make(name, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# ---- The application, without a listener -------------------------------------------------------------------------------


async def reads_nothing(*_: Any) -> Any:
    raise AssertionError("nothing is read here")


def application(**words: Any) -> Gateway:
    client = httpx2.AsyncClient()
    return Gateway(ServeSettings(**words), "tiny", reads_nothing, Pool([], 0), client, None, lambda *a, **b: None)


def asked(
    app: Any,
    headers: dict[str, str],
    send: Callable[[Any], Coroutine[Any, Any, None]],
    method: str = "GET",
    path: str = "/v1/models",
    body: bytes = b"",
    **acts: Callable[[], None],
) -> Any:
    encoded = [(name.encode(), value.encode()) for name, value in {"host": "localhost", **headers}.items()]
    aborted: list[bool] = []
    client = SimpleNamespace(
        abort=lambda: aborted.append(True),
        ignore=lambda: None,
        recognise=lambda owner: None,
        has_left=False,
        body_fault=None,
        **acts,
    )
    scope = {"type": "http", "method": method, "path": path, "headers": encoded, "query_string": b""}
    scope |= {"state": {"client": client}, "client": ("127.0.0.1", 1)}

    bodies = [body] if body else []

    async def receive() -> Any:
        if not bodies:
            await asyncio.sleep(3600)
        return {"type": "http.request", "body": bodies.pop()}

    asyncio.run(app(scope, receive, send))
    return aborted


@pytest.mark.parametrize(
    ("status", "content", "backends_asked"),
    [
        (200, b"", 2),  # killed: its connections break off
        (500, b"", 2),
        (200, b": keepalive 1/2\n\ndata: " + openai_answers.DEATH + b"\n\n", 1),
        (400, openai_answers.DEATH, 1),
        (404, b'{"error": "generation thread died"}', 1),
    ],
)
def test_what_a_backend_died_of_is_tried_on_no_other(status: int, content: bytes, backends_asked: int) -> None:
    tried: list[str] = []
    sent: list[Any] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        async def pieces() -> AsyncIterator[bytes]:
            yield content

        tried.append(request.url.host)
        return httpx2.Response(status, content=pieces())

    async def read(*_: Any) -> BackendRequest:
        return BackendRequest("chat", b"{}", True, False, "tiny")

    async def send(message: Any) -> None:
        sent.append(message)

    pool = Pool([Backend(name, 4, url=f"http://{name}", is_up=True) for name in ("a", "b")], 9)
    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    gateway = Gateway(ServeSettings(), "tiny", read, pool, client, None, lambda *a, **b: None)
    words = {"content-type": "application/json", "content-length": "2"}
    still = {"rest": lambda: None, "work": lambda: None}
    asked(gateway, words, send, "POST", "/v1/chat/completions", b"{}", **still)
    assert len(tried) == len(set(tried)) == backends_asked
    assert sent[0]["status"] == 502 and sum(one.is_up for one in pool.backends) == 2 - backends_asked


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_backend_that_is_silent_is_told_to_stop_and_logprobs_count_as_more(is_streamed: bool) -> None:
    """It may be at the request still, whose slot is free when it is done."""
    seen: list[tuple[str, str]] = []
    taken: list[tuple[int, int]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        seen.append((request.method, request.url.host))
        if request.method == "POST":
            raise httpx2.ReadTimeout("silent")
        return httpx2.Response(204)

    class Noting(Pool):
        async def take(self, owner: str, queue_seconds: float, slots: int = 1, tokens: int = 0) -> Backend:
            taken.append((slots, tokens))
            return await super().take(owner, queue_seconds, slots, tokens)

    async def read(*_: Any) -> BackendRequest:
        return BackendRequest("chat", b"{}", False, False, "tiny", is_streamed, prompt_tokens=10, max_tokens=20)

    async def send(message: Any) -> None:
        pass

    pool = Noting([Backend(name, 4, url=f"http://{name}", secret="s", is_up=True) for name in ("a", "b")], 9)
    client = httpx2.AsyncClient(transport=httpx2.MockTransport(answer))
    gateway = Gateway(ServeSettings(), "tiny", read, pool, client, None, lambda *a, **b: None)
    words = {"content-type": "application/json", "content-length": "2"}
    still = {"rest": lambda: None, "work": lambda: None}
    asked(gateway, words, send, "POST", "/v1/chat/completions", b"{}", **still)
    first = seen[0][1]
    assert ("DELETE", first) in seen and [method for method, _ in seen].count("POST") == 2
    assert taken == [(1 if is_streamed else 1 + LOGPROBS_SLOTS, 30)] * 2


PREFLIGHT = {"access-control-request-method": "POST"}
PAGE = "https://a.example"


def test_who_does_not_read_is_cut_off() -> None:
    async def send(message: Any) -> None:
        await asyncio.sleep(3600)

    gateway = application(write_seconds=0.05)
    assert asked(gateway, {}, send) == [True] and gateway.active == 0
    gateway = application(write_seconds=0.05, cors_origins=(PAGE,))
    assert asked(gateway, {"origin": PAGE, **PREFLIGHT}, send, "OPTIONS") == [True]


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost:8080", 200), ("127.0.0.1", 200), ("[::1]:1", 200), ("evil.example", 403), ("localhost.evil.example:80", 403), ("", 403)],
)  # fmt: skip
def test_without_keys_no_other_name_is_answered(host: str, status: int) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asked(application(), {"host": host}, send)
    assert sent[0]["status"] == status


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/v1/models", 405, "/v1/models takes GET"),
        ("GET", "/v1/chat/completions", 405, "/v1/chat/completions takes POST"),
        ("GET", "/v1/models/other", 404, "the model does not exist"),
        ("GET", "/v1/embeddings", 404, "there is nothing at this address"),
    ],
)
def test_what_is_not_there_is_told(method: str, path: str, status: int, said: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asked(application(), {}, send, method, path)
    error = json.loads(b"".join(message.get("body", b"") for message in sent))["error"]
    assert (sent[0]["status"], error["message"]) == (status, said)


def test_browsers_are_let_in_by_name_alone() -> None:
    def allowed(origins: tuple[str, ...], origin: str, method: str = "GET", **headers: str) -> bytes | None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asked(application(cors_origins=origins), {"origin": origin, **headers}, send, method)
        return dict(sent[0]["headers"]).get(b"access-control-allow-origin")

    assert allowed((), PAGE) is None
    assert allowed((PAGE,), PAGE) == PAGE.encode()
    assert allowed((PAGE,), "https://b.example") is None
    assert allowed((PAGE,), PAGE, "OPTIONS", **PREFLIGHT) == PAGE.encode()
    assert allowed((PAGE,), "https://b.example", "OPTIONS", **PREFLIGHT) is None
    assert allowed((), PAGE, "OPTIONS", **PREFLIGHT) is None


class Rests(BaseException):
    """The gateway lets a client wait."""


def test_a_flood_of_probes_delays_no_owner_and_other_requests_delay_no_probe() -> None:
    async def send(message: Any) -> None:
        pass

    def rest() -> None:
        raise Rests

    def rests(path: str, flooded: str, method: str = "GET", whose: str = "127.0.0.1") -> bool:
        gateway = application(cors_origins=(PAGE,))
        for who in ("local", whose):  # the owner where there are no keys; whoever probes
            delays = [getattr(gateway, flooded).delay_seconds(who) for _ in range(200)]
        assert max(delays) == {"probes": PROBE_DELAY_SECONDS, "turns": LONGEST_DELAY_SECONDS}[flooded]
        try:
            asked(gateway, {"origin": PAGE, **PREFLIGHT}, send, method, path, rest=rest)
        except Rests:
            return True
        return False

    paths = ("/healthz", "/readyz", "/v1/models")
    assert [rests(path, "probes") for path in paths] == [True, True, False]
    assert [rests(path, "turns") for path in paths] == [False, False, True]
    assert rests("/healthz", "probes", whose=STRANGERS), "as many as ask, from wherever they are"
    assert rests("/v1/models", "probes", "OPTIONS") and not rests("/v1/models", "turns", "OPTIONS")  # of a browser


def test_a_reader_ends_with_a_server_that_ends_while_it_starts() -> None:
    """It would tell of a broken pipe after the server's last line."""

    async def story() -> None:
        reader = Reader(Told(str(ROOT / "configs/quickstart/model"), False, None, {}, {}), lambda *a, **b: None)
        starting = asyncio.ensure_future(reader.start())
        while (process := reader._process) is None:
            await asyncio.sleep(0.01)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await asyncio.wait_for(process.wait(), 60) == -signal.SIGKILL

    asyncio.run(story())


def test_a_reader_that_cannot_start_again_is_tried_with_the_next_body(tmp_path: Path) -> None:
    """Its disk may be away for a while, and those whose bodies were read are answered meanwhile."""
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs/quickstart/model", model)
    limits = dataclasses.asdict(Limits("tiny", 99, 9))

    async def story() -> None:
        reader = Reader(Told(str(model), False, None, {}, limits), lambda *a, **b: None)
        running = asyncio.create_task(reader.run())

        async def read() -> int | str:
            try:
                return (await reader.read("alice", "text", b'{"prompt": "1", "max_tokens": 1}')).max_tokens
            except RequestError as error:
                return error.code

        assert await read() == 1
        await reader._kill()
        model.rename(tmp_path / "away")
        assert [await read(), await read()] == ["reader_lost"] * 2
        (tmp_path / "away").rename(model)
        assert await read() == 1
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    asyncio.run(story())


# ---- How backends are started ------------------------------------------------------------------------------------------


def test_a_backend_on_another_host_is_reached_through_ssh_alone() -> None:
    recipe = Recipe(("--model", "a b"), Host("mac-b"))
    command = recipe.command(Path("/s/0.ssh"))
    assert command[0] == "ssh" and command[command.index("-S") + 1] == "/s/0.ssh" and "-M" in command
    assert command[-2] == "mac-b" and command[-3] == "--" and command[-1].endswith("backend_process --model 'a b'")
    forward = recipe.forward_command(Path("/s/0.ssh"), Path("/s/0"), "/tmp/tandem-x/backend")
    assert forward[-2:] == ["--", "mac-b"] and forward[forward.index("-L") + 1] == "/s/0:/tmp/tandem-x/backend"
    assert forward[forward.index("-O") + 1] == "forward" and "-L" not in command


def test_pauses_double_up_to_a_limit() -> None:
    assert [pause_seconds(failures) for failures in range(1, 9)] == [1, 2, 4, 8, 16, 30, 30, 30]


@pytest.mark.parametrize("has_started", [False, True])
def test_a_process_that_cannot_be_started_is_fatal_once(has_started: bool, tmp_path: Path) -> None:
    """Later it may be memory that is short for a moment, and other backends are there."""

    class Absent(Recipe):
        def command(self, control: Path) -> list[str]:
            return [str(tmp_path / "absent")]

    async def story() -> tuple[float, str]:
        backend = Backend("a", 1)
        pool, client = Pool([backend], 1), httpx2.AsyncClient()
        keeper = Keeper(backend, Absent(()), pool, client, lambda *a, **b: None, 1.0, 1.0, tmp_path / "socket")
        backend.restarts = int(has_started)
        return await keeper._one_life()

    if has_started:
        assert asyncio.run(story()) == (0.0, f"{tmp_path}/absent cannot be started: No such file or directory")
    else:
        with pytest.raises(Stopped, match="cannot be started"):
            asyncio.run(story())


def test_every_host_gets_one_backend(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost:4\nmac-b.invalid:2\n")
    words = [f"serve.hostfile={tmp_path / 'hosts'}", "serve.fuse=true", "serve.concurrency=7", "model.revision=abc"]
    base = {"model": {"path": "owner/name"}, "data": {"train": "none"}}
    found = server.recipes(load.load(None, words, base), tmp_path)
    assert list(found) == ["localhost", "mac-b.invalid"]
    here, there = found.values()
    assert here is not None and there is not None and here.host is None and there.host == Host("mac-b.invalid", 2)
    assert here.words == there.words
    assert here.words == (
        *("--model", "owner/name", "--concurrency", "7", "--revision", "abc", "--adapter", str(tmp_path), "--fuse"),
        *("--wired", "auto"),
        *("--chat-template-args", '{"enable_thinking": false}'),
    )


def test_a_log_that_nobody_can_take_ends_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with contextlib.suppress(BrokenPipeError), os.fdopen(writing, "w") as broken:
        monkeypatch.setattr(sys, "stdout", broken)
        server.log("request", path="/")


def test_a_backend_that_leaves_a_child_is_seen_to_end_and_takes_it_along() -> None:
    async def life() -> tuple[int | None, bytes]:
        script = "sleep 100 & echo $!; sleep 0.3; exit 3"
        process = await Process.start(["sh", "-c", script], {})
        await asyncio.wait_for(process.ended, 20)
        await process.stop()
        child, deadline = b"S", time.monotonic() + 20
        while child not in (b"", b"Z") and time.monotonic() < deadline:  # a signal takes a moment
            listed = subprocess.run(["ps", "-o", "stat=", "-p", process.last_lines[0]], capture_output=True)
            child = listed.stdout.strip()[:1]
        return process.process.returncode, child

    status, child = asyncio.run(life())
    assert status == 3 and child in (b"", b"Z")
