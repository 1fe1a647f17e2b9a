"""A backend's own parts: what of mlx_lm.server is not as it is there, and that answers are the same."""

from __future__ import annotations

import json
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import sample_utils
from mlx_lm import server as mlx_server
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import gemma3_text
from mlx_lm.models.cache import BatchRotatingKVCache, KVCache, PromptTrie, RotatingKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer

from lib.serve import backend_process, backend_server, memory_room, openai_answers, prompt_pace
from lib.serve.backend_link import SECRET_HEADER
from lib.serve.intake import Intake
from lib.serve.memory_room import MEASURED_TOKENS, ROWS_PART
from lib.serve.prompt_cache import OwnedTokens, PromptCache
from lib.serve.prompt_pace import (
    ALONE,
    BESIDE_ANSWERS,
    FIRST_TOKENS,
    LOOK_STEPS,
    MOST_TOKENS,
    PASSED_STEPS,
    Batches,
    mend_window_caches,
    step_tokens,
)
from lib.serve.samplers import make_sampler
from tests.tiny import ROOT

# ---- Memory


def test_what_a_token_leaves_in_all_layers_is_known_without_computing(model: Any, window_model: Any) -> None:
    for one in (model, window_model):
        cache = make_prompt_cache(one)
        one(mx.zeros((1, MEASURED_TOKENS), mx.int32), cache=cache)
        mx.eval([layer.state for layer in cache])
        assert memory_room.bytes_of_token(one) == sum(layer.nbytes for layer in cache) / MEASURED_TOKENS > 0


@pytest.mark.parametrize(
    ("device", "limit", "free", "left"),
    [
        ("metal", 1000, 5000, 900),
        ("metal", 1000, 400, 400),  # others hold it
        ("cuda", 1000, 400, 900),  # the host's memory is another
        ("cpu", 1000, 400, 400),
        ("cpu", None, None, None),
        ("metal", 50, 400, 0),
    ],
)
def test_the_room_is_what_the_model_leaves(
    monkeypatch: pytest.MonkeyPatch, model: Any, device: str, limit: int | None, free: int | None, left: int | None
) -> None:
    monkeypatch.setattr(memory_room.hardware, "mlx_device", lambda: (device, {}))
    monkeypatch.setattr(memory_room.hardware, "memory_limit_bytes", lambda: limit)
    monkeypatch.setattr(memory_room.hardware, "free_memory_bytes", lambda: free)
    monkeypatch.setattr(memory_room.mx, "get_active_memory", lambda: 100)
    assert memory_room.free_bytes() == left
    tokens, kept_bytes = memory_room.room(model)
    if left is None:
        assert (tokens, kept_bytes) == (None, None)
    else:
        assert tokens == int(ROWS_PART * left / memory_room.bytes_of_token(model)) and kept_bytes == int(0.3 * left)
    assert memory_room.room(object())[0] is None, "a model of another form"


# ---- Prompts


def test_a_prompt_of_no_tokens_fails_by_itself() -> None:
    """mlx_lm.server's thread that generates would end with it, for everybody."""
    asked = mlx_server.CompletionRequest("text", " ", [], None, None)
    generator = object.__new__(backend_server.Generator)
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        generator._tokenize(SimpleNamespace(encode=lambda text: []), asked, None)


def test_a_prompt_that_was_read_to_its_last_token_leaves_one_to_read() -> None:
    """mlx_lm.server's thread that generates would end with it, for everybody."""
    for kind, left in ((KVCache(), [4]), (RotatingKVCache(max_size=2), [2, 3, 4])):
        known, read, tokens = PromptCache(9), mx.zeros((1, 1, 3, 4)), OwnedTokens([2, 3, 4], "alice")
        kind.update_and_fetch(read, read)
        known.insert_cache("model", tokens, [kind])
        cache, rest = known.fetch_nearest_cache("model", tokens)
        assert rest == left and (cache is None or cache[0].offset == 2)
        longer = OwnedTokens([2, 3, 4, 5], "alice")
        assert known.fetch_nearest_cache("model", longer)[1] == [5], "what is kept stays as it is"
        assert known.fetch_nearest_cache("model", OwnedTokens(longer, "bob")) == (None, longer), "and is alice's alone"


