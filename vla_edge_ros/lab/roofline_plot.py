"""The roofline of a profile: what every part reaches, under what the machine can do."""

from collections.abc import Mapping
from typing import Any, BinaryIO

from matplotlib import rc_context
from matplotlib.figure import Figure
import numpy as np

from vla_edge_ros.lab.plots import COLOURS

STYLE = {'svg.fonttype': 'none', 'svg.hashsalt': 'vla_edge_ros', 'font.family': 'sans-serif'}
MARKERS = 'osD^v'


def draw_roofline(record: Mapping[str, Any], file: BinaryIO, kind: str) -> None:
    """
    Draw the parts of a profile over FLOP per byte.

    Parameters
    ----------
    record : mapping
        Of ``profile_command.profile``.
    file : binary file
        Takes the picture.
    kind : {'svg', 'png'}
        Its format.

    """
    rows = [row for row in record['rows'] if row['flop']]
    inside = {row['stage'] for row in rows if row['part']}
    # A stage whose parts are there is no point of its own.
    rows = [row for row in rows if row['part'] or row['stage'] not in inside]
    bandwidth, rate = record['roofs']['bytes_per_s'], record['roofs']['flop_per_s']
    with rc_context(STYLE):
        figure = Figure(figsize=(9.0, 5.5), layout='constrained')
        axes = figure.subplots()
        intensity = np.array([row['flop'] / row['bytes'] for row in rows])
        low, high = intensity.min() / 3, intensity.max() * 3
        if rate is not None:
            high = max(high, 3 * rate / bandwidth)
        x = np.geomspace(low, high, 200)
        axes.plot(x, bandwidth * x if rate is None else np.minimum(bandwidth * x, rate), 'k-')
        axes.annotate(f'{bandwidth / 1e9:,.1f} GB/s', (low, bandwidth * low), (12, -2),
                      textcoords='offset points', fontsize=8)  # fmt: skip
        if rate is not None:
            axes.annotate(f'{rate / 1e9:,.0f} GFLOP/s', (high, rate), (-4, 5),
                          textcoords='offset points', fontsize=8, ha='right')
        stages = list(dict.fromkeys(row['stage'] for row in rows))
        middle = {
            stage: np.mean([x for row, x in zip(rows, intensity) if row['stage'] == stage])
            for stage in stages}
        for row, x_value in zip(rows, intensity):
            index = stages.index(row['stage'])
            reached = row['flop'] / (1e-3 * row['ms'])
            axes.scatter(
                x_value, reached, s=20 + 600 * row['share'], alpha=0.7, lw=0,
                color=COLOURS[index % len(COLOURS)], marker=MARKERS[index % len(MARKERS)])
            label = ' '.join(filter(None, (row['stage'], row['part'])))
            # To the outside, for parts of a stage lie close together.
            outside = x_value >= middle[row['stage']]
            side, ha = (8, 'left') if outside else (-8, 'right')
            axes.annotate(label, (x_value, reached), (side, -3), textcoords='offset points',
                          fontsize=8, ha=ha)  # fmt: skip
        axes.set(xscale='log', yscale='log', xlabel='FLOP per byte', ylabel='FLOP/s')
        axes.set_title(f'{record["model"]}, {record["backend"]}; area: part of the run',
                       loc='left', fontsize=10)
        axes.spines[['top', 'right']].set_visible(False)
        axes.grid(alpha=0.25, which='major')
        figure.savefig(
            file, format=kind, dpi=150, metadata={'Date': None} if kind == 'svg' else None)
