"""
``report.html``: one run, on one page that needs nothing else.

Sentences first, then the figures they come from, then every number.
"""

from collections.abc import Mapping, Sequence
import csv
from html import escape
from pathlib import Path

import numpy as np

from vla_edge_ros.errors import TransportError
from vla_edge_ros.lab import plots

TEXT_COLUMNS = ('decision', 'reason', 'cause')
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg, video, img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
td { padding: 0.2rem 1.2rem 0.2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
td + td { font-variant-numeric: tabular-nums; }
.note { color: #666; font-size: 0.9rem; }
"""


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """
    Read a trace as arrays by column; an empty cell of a number is NaN.

    Raises
    ------
    TransportError
        The file is missing or holds fewer than two ticks.

    """
    try:
        with open(path, newline='', encoding='utf-8') as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise TransportError('trace', f'must be readable ({error.strerror})', str(path)) from None
    if len(rows) < 2:
        raise TransportError('trace', 'must hold at least two ticks', len(rows))
    return {name: _column(name, [row[name] for row in rows]) for name in rows[0]}


def _column(name: str, cells: Sequence[str]) -> np.ndarray:
    if name in TEXT_COLUMNS:
        return np.array(cells)
    # Stamps need all their digits, which a float64 has not.
    if name.endswith('_ns') and all(cells):
        return np.array([int(cell) for cell in cells], np.int64)
    return np.array([_number(cell) for cell in cells])


def _number(cell: str) -> float:
    if cell in ('True', 'False'):
        return float(cell == 'True')
    return float(cell or 'nan')


def sentences(summary: Mapping) -> list[str]:
    """Say in plain words what a summary means; what it does not hold is left out."""
    said = []
    ticks = summary.get('ticks', 0)
    if ticks:
        text = f'The loop ran {ticks:,} ticks at {summary["action_rate_hz"]:.2f} actions a second'
        deviation = summary.get('period_deviation_ms')
        if deviation:
            text += (f'; 99 of 100 periods were right to {deviation["p99"]:.2f} ms, '
                     f'the worst to {deviation["max"]:.2f} ms')
        said.append(text + '.')
        unexplained = summary.get('unexplained_ticks', 0)
        said.append(
            'Every tick published an action or a named fallback.' if not unexplained
            else f'{unexplained} ticks have neither an action nor a named fallback.')
    age = summary.get('observation_age_ms')
    if age:
        said.append(
            f'Half of the actions were computed from an image younger than {age["p50"]:.1f} ms '
            f'when they were published, 99 of 100 from one younger than {age["p99"]:.1f} ms.')
    camera = summary.get('camera')
    if camera:
        said.append(
            f'Of {camera["published"]:,} camera frames {camera["received"]:,} arrived '
            f'({100 * camera["lost_fraction"]:.2f} % lost).')
    if summary.get('episodes'):
        said.append(
            f'The robot did what it was told in {100 * summary["success_rate"]:.0f} % of '
            f'{summary["episodes"]} episodes.')
    return said


def flatten(summary: Mapping, prefix: str = '') -> list[tuple[str, str]]:
    """Return every number of a summary with its dotted name."""
    rows = []
    for key, value in summary.items():
        name = f'{prefix}{key}'
        if isinstance(value, Mapping):
            rows += flatten(value, f'{name}.')
        elif isinstance(value, float):
            rows.append((name, f'{value:.4g}'))
        else:
            rows.append((name, str(value)))
    return rows


def write_report(
    path: Path, summary: Mapping, trace_path: Path, film: Path | None = None
) -> None:
    """
    Write the page.

    Parameters
    ----------
    path : Path
        The HTML file to write.
    summary : mapping
        As in ``summary.json``.
    trace_path : Path
        The trace of the same run, CSV.
    film : Path, optional
        Video or GIF beside the page; linked, not embedded.

    Raises
    ------
    TransportError
        The trace cannot be read.

    """
    trace = read_columns(trace_path)
    parts = [f'<ul>{"".join(f"<li>{escape(text)}</li>" for text in sentences(summary))}</ul>']
    if film is not None:
        name = escape(film.name)
        parts.append('<h2>The robot</h2>' + (
            f'<img src="{name}" alt="the robot at work">' if film.suffix == '.gif'
            else f'<video src="{name}" controls muted loop></video>'))
    for title, draw in (
        ('Timeline of decisions', plots.decisions),
        ('Observation age', plots.observation_age),
        ('Period jitter', plots.jitter),
        ('Stage times', plots.stage_times),
    ):
        parts.append(f'<h2>{title}</h2>{draw(trace)}')
    rows = ''.join(
        f'<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>'
        for name, text in flatten(summary))
    parts.append(f'<h2>All numbers</h2><table>{rows}</table>')
    parts.append(
        '<p class="note">Observation age: publication of an action minus the header stamp of the '
        f'image it was computed from. One record a tick: {escape(trace_path.name)}.</p>')
    path.write_text(
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>vla_edge_ros run</title><style>{STYLE}</style></head><body>'
        f'<h1>vla_edge_ros: report of a run</h1>{"".join(parts)}</body></html>\n',
        encoding='utf-8')
