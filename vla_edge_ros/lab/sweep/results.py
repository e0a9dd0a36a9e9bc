"""A finished sweep, read back from its tables."""

from collections.abc import Iterable, Mapping, Sequence
import contextlib
import csv
from dataclasses import dataclass, field
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from vla_edge_ros.errors import ConfigError, one_line
from vla_edge_ros.lab.sweep.names import AGES, CELLS, CONFIGURATION, SESSIONS
from vla_edge_ros.telemetry.age import POINTS

CHOICES = ('schedule', 'overlap_percent', 'seam', 'chunk_steps', 'safe_action', 'eviction',
           'policy')
"""Axes that a robot's owner chooses; the others are the conditions the robot meets."""
FAMILY = ('task', 'control')
"""Conditions across which nothing is compared."""
UNITS = {'overlap_percent': ' %', 'object_speed': ' m/s', 'delay_ms': ' ms', 'seam': '',
         'camera_phase_ms': ' ms', 'actuation_ms': ' ms', 'recall_s': ' s'}
WORDS = {'control': {'none': 'policy', 'oracle': 'expert'}, 'chunk_steps': {'0': 'of all'}}
"""What a reader calls a value."""
PREFIXES = {'chunk_steps': 'chunk ', 'delay_ms': 'delay ', 'camera_phase_ms': 'phase ',
            'actuation_ms': 'actuation ', 'recall_s': 'recall ', 'slip_probability': 'slip '}


@dataclass(frozen=True, slots=True)
class CellResult:
    """
    One line of ``cells.csv``.

    Parameters
    ----------
    number : int
        Its cell.
    axes : dict of str to str
        As the table has them.
    values : dict of str to float
        The numbers; what is not known is NaN.
    choice, condition, family : str
        Names of what was chosen, of what was met, and of whom to compare with.

    """

    number: int
    axes: dict[str, str]
    values: dict[str, float]
    choice: str = ''
    condition: str = ''
    family: str = ''

    def __getitem__(self, name: str) -> float:
        """Return a number, NaN where it is not known."""
        return self.values.get(name, np.nan)

    @property
    def success(self) -> str:
        """Return the success rate with its interval as text."""
        low, high = self['success_low'], self['success_high']
        return f'{self["success_rate"]:.2f} ({low:.2f}–{high:.2f})'


@dataclass(frozen=True, slots=True)
class SweepResults:
    """
    What a sweep came to.

    Parameters
    ----------
    cells : list of CellResult
        In the order of the table.
    ages : dict of (int, str) to (float64 [n], int64 [n])
        By cell and cause (``contact`` too): ages, ms, in rising order, and how many there were.
    configuration : dict
        What ``sweep.yaml`` holds.
    sessions : list of dict
        What ``sessions.jsonl`` holds.
    model : str
        The policy that all latencies are of, left out of their names; '' if there are several.

    """

    cells: list[CellResult]
    ages: dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]
    configuration: dict[str, Any]
    sessions: list[dict[str, Any]] = field(default_factory=list)
    model: str = ''

    def pooled(self, cells: Iterable[CellResult], cause: str) -> tuple[np.ndarray, np.ndarray]:
        """Return ages and counts of a cause over several cells."""
        parts = [self.ages[cell.number, cause] for cell in cells
                 if (cell.number, cause) in self.ages]
        if not parts:
            return np.empty(0), np.empty(0, np.int64)
        ages, places = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
        counts = np.bincount(places, np.concatenate([part[1] for part in parts]), len(ages))
        return ages, counts.astype(np.int64)

    @property
    def causes(self) -> list[str]:
        """Return the causes that any action with an age had."""
        return sorted({cause for _, cause in self.ages} - {'contact'})


def quantiles(
    ages: np.ndarray, counts: np.ndarray, points: Sequence[float] = POINTS,
) -> list[float]:
    """Return percentiles of counted ages, none without any: the least age that so many reach."""
    if not counts.size:
        return [np.nan] * len(points)
    below = np.cumsum(counts)
    places = np.searchsorted(below, np.asarray(points) / 100 * below[-1])
    return [float(ages[min(place, len(ages) - 1)]) for place in places]


