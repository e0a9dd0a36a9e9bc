"""
The control loop: one straight line from the newest frame to the published action.

A host (ROS node, replay, simulator) calls ``tick`` once a period and publishes what it returns.
Two clocks are injected: ``steady`` times deadlines and durations, ``clock`` is ROS time, which
image stamps and ages are told in; in virtual time both are the same clock.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
import math
from typing import Any, Protocol

import numpy as np

from vla_edge_ros.clock import Clock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters, Cause
from vla_edge_ros.runtime.admission import (
    AdmissionController,
    AdmissionParameters,
    DecisionKind,
    Reason,
)
from vla_edge_ros.runtime.policy_job import Policy, PolicyJob
from vla_edge_ros.runtime.runner import Outcome, Runner
from vla_edge_ros.telemetry.stages import Stage


@dataclass(frozen=True, slots=True)
class ControlLoopParameters:
    """The timing of the loop and what it accepts as input."""

    rate_hz: float = parameter(
        30.0, 'Ticks per second', unit='Hz', range=(0.1, 1000.0), read_only=True
    )
    deadline_ms: float = parameter(
        33.0,
        'Time from the scheduled tick to the latest publication of its action',
        unit='ms',
        range=(0.1, 10_000.0),
    )
    publish: str = parameter(
        'on_ready',
        'Publish as soon as the action is ready, or only at the start of a tick',
        choices=('on_ready', 'on_tick'),
    )
    late_results: str = parameter(
        'use',
        'What becomes of a chunk that missed its deadline',
        choices=('use', 'discard'),
    )
    max_observation_age_ms: float = parameter(
        500.0,
        'Frames whose stamp is further from now are not looked at',
        unit='ms',
        range=(1.0, 3.6e6),
    )
    max_joint_state_age_ms: float = parameter(
        500.0, 'Joint states received longer ago are not used', unit='ms', range=(1.0, 60_000.0)
    )
    frozen_camera_ticks: int = parameter(
        15,
        'Ticks in a row without a new frame after which the camera is frozen',
        range=(1, 100_000),
    )

    def __post_init__(self):
        """Check every value, and that the deadline lies within the period."""
        validate(self)
        if self.deadline_ms * NS_PER_MS > self.period_ns:
            rule = f'must not exceed the period of {self.rate_hz} Hz'
            raise ConfigError('deadline_ms', rule, self.deadline_ms)

    @property
    def period_ns(self) -> int:
        """Time between two ticks, ns."""
        return round(NS_PER_S / self.rate_hz)


class FrameSource(Protocol):
    """Where frames come from."""

    def read(self) -> Any:
        """Return the newest ``Frame``, the caller's own, or None when there is none."""
        ...


