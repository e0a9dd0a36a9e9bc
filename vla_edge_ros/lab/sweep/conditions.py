"""
The configurations of a sweep, compared with each other under each condition.

Of successes, one is shown to be less than another by Fisher's exact test, two-sided, at 5 %
divided by the number of pairs in the condition (Bonferroni): chance alone parts any pair in fewer
than one condition of twenty, however many configurations there are. Every cell runs the same
episodes, which makes the test the more cautious. Ages and costs are compared by value, for the
same reason, and what differs by little counts as equal. Costs have one unit in a condition.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
import math

import numpy as np

from vla_edge_ros.lab.sweep.results import CellResult, SweepResults

LEVEL = 0.05
"""How likely chance may part any two equal configurations of a condition."""
ROOM = 0.05
"""Ages and costs that differ by less than this part count as equal."""
ENERGY, RUNS = 'energy per completed task', 'runs a second'


@dataclass(frozen=True)
class Condition:
    """All cells that met the same, to be compared with each other."""

    name: str
    cells: list[CellResult]

    @cached_property
    def best(self) -> CellResult:
        """Return the most successful, of equals the one with the youngest p99."""
        return max(self.cells, key=lambda cell: (cell['success_rate'], -age(cell)))

    @property
    def worst(self) -> CellResult:
        """Return the least successful."""
        return min(self.cells, key=lambda cell: cell['success_rate'])

    @property
    def possible(self) -> bool:
        """Tell whether any episode succeeded."""
        return self.best['success_rate'] > 0

    @cached_property
    def as_good(self) -> list[CellResult]:
        """Return those that are not shown to be less successful than the best."""
        return [cell for cell in self.cells if not self.shown_worse(cell, self.best)]

    @property
    def matters(self) -> bool:
        """Tell whether the worst is shown to be less successful than the best."""
        return self.shown_worse(self.worst, self.best)

    @property
    def pairs(self) -> int:
        """Return how many comparisons there are."""
        return math.comb(len(self.cells), 2)

    @cached_property
    def cost_name(self) -> str:
        """Return what every cell of it is charged with: energy, if all of them know it."""
        return RUNS if any(np.isnan(cell['energy_j']) for cell in self.cells) else ENERGY

    def shown_worse(self, one: CellResult, other: CellResult) -> bool:
        """Tell whether one is shown to succeed less often than the other."""
        if one['success_rate'] >= other['success_rate']:
            return False
        counts = (int(cell[name]) for cell in (one, other) for name in ('successes', 'episodes'))
        return fisher_p(*counts) * self.pairs < LEVEL

    def cost(self, cell: CellResult) -> float:
        """Return the energy per completed task, J, or the runs a second: see ``cost_name``."""
        if self.cost_name == RUNS:
            return cell['runs_per_s']
        joules = cell['energy_j_per_success']
        return np.inf if np.isnan(joules) else joules

    def cost_text(self, cell: CellResult) -> str:
        """Return the same with its unit."""
        cost = self.cost(cell)
        if self.cost_name == RUNS:
            return f'{figure(cost)} runs/s'
        return 'none completed' if np.isinf(cost) else f'{figure(cost)} J a completed task'

    def at_least_as_good(self, one: CellResult, other: CellResult) -> bool:
        """Tell whether one is as young and as cheap, and not shown to be less successful."""
        return (age(one) <= (1 + ROOM) * age(other)
                and self.cost(one) <= (1 + ROOM) * self.cost(other)
                and not self.shown_worse(one, other))

    def dominates(self, one: CellResult, other: CellResult) -> bool:
        """Tell whether one is at least as good in everything, and the other is not."""
        return self.at_least_as_good(one, other) and not self.at_least_as_good(other, one)

    @cached_property
    def front(self) -> list[CellResult]:
        """Return the cells that no other of them dominates."""
        return [cell for cell in self.cells
                if not any(self.dominates(other, cell) for other in self.cells)]

    @cached_property
    def dominating(self) -> list[CellResult]:
        """Return the cells that are at least as good as every other in everything."""
        return [cell for cell in self.cells
                if all(self.at_least_as_good(cell, other) for other in self.cells)]


@dataclass(frozen=True, slots=True)
class Family:
    """The conditions of one task and one kind of control."""

    name: str
    conditions: list[Condition]

    @property
    def cells(self) -> list[CellResult]:
        """Return all cells."""
        return [cell for condition in self.conditions for cell in condition.cells]

    @property
    def with_energy(self) -> list[Condition]:
        """Return the conditions whose cost is an energy."""
        return [condition for condition in self.conditions if condition.cost_name == ENERGY]

    @property
    def cost_name(self) -> str:
        """Return what stands for the cost in it."""
        names = {condition.cost_name for condition in self.conditions}
        return names.pop() if len(names) == 1 else f'cost ({ENERGY}, or {RUNS} without)'


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


def figure(value: float) -> str:
    """Return a number to three figures, never with an exponent."""
    return f'{value:,.0f}' if value >= 100 else f'{value:.3g}'


def choices(cells: Sequence[CellResult]) -> list[str]:
    """Return the configurations, each once."""
    return list(dict.fromkeys(cell.choice for cell in cells))


@lru_cache(maxsize=4096)
def fisher_p(few: int, few_of: int, many: int, many_of: int) -> float:
    """
    Return Fisher's exact p of two success rates, the lower one first: one tail, doubled.

    Parameters
    ----------
    few, many : int
        Successes.
    few_of, many_of : int
        Episodes.

    """
    total, trials = few + many, few_of + many_of
    logs = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])  # of factorials
    at_most = np.arange(max(0, total - many_of), few + 1)
    rest = total - at_most
    chances = (
        logs[few_of] - logs[at_most] - logs[few_of - at_most]
        + logs[many_of] - logs[rest] - logs[many_of - rest]
        - (logs[trials] - logs[total] - logs[trials - total]))
    return min(1.0, 2 * float(np.exp(chances).sum()))
