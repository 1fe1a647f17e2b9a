"""The arrays that a training step makes and reads, in order, and the most bytes that they hold at a time.

A step of lib/training/step.py is recorded as operations: what each reads, how many bytes it makes. Every layer records
what its backward pass does, as automatic differentiation would. The largest sum that is held at a time is the need.
Kept for the backward pass are, in numbers a token (D hidden size; Q, K, F widths of queries, keys and MLP; r ranks of
the adapters), in every block:

    norms                 2 D, their inputs; in another type than float32 a CPU keeps a float32 copy besides
    linear layers         2 D + Q + F, an input once for layers that share it; LoRA r a layer, DoRA the output as well,
                          but the weights of a quantised base are made for one product, in either pass, and the
                          head's once for all of its products
    attention             Q + 2 K, and 2 K a position of every completion whose prompt is shared; on a CPU the
                          rotation's sines
    its probabilities     heads x positions; on CUDA in bfloat16 and float16 none (cuDNN's kernel), elsewhere none of
                          long rows, which attend in blocks
    SwiGLU                2 F; on a CPU 3 F
    or, checkpointed      D, and all of the above of one block at a time

The last block of a stream goes on from its attention with the scored tokens alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from lib.config.schema import Config
from lib.data.batch_shapes import BatchShape
from lib.model import adapter_layers
from lib.model.partition import ModelShape
from lib.model.token_stream import TILE, block_rows, is_fused
from lib.plan.memory_tape import Array, Tape
from lib.plan.optimizer_memory import ADAM, OPTIMIZERS, OptimizerNeeds
from lib.system.hardware import Device

LOGITS_BYTES = 2**29  # most bytes of float32 logits at a time, as lib/model/logps.py has it
DEQUANTISING = 10  # further operations on a CPU, which has no kernel for it; together they make as much as the weights
LOSS_OPERATIONS = 20  # between the head and the backward pass, on numbers a pair: large arrays are let go meanwhile


@dataclass(frozen=True)
class Training:
    """What of the settings decides how much memory a step needs."""

    method: Literal["lora", "dora", "full"] = "lora"
    rank: int = 8
    blocks: int | None = None  # that gradients pass through, the last ones; None: all
    adapts_embeddings: bool = False
    checkpointing: bool = False
    window: int | None = None  # of attention
    optimizer: OptimizerNeeds = ADAM
    moving_reference: bool = False
    shared_prompts: bool = True
    ends_early: bool = True  # the last block goes on from its attention with the scored tokens alone

    @classmethod
    def of(cls, config: Config, block_count: int, shared_prompts: bool) -> Training:
        """Of a run's settings. block_count: of the whole model."""
        model, train = config.model, config.train
        return cls(
            method=model.method,
            rank=adapter_layers.most_rank(model),
            blocks=None if model.blocks is None else adapter_layers.depth(model, block_count),
            adapts_embeddings=model.adapt_embeddings,
            checkpointing=bool(model.gradient_checkpointing),
            window=model.attention_window,
            optimizer=OPTIMIZERS.get(train.optimizer, ADAM),
            moving_reference=config.reference_sync_steps is not None,
            shared_prompts=shared_prompts,
            ends_early=model.dropout == 0,
        )


@dataclass(frozen=True)
class _AttentionPart:
    """Attention over sequences of one shape, with the arrays that its backward pass reads."""

    queries: Array  # scaled, unless a kernel does that itself
    keys_and_values: list[Array]
    probabilities: Array | None  # None where none are kept
    output: Array
    query_elements: float
    key_elements: float  # of the keys, and again of the values
    score_elements: float
    block_elements: float  # of the scores that are made at a time and not kept; 0: no blocks


