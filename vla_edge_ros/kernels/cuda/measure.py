"""
The kernels of an engine one by one, timed; nothing but measurements needs this.

This module alone looks behind the methods of ``Engine``. What was in the cache is spoiled
afterwards; the engine goes on with the next prefill.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
import time
from typing import NamedTuple

import numpy as np

from vla_edge_ros.kernels.cuda.constants import STATE_WORDS, TOKENS
from vla_edge_ros.kernels.cuda.driver import Launch

STREAM = 'decode_stream'
WARM_UP_RUNS = 5
LEAST_LAUNCHES = 16
"""Launches in one recorded graph at least, so that starting it does not count."""


class KernelTime(NamedTuple):
    """
    What one launch of a kernel takes.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    turn : int
        How many of the same name precede it in a layer: 0 for the first.
    launches : int
        How many a chunk has: a prefill of ``TOKENS`` and a decode.
    seconds : float
        Mean over the layers, median over the repetitions.

    """

    kernel: str
    turn: int
    launches: int
    seconds: float


def kernel_times(engine, context: int, num_tokens: int, repeats: int = 50) -> list[KernelTime]:
    """
    Time every kernel of a chunk, each over all layers in turn, so that weights are not cached.

    Parameters
    ----------
    engine : Engine
        Has room for ``context + TOKENS`` slots.
    context : int
        Cached slots; all but the first ``TOKENS`` are out of order of rank, as an eviction of the
        oldest frame but one leaves them.
    num_tokens : int
        Tokens that a chunk decodes; on a device that decodes in one kernel they are one launch.
    repeats : int
        Runs of each that are timed.

    """
    device, launches, config = engine.device, engine._launches, engine._config

    def row(kernel: str, turn: int, count: int, work: Callable[[], None], per_run: int):
        seconds = float(np.median(graph_seconds(device, work, repeats))) / per_run
        return KernelTime(kernel, turn, count, seconds)

    def rows(groups: Iterable[list[Launch]], times: int, dependent: bool) -> list[KernelTime]:
        found = []
        for (kernel, turn), queue in _by_kernel(groups).items():
            count = times * len(queue)
            queue = queue * -(-LEAST_LAUNCHES // len(queue))
            work = partial(_queue, device, queue, dependent)
            found.append(row(kernel, turn, count, work, len(queue)))
        return found

    # Decode first: the kernels of a prefill, run out of turn, leave no keys to attend to.
    if engine._streams:
        _set_state(engine, context, context)
        # What else is in that graph is copies of some bytes.
        decode = [row(STREAM, 0, 1, partial(engine._queue_decode, num_tokens), 1)]
    else:
        _set_state(engine, context, TOKENS)
        layers = [launches.decode_layer(i, 0) for i in range(config.num_hidden_layers)]
        decode = rows(
            [*layers, [launches.embed(0, num_tokens), launches.head()]],
            num_tokens, engine._dependent)
    _set_state(engine, context, TOKENS)
    # The first kernel of a chunk waits for none ahead of it.
    prefill = [
        *rows([[launches.arrange()]], 1, False),
        *rows(engine._prefill_plan(False), 1, engine._dependent)]
    engine._held = 0
    return prefill + decode


def read_bandwidth(engine, repeats: int = 20) -> float:
    """Return bytes a second of reading the vocabulary's matrix, in the best of some repeats."""
    device, config = engine.device, engine._config
    _set_state(engine, 1, 1)
    queue = [engine._launches.head()] * LEAST_LAUNCHES
    work = partial(_queue, device, queue, engine._dependent)
    seconds = min(graph_seconds(device, work, repeats))
    engine._held = 0
    return LEAST_LAUNCHES * 2 * config.vocab_size * config.hidden_size / seconds


def graph_seconds(device, work: Callable[[], None], count: int) -> list[float]:
    """Return the seconds each of ``count`` runs took of the graph of all that ``work`` queues."""
    graph = device.record(work)
    seconds = []
    for _ in range(count + WARM_UP_RUNS):
        began = time.perf_counter()
        device.run(graph)
        device.wait()
        seconds.append(time.perf_counter() - began)
    return seconds[WARM_UP_RUNS:]


def _set_state(engine, context: int, held: int) -> None:
    """Tell the kernels of cached tokens, the first ``held`` in order of rank, and of new ones."""
    device = engine.device
    device.use()
    order = np.arange(context + TOKENS, dtype=np.int32)
    engine._host_state[STATE_WORDS : STATE_WORDS + held] = order[:held]
    engine._held = held
    engine._set_slots(order[:context], order[context:])
    engine._set_rows(0, engine._config.vocab_size)
    device.copy_in(engine._at['state'], engine._host_state)
    device.wait()


def _by_kernel(groups: Iterable[list[Launch]]) -> dict[tuple[str, int], list[Launch]]:
    """Return the launches of all groups by name and turn within their group."""
    found: dict[tuple[str, int], list[Launch]] = {}
    for group in groups:
        turns = Counter()
        for launch in group:
            found.setdefault((launch.name, turns[launch.name]), []).append(launch)
            turns[launch.name] += 1
    return found


def _queue(device, launches: list[Launch], dependent: bool) -> None:
    for index, launch in enumerate(launches):
        device.launch(launch, dependent and index > 0)
