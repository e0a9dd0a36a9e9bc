"""Episodes by the hundred: ``vla-edge sim`` runs them on all cores and sums them up."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
import dataclasses
from dataclasses import dataclass
import json
import math
import multiprocessing
from multiprocessing.connection import Connection, wait
import os
from pathlib import Path
import signal

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.parameters import describe, from_mapping, parameter, validate
from vla_edge_ros.sim.simulator import EpisodeParameters, EpisodeResult, Simulator

WILSON_Z = 1.96
"""Normal quantile of a two-sided 95 % interval."""
STOP_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """How many episodes to run, and where."""

    episodes: int = parameter(100, 'Number of episodes', range=(1, 1_000_000))
    seed: int = parameter(0, 'Equal seeds give equal results', range=(0, 2**63 - 1))
    workers: int = parameter(
        0, 'Processes; 0 takes one a core; results do not depend on it', range=(0, 256))

    def __post_init__(self):
        """Check every value."""
        validate(self)


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``vla-edge sim``."""
    for name, default, metadata in (*describe(BatchParameters), *describe(EpisodeParameters)):
        unit = f', {metadata["unit"]}' if metadata['unit'] else ''
        parser.add_argument(
            '--' + name.replace('_', '-'), type=type(default), default=default,
            choices=metadata['choices'] or None,
            help=f'{metadata["description"]}{unit} (default: {default!r})')
    parser.add_argument('--json', type=Path, metavar='FILE', help='Write the summary to a file')


def run(args: Namespace) -> int:
    """Run ``vla-edge sim``."""
    batch, parameters = (
        from_mapping(cls, {field.name: getattr(args, field.name) for field in
                           dataclasses.fields(cls)})
        for cls in (BatchParameters, EpisodeParameters))
    if args.json is not None:
        try:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.touch()
        except OSError as error:
            raise ConfigError('json', f'must be writable ({error.strerror})', str(args.json)) \
                from None
    results = track(
        run_episodes(batch, parameters), 'episodes', total=batch.episodes,
        console=Console(stderr=True))
    summary = summarise(results, batch, parameters)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + '\n', encoding='utf-8')
    Console().print(_table(summary))
    return 0


def run_episodes(
    batch: BatchParameters, parameters: EpisodeParameters
) -> Iterator[EpisodeResult]:
    """
    Yield the result of every episode, in whatever order they end.

    Raises
    ------
    VlaEdgeError
        A worker could not run; its message says why.

    """
    workers = min(batch.workers or len(os.sched_getaffinity(0)), batch.episodes)
    if workers == 1:
        with closing(Simulator(parameters)) as simulator:
            for index in range(batch.episodes):
                yield simulator.run(batch.seed, index)
        return
    # One thread a worker: more would only fight over the cores. Read by libraries on import.
    for variable in ('NUMBA_NUM_THREADS', 'OMP_NUM_THREADS', 'LP_NUM_THREADS'):
        os.environ.setdefault(variable, '1')
    context = multiprocessing.get_context('spawn')
    processes, receivers = [], []
    try:
        for worker in range(workers):
            receiver, sender = context.Pipe(duplex=False)
            share = range(worker, batch.episodes, workers)
            process = context.Process(
                target=_work, args=(parameters, batch.seed, share, sender),
                name=f'sim-{worker}', daemon=True)
            process.start()
            sender.close()
            processes.append(process)
            receivers.append(receiver)
        yield from _receive(receivers)
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(STOP_TIMEOUT_S)


def _receive(receivers: list[Connection]) -> Iterator[EpisodeResult]:
    """Yield what the workers send: results, then None; or why a worker could not run."""
    while receivers:
        for receiver in wait(receivers):
            try:
                item = receiver.recv()
            except EOFError:
                item = 'a worker process ended early'
            if isinstance(item, str):
                raise VlaEdgeError(item)
            if item is None:
                receivers.remove(receiver)
            else:
                yield item


def _work(
    parameters: EpisodeParameters, seed: int, share: Sequence[int], sender: Connection
) -> None:
    """Run a share of the episodes in this process; SIGINT is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with closing(Simulator(parameters)) as simulator:
            for index in share:
                sender.send(simulator.run(seed, index))
        sender.send(None)
    except VlaEdgeError as error:
        sender.send(str(error))


def summarise(
    results: Iterable[EpisodeResult], batch: BatchParameters, parameters: EpisodeParameters
) -> dict:
    """
    Sum up episodes as a dictionary ready for JSON.

    ``success_interval`` is Wilson's 95 % interval; ages are of all published actions together.
    """
    successes = episodes = 0
    ages_ms = []
    counts = {name: Counter() for name in ('decisions', 'reasons', 'causes')}
    for result in results:
        episodes += 1
        successes += result.succeeded
        ages_ms.append(result.ages_ms)
        for name, counter in counts.items():
            counter.update({k: v for k, v in getattr(result, name).items() if v})
    config = {**dataclasses.asdict(batch), **dataclasses.asdict(parameters)}
    del config['workers']
    return {
        'episodes': episodes,
        'success_rate': successes / episodes,
        'success_interval': wilson_interval(successes, episodes),
        'observation_age_ms': _percentiles(np.concatenate(ages_ms)),
        'ticks': counts['decisions'].total(),
        **{name: dict(sorted(counter.items())) for name, counter in counts.items()},
        'config': config,
    }


def wilson_interval(successes: int, trials: int) -> list[float]:
    """Return Wilson's 95 % interval [low, high] of a success rate."""
    rate, z2 = successes / trials, WILSON_Z**2
    centre = rate + z2 / (2 * trials)
    half = WILSON_Z * math.sqrt(rate * (1 - rate) / trials + z2 / (4 * trials**2))
    scale = 1 + z2 / trials
    return [max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)]


def _percentiles(values: np.ndarray) -> dict[str, float | None]:
    if not values.size:
        return dict.fromkeys(('p50', 'p95', 'p99', 'max'))
    p50, p95, p99 = np.percentile(values, (50, 95, 99))
    return {'p50': float(p50), 'p95': float(p95), 'p99': float(p99), 'max': float(values.max())}


def _table(summary: dict) -> Table:
    table = Table('quantity', 'value')
    low, high = summary['success_interval']
    table.add_row('episodes', str(summary['episodes']))
    table.add_row('success rate', f'{summary["success_rate"]:.3f}  (95 %: {low:.3f}..{high:.3f})')
    ages = ', '.join(
        f'{name} {"-" if value is None else f"{value:.1f}"}'
        for name, value in summary['observation_age_ms'].items())
    table.add_row('observation age, ms', ages)
    for name in ('decisions', 'reasons', 'causes'):
        table.add_row(name, ', '.join(f'{k} {v}' for k, v in summary[name].items()))
    return table
