"""
The grid of a sweep: what a YAML file asks for, checked, as one cell for each configuration.

Every parameter of an episode and of the schedule is an axis by its own name; what a run costs is
told by ``latency`` alone. A combination in which a parameter has no effect is taken once.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
from dataclasses import dataclass
import hashlib
import itertools
import math
from pathlib import Path
from typing import Any

import yaml

from vla_edge_ros.errors import ConfigError, one_line
from vla_edge_ros.parameters import check_value, default_of, parameter, validate
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.runtime.devices import DATA
from vla_edge_ros.runtime.latency import read_stage_costs
from vla_edge_ros.runtime.loop_parameters import (
    check_chunk_steps,
    ControlLoopParameters,
    ScheduleParameters,
)
from vla_edge_ros.runtime.profiles import MEASURED
from vla_edge_ros.schedule_options import ONLY_OVERLAP
from vla_edge_ros.sim.episode_row import EpisodeSetup
from vla_edge_ros.sim.simulator import EpisodeParameters, ONLY_POLICY
from vla_edge_ros.sim.task_kinds import ONLY_TASK
from vla_edge_ros.sim.tasks import MAX_SEED

SOURCES = ('compute_ms', 'latency_trace', 'latency_profile')
"""Parameters of an episode that say what a run costs: a ``latency`` has one of them."""
ONLY_LATENCY = (*SOURCES, 'profile_model')
LATENCY = (*ONLY_LATENCY, 'power_model')
"""Parameters that may stand in a ``latency``; its power is that of the same device."""
FILES = ('latency_trace', 'policy')
"""Parameters that name a file or a folder, from where the sweep's own file lies."""
EMBEDDED_POLICY = 'embedded policy'
EPISODE_FIELDS = {
    field.name: field for field in dataclasses.fields(EpisodeParameters)}
AXES = {
    **{field.name: field for field in dataclasses.fields(ScheduleParameters)},
    **{name: field for name, field in EPISODE_FIELDS.items() if name not in ONLY_LATENCY},
}
CHECKPOINT_SUFFIXES = ('.json', '.safetensors')
MAX_EPISODES = 1_000_000


@dataclass(frozen=True, slots=True)
class SweepParameters:
    """What a sweep does with every cell."""

    episodes: int = parameter(
        100, 'Episodes of every cell and seed', range=(1, 1_000_000))
    seeds: list = parameter([0], 'Equal seeds give equal episodes')

    def __post_init__(self):
        """Check every value."""
        validate(self)
        for seed in self.seeds:
            if type(seed) is not int or not 0 <= seed <= MAX_SEED:
                raise ConfigError('seeds', f'must be integers in 0..{MAX_SEED}', seed)
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise ConfigError('seeds', 'must be one or more, each once', self.seeds)


@dataclass(frozen=True, slots=True)
class Cell:
    """
    One configuration of a sweep.

    Parameters
    ----------
    values : dict of str to value
        By axis, ``latency`` as text; what has no effect is ''.
    setup : EpisodeSetup
        The same as parameters.

    """

    values: dict[str, Any]
    setup: EpisodeSetup


