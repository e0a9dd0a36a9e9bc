"""
Time what a frame costs before any arithmetic: one admission decision and one eviction.

Run as ``python -m vla_edge_ros.lab.bench_eviction [--json FILE]``. The embeddings drift like
those of a camera at 30 Hz; every timed insertion evicts.
"""

import argparse
import json
from pathlib import Path
import time
import tracemalloc

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.policy.eviction import make_eviction_policy
from vla_edge_ros.policy.kv_cache import CacheLayout, KVCache
from vla_edge_ros.runtime.admission import AdmissionController
from vla_edge_ros.telemetry.stages import Stage

LAYOUT = CacheLayout(prompt_slots=64, kv_slots=4096, slots_per_frame=32, scratch_slots=8)
EMBEDDING_SIZE = 1536
PERIOD_NS = 33_333_333
LIMIT_P99_US = 50.0
POLICIES = ('semantic', 'fifo', 'uniform')


def make_embeddings(count: int, size: int, seed: int = 0) -> np.ndarray:
    """Return ``count`` embeddings of a slow random walk, float32 ``[count, size]``."""
    steps = np.random.default_rng(seed).normal(size=(count, size))
    return np.cumsum(steps, axis=0).astype(np.float32)


def full_cache(policy: str, embeddings: np.ndarray) -> KVCache:
    """Return a cache in which every further insertion evicts."""
    cache = KVCache(LAYOUT, make_eviction_policy(policy), embeddings.shape[1], pin_first=True)
    for frame in range(LAYOUT.max_frames):
        cache.insert(embeddings[frame % len(embeddings)], frame * PERIOD_NS)
    return cache


def time_policy(policy: str, repetitions: int) -> dict:
    """Return the latency in µs of decision, insertion with eviction, and both together."""
    embeddings = make_embeddings(512, EMBEDDING_SIZE)
    cache = full_cache(policy, embeddings)
    admission = AdmissionController()
    durations_ns = np.zeros((2, repetitions), np.int64)
    for index in range(repetitions):
        stamp_ns = (LAYOUT.max_frames + index) * PERIOD_NS
        embedding = embeddings[index % len(embeddings)]
        started_ns = time.perf_counter_ns()
        admission.decide(stamp_ns, stamp_ns + PERIOD_NS)
        decided_ns = time.perf_counter_ns()
        insertion = cache.insert(embedding, stamp_ns)
        durations_ns[0, index] = decided_ns - started_ns
        durations_ns[1, index] = time.perf_counter_ns() - decided_ns
        if insertion.evicted_frame_id is None:
            raise RuntimeError('the benchmark must evict')
        admission.observe(Stage.PREFILL, 8 * NS_PER_MS)
        admission.observe(Stage.DECODE, 8 * NS_PER_MS)
    return {
        'decision_us': percentiles_us(durations_ns[0]),
        'eviction_us': percentiles_us(durations_ns[1]),
        'both_us': percentiles_us(durations_ns.sum(axis=0)),
    }


def percentiles_us(durations_ns: np.ndarray) -> dict:
    """Return p50, p99 and max in µs."""
    p50, p99, highest = np.percentile(durations_ns, [50, 99, 100]) / 1e3
    return {'p50': round(p50, 2), 'p99': round(p99, 2), 'max': round(highest, 2)}


def memory_growth_bytes(policy: str, frames: int) -> int:
    """Return by how much ``frames`` insertions into a full cache make Python's memory grow."""
    embeddings = make_embeddings(64, 16)
    cache = full_cache(policy, embeddings)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for index in range(frames):
            stamp_ns = (LAYOUT.max_frames + index) * PERIOD_NS
            cache.insert(embeddings[index % len(embeddings)], stamp_ns)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return after - before


def main() -> int:
    """Print and store the record; exit code 1 when a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='store the record here')
    parser.add_argument('--repetitions', type=int, default=20_000)
    parser.add_argument('--memory-frames', type=int, default=1_000_000)
    options = parser.parse_args()
    record = {
        'environment': environment_record(),
        'frames': LAYOUT.max_frames,
        'embedding_size': EMBEDDING_SIZE,
        'repetitions': options.repetitions,
        'limit_p99_us': LIMIT_P99_US,
        'policies': {name: time_policy(name, options.repetitions) for name in POLICIES},
        'memory_frames': options.memory_frames,
        'memory_growth_bytes': memory_growth_bytes('semantic', options.memory_frames),
    }
    text = json.dumps(record, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + '\n', encoding='utf-8')
    worst_us = max(result['both_us']['p99'] for result in record['policies'].values())
    return 0 if worst_us <= LIMIT_P99_US and record['memory_growth_bytes'] < 65536 else 1


if __name__ == '__main__':
    raise SystemExit(main())
