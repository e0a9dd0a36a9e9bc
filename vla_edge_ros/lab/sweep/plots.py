"""The pictures of a sweep, as SVG text for one self-contained page."""

from matplotlib.figure import Figure
import numpy as np

from vla_edge_ros.lab.plots import COLOURS, svg, WIDTH_IN
from vla_edge_ros.lab.sweep.conditions import age, ENERGY, Family, RUNS
from vla_edge_ros.lab.sweep.results import CellResult, SweepResults

MAX_COLUMNS = 4
MAX_NUMBERS = 400
"""Cells of a table of colours that still have their number written in."""
CAUSE_BINS = 60
SCHEDULES = ('deadline', 'sync', 'overlap', 'latest')
MARKERS = dict(zip(SCHEDULES, 'osD^'))


def _colour(cell: CellResult) -> str:
    return COLOURS[SCHEDULES.index(cell.axes['schedule'])]


def _facets(count: int, row_in: float, **options) -> tuple[Figure, np.ndarray]:
    """Return a figure with so many axes, in rows of up to four."""
    columns = min(count, MAX_COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH_IN, row_in * rows + 0.5), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False, **options).ravel()
    for unused in axes[count:]:
        unused.set_visible(False)
    return figure, axes[:count]


def _legend(figure: Figure, axes) -> None:
    handles = {}
    for one in axes:
        for handle, label in zip(*one.get_legend_handles_labels()):
            handles.setdefault(label, handle)
    figure.legend(handles.values(), handles.keys(), loc='outside upper center', ncols=6,
                  fontsize=8, frameon=False)


def success(family: Family) -> str:
    """Draw success with its 95 % interval against the p99 of the age, for every condition."""
    figure, axes = _facets(len(family.conditions), 2.1, sharey=True)
    for one, condition in zip(axes, family.conditions):
        one.set_title(condition.name.replace(', ', '\n', 1), fontsize=8)
        for cell in condition.cells:
            if not np.isfinite(age(cell)):
                continue
            rate = cell['success_rate']
            around = np.clip([[rate - cell['success_low']], [cell['success_high'] - rate]], 0, 1)
            one.errorbar(
                [age(cell)], [rate], around, fmt=MARKERS[cell.axes['schedule']], ms=4, lw=0.7,
                color=_colour(cell), alpha=0.8, label=cell.axes['schedule'])
        one.set_ylim(-0.04, 1.04)
        one.tick_params(labelsize=8)
    figure.supxlabel('p99 of the observation age / ms', fontsize=9)
    figure.supylabel('success', fontsize=9)
    _legend(figure, axes)
    return svg(figure)


def success_table(family: Family) -> str:
    """Draw the success of every cell as a colour: configurations down, conditions across."""
    choices = list(dict.fromkeys(cell.choice for cell in family.cells))
    names = [condition.name for condition in family.conditions]
    rates = np.full((len(choices), len(names)), np.nan)
    for column, condition in enumerate(family.conditions):
        for cell in condition.cells:
            rates[choices.index(cell.choice), column] = cell['success_rate']
    figure = Figure(figsize=(WIDTH_IN, 1.6 + 0.19 * len(choices)), layout='constrained')
    axes = figure.subplots()
    image = axes.imshow(rates, aspect='auto', cmap='cividis', vmin=0, vmax=1)
    axes.set_yticks(range(len(choices)), choices, fontsize=7)
    axes.set_xticks(range(len(names)), names, fontsize=7, rotation=40, ha='right')
    if rates.size <= MAX_NUMBERS:
        for (row, column), rate in np.ndenumerate(rates):
            if not np.isnan(rate):
                axes.text(column, row, f'{rate:.2f}', ha='center', va='center', fontsize=6,
                          color='black' if rate > 0.55 else 'white')
    figure.colorbar(image, label='success', shrink=0.8)
    return svg(figure)