@dataclass(frozen=True, slots=True)
class Sweep:
    """
    A checked sweep.

    Parameters
    ----------
    parameters : SweepParameters
        What is done with every cell.
    grids : list of dict
        Every axis of every grid with all its values, as they could stand in a file.
    cells : list of Cell
        In the order of the grids; no two are alike.
    files : dict of str to str
        SHA-256 of every trace and policy that it names, by the name given.

    """

    parameters: SweepParameters
    grids: list[dict[str, list]]
    cells: list[Cell]
    files: dict[str, str]

    @property
    def episodes(self) -> int:
        """Return how many episodes it has."""
        return len(self.cells) * len(self.parameters.seeds) * self.parameters.episodes


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML would take the last."""

    def construct_mapping(self, node, deep=False):
        """Build a dictionary."""
        # What << brings in may be given again; that is its use.
        keys = [self.construct_object(key, deep=True) for key, _ in node.value
                if key.tag != 'tag:yaml.org,2002:merge']
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(str(key), 'must be given once', f'{keys.count(key)} times')
        return super().construct_mapping(node, deep)


def read_sweep(path: Path) -> Sweep:
    """
    Read a sweep from a YAML file.

    Raises
    ------
    ConfigError
        It cannot be read, a key is unknown, or a value breaks its rule.

    """
    try:
        document = yaml.load(path.read_text(encoding='utf-8'), _Loader)  # noqa: S506 - it is safe
    except (OSError, UnicodeDecodeError, yaml.YAMLError, TypeError, RecursionError) as error:
        reason = getattr(error, 'strerror', None) or one_line(error)
        raise ConfigError('sweep', f'must be a readable YAML file ({reason})', str(path)) from None
    return make_sweep(document, path.parent)


def make_sweep(document: Any, folder: Path) -> Sweep:
    """
    Check what a YAML file holds.

    Parameters
    ----------
    document : mapping
        ``episodes``, ``seeds`` and ``grids``.
    folder : Path
        Where relative paths in it start.

    Raises
    ------
    ConfigError
        A key is unknown, or a value breaks its rule; the field names the place.

    """
    known = [field.name for field in dataclasses.fields(SweepParameters)] + ['grids']
    _check_keys('sweep', document, known)
    document = dict(document)
    grids = document.pop('grids', None)
    if not isinstance(grids, list) or not grids:
        raise ConfigError('grids', 'must be a list of one or more grids', grids)
    parameters = SweepParameters(**document)
    resolved = [_read_grid(f'grids[{number}]', grid) for number, grid in enumerate(grids)]
    cells: dict[str, Cell] = {}
    called: dict[tuple, Cell] = {}
    paths: dict[str, Path] = {}
    checked: set[tuple] = set()
    count = sum(math.prod(map(len, grid.values())) for grid in resolved)
    episodes = count * parameters.episodes * len(parameters.seeds)
    if episodes > MAX_EPISODES:
        raise ConfigError('grids', f'must have at most {MAX_EPISODES:,} episodes', episodes)
    for number, grid in enumerate(resolved):
        for choice in _combinations(grid):
            cell = _make_cell(f'grids[{number}]', choice, folder, paths, checked)
            # Values of an axis that a schedule does not look at make no other cell.
            cell = cells.setdefault(repr(cell.setup), cell)
            if called.setdefault(tuple(cell.values.items()), cell) is not cell:
                rule = 'must have another name in tables than that of another source'
                raise ConfigError(f'grids[{number}].latency', rule, cell.values['latency'])
    return Sweep(
        parameters, resolved, list(cells.values()),
        {name: _digest(path) for name, path in sorted(paths.items())})


def _check_keys(field: str, mapping: Any, known: Sequence[str]) -> None:
    if not isinstance(mapping, Mapping):
        raise ConfigError(field, 'must be a mapping of names to values', mapping)
    for key, value in mapping.items():
        if key not in known:
            rule = f'is not known in {field} (known: {", ".join(sorted(known))})'
            raise ConfigError(str(key), rule, value)


def _read_grid(field: str, grid: Any) -> dict[str, list]:
    """Return every axis of a grid as a list of checked values, defaults included."""
    _check_keys(field, grid, ['latency', *AXES])
    resolved = {}
    for name, axis in AXES.items():
        given = grid.get(name, [default_of(axis)])
        resolved[name] = [
            _check(f'{field}.{name}', axis, value) for value in _as_list(field, name, given)]
    default = [{'compute_ms': default_of(EPISODE_FIELDS['compute_ms'])}]
    resolved['latency'] = [
        _read_latency(f'{field}.latency', value)
        for value in _as_list(field, 'latency', grid.get('latency', default))]
    axis = resolved['power_model']
    # As a default it may stand there: sweep.yaml has every axis.
    if axis != [default_of(AXES['power_model'])] and any(
            'power_model' in latency for latency in resolved['latency']):
        rule = 'must not be given both as an axis and in a latency'
        raise ConfigError(f'{field}.power_model', rule, axis)
    return resolved


def _as_list(field: str, name: str, given: Any) -> list:
    values = given if isinstance(given, list) else [given]
    if not values:
        raise ConfigError(f'{field}.{name}', 'must have one or more values', given)
    return values


def _check(field: str, axis: dataclasses.Field, value: Any) -> Any:
    try:
        return check_value(axis, value)
    except ConfigError as error:
        raise ConfigError(field, error.rule, error.value) from None


def _read_latency(field: str, value: Any) -> dict[str, Any]:
    _check_keys(field, value, LATENCY)
    if sum(name in SOURCES for name in value) != 1:
        rule = f'must have one of {", ".join(SOURCES)}'
        raise ConfigError(field, rule, value)
    if value.get('latency_profile') == MEASURED:
        rule = 'must not be measured, which differs each time: record a trace and give that'
        raise ConfigError(f'{field}.latency_profile', rule, MEASURED)
    return {
        name: _check(f'{field}.{name}', EPISODE_FIELDS[name], value[name])
        for name in LATENCY if name in value}


def _combinations(grid: Mapping[str, list]) -> Iterator[dict[str, Any]]:
    for values in itertools.product(*grid.values()):
        yield dict(zip(grid, values))


def _make_cell(
    field: str, choice: dict[str, Any], folder: Path, paths: dict[str, Path], checked: set[tuple],
) -> Cell:
    """Return the cell of one combination; notes the files that it needs."""
    idle = [*(ONLY_OVERLAP if choice['schedule'] != 'overlap' else ()),
            *(ONLY_POLICY if choice['control'] == 'oracle' else ()),
            *(name for name, task in ONLY_TASK.items() if choice['task'] != task)]
    latency = choice['latency']
    choice = choice | {name: latency[name] for name in latency if name in AXES}
    values = {name: '' if name in idle else value for name, value in choice.items()}
    values['latency'] = latency_name(latency)
    episode = {
        name: value for name, value in (choice | latency).items()
        if name in EPISODE_FIELDS and name not in idle}
    for name in FILES:
        if episode.get(name):
            paths[episode[name]] = folder / episode[name]
            episode[name] = str(folder / episode[name])
    if choice['control'] != 'oracle' and not choice['policy']:
        paths[EMBEDDED_POLICY] = DEFAULT_POLICY
    if episode.get('latency_profile'):
        paths['devices.yaml'] = DATA
    schedule = {
        name: choice[name] for name in AXES
        if name not in EPISODE_FIELDS and name not in idle}
    try:
        setup = EpisodeSetup(EpisodeParameters(**episode), ControlLoopParameters(**schedule))
        _check_files(setup, checked)
    except ConfigError as error:
        raise ConfigError(f'{field}.{error.field}', error.rule, error.value) from None
    return Cell(values, setup)


def latency_name(latency: Mapping[str, Any]) -> str:
    """Return what a table calls a latency: ``40 ms``, or the name of its source."""
    if 'compute_ms' in latency:
        return f'{latency["compute_ms"]:g} ms'
    return ' '.join(
        str(Path(value).with_suffix('') if name in FILES else value)
        for name, value in latency.items() if name not in AXES)


def _check_files(setup: EpisodeSetup, checked: set[tuple]) -> None:
    """Refuse what every worker would refuse; each file is looked at once."""
    trace, policy = setup.episode.latency_trace, setup.episode.policy or DEFAULT_POLICY
    if trace and (trace,) not in checked:
        read_stage_costs(trace, 'latency_trace')
        checked.add((trace,))
    steps = setup.loop.chunk_steps
    if setup.episode.control != 'oracle' and (policy, steps) not in checked:
        check_chunk_steps(steps, PolicyConfig.load(policy).chunk_steps)
        checked.add((policy, steps))


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of all data of a checkpoint folder with their names."""
    digest = hashlib.sha256()
    parts = [path]
    if path.is_dir():
        parts = sorted(part for part in path.iterdir() if part.suffix in CHECKPOINT_SUFFIXES)
    for part in parts:
        digest.update(part.name.encode() + b'\0' + part.read_bytes())
    return digest.hexdigest()
