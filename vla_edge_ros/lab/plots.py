"""The four pictures of a run, drawn from its trace, as SVG text for one self-contained page."""

from collections.abc import Mapping, Sequence
import io

from matplotlib import rc_context
from matplotlib.figure import Figure
import numpy as np

from vla_edge_ros.telemetry.stages import Stage

# Okabe and Ito's palette: told apart by the colour-blind too.
COLOURS = ('#0072B2', '#E69F00', '#009E73', '#CC79A7', '#56B4E9', '#D55E00', '#F0E442', '#555555')
WIDTH_IN = 9.0
Columns = Mapping[str, np.ndarray]


def seconds_of(trace: Columns) -> np.ndarray:
    """Return the scheduled time of every tick since the first, s."""
    return (trace['scheduled_ns'] - trace['scheduled_ns'][0]) / 1e9


def period_deviation_ms(trace: Columns) -> np.ndarray:
    """Return how far each publication lay from one period after the one before, ms."""
    published = trace['published_ns']
    period_ns = np.median(np.diff(trace['scheduled_ns']))
    return (np.diff(published) - period_ns) / 1e6


def _figure(rows: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, rows), layout='constrained')


def svg(figure: Figure) -> str:
    """Return a figure as SVG text; equal figures give equal bytes."""
    for axes in figure.axes:
        axes.spines[['top', 'right']].set_visible(False)
    text = io.StringIO()
    # A fixed salt and no date: the same run gives the same bytes.
    style = {'svg.fonttype': 'none', 'svg.hashsalt': 'vla_edge_ros', 'font.family': 'sans-serif'}
    with rc_context(style):
        figure.savefig(text, format='svg', metadata={'Date': None}, dpi=120)
    return text.getvalue()[text.getvalue().index('<svg'):]


def _event_rows(axes, seconds: np.ndarray, names: Sequence[str], title: str) -> None:
    order = sorted(set(names))
    for row, name in enumerate(order):
        at = seconds[np.asarray(names) == name]
        axes.plot(at, np.full(at.size, row), '|', ms=11, color=COLOURS[row % len(COLOURS)],
                  rasterized=True)
    axes.set_yticks(range(len(order)), order)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_title(title, loc='left', fontsize=10)


def decisions(trace: Columns) -> str:
    """Draw what was decided, and what the published action came from, over time."""
    figure = _figure(1.6 + 0.28 * (len(set(trace['decision'])) + len(set(trace['cause']))))
    heights = [len(set(trace['decision'])) + 1, len(set(trace['cause'])) + 1]
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    _event_rows(above, seconds_of(trace), trace['decision'], 'decision of each tick')
    _event_rows(below, seconds_of(trace), trace['cause'], 'cause of each published action')
    below.set_xlabel('time / s')
    return svg(figure)


def observation_age(trace: Columns) -> str:
    """Draw the histogram of observation ages by cause with the percentiles that matter."""
    has_age = np.isfinite(trace['observation_age_ms'])
    ages, causes = trace['observation_age_ms'][has_age], trace['cause'][has_age]
    figure = _figure(2.8)
    axes = figure.subplots()
    if ages.size:
        names = sorted(set(causes))
        axes.hist([ages[causes == name] for name in names], bins=80, stacked=True, label=names,
                  color=[COLOURS[i % len(COLOURS)] for i in range(len(names))])
        axes.legend(ncols=6, fontsize=8, frameon=False, loc='lower left', bbox_to_anchor=(0, 1.0))
        top = axes.get_ylim()[1]
        for row, percent in enumerate((50, 95, 99)):
            value = np.percentile(ages, percent)
            axes.axvline(value, color='#333333', lw=1, ls=(0, (4, 2)))
            axes.annotate(f'p{percent} {value:.1f} ms', (value, top * (0.97 - 0.1 * row)), (4, 0),
                          textcoords='offset points', fontsize=8, va='top')
    axes.set_xlabel('age of the image when its action was published / ms')
    axes.set_ylabel('actions')
    return svg(figure)


def jitter(trace: Columns) -> str:
    """Draw the deviation from the period over time and as a histogram."""
    deviation = period_deviation_ms(trace)
    figure = _figure(2.4)
    over_time, histogram = figure.subplots(1, 2, sharey=True, width_ratios=[4, 1])
    over_time.plot(seconds_of(trace)[1:], deviation, '.', ms=2.5, color=COLOURS[0],
                   rasterized=True)
    over_time.set_ylabel('deviation / ms')
    over_time.set_xlabel('time / s')
    histogram.hist(deviation, bins=60, orientation='horizontal', color=COLOURS[0], log=True)
    histogram.set_xlabel('ticks')
    return svg(figure)


def stage_times(trace: Columns) -> str:
    """Draw what each stage took, stacked, under the estimate and the budget of its tick."""
    seconds = seconds_of(trace)
    stages = [stage.value for stage in Stage]
    parts = np.nan_to_num(np.stack([trace[f'{stage}_ms'] for stage in stages]))
    figure = _figure(3.0)
    axes = figure.subplots()
    axes.stackplot(seconds, parts, labels=stages, colors=COLOURS, step='post', lw=0,
                   rasterized=True)
    axes.plot(seconds, trace['estimate_ms'], color='black', lw=1, label='estimate',
              rasterized=True)
    axes.plot(seconds, trace['budget_ms'], color='#D55E00', lw=1, ls='--', label='budget',
              rasterized=True)
    axes.set_xlabel('time / s')
    axes.set_ylabel('ms')
    axes.legend(ncols=6, fontsize=8, frameon=False, loc='lower left', bbox_to_anchor=(0, 1.0))
    return svg(figure)