def test_parts_of_an_owners_tokens_are_his() -> None:
    tokens = OwnedTokens([1, 2], "alice")
    tokens += [3]
    tokens.append(4)
    assert tokens[1:][1:] == [3, 4] and tokens[-1] == 4 and tokens[1:][1:].owner == tokens[:].owner == "alice"


def test_no_owner_pushes_out_the_prompts_of_all_others() -> None:
    cache = PromptCache(4)
    cache.insert_cache("model", OwnedTokens(list(range(50)), "good"), [KVCache()])
    for number in range(20):
        kind = ("assistant", "user", "system")[number % 3]
        cache.insert_cache("model", OwnedTokens([number, 7, 7], "flood"), [KVCache()], cache_type=kind)
    owners = [model[1] for ages in cache._lru._lrus.values() for model, _ in ages]
    assert sorted(owners) == ["flood", "flood", "flood", "good"]
    cache.insert_cache("model", OwnedTokens([1, 2], "good"), [KVCache()])
    owners = [model[1] for ages in cache._lru._lrus.values() for model, _ in ages]
    assert sorted(owners) == ["flood", "flood", "good", "good"]
    cache.trim_to(n_sequences=0)
    assert not len(cache)


def test_what_was_read_is_found_as_mlx_lm_finds_it() -> None:
    rng, cases = random.Random(3), 0
    for _ in range(200):
        cache = PromptCache()
        for _ in range(rng.randrange(1, 10)):
            tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
            cache.insert_cache(
                "m",
                OwnedTokens(tokens, rng.choice("ab")),
                [KVCache() if rng.random() < 0.5 else RotatingKVCache(max_size=8)],
            )
        for _ in range(20):
            asked, model = [rng.randrange(2) for _ in range(rng.randrange(1, 10))], ("m", rng.choice("ab"))
            found, expected = cache._search(model, asked), PromptTrie.search(cache._trie, model, asked)
            for name in ("exact", "shorter", "common_prefix"):
                if expected.exact is None or name == "exact":
                    assert getattr(found, name) == getattr(expected, name), (name, found, expected)
            assert len(found.longer or []) == len(expected.longer or [])
            cases += expected.longer is not None and expected.shorter is not None
    assert cases > 100


# ---- How much of them is read at a time


def test_a_step_takes_a_few_tokens_time_and_no_more_than_it_ever_may() -> None:
    assert step_tokens(None, 1000.0, True, 16) == step_tokens(0.1, None, True, 16) == FIRST_TOKENS
    assert (
        step_tokens(0.1, 1000.0, True, 16) == 100 * BESIDE_ANSWERS < step_tokens(0.1, 1000.0, False, 16) == 100 * ALONE
    )
    assert step_tokens(0.001, 1000.0, True, 16) == 16 and step_tokens(9.0, 1e4, False, 16) == MOST_TOKENS


class Paced(Batches):
    """Steps of these sizes, one after the other, for ever."""

    sizes: tuple[int, ...] = (3,)
    _number = 0

    @property
    def prefill_step_size(self) -> int:
        return self.sizes[self._number % len(self.sizes)]

    @prefill_step_size.setter
    def prefill_step_size(self, tokens: int) -> None:
        pass

    def _next(self) -> Any:
        self._number += 1
        return super()._next()


@pytest.fixture(scope="module")
def model() -> Any:
    return mlx_server.load(str(ROOT / "configs/quickstart/model"))[0]


