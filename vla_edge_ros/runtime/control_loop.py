"""
The control loop: one straight line from the newest frame to the published action.

A host (ROS node, replay, simulator) calls ``tick`` once a period and publishes what it returns,
and ``between_ticks`` in between. When the policy runs is the business of the schedule.
Two clocks are injected: ``steady`` times deadlines and durations, ``clock`` is ROS time, which
image stamps and ages are told in; in virtual time both are the same clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
import math

import numpy as np

from vla_edge_ros.clock import Clock, NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters, Cause
from vla_edge_ros.runtime.admission import (
    AdmissionController,
    AdmissionParameters,
    Decision,
    DecisionKind,
    Reason,
)
from vla_edge_ros.runtime.input_gate import FrameSource, InputGate
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.runtime.policy_job import Policy, PolicyJob
from vla_edge_ros.runtime.runner import Outcome, Runner
from vla_edge_ros.runtime.schedules import Arrival, SCHEDULES
from vla_edge_ros.runtime.step_result import StepResult
from vla_edge_ros.telemetry.stages import Stage


@dataclass(slots=True)
class _Gathered:
    """What came of runs since the tick before."""

    outcome: Outcome | None = None
    error: Exception | None = None
    late: bool = False
    runs: int = 0
    started: Decision | None = None


class ControlLoop:
    """
    Turn frames into actions, once a period; one thread calls ``tick``.

    The request methods (``set_instruction``, ``set_hold``, ``reset``, ``set_parameters``) may be
    called from any thread; they take effect at the start of the next tick, and reach the policy
    at the start of its next run, never during one. A result computed under an earlier
    instruction or before a reset or hold is not used.

    Parameters
    ----------
    policy, frame_source, admission, queue, runner
        The parts; the loop owns none of them, the host closes the runner.
    clock : Clock
        ROS time.
    steady : Clock
        Monotonic time, the runner's.
    parameters : ControlLoopParameters, optional
        Timing, schedule and input limits.
    read_proprioception : callable, optional
        Returns the joint state as the caller's own array with the steady time of its reception,
        ns; or None while there is none.

    Attributes
    ----------
    instruction : str or None
        The instruction that the policy follows.
    counts, causes : dict of str to int
        Ticks so far by reason and by cause.

    """

    def __init__(
        self,
        policy: Policy,
        frame_source: FrameSource,
        admission: AdmissionController,
        queue: ActionQueue,
        runner: Runner,
        clock: Clock,
        steady: Clock,
        parameters: ControlLoopParameters | None = None,
        read_proprioception: Callable[[], tuple[np.ndarray, int] | None] | None = None,
    ):
        self.admission = admission
        self.queue = queue
        self.instruction: str | None = None
        self.counts = {reason.value: 0 for reason in Reason}
        self.causes = {cause.value: 0 for cause in Cause}
        self._policy = policy
        self._gate = InputGate(frame_source, read_proprioception, clock, steady)
        self._runner = runner
        self._clock = clock
        self._steady = steady
        self._requests: deque[Callable[[], None]] = deque()
        self._new_instruction: str | None = None
        self._reset_policy = False
        self._epoch = 0
        self._job: PolicyJob | None = None
        self._gathered = _Gathered()
        self._tick = 0
        self._frame_sequence: int | None = None
        self._retained_frames: int | None = None
        self.parameters = parameters or ControlLoopParameters()

    @property
    def parameters(self) -> ControlLoopParameters:
        """Return the parameters in force; setting them starts the schedule afresh."""
        return self._parameters

    @parameters.setter
    def parameters(self, parameters: ControlLoopParameters) -> None:
        self._parameters = parameters
        make_schedule = SCHEDULES[parameters.schedule]
        self._schedule = make_schedule(parameters, self.admission, self.queue, self._steady)

    def set_instruction(self, text: str) -> None:
        """
        Follow a new instruction, keeping the frames seen so far.

        Raises
        ------
        ConfigError
            The text is blank. One that the policy refuses is a ``policy_error`` of a later tick,
            and the instruction before it stays.

        """
        if not text.strip():
            raise ConfigError('instruction', 'must not be blank', text)
        self._requests.append(lambda: self._apply_instruction(text))

    def set_hold(self, engaged: bool) -> None:
        """Engage or release the operator hold."""
        self._requests.append(lambda: self._apply_hold(engaged))

    def reset(self) -> None:
        """Forget frames and actions, keep instruction and estimates."""
        self._requests.append(self._apply_reset)

    def set_parameters(
        self, parameters: ControlLoopParameters | AdmissionParameters | ActionQueueParameters
    ) -> None:
        """Replace the parameter set of that type."""
        owner = {
            ControlLoopParameters: self,
            AdmissionParameters: self.admission,
            ActionQueueParameters: self.queue,
        }[type(parameters)]
        self._requests.append(lambda: setattr(owner, 'parameters', parameters))

    def tick(self, scheduled_ns: int) -> StepResult:
        """
        Do one period's work and return what is to be published now.

        Parameters
        ----------
        scheduled_ns : int
            When this tick was due on the steady clock, ns.

        """
        started_ns = self._steady.now_ns()
        while self._requests:
            self._requests.popleft()()
        deadline_ns = scheduled_ns + int(self.parameters.deadline_ms * NS_PER_MS)
        if self._runner.busy:
            self._collect(self._runner.wait(started_ns), scheduled_ns)

        self._frame_sequence = None
        plan = self._schedule.at_tick(scheduled_ns, deadline_ns, self._look)
        decision, reason = plan.decision, plan.decision.reason
        if decision.kind is not DecisionKind.REFUSE:
            self._start(decision, scheduled_ns, deadline_ns)
        elif reason is Reason.BUSY and self._gathered.started is not None:
            decision, reason = self._gathered.started, self._gathered.started.reason
        if plan.waits and self._runner.busy:
            outcome = self._runner.wait(deadline_ns)
            self._collect(outcome, scheduled_ns)
            if outcome is None:
                reason = plan.if_missed
        if self._gathered.error is not None:
            reason = Reason.POLICY_ERROR
        return self._publish(scheduled_ns, started_ns, decision, reason)

    def between_ticks(self, until_ns: int) -> None:
        """
        Let a free-running schedule go on until ``until_ns``, steady time, the next tick's at most.

        It returns at once where there is nothing to do, which is always so with the others, and
        leaves what was requested meanwhile to the next tick.
        """
        while self._schedule.free_running and not self._requests:
            if not self._runner.busy:
                if self._look(at_tick=False) is not None:
                    return
                now_ns = self._steady.now_ns()
                self._gathered.started = self.admission.request(now_ns)
                self._start(self._gathered.started, now_ns, until_ns)
            outcome = self._runner.wait(until_ns)
            if outcome is None:
                return
            self._collect(outcome, until_ns)

    def _look(self, at_tick: bool = True) -> Reason | None:
        """Look at the newest frame; return why no run can start with it, if so."""
        if self.queue.held:
            return Reason.OPERATOR_HOLD
        if self._runner.busy:
            return Reason.BUSY
        if self.instruction is None and self._new_instruction is None:
            return Reason.NO_INSTRUCTION
        reason = self._gate.look(self.parameters, at_tick)
        frame = self._gate.frame
        self._frame_sequence = None if frame is None else frame.sequence
        return reason

    def _start(self, decision: Decision, started_ns: int, deadline_ns: int) -> None:
        self._job = PolicyJob(
            self._policy,
            self._steady,
            self._gate.frame,
            self._gate.proprioception,
            decision.kind is DecisionKind.FULL,
            self._reset_policy,
            self._new_instruction,
            started_ns,
            deadline_ns,
            self._epoch,
        )
        self._reset_policy, self._new_instruction = False, None
        self._gate.mark_observed()
        self._runner.start(self._job)

    def _collect(self, outcome: Outcome | None, tick_ns: int) -> None:
        """Feed the estimates and the schedule with what a run left, if it has ended."""
        if outcome is None:
            return
        job, self._job = self._job, None
        gathered = self._gathered
        gathered.outcome = outcome
        gathered.error = gathered.error or outcome.error
        gathered.runs += 1
        if job.prepared and job.instruction is not None:
            self.instruction = job.instruction
        if outcome.observation is not None:
            self._retained_frames = outcome.observation.num_frames
            observe_ns = sum(outcome.stage_ns.values()) - outcome.stage_ns.get(Stage.DECODE, 0)
            self.admission.observe(Stage.PREFILL, observe_ns)
        if outcome.chunk is None:
            return
        self.admission.observe(Stage.DECODE, outcome.stage_ns.get(Stage.DECODE, 0))
        gathered.late |= self._schedule.at_arrival(Arrival(
            chunk=outcome.chunk.first(self.parameters.chunk_steps),
            started_ns=job.scheduled_ns,
            deadline_ns=job.deadline_ns,
            finished_ns=outcome.finished_ns,
            tick_ns=tick_ns,
            usable=job.epoch == self._epoch,
        ))

    def _publish(
        self, scheduled_ns: int, started_ns: int, decision: Decision, reason: Reason
    ) -> StepResult:
        gathered, self._gathered = self._gathered, _Gathered()
        pauses = self._schedule.pauses
        queued = self.queue.take(scheduled_ns, pauses, thinking=pauses and self._runner.busy)
        stamp_ns = self._clock.now_ns()
        observation_stamp_ns, age_ms = None, math.nan
        if queued.chunk is not None:
            observation_stamp_ns = queued.chunk.observation_stamp_ns
            if queued.action is not None:
                age_ms = (stamp_ns - observation_stamp_ns) / NS_PER_MS
        outcome = gathered.outcome
        observation = outcome.observation if outcome is not None else None
        stage_ns = outcome.stage_ns if outcome is not None else {}
        result = StepResult(
            tick=self._tick,
            scheduled_ns=scheduled_ns,
            started_ns=started_ns,
            published_ns=self._steady.now_ns(),
            action_stamp_ns=stamp_ns,
            decision=decision.kind,
            reason=reason,
            cause=queued.cause,
            frame_sequence=self._frame_sequence,
            observation_stamp_ns=observation_stamp_ns,
            observation_age_ms=age_ms,
            chunk_index=queued.chunk_index,
            estimate_ms=decision.estimate_ms,
            budget_ms=decision.budget_ms,
            **{f'{stage.value}_ms': stage_ns.get(stage, math.nan) / NS_PER_MS for stage in Stage},
            late=gathered.late,
            evicted_frame=None if observation is None else observation.evicted_frame_id,
            retained_frames=self._retained_frames,
            schedule=self.parameters.schedule,
            runs=gathered.runs,
            contact=None,
            action=queued.action,
            chunk=queued.chunk,
            error=gathered.error,
        )
        self._tick += 1
        self.counts[reason.value] += 1
        self.causes[queued.cause.value] += 1
        return result

    def _apply_instruction(self, text: str) -> None:
        running = self._job.instruction if self._job is not None else None
        # Said again it is no news, and must not throw away the run that follows it already.
        if text != (self._new_instruction or running or self.instruction):
            self._new_instruction = text
            self._epoch += 1

    def _apply_hold(self, engaged: bool) -> None:
        if engaged != self.queue.held:
            self.queue.set_hold(engaged)
            self._epoch += 1

    def _apply_reset(self) -> None:
        self.queue.reset()
        self._reset_policy = True
        self._gate.reset()
        self._retained_frames = 0
        self._epoch += 1
