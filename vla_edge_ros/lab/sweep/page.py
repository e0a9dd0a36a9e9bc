"""The report of a sweep: one page that needs nothing else, and its findings as Markdown."""

from collections.abc import Sequence
from html import escape

import numpy as np

from vla_edge_ros.lab.report import AGE_NOTE, html_list, html_page, html_table
from vla_edge_ros.lab.sweep import plots
from vla_edge_ros.lab.sweep.conditions import age, families, Family, figure
from vla_edge_ros.lab.sweep.findings import findings
from vla_edge_ros.lab.sweep.results import quantiles, SweepResults

CELL_COLUMNS = (
    ('success_rate', 'success'), ('age_mean_ms', 'mean age'), ('age_p50_ms', 'p50'),
    ('age_p95_ms', 'p95'), ('age_p99_ms', 'p99'), ('age_max_ms', 'max'),
    ('contact_age_p99_ms', 'p99 at contact'), ('runs_per_s', 'runs/s'),
    ('planned_share', 'planned'), ('refused_share', 'refused'), ('missed_share', 'missed'),
    ('time_to_success_p50_s', 'time to success'), ('energy_j_per_success', 'J per completion'),
)
NOTE = (
    '<p class="note">Intervals are 95 % (Wilson). Ages are in ms, to 0.1 ms. Planned, refused and '
    'missed: part of the ticks that played a planned action, in which admission refused a full '
    'run, in which a run missed its deadline. A configuration dominates another if it is not '
    'shown to succeed less often, its p99 is no older and it costs no more, with 5 % of room, and '
    'the same does not hold the other way round; points with a black rim are dominated by none.'
    '</p>')


def report_page(results: SweepResults) -> str:
    """Return the page."""
    parts = [html_list(findings(results)), f'<p class="note">{escape(origin(results))}</p>']
    for family in families(results):
        parts += _family_parts(results, family)
    parts += [
        f'<h2>All cells</h2><details><summary>{len(results.cells)} cells</summary>',
        html_table(_cell_rows(results), ('', '', '', *(name for _, name in CELL_COLUMNS))),
        '</details>', NOTE, AGE_NOTE]
    return html_page('report of a sweep', parts)


def findings_text(results: SweepResults) -> str:
    """Return the findings as Markdown, with a table of the conditions."""
    lines = ['# Findings of a sweep', '', origin(results), '']
    lines += [f'- {text}' for text in findings(results)]
    for family in families(results):
        lines += ['', f'## {family.name}', '', _row(CONDITION_HEADER),
                  '|' + '---|' * len(CONDITION_HEADER)]
        lines += [_row(row) for row in condition_rows(family)]
    return '\n'.join([*lines, ''])


def _row(cells: Sequence[str]) -> str:
    return f'| {" | ".join(cells)} |'


CONDITION_HEADER = (
    'condition', 'most successful', 'success', 'as good', 'youngest of these', 'p99',
    'cheapest of these', 'cost', 'dominated by none')


def condition_rows(family: Family) -> list[tuple[str, ...]]:
    """Return for every condition what there is to choose from."""
    rows = []
    for condition in family.conditions:
        best, as_good = condition.best, condition.as_good
        youngest, cheapest = min(as_good, key=age), min(as_good, key=condition.cost)
        rows.append((
            condition.name, best.choice, best.success,
            f'{len(as_good)} of {len(condition.cells)}', youngest.choice,
            f'{age(youngest):.0f} ms', cheapest.choice,
            condition.cost_text(cheapest), str(len(condition.front))))
    return rows


def origin(results: SweepResults) -> str:
    """Return where the figures come from."""
    versions = results.configuration.get('versions', {})
    text = (
        f'{len(results.cells)} cells of {results.configuration.get("episodes")} episodes for each '
        f'of the seeds {results.configuration.get("seeds")}, in virtual time; vla_edge_ros '
        f'{versions.get("vla_edge_ros")}, sources {versions.get("sources")}')
    if results.model:
        text += f', latencies of the policy {results.model}'
    started = [session for session in results.sessions if 'environment' in session]
    if started:
        record = started[-1]['environment']
        seconds = sum(session.get('seconds', 0.0) for session in results.sessions)
        text += (
            f', commit {record["commit"][:10]}, {record["cores"]} cores, {record["cpu"]}, run on '
            f'{started[-1]["started"][:10]} in {len(started)} session'
            f'{"s" * (len(started) > 1)}; those that ended took {seconds / 60:.1f} min')
    return text + '.'


def _family_parts(results: SweepResults, family: Family) -> list[str]:
    name = escape(family.name)
    tails = _cause_rows(results, family)
    return [
        f'<h2>{name}: what to choose from</h2>',
        html_table(condition_rows(family), CONDITION_HEADER),
        f'<h2>{name}: success of every configuration</h2>{plots.success_table(family)}',
        f'<h2>{name}: success and age</h2>{plots.success(family)}',
        f'<h2>{name}: success and {escape(family.cost_name)}'
        f'{"" if family.with_energy else "; energy is unavailable"}</h2>',
        plots.trade_offs(family),
        f'<h2>{name}: ages</h2>{plots.age_tails(results, family)}',
        plots.age_causes(results, family),
        html_table(tails, ('latency', 'cause', 'actions', 'p50', 'p95', 'p99', 'max')),
        f'<h2>{name}: what a mean age hides</h2>{plots.mean_and_tail(family)}',
    ]


def _cause_rows(results: SweepResults, family: Family) -> list[tuple[str, ...]]:
    rows = []
    latencies = dict.fromkeys(cell.axes['latency'] for cell in family.cells)
    for latency in latencies:
        cells = [cell for cell in family.cells if cell.axes['latency'] == latency]
        for cause in [*results.causes, 'contact']:
            ages, counts = results.pooled(cells, cause)
            if counts.size:
                values = quantiles(ages, counts, (50, 95, 99, 100))
                rows.append((latency, 'at contact' if cause == 'contact' else cause,
                             f'{counts.sum():,}', *(f'{value:.1f}' for value in values)))
    return rows


def _cell_rows(results: SweepResults) -> list[tuple[str, ...]]:
    def text(cell, name: str) -> str:
        if name == 'success_rate':
            return cell.success
        value = cell[name]
        return '' if np.isnan(value) else figure(value)

    return [
        (cell.family, cell.condition, cell.choice,
         *(text(cell, name) for name, _ in CELL_COLUMNS))
        for cell in results.cells]
