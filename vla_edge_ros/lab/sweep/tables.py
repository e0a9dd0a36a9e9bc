"""
The tables of a sweep: a row for each episode, for each cell, and every age that was counted.

They depend on the rows alone: not on who ran them, in which order, or how often it stopped.
"""

from collections.abc import Iterable, Mapping, Sequence
import csv
import io
import math
from typing import Any

import numpy as np

from vla_edge_ros.lab.sweep.grid import AXES, Cell, Sweep
from vla_edge_ros.lab.sweep.record import EpisodeId
from vla_edge_ros.runtime.action_queue import PLANNED_CAUSES
from vla_edge_ros.runtime.admission import DecisionKind, Reason
from vla_edge_ros.sim.episode import wilson_interval
from vla_edge_ros.sim.episode_row import EpisodeRow, expand_ages, merge_ages, STEPS_PER_MS
from vla_edge_ros.sim.tasks import TICK_HZ
from vla_edge_ros.telemetry.age import percentiles
from vla_edge_ros.telemetry.work import PARTS

REFUSALS = (Reason.OVER_BUDGET, Reason.DECODE_OVER_BUDGET, Reason.DEADLINE_PASSED)
"""What admission says when a run would not fit."""
AXIS_NAMES = (*AXES, 'latency')
DIGITS = 6
"""Figures of a number in a table."""


def episode_table(sweep: Sweep, rows: Mapping[EpisodeId, EpisodeRow]) -> str:
    """Return ``episodes.csv``: a line for each episode, in the order of the cells."""
    causes, events = _names(rows)
    lines = []
    for episode in sorted(rows):
        row = rows[episode]
        lines.append({
            'cell': episode.cell, **sweep.cells[episode.cell].values,
            'seed': episode.seed, 'index': episode.index,
            'succeeded': int(row.succeeded), 'time_to_success_s': row.time_to_success_s,
            'energy_j': row.energy_j, **_counts([row]), **_events([row], events),
            **_ages([row], causes),
        })
    return _csv(lines)


def cell_table(sweep: Sweep, rows: Mapping[EpisodeId, EpisodeRow]) -> str:
    """Return ``cells.csv``: a line for each cell, over all its episodes and seeds."""
    by_cell = _by_cell(sweep, rows)
    causes, events = _names(rows)
    return _csv([
        _cell_line(number, cell, cell_rows, causes, events)
        for number, (cell, cell_rows) in enumerate(zip(sweep.cells, by_cell))])


def age_table(sweep: Sweep, rows: Mapping[EpisodeId, EpisodeRow]) -> str:
    """Return ``ages.csv``: how many actions of a cell and cause had which age; 0.1 ms apart."""
    lines = []
    for number, cell_rows in enumerate(_by_cell(sweep, rows)):
        causes = sorted({cause for row in cell_rows for cause in row.ages})
        histograms = {cause: _merged(cell_rows, [cause]) for cause in causes}
        histograms['contact'] = merge_ages(row.contact_ages for row in cell_rows)
        lines += [
            {'cell': number, 'cause': cause, 'age_ms': step / STEPS_PER_MS, 'count': count}
            for cause, histogram in histograms.items() for step, count in histogram.items()]
    return _csv(lines)


def _names(rows: Mapping[EpisodeId, EpisodeRow]) -> tuple[list[str], list[str]]:
    """Return the causes and the events that any row has."""
    causes = {cause for row in rows.values() for cause in row.ages}
    return sorted(causes), sorted({event for row in rows.values() for event in row.events})


def _events(rows: Sequence[EpisodeRow], events: Sequence[str]) -> dict[str, int]:
    return {f'event_{name}': sum(row.events.get(name, 0) for row in rows) for name in events}


def _by_cell(sweep: Sweep, rows: Mapping[EpisodeId, EpisodeRow]) -> list[list[EpisodeRow]]:
    by_cell: list[list[EpisodeRow]] = [[] for _ in sweep.cells]
    for episode in sorted(rows):
        by_cell[episode.cell].append(rows[episode])
    return by_cell


def _cell_line(
    number: int, cell: Cell, rows: Sequence[EpisodeRow], causes: Sequence[str],
    events: Sequence[str],
) -> dict[str, Any]:
    successes = sum(row.succeeded for row in rows)
    low, high = wilson_interval(successes, len(rows))
    counts = _counts(rows)
    ticks = counts['ticks']
    times_s = [row.time_to_success_s for row in rows if row.succeeded]
    planned = sum(row.causes.get(cause.value, 0) for row in rows for cause in PLANNED_CAUSES)
    energies = [row.energy_j for row in rows]
    energy_j = math.fsum(energies) if None not in energies else None
    return {
        'cell': number, **cell.values, 'episodes': len(rows), 'successes': successes,
        'success_rate': successes / len(rows), 'success_low': low, 'success_high': high,
        'time_to_success_p50_s': float(np.median(times_s)) if times_s else None,
        **counts, 'runs_per_s': counts['runs'] / ticks * TICK_HZ,
        'planned_share': planned / ticks, 'refused_share': counts['refused'] / ticks,
        'missed_share': counts['missed'] / ticks,
        'energy_j': energy_j,
        'energy_j_per_success': energy_j / successes if energy_j and successes else None,
        **{f'energy_{part}_j': _part_j(rows, part) for part in PARTS},
        **_events(rows, events), **_ages(rows, causes),
    }


def _part_j(rows: Sequence[EpisodeRow], part: str) -> float | None:
    """Return the energy of one part of the work, J, None where nobody can tell."""
    if any(row.energy_parts_j is None for row in rows):
        return None
    return math.fsum(row.energy_parts_j.get(part, 0.0) for row in rows)


def _counts(rows: Sequence[EpisodeRow]) -> dict[str, int]:
    def total(names: Iterable, field: str) -> int:
        return sum(getattr(row, field).get(name.value, 0) for row in rows for name in names)

    return {
        'ticks': sum(row.ticks for row in rows),
        'runs': sum(row.runs for row in rows),
        **{f'decided_{kind.value}': total([kind], 'decisions') for kind in DecisionKind},
        'refused': total(REFUSALS, 'reasons'),
        'missed': total([Reason.DEADLINE_MISSED], 'reasons'),
    }


def _ages(rows: Sequence[EpisodeRow], causes: Sequence[str]) -> dict[str, float | None]:
    """Return mean and percentiles of all ages, of those at contact, and of each cause's, ms."""
    groups = {
        'age': _merged(rows, causes),
        'contact_age': merge_ages(row.contact_ages for row in rows),
        **{f'{cause}_age': _merged(rows, [cause]) for cause in causes},
    }
    values = {}
    for name, histogram in groups.items():
        ages_ms = expand_ages(histogram)
        values[f'{name}_count'] = len(ages_ms)
        values[f'{name}_mean_ms'] = float(ages_ms.mean()) if len(ages_ms) else None
        values |= {f'{name}_{key}_ms': value for key, value in percentiles(ages_ms).items()}
    return values


def _merged(rows: Sequence[EpisodeRow], causes: Sequence[str]) -> dict[int, int]:
    return merge_ages(row.ages[cause] for row in rows for cause in causes if cause in row.ages)


def _csv(lines: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator='\n')
    if lines:
        writer.writerow(lines[0])
        writer.writerows([_text(value) for value in line.values()] for line in lines)
    return text.getvalue()


def _text(value: Any) -> str:
    """Return a field: what is not known is empty, numbers are to six figures."""
    if value is None:
        return ''
    return f'{value:.{DIGITS}g}' if isinstance(value, float) else str(value)
