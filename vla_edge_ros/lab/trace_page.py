"""One page from one or more traces: of live runs, of replays, or of simulated episodes."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from matplotlib.figure import Figure
import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.plots import COLOURS, svg, WIDTH_IN
from vla_edge_ros.lab.report import (
    AGE_NOTE,
    flatten,
    html_list,
    html_page,
    html_table,
    PICTURES,
    sentences,
)
from vla_edge_ros.lab.sweep.findings import OTHER_P99, SAME_MEAN
from vla_edge_ros.telemetry.age import percentiles
from vla_edge_ros.telemetry.summary import summarize
from vla_edge_ros.telemetry.trace import read_trace

MAX_DRAWN = 8
"""Traces that are drawn one by one; more are told in the table only."""
HEADER = ('trace', 'schedule', 'ticks', 'actions/s', 'age mean', 'p50', 'p95', 'p99', 'max',
          'p99 at contact', 'runs/s', 'unexplained ticks')


def trace_page(paths: Sequence[Path]) -> str:
    """
    Return a page that needs nothing else.

    Raises
    ------
    ConfigError
        A file is no trace, or holds fewer than two ticks.

    """
    names = _names(paths)
    runs = {}
    for name, path in zip(names, paths):
        trace = read_trace(path)
        if len(trace['tick']) < 2:
            rule = f'must hold at least two ticks ({path})'
            raise ConfigError('trace', rule, len(trace['tick']))
        runs[name] = (trace, _summary(trace))
    parts = []
    if len(runs) > 1:
        parts += [
            html_list(comparison(runs)),
            html_table([_row(name, *run) for name, run in runs.items()], HEADER),
            f'<h2>Observation age</h2>{age_tails(runs)}']
    for name, (trace, summary) in list(runs.items())[:MAX_DRAWN]:
        if len(runs) > 1:
            parts.append(f'<h1>{escape(name)}</h1>')
        parts.append(html_list(sentences(summary)))
        parts += [f'<h2>{title}</h2>{draw(trace)}' for title, draw in PICTURES]
        parts.append(f'<h2>All numbers</h2>{html_table(flatten(summary))}')
    if len(runs) > MAX_DRAWN:
        parts.append(f'<p class="note">The first {MAX_DRAWN} of {len(runs)} are drawn.</p>')
    return html_page('report of a run' if len(runs) == 1 else 'report of several runs',
                     [*parts, AGE_NOTE])


def comparison(runs: Mapping[str, tuple[Mapping, Mapping]]) -> list[str]:
    """Say how the ages of several runs compare, and where a mean hides what the p99 shows."""
    ages = {
        name: (float(np.nanmean(trace['observation_age_ms'])), p99)
        for name, (trace, summary) in runs.items()
        if (p99 := summary['observation_age_ms']['p99']) is not None}
    if len(ages) < 2:
        return ['Fewer than two of these runs published an action with an age.']
    youngest, oldest = (choose(ages, key=lambda name: ages[name][1]) for choose in (min, max))
    said = [
        f'99 of 100 actions of {youngest} came from an image younger than '
        f'{ages[youngest][1]:.1f} ms, of {oldest} than {ages[oldest][1]:.1f} ms.']
    names = sorted(ages, key=lambda name: ages[name][1])
    hidden = [
        (young, old) for place, young in enumerate(names) for old in names[place + 1:]
        if abs(ages[young][0] - ages[old][0]) <= SAME_MEAN * min(ages[young][0], ages[old][0])
        and ages[old][1] > (1 + OTHER_P99) * ages[young][1]]
    if hidden:
        young, old = hidden[0]
        said.append(
            f'A mean age hides a tail in {len(hidden)} pair{"s" * (len(hidden) > 1)} of runs: '
            f'{young} and {old} have means of {ages[young][0]:.1f} and {ages[old][0]:.1f} ms, p99 '
            f'of {ages[young][1]:.1f} and {ages[old][1]:.1f} ms.')
    else:
        said.append('No two runs have about the same mean age and quite another p99.')
    return said


def age_tails(runs: Mapping[str, tuple[Mapping, Mapping]]) -> str:
    """Draw which part of the actions of each run is older than an age."""
    figure = Figure(figsize=(WIDTH_IN, 3.0), layout='constrained')
    axes = figure.subplots()
    for number, (name, (trace, _)) in enumerate(list(runs.items())[:MAX_DRAWN]):
        ages = np.sort(trace['observation_age_ms'][~np.isnan(trace['observation_age_ms'])])
        older = 1 - np.arange(1, ages.size + 1) / max(ages.size, 1)
        axes.step(ages, np.maximum(older, 1e-9), where='post', lw=1.2, label=name,
                  color=COLOURS[number % len(COLOURS)], rasterized=True)
    axes.set_yscale('log')
    axes.set_ylim(1e-3, 1.2)
    axes.set_xlabel('observation age / ms')
    axes.set_ylabel('part of the actions that is older')
    axes.legend(fontsize=8, frameon=False)
    return svg(figure)


def _summary(trace: Mapping[str, np.ndarray]) -> dict:
    period_ms = float(np.median(np.diff(trace['scheduled_ns']))) / NS_PER_MS
    return summarize(trace, period_ms=period_ms)


def _row(name: str, trace: Mapping[str, np.ndarray], summary: Mapping) -> list[str]:
    ages = trace['observation_age_ms']
    seconds = (trace['scheduled_ns'][-1] - trace['scheduled_ns'][0]) / 1e9
    contact = summary['observation_age_at_contact_ms'] or {}
    mean = float(np.nanmean(ages)) if np.isfinite(ages).any() else None
    numbers = (
        summary['action_rate_hz'], mean, *percentiles(ages).values(), contact.get('p99'),
        float(trace['runs'].clip(0).sum() / seconds))
    texts = ['' if number is None else f'{number:.1f}' for number in numbers]
    schedules = ' '.join(dict.fromkeys(filter(None, trace['schedule'])))
    return [name, schedules, f'{summary["ticks"]:,}', *texts, str(summary['unexplained_ticks'])]


def _names(paths: Sequence[Path]) -> list[str]:
    """Return names that tell the traces apart: of the file, with as many folders as it takes."""
    whole = [path.resolve().with_suffix('') for path in paths]
    if len(set(whole)) < len(whole):
        raise ConfigError('report', 'must name every trace once', ' '.join(map(str, paths)))
    depth = 1
    while len({path.parts[-depth:] for path in whole}) < len(whole):
        depth += 1
    return ['/'.join(path.parts[-depth:]) for path in whole]
