"""Episodes by the hundred: ``vla-edge sim`` runs them on all cores and sums them up."""

from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
import dataclasses
from dataclasses import dataclass
from functools import partial
import itertools
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
from vla_edge_ros.outputs import check_file, check_folder, FOLDERS_ARE_MADE, write_text
from vla_edge_ros.parameters import describe, parameter, validate
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.runtime.loop_parameters import check_chunk_steps, ControlLoopParameters
from vla_edge_ros.runtime.profiles import LatencyProfile
from vla_edge_ros.schedule_options import add_schedule_arguments, loop_parameters, NAMES
from vla_edge_ros.sim.cell import ACTION_DIM
from vla_edge_ros.sim.episode_latency import episode_profile
from vla_edge_ros.sim.simulator import EpisodeParameters, EpisodeResult, Simulator
from vla_edge_ros.sim.tasks import MAX_SEED
from vla_edge_ros.telemetry.age import group_ages, percentiles
from vla_edge_ros.telemetry.energy_summary import energy_figures, energy_text, NO_MODEL
from vla_edge_ros.telemetry.power_model import power_model
from vla_edge_ros.telemetry.summary import contact_summary
from vla_edge_ros.telemetry.trace import TraceWriter
from vla_edge_ros.workers import run_in_workers

WILSON_Z = 1.96
"""Normal quantile of a two-sided 95 % interval."""


@dataclass(frozen=True, slots=True)
class BatchParameters:
    """How many episodes to run, and where."""

    episodes: int = parameter(100, 'Number of episodes', range=(1, 1_000_000))
    seed: int = parameter(0, 'Equal seeds give equal results', range=(0, MAX_SEED))
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
            _option(name), type=type(default), choices=metadata['choices'] or None,
            help=f'{metadata["description"]}{unit} (default: {default!r})')
    add_schedule_arguments(parser)
    parser.add_argument('--traces', type=Path, metavar='FOLDER',
                        help=f'Write a trace of every episode there; {FOLDERS_ARE_MADE}')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help=f'Write the summary to a file; {FOLDERS_ARE_MADE}')


