"""
Observation age at execution: how old the picture was when its action was published.

Every publication counts, also that of a queued, repeated or held action, with the age of the
picture it goes back to. An action that goes back to none, such as zeros, has no age.
"""

from collections import deque
from collections.abc import Iterable, Mapping

import numpy as np

POINTS = (50, 95, 99)
WINDOW = 900
"""Actions that a live report tells of: the last 30 s at 30 Hz."""


def percentiles(values: np.ndarray, points: tuple[int, ...] = POINTS) -> dict[str, float | None]:
    """
    Return ``p<point>`` for every point, and ``max``; all None when there are no values.

    NaNs are left out.
    """
    values = values[~np.isnan(values)]
    names = [*(f'p{point}' for point in points), 'max']
    if not values.size:
        return dict.fromkeys(names)
    found = np.percentile(values, (*points, 100))
    return {name: float(value) for name, value in zip(names, found)}


def group_ages(causes: Iterable[str], ages_ms: np.ndarray) -> dict[str, dict[str, float | None]]:
    """Return ``count``, p50, p95, p99 and max of the ages, ms, by cause; NaN is none."""
    causes = np.asarray(causes, dtype=str)
    by_cause = {}
    for cause in np.unique(causes):
        of_cause = ages_ms[causes == cause]
        count = int(np.count_nonzero(~np.isnan(of_cause)))
        by_cause[str(cause)] = {'count': count, **percentiles(of_cause)}
    return by_cause


def age_by_cause(trace: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """Return :func:`group_ages` of a trace, whose columns are as ``read_trace`` returns them."""
    return group_ages(trace['cause'], trace['observation_age_ms'])


def ages_at_contact(trace: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """
    Return the ages, ms, of the actions that were in force when the tool met its object.

    None where the trace does not know of contacts. A contact is told by the tick that comes
    after it, so the action in force is the last one that an earlier tick published.
    """
    contact = trace['contact']
    if not (contact >= 0).any():
        return None
    acted = np.flatnonzero(~np.isnan(trace['action_0']))
    before = np.searchsorted(acted, np.flatnonzero(contact == 1)) - 1
    ages_ms = trace['observation_age_ms'][acted[before[before >= 0]]]
    return ages_ms[~np.isnan(ages_ms)]


class AgeWindow:
    """
    The ages of the newest actions, for a live report; one thread adds, another one reads.

    Parameters
    ----------
    size : int
        How many actions it keeps.

    """

    def __init__(self, size: int = WINDOW):
        self._newest: deque[tuple[str, float]] = deque(maxlen=size)

    def add(self, cause: str, age_ms: float) -> None:
        """Take the age of an action just published, ms; NaN for none."""
        self._newest.append((cause, age_ms))

    def summary(self) -> dict[str, float | None]:
        """
        Return the percentiles of all ages, and of those of each cause, by flat names.

        ``observation_age_p99_ms`` is one of all, ``observation_age.hold.p99_ms`` one of a cause.
        """
        # Copied in one go: the other thread cannot append in between.
        newest = self._newest.copy()
        causes = [cause for cause, _ in newest]
        ages_ms = np.array([age_ms for _, age_ms in newest])
        told = {f'observation_age_{key}_ms': value for key, value in percentiles(ages_ms).items()}
        for cause, figures in group_ages(causes, ages_ms).items():
            del figures['count']
            told |= {f'observation_age.{cause}.{key}_ms': v for key, v in figures.items()}
        return {key: round(value, 3) for key, value in told.items() if value is not None}
