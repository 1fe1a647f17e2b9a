"""Few shapes for a whole run: every micro-batch fits, little is padded, and padding changes nothing."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lib.config import load as config
from lib.data import batch_shapes
from lib.data.batch import Batch, MicroBatches, collate
from lib.data.batch_shapes import NEED, BatchShape, batch_shape_of, few_shapes, lengths_and_cost, need_of
from lib.data.dataset import Dataset, Example
from lib.data.order import Position, assign_micro_batches, epoch_order, global_batch
from lib.model import logps as logps_module
from lib.model import stream_trial
from lib.training.losses import PREFERENCE_LOSSES
from tests import rounding, tiny
from tests.test_forward import FAMILIES, assert_equal, draw, load
from tests.test_step import build, examples, means_of, reference_logps, results_of, step_gradients


def dataset(count: int, seed: int, *quantiles: tuple[float, ...]) -> Dataset:
    """Preference pairs whose prompt, chosen and rejected lengths have these least, 10 %, 50 %, 90 % and largest values."""
    random = np.random.default_rng(seed)
    at = [0, 0.1, 0.5, 0.9, 1]
    columns = [np.exp(np.interp(random.random(count), at, np.log(of_column))) for of_column in quantiles]
    bounds = np.concatenate([[0], np.cumsum(np.stack(columns, axis=1).astype(int).reshape(-1))])
    tokens = random.integers(2, 48, bounds[-1]).astype(np.int32)
    return Dataset("drawn", "preference", "", "", tokens, bounds)


# Tokens of PandaLM's and GSM8K's pairs under a tokenizer of 4,096 tokens.
PANDALM = dataset(836, 0, (10, 22, 42, 140, 276), (3, 13, 58, 181, 405), (2, 6, 37, 149, 404))
GSM8K = dataset(1163, 1, (24, 41, 64, 105, 204), (31, 63, 106, 169, 312), (2, 59, 101, 172, 382))


def makers(data: Dataset, batch_size: int, multiple: int = 64) -> MicroBatches:
    words = ["model.path=-", "data.train=-", f"train.global_batch_size={batch_size}"]
    settings = config.load(None, words)
    cost = batch_shapes.TraceCost()
    shapes = batch_shapes.RunShapes(data, settings.train, settings.data.max_length, multiple, True, cost)
    return MicroBatches(data, None, multiple, True, shapes)


def epoch_of(data: Dataset, make: MicroBatches, epoch: int, sizes: list[list[int]]) -> list[list[Batch]]:
    """Every rank's micro-batches of an epoch, as train.py makes them."""
    batch_size = sum(map(sum, sizes))
    order = epoch_order(data.lengths, 0, epoch, batch_size, 32)
    lengths, cost = lengths_and_cost(data, make.length_multiple, make.shared_prompts)
    batches: list[list[Batch]] = [[] for _ in sizes]
    for cursor in range(0, len(data), batch_size):
        batch = global_batch(order, Position(epoch, cursor), batch_size)
        assigned, _ = assign_micro_batches(batch, lengths, sizes, cost)
        for rank, parts in enumerate(assigned):
            batches[rank] += [batch for batch, _ in make.of(parts, max(sizes[rank]))]
    return batches


@pytest.mark.parametrize(
    ("data", "sizes"),
    [(PANDALM, [[8, 8]]), (GSM8K, [[8, 8]]), (GSM8K, [[16]]), (PANDALM, [[16, 16, 16], [8, 8]])],
    ids=["pandalm, two of 8", "gsm8k, two of 8", "gsm8k, 16", "pandalm, two ranks"],
)
@pytest.mark.long("gsm8k, two of 8", "pandalm, *")
def test_an_epoch_has_few_shapes_the_next_has_none_anew_and_little_is_padded(
    data: Dataset, sizes: list[list[int]]
) -> None:
    make = makers(data, sum(map(sum, sizes)))
    exact = makers(data, sum(map(sum, sizes)))
    exact.shapes_of = lambda _: []
    epochs = [epoch_of(data, make, epoch, sizes) for epoch in range(2)]
    for first, second in zip(*epochs, strict=True):
        shapes, again = {batch.shapes for batch in first}, {batch.shapes for batch in second}
        assert len(shapes | again) <= 16
        # Of several ranks one may miss, in its share of the first epoch, a shape that it has later.
        assert again <= shapes or len(sizes) > 1
    for epoch in epochs:
        batches = [batch for of_rank in epoch for batch in of_rank]
        assert sorted(row for batch in batches for row in batch.rows.tolist()) == list(range(len(data)))
        computed, real = (sum(getattr(b, name) for b in batches) for name in ("computed_tokens", "real_tokens"))
        assert computed <= 1.1 * real
    unbounded = {batch.shapes for of_rank in epoch_of(data, exact, 0, sizes) for batch in of_rank}
    assert len(unbounded) > 2 * 16  # without it, nearly as many as there are micro-batches


