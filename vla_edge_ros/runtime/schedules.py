"""
The schedules: when the policy runs, and how its chunks follow each other.

The control loop asks its schedule at every tick what is to be done, and hands it every chunk that
a run has brought. It is the schedule that a robot team chooses; each docstring says what it
promises about the *rate* of published actions, which is the loop's in every case, and about the
observation *age* of an action at its publication. There ``cost`` is the time of one run, ``wait``
that from a frame's stamp to the start of the run, at most the period of the camera.
"""

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple, Protocol

from vla_edge_ros.clock import Clock
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import ActionQueue
from vla_edge_ros.runtime.admission import (
    AdmissionController,
    Decision,
    DecisionKind,
    Reason,
)
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters


class Plan(NamedTuple):
    """
    What a tick does.

    Parameters
    ----------
    decision : Decision
        What it starts.
    waits : bool
        Whether it then waits for the run under way, until its deadline.
    if_missed : Reason
        What the tick says when it waited in vain.

    """

    decision: Decision
    waits: bool
    if_missed: Reason


class Arrival(NamedTuple):
    """
    A chunk that a run has brought.

    Parameters
    ----------
    chunk : ActionChunk
        The actions.
    started_ns, deadline_ns : int
        The tick that started the run, or the moment between two, and its deadline, steady time,
        ns.
    finished_ns : int
        End of the run, ns.
    tick_ns : int
        Scheduled time of the tick that can publish it first, ns.
    usable : bool
        False when instruction, reset or hold have come in between.

    """

    chunk: ActionChunk
    started_ns: int
    deadline_ns: int
    finished_ns: int
    tick_ns: int
    usable: bool


class Schedule(Protocol):
    """
    What the control loop asks of a schedule.

    Attributes
    ----------
    free_running : bool
        Whether the next run starts as soon as one ends, also between ticks.
    pauses : bool
        Whether the robot is held, by the safe action, from the end of a chunk to the next.

    """

    free_running: bool
    pauses: bool

    def at_tick(
        self, tick_ns: int, deadline_ns: int, look: Callable[[], Reason | None]
    ) -> Plan:
        """
        Say what the tick does.

        Parameters
        ----------
        tick_ns, deadline_ns : int
            Its scheduled time and its deadline, steady time, ns.
        look : callable
            Looks at the newest frame and returns the reason why no run can start, if any.

        """
        ...

    def at_arrival(self, arrival: Arrival) -> bool:
        """Do with a chunk what is to be done; return whether it came late."""
        ...


class _Base:
    """The parts that a schedule works with; it keeps no state of its own."""

    free_running = False
    pauses = False

    def __init__(
        self,
        parameters: ControlLoopParameters,
        admission: AdmissionController,
        queue: ActionQueue,
        steady: Clock,
    ):
        self._parameters = parameters
        self._admission = admission
        self._queue = queue
        self._steady = steady


class DeadlineSchedule(_Base):
    """
    Run at every tick in which a run, or taking in the frame, is expected to fit.

    A tick waits for its own run, until its deadline. A run that misses it blocks the ticks until
    it ends; ``late_results`` says whether its chunk is used then.

    Rate: an action at every tick while ``max_consecutive_fallbacks`` and ``max_action_age_ms``
    bridge the runs that were refused or late; a new chunk at every tick that admits one.
    Age: a fresh action is at most ``wait`` + ``deadline_ms`` old whatever the engine does (and a
    period more with ``publish: on_tick``); a queued one is older by the time since, a late one by
    what its run took too long.
    """

    def at_tick(self, tick_ns, deadline_ns, look):
        """Start what admission admits."""
        refused = look()
        if refused is not None:
            return Plan(self._admission.refuse(refused), False, refused)
        decision = self._admission.decide(self._steady.now_ns(), deadline_ns)
        waits = decision.kind is DecisionKind.FULL and self._parameters.publish == 'on_ready'
        return Plan(decision, waits, Reason.DEADLINE_MISSED)

    def at_arrival(self, arrival):
        """Take a chunk in time, and one that is late if it is to be used."""
        parameters = self._parameters
        tick_is_over = parameters.publish == 'on_ready' and arrival.tick_ns != arrival.started_ns
        late = tick_is_over or arrival.finished_ns > arrival.deadline_ns
        if arrival.usable and not (late and parameters.late_results == 'discard'):
            self._queue.push(arrival.chunk, arrival.started_ns, late)
        return late


