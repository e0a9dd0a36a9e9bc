"""
Training streams: short films of the simulated table with the expert's answer to every frame.

The hand is moved by a noisy controller that often follows another cube than the instruction
names, so that no frame's label can be guessed from how the hand moved before.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.vision import resize_rgb8
from vla_edge_ros.sim.tasks import COLOURS, expert_action, expert_chunk, sample_instruction
from vla_edge_ros.sim.world import World
from vla_edge_ros.workers import run_in_workers

NS_PER_S = 1_000_000_000
# Time between frames that reach the policy, in camera periods of 1/60 s, and how often.
_GAPS = np.array([1, 2, 3, 4, 6, 9])
_GAP_WEIGHTS = np.array([0.05, 0.65, 0.1, 0.1, 0.05, 0.05])
_SWITCH_PROBABILITY = 0.4  # of a second instruction somewhere in the stream
_SAME_TARGET_PROBABILITY = 0.6  # that the hand follows the cube it was told to follow
_NOISE_SPEED = 0.35  # m/s, deviation of the slow random motion added to the hand


@dataclass(frozen=True, slots=True)
class StreamShape:
    """What one stream holds: frames, image size in pixels, steps of a chunk and their length."""

    frames: int
    width: int
    height: int
    chunk_steps: int
    step_s: float


def generate_stream(world: World, seed: int, shape: StreamShape) -> dict[str, np.ndarray | list]:
    """
    Film one stream.

    Returns
    -------
    dict
        ``images`` uint8 [T, h, w, 3]; ``proprioception`` float32 [T, 2] in m; ``grounding``
        float32 [T, 2] in m; ``actions`` float32 [T, steps, 2] in m/s; ``prompt_index`` int64
        [T]; ``instructions``, two strings.

    """
    rng = np.random.default_rng(seed)
    world.reset(rng, randomisation=1.0)
    names = list(COLOURS)
    first, second = rng.choice(len(names), 2, replace=False)
    switch = shape.frames
    if rng.random() < _SWITCH_PROBABILITY:
        switch = int(rng.integers(1, shape.frames))
    prompt_index = (np.arange(shape.frames) >= switch).astype(np.int64)
    same = rng.random() < _SAME_TARGET_PROBABILITY
    chased = int(first) if same else int(rng.integers(len(names)))
    noise = rng.normal(0.0, _NOISE_SPEED, 2)
    noise_scale = rng.choice([0.3, 1.0, 2.0])

    images = np.empty((shape.frames, shape.height, shape.width, 3), np.uint8)
    proprioception = np.empty((shape.frames, 2), np.float32)
    grounding = np.empty((shape.frames, 2), np.float32)
    actions = np.empty((shape.frames, shape.chunk_steps, 2), np.float32)
    for t in range(shape.frames):
        target = int(second if prompt_index[t] else first)
        images[t] = resize_rgb8(world.render(), shape.width, shape.height)
        proprioception[t] = world.joint_positions
        grounding[t] = world.object_positions[target]
        actions[t] = expert_chunk(world, target, shape.chunk_steps, shape.step_s)
        if prompt_index[t] and rng.random() < 0.5:
            chased = target
        for _ in range(int(rng.choice(_GAPS, p=_GAP_WEIGHTS))):
            noise += rng.normal(0.0, 0.3 * _NOISE_SPEED, 2) - 0.05 * noise
            command = expert_action(world, chased) + noise_scale * noise
            world.step(np.clip(command, -1.0, 1.0), NS_PER_S // 60)
    return {
        'images': images, 'proprioception': proprioception, 'grounding': grounding,
        'actions': actions, 'prompt_index': prompt_index,
        'instructions': [sample_instruction(rng, names[first]),
                         sample_instruction(rng, names[second])],
    }


def _write_shards(
    shape: StreamShape, shards: Sequence[tuple[Path, range]]
) -> Iterator[Path]:
    with closing(World()) as world:
        for path, seeds in shards:
            streams = [generate_stream(world, seed, shape) for seed in seeds]
            arrays = {key: np.stack([stream[key] for stream in streams]) for key in streams[0]}
            unfinished = path.with_suffix('.partial.npz')
            np.savez(unfinished, **arrays)
            unfinished.rename(path)
            yield path


def collect(
    folder: Path, streams: int, seed: int, shape: StreamShape, workers: int, stop: StopRequest,
    shard: int = 128,
) -> Iterator[Path]:
    """
    Film ``streams`` streams into shards below ``folder`` and yield each shard as it is ready.

    Shards that exist are kept, so an interrupted collection goes on where it stopped. Stream
    ``i`` depends on ``seed + i`` alone, never on the number of workers, and the names of the
    shards sort as the streams are numbered.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pending = []
    for start in range(0, streams, shard):
        path = folder / f'streams_{seed}_{start:07d}.npz'
        seeds = range(seed + start, seed + min(start + shard, streams))
        if path.exists():
            yield path
        else:
            pending.append((path, seeds))
    shares = [pending[worker::workers] for worker in range(min(workers, len(pending)))]
    yield from run_in_workers(partial(_write_shards, shape), shares, stop)


def sample_histories(
    rng: np.random.Generator, count: int, frames: int, max_frames: int,
) -> tuple[np.ndarray, np.ndarray]:
    """
    Play ``count`` caches of random size and random eviction over a stream of ``frames`` frames.

    Returns
    -------
    history : int64 [count, frames, max_frames - 1]
        Earlier frames retained at each frame, oldest first, padded with 0.
    lengths : int64 [count, frames]

    """
    history = np.zeros((count, frames, max_frames - 1), np.int64)
    lengths = np.zeros((count, frames), np.int64)
    for i in range(count):
        capacity = max_frames if rng.random() < 0.75 else int(rng.integers(1, max_frames + 1))
        fifo = rng.random() < 0.35
        retained: list[int] = []
        for t in range(frames):
            while len(retained) >= capacity:
                newest_kept = max(len(retained) - 1, 1)
                del retained[0 if fifo else int(rng.integers(newest_kept))]
            history[i, t, :len(retained)] = retained
            lengths[i, t] = len(retained)
            retained.append(t)
    return history, lengths
