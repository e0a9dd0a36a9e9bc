"""The episodes of a sweep in blocks, run by processes of this machine or of a Ray cluster."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from functools import partial
import importlib
import multiprocessing
import random
from types import ModuleType
from typing import Any

from vla_edge_ros.clock import MonotonicClock, NS_PER_S
from vla_edge_ros.errors import BackendUnavailable, ConfigError, one_line, VlaEdgeError
from vla_edge_ros.lab.sweep.grid import Sweep
from vla_edge_ros.lab.sweep.record import EpisodeId
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.sim.episode_row import EpisodeRow, EpisodeRunner, EpisodeSetup
from vla_edge_ros.sim.simulator import KEPT
from vla_edge_ros.workers import POLL_S, run_in_workers, THREADS

BLOCK_EPISODES = 10
"""Episodes that one process runs before it asks for more: at most what a kill costs on Ray."""

Block = Sequence[EpisodeId]
Finished = Iterator[tuple[EpisodeId, EpisodeRow]]


def make_blocks(sweep: Sweep, done: Collection[EpisodeId]) -> list[Block]:
    """
    Return the episodes that are not done, in blocks of one cell.

    Their order is drawn, the same each time, so that what was run so far tells how long the rest
    takes, however much dearer some cells are than others.
    """
    blocks = []
    for cell in range(len(sweep.cells)):
        for seed in sweep.parameters.seeds:
            missing = [
                episode for index in range(sweep.parameters.episodes)
                if (episode := EpisodeId(cell, seed, index)) not in done]
            blocks += [
                missing[start:start + BLOCK_EPISODES]
                for start in range(0, len(missing), BLOCK_EPISODES)]
    random.Random(0).shuffle(blocks)
    return blocks


def run_here(
    setups: Sequence[EpisodeSetup], blocks: Sequence[Block], workers: int, stop: StopRequest,
) -> Finished:
    """
    Yield every episode with its row as it ends; one thread a process.

    Parameters
    ----------
    setups : sequence of EpisodeSetup
        By number of the cell.
    blocks : sequence of Block
        What to run; each process takes the next one when it has ended its own.
    workers : int
        Processes.
    stop : StopRequest
        Ends them when requested.

    Raises
    ------
    VlaEdgeError
        A worker could not go on; its message says why.
    Interrupted
        A signal came.

    """
    if not blocks:
        return
    taken = multiprocessing.get_context('spawn').Value('q', 0)
    work = partial(_work, setups, blocks, taken)
    yield from run_in_workers(work, range(min(workers, len(blocks))), stop, always_apart=True)


def _work(setups, blocks, taken, _worker: int) -> Finished:
    with closing(EpisodeRunner()) as runner:
        while True:
            with taken.get_lock():
                number = taken.value
                taken.value += 1
            if number >= len(blocks):
                return
            for episode in blocks[number]:
                yield episode, runner.run(setups[episode.cell], episode.seed, episode.index)


def time_episodes(
    setups: Sequence[EpisodeSetup], blocks: Sequence[Block], samples: int, workers: int,
    stop: StopRequest,
) -> list[float]:
    """
    Return what some of the episodes took, s, run by all workers at once as a sweep would.

    Compiling and loading are left out.
    """
    episodes = [block[0] for block in blocks[:samples]]
    shares = [share for number in range(workers) if (share := episodes[number::workers])]
    work = partial(_time, setups)
    return list(run_in_workers(work, shares, stop, always_apart=True)) if shares else []


def _time(setups: Sequence[EpisodeSetup], share: Sequence[EpisodeId]) -> Iterator[float]:
    clock = MonotonicClock()
    with closing(EpisodeRunner()) as runner:
        kinds = {}
        for episode in share:
            parameters = setups[episode.cell].episode
            kinds.setdefault(tuple(getattr(parameters, name) for name in KEPT), episode)
        for episode in kinds.values():
            runner.run(setups[episode.cell], episode.seed, episode.index)
        for episode in share:
            begin_ns = clock.now_ns()
            runner.run(setups[episode.cell], episode.seed, episode.index)
            yield (clock.now_ns() - begin_ns) / NS_PER_S


class BlockRunner:
    """
    Runs blocks in a process of a cluster.

    Parameters
    ----------
    setups : sequence of EpisodeSetup
        By number of the cell.

    """

    def __init__(self, setups: Sequence[EpisodeSetup]):
        self._setups = setups
        self._runner = EpisodeRunner()

    def run(self, block: Block) -> list[tuple[EpisodeId, EpisodeRow]] | str:
        """Return a row for each episode; or as text, which travels well, why there is none."""
        try:
            return [
                (episode, self._runner.run(
                    self._setups[episode.cell], episode.seed, episode.index))
                for episode in block]
        except VlaEdgeError as error:
            return str(error)


def import_ray() -> ModuleType:
    """
    Return the module ``ray``.

    Raises
    ------
    BackendUnavailable
        It is not installed.

    """
    try:
        return importlib.import_module('ray')
    except ImportError as error:
        rule = "must be installed for --ray: pip install 'vla_edge_ros[ray]'"
        raise BackendUnavailable('ray', rule, str(error)) from None


def run_on_ray(
    ray: ModuleType, address: str, setups: Sequence[EpisodeSetup], blocks: Sequence[Block],
    stop: StopRequest,
) -> Finished:
    """
    Yield every episode with its row, a block at a time; an actor for each CPU of a cluster.

    Parameters
    ----------
    ray : module
        As ``import_ray`` returns it.
    address : str
        ``auto``, ``host:port`` or ``ray://host:port``.
    setups, blocks, stop
        As for :func:`run_here`.

    Raises
    ------
    ConfigError
        There is no cluster, or it has no CPU.
    VlaEdgeError
        An actor could not go on.
    Interrupted
        A signal came.

    """
    environment = {'env_vars': dict.fromkeys(THREADS, '1')}
    try:
        ray.init(address=address, runtime_env=environment, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        rule = f'must be the address of a running Ray cluster ({one_line(error)})'
        raise ConfigError('--ray', rule, address) from None
    try:
        yield from _dispatch(ray, address, setups, blocks, stop)
    finally:
        ray.shutdown()


def _dispatch(ray, address: str, setups, blocks: Sequence[Block], stop: StopRequest) -> Finished:
    cpus = int(ray.cluster_resources().get('CPU', 0))
    if cpus < 1:
        raise ConfigError('--ray', 'must be the address of a cluster with a CPU', address)
    actor_class = ray.remote(num_cpus=1)(BlockRunner)
    shared = ray.put(setups)
    waiting = iter(blocks)
    running: dict[Any, Any] = {}
    for _, block in zip(range(cpus), waiting):  # the other way round it would lose a block
        actor = actor_class.remote(shared)
        running[actor.run.remote(block)] = actor
    while running:
        stop.check()
        for reference in ray.wait(list(running), timeout=POLL_S)[0]:
            actor = running.pop(reference)
            yield from _rows(ray, reference)
            block = next(waiting, None)
            if block is not None:
                running[actor.run.remote(block)] = actor


def _rows(ray, reference) -> Finished:
    try:
        rows = ray.get(reference)
    except ray.exceptions.RayError as error:
        # A traceback of theirs ends with what went wrong.
        reason = str(error).strip().splitlines()[-1:] or [type(error).__name__]
        raise VlaEdgeError(f'a process of the Ray cluster failed: {reason[0]}') from None
    if isinstance(rows, str):
        raise VlaEdgeError(rows)
    yield from rows