@settings(max_examples=15)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 5), st.booleans(), st.sampled_from([1, 3]))
@pytest.mark.long
def test_any_rows_fit_into_one_of_the_shapes(seed: int, size: int, most: int, shared: bool, count: int) -> None:
    random = np.random.default_rng(seed)
    prompts = random.integers(0, 30, 40)
    completions = random.integers(2, 20, (40, count))
    seen, scored = prompts[:, None] + completions - 1, completions - (prompts == 0)[:, None]

    def need(rows: np.ndarray) -> np.ndarray:
        return need_of(prompts[rows], seen[rows], scored[rows])

    tokens = prompts + (completions - 1).sum(axis=1)
    most_tokens, most_scored = (np.sort(each)[-size:].sum() for each in (tokens, scored.sum(axis=1)))
    limits = (size, prompts.min(), prompts.max(), seen.max(), most_tokens, most_scored, scored.max())
    largest = np.array(limits, NEED)
    epochs = [np.array([need(rows) for rows in np.split(random.permutation(40), range(size, 40, size))], NEED)] * 2
    shapes = few_shapes(epochs, largest, most, count, 4, shared)
    assert len(shapes) <= most and shapes == sorted(shapes, key=lambda shape: shape.cost)
    for _ in range(20):
        rows = random.permutation(40)[: random.integers(1, size + 1)]
        assert any(shape.holds(need(rows)) for shape in shapes)
        alone = batch_shape_of(need(rows)[None], count, 4, shared)
        assert alone.holds(need(rows)) and alone.tokens >= tokens[rows].sum()


def roomier(examples: list[Example], multiple: int, shared: bool, rows: int) -> BatchShape:
    """A shape with room for `rows` more of the examples' kind."""
    more = [*examples, *examples[:1] * rows]
    batch = collate(more, multiple, shared)
    count = len(examples[0].completions)
    prompts = np.array([len(e.prompt_ids) for e in more])
    completions = np.array([[len(c) for c in e.completions] for e in more])
    need = need_of(prompts, prompts[:, None] + completions - 1, completions - (prompts == 0)[:, None])
    shape = batch_shape_of(need[None], count, multiple, shared)
    assert shape.tokens == batch.computed_tokens
    return shape


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.long("True-*", "False-llama", "False-qwen3")
def test_rows_of_padding_change_no_log_probability_and_no_gradient(tmp_path, family: str, shared: bool) -> None:
    assert family in FAMILIES
    model = load(tmp_path, family)
    assert stream_trial.cannot_share_prompts(model) is None
    layouts = set()
    for seed, shortest in ((0, 0), (1, 9)):
        examples = draw(seed, 3, shortest_prompt=shortest)
        shape = roomier(examples, 4, shared, rows=2)
        batch = collate(examples, 4, shared, [shape])
        assert len(batch.mask) == 5 and batch.computed_tokens == shape.tokens and not batch.mask[3:].any()
        assert_padded_equal(model, examples, batch)
        layouts.add((batch.prefix_length > 0, batch.suffix_indices is None))
    assert len(layouts) == 1 + shared


def assert_padded_equal(model: object, examples: list[Example], batch: Batch) -> None:
    """As test_forward's, for the rows that are not padding."""
    logps = logps_module.completion_logps
    try:
        logps_module.completion_logps = lambda model, inputs: logps(model, inputs)[: len(examples)]  # type: ignore[assignment]
        assert_equal(model, examples, batch)  # type: ignore[arg-type]
    finally:
        logps_module.completion_logps = logps


@pytest.mark.parametrize("loss", [*PREFERENCE_LOSSES, "sft"])
def test_rows_of_padding_count_in_no_loss_and_no_metric(tmp_path, loss: str, monkeypatch) -> None:
    model, options = build(tmp_path, f"train.loss={loss}", "train.max_grad_norm=null", "train.beta=0.5")
    pairs, reference = examples(5), reference_logps(5)
    plain, _ = step_gradients(model, options, pairs, reference, sizes=[3, 2])
    expected, limits = rounding.expected_and_limits(model, results_of(model, options, pairs, reference, [3, 2]))

    def padded(part: list[Example], multiple: int, shared: bool) -> Batch:
        return collate(part, multiple, shared, [roomier(part, multiple, shared, rows=3)])

    monkeypatch.setattr("tests.test_step.collate", padded)
    result, gradients = step_gradients(model, options, pairs, reference, sizes=[3, 2])
    padded_tokens = result.figures["padded_tokens"], plain.figures["padded_tokens"]
    assert padded_tokens[0] > padded_tokens[1] and result.tokens == plain.tokens
    assert result.means.keys() == plain.means.keys()
    rounding.assert_within([means_of(result), gradients], expected, limits)


@pytest.mark.long
def test_a_compiled_run_has_few_traces_and_ends_with_the_same_weights(tmp_path) -> None:
    words = tiny.settings(tmp_path, rows=37, train__epochs=2, plan__micro_batch_sizes=[3])
    words += ["data.length_multiple=2", "train.max_traces=4", "evaluate.samples=0", "train.global_batch_size=8"]
    for compiled in (True, False):
        tiny.train(tmp_path, [*words, f"run.name={compiled}", f"train.compile={compiled}"])
    compiled, plain = tmp_path / "runs/True", tmp_path / "runs/False"
    traces = [record["traces"] for record in tiny.steps_of(compiled)]
    assert traces[4] == traces[-1] <= 4 < 12 < tiny.steps_of(plain)[-1]["traces"]
    assert tiny.rows_of_epochs(compiled) == tiny.rows_of_epochs(plain)
    assert tiny.difference(plain, compiled) <= rounding.limit_of(plain)
    mx.clear_cache()
