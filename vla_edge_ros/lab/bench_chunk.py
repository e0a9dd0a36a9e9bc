"""
Time one action chunk (prefill of a frame, then greedy decode) beside torch, in the same run.

The rounds are interleaved, so that whatever else the machine does hits all alike, and every
runner must choose the same tokens before any is timed.
"""

import argparse
from importlib import util
import json
from pathlib import Path
import time

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.kernels import cpu
from vla_edge_ros.lab.random_model import random_weights, TINY
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.policy.decoder import Transformer

PROMPT_TOKENS = 24
CACHED_TOKENS = 256
PREFILL_TOKENS = 32
DECODE_TOKENS = 8
LIMIT_RATIO = 0.5  # of the fastest torch
FIRST_ROW = 512  # the last 256 vocabulary rows are the action bins


class OurChunk:
    """The package's own decoder behind the peers' methods."""

    def __init__(self, config, tensors, total_slots: int, weights_dtype: str):
        self._transformer = Transformer(
            config, tensors, cpu, total_slots, PREFILL_TOKENS, weights_dtype
        )
        self._slots = np.arange(total_slots, dtype=np.int32)
        self._length = 0

    def rewind(self, length: int):
        """Forget what follows the first ``length`` slots."""
        self._length = length

    def prefill(self, embeddings):
        """Append embeddings [n, hidden] to the cache."""
        first, last = self._length, self._length + len(embeddings)
        self._transformer.prefill(embeddings, self._slots[first:last], self._slots[:first])
        self._length = last

    def decode_greedy(self, token, num_tokens, first_row):
        """Return the best rows from ``first_row`` on, each fed back."""
        slots = self._slots
        return self._transformer.decode_greedy(
            token, num_tokens, slots[self._length :], slots[: self._length], first_row
        ).tolist()

    def evict_oldest(self):
        """Make the oldest frame's slots the next to write: every rank behind them moves."""
        frames = self._slots[PROMPT_TOKENS : -DECODE_TOKENS]
        frames[:] = np.roll(frames, -PREFILL_TOKENS)


def _milliseconds(samples_ns):
    samples = samples_ns / NS_PER_MS
    return {
        'median': round(float(np.median(samples)), 4),
        'p99': round(float(np.percentile(samples, 99)), 4),
        'max': round(float(samples.max()), 4),
    }


def check_tokens(runners, embeddings) -> None:
    """
    Fill every runner's cache and let it choose once.

    Raises
    ------
    RuntimeError
        They disagree on a token.

    """
    chosen = {}
    for name, runner in runners.items():
        for start in range(0, len(embeddings), PREFILL_TOKENS):
            runner.rewind(start)
            runner.prefill(embeddings[start : start + PREFILL_TOKENS])
        chosen[name] = tuple(runner.decode_greedy(1, DECODE_TOKENS, FIRST_ROW))
    if len(set(chosen.values())) != 1:
        raise RuntimeError(f'the runners choose different tokens: {chosen}')


def measure(runner, frame, length: int) -> tuple[int, int, int]:
    """Return the ns that one chunk took: whole, prefill, decode."""
    runner.rewind(length)
    start = time.perf_counter_ns()
    runner.prefill(frame)
    middle = time.perf_counter_ns()
    runner.decode_greedy(1, DECODE_TOKENS, FIRST_ROW)
    end = time.perf_counter_ns()
    return end - start, middle - start, end - middle


def run(rounds: int, warm_up: int = 20, threads: int = 1) -> dict:
    """Return the record of one comparison."""
    import torch

    from vla_edge_ros.lab.torch_peer import HuggingFaceChunk, PlainTorchChunk

    torch.set_num_threads(threads)
    length = PROMPT_TOKENS + CACHED_TOKENS
    total_slots = length + PREFILL_TOKENS + DECODE_TOKENS
    tensors = random_weights(TINY, weights_dtype='bfloat16')
    ours = {
        f'ours_{dtype}': OurChunk(TINY, tensors, total_slots, dtype)
        for dtype in ('float32', 'bfloat16')
    }
    peers = {
        'hugging_face_static_cache': HuggingFaceChunk(TINY, tensors, total_slots),
        'plain_torch': PlainTorchChunk(TINY, tensors, total_slots),
    }
    shape = (length + PREFILL_TOKENS, TINY.hidden_size)
    embeddings = np.random.default_rng(1).standard_normal(shape, dtype=np.float32)
    check_tokens(ours | peers, embeddings)

    samples = {name: [] for name in ours | peers}
    for _ in range(warm_up + rounds):
        for runner in ours.values():
            runner.evict_oldest()
        for name, runner in (ours | peers).items():
            samples[name].append(measure(runner, embeddings[length:], length))
    record = {
        'environment': environment_record() | {'torch': torch.__version__},
        'threads': threads,
        'rounds': rounds,
        'warm_up': warm_up,
        'cached_tokens': length,
        'prefill_tokens': PREFILL_TOKENS,
        'decode_tokens': DECODE_TOKENS,
    }
    for name, rows in samples.items():
        columns = zip(('chunk_ms', 'prefill_ms', 'decode_ms'), np.array(rows[warm_up:]).T)
        record[name] = {key: _milliseconds(values) for key, values in columns}
    ours_ms, peers_ms = (
        min(record[name]['chunk_ms']['median'] for name in group) for group in (ours, peers)
    )
    record['ratio_to_fastest_torch'] = round(ours_ms / peers_ms, 3)
    return record


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison, print it and write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=200)
    parser.add_argument('--threads', type=int, default=1, help='threads torch may use')
    parser.add_argument('--json', type=Path)
    options = parser.parse_args(arguments)
    if util.find_spec('torch') is None:
        parser.exit(2, 'the comparison needs torch: make parity installs it\n')
    record = run(options.rounds, threads=options.threads)
    text = json.dumps(record, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + '\n', encoding='utf-8')
    return 0 if record['ratio_to_fastest_torch'] <= LIMIT_RATIO else 1


if __name__ == '__main__':
    raise SystemExit(main())
