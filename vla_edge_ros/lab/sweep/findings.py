"""
What a sweep shows and what it does not, in sentences computed from its cells.

Successes are compared by their 95 % intervals: one is shown to be less than another where the
intervals lie apart, which is stricter than a test at 5 %. Ages and costs are compared by value:
every cell runs the same episodes, and what differs by little counts as equal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
import itertools

import numpy as np

from vla_edge_ros.lab.sweep.results import CellResult, quantiles, SweepResults

ROOM = 0.05
"""Ages and costs that differ by less than this part count as equal."""
SAME_MEAN, OTHER_P99 = 0.05, 0.25
"""A mean hides a tail where means differ by less, and the p99 by more than this part."""
LISTED = 4


@dataclass(frozen=True, slots=True)
class Condition:
    """All cells that met the same, to be compared with each other."""

    name: str
    cells: list[CellResult]

    @property
    def best(self) -> CellResult:
        """Return the most successful, of equals the one with the youngest p99."""
        return max(self.cells, key=lambda cell: (cell['success_rate'], -age(cell)))

    @property
    def possible(self) -> bool:
        """Tell whether any episode succeeded."""
        return self.best['success_rate'] > 0

    @property
    def as_good(self) -> list[CellResult]:
        """Return those that are not shown to be less successful than the best."""
        return [cell for cell in self.cells if not shown_worse(cell, self.best)]


@dataclass(frozen=True, slots=True)
class Family:
    """The conditions of one task and one kind of control."""

    name: str
    conditions: list[Condition]

    @property
    def cells(self) -> list[CellResult]:
        """Return all cells."""
        return [cell for condition in self.conditions for cell in condition.cells]


def families(results: SweepResults) -> list[Family]:
    """Return the cells by task and control, then by condition, in the order of the table."""
    found: dict[str, dict[str, list[CellResult]]] = {}
    for cell in results.cells:
        found.setdefault(cell.family, {}).setdefault(cell.condition, []).append(cell)
    return [
        Family(name, [Condition(condition, cells) for condition, cells in conditions.items()])
        for name, conditions in found.items()]


def age(cell: CellResult) -> float:
    """Return the p99 of the ages of all actions, ms; infinite without any action."""
    value = cell['age_p99_ms']
    return np.inf if np.isnan(value) else value


def cost(cell: CellResult) -> float:
    """Return the energy per completed task, J, or runs a second where energy is not known."""
    if np.isnan(cell['energy_j']):
        return cell['runs_per_s']
    joules = cell['energy_j_per_success']
    return np.inf if np.isnan(joules) else joules


def cost_text(cell: CellResult) -> str:
    """Return the same with its unit."""
    if np.isnan(cell['energy_j']):
        return f'{figure(cost(cell))} runs/s'
    return 'none completed' if np.isinf(cost(cell)) else f'{figure(cost(cell))} J a completed task'


def figure(value: float) -> str:
    """Return a number to three figures, never with an exponent."""
    return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def shown_worse(one: CellResult, other: CellResult) -> bool:
    """Tell whether one is shown to succeed less often than the other."""
    return one['success_high'] < other['success_low']


def at_least_as_good(one: CellResult, other: CellResult) -> bool:
    """Tell whether one is as young and as cheap, and not shown to be less successful."""
    return (not shown_worse(one, other) and age(one) <= (1 + ROOM) * age(other)
            and cost(one) <= (1 + ROOM) * cost(other))


def dominates(one: CellResult, other: CellResult) -> bool:
    """Tell whether one is at least as good in everything, and the other is not."""
    return at_least_as_good(one, other) and not at_least_as_good(other, one)


def front(cells: Sequence[CellResult]) -> list[CellResult]:
    """Return the cells that no other of them dominates."""
    return [cell for cell in cells if not any(dominates(other, cell) for other in cells)]


def dominating(condition: Condition) -> list[CellResult]:
    """Return the cells that are at least as good as every other in everything."""
    return [cell for cell in condition.cells
            if all(at_least_as_good(cell, other) for other in condition.cells)]


def findings(results: SweepResults) -> list[str]:
    """Return the sentences of a sweep."""
    said = []
    for family in families(results):
        cost_name = 'energy per completed task' if results.has_energy else 'runs a second'
        parts = [_scope, _dominance, _never_worse, _stakes, _hidden_tails, _ranks]
        said += [f'{family.name}: {text}' for text in (
            *(part(family, cost_name) for part in parts), _causes(results, family),
            _contact(results, family), _energy(results, family)) if text]
    said.append(
        'Success is compared by 95 % intervals (Wilson): of two configurations chosen beforehand, '
        'fewer than one in twenty are told apart wrongly, as intervals that lie apart are a '
        'stricter test. The best against the worst of many is a looser one: the more there are, '
        'the more often chance alone parts them.')
    return said


def _number(count: int, noun: str) -> str:
    return f'{count:,} {noun}{"s" * (count != 1)}'


def _listing(names: Sequence[str]) -> str:
    shown = '; '.join(names[:LISTED])
    return shown if len(names) <= LISTED else f'{shown} and {len(names) - LISTED} more'


def _choices(cells: Sequence[CellResult]) -> list[str]:
    return list(dict.fromkeys(cell.choice for cell in cells))


def _scope(family: Family, _cost_name: str) -> str:
    episodes = int(sum(cell['episodes'] for cell in family.cells))
    return (
        f'{_number(len(_choices(family.cells)), "configuration")} under '
        f'{_number(len(family.conditions), "condition")}, {episodes:,} episodes in '
        f'{_number(len(family.cells), "cell")}.')


def _dominance(family: Family, cost_name: str) -> str:
    """Say whether one configuration is the best in everything everywhere."""
    lost = [condition.name for condition in family.conditions if not condition.possible]
    winners = {condition.name: dominating(condition) for condition in family.conditions
               if len(condition.cells) > 1 and condition.possible}
    text = ''
    if lost:
        text = f'Nothing succeeded in {_number(len(lost), "condition")}: {_listing(lost)}. '
    if not winners:
        return text.strip()
    everywhere = set.intersection(
        *({cell.choice for cell in cells} for cells in winners.values()))
    criteria = f'success, p99 of the age and {cost_name}'
    if everywhere:
        return text + (
            f'{_listing(sorted(everywhere))} dominates: in every condition it is at least as '
            f'good as any other in {criteria}.')
    text += (
        f'No configuration dominates: none is in every condition at least as good as any other in '
        f'{criteria}.')
    somewhere = [f'{cells[0].choice} at {name}' for name, cells in winners.items() if cells]
    if somewhere:
        text += (f' In {len(somewhere)} of {len(winners)} conditions one is: '
                 f'{_listing(somewhere)}.')
    return text + _trade_off(family)


def _trade_off(family: Family) -> str:
    """Say where being young costs most among those that are not shown to succeed less often."""
    def ends(condition: Condition) -> tuple[CellResult, CellResult]:
        return min(condition.as_good, key=age), min(condition.as_good, key=cost)

    def steepness(condition: Condition) -> float:
        youngest, cheapest = ends(condition)
        ratio = min(cost(youngest) / cost(cheapest), age(cheapest) / age(youngest))
        return ratio if np.isfinite(ratio) else 0.0

    possible = [condition for condition in family.conditions if condition.possible]
    steepest = max(possible, key=steepness)
    if steepness(steepest) <= 1 + ROOM:
        return ''
    youngest, cheapest = ends(steepest)
    return (
        f' At {steepest.name}, {len(steepest.as_good)} of {len(steepest.cells)} are not shown to '
        f'succeed less often than the best; of these {youngest.choice} has the youngest actions '
        f'(p99 {age(youngest):.0f} ms, {cost_text(youngest)}, success {youngest.success}) and '
        f'{cheapest.choice} costs least (p99 {age(cheapest):.0f} ms, {cost_text(cheapest)}, '
        f'success {cheapest.success}).')


def _never_worse(family: Family, _cost_name: str) -> str:
    """Say which configurations are a safe choice as far as success goes."""
    conditions = [condition for condition in family.conditions if len(condition.cells) > 1]
    if not conditions:
        return ''
    worse = {cell.choice for condition in conditions for cell in condition.cells
             if shown_worse(cell, condition.best)}
    safe = [choice for choice in _choices(family.cells) if choice not in worse]
    if not worse:
        return ('In success no configuration is shown to be worse than another in any condition; '
                'more episodes, or harder conditions, could tell them apart.')
    if not safe:
        return ('Every configuration is shown to succeed less often than the best one in at least '
                'one condition.')
    return (
        f'{len(safe)} of {len(safe) + len(worse)} configurations are in no condition shown to '
        f'succeed less often than the best: {_listing(safe)}.')


def _stakes(family: Family, _cost_name: str) -> str:
    """Say where the choice matters most."""
    def gap(condition: Condition) -> float:
        worst = min(condition.cells, key=lambda cell: cell['success_rate'])
        return condition.best['success_low'] - worst['success_high']

    condition = max(family.conditions, key=gap)
    if gap(condition) <= 0:
        return ''
    worst = min(condition.cells, key=lambda cell: cell['success_rate'])
    matters = sum(gap(condition) > 0 for condition in family.conditions)
    return (
        f'The choice matters in {matters} of {len(family.conditions)} conditions, most at '
        f'{condition.name}: success {condition.best.success} with {condition.best.choice}, '
        f'{worst.success} with {worst.choice}.')


def hidden_tails(family: Family) -> list[tuple[Condition, CellResult, CellResult]]:
    """Return pairs of one condition with about equal mean ages; the second has the older p99."""
    pairs = []
    for condition in family.conditions:
        for pair in itertools.combinations(condition.cells, 2):
            young, old = sorted(pair, key=age)
            means = sorted(cell['age_mean_ms'] for cell in pair)
            if means[1] <= (1 + SAME_MEAN) * means[0] and age(old) > (1 + OTHER_P99) * age(young):
                pairs.append((condition, young, old))
    return pairs


def _hidden_tails(family: Family, _cost_name: str) -> str:
    pairs = hidden_tails(family)
    about = (f'mean ages within {100 * SAME_MEAN:.0f} % of each other and p99 more than '
             f'{100 * OTHER_P99:.0f} % apart')
    if not pairs:
        return f'No two configurations of one condition have {about}: here no mean hides a tail.'
    differ = [pair for pair in pairs
              if shown_worse(pair[1], pair[2]) or shown_worse(pair[2], pair[1])]
    older_loses = sum(shown_worse(old, young) for _, young, old in differ)
    condition, young, old = max(
        pairs, key=lambda pair: abs(pair[1]['success_rate'] - pair[2]['success_rate']))
    text = (
        f'A mean age hides a tail in {_number(len(pairs), "pair")} of configurations with '
        f'{about}. In {len(differ)} of them success is shown to differ')
    if differ:
        text += f', in {older_loses} of those to the loss of the one with the older p99'
    return (
        f'{text}. The largest difference: at {condition.name}, {young.choice} and {old.choice} '
        f'have means of {young["age_mean_ms"]:.0f} and {old["age_mean_ms"]:.0f} ms, p99 of '
        f'{age(young):.0f} and {age(old):.0f} ms, success {young.success} and {old.success}.')


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's rank correlation; ties share their mean rank."""
    ranks = [_ranks_of(np.asarray(values, float)) for values in (one, other)]
    return float(np.corrcoef(ranks)[0, 1])


