"""
What the time of a run went into, told from its trace: the intervals that energy is shared out by.

A trace tells how long a run took and in which tick it was collected, not when it began. It is
taken to have ended when that tick's action went out: exact for the schedule ``deadline``, at most
a period late with the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.telemetry.energy import IDLE, Interval
from vla_edge_ros.telemetry.stages import Stage

PREFILL, DECODE = 'prefill', 'decode'
"""Taking in the frame, encoder included, and decoding the chunk."""
REFUSED = 'refused'
"""What was left of a tick in which a run was refused for want of time: idle time that it cost."""
LATE = 'late_or_aborted'
"""A whole run whose chunk came late, or that ended in an error."""
RETRIES = 'retries'
"""A whole run that was tried though it seemed not to fit: a probe."""
PARTS = (IDLE, PREFILL, DECODE, REFUSED, LATE, RETRIES)
REFUSALS = ('over_budget', 'deadline_passed')
"""The reasons of admission not to run at all; no frame or no instruction is no refusal."""


def trace_columns(results: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return of ``StepResult``s the columns that :func:`work_intervals` needs."""
    names = ('scheduled_ns', 'published_ns', 'reason', 'runs', 'late', *_STAGES)
    return {name: np.array([_plain(getattr(result, name)) for result in results])
            for name in names}  # fmt: skip


def work_intervals(trace: Mapping[str, np.ndarray], period_ns: int) -> list[Interval]:
    """
    Return what was done when, in order and without overlaps; all other time was idle.

    Parameters
    ----------
    trace : mapping of str to array [ticks]
        Columns as ``read_trace`` or :func:`trace_columns` return them.
    period_ns : int
        The period of the loop, ns.

    Notes
    -----
    Of several runs in one tick, as ``latest`` has them, the trace tells the last one's cost, and
    the others are taken to have cost the same.

    """
    stages_ms = np.nan_to_num(np.array([trace[name] for name in _STAGES], float))
    decode_ms = stages_ms[_STAGES.index(_DECODE)]
    observe_ms = stages_ms.sum(axis=0) - decode_ms
    found: list[Interval] = []
    free_ns = 0
    for tick, runs in enumerate(trace['runs'].tolist()):
        reason = str(trace['reason'][tick])
        costs_ns = [int(ms[tick] * NS_PER_MS) for ms in (observe_ms, decode_ms)]
        kinds = _kinds(max(runs, 0), bool(trace['late'][tick]), reason)
        ends_ns = int(trace['published_ns'][tick])
        # Where a trace claims more work than there was time, all of it shrinks alike.
        wanted_ns = sum(costs_ns) * len(kinds)
        starts_ns = max(ends_ns - wanted_ns, free_ns)
        scale = min((ends_ns - starts_ns) / wanted_ns, 1.0) if wanted_ns else 0.0
        for of_observing, of_decoding in kinds if scale > 0 else ():
            for kind, cost_ns in zip((of_observing, of_decoding), costs_ns):
                until_ns = starts_ns + int(cost_ns * scale)
                if cost_ns:
                    found.append(Interval(kind, starts_ns, until_ns))
                starts_ns = free_ns = until_ns
        if reason in REFUSALS:
            scheduled_ns = int(trace['scheduled_ns'][tick])
            free_ns = max(free_ns, scheduled_ns)
            found.append(Interval(REFUSED, free_ns, max(free_ns, scheduled_ns + period_ns)))
            free_ns = found[-1].end_ns
    return found


def seconds_by_part(
    intervals: Sequence[Interval], start_ns: int, end_ns: int,
) -> dict[str, float]:
    """Return how much of a run, s, went into each of ``PARTS``."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for kind, begins_ns, ends_ns in intervals:
        inside_ns = min(ends_ns, end_ns) - max(begins_ns, start_ns)
        seconds[kind] += max(inside_ns, 0) * 1e-9
    seconds[IDLE] = max((end_ns - start_ns) * 1e-9 - sum(seconds.values()), 0.0)
    return seconds


_STAGES = tuple(f'{stage.value}_ms' for stage in Stage)
_DECODE = f'{Stage.DECODE.value}_ms'


def _kinds(runs: int, late: bool, reason: str) -> list[tuple[str, str]]:
    """Return for each run of a tick what its observing and its decoding count as."""
    last = {'probe': RETRIES, 'policy_error': LATE}.get(reason)
    kinds = [(PREFILL, DECODE)] * runs
    if runs and last:
        kinds[-1] = (last, last)
    if runs and late:  # the run that was under way when the tick began is the first
        kinds[0] = (LATE, LATE)
    return kinds


def _plain(value: Any) -> Any:
    return getattr(value, 'value', value)
