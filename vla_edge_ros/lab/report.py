"""
``report.html``: one run, on one page that needs nothing else.

Sentences first, then the figures they come from, then every number.
"""

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab import plots
from vla_edge_ros.telemetry.energy_summary import energy_text

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #222; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
svg, video, img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 0.9rem; }
td { padding: 0.2rem 1.2rem 0.2rem 0; border-bottom: 1px solid #ddd; vertical-align: top; }
th { text-align: left; padding-right: 1.2rem; vertical-align: bottom; }
td + td { font-variant-numeric: tabular-nums; }
details { overflow-x: auto; }
.note { color: #666; font-size: 0.9rem; }
"""

AGE_NOTE = (
    '<p class="note">Observation age: publication of an action minus the header stamp of the '
    'image it was computed from. Every publication counts, also of a queued or held action.</p>')
PICTURES = (
    ('Timeline of decisions', plots.decisions),
    ('Observation age', plots.observation_age),
    ('Period jitter', plots.jitter),
    ('Stage times', plots.stage_times),
)
"""What is drawn of a run."""


def sentences(summary: Mapping) -> list[str]:
    """Say in plain words what a summary means; what was not measured is left out."""
    said = []
    if summary['action_rate_hz']:
        deviation = summary['period_deviation_ms']
        said.append(
            f'The loop ran {summary["ticks"]:,} ticks and published '
            f'{summary["action_rate_hz"]:.2f} actions a second; 99 of 100 periods were right to '
            f'{deviation["p99"]:.2f} ms, the worst to {deviation["max"]:.2f} ms.')
    unexplained = summary['unexplained_ticks']
    said.append(
        f'{unexplained} ticks have neither an action nor a named fallback.' if unexplained
        else 'Every tick published an action or says by name why not.')
    age = summary['observation_age_ms']
    if age['p50'] is not None:
        said.append(
            f'Half of the actions were computed from an image younger than {age["p50"]:.1f} ms '
            f'when they were published, 99 of 100 from one younger than {age["p99"]:.1f} ms.')
    causes = {name: ages for name, ages in summary['observation_age_by_cause'].items()
              if ages['count']}
    if len(causes) > 1:
        actions = sum(ages['count'] for ages in causes.values())
        parts = ', '.join(
            f'{name} {ages["p99"]:.1f} ms ({ages["count"]:,})'
            for name, ages in sorted(causes.items(), key=lambda item: item[1]['p99']))
        said.append(
            f'By where these {actions:,} actions came from, 99 of 100 images were younger than: '
            f'{parts}.')
    contact = summary['observation_age_at_contact_ms']
    if contact and contact['count']:
        said.append(
            f'Of the actions in force when the tool met its object ({contact["count"]:,}), half '
            f'came from an image younger than {contact["p50"]:.1f} ms; the oldest was '
            f'{contact["max"]:.1f} ms.')
    camera = summary['camera']
    if camera['lost_fraction'] is not None:
        said.append(
            f'Of {camera["published"]:,} camera frames {camera["received"]:,} arrived '
            f'({100 * camera["lost_fraction"]:.2f} % lost).')
    if summary['episodes']:
        said.append(
            f'The robot did what it was told in {100 * summary["success_rate"]:.0f} % of '
            f'{summary["episodes"]} episodes.')
    energy = summary.get('energy')
    if isinstance(energy, Mapping):
        said += [f'Energy by {name}: {energy_text(source)}.'
                 for name, source in energy.items() if not isinstance(source, str)]  # fmt: skip
    return said


def flatten(summary: Mapping, prefix: str = '') -> list[tuple[str, str]]:
    """Return every number of a summary with its dotted name."""
    rows = []
    for key, value in summary.items():
        name = f'{prefix}{key}'
        if isinstance(value, Mapping):
            rows += flatten(value, f'{name}.')
        elif isinstance(value, list):
            rows.append((name, ' '.join(map(str, value))))
        elif isinstance(value, float):
            rows.append((name, f'{value:.4g}'))
        else:
            rows.append((name, 'not measured' if value is None else str(value)))
    return rows


def write_report(
    path: Path, summary: Mapping, trace: Mapping[str, np.ndarray], film: Path | None = None
) -> None:
    """
    Write the page.

    Parameters
    ----------
    path : Path
        The HTML file to write.
    summary : mapping
        As in ``summary.json``.
    trace : mapping of str to array
        The trace of the same run, as ``read_trace`` returns it.
    film : Path, optional
        Video or GIF beside the page; linked, not embedded.

    Raises
    ------
    ConfigError
        The trace holds fewer than two ticks.

    """
    ticks = len(trace['tick'])
    if ticks < 2:
        raise ConfigError('trace', 'must hold at least two ticks', ticks)
    parts = [html_list(sentences(summary))]
    if film is not None:
        name = escape(film.name)
        parts.append('<h2>The robot</h2>' + (
            f'<img src="{name}" alt="the robot at work">' if film.suffix in ('.gif', '.webp')
            else f'<video src="{name}" controls muted loop></video>'))
    parts += [f'<h2>{title}</h2>{draw(trace)}' for title, draw in PICTURES]
    parts.append(f'<h2>All numbers</h2>{html_table(flatten(summary))}')
    parts.append(AGE_NOTE)
    path.write_text(html_page('report of a run', parts), encoding='utf-8')


def html_page(title: str, parts: Iterable[str]) -> str:
    """Return a page that needs nothing else, from parts in HTML."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f'<title>vla_edge_ros: {escape(title)}</title><style>{STYLE}</style></head><body>'
        f'<h1>vla_edge_ros: {escape(title)}</h1>{"".join(parts)}</body></html>\n')


def html_list(texts: Iterable[str]) -> str:
    """Return a list of sentences."""
    return f'<ul>{"".join(f"<li>{escape(text)}</li>" for text in texts)}</ul>'


def html_table(rows: Iterable[Iterable[str]], header: Iterable[str] = ()) -> str:
    """Return a table of texts."""
    def line(cells: Iterable[str], tag: str) -> str:
        return f'<tr>{"".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells)}</tr>'

    head = line(header, 'th') if header else ''
    return f'<table>{head}{"".join(line(row, "td") for row in rows)}</table>'