def read_results(folder: Path) -> SweepResults:
    """
    Read the tables of a finished sweep.

    Raises
    ------
    ConfigError
        The folder holds none, or a table cannot be read.

    """
    if not (folder / CELLS).is_file():
        rule = f'must be the folder of a finished sweep, with a {CELLS}; vla-edge sweep ends one'
        raise ConfigError('report', rule, str(folder))
    try:
        configuration = yaml.safe_load((folder / CONFIGURATION).read_text(encoding='utf-8'))
        cells, model = _read_cells(_rows(folder / CELLS))
        ages = _read_ages(_rows(folder / AGES))
        sessions = []
        if (folder / SESSIONS).is_file():
            sessions = _sessions((folder / SESSIONS).read_text(encoding='utf-8'))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, csv.Error) as error:
        rule = f'must hold the readable tables of a sweep ({one_line(error)})'
        raise ConfigError('report', rule, str(folder)) from None
    if not cells:
        raise ConfigError('report', 'must be a sweep with a cell', str(folder))
    return SweepResults(cells, ages, configuration, sessions, model)


def _sessions(text: str) -> list[dict]:
    """Return the lines that are whole: they tell of a sweep, and no table needs them."""
    sessions = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            sessions.append(json.loads(line))
    return sessions


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding='utf-8'))))


def common_model(latencies: Iterable[str]) -> str:
    """Return what all names of latencies have behind their first word, if that is a policy."""
    models = {latency.partition(' ')[2] for latency in latencies}
    return models.pop() if len(models) == 1 and models != {'ms'} else ''


def _read_cells(rows: Sequence[Mapping[str, str]]) -> tuple[list[CellResult], str]:
    model = common_model(row['latency'] for row in rows)
    cells = []
    for row in rows:
        names = list(row)
        axes = {name: row[name] for name in names[1:names.index('episodes')]}
        axes['latency'] = axes['latency'].removesuffix(f' {model}')
        values = {
            name: float(row[name]) if row[name] else np.nan
            for name in names[names.index('episodes'):]}
        cells.append(CellResult(int(row['cell']), axes, values))
    families: dict[tuple, list[CellResult]] = {}
    for cell in cells:
        families.setdefault(tuple(cell.axes.get(name) for name in FAMILY), []).append(cell)
    # An axis with one value tells nothing apart: it stays out of the names.
    varying = {
        key: {name for name in cells[0].axes if len({cell.axes[name] for cell in family}) > 1}
        for key, family in families.items()}
    for key, family in families.items():
        pairs = {(cell.axes.get('latency'), cell.axes.get('power_model')) for cell in family}
        if len(pairs) == len({latency for latency, _ in pairs}):
            varying[key].discard('power_model')  # latency says it already
    several = len({cell.axes.get('task') for cell in cells}) > 1
    named = [_named(cell, varying[tuple(cell.axes.get(name) for name in FAMILY)], several)
             for cell in cells]
    return named, model


def _named(cell: CellResult, varying: set[str], several_tasks: bool) -> CellResult:
    names = list(cell.axes)
    family = [name for name in FAMILY if name in names and (name != 'task' or several_tasks)]
    condition = [name for name in names if name not in (*CHOICES, *FAMILY) and name in varying]
    choice = [name for name in CHOICES
              if name in names and (name in varying or name == 'schedule')]
    # What a run costs stands first, as it decides most.
    condition.sort(key=lambda name: name != 'latency')
    return CellResult(
        cell.number, cell.axes, cell.values, _label(cell, choice, ' '),
        _label(cell, condition, ', ') or 'the one condition', _label(cell, family, ', '))


def _label(cell: CellResult, names: Sequence[str], separator: str) -> str:
    words = []
    for name in names:
        value = cell.axes[name]
        if value:
            word = WORDS.get(name, {}).get(value, value)
            words.append(f'{PREFIXES.get(name, "")}{word}{UNITS.get(name, "")}')
    return separator.join(words)


def _read_ages(
    rows: Sequence[Mapping[str, str]],
) -> dict[tuple[int, str], tuple[np.ndarray, np.ndarray]]:
    found: dict[tuple[int, str], tuple[list, list]] = {}
    for row in rows:
        ages, counts = found.setdefault((int(row['cell']), row['cause']), ([], []))
        ages.append(float(row['age_ms']))
        counts.append(int(row['count']))
    return {
        key: (np.array(ages), np.array(counts, np.int64)) for key, (ages, counts) in found.items()}
