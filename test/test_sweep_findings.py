"""What is said of a sweep is what its cells show, intervals considered."""

from dataclasses import replace

import numpy as np
import pytest

from vla_edge_ros.lab.sweep import findings as module
from vla_edge_ros.lab.sweep.conditions import (
    Condition,
    ENERGY,
    families,
    fisher_p,
    LEVEL,
    ROOM,
    RUNS,
)
from vla_edge_ros.lab.sweep.findings import findings, hidden_tails, rank_correlation
from vla_edge_ros.lab.sweep.page import condition_rows
from vla_edge_ros.lab.sweep.plots import trade_offs
from vla_edge_ros.lab.sweep.results import CellResult, quantiles, SweepResults
from vla_edge_ros.sim.episode import wilson_interval

EPISODES = 100


def cell(choice, successes, p99=100.0, runs=10.0, mean=50.0, condition='40 ms', **values):
    low, high = wilson_interval(successes, EPISODES)
    numbers = {
        'successes': successes, 'success_rate': successes / EPISODES, 'success_low': low,
        'success_high': high,
        'episodes': EPISODES, 'age_p99_ms': p99, 'age_mean_ms': mean, 'runs_per_s': runs,
        'energy_j': np.nan, 'energy_j_per_success': np.nan, **values}
    return CellResult(
        hash(choice), {'schedule': 'sync', 'latency': condition}, numbers, choice, condition,
        'expert')


def said(*cells, ages=None):
    return findings(SweepResults(list(cells), ages or {}, {}))


def dominates(one, other):
    return Condition('40 ms', [one, other]).dominates(one, other)


@pytest.mark.parametrize(('counts', 'p'), [
    ((1, 10, 9, 10), 2 * 101 / 184_756), ((1, 4, 3, 4), 2 * 17 / 70), ((0, 3, 5, 5), 2 * 1 / 56),
    ((5, 10, 5, 10), 1.0), ((0, 7, 0, 9), 1.0)])
def test_p_is_fishers(counts, p):
    """Tables at least as uneven, of all with the same sums, counted by hand; both ways."""
    assert fisher_p(*counts) == pytest.approx(p, rel=1e-4)


def test_success_is_worse_only_where_chance_is_unlikely_to_part_them():
    good, similar, bad = cell('a', 90), cell('b', 80), cell('c', 60)
    condition = Condition('40 ms', [good, similar, bad])
    assert condition.shown_worse(bad, good) and not condition.shown_worse(good, bad)
    assert not condition.shown_worse(similar, good)
    assert condition.as_good == [good, similar]


def test_more_configurations_need_a_clearer_difference():
    good, bad = cell('good', 90), cell('bad', 70)
    others = [cell(str(number), 80) for number in range(34)]
    assert fisher_p(70, 100, 90, 100) < LEVEL
    assert Condition('40 ms', [good, bad]).matters
    assert not Condition('40 ms', [good, bad, *others]).matters
    assert 'The choice matters in 1 of 1' in ' '.join(said(good, bad))
    text = ' '.join(said(good, bad, *others))
    assert 'The choice matters' not in text and 'no configuration is shown to be worse' in text
    assert '(Bonferroni)' in text


def test_best_and_worst_of_many_equal_configurations_are_hardly_ever_told_apart():
    rng, conditions = np.random.default_rng(1), 300
    apart = sum(
        Condition('40 ms', [cell(str(number), int(successes)) for number, successes
                            in enumerate(rng.binomial(EPISODES, 0.7, 20))]).matters
        for _ in range(conditions))
    assert apart <= LEVEL * conditions


def test_one_dominates_if_it_is_as_good_in_everything_and_better_in_something():
    plain = cell('a', 80, p99=100, runs=10)
    assert not dominates(plain, cell('b', 80, p99=100, runs=10))
    assert dominates(cell('b', 80, p99=80, runs=10), plain)
    assert dominates(cell('b', 80, p99=100, runs=8), plain)
    assert dominates(cell('b', 96, p99=100, runs=10), plain)
    assert not dominates(cell('b', 96, p99=120, runs=10), plain)
    assert not dominates(cell('b', 60, p99=80, runs=8), plain)
    near = cell('b', 80, p99=104, runs=10.4)
    assert Condition('40 ms', [near, plain]).at_least_as_good(near, plain)
    assert not dominates(cell('b', 80, p99=97, runs=9.7), plain)


