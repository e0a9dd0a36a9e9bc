"""What a sweep shows and what it does not, in sentences computed from its cells."""

from collections.abc import Sequence
import itertools

import numpy as np

from vla_edge_ros.lab.sweep.conditions import (
    age,
    choices,
    Condition,
    ENERGY,
    families,
    Family,
    figure,
    LEVEL,
    ROOM,
    RUNS,
)
from vla_edge_ros.lab.sweep.results import CellResult, quantiles, SweepResults

SAME_MEAN, OTHER_P99 = 0.05, 0.25
"""A mean hides a tail where means differ by less, and the p99 by more than this part."""
LISTED = 4
TITLE = ENERGY.capitalize()


def findings(results: SweepResults) -> list[str]:
    """Return the sentences of a sweep."""
    said = []
    for family in families(results):
        parts = [_scope, _dominance, _never_worse, _stakes, _hidden_tails, _ranks]
        said += [f'{family.name}: {text}' for text in (
            *(part(family) for part in parts), _causes(results, family),
            _contact(results, family), _energy(family)) if text]
    said.append(
        f"Shown means: by Fisher's exact test at {100 * LEVEL:.0f} % divided by the number of "
        'pairs of configurations in the condition (Bonferroni), so that chance alone parts any of '
        'them in fewer than one condition of twenty; that they all ran the same episodes makes '
        'the test the more cautious. The intervals beside a success are 95 % of its own (Wilson), '
        'without that correction.')
    return said


def _number(count: int, noun: str) -> str:
    return f'{count:,} {noun}{"s" * (count != 1)}'


def _listing(names: Sequence[str]) -> str:
    shown = '; '.join(names[:LISTED])
    return shown if len(names) <= LISTED else f'{shown} and {len(names) - LISTED} more'


def _scope(family: Family) -> str:
    episodes = int(sum(cell['episodes'] for cell in family.cells))
    return (
        f'{_number(len(choices(family.cells)), "configuration")} under '
        f'{_number(len(family.conditions), "condition")}, {episodes:,} episodes in '
        f'{_number(len(family.cells), "cell")}.')


def _dominance(family: Family) -> str:
    """Say whether one configuration is the best in everything everywhere."""
    lost = [condition.name for condition in family.conditions if not condition.possible]
    winners = {condition.name: condition.dominating for condition in family.conditions
               if len(condition.cells) > 1 and condition.possible}
    text = ''
    if lost:
        text = f'Nothing succeeded in {_number(len(lost), "condition")}: {_listing(lost)}. '
    if not winners:
        return text.strip()
    everywhere = set.intersection(
        *({cell.choice for cell in cells} for cells in winners.values()))
    criteria = f'success, p99 of the age and {family.cost_name}'
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
        return min(condition.as_good, key=age), min(condition.as_good, key=condition.cost)

    def steepness(condition: Condition) -> float:
        youngest, cheapest = ends(condition)
        dearer = condition.cost(youngest) / condition.cost(cheapest)
        ratio = min(dearer, age(cheapest) / age(youngest))
        return ratio if np.isfinite(ratio) else 0.0

    possible = [condition for condition in family.conditions if condition.possible]
    steepest = max(possible, key=steepness)
    if steepness(steepest) <= 1 + ROOM:
        return ''
    (youngest, cheapest), told = ends(steepest), steepest.cost_text
    return (
        f' At {steepest.name}, {len(steepest.as_good)} of {len(steepest.cells)} are not shown to '
        f'succeed less often than the best; of these {youngest.choice} has the youngest actions '
        f'(p99 {age(youngest):.0f} ms, {told(youngest)}, success {youngest.success}) and '
        f'{cheapest.choice} costs least (p99 {age(cheapest):.0f} ms, {told(cheapest)}, '
        f'success {cheapest.success}).')


def _never_worse(family: Family) -> str:
    """Say which configurations are a safe choice as far as success goes."""
    conditions = [condition for condition in family.conditions if len(condition.cells) > 1]
    if not conditions:
        return ''
    worse = {cell.choice for condition in conditions for cell in condition.cells
             if condition.shown_worse(cell, condition.best)}
    safe = [choice for choice in choices(family.cells) if choice not in worse]
    if not worse:
        return ('In success no configuration is shown to be worse than another in any condition; '
                'more episodes, or harder conditions, could tell them apart.')
    if not safe:
        return ('Every configuration is shown to succeed less often than the best one in at least '
                'one condition.')
    return (
        f'{len(safe)} of {len(safe) + len(worse)} configurations are in no condition shown to '
        f'succeed less often than the best: {_listing(safe)}.')


def _stakes(family: Family) -> str:
    """Say where the choice matters most."""
    found = [condition for condition in family.conditions if condition.matters]
    if not found:
        return ''
    most = max(found, key=lambda one: one.best['success_rate'] - one.worst['success_rate'])
    return (
        f'The choice matters in {len(found)} of {len(family.conditions)} conditions, most at '
        f'{most.name}: success {most.best.success} with {most.best.choice}, '
        f'{most.worst.success} with {most.worst.choice}.')


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


def _hidden_tails(family: Family) -> str:
    pairs = hidden_tails(family)
    about = (f'mean ages within {100 * SAME_MEAN:.0f} % of each other and p99 more than '
             f'{100 * OTHER_P99:.0f} % apart')
    if not pairs:
        return f'No two configurations of one condition have {about}: here no mean hides a tail.'
    older_loses = sum(where.shown_worse(old, young) for where, young, old in pairs)
    younger_loses = sum(where.shown_worse(young, old) for where, young, old in pairs)
    differ = older_loses + younger_loses
    condition, young, old = max(
        pairs, key=lambda pair: abs(pair[1]['success_rate'] - pair[2]['success_rate']))
    text = (
        f'A mean age hides a tail in {_number(len(pairs), "pair")} of configurations with '
        f'{about}. In {differ} of them success is shown to differ')
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


def _ranks(family: Family) -> str:
    """Say whether success follows the mean or the p99 of the ages more closely."""
    of_mean, of_p99 = [], []
    for condition in family.conditions:
        cells = [cell for cell in condition.cells if np.isfinite(age(cell))]
        if len(cells) < 4 or not condition.matters:
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


def _energy(family: Family) -> str:
    known = family.with_energy
    if not known:
        return f'{TITLE}: unavailable, as no power_model is named; {RUNS} stand in for it.'
    others = '' if len(known) == len(family.conditions) else (
        f' Only {len(known)} of {len(family.conditions)} conditions name a power_model; in the '
        f'others {RUNS} stand in for it, and the two are never compared.')
    able = [cell for condition in known for cell in condition.cells
            if not np.isnan(cell['energy_j_per_success'])]
    if not able:
        return f'{TITLE}: none was completed.{others}'
    least, most = (choose(able, key=_joules) for choose in (min, max))
    text = ' to '.join(
        f'{figure(_joules(cell))} J ({cell.choice} at {cell.condition}, success {cell.success})'
        for cell in (least, most))
    return f'{TITLE}, by the power model and with all failed episodes: from {text}.{others}'


def _joules(cell: CellResult) -> float:
    return cell['energy_j_per_success']