def _ranks_of(values: np.ndarray) -> np.ndarray:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[places]


def _ranks(family: Family, _cost_name: str) -> str:
    """Say whether success follows the mean or the p99 of the ages more closely."""
    of_mean, of_p99 = [], []
    for condition in family.conditions:
        cells = [cell for cell in condition.cells if np.isfinite(age(cell))]
        differs = any(shown_worse(cell, condition.best) for cell in cells)
        if len(cells) < 4 or not differs:
            continue
        success = [cell['success_rate'] for cell in cells]
        columns = [[cell['age_mean_ms'] for cell in cells], [age(cell) for cell in cells]]
        if min(len(set(values)) for values in (success, *columns)) < 2:
            continue
        of_mean.append(rank_correlation(success, columns[0]))
        of_p99.append(rank_correlation(success, columns[1]))
    if not of_mean:
        return ''
    closer = sum(p99 < mean for mean, p99 in zip(of_mean, of_p99))
    return (
        f'Among the configurations of one condition, success goes with a young mean age (rank '
        f'correlation {np.mean(of_mean):+.2f} on average) and with a young p99 '
        f'({np.mean(of_p99):+.2f}); the p99 is the closer guide in {closer} of {len(of_mean)} '
        'conditions in which success is shown to differ.')


def _causes(results: SweepResults, family: Family) -> str:
    """Say where the oldest actions come from."""
    by_cause = {cause: results.pooled(family.cells, cause) for cause in results.causes}
    by_cause = {cause: pair for cause, pair in by_cause.items() if pair[0].size}
    if not by_cause:
        return ''
    ages, counts = (np.concatenate(parts) for parts in zip(*by_cause.values()))
    order = np.argsort(ages, kind='stable')
    (limit,) = quantiles(ages[order], counts[order], (99,))
    oldest = {
        cause: int(counts[ages >= limit].sum()) for cause, (ages, counts) in by_cause.items()}
    shares = sorted(oldest.items(), key=lambda item: -item[1])
    total = sum(oldest.values())
    text = ', '.join(f'{100 * count / total:.0f} % {cause}' for cause, count in shares if count)
    return f'Of the oldest hundredth of all actions, {limit:.0f} ms and more, {text}.'


