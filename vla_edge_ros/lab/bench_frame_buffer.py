"""
Torn reads, write latency and survival of the frame buffer, measured between processes.

``python -m vla_edge_ros.lab.bench_frame_buffer --json out/frame_buffer.json``

A writer process publishes as fast as it can; every frame that the reader gets is checksummed.
Frame ``k`` is one of ``POOL`` random images with ``k`` written into every 64th word; its checksum
travels as the stamp and ``k`` as the receive time, so a mixture of any two frames, or of one
frame's pixels with another's metadata, is caught.
"""

import argparse
import json
import mmap
import multiprocessing
import os
from pathlib import Path
import time

from numba import njit
import numpy as np

from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter

SMALL = (4, 8, 2)
LARGE = (480, 640, 3)
POOL = 8
MARK_EVERY = 64
MAX_TIMED_WRITES = 1_000_000
PATIENCE_S = 30
STARTUP_S = 0.02

# Words of the memory through which the processes count.
STOP, WRITES, READS, NEW_FRAMES, TORN, NONE = range(6)


@njit('int64(int64[::1])', cache=True, nogil=True)
def checksum(words):
    """Return the sum of all words, each times an odd number of its own, modulo 2**64."""
    total = 0
    for index in range(words.size):
        total += words[index] * (0x1E3779B97F4A7C15 * (2 * index + 1))
    return total


class FrameSource:
    """Frames whose content tells whether it is whole; ``shape`` must be whole 8-byte words."""

    def __init__(self, shape: tuple[int, int, int]):
        random = np.random.default_rng(1)
        self._images = random.integers(0, 256, (POOL, *shape), np.uint8)
        words = self._images.reshape(POOL, -1).view(np.int64)
        self._marks = words[:, ::MARK_EVERY]
        self._marks[:] = 0
        self._checksums = [checksum(row) for row in words]
        unit = np.zeros(words.shape[1], np.int64)
        unit[::MARK_EVERY] = 1
        self._checksum_per_mark = checksum(unit)

    def frame(self, sequence: int) -> tuple[np.ndarray, int]:
        """Return image and checksum of frame ``sequence``."""
        index = sequence % POOL
        self._marks[index] = sequence
        total = (self._checksums[index] + sequence * self._checksum_per_mark) % (1 << 64)
        return self._images[index], total - (total >> 63 << 64)


def is_torn(frame) -> bool:
    """Return whether pixels, stamps and sequence of a frame of ``FrameSource`` disagree."""
    total = checksum(frame.image.reshape(-1).view(np.int64))
    return total != frame.stamp_ns or frame.sequence != frame.received_ns


def shared_array(size: int) -> np.ndarray:
    """Return int64 zeros that forked children share and SIGKILL does not lose."""
    return np.frombuffer(mmap.mmap(-1, 8 * size), np.int64)


def write_until_stopped(name: str, shape, counters, durations) -> None:
    """Publish at full speed, timing every call; the body of a writer process."""
    source = FrameSource(shape)
    with FrameWriter(name, int(np.prod(shape))) as writer:
        sequence = 0
        while not counters[STOP]:
            sequence += 1
            image, total = source.frame(sequence)
            started = time.perf_counter_ns()
            writer.write(image, total, sequence)
            durations[sequence % durations.size] = time.perf_counter_ns() - started
            counters[WRITES] = sequence


def read_until_stopped(name: str, shape, counters, max_reads: int = 1 << 62, target=None) -> None:
    """Read and check at full speed, through a target if given; the body of a reader process."""
    out = np.empty(shape, np.uint8) if target is None else None
    reads = none = new_frames = last = 0
    with FrameReader(name, target) as reader:
        while reads < max_reads and not counters[STOP]:
            frame = reader.read(out)
            if frame is None:
                none += 1
                counters[NONE] = none
                continue
            reads += 1
            counters[READS] = reads
            if is_torn(frame):
                counters[TORN] += 1
            if frame.sequence != last:
                last = frame.sequence
                new_frames += 1
                counters[NEW_FRAMES] = new_frames


