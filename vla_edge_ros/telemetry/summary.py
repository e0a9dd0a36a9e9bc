"""The summary of a run, computed from its trace; these keys are scripted against."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from vla_edge_ros.clock import NS_PER_MS, NS_PER_S
from vla_edge_ros.telemetry.age import age_by_cause, ages_at_contact, percentiles
from vla_edge_ros.telemetry.energy import UNAVAILABLE

SILENT_CAUSES = ('waiting', 'operator_hold', 'thinking', 'safe_stop')
"""The causes that may publish nothing; any other names an action."""


def summarize(
    trace: Mapping[str, np.ndarray],
    *,
    period_ms: float,
    camera: Mapping[str, int] | None = None,
    episodes: int | None = None,
    success_rate: float | None = None,
    cpu_percent: Mapping[str, float] | None = None,
    energy: Mapping[str, Any] | str = UNAVAILABLE,
) -> dict[str, Any]:
    """
    Return the content of ``summary.json``; what was not measured is None, never 0.

    Parameters
    ----------
    trace : mapping of str to array
        Columns as ``read_trace`` returns them.
    period_ms : float
        The period the loop was to keep, ms.
    camera : mapping, optional
        Frames ``published`` and ``received``.
    episodes : int, optional
        Episodes run.
    success_rate : float, optional
        Share of them that succeeded.
    cpu_percent : mapping, optional
        Mean CPU use of each node, % of one core.
    energy : mapping or str
        As of ``measured_energy``, or why there is none.

    Notes
    -----
    The rate and the deviation are taken from the moments of publication of successive actions,
    as a receiver meets them; a tick that published nothing shows up as a long interval. A tick
    is unexplained when it has neither an action nor a cause that says why, and so is one that
    was due between two others and never ran. Intervals over which the clock was set back are
    left out.

    """
    has_action = ~np.isnan(trace['action_0'])
    silent = ~has_action & ~np.isin(trace['cause'], SILENT_CAUSES)
    skipped = np.rint(np.diff(trace['scheduled_ns']) / NS_PER_MS / period_ms).astype(int) - 1
    intervals_ns = np.diff(trace['published_ns'][has_action])
    intervals_ns = intervals_ns[intervals_ns > 0]
    decisions, counts = np.unique(trace['decision'], return_counts=True)
    return {
        'ticks': len(trace['tick']),
        'action_rate_hz': (float(NS_PER_S / intervals_ns.mean()) if intervals_ns.size else None),
        'period_deviation_ms': percentiles(np.abs(intervals_ns / NS_PER_MS - period_ms), (50, 99)),
        'decisions': {str(name): int(count) for name, count in zip(decisions, counts)},
        'unexplained_ticks': int(np.count_nonzero(silent) + skipped.clip(0).sum()),
        'camera': _camera(camera),
        'observation_age_ms': percentiles(trace['observation_age_ms']),
        'observation_age_by_cause': age_by_cause(trace),
        'observation_age_at_contact_ms': contact_summary(ages_at_contact(trace)),
        'episodes': episodes,
        'success_rate': success_rate,
        'cpu_percent': dict(cpu_percent) if cpu_percent else None,
        'energy': energy if isinstance(energy, str) else dict(energy),
    }


def contact_summary(ages_ms: np.ndarray | None) -> dict[str, float | None] | None:
    """Return ``count`` and percentiles of the ages at contact, or None where nobody could tell."""
    return None if ages_ms is None else {'count': len(ages_ms), **percentiles(ages_ms)}


def _camera(camera: Mapping[str, int] | None) -> dict[str, float | None]:
    published = camera.get('published') if camera else None
    received = camera.get('received') if camera else None
    lost = None
    if published and received is not None:
        lost = (published - received) / published
    return {'published': published, 'received': received, 'lost_fraction': lost}