def _contact(results: SweepResults, family: Family) -> str:
    ages, counts = results.pooled(family.cells, 'contact')
    if not counts.size:
        return ''
    p50, p99 = quantiles(ages, counts, (50, 99))
    everything = [results.pooled(family.cells, cause) for cause in results.causes]
    all_ages, all_counts = (np.concatenate(parts) for parts in zip(*everything))
    order = np.argsort(all_ages, kind='stable')
    of_all = quantiles(all_ages[order], all_counts[order], (50, 99))
    return (
        f'At the {counts.sum():,} contacts the action in force was {p50:.0f} ms old in the median '
        f'and {p99:.0f} ms at p99, all actions {of_all[0]:.0f} and {of_all[1]:.0f} ms.')


def _energy(results: SweepResults, family: Family) -> str:
    if not results.has_energy:
        return ('Energy per completed task: unavailable, as not every cell names a power_model; '
                'runs a second stand in for it.')
    able = [cell for cell in family.cells if not np.isnan(cell['energy_j_per_success'])]
    if not able:
        return 'Energy per completed task: none was completed.'
    least, most = (choose(able, key=_joules) for choose in (min, max))
    text = ' to '.join(
        f'{figure(_joules(cell))} J ({cell.choice} at {cell.condition}, success {cell.success})'
        for cell in (least, most))
    return (
        'Energy per completed task, by the power model and with all failed episodes: from '
        f'{text}.')


def _joules(cell: CellResult) -> float:
    return cell['energy_j_per_success']
