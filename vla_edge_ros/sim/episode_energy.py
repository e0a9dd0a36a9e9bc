"""Modelled energy of an episode in virtual time."""

from collections.abc import Sequence

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.runtime.runner import Outcome
from vla_edge_ros.runtime.step_result import StepResult
from vla_edge_ros.sim.tasks import TICK_HZ
from vla_edge_ros.telemetry.power_model import power_model
from vla_edge_ros.telemetry.work import abandoned, trace_columns, work_done


def episode_energy(
    device: str, steps: Sequence[StepResult], unfinished: Outcome | None, end_ns: int,
) -> dict[str, float] | None:
    """
    Return the energy of an episode by part, J.

    Parameters
    ----------
    device : str
        As of ``power_model``; empty gives None.
    steps : sequence of StepResult
        All ticks.
    unfinished : Outcome or None
        Of the run that was under way at the end.
    end_ns : int
        The end, virtual time.

    """
    if not device or not steps:
        return None
    work = work_done(trace_columns(steps), NS_PER_S // TICK_HZ)
    if unfinished is not None:
        work += abandoned(unfinished.stage_ns, unfinished.finished_ns)
    return power_model(device).joules(work, steps[0].scheduled_ns, end_ns)