class Step:
    """Records the operations of one micro-batch."""

    def __init__(self, shape: ModelShape, training: Training, batch: BatchShape, device: Device):
        self.shape, self.training, self.batch, self.device = shape, training, batch, device
        self.tape = Tape(device)
        self.tokens: float = batch.tokens
        self.on_cpu = device == "cpu"
        self.is_full = training.method == "full"
        self.item = 4 if self.is_full else shape.other_bytes
        self.trained_blocks = min(training.blocks or shape.blocks, shape.blocks)
        v, d, r = shape.vocabulary, shape.hidden_size, training.rank * training.adapts_embeddings
        self.head_gradient = r * (v + d) or v * d * (self.is_full and training.blocks is None)  # the embedding's, too
        self.is_trained = False  # the block that is being written down
        is_stream = batch.prefix > 0 or not batch.is_dense or training.window is not None
        self.ends_early = is_stream and training.ends_early
        # Where a block's last layers begin their products: its backward pass reads none, so they are not recomputed.
        self.last_products = 0

    # ---- Layers: each makes its output, and records what its backward pass does

    def array(self, width: float, *reads: Array, item: float | None = None, **more: float) -> Array:
        return self.tape.make(self.tokens * width, self.item if item is None else item, *reads, **more)

    def later(self, back: Callable[[], None], place: int | None = None) -> None:
        """Records what the backward pass does, on as many tokens as now. place: among the others, as list.insert."""
        tokens, backward = self.tokens, self.tape.backward

        def of_tokens() -> None:
            self.tokens = tokens
            back()

        if self.is_trained:
            backward.insert(len(backward) if place is None else place, of_tokens)

    def norm(self, x: Array) -> Array:
        tape, width = self.tape, x.elements / self.tokens
        if not self.on_cpu:
            y = self.array(width, x)

            def fast() -> None:
                dy = tape.cotangents.pop(y)
                tape.give(x, self.array(width, x, dy, scratch=x.size_bytes), self.item)

            self.later(fast)
            return y
        wide = x if self.item == 4 else self.array(width, x, item=4)
        self.array(width, wide, item=4)  # squares
        normal = self.array(width, wide, item=4)
        y = self.array(width, normal)

        def slow() -> None:
            dy = tape.cotangents.pop(y)
            reads = (dy, normal) if self.is_full else (dy,)
            d_normal = self.array(width, *reads, item=4)
            product = self.array(width, d_normal, wide, item=4)
            back = self.array(width, wide, product, item=4)
            dx = self.array(width, d_normal, back, item=4)
            tape.give(x, dx if self.item == 4 else self.array(width, dx), self.item)

        self.later(slow)
        return y

    def linears(self, x: Array, *widths: int, weight: float | None = None) -> list[Array]:
        """Layers that read the same input. weight: numbers in the weights of each, if not input times output."""
        method = self.training.method if self.is_trained else "frozen"
        if method == "dora":
            shared = None if self.on_cpu else self.wide(x)  # compiled, it is made once
            ys = [self.dora(x, shared or self.wide(x), width) for width in widths]
            self.last_products = len(self.tape.operations)  # DoRA's outputs are read
            return ys
        tape, inner = self.tape, x.elements / self.tokens
        adapted = method == "lora"
        low = self.array(self.training.rank * len(widths), x) if adapted else None
        self.last_products = len(tape.operations)
        ys = []
        for width in widths:
            y = self.product(width, weight or inner * width, x)
            ys.append(self.array(width, y, low) if low else y)

        def back() -> None:
            dys = [tape.cotangents.pop(y) for y in ys]
            if low:
                d_low = self.array(self.training.rank * len(widths), *dys)
            dx = None
            for dy, width in zip(dys, widths, strict=True):
                dx = self.product(inner, weight or inner * width, dx or dy, *([dy] if dx else []))
            assert dx is not None
            if low:
                dx = self.array(inner, dx, d_low)
                self.gradient(self.training.rank * (inner * len(widths) + sum(widths)), x, low, d_low, *dys)
            if method == "full":
                for dy, width in zip(dys, widths, strict=True):
                    self.gradient(inner * width, x, dy)
            tape.give(x, dx, self.item)

        self.later(back)
        return ys

    def product(self, width: float, weights: float, *reads: Array) -> Array:
        """What is made by weights of so many numbers, which are dequantised for it where they are stored quantised."""
        own = self.dequantised(weights)
        return self.array(width, *reads, *own, weights=0 if own else weights)

    def dequantised(self, elements: float) -> list[Array]:
        """Weights as they are multiplied by, made of packed ones, where they are stored quantised."""
        if self.shape.weight_bytes >= self.shape.other_bytes:
            return []
        packed, scratch = elements * self.shape.weight_bytes / 4, elements * self.item * self.on_cpu
        weights = self.tape.make(elements, self.item, weights=packed, scratch=scratch)
        for _ in range(DEQUANTISING * self.on_cpu):
            self.tape.touch()
        return [weights]

    def wide(self, x: Array) -> Array:
        return x if self.item == 4 else self.array(x.elements / self.tokens, x, item=4)

    def dora(self, x: Array, wide: Array, width: int) -> Array:
        """As mlx-lm has it: the adapted weights are made for their norm, the low-rank term in float32 (`wide`)."""
        tape, inner = self.tape, x.elements / self.tokens
        y = self.product(width, inner * width, x)
        low = self.array(self.training.rank, wide, item=4)
        z = self.array(width, low, item=4)
        out = tape.over(y, self.item, z)
        weights = self.dequantised(inner * width)
        for _ in ("change", "sum", "squares for the norm"):  # of the adapted weights
            weights = [tape.make(inner * width, 4, *weights)]
        scaled = self.array(width, out)

        def back() -> None:
            dy = tape.cotangents.pop(scaled)
            tape.over(out, self.item, dy)
            d_out = tape.over(dy, self.item)
            dz = self.array(width, d_out, item=4)
            d_low = self.array(self.training.rank, dz, item=4)
            self.gradient(self.training.rank * (inner + width) + width, low, dz, wide, d_low)
            d_wide = self.array(inner, d_low, item=4)
            dx = self.product(inner, inner * width, d_out)
            tape.give(x, tape.over(dx, self.item, d_wide), self.item)

        self.later(back)
        return scaled

    def gradient(self, elements: float, *reads: Array) -> None:
        array = self.tape.make(elements, 4, *reads)
        self.tape.kept_to_the_end.append(array)

    def rotate(self, x: Array) -> Array:
        tape, width = self.tape, x.elements / self.tokens
        turns = self.array(self.shape.head_dim, item=4) if self.on_cpu else None
        if turns:
            self.array(width, x, turns, item=4)
        y = self.array(width, x, *([turns] if turns else []))

        def back() -> None:
            dy = tape.cotangents.pop(y)
            if turns:
                self.array(width, dy, turns, item=4)
            tape.give(x, self.array(width, dy, *([turns] if turns else [])), self.item)

        self.later(back)
        return y

    def rectangles(self) -> list[tuple[int, int, int, int]]:
        """Of the attention: (sequences, queries of each, its positions, keys that each query reads)."""
        batch, window = self.batch, self.training.window
        rectangles = [(batch.rows * batch.completions, batch.length, batch.prefix + batch.length)]
        if batch.prefix:
            rectangles.insert(0, (batch.rows, batch.prefix, batch.prefix))
        return [
            (n, queries, positions, positions if window is None or positions <= window else min(positions, 2 * window))
            for n, queries, positions in rectangles
        ]

    def attention(self, q: Array, k: Array, v: Array) -> Array:
        shape, tape, item = self.shape, self.tape, self.item
        width, kv_width = q.elements / self.tokens, k.elements / self.tokens
        outputs, parts = [], []
        for sequences, queries, positions, keys in self.rectangles():
            more = -queries % TILE if self.is_fused() and keys == positions else 0
            own = sequences * (queries + more) * width
            both = sequences * (positions + more) * kv_width
            is_whole = (not self.batch.prefix or queries == keys == self.batch.prefix) and not more
            ks = [each if is_whole else tape.make(both, item, each) for each in (k, v)]
            scores = sequences * queries * keys * shape.heads
            total = queries + more
            rows = block_rows(self.is_fused(), sequences, shape.heads, total, keys + more, item)
            block = scores * rows / queries if rows < queries and not self.is_fused() else 0.0
            if self.is_fused() and rows < total and keys == positions:  # each block's keys and values are a copy
                seen = sum(positions - queries + min(end, total) for end in range(rows, total + rows, rows))
                ks = [tape.make(sequences * seen * kv_width, item, each) for each in ks]
            given = tape.make(own, item, q) if more else q
            qs, probabilities, out = self.products(given, ks, own, block or scores, keeps=not block)
            outputs.append(tape.make(sequences * queries * width, item, out))  # in the order of tokens
            parts.append(_AttentionPart(qs, ks, probabilities, out, own, both, scores, block))
        y = tape.make(q.elements, item, *outputs) if len(outputs) > 1 else outputs[0]

        def back() -> None:
            dy = tape.cotangents.pop(y)
            pieces: list[list[Array]] = [[], [], []]
            for part in reversed(parts):
                for piece, array in zip(pieces, self.products_back(dy, part), strict=True):
                    piece.append(array)
            for x, piece in zip((q, k, v), pieces, strict=True):
                tape.give(x, tape.make(x.elements, item, *piece), item)

        self.later(back)
        return y

    def is_fused(self) -> bool:
        return is_fused(self.device, self.shape.head_dim, self.item)

    def products(
        self, q: Array, ks: list[Array], own: float, scores: float, keeps: bool
    ) -> tuple[Array, Array | None, Array]:
        """Scaled queries, probabilities (None where none are kept), output."""
        tape, item = self.tape, self.item
        if not keeps:  # blocks, of which two may be at work
            return q, None, tape.make(own, item, q, *ks, scratch=2 * scores * item)
        if self.is_fused():
            return q, None, tape.make(own, item, q, *ks)
        qs = tape.make(own, item, q)
        probabilities = tape.make(scores, item, qs, ks[0])  # in the scores' place, like the mask
        return qs, probabilities, tape.make(own, item, probabilities, ks[1])

    def products_back(self, dy: Array, part: _AttentionPart) -> list[Array]:
        """Cotangents of queries, keys and values."""
        tape, item = self.tape, self.item
        qs, (keys, values), probabilities = part.queries, part.keys_and_values, part.probabilities
        own, both, scores = part.query_elements, part.key_elements, part.score_elements
        d_out = tape.make(own, item, dy)
        if part.block_elements:  # probabilities, their cotangents and the scores'
            tape.touch(qs, keys, values, d_out, scratch=4 * part.block_elements * item)
            return [tape.make(size, item, qs, keys, values, d_out) for size in (own, both, both)]
        if probabilities is None:
            tape.touch(qs, keys, values, part.output, d_out, scratch=4 * own)
            return [tape.make(size, item, qs, keys, values, d_out) for size in (own, both, both)]
        repeated = both * self.shape.heads / self.shape.kv_heads
        dv = tape.make(repeated, item, probabilities, d_out)
        # With the probabilities' cotangent, in its place.
        product = tape.make(scores, item, probabilities, d_out, values)
        other = tape.over(product, item, probabilities)
        d_scores = tape.over(other, item, product)
        dq = tape.make(own, item, d_scores, keys)
        dk = tape.make(repeated, item, d_scores, qs)
        return [tape.make(own, item, dq), tape.make(both, item, dk), tape.make(both, item, dv)]

    def swiglu(self, gate: Array, up: Array) -> Array:
        tape, width = self.tape, gate.elements / self.tokens
        sigmoid = self.array(width, gate) if self.on_cpu else None
        y = self.array(width, gate, up, *([sigmoid] if sigmoid else []))

        def back() -> None:
            dy = tape.cotangents.pop(y)
            if sigmoid:
                silu = self.array(width, gate, sigmoid)
                d_up = self.array(width, dy, silu)
                rest = self.array(width, silu, sigmoid)
                d_gate = self.array(width, self.array(width, dy, up), self.array(width, rest, sigmoid))
            else:
                d_up, d_gate = self.array(width, dy, gate), self.array(width, dy, gate, up)
            tape.give(up, d_up, self.item)
            tape.give(gate, d_gate, self.item)

        self.later(back)
        return y

    def add(self, x: Array, y: Array) -> Array:
        total = self.array(x.elements / self.tokens, x, y)

        def back() -> None:
            d_total = self.tape.cotangents.pop(total)
            self.tape.give(x, d_total, self.item)
            self.tape.give(y, d_total, self.item)

        self.later(back)
        return total

    # ---- The model

    def taken(self, x: Array) -> Array:
        """Of the scored tokens alone."""
        y = self.tape.make(self.batch.scored * x.elements / self.tokens, self.item, x)
        self.later(
            lambda: self.tape.give(x, self.tape.make(x.elements, self.item, self.tape.cotangents.pop(y)), self.item)
        )
        return y

    def block(self, x: Array, has_experts: bool, is_last: bool) -> Array:
        shape, self.tokens = self.shape, self.batch.tokens
        queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        q, k, v = self.linears(self.norm(x), queries, keys, keys)
        attended = self.attention(self.rotate(q), self.rotate(k), v)
        if is_last and self.ends_early:
            x, attended = self.taken(x), self.taken(attended)
            self.tokens = self.batch.scored
        (out,) = self.linears(attended, shape.hidden_size)
        h = self.add(x, out)
        return self.add(h, self.experts(self.norm(h)) if has_experts else self.mlp(self.norm(h), shape.mlp_columns))

    def mlp(self, x: Array, columns: int) -> Array:
        gate, up = self.linears(x, columns, columns)
        return self.linears(self.swiglu(gate, up), self.shape.hidden_size)[0]

    def experts(self, x: Array) -> Array:
        """Every token goes through some experts: as wide as all of those together, and copied for each."""
        shape, times = self.shape, max(self.shape.experts_per_token, 1)
        copies = self.array(times * shape.hidden_size, x)
        columns, weight = times * shape.expert_columns, shape.experts * shape.hidden_size * shape.expert_columns
        gate, up = self.linears(copies, columns, columns, weight=weight)

        def gather() -> None:
            self.tape.give(x, self.array(shape.hidden_size, self.tape.cotangents.pop(copies)), self.item)

        self.later(gather, -1)
        (y,) = self.linears(self.swiglu(gate, up), times * shape.hidden_size, weight=weight)
        total = self.array(shape.hidden_size, self.array(times * shape.hidden_size, y))

        def scatter() -> None:
            dy = self.tape.cotangents.pop(total)
            self.tape.give(y, self.array(times * shape.hidden_size, dy, y), self.item)

        self.later(scatter)
        return total

    def write(self) -> Tape:
        """The whole micro-batch: forward, the head, backward."""
        shape, tape = self.shape, self.tape
        x = self.array(shape.hidden_size)
        blocks: list[tuple[Array, Array, list[Callable[[], None]], tuple[bool, bool]]] = []
        for index in range(shape.blocks):
            # A checkpointed block keeps nothing: its operations are recorded again where its backward pass begins.
            is_trained = index >= shape.blocks - self.trained_blocks
            self.is_trained = is_trained and not self.training.checkpointing
            kind = index >= shape.blocks - shape.expert_blocks, index == shape.blocks - 1
            y = self.block(x, *kind)
            backs, tape.backward = tape.backward, []
            blocks.append((x, y, backs, kind))
            x = y
        self.is_trained = True
        hidden = self.norm(x)
        final, tape.backward = tape.backward, []
        self.head(hidden)
        tape.go_back(final)
        trained = blocks[shape.blocks - self.trained_blocks :]
        for x, y, backs, kind in reversed(trained):
            if self.training.checkpointing:
                dy = tape.cotangents.pop(y)
                again = self.block(x, *kind)
                del tape.operations[self.last_products :]
                backs, tape.backward = tape.backward, []
                tape.cotangents[again] = dy
            tape.go_back(backs)
        if self.head_gradient:  # of the embedding, added to the head's where they are one
            embedding = tape.make(self.head_gradient, 4)
            if not shape.is_tied:
                tape.kept_to_the_end.append(embedding)
        return tape

    def head(self, hidden: Array) -> None:
        """The logits of the scored tokens, chunk by chunk, each with the gradient of what went in."""
        shape, tape, scored = self.shape, self.tape, self.batch.scored
        pieces = max(1, math.ceil(scored * shape.vocabulary * 4 / LOGITS_BYTES))
        rows = math.ceil(scored / pieces)
        taken = hidden if self.ends_early else tape.make(scored * shape.hidden_size, self.item, hidden)
        head_weights = shape.vocabulary * shape.hidden_size
        reads = (taken, *self.dequantised(head_weights))  # for all chunks
        head_weights = 0 if reads[1:] else head_weights
        frozen = [] if self.head_gradient else [self.chunk(reads, rows, head_weights) for _ in range(pieces)]
        slopes = frozen or self.trained_head(reads, rows, pieces, head_weights)
        for _ in range(LOSS_OPERATIONS):
            tape.touch()
        d_taken = tape.make(scored * shape.hidden_size, self.item, *slopes)
        tape.cotangents[hidden] = d_taken if self.ends_early else tape.make(hidden.elements, self.item, d_taken)

    def trained_head(self, reads: tuple[Array, ...], rows: int, pieces: int, head_weights: float) -> list[Array]:
        """Logits are made a second time, unless one piece is all."""
        tape, size = self.tape, rows * self.shape.vocabulary
        logits = None
        for _ in range(pieces):
            logits = tape.make(size, 4, *reads, weights=head_weights)
            tape.touch(logits)
        slopes, total = [], None
        for _ in range(pieces):
            if pieces > 1 or logits is None:
                logits = tape.make(size, 4, *reads, weights=head_weights)
            by_logits = tape.make(size, 4, logits)
            slopes.append(tape.make(rows * self.shape.hidden_size, 4, by_logits, *reads[1:], weights=head_weights))
            one = tape.make(self.head_gradient, 4, by_logits, reads[0])
            total = one if total is None else tape.over(one, 4, total)
        assert total is not None
        tape.kept_to_the_end.append(total)
        return slopes

    def chunk(self, reads: tuple[Array, ...], rows: int, head_weights: float) -> Array:
        tape, size = self.tape, rows * self.shape.vocabulary
        logits = tape.make(size, self.item, *reads, weights=head_weights)
        if self.on_cpu:
            wide = logits if self.item == 4 else tape.make(size, 4, logits)
            probabilities = tape.make(size, 4, wide)
            tape.touch(probabilities, wide)
            by_logits = tape.make(size, 4, probabilities)
            if self.item != 4:
                by_logits = tape.make(size, self.item, by_logits)
        else:
            tape.touch(logits)
            by_logits = tape.make(size, self.item, logits)
        return tape.make(rows * self.shape.hidden_size, self.item, by_logits, *reads[1:], weights=head_weights)
