"""
``vla-edge bench engine --endurance N``: many chunks, the same memory and tokens throughout.

After the warm-up the device must have exactly as much free memory at the end, the process may
have grown by less than ``RSS_TOLERANCE_BYTES``, and each chunk of the cycle must give the tokens
that it gave at first.
"""

from collections.abc import Callable
import gc
from typing import Any, Protocol

import numpy as np
import psutil

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.lab.gpu_state import UNAVAILABLE
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.lab.record import statistics
from vla_edge_ros.progress import no_progress, Progress

WARM_UP_CHUNKS = 200
RSS_TOLERANCE_BYTES = 1 << 20
SAMPLES = 20
BINS = 20


class Chunks(Protocol):
    """What is run; see ``chunks.py``."""

    cycle: int

    def run(self, index: int) -> np.ndarray:
        """Return the tokens of a chunk, the same for the same ``index % cycle``."""
        ...


class Memory:
    """
    What the process holds and what its device has left.

    Parameters
    ----------
    device : driver.Device, optional
        The GPU, if there is one.

    """

    def __init__(self, device=None):
        self._device = device
        self._process = psutil.Process()

    def sample(self) -> dict[str, Any]:
        """Return both, in bytes; from any thread."""
        free = UNAVAILABLE
        if self._device is not None:
            self._device.use()
            free = self._device.memory()[0]
        return {'device_free_bytes': free, 'rss_bytes': self._process.memory_info().rss}


def compare_memory(
    before: dict, after: dict, rss_tolerance_bytes: int = RSS_TOLERANCE_BYTES,
) -> dict[str, Any]:
    """Return what changed between two samples, and whether that ``passed``."""
    grown = after['rss_bytes'] - before['rss_bytes']
    free = before['device_free_bytes'], after['device_free_bytes']
    return {
        'device_grown_bytes': UNAVAILABLE if UNAVAILABLE in free else free[0] - free[1],
        'rss_grown_bytes': grown,
        'rss_tolerance_bytes': rss_tolerance_bytes,
        'passed': free[0] == free[1] and grown <= rss_tolerance_bytes,
    }


def endure(
    chunks: Chunks,
    count: int,
    memory: Memory,
    clock: Clock | None = None,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = no_progress,
    warm_up: int = WARM_UP_CHUNKS,
) -> dict[str, Any]:
    """
    Run chunks and return what was seen, with ``passed``.

    Parameters
    ----------
    chunks : Chunks
        What to run.
    count : int
        How many are timed.
    memory : Memory
        Sampled after the warm-up and ``SAMPLES`` times from then on.
    clock : Clock, optional
        Steady; the machine's by default.
    stopped : callable
        Asked before each chunk; once it returns True, what was measured so far is returned.
    progress : Progress
        Told of every sample.
    warm_up : int
        Chunks before the first that counts, one cycle at least; tokens are compared from the
        first cycle on.

    """
    clock = clock or MonotonicClock()
    took_ns = np.ones(count, np.int64)  # written here: pages that come later would count as growth
    expected: list[np.ndarray] = []
    differing: list[int] = []
    warm_up = max(warm_up, chunks.cycle)

    def run(index: int) -> int:
        began_ns = clock.now_ns()
        tokens = chunks.run(index)
        ended_ns = clock.now_ns()
        if index < chunks.cycle:
            expected.append(tokens.copy())
        elif not np.array_equal(tokens, expected[index % chunks.cycle]):
            differing.append(index)
        return ended_ns - began_ns

    done = 0
    every = max(count // SAMPLES, 1)
    with quiet_interpreter():
        for index in range(warm_up):
            if stopped():
                break
            run(index)
        gc.collect()
        samples = [{'chunk': 0} | memory.sample()]
        began_ns = clock.now_ns()
        while done < count and not stopped():
            took_ns[done] = run(warm_up + done)
            done += 1
            if done % every == 0:
                gc.collect(1)  # as the node does, in slack
                samples.append({'chunk': done} | memory.sample())
                progress('chunk', done, count)
        seconds = (clock.now_ns() - began_ns) / NS_PER_S
        if samples[-1]['chunk'] < done:
            samples.append({'chunk': done} | memory.sample())
    change = compare_memory(samples[0], samples[-1])
    record = {
        'asked_chunks': count, 'chunks': done, 'warm_up_chunks': warm_up,
        'different_inputs': chunks.cycle, 'seconds': seconds,
        'differing_chunks': len(differing), 'first_differing_chunk': None,
        'memory': change, 'memory_samples': samples,
        'passed': done > 0 and change['passed'] and not differing,
    }  # fmt: skip
    if differing:
        # Chunk 0 is the first that is timed; one of the warm-up lies before it.
        record['first_differing_chunk'] = differing[0] - warm_up
    if done:
        record |= _times(took_ns[:done] / NS_PER_MS)
    return record


def _times(milliseconds: np.ndarray) -> dict[str, Any]:
    found = {'min': float(milliseconds.min())} | statistics(milliseconds)
    edges = np.geomspace(max(found['min'], 1e-6), max(found['max'], 1e-6), BINS + 1)
    edges = np.clip(edges, found['min'], found['max'])  # rounded on the way, they would overlap
    edges[-1] = found['max']
    counts, _ = np.histogram(milliseconds, edges)
    return {
        'chunk_ms': found,
        'p99.9_over_median': found['p99.9'] / found['median'],
        'histogram': {'edges_ms': edges.tolist(), 'chunks': counts.tolist()},
    }
