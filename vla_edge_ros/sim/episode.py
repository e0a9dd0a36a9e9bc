"""Episodes by the hundred: ``vla-edge sim`` runs them on all cores and sums them up."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
import dataclasses
from dataclasses import dataclass
from functools import partial
import json
import math
import os
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.parameters import describe, from_mapping, parameter, validate
from vla_edge_ros.sim.simulator import EpisodeParameters, EpisodeResult, Simulator
from vla_edge_ros.telemetry.age import percentiles
from vla_edge_ros.workers import run_in_workers

WILSON_Z = 1.96
"""Normal quantile of a two-sided 95 % interval."""


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


def run(args: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge sim``."""
    batch, parameters = (
        from_mapping(cls, {field.name: getattr(args, field.name) for field in
                           dataclasses.fields(cls)})
        for cls in (BatchParameters, EpisodeParameters))
    if args.json is not None:
        _check_writable(args.json)
    results = track(
        run_episodes(batch, parameters, stop), 'episodes', total=batch.episodes,
        console=Console(stderr=True))
    summary = summarise(results, batch, parameters)
    if args.json is not None:
        args.json.write_text(json.dumps(summary, indent=2) + '\n', encoding='utf-8')
    Console().print(_table(summary))
    return 0


def _check_writable(path: Path) -> None:
    """Refuse a path that cannot be written, before the work; leave no empty file there."""
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError('json', f'must be writable ({error.strerror})', str(path)) from None


def run_episodes(
    batch: BatchParameters, parameters: EpisodeParameters, stop: StopRequest
) -> Iterator[EpisodeResult]:
    """
    Yield the result of every episode, in whatever order they end.

    Raises
    ------
    VlaEdgeError
        A worker could not run; its message says why.
    Interrupted
        A signal came.

    """
    workers = min(batch.workers or len(os.sched_getaffinity(0)), batch.episodes)
    shares = [range(worker, batch.episodes, workers) for worker in range(workers)]
    return run_in_workers(partial(_run_share, parameters, batch.seed), shares, stop)


def _run_share(
    parameters: EpisodeParameters, seed: int, share: Sequence[int]
) -> Iterator[EpisodeResult]:
    with closing(Simulator(parameters)) as simulator:
        for index in share:
            yield simulator.run(seed, index)


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
        'observation_age_ms': percentiles(np.concatenate(ages_ms), (50, 95, 99)),
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