def test_energy_takes_the_place_of_runs_where_it_is_known():
    frugal = cell('a', 80, runs=30, energy_j=100.0, energy_j_per_success=1.25)
    assert dominates(
        frugal, cell('b', 80, runs=5, energy_j=200.0, energy_j_per_success=2.5))
    # Whoever completes nothing has no price at all.
    assert dominates(frugal, cell('b', 0, p99=100.0, runs=5, energy_j=50.0))


def test_costs_of_one_condition_have_one_unit():
    """An energy of 50 J is no more than 60 runs a second, nor less."""
    joules = {'energy_j': 4000.0, 'energy_j_per_success': 50.0}
    known, unknown = cell('a', 80, runs=30, **joules), cell('b', 80, runs=60)
    mixed = Condition('40 ms', [known, unknown])
    assert mixed.cost_name == RUNS and mixed.dominates(known, unknown)
    assert (mixed.cost_text(known), mixed.cost_text(unknown)) == ('30 runs/s', '60 runs/s')
    alone = Condition('40 ms', [known])
    assert alone.cost_name == ENERGY and alone.cost_text(known) == '50 J a completed task'


def test_conditions_with_a_power_model_are_compared_by_energy_and_the_others_by_runs():
    joules = [{'energy_j': value, 'energy_j_per_success': value} for value in (20.0, 10.0)]
    cells = [cell('a', 90, 50, 5, **joules[0]), cell('b', 90, 100, 9, **joules[1]),
             cell('a', 90, 50, 5, condition='8 ms'), cell('b', 90, 100, 9, condition='8 ms')]
    family = families(SweepResults(cells, {}, {}))[0]
    assert [row[-2] for row in condition_rows(family)] == ['10 J a completed task', '5 runs/s']
    text = ' '.join(said(*cells))
    assert ('good as any other in success, p99 of the age and cost (energy per completed task, or '
            'runs a second without). In 1 of 2 conditions one is: a at 8 ms.') in text
    assert 'Energy per completed task, by the power model and with all failed ep' in text
    assert 'Only 1 of 2 conditions name a power_model; in the others runs a second stand' in text
    picture = trade_offs(family)
    assert 'energy per completed task / J' in picture and 'runs of the policy a second' in picture


def test_cell_without_any_action_is_the_oldest_of_all():
    silent = cell('a', 80, p99=np.nan)
    assert dominates(cell('b', 80, p99=1e6), silent)
    assert Condition('40 ms', [silent, cell('b', 80)]).front == [cell('b', 80)]


def test_configuration_that_dominates_everywhere_is_named():
    text = ' '.join(said(
        cell('best', 90, 50, 5), cell('other', 80, 100, 10),
        cell('best', 90, 50, 5, condition='8 ms'), cell('other', 91, 100, 10, condition='8 ms')))
    assert 'expert: best dominates: in every condition it is at least as good as any' in text
    assert 'No configuration dominates' not in text


def test_where_none_dominates_the_trade_off_is_told():
    cells = [cell('young', 90, 50, 30), cell('cheap', 85, 200, 5), cell('bad', 20, 300, 4),
             cell('young', 90, 50, 5, condition='8 ms'), cell('cheap', 9, 60, 6, condition='8 ms')]
    text = ' '.join(said(*cells))
    assert 'No configuration dominates' in text
    assert 'In 1 of 2 conditions one is: young at 8 ms.' in text
    assert ('At 40 ms, 2 of 3 are not shown to succeed less often than the best; of these young '
            'has the youngest actions (p99 50 ms, 30 runs/s, success 0.90 (0.83–0.94)) and cheap '
            'costs least (p99 200 ms, 5 runs/s, success 0.85') in text
    assert [condition.name for condition in families(SweepResults(cells, {}, {}))[0].conditions
            if condition.dominating] == ['8 ms']


def test_condition_in_which_nothing_succeeds_decides_nothing():
    text = ' '.join(said(
        cell('best', 90, 50, 5), cell('other', 80, 100, 10),
        cell('best', 0, 90, 9, condition='200 ms'), cell('other', 0, 50, 5, condition='200 ms')))
    assert 'Nothing succeeded in 1 condition: 200 ms. best dominates' in text
    hopeless = ' '.join(said(cell('a', 0), cell('b', 0)))
    assert 'Nothing succeeded in 1 condition: 40 ms.' in hopeless
    assert 'dominates:' not in hopeless