@dataclass(frozen=True, slots=True)
class StepResult:
    """
    One tick: what to publish, and how that came about; None where there is nothing to say.

    ``telemetry.trace.COLUMNS`` documents every field but the last four. ``action`` is what to
    publish (float32 [action_dim]); ``chunk`` is the chunk it was taken from, of which the rows
    from ``chunk_index`` on are still to come unless ``cause`` holds an action; ``error`` is the
    first that the policy raised; ``late`` tells
    that a result arrived which had missed its deadline.
    """

    tick: int
    scheduled_ns: int
    started_ns: int
    published_ns: int
    action_stamp_ns: int
    decision: DecisionKind
    reason: Reason
    cause: Cause
    frame_sequence: int | None
    observation_stamp_ns: int | None
    observation_age_ms: float
    chunk_index: int | None
    estimate_ms: float
    budget_ms: float
    preprocess_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    late: bool
    evicted_frame: int | None
    retained_frames: int | None
    action: np.ndarray | None
    chunk: ActionChunk | None
    error: Exception | None


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
        Timing and input limits.
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
        self.parameters = parameters or ControlLoopParameters()
        self.admission = admission
        self.queue = queue
        self.instruction: str | None = None
        self.counts = {reason.value: 0 for reason in Reason}
        self.causes = {cause.value: 0 for cause in Cause}
        self._policy = policy
        self._frame_source = frame_source
        self._runner = runner
        self._clock = clock
        self._steady = steady
        self._read_proprioception = read_proprioception
        self._requests: deque[Callable[[], None]] = deque()
        self._new_instruction: str | None = None
        self._reset_policy = False
        self._epoch = 0
        self._job: PolicyJob | None = None
        self._tick = 0
        self._newest_sequence: int | None = None
        self._observed_sequence: int | None = None
        self._same_frame_ticks = 0
        self._retained_frames: int | None = None

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
        outcome, error, late = None, None, False
        if self._runner.busy:
            outcome = self._runner.wait(started_ns)
            if outcome is not None:
                error = outcome.error
                late = self._collect(outcome, self.parameters.publish == 'on_ready')

        frame, proprioception, reason = self._look()
        if reason is None:
            decision = self.admission.decide(self._steady.now_ns(), deadline_ns)
            reason = decision.reason
        else:
            decision = self.admission.refuse(reason)
        if decision.kind is not DecisionKind.REFUSE:
            full = decision.kind is DecisionKind.FULL
            self._start(frame, proprioception, full, scheduled_ns, deadline_ns)
            if full and self.parameters.publish == 'on_ready':
                own_outcome = self._runner.wait(deadline_ns)
                if own_outcome is None:
                    reason = Reason.DEADLINE_MISSED
                else:
                    outcome, error = own_outcome, error or own_outcome.error
                    late |= self._collect(outcome, False)
        if error is not None:
            reason = Reason.POLICY_ERROR
        return self._publish(
            scheduled_ns, started_ns, decision, reason, frame, outcome, error, late)

    def _look(self) -> tuple[Any, np.ndarray | None, Reason | None]:
        """Return the newest frame, the joint state, and the reason not to use them, if any."""
        if self.queue.held:
            return None, None, Reason.OPERATOR_HOLD
        if self._runner.busy:
            return None, None, Reason.BUSY
        if self.instruction is None and self._new_instruction is None:
            return None, None, Reason.NO_INSTRUCTION
        frame = self._frame_source.read()
        if frame is None:
            return None, None, Reason.NO_FRAME
        same = frame.sequence == self._newest_sequence
        self._same_frame_ticks = self._same_frame_ticks + 1 if same else 0
        self._newest_sequence = frame.sequence
        if self._same_frame_ticks >= self.parameters.frozen_camera_ticks:
            return frame, None, Reason.FROZEN_CAMERA
        if frame.sequence == self._observed_sequence:
            return frame, None, Reason.REPEATED_FRAME
        # A stamp from the future is no fresher than one from the past: two clocks disagree.
        age_ns = abs(self._clock.now_ns() - frame.stamp_ns)
        if age_ns > self.parameters.max_observation_age_ms * NS_PER_MS:
            return frame, None, Reason.STALE_FRAME
        if self._read_proprioception is None:
            return frame, None, None
        joints = self._read_proprioception()
        oldest_ns = self._steady.now_ns() - self.parameters.max_joint_state_age_ms * NS_PER_MS
        if joints is None or joints[1] < oldest_ns:
            return frame, None, Reason.NO_PROPRIOCEPTION
        return frame, joints[0], None

    def _start(self, frame, proprioception, decode, scheduled_ns, deadline_ns) -> None:
        self._job = PolicyJob(
            self._policy,
            self._steady,
            frame,
            proprioception,
            decode,
            self._reset_policy,
            self._new_instruction,
            scheduled_ns,
            deadline_ns,
            self._epoch,
        )
        self._reset_policy, self._new_instruction = False, None
        self._observed_sequence = frame.sequence
        self._runner.start(self._job)

    def _collect(self, outcome: Outcome, tick_is_over: bool) -> bool:
        """Feed the estimates and the queue; return whether the chunk missed its deadline."""
        job, self._job = self._job, None
        if job.prepared and job.instruction is not None:
            self.instruction = job.instruction
        if outcome.observation is not None:
            self._retained_frames = outcome.observation.num_frames
            observe_ns = sum(outcome.stage_ns.values()) - outcome.stage_ns.get(Stage.DECODE, 0)
            self.admission.observe(Stage.PREFILL, observe_ns)
        if outcome.chunk is None:
            return False
        self.admission.observe(Stage.DECODE, outcome.stage_ns.get(Stage.DECODE, 0))
        late = tick_is_over or outcome.finished_ns > job.deadline_ns
        if job.epoch == self._epoch and not (late and self.parameters.late_results == 'discard'):
            self.queue.push(outcome.chunk, job.scheduled_ns, late)
        return late

    def _publish(
        self, scheduled_ns, started_ns, decision, reason, frame, outcome, error, late
    ) -> StepResult:
        queued = self.queue.take(scheduled_ns)
        stamp_ns = self._clock.now_ns()
        observation_stamp_ns, age_ms = None, math.nan
        if queued.chunk is not None:
            observation_stamp_ns = queued.chunk.observation_stamp_ns
            if queued.action is not None:
                age_ms = (stamp_ns - observation_stamp_ns) / NS_PER_MS
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
            frame_sequence=None if frame is None else frame.sequence,
            observation_stamp_ns=observation_stamp_ns,
            observation_age_ms=age_ms,
            chunk_index=queued.chunk_index,
            estimate_ms=decision.estimate_ms,
            budget_ms=decision.budget_ms,
            **{f'{stage.value}_ms': stage_ns.get(stage, math.nan) / NS_PER_MS for stage in Stage},
            late=late,
            evicted_frame=None if observation is None else observation.evicted_frame_id,
            retained_frames=self._retained_frames,
            action=queued.action,
            chunk=queued.chunk,
            error=error,
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
        self._observed_sequence = self._newest_sequence = None
        self._same_frame_ticks = self._retained_frames = 0
        self._epoch += 1