@pytest.fixture
def window_model(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of blocks with an attention window of 8 tokens and without, as Gemma has them."""
    monkeypatch.setattr(BatchRotatingKVCache, "make_mask", BatchRotatingKVCache.make_mask)  # put back afterwards
    mend_window_caches()
    mx.random.seed(3)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "head_dim": 8,
    }
    words = {"vocab_size": 64, "num_key_value_heads": 1, "sliding_window": 8, "sliding_window_pattern": 2}
    made = gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", **shape, **words))
    mx.eval(made.parameters())
    return made


def answers(batches: BatchGenerator, prompts: list[list[int]]) -> dict[int, list[int]]:
    numbers = batches.insert(prompts[:2], [5] * len(prompts[:2]))
    found: dict[int, list[int]] = {number: [] for number in numbers}
    for _ in range(2):
        for response in batches.next()[1]:
            found[response.uid].append(response.token)
    if prompts[2:]:
        found |= {number: [] for number in batches.insert(prompts[2:], [5] * len(prompts[2:]))}
    while any(len(tokens) < 5 for tokens in found.values()):
        for response in batches.next()[1]:
            found[response.uid].append(response.token)
    batches.close()
    return found


@pytest.mark.parametrize("kind", [Batches, Paced])
def test_answers_are_the_same_at_any_pace(kind: type[Batches], model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_pace, "LANE_TOKENS", (10, 20))
    prompts = [list(range(3, 3 + length)) for length in (40, 2, 17, 1, 33, 25)]
    expected = answers(BatchGenerator(model, prefill_batch_size=1), prompts)
    batches = kind(model, prefill_batch_size=8)
    assert answers(batches, prompts) == expected
    assert batches.token_seconds and all(lane.tokens_per_second for lane in batches.lanes)


@pytest.mark.parametrize("steps", [(1, 2), (3,), (2, 1, 1, 4)])
def test_answers_of_a_model_with_windows_are_the_same_at_any_pace(
    steps: tuple[int, ...], window_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token, and then of several: mlx-lm's mask is wrong there."""

    class OfSteps(Paced):
        sizes = steps

    monkeypatch.setattr(prompt_pace, "LANE_TOKENS", (3, 10))
    rng = random.Random(7)
    for _ in range(24 if steps == (1, 2) else 4):
        prompts = [[rng.randrange(64) for _ in range(rng.choice([2, 5, 9, 12, 17, 23, 30]))] for _ in range(4)]
        expected = [answers(BatchGenerator(window_model), [prompt])[0] for prompt in prompts]
        made = answers(OfSteps(window_model, prefill_batch_size=8), prompts)
        assert [made[number] for number in sorted(made)] == expected


def test_a_short_prompt_waits_for_no_long_ones(model: Any) -> None:
    """Eight prompts that take many steps, and one that came later."""
    words = backend_process.server_words(backend_process._parse(["--model", "m", "--concurrency", "9"]))
    rows = int(words[words.index("--prompt-concurrency") + 1])
    for tokens in (40, 100, 600):  # in its own lane, in the second, in the third
        batches = Paced(model, prefill_batch_size=rows, completion_batch_size=rows)
        batches.insert([list(range(3, 103)) * (tokens // 100) or list(range(3, 3 + tokens))] * 8, [5] * 8)
        batches.next()
        (late,) = batches.insert([[5, 6]], [1])
        steps = 0
        while not any(response.uid == late for response in batches.next()[1]):
            steps += 1
        assert steps <= 3 and sum(len(lane.processing) for lane in batches.lanes) + len(batches.lane.processing) >= 8
        batches.close()


class Timed(Batches):
    """Steps that take as long as is said here, in seconds: of one token, and of a read of each lane's prompts."""

    token = 0.01
    reads = (0.05, 0.2, 0.2)
    clock = 0.0

    def _note(self, decode_seconds: float | None, read: tuple[int, float] | None) -> None:
        seconds = self.reads[self.lanes.index(self.lane)]
        self.clock += (self.token if decode_seconds is not None else 0.0) + (seconds if read else 0.0)
        together = seconds + (self.token if decode_seconds is not None else 0.0)
        super()._note(decode_seconds and self.token, read and (read[0], together))


@pytest.mark.parametrize("length", [100, 600])
def test_long_prompts_are_read_apart_and_go_on_beside_short_ones_without_end(
    length: int, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one is answered; the long ones are as slow as on a machine that reads few of their tokens in a step."""
    monkeypatch.setattr(prompt_pace, "LEAST_TOKENS", dict.fromkeys(prompt_pace.LEAST_TOKENS, 25))
    batches = Timed(model)
    batches.insert([[3, 4]], [100_000])
    for _ in range(8):
        batches.next()
    (long,) = batches.insert([(list(range(3, 203)) * 3)[:length]], [1])
    lane = batches.lanes[1 if length < 512 else 2]
    lane.tokens_per_second, clock, reads, steps = 1.0, batches.clock, 0, 0
    while True:
        while len(batches.lanes[0].waiting) < 2:
            batches.insert([[5, 6, 7]], [1])
        before = batches._counters.prompt_tokens
        answered = {one.uid for one in batches.next()[1]}
        steps += 1
        reads += batches.lane is lane and batches._counters.prompt_tokens > before
        lane.tokens_per_second = lane.tokens_per_second and 1.0  # the least of a step
        if long in answered:
            break
        assert steps < 10 * length, "the long one is not read"
    assert reads >= length // 25
    part = reads * 0.2 / (batches.clock - clock)
    assert 0.15 < part < 0.5, "of the time; short ones have theirs, and answers"
    batches.close()


def test_a_few_short_prompts_take_away_no_long_ones_debt(model: Any) -> None:
    batches = Timed(model)
    batches.insert([[3, 4]], [100_000])
    for _ in range(8):
        batches.next()
    batches.insert([list(range(3, 203)) * 20], [1])
    clock, reads = batches.clock, 0
    for step in range(600):
        if step % 4 == 0:
            batches.insert([[5, 6, 7]], [1])
        before = batches._counters.prompt_tokens
        batches.next()
        reads += batches.lane is batches.lanes[2] and batches._counters.prompt_tokens > before
        batches.lanes[2].tokens_per_second = batches.lanes[2].tokens_per_second and 1.0
    assert 0.3 < reads * 0.2 / (batches.clock - clock) < 0.55
    batches.close()


def test_lanes_take_turns_while_nobody_is_answered(model: Any) -> None:
    batches, turns = Timed(model), []
    batches.reads = (0.01, 0.01, 0.01)
    lengths = (60, 400, 900)
    for _ in range(200):
        for lane, length in zip(batches.lanes, lengths, strict=True):
            while len(lane.waiting) < 2:
                batches.insert([[3 + token % 200 for token in range(length)]], [1])
        before = batches._counters.prompt_tokens
        batches.next()
        if batches._counters.prompt_tokens > before:
            turns.append(batches.lanes.index(batches.lane))
        for lane in batches.lanes:
            lane.tokens_per_second = lane.tokens_per_second and 1.0
    shares = [turns.count(lane) / len(turns) for lane in range(3)]
    assert shares[0] > 0.4 and min(shares) > 0.5 / (PASSED_STEPS + 1), shares
    left = [sequence[0] for lane in batches.lanes for sequence in lane.waiting]
    assert batches.extract_cache(left).keys() == set(left)
    batches.remove(left)
    assert not any(lane.waiting for lane in batches.lanes)
    batches.close()


def test_prompts_that_come_together_are_read_together(model: Any) -> None:
    """A row that is shorter than the longest of a step is computed as if it were as long."""
    batches, rows = Batches(model), []
    batches.insert([[3, 4]], [10_000])
    for _ in range(4):
        batches.next()
    read = batches.lanes[0].batch.prompt

    def prompt(tokens: list[list[int]]) -> None:
        if any(tokens):
            rows.append([len(row) for row in tokens])
        read(tokens)

    batches.lanes[0].batch.prompt = prompt
    batches.insert([[3 + token for token in range(61)] for _ in range(8)], [1] * 8)
    while batches.lanes[0].has_some:
        batches.next()
        batches._use(batches.lane)
    assert sum(map(sum, rows)) == 8 * 60 and all(len(set(row)) == 1 and len(row) == 8 for row in rows)
    assert all(sum(row) <= 64 for row in rows) or len(rows) < 8
    batches.close()


def test_a_long_prompt_that_was_read_before_is_answered_at_once(model: Any) -> None:
    """As of a client that goes on with his conversation: but for its last token it is in the cache."""
    batches = Batches(model)
    known = list(range(3, 203)) * 4
    (first,) = batches.insert([known], [1])
    cache = None
    while cache is None:
        for response in batches.next()[1]:
            if response.uid == first and response.finish_reason:
                cache = response.prompt_cache
    batches.insert([[3, 4]], [10_000])
    for _ in range(4):
        batches.next()
    (again,) = batches.insert([[7]], [1], caches=[cache], all_tokens=[known])
    for steps in range(5):
        while len(batches.lanes[0].waiting) < 2:
            batches.insert([[5, 6, 7]], [1])
        if again in {one.uid for one in batches.next()[1]}:
            break
    assert steps <= 2 and again not in {sequence[0] for sequence in batches.lanes[2].waiting}
    batches.close()


def test_a_tokens_time_is_measured_also_while_prompts_come_without_end(model: Any) -> None:
    """What a token takes changes with how many answer, and the first one compiles kernels."""
    batches = Batches(model)
    batches._note(9.0, None)
    batches._note(9.0, (128, 0.1))
    assert batches.token_seconds is None and batches.lane.tokens_per_second == 1280
    for seconds in (0.0, 0.01):  # the first was computed while a step read
        batches._note(seconds, None)
    assert batches.token_seconds == 0.01
    batches._note(0.0, (6, 0.005))
    assert batches.token_seconds == 0.005, "both together took no longer"
    batches._note(0.0, (6, 0.0051))
    expected = 0.7 * (0.7 * 1280 + 0.3 * 1200) + 0.3 * 6 / 0.0051
    assert batches.lane.tokens_per_second == pytest.approx(expected), "of times nearly alike no difference is known"
    batches.insert([[3, 4]], [10_000])
    for _ in range(4):
        batches.next()
    batches.token_seconds = 1e-9  # of one answer, and now there are more
    batches.insert([list(range(3, 200)) * 30] * 4, [1] * 4)
    batches.lane.tokens_per_second = 1.0  # so little that it reads for many steps
    for _ in range(3 * LOOK_STEPS):
        batches.next()
        batches.lane.tokens_per_second = 1.0
    assert batches._currently_processing and batches.token_seconds > 1e-6
    batches.close()


def test_reading_takes_its_part_of_the_time_also_where_a_few_tokens_take_long(model: Any) -> None:
    """Behind a long beginning each step has to look at all of it, however few its tokens are."""

    class Slow(Batches):
        def _note(self, decode_seconds: float | None, read: tuple[int, float] | None) -> None:
            super()._note(decode_seconds and 0.01, read and (read[0], 0.2 + 0.01))

    batches = Slow(model)
    batches.insert([[3, 4]], [10_000])
    for _ in range(4):
        batches.next()
    batches.insert([list(range(3, 200)) * 9], [1])
    read = []
    for _ in range(120):
        before = batches._counters.prompt_tokens
        batches.next()
        read.append(batches._counters.prompt_tokens > before)
    expected = 120 * BESIDE_ANSWERS / 20  # each takes 20 tokens' times, of which that part is reading's beside a token
    assert batches._currently_processing and abs(sum(read) - expected) <= 1
    batches.close()


# ---- What becomes of them


def test_a_token_that_the_tokenizer_lacks_is_no_text() -> None:
    """As of a vocabulary that is padded: a client may ask for it by `logit_bias`."""
    backend_server.mend_detokenizers()

    class Tokenizer(list[str]):
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self[id] for id in ids]

    detokenizer = SPMStreamingDetokenizer(Tokenizer(["\u2581a", "b"]), trim_space=False)
    for token in (0, 2, 319, 1):
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == " ab"


def test_requests_that_come_together_are_taken_in_one_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = backend_server.Generator.__new__(backend_server.Generator)
    generator.intake, generator._is_loaded = Intake(), True
    asked = SimpleNamespace(owner="a", prepare_seconds=0.0)
    waiting = [(number, asked, None) for number in (1, 2, 3)]
    monkeypatch.setattr(
        backend_server.server.ResponseGenerator,
        "_next_request",
        lambda self, timeout=None: waiting.pop(0) if waiting else None,
    )
    taken = [generator._next_request(0.1)] + [generator._next_request() for _ in range(5)]
    assert [one and one[0] for one in taken] == [1, None, 2, None, 3, None]


def test_a_request_that_costs_more_than_tokens_is_charged_to_its_owner(model: Any) -> None:
    batches = Batches(model)
    batches.plain_seconds = 1e-9  # so that every step takes longer
    batches.insert([[3, 4]], [10_000], all_tokens=[OwnedTokens([], "steady")])
    while not batches.next()[1]:
        pass
    for _ in range(3):
        batches.plain_seconds = 1e-9
        batches.next()
    batches.intake._owed_seconds.clear()
    batches.plain_seconds = 1e-9
    batches.next()
    assert not batches.intake._owed_seconds, "who only goes on owes nothing"
    (short,) = batches.insert([[5, 6, 7]], [1], all_tokens=[OwnedTokens([], "short")])
    is_over = False
    while not is_over:
        batches.plain_seconds = 1e-9
        is_over = any(one.uid == short and one.finish_reason for one in batches.next()[1])
        assert set(batches.intake._owed_seconds) == {"short"}
    assert list(batches.intake.under_way.values()) == ["steady"]
    batches.intake.put("short", "next")
    assert batches.intake.take() is None
    batches.remove(list(batches.intake.under_way))
    assert batches.intake.take() == "next"
    batches.close()


def test_what_is_owed_is_paid_also_while_nobody_is_answered(model: Any) -> None:
    """Else a request that owes a microsecond waits for somebody's long prompt, and longer."""
    batches = Batches(model)
    batches.insert([list(range(3, 200))], [1], all_tokens=[OwnedTokens([], "long")])
    batches.intake.charge(["good"], 1e-6)
    batches.intake.put("good", "question")
    batches.next()
    assert batches.intake.take() == "question"
    batches.close()


def test_few_automata_of_clients_stop_strings_are_kept() -> None:
    """mlx_lm.server keeps 100, and then drops all at once."""
    few = backend_server._Few()
    for number in range(100):
        few[number] = number
    assert list(few) == list(range(100 - backend_server.MOST_AUTOMATA, 100))


# ---- How tokens are drawn


@pytest.mark.parametrize(
    "words",
    [
        {"temp": 0.0},
        {"temp": 0.7},
        {"temp": 1.3, "top_p": 0.8},
        {"temp": 0.9, "min_p": 0.05},
        {"temp": 0.5, "top_k": 7},
        {"temp": 1.9, "top_p": 0.9, "min_p": 0.01, "top_k": 20},
    ],
)
def test_tokens_are_drawn_as_mlx_lm_draws_them(words: dict[str, Any]) -> None:
    logits = 3 * mx.random.normal((200, 50), key=mx.random.key(1))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = []
    for make in (sample_utils.make_sampler, make_sampler):
        mx.random.seed(5)
        drawn.append(make(**words)(logprobs).tolist())
    assert drawn[0] == drawn[1]


def test_no_number_of_a_client_makes_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLX keeps the source of each kernel that it compiles in this folder; elsewhere it has no such folder to look in."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    logprobs = mx.log(mx.softmax(mx.arange(50.0)[None]))

    def draw(number: float) -> int:
        mx.eval(make_sampler(temp=number, top_p=number / 2, min_p=number / 9, top_k=20)(logprobs))
        return sum(path.is_file() for path in tmp_path.rglob("*"))

    made = draw(0.71)
    assert {draw(0.72 + 0.01 * i) for i in range(10)} == {made}


# ---- What a model may write, and what may fail


@pytest.mark.parametrize(
    "found", [{}, {"name": "f"}, [], "f", None, 5, {"name": "f", "arguments": {1j}}, [{"arguments": {}}, {}], KeyError]
)
def test_what_is_no_tool_call_is_left_out(found: Any) -> None:
    def parse(text: str, tools: Any) -> Any:
        if found is KeyError:
            raise KeyError("name")
        return found

    formatter = mlx_server.ToolCallFormatter(backend_server.checked(parse), [])
    assert formatter(["anything"]) == []


def test_a_tool_call_is_handed_on() -> None:
    call = {"name": "f", "arguments": {"a": 1}}
    formatter = mlx_server.ToolCallFormatter(backend_server.checked(lambda text, tools: dict(call)), [])
    assert formatter(["x"])[0]["function"] == {"name": "f", "arguments": '{"a": 1}'}


class Failing:
    """A generator of whose tokens no answer can be made, from the first or the second on; or which fails itself."""

    cli_args = SimpleNamespace(
        allowed_origins=[], num_draft_tokens=0, max_tokens=9, temp=0.0, top_p=1.0, top_k=0, min_p=0.0
    )

    def __init__(self) -> None:
        self.lives = True

    def generation_available(self) -> bool:
        return self.lives

    def prepare(self, request: Any, arguments: Any) -> None:
        pass

    def generate(self, request: Any, arguments: Any, progress: Any) -> Any:
        def tokens() -> Iterator[Any]:
            if request.prompt == "later":
                yield mlx_server.Response("a", 1, 0.0, None, ())
            if request.prompt == "broken":
                raise KeyError("a fault of the model, or of the GPU")
            yield "no response"

        text = mlx_server.TextStateMachine()
        context = mlx_server.GenerationContext(
            has_tool_calling=False,
            has_thinking=False,
            tool_parser=None,
            text_sm=text,
            initial_state="normal",
            prompt=[1],
        )
        return context, tokens()


def ask(failing: Failing, prompt: str, stream: bool, missing: int = 0) -> bytes:
    """The answer as it is on the wire; empty where there is none. missing: bytes of the body that do not come."""
    ours, theirs = socket.socketpair()
    handler, answer = backend_server.handler("secret"), b""

    def serve() -> None:
        with theirs:
            try:
                handler(failing, theirs, ("gateway", 0), None, system_fingerprint="f")
            except (KeyError, AttributeError):
                assert prompt == "broken" or not failing.lives

    thread = threading.Thread(target=serve)
    thread.start()
    with ours:
        body = json.dumps({"prompt": prompt, "stream": stream})
        lines = ["POST /v1/completions HTTP/1.1", f"{SECRET_HEADER}: secret", f"Content-Length: {len(body)}"]
        ours.sendall(("\r\n".join(lines) + "\r\n\r\n" + body[: len(body) - missing]).encode())
        if missing:
            ours.shutdown(socket.SHUT_WR)
        while piece := ours.recv(65536):
            answer += piece
    thread.join()
    return answer


@pytest.mark.parametrize(("seconds", "has_sign"), [(0.0, True), (99.0, False)])
def test_an_answer_of_which_nothing_can_be_told_yet_gives_signs_of_life(
    monkeypatch: pytest.MonkeyPatch, seconds: float, has_sign: bool
) -> None:
    """A tool call is told when it is whole: a gateway would take a backend that is at it for one that has stalled."""
    monkeypatch.setattr(backend_server, "SIGN_SECONDS", seconds)
    head, _, rest = ask(Failing(), "later", stream=True).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.0 200") and rest.startswith(b": keepalive 0/0\n\n") == has_sign
    assert not ask(Failing(), "later", stream=False).startswith(b":")


def test_a_body_that_is_not_whole_is_in_no_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its client left while the gateway sent it, and the backend's last lines may be told when it ends."""
    assert ask(Failing(), "a secret of somebody's", stream=False, missing=4) == b""
    assert "secret" not in caplog.text


def test_a_request_that_fails_is_told_and_the_backend_goes_on() -> None:
    failing = Failing()
    for prompt in ("now", "later"):
        head, _, body = ask(failing, prompt, stream=False).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.0 400") and openai_answers.is_failure(body)
        events, _ = openai_answers.split(ask(failing, prompt, stream=True).partition(b"\r\n\r\n")[2])
        datas = [openai_answers.data_of(event) or b"" for event in events]
        assert [openai_answers.is_failure(data) for data in datas] == [False] * (prompt == "later") + [True]
    assert not ask(failing, "broken", stream=False), "where no tokens come it is not the request's fault alone"
    failing.lives = False
    for prompt in ("now", "later"):
        assert openai_answers.is_death(ask(failing, prompt, stream=False).partition(b"\r\n\r\n")[2]), (
            "nor where it all ended"
        )
        [*_, last], _ = openai_answers.split(ask(failing, prompt, stream=True).partition(b"\r\n\r\n")[2])
        assert openai_answers.is_death(openai_answers.data_of(last) or b"")