def hammer(name: str, shape, reads: int, target=None) -> dict:
    """Read ``reads`` frames against a writer at full speed; returns counts and latencies."""
    counters = shared_array(8)
    durations = shared_array(MAX_TIMED_WRITES)
    writer = start(write_until_stopped, name, shape, counters, durations)
    wait_for(lambda: counters[WRITES] > 100)
    durations[:] = 0
    counters[WRITES] = 0
    started = time.monotonic()
    read_until_stopped(name, shape, counters, reads, target)
    seconds = time.monotonic() - started
    counters[STOP] = 1
    writer.join()
    attempts = int(counters[READS] + counters[NONE])
    timed = durations[durations > 0] / 1e3
    p50, p99, p999 = np.percentile(timed, (50, 99, 99.9)).round(2).tolist()
    return {
        'shape': list(shape),
        'reads': int(counters[READS]),
        'new_frames': int(counters[NEW_FRAMES]),
        'torn': int(counters[TORN]),
        'none': int(counters[NONE]),
        'success_ratio': int(counters[READS]) / attempts,
        'seconds': round(seconds, 2),
        'timed_writes': timed.size,
        'write_us': {'p50': p50, 'p99': p99, 'p99.9': p999, 'max': float(timed.max())},
    }


def survive_kills(name: str, shape, rounds: int, seed: int = 0) -> dict:
    """
    Kill writer and reader in turn at random moments; raises TimeoutError if the other stops.

    Each round kills one of them at work, then its successor while that starts, and then wants to
    see new frames pass from the writer to the reader.
    """
    random = np.random.default_rng(seed)
    counters = shared_array(8)
    durations = shared_array(1024)
    bodies = {
        'writer': (write_until_stopped, name, shape, counters, durations),
        'reader': (read_until_stopped, name, shape, counters),
    }
    running = {role: start(*body) for role, body in bodies.items()}
    slowest_s = 0.0
    for index in range(rounds):
        victim, survivor = ('writer', 'reader') if index % 2 else ('reader', 'writer')
        for _ in range(2):
            time.sleep(random.uniform(0, STARTUP_S))
            running[victim].kill()
            running[victim].join()
            passed = activity(counters, survivor)
            wait_for(lambda: activity(counters, survivor) != passed)  # noqa: B023
            running[victim] = start(*bodies[victim])
        counters[NEW_FRAMES] = counters[WRITES] = 0
        started = time.monotonic()
        wait_for(lambda: counters[NEW_FRAMES] > 1 and counters[WRITES] > 1)
        slowest_s = max(slowest_s, time.monotonic() - started)
    for process in running.values():
        process.kill()
        process.join()
    FrameWriter(name, 1).close()  # takes the dead writer's place and leaves nothing
    return {
        'rounds': rounds,
        'kills': 2 * rounds,
        'torn': int(counters[TORN]),
        'slowest_recovery_ms': round(1e3 * slowest_s, 1),
        'left_behind': Path('/dev/shm', name).exists(),
    }


def activity(counters, role: str) -> int:
    """Return a number that changes as long as ``role`` goes on."""
    return int(counters[WRITES] if role == 'writer' else counters[READS] + counters[NONE])


def start(function, *arguments) -> multiprocessing.Process:
    """Run ``function`` in a forked process, which has everything compiled at once."""
    process = multiprocessing.get_context('fork').Process(
        target=function, args=arguments, daemon=True
    )
    process.start()
    return process


def wait_for(condition) -> None:
    """Return once ``condition()`` holds; raises TimeoutError after ``PATIENCE_S``."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f'no progress within {PATIENCE_S} s')
        time.sleep(0.0005)


def main() -> int:
    """Run the benchmark and write the record; exit status 1 for a torn frame or a leftover."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n\n')[0])
    parser.add_argument('--json', type=Path, required=True, help='where the record goes')
    parser.add_argument('--reads', type=int, default=10_000_000, help='reads of small frames')
    parser.add_argument('--large-reads', type=int, default=100_000, help='reads of 640x480x3')
    parser.add_argument('--rounds', type=int, default=200, help='rounds of kill -9')
    arguments = parser.parse_args()
    name = f'vla_edge_bench_{os.getpid()}'
    record = {
        'environment': environment_record(),
        'small': hammer(name, SMALL, arguments.reads),
        'large': hammer(name, LARGE, arguments.large_reads),
        'kills': survive_kills(name, LARGE, arguments.rounds),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(record, indent=2) + '\n')
    print(json.dumps(record, indent=2))
    torn = sum(record[part]['torn'] for part in ('small', 'large', 'kills'))
    return 1 if torn or record['kills']['left_behind'] else 0


if __name__ == '__main__':
    raise SystemExit(main())
