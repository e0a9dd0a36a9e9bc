"""
What the time of a run went into, told from its trace: the intervals that energy is shared out by.

A trace tells how long a run took and in which tick it was collected, not when it began. It is
taken to have ended when that tick's action went out, or when the run after it began: exact for the
schedule ``deadline``, at most a period late with the others.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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


class Work(NamedTuple):
    """Something done: to which part it counts, and what the device was doing."""

    part: str
    stage: str
    start_ns: int
    end_ns: int


def trace_columns(results: Sequence[Any]) -> dict[str, np.ndarray]:
    """Return of ``StepResult``s the columns that :func:`work_done` needs."""
    names = ('scheduled_ns', 'published_ns', 'reason', 'runs', 'late', *_STAGES)
    return {name: np.array([_plain(getattr(result, name)) for result in results])
            for name in names}  # fmt: skip


def work_done(trace: Mapping[str, np.ndarray], period_ns: int) -> list[Work]:
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
    found: list[Work] = []  # from the last to the first, each as late as it can have been
    free_ns = int(np.iinfo(np.int64).max)

    def add(part: str, stage: str, starts_ns: int, ends_ns: int) -> None:
        nonlocal free_ns
        if starts_ns < ends_ns:
            found.append(Work(part, stage, starts_ns, ends_ns))
            free_ns = starts_ns

    for tick in range(len(trace['runs']) - 1, -1, -1):
        reason, runs = str(trace['reason'][tick]), max(int(trace['runs'][tick]), 0)
        published_ns, due_ns = (
            int(trace[name][tick]) for name in ('published_ns', 'scheduled_ns'))
        if reason in REFUSALS:
            begins_ns = published_ns if runs else due_ns
            add(REFUSED, IDLE, begins_ns, min(due_ns + period_ns, free_ns))
        free_ns = min(free_ns, published_ns) if runs else free_ns
        for part in reversed(_parts(runs, bool(trace['late'][tick]), reason)):
            for stage, ms in ((DECODE, decode_ms[tick]), (PREFILL, observe_ms[tick])):
                add(part or stage, stage, free_ns - int(ms * NS_PER_MS), free_ns)
    return found[::-1]


def abandoned(stage_ns: Mapping[Stage, int], finished_ns: int) -> list[Work]:
    """Return the work of a run whose outcome nobody collected; it would have ended then."""
    decode_ns = stage_ns.get(Stage.DECODE, 0)
    starts_ns = finished_ns - sum(stage_ns.values())
    return [Work(LATE, PREFILL, starts_ns, finished_ns - decode_ns),
            Work(LATE, DECODE, finished_ns - decode_ns, finished_ns)]  # fmt: skip


def work_intervals(trace: Mapping[str, np.ndarray], period_ns: int) -> list[Interval]:
    """Return :func:`work_done` as what an ``EnergyMeter`` shares energy out by."""
    return [Interval(work.part, work.start_ns, work.end_ns)
            for work in work_done(trace, period_ns)]  # fmt: skip


def run_span_ns(trace: Mapping[str, np.ndarray], period_ns: int) -> tuple[int, int]:
    """Return when a run began and ended: from its first tick to a period behind its last."""
    return int(trace['scheduled_ns'][0]), int(trace['scheduled_ns'][-1]) + period_ns


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


def _parts(runs: int, late: bool, reason: str) -> list[str | None]:
    """Return for each run of a tick the part that it counts to as a whole, None for its stages."""
    parts: list[str | None] = [None] * runs
    if runs:
        parts[-1] = {'probe': RETRIES, 'policy_error': LATE}.get(reason)
    if runs and late:  # the run that was under way when the tick began is the first
        parts[0] = LATE
    return parts


def _plain(value: Any) -> Any:
    return getattr(value, 'value', value)
