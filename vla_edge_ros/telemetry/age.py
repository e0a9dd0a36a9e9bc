"""Observation age at execution: how old the picture was when its action was published."""

from collections.abc import Mapping

import numpy as np


def percentiles(values: np.ndarray, points: tuple[int, ...]) -> dict[str, float | None]:
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


def age_by_cause(trace: Mapping[str, np.ndarray]) -> dict[str, dict[str, float | None]]:
    """
    Return ``count``, p50, p95, p99 and max of the observation age, ms, by cause.

    Parameters
    ----------
    trace : mapping of str to array
        Columns as ``read_trace`` returns them. Repeated and queued actions count with the age
        of the picture they go back to; ticks that publish nothing have no age.

    """
    ages_ms = trace['observation_age_ms']
    by_cause = {}
    for cause in np.unique(trace['cause']):
        of_cause = ages_ms[trace['cause'] == cause]
        count = int(np.count_nonzero(~np.isnan(of_cause)))
        by_cause[str(cause)] = {'count': count, **percentiles(of_cause, (50, 95, 99))}
    return by_cause
