"""
Tell whether the cue of the task ``memory`` is still in the cache when the robot has to act.

Run as ``python -m vla_edge_ros.lab.bench_memory [--json FILE]``. The pictures are those of the
task, embedded by the embedded policy's vision encoder; the caches have its layout and evict as
``semantic``, ``fifo`` and ``uniform`` do, all with the same frames. The scripted expert moves the
tool. What is told is which frames were kept, not what a policy makes of them: one that was trained
for it could carry the colour on in the keys and values of later frames.
"""

import argparse
from contextlib import closing
import json
from pathlib import Path
import sys

import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.outputs import check_file, write_text
from vla_edge_ros.policy.eviction import make_eviction_policy
from vla_edge_ros.policy.kv_cache import CacheLayout, KVCache
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.sim.episode import wilson_interval
from vla_edge_ros.sim.memory import CueWorld, NOTHING, plan_memory
from vla_edge_ros.sim.tasks import COLOURS, TICK_HZ

EVICTIONS = ('semantic', 'fifo', 'uniform')
FRAMES = (4, 8, 16, 32)
"""Frames that a cache holds; the embedded policy's holds 8."""
RECALLS_S = (1.0, 3.0, 10.0)
EPISODES = 200
SEED = 20


def make_caches(layout: CacheLayout, frames: tuple[int, ...], size: int) -> dict:
    """Return an empty cache for every eviction policy and number of frames."""
    caches = {}
    for count in frames:
        sized = CacheLayout(
            layout.prompt_slots, count * layout.slots_per_frame, layout.slots_per_frame,
            layout.scratch_slots)
        for name in EVICTIONS:
            caches[name, count] = KVCache(sized, make_eviction_policy(name), size)
    return caches


def run_episode(
    world: CueWorld, policy: Policy, rng: np.random.Generator, recall_s: float,
    frames: tuple[int, ...] = FRAMES,
) -> dict[tuple[str, int], tuple[int, int]]:
    """
    Show one episode to all caches.

    Returns
    -------
    dict of (eviction, frames) to (int, int)
        Frames of the cue that a cache still held at the first tick at which the tool could move,
        and at the one that decided the task.

    """
    world.reset(rng)
    target = int(rng.integers(len(COLOURS)))
    task = plan_memory(rng, world, target, target, recall_s)
    config = policy.config
    caches = make_caches(policy.cache.layout, frames, config.vision_hidden_size)
    cue_ids: list[int] = []
    at_release: dict[tuple[str, int], int] = {}
    tick = 0
    while not task.done:
        task.see(world)
        embedding = policy.embed(world.render())
        for cache in caches.values():
            frame_id = cache.insert(embedding, world.time_ns).frame_id
        if world.shown != NOTHING:
            cue_ids.append(frame_id)
        held = {key: int(np.isin(cache.retained.ids, cue_ids).sum())
                for key, cache in caches.items()}
        if not at_release and not world.braked:
            at_release = held
        tick += 1
        action = task.expert_chunk(world, 1, 0.0)[0]
        world.step(action, tick * NS_PER_S // TICK_HZ - world.time_ns)
        task.update(world)
    if not task.succeeded:
        raise RuntimeError('the expert must succeed, or the end of the episode means nothing')
    return {key: (at_release[key], held[key]) for key in caches}


def measure(episodes: int, recalls_s: tuple[float, ...] = RECALLS_S, speed: float = 0.3) -> list:
    """Return for each wait, eviction and size how often the cue was still there."""
    policy = Policy.load(backend='cpu')
    rows = []
    with closing(CueWorld(object_speed=speed)) as world:
        for recall_s in recalls_s:
            counts = [
                run_episode(world, policy, np.random.default_rng([SEED, index]), recall_s)
                for index in range(episodes)]
            for name, frames in counts[0]:
                kept = np.array([count[name, frames] for count in counts])
                row = {'recall_s': recall_s, 'eviction': name, 'frames': frames,
                       'kv_slots': frames * policy.config.slots_per_frame}
                for column, when in enumerate(('at_release', 'at_success')):
                    present = int((kept[:, column] > 0).sum())
                    row[when] = {
                        'episodes_with_cue': present, 'rate': present / episodes,
                        'interval': wilson_interval(present, episodes),
                        'mean_cue_frames': float(kept[:, column].mean())}
                rows.append(row)
            print(f'{recall_s:g} s: {episodes} episodes', flush=True)
    return rows


def main(arguments: list[str] | None = None) -> int:
    """Measure, print the rates and store the record."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--episodes', type=int, default=EPISODES, help='for each wait')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the record there')
    options = parser.parse_args(arguments)
    try:
        if not 1 <= options.episodes <= 100_000:
            raise ConfigError('--episodes', 'must be in 1..100000', options.episodes)
        if options.json:
            check_file('--json', options.json)
        record = {
            'environment': environment_record(), 'episodes': options.episodes, 'seed': SEED,
            'object_speed': 0.3, 'rows': measure(options.episodes)}
    except VlaEdgeError as error:
        print(f'memory: {error}', file=sys.stderr)
        return 2
    if options.json:
        write_text('--json', options.json, json.dumps(record, indent=1) + '\n')
    for row in record['rows']:
        rates = ', '.join(
            f'{when} {row[when]["rate"]:.3f}' for when in ('at_release', 'at_success'))
        print(f'{row["recall_s"]:g} s, {row["frames"]} frames, {row["eviction"]}: {rates}')
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
