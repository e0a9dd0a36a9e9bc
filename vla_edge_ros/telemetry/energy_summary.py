"""The energy of a run for ``summary.json``: by part of the work, and per completed task."""

from collections.abc import Mapping
import math
from typing import Any

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.telemetry.energy import EnergyMeter, IDLE, UNAVAILABLE
from vla_edge_ros.telemetry.power_model import power_model
from vla_edge_ros.telemetry.work import PARTS, run_span_ns, work_done, work_intervals

NO_MODEL = f'{UNAVAILABLE}: virtual time draws no power, and no power model is given'


def measured_energy(
    meter: EnergyMeter, trace: Mapping[str, np.ndarray], period_ms: float, completed: int | None,
    episodes: int | None = None,
) -> dict[str, Any] | str:
    """
    Return what a run used, of every source by its name; sources overlap and are never added up.

    Parameters
    ----------
    meter : EnergyMeter
        Has sampled on the trace's steady clock, from before its first tick to behind its last.
    trace : mapping of str to array
        Columns as ``read_trace`` returns them.
    period_ms : float
        The period of the loop, ms.
    completed : int or None
        Tasks that were fulfilled, None where nobody counts them.
    episodes : int or None
        Tasks that were tried.

    Returns
    -------
    dict or str
        What a source measured, as :func:`energy_figures` has it, with ``resolution_ms`` and
        ``faults``; or 'unavailable: ' and why, of a source or of all.

    """
    if not len(trace['tick']):
        return f'{UNAVAILABLE}: the loop had no tick'
    period_ns = round(period_ms * NS_PER_MS)
    start_ns, end_ns = run_span_ns(trace, period_ns)
    told = meter.report(start_ns, end_ns, work_intervals(trace, period_ns))
    if not any(isinstance(source, dict) for source in told.values()):
        reasons = '; '.join(f'{name}: {text.removeprefix(f"{UNAVAILABLE}: ")}'
                            for name, text in told.items())  # fmt: skip
        return f'{UNAVAILABLE}: {reasons or "no source"}'
    return {
        name: source if isinstance(source, str) else {
            **energy_figures(source['joules_by_kind'], completed, episodes),
            **{key: source[key] for key in (
                'measured_s', 'unmeasured_s', 'resolution_ms', 'faults')}}
        for name, source in told.items()}


def modelled_energy(
    device: str, trace: Mapping[str, np.ndarray], period_ns: int, completed: int | None = None,
) -> dict[str, Any] | str:
    """
    Return what a run in virtual time comes to by a power model, or that there is none.

    Parameters
    ----------
    device : str
        As of ``power_model``, or empty.
    trace, completed
        As of :func:`measured_energy`.
    period_ns : int
        The period of the loop, ns.

    """
    if not device:
        return NO_MODEL
    if not len(trace['tick']):
        return f'{UNAVAILABLE}: the loop had no tick'
    model = power_model(device)
    joules = model.joules(work_done(trace, period_ns), *run_span_ns(trace, period_ns))
    return {f'model {device}': {**energy_figures(joules, completed), **model.about()}}


def energy_figures(
    joules: Mapping[str, float | None], completed: int | None, episodes: int | None = None,
) -> dict[str, Any]:
    """
    Return the figures of one source or model.

    Parameters
    ----------
    joules : mapping of str to float or None
        By part; a part that is not there took no time, one that is None was not measured.
    completed, episodes : int or None
        Tasks that were fulfilled, and that were tried.

    Returns
    -------
    dict
        ``joules``, ``joules_by_part`` with all of ``PARTS``, ``idle_share``,
        ``joules_per_completed_task`` and ``joules_per_episode``, None where none was.

    """
    parts = {part: joules.get(part, 0.0) for part in PARTS}
    total = math.fsum(value for value in parts.values() if value is not None)
    return {
        'joules': total,
        'joules_by_part': parts,
        'idle_share': parts[IDLE] / total if total and parts[IDLE] is not None else None,
        'joules_per_completed_task': total / completed if completed else None,
        'joules_per_episode': total / episodes if episodes else None,
    }


def energy_text(energy: Mapping[str, Any] | str) -> str:
    """Return the figures of one source or model in a line."""
    if isinstance(energy, str):
        return energy
    parts = ', '.join(f'{part} {joules:.1f}' for part, joules in energy['joules_by_part'].items()
                      if joules)  # fmt: skip
    per_task = energy['joules_per_completed_task']
    task = '' if per_task is None else f'{per_task:.2f} J a completed task, '
    model = f'; model of {energy["model"]}, not measured' if 'model' in energy else ''
    return f'{task}{energy["joules"]:.1f} J ({parts}){model}'