def run(args: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge sim``."""
    try:
        batch, parameters = (_given(cls, args) for cls in (BatchParameters, EpisodeParameters))
        loop = loop_parameters(args)
        for source in ('latency_trace', 'latency_profile'):
            if getattr(args, source) and args.compute_ms is not None:
                rule = f'must not be given with {_option(source)}, which says what a run costs'
                raise ConfigError('compute_ms', rule, args.compute_ms)
        with stop.interruptible():
            _check_policy(parameters, loop)
            # Measured once, for all workers; a file that cannot be read is told here.
            profile = episode_profile(parameters)
    except ConfigError as error:
        if not hasattr(args, error.field):
            raise
        raise ConfigError(_option(error.field), error.rule, error.value) from None
    if args.json is not None:
        check_file('--json', args.json)
    if args.traces is not None:
        check_folder('--traces', args.traces)
    results = run_episodes(batch, parameters, stop, loop, args.traces, profile)
    # What only a worker finds out is told before there is a progress to show.
    first = next(results)
    results = track(
        itertools.chain([first], results), 'episodes', total=batch.episodes,
        console=Console(stderr=True))
    summary = summarise(results, batch, parameters, loop)
    summary['latency'] = dict(profile.about)
    if args.json is not None:
        write_text('--json', args.json, json.dumps(summary, indent=2) + '\n')
    Console().print(_table(summary))
    return 0


def _option(name: str) -> str:
    return '--' + name.replace('_', '-')


def _given(cls: type, args: Namespace) -> BatchParameters | EpisodeParameters:
    """Build a parameter set from the options that were given."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in values.items() if value is not None})


def _check_policy(parameters: EpisodeParameters, loop: ControlLoopParameters) -> None:
    """Refuse what every worker would refuse."""
    if parameters.control != 'oracle':
        config = PolicyConfig.load(parameters.policy or DEFAULT_POLICY)
        check_chunk_steps(loop.chunk_steps, config.chunk_steps)


def run_episodes(
    batch: BatchParameters, parameters: EpisodeParameters, stop: StopRequest,
    loop: ControlLoopParameters | None = None, traces: Path | None = None,
    profile: LatencyProfile | None = None,
) -> Iterator[EpisodeResult]:
    """
    Yield the result of every episode, in whatever order they end.

    Parameters
    ----------
    batch, parameters, loop
        How many, and with what.
    stop : StopRequest
        Ends them when requested.
    traces : Path, optional
        Folder for a trace of each.
    profile : LatencyProfile, optional
        What runs cost; left out, as ``parameters`` say.

    Raises
    ------
    VlaEdgeError
        A worker could not run; its message says why.
    Interrupted
        A signal came.

    """
    workers = min(batch.workers or len(os.sched_getaffinity(0)), batch.episodes)
    shares = [range(worker, batch.episodes, workers) for worker in range(workers)]
    work = partial(_run_share, parameters, batch.seed, loop, traces, profile)
    return run_in_workers(work, shares, stop)


def _run_share(
    parameters: EpisodeParameters, seed: int, loop: ControlLoopParameters | None,
    traces: Path | None, profile: LatencyProfile | None, share: Sequence[int],
) -> Iterator[EpisodeResult]:
    with closing(Simulator(parameters, loop=loop, profile=profile)) as simulator:
        for index in share:
            if traces is None:
                yield simulator.run(seed, index)
                continue
            path = traces / f'episode_{index:06}.csv'
            with TraceWriter(path, ACTION_DIM, lossless=True) as trace:
                result = simulator.run(seed, index, lambda step, _: trace.record(step))
            if trace.error is not None:
                raise ConfigError('--traces', f'must be writable ({trace.error})', str(path))
            yield result


def summarise(
    results: Iterable[EpisodeResult], batch: BatchParameters, parameters: EpisodeParameters,
    loop: ControlLoopParameters | None = None,
) -> dict:
    """
    Sum up episodes as a dictionary ready for JSON.

    ``success_interval`` is Wilson's 95 % interval; ages are of all published actions together.
    """
    successes = episodes = runs = 0
    ages_ms, age_causes, contact_ages_ms = [], [], []
    energy: Counter[str] = Counter()
    events: Counter[str] = Counter()
    counts = {name: Counter() for name in ('decisions', 'reasons', 'causes')}
    for result in results:
        episodes += 1
        successes += result.succeeded
        runs += result.runs
        ages_ms.append(result.ages_ms)
        age_causes.append(result.age_causes)
        contact_ages_ms.append(result.contact_ages_ms)
        energy.update(result.energy_j or {})
        events.update(result.events or {})
        for name, counter in counts.items():
            counter.update({k: v for k, v in getattr(result, name).items() if v})
    config = {**dataclasses.asdict(batch), **dataclasses.asdict(parameters)}
    del config['workers']
    loop = loop or ControlLoopParameters()
    config |= {name: getattr(loop, name) for name in NAMES}
    ages_ms, contact_ages_ms = np.concatenate(ages_ms), np.concatenate(contact_ages_ms)
    return {
        'episodes': episodes,
        'success_rate': successes / episodes,
        'success_interval': wilson_interval(successes, episodes),
        'observation_age_ms': percentiles(ages_ms),
        'observation_age_by_cause': group_ages(np.concatenate(age_causes), ages_ms),
        'observation_age_at_contact_ms': contact_summary(
            contact_ages_ms[~np.isnan(contact_ages_ms)]),
        'ticks': counts['decisions'].total(),
        'runs': runs,
        **{name: dict(sorted(counter.items())) for name, counter in counts.items()},
        'events': dict(events),
        'energy': _energy(energy, parameters, episodes, successes),
        'config': config,
    }


def _energy(
    joules: Mapping[str, float], parameters: EpisodeParameters, episodes: int, successes: int,
) -> dict | str:
    if not parameters.power_model:
        return NO_MODEL
    return {
        **power_model(parameters.power_model).about(),
        **energy_figures(joules, successes, episodes),
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
    config = summary['config']
    if config['task'] != 'track' and config['control'] != 'oracle' and not config['policy']:
        table.add_row('note', 'the embedded policy is trained for track alone')
    table.add_row('observation age, ms', _ages(summary['observation_age_ms']))
    for cause, ages in summary['observation_age_by_cause'].items():
        table.add_row(f'  {cause}', _ages(ages))
    table.add_row('  at contact', _ages(summary['observation_age_at_contact_ms']))
    table.add_row('energy', energy_text(summary['energy']))
    for name in ('decisions', 'reasons', 'causes', *(['events'] if summary['events'] else [])):
        table.add_row(name, ', '.join(f'{k} {v}' for k, v in summary[name].items()))
    return table


def _ages(ages: Mapping[str, float | None]) -> str:
    return ', '.join(
        f'{name} {"-" if value is None else f"{value:.1f}" if name != "count" else value}'
        for name, value in ages.items())
