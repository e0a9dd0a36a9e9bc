"""Chunks of the CUDA engine behind caches of some lengths: times, roofs, stages, peers."""

from collections.abc import Callable, Sequence
from importlib import util
import time
from typing import Any

import numpy as np

from vla_edge_ros.lab.chunks import Endless, EngineChunks
from vla_edge_ros.lab.gpu_state import gpu_state, pci_address
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.lab.random_policy import fast_random_weights
from vla_edge_ros.lab.record import statistics
from vla_edge_ros.lab.roofline import (
    compute_roof,
    DECODE_TOKENS,
    floor_bytes,
    PREFILL_TOKENS,
    stage_rows,
)

WARM_UP = 20
IDLE_S = 1.0
PEER_CHUNKS = 20
STAGE_REPEATS = 50
Peers = Callable[[Any, dict, int], dict]
"""Takes configuration, weights and cached tokens; returns what ``gpu_peer`` does."""


def middle_of(lengths: Sequence[int]) -> int:
    """Return the length at which stages, first chunks and peers are measured."""
    return sorted(lengths)[len(lengths) // 2]


def measure(
    config, lengths: Sequence[int], chunks: Sequence[int], make_engine: Callable,
    peers: Peers | None = None, *, warm_up: int = WARM_UP, idle_s: float = IDLE_S,
    repeats: int = STAGE_REPEATS,
) -> dict[str, Any]:
    """
    Return the record of one run.

    Parameters
    ----------
    config : TransformerConfig
        The network, whose weights are drawn here.
    lengths, chunks : sequence of int
        Cached slots, and how many chunks are timed behind each.
    make_engine : callable
        Takes configuration, weights and slots; returns a CUDA engine.
    peers : callable, optional
        What to measure beside it, once its memory is free again.
    warm_up : int
        Chunks of each length before the first that counts.
    idle_s : float
        How long the GPU has nothing to do before the chunk ``after_idle_ms``.
    repeats : int
        Runs of each kernel that are timed.

    """
    from vla_edge_ros.kernels.cuda.measure import kernel_times, read_bandwidth

    slots = max(lengths) + PREFILL_TOKENS + DECODE_TOKENS
    middle = middle_of(lengths)
    weights = fast_random_weights(config)
    began = time.perf_counter()
    engine = make_engine(config, weights, slots)
    device = engine.device
    tflop_s, source = compute_roof(device.name)
    record = {
        'device': device.name,
        'capability': device.capability,
        'warm_up_chunks': warm_up,
        'chunks': max(chunks),
        'start_s': time.perf_counter() - began,
        'compute_roof_tflop_s': tflop_s,
        'compute_roof_source': source,
        'lengths': {},
        'stage_length': middle,
    }
    address = pci_address(device)
    idle = gpu_state(address)
    with quiet_interpreter():
        first = _first_chunks(EngineChunks(engine, config, middle), warm_up, idle_s)
        bandwidth = read_bandwidth(engine)
        record['read_bandwidth_gb_s'] = bandwidth / 1e9
        for length, count in zip(lengths, chunks, strict=True):
            work = EngineChunks(engine, config, length)
            row = measure_length(work, count, warm_up)
            row['floor_ms'] = 1e3 * floor_bytes(config, length) / bandwidth
            record['lengths'][str(length)] = row
            if length == middle:
                # Behind so many chunks that the clocks are those of work.
                record['gpu'] = {'idle': idle, 'under_load': gpu_state(address, Endless(work))}
        times = kernel_times(engine, middle, DECODE_TOKENS, repeats)
    record['stages'] = stage_rows(times, config, middle, bandwidth, tflop_s)
    median = record['lengths'][str(middle)]['chunk_ms']['median']
    record['first_chunk'] = first | {
        'after_start_over_median': first['after_start_ms'] / median,
        'after_idle_over_median': first['after_idle_ms'] / median,
    }
    engine.close()
    if peers is not None:
        record |= compare_peers(peers(config, weights, middle), middle, median)
    return record


def measure_length(chunks: EngineChunks, count: int, warm_up: int) -> dict[str, Any]:
    """Return the times of ``count`` chunks."""
    times = np.empty((warm_up + count, 3))
    for index, row in enumerate(times):
        cpu_s, began_s = time.thread_time(), time.perf_counter()
        chunks.prefill(index)
        between_s = time.perf_counter()
        chunks.decode(index)
        ended_s = time.perf_counter()
        row[:] = between_s - began_s, ended_s - between_s, time.thread_time() - cpu_s
    prefill, decode, host = 1e3 * times[warm_up:].T
    chunk = statistics(prefill + decode)
    return {
        'chunks': count,
        'chunk_ms': chunk,
        'p99.9_over_median': chunk['p99.9'] / chunk['median'],
        'prefill_ms': statistics(prefill),
        'decode_ms_per_token': statistics(decode / DECODE_TOKENS),
        'host_cpu_ms': statistics(host),
    }


def find_peers(compile_mode: str = '') -> Peers:
    """Return Hugging Face on the GPU, or what says why it is not measured."""
    for package in ('torch', 'transformers'):
        if util.find_spec(package) is None:
            reason = f'not run: {package} is not installed'
            return lambda *_: {'chunk_ms': {'hugging_face': reason}}

    def peers(config, weights, length):
        from vla_edge_ros.lab.gpu_peer import measure_peers

        return measure_peers(
            config, weights, length, PREFILL_TOKENS, DECODE_TOKENS, PEER_CHUNKS, compile_mode)

    return peers


def compare_peers(found: dict, length: int, median: float) -> dict[str, Any]:
    """
    Return what the record says of peers.

    Parameters
    ----------
    found : dict
        From ``gpu_peer``: ``chunk_ms`` by peer, times or a text, and anything else.
    length : int
        Cached tokens.
    median : float
        Of our own chunk, ms.

    """
    chunk_ms = found.pop('chunk_ms')
    timed = {name: times for name, times in chunk_ms.items() if isinstance(times, dict)}
    return {
        'peer_length': length,
        'peer_cache_slots': length + PREFILL_TOKENS + DECODE_TOKENS,
        'peers': {**chunk_ms, **{name: times['median'] for name, times in timed.items()}},
        'peer_chunk_ms': timed,
        'ours_over_peer': {name: median / times['median'] for name, times in timed.items()},
        'peer_notes': found,
    }


def _first_chunks(chunks: EngineChunks, warm_up: int, idle_s: float) -> dict[str, float]:
    """Return what the very first chunk took, and one after nothing was done for a while."""
    def timed(index: int) -> float:
        began_s = time.perf_counter()
        chunks.run(index)
        return 1e3 * (time.perf_counter() - began_s)

    after_start_ms = timed(0)
    for index in range(warm_up):
        chunks.run(index)
    time.sleep(idle_s)
    return {'after_start_ms': after_start_ms, 'after_idle_ms': timed(warm_up), 'idle_s': idle_s}