class _OnRequest(_Base):
    """A run starts when it is wanted, whatever it costs, and every chunk is used."""

    def at_tick(self, tick_ns, deadline_ns, look):
        """Start a run if one is wanted; wait only where there is nothing to publish."""
        if not self._wants_run(tick_ns):
            decision = self._admission.refuse(Reason.PLAYING)
        elif (refused := look()) is not None:
            decision = self._admission.refuse(refused)
        else:
            decision = self._admission.request(self._steady.now_ns())
        waits = self._parameters.publish == 'on_ready' and not self._queue.ready(tick_ns)
        return Plan(decision, waits, decision.reason)

    def at_arrival(self, arrival):
        """Take the chunk; it is late when a tick has found the one before used up."""
        late = self._queue.ran_out
        if arrival.usable:
            self._take(arrival, late)
        return late

    def _wants_run(self, tick_ns: int) -> bool:
        """Tell whether a run is wanted at a tick that finds none under way."""
        raise NotImplementedError

    def _take(self, arrival: Arrival, late: bool) -> None:
        self._queue.push(arrival.chunk, arrival.started_ns, late)


class SyncSchedule(_OnRequest):
    """
    Hold the robot while the policy thinks, then play the whole chunk from its first action.

    A run starts at the tick that finds the chunk used up; from there until the next chunk comes
    the robot gets the safe action, by the cause ``thinking``.

    Rate: new actions come for ``chunk_steps`` ticks, then none for the time of a run, so a
    share ``chunk time`` / (``chunk time`` + ``cost``) of the ticks moves the robot.
    Age: ``wait`` + ``cost`` for the first action of a chunk, one period more for each that
    follows; ``max_action_age_ms`` counts from the start of the run and must leave room for both.
    """

    pauses = True

    def at_arrival(self, arrival):
        """Play the chunk from its first action on, from the next tick on."""
        if arrival.usable:
            self._queue.push(
                arrival.chunk, arrival.tick_ns, observed_ns=arrival.started_ns)
        return False

    def _wants_run(self, tick_ns):
        return self._queue.remaining(tick_ns) == 0


class OverlapSchedule(_OnRequest):
    """
    Ask for the next chunk while at least ``100 - overlap_percent`` % of this one were played.

    The new chunk enters by the time that really passed since its run started: actions that were
    meant for the past are dropped, and the robot goes on with the one for now. With ``seam:
    blend`` the actions that both chunks have are mixed, and their age is the mean of the ages of
    their images, weighted in the same way.

    Rate: no gap as long as the part that is left when a run starts lasts for ``cost``; otherwise
    the last action is held, and the chunk that ends the gap counts as late.
    Age: from ``wait`` + ``cost``, when a chunk enters, to ``wait`` + ``cost`` and the longer of
    ``cost`` and the part of the chunk that is played before the next run starts; all rounded up
    to ticks.
    """

    def _wants_run(self, tick_ns):
        rows, remaining = self._queue.rows, self._queue.remaining(tick_ns)
        return 100 * remaining <= self._parameters.overlap_percent * rows

    def _take(self, arrival, late):
        blend_from_ns = arrival.tick_ns if self._parameters.seam == 'blend' else None
        self._queue.push(
            arrival.chunk, arrival.started_ns, late, blend_from_ns=blend_from_ns)


class LatestSchedule(_OnRequest):
    """
    Run without a pause; the newest chunk wins as soon as it is there.

    A run starts the moment the one before ends, also between two ticks, if there is a new frame
    by then, otherwise at the next tick that finds one. Chunks enter by the time that really
    passed, as with ``overlap``.

    Rate: no gap as long as a chunk lasts for two runs and a tick.
    Age: between ``wait`` + ``cost`` and ``wait`` + 2 ``cost``, plus the wait for a tick. This is
    the youngest an engine slower than the period can give; it also computes the most, and drops
    chunks that no tick published when several runs fit into one period.
    """

    free_running = True

    def _wants_run(self, tick_ns):
        return True


SCHEDULES = MappingProxyType({
    'deadline': DeadlineSchedule,
    'sync': SyncSchedule,
    'overlap': OverlapSchedule,
    'latest': LatestSchedule,
})
"""By the name that the parameter ``schedule`` gives them."""
