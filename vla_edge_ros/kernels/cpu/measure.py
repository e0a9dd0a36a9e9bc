"""
The parts of the CPU decoder one by one, timed; nothing but measurements needs this.

A prefill and a decode are each one compiled call that nothing can look into. Here the same
operations run over all layers in turn, one kind at a time, on the engine's own arrays. What was in
the cache is spoiled afterwards.
"""

from collections.abc import Callable
import time
from typing import NamedTuple

import numpy as np

from vla_edge_ros.kernels.cpu.attention import attend, store_heads
from vla_edge_ros.kernels.cpu.compiled import compiled
from vla_edge_ros.kernels.cpu.elementwise import rms_norm_row, swiglu_row
from vla_edge_ros.kernels.cpu.linear import multiply
from vla_edge_ros.kernels.cpu.tile import PANEL, ROWS, tile_rows

_ONE, _NONE = np.intp(1), np.intp(0)
WARM_UP_RUNS = 3
MAIN_MEMORY_BYTES = 256 * 2**20
"""More than any cache holds."""
ROOF_BYTES = 64 * 2**20
"""Read in a run at least."""
ROOF_DEPTH, ROOF_TURNS, ROOF_REPEATS = 64, 20_000, 7
"""A product this deep stays in the first-level cache."""


class PartTime(NamedTuple):
    """What one part takes in a whole prefill or for one decoded token, s, the median."""

    part: str
    seconds: float


@compiled
def _qkv(weights, b, rows):
    hidden = b.normed.shape[1]
    for layer in range(b.keys.shape[0]):
        for row in range(rows):
            rms_norm_row(b.residual[row], weights.attention_norm[layer], weights.eps,
                         b.normed[row])  # fmt: skip
        multiply(
            b.normed.reshape(b.normed.size), hidden, rows, weights.qkv[layer],
            weights.qkv_bias[layer], _NONE, b.qkv.reshape(b.qkv.size), b.qkv.shape[1],
        )  # fmt: skip


@compiled
def _attention(weights, b, rows, first):
    for layer in range(b.keys.shape[0]):
        store_heads(b, layer, rows, first)
        attend(b, layer, rows, first)


@compiled
def _output(weights, b, rows):
    residual, width = b.residual.reshape(b.residual.size), b.residual.shape[1]
    for layer in range(b.keys.shape[0]):
        multiply(
            b.mixed.reshape(b.mixed.size), b.mixed.shape[1], rows, weights.output[layer],
            residual, width, residual, width,
        )  # fmt: skip


@compiled
def _mlp(weights, b, rows):
    hidden, inner = b.normed.shape[1], b.inner.shape[1]
    for layer in range(b.keys.shape[0]):
        for row in range(rows):
            rms_norm_row(b.residual[row], weights.mlp_norm[layer], weights.eps, b.normed[row])
        multiply(
            b.normed.reshape(b.normed.size), hidden, rows, weights.gate_up[layer],
            b.zeros, _NONE, b.gate_up.reshape(b.gate_up.size), b.gate_up.shape[1],
        )  # fmt: skip
        for row in range(rows):
            swiglu_row(b.gate_up[row], b.gate_up[row, inner:], b.inner[row])


@compiled
def _down(weights, b, rows):
    residual, width = b.residual.reshape(b.residual.size), b.residual.shape[1]
    for layer in range(b.keys.shape[0]):
        multiply(
            b.inner.reshape(b.inner.size), b.inner.shape[1], rows, weights.down[layer],
            residual, width, residual, width,
        )  # fmt: skip


@compiled
def _read(array, turns):
    """Sum an array some times over."""
    total = np.float32(0)
    for turn in range(turns):
        # Another sum every time, which no compiler takes out of the loop.
        sign = np.float32(turn)
        for i in range(array.size):
            total += array[i] * sign
    return total


@compiled
def _products(x, panel, init, out, turns):
    for _ in range(turns):
        tile_rows(
            x, 0, ROOF_DEPTH, panel, 0, PANEL, None, ROOF_DEPTH, init, 0, 0, out, 0, PANEL,
        )  # fmt: skip


def part_times(
    engine, context: int, rows: int, first_row: int, num_rows: int, repeats: int = 20,
) -> list[PartTime]:
    """
    Time every part of a pass over all layers, but for keys that change their rank.

    Parameters
    ----------
    engine : kernels.cpu.Engine
        Has room for ``context + rows`` slots.
    context : int
        Cached slots that the new tokens see.
    rows : int
        New tokens: those of a frame, or one for decoding, which has a head as well.
    first_row, num_rows : int
        Rows of the vocabulary that a decoded token is chosen from.
    repeats : int
        Timed runs of each.

    """
    weights, b = engine.weights, engine.buffers
    slots = np.arange(context + rows, dtype=np.int32)
    embeddings = np.random.default_rng(1).standard_normal(
        (rows, engine.buffers.normed.shape[1]), dtype=np.float32)
    # Leaves in every array what it holds in use.
    engine.forward(embeddings, slots[:context], slots[context:])
    rows, first = np.intp(rows), np.intp(context)

    parts: dict[str, Callable[[], object]] = {
        'qkv': lambda: _qkv(weights, b, rows),
        'attention': lambda: _attention(weights, b, rows, first),
        'output': lambda: _output(weights, b, rows),
        'mlp': lambda: _mlp(weights, b, rows),
        'down': lambda: _down(weights, b, rows),
    }
    if rows == 1:
        hidden = b.hidden[0].copy()
        parts['head'] = lambda: engine.logits(hidden, first_row, num_rows)
    return [PartTime(name, _median(work, repeats)) for name, work in parts.items()]


def read_bandwidth(num_bytes: float = MAIN_MEMORY_BYTES) -> float:
    """
    Return bytes a second that one thread reads, in the best of some runs.

    Parameters
    ----------
    num_bytes : float
        How much is read again and again: it comes from the smallest cache that holds it.

    """
    # Written to: untouched pages are all one, which a cache holds.
    array = np.ones(max(int(num_bytes) // 4, 1), np.float32)
    turns = np.intp(max(1, ROOF_BYTES // array.nbytes))
    return turns * array.nbytes / min(_seconds(lambda: _read(array, turns), ROOF_REPEATS))


def product_rate() -> float:
    """Return FLOP a second of float32 products out of the first-level cache, one thread's best."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(ROWS * ROOF_DEPTH, dtype=np.float32)
    panel = rng.standard_normal(ROOF_DEPTH * PANEL, dtype=np.float32)
    init, out = np.zeros(PANEL, np.float32), np.zeros(ROWS * PANEL, np.float32)
    flop = 2 * ROWS * ROOF_DEPTH * PANEL * ROOF_TURNS
    seconds = _seconds(lambda: _products(x, panel, init, out, np.intp(ROOF_TURNS)), ROOF_REPEATS)
    return flop / min(seconds)


def _seconds(work: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(WARM_UP_RUNS + repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return times[WARM_UP_RUNS:]


def _median(work: Callable[[], object], repeats: int) -> float:
    return float(np.median(_seconds(work, repeats)))
