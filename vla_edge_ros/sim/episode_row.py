"""One episode with one configuration as a small row, the unit of a sweep."""

from collections import Counter
from collections.abc import Iterable, Mapping
import dataclasses
from dataclasses import dataclass
import math
from typing import Any

import numpy as np

from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.sim.simulator import EpisodeParameters, EpisodeResult, KEPT, Simulator
from vla_edge_ros.sim.tasks import TICK_HZ

STEPS_PER_MS = 10
"""Ages are kept in tenths of a millisecond."""
MAX_SIMULATORS = 8
"""One that draws takes 80 MB and 0.3 s to make; ten episodes with the policy take 2 s or more."""


@dataclass(frozen=True, slots=True)
class EpisodeSetup:
    """What one episode is run with, seed and index apart."""

    episode: EpisodeParameters
    loop: ControlLoopParameters


@dataclass(frozen=True, slots=True)
class EpisodeRow:
    """
    What is kept of an episode; equal episodes give equal rows.

    Parameters
    ----------
    succeeded : bool
        Whether the task was fulfilled.
    ticks, runs : int
        Ticks of the loop, and runs of the policy that ended.
    time_to_success_s : float or None
        Virtual time until then, s.
    decisions, reasons, causes : dict of str to int
        Ticks by name; names that never came are left out.
    ages : dict of str to dict of int to int
        Published actions by cause and by observation age, 0.1 ms.
    contact_ages : dict of int to int
        Contacts by the age of the action in force, 0.1 ms.
    energy_j : float or None
        Energy of the episode by the power model, J; None where nobody can tell.
    energy_parts_j : dict of str to float, or None
        The same by part: ``telemetry.work.PARTS``.
    events : dict of str to int
        What else happened in the task, by name.

    """

    succeeded: bool
    ticks: int
    runs: int
    time_to_success_s: float | None
    decisions: dict[str, int]
    reasons: dict[str, int]
    causes: dict[str, int]
    ages: dict[str, dict[int, int]]
    contact_ages: dict[int, int]
    energy_j: float | None = None
    energy_parts_j: dict[str, float] | None = None
    events: dict[str, int] = dataclasses.field(default_factory=dict)

    def to_mapping(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> 'EpisodeRow':
        """Return the row that JSON gave back; its ages have become text there."""
        values = dict(mapping)
        values['ages'] = {cause: _numbers(ages) for cause, ages in values['ages'].items()}
        values['contact_ages'] = _numbers(values['contact_ages'])
        return cls(**values)


def make_row(result: EpisodeResult) -> EpisodeRow:
    """Return the row of an episode."""
    ticks = sum(result.decisions.values())
    return EpisodeRow(
        succeeded=bool(result.succeeded),
        ticks=ticks,
        runs=result.runs,
        time_to_success_s=ticks / TICK_HZ if result.succeeded else None,
        decisions=_present(result.decisions),
        reasons=_present(result.reasons),
        causes=_present(result.causes),
        ages={
            str(cause): ages for cause in np.unique(result.age_causes)
            if (ages := _histogram(result.ages_ms[result.age_causes == cause]))},
        contact_ages=_histogram(result.contact_ages_ms),
        energy_j=None if result.energy_j is None else math.fsum(result.energy_j.values()),
        energy_parts_j=result.energy_j,
        events=dict(result.events or {}),
    )


class EpisodeRunner:
    """
    Runs single episodes of many configurations; keeps what they have in common.

    A GL context, a policy and two worlds are made once for all configurations that differ in
    delays, costs, schedule and speed only. Of more than ``MAX_SIMULATORS`` such sets, the one
    that was used least recently goes, and is made again when it is needed.

    """

    def __init__(self):
        self._simulators: dict[tuple, Simulator] = {}

    def run(self, setup: EpisodeSetup, seed: int, index: int) -> EpisodeRow:
        """
        Run one episode; what ran before makes no difference.

        Raises
        ------
        VlaEdgeError
            Policy, trace or renderer cannot be used.

        """
        key = tuple(getattr(setup.episode, name) for name in KEPT)
        simulator = self._simulators.pop(key, None) or self._make(setup)
        self._simulators[key] = simulator  # behind all others: used last
        if not simulator.runs_with(setup.episode, setup.loop):
            simulator.reconfigure(setup.episode, setup.loop)
        return make_row(simulator.run(seed, index))

    def _make(self, setup: EpisodeSetup) -> Simulator:
        while len(self._simulators) >= MAX_SIMULATORS:
            self._simulators.pop(next(iter(self._simulators))).close()
        return Simulator(setup.episode, loop=setup.loop)

    def close(self) -> None:
        """Free the GL contexts, in the thread that ran the episodes."""
        while self._simulators:
            self._simulators.popitem()[1].close()


def merge_ages(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Return the sum of histograms of ages, in rising order."""
    total: Counter[int] = Counter()
    for histogram in histograms:
        total.update(histogram)
    return dict(sorted(total.items()))


def expand_ages(histogram: Mapping[int, int]) -> np.ndarray:
    """Return the ages of a histogram one by one, float64 [actions], ms, in rising order."""
    steps = np.array(sorted(histogram), np.float64)
    return np.repeat(steps / STEPS_PER_MS, [histogram[step] for step in sorted(histogram)])


def _histogram(ages_ms: np.ndarray) -> dict[int, int]:
    steps = np.rint(ages_ms[~np.isnan(ages_ms)].astype(np.float64) * STEPS_PER_MS)
    values, counts = np.unique(steps.astype(np.int64), return_counts=True)
    return {int(value): int(count) for value, count in zip(values, counts)}


def _numbers(histogram: Mapping[str, int]) -> dict[int, int]:
    return {int(step): count for step, count in histogram.items()}


def _present(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items()) if count}