@pytest.mark.parametrize(('other', 'sentence'), [
    ((85, 85), 'In success no configuration is shown to be worse than another'),
    ((30, 90), '1 of 2 configurations are in no condition shown to succeed less often than the '
               'best: a.'),
])
def test_what_is_never_shown_to_be_worse_is_listed(other, sentence):
    text = ' '.join(said(
        cell('a', 90), cell('b', other[0]), cell('a', 90, condition='8 ms'),
        cell('b', other[1], condition='8 ms')))
    assert sentence in text


def test_every_configuration_may_be_worse_somewhere():
    text = ' '.join(said(
        cell('a', 90), cell('b', 30), cell('a', 30, condition='8 ms'),
        cell('b', 90, condition='8 ms')))
    assert 'Every configuration is shown to succeed less often than the best one in at' in text
    assert 'The choice matters in 2 of 2 conditions' in text


def test_stakes_are_not_told_where_nothing_is_shown_to_differ():
    assert 'The choice matters' not in ' '.join(said(cell('a', 90), cell('b', 85)))


def test_mean_that_hides_a_tail_is_found_within_a_condition_only():
    steady, spiky = cell('steady', 90, p99=60, mean=50), cell('spiky', 60, p99=120, mean=51)
    family = families(SweepResults([steady, spiky], {}, {}))[0]
    assert [(young.choice, old.choice) for _, young, old in hidden_tails(family)] == [
        ('steady', 'spiky')]
    text = ' '.join(said(steady, spiky))
    assert 'A mean age hides a tail in 1 pair of' in text
    assert 'In 1 of them success is shown to differ, in 1 of those to the loss of the one' in text
    assert 'steady and spiky have means of 50 and 51 ms, p99 of 60 and 120 ms' in text
    for changed in (replace(spiky, condition='8 ms'), cell('spiky', 60, p99=120, mean=60),
                    cell('spiky', 60, p99=70, mean=51)):
        assert 'here no mean hides a tail' in ' '.join(said(steady, changed))


def test_rank_correlation_is_spearmans():
    assert rank_correlation([1, 2, 3, 4], [10, 20, 25, 90]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # From the textbook formula with tied ranks 1.5, 1.5, 3, 4 against 1, 2, 3, 4.
    assert rank_correlation([5, 5, 6, 7], [1, 2, 3, 4]) == pytest.approx(0.9487, abs=1e-4)


def test_the_closer_guide_to_success_is_told():
    cells = [cell(str(number), successes, p99=p99, mean=mean) for number, (successes, p99, mean)
             in enumerate([(95, 10, 9), (80, 20, 5), (50, 30, 8), (20, 40, 7)])]
    text = ' '.join(said(*cells))
    assert 'a young p99 (-1.00); the p99 is the closer guide in 1 of 1' in text


def test_causes_of_the_oldest_actions_are_told_from_all_ages():
    one = replace(cell('a', 90), number=0)
    ages = {(0, 'fresh'): (np.array([20.0, 30.0]), np.array([500, 488])),
            (0, 'hold'): (np.array([25.0, 400.0]), np.array([1, 8])),
            (0, 'queued'): (np.array([300.0]), np.array([2])),
            (0, 'contact'): (np.array([20.0, 300.0]), np.array([3, 1]))}
    text = ' '.join(said(one, ages=ages))
    assert 'oldest hundredth of all actions, 300 ms and more, 80 % hold, 20 % queued.' in text
    assert 'At the 4 contacts the action in force was 20 ms old in the median and 300 ms' in text


def test_quantile_is_the_least_age_that_so_many_reach():
    ages, counts = np.array([10.0, 20.0, 30.0]), np.array([50, 49, 1])
    assert quantiles(ages, counts, (1, 50, 51, 99, 99.5, 100)) == [10, 10, 20, 20, 30, 30]
    assert np.isnan(quantiles(ages[:0], counts[:0], (50,))).all()


def test_energy_is_unavailable_unless_every_cell_knows_it():
    known = cell('a', 90, energy_j=900.0, energy_j_per_success=10.0)
    dear = cell('b', 50, energy_j=900.0, energy_j_per_success=18.0)
    assert 'Energy per completed task: unavailable' in ' '.join(said(known, cell('b', 90)))
    text = ' '.join(said(known, dear))
    assert 'from 10 J (a at 40 ms, success 0.90 (0.83–0.94)) to 18 J (b at 40 ms' in text
    nothing = cell('a', 0, energy_j=900.0)
    assert 'none was completed' in ' '.join(said(nothing))


def test_room_for_equal_values_is_small():
    assert 0 < ROOM <= module.SAME_MEAN < module.OTHER_P99