def age_tails(results: SweepResults, family: Family) -> str:
    """Draw which part of the actions is older than an age, by schedule, for every latency."""
    groups = _by_latency(family)
    figure, axes = _facets(len(groups), 2.3, sharey=True)
    for one, (name, cells) in zip(axes, groups.items()):
        one.set_title(name, fontsize=9)
        for schedule in SCHEDULES:
            own = [cell for cell in cells if cell.axes['schedule'] == schedule]
            parts = [results.pooled(own, cause) for cause in results.causes]
            ages = np.concatenate([part[0] for part in parts])
            counts = np.concatenate([part[1] for part in parts])
            if not counts.size:
                continue
            order = np.argsort(ages, kind='stable')
            older = 1 - np.cumsum(counts[order]) / counts.sum()
            one.step(ages[order], np.maximum(older, 1e-9), where='post', lw=1.2, label=schedule,
                     color=COLOURS[SCHEDULES.index(schedule)], rasterized=True)
        one.set_yscale('log')
        one.set_ylim(1e-3, 1.2)
        one.axhline(0.01, color='#999999', lw=0.6, ls=':')
        one.tick_params(labelsize=8)
    figure.supxlabel('observation age / ms', fontsize=9)
    figure.supylabel('part of the actions that is older', fontsize=9)
    _legend(figure, axes)
    return svg(figure)


def age_causes(results: SweepResults, family: Family) -> str:
    """Draw the ages of all actions by what they came from, for every latency."""
    groups = _by_latency(family)
    figure, axes = _facets(len(groups), 2.2)
    for one, (name, cells) in zip(axes, groups.items()):
        one.set_title(name, fontsize=9)
        pooled = {cause: results.pooled(cells, cause) for cause in results.causes}
        pooled = {cause: pair for cause, pair in pooled.items() if pair[1].size}
        if pooled:
            one.hist(
                [ages for ages, _ in pooled.values()], CAUSE_BINS, stacked=True,
                weights=[counts for _, counts in pooled.values()], label=list(pooled),
                color=[COLOURS[results.causes.index(cause) % len(COLOURS)] for cause in pooled])
        one.tick_params(labelsize=8)
    figure.supxlabel('observation age / ms', fontsize=9)
    figure.supylabel('actions', fontsize=9)
    _legend(figure, axes)
    return svg(figure)


def trade_offs(family: Family) -> str:
    """Draw success against what it costs, with the front that nothing dominates in black."""
    figure, axes = _facets(len(family.conditions), 2.1, sharey=True)
    for one, condition in zip(axes, family.conditions):
        one.set_title(condition.name.replace(', ', '\n', 1), fontsize=8)
        for cell in condition.cells:
            price = condition.cost(cell)
            if not np.isfinite(price):
                continue
            one.plot(
                [price], [cell['success_rate']], MARKERS[cell.axes['schedule']], ms=4.5,
                color=_colour(cell), alpha=0.8, label=cell.axes['schedule'],
                mec='black' if cell in condition.front else 'none', mew=0.9)
        one.set_ylim(-0.04, 1.04)
        one.tick_params(labelsize=8)
    labels = {ENERGY: f'{ENERGY} / J', RUNS: 'runs of the policy a second'}
    if family.cost_name in labels:
        figure.supxlabel(labels[family.cost_name], fontsize=9)
    else:
        for one, condition in zip(axes, family.conditions):
            one.set_xlabel(labels[condition.cost_name], fontsize=8)
    figure.supylabel('success', fontsize=9)
    _legend(figure, axes)
    return svg(figure)


def mean_and_tail(family: Family) -> str:
    """Draw the p99 of the ages of every cell over their mean, coloured by success."""
    figure = Figure(figsize=(WIDTH_IN, 3.4), layout='constrained')
    axes = figure.subplots()
    cells = [cell for cell in family.cells if np.isfinite(age(cell))]
    means = [cell['age_mean_ms'] for cell in cells]
    points = axes.scatter(
        means, [age(cell) for cell in cells], 14, [cell['success_rate'] for cell in cells],
        cmap='cividis', vmin=0, vmax=1)
    top = max(means, default=1.0)
    axes.plot([0, top], [0, top], color='#999999', lw=0.8, ls=':')
    axes.set_xlabel('mean observation age / ms')
    axes.set_ylabel('p99 / ms')
    figure.colorbar(points, label='success')
    return svg(figure)


def _by_latency(family: Family) -> dict[str, list[CellResult]]:
    groups: dict[str, list[CellResult]] = {}
    for cell in family.cells:
        groups.setdefault(cell.axes['latency'], []).append(cell)
    return groups
