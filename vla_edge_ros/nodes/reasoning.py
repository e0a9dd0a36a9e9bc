"""The reasoning node: managed, it turns the newest frame into an action thirty times a second."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
import gc
import sys
import traceback
from typing import Any

from diagnostic_msgs.msg import DiagnosticStatus
import numpy as np
from rclpy.clock import Clock as NodeClock
from rclpy.clock import ClockType, JumpThreshold
from rclpy.duration import Duration
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import JointState, TimeReference
from std_msgs.msg import String
from std_srvs.srv import SetBool, Trigger

from vla_edge_ros.clock import Clock, MonotonicClock
from vla_edge_ros.kernels.memory_plan import format_plan
from vla_edge_ros.nodes import engine
from vla_edge_ros.nodes.camera import frame_buffer_name, FrameBufferParameters
from vla_edge_ros.nodes.control_thread import ControlThread
from vla_edge_ros.nodes.diagnostics import DiagnosticsTimer, ERROR, OK, Report, RosClock, WARN
from vla_edge_ros.nodes.frame_input import FrameInput
from vla_edge_ros.nodes.lifecycle import ManagedNode, SUCCESS
from vla_edge_ros.nodes.loop_report import LoopReport
from vla_edge_ros.nodes.messages import (
    action_message,
    ACTION_TYPES,
    diagnostic_status,
    LATCHED,
    observation_reference,
)
from vla_edge_ros.nodes.realtime import apply_to_thread, lock_memory, RealtimeParameters
from vla_edge_ros.nodes.robot_inputs import RobotInputs
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.progress import ProgressLog
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters, PLANNED_CAUSES
from vla_edge_ros.runtime.admission import AdmissionController, AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoop
from vla_edge_ros.runtime.loop_parameters import check_chunk_steps, ControlLoopParameters
from vla_edge_ros.runtime.runner import Runner, ThreadRunner
from vla_edge_ros.telemetry.trace import TraceWriter

STATUS_PERIOD_S = 0.1
SWITCH_INTERVAL_S = 0.0005
"""A thread that waits for the interpreter lock asks for it after this, not after 5 ms."""
GARBAGE_TICKS = 30
LIVE_SETS = (ControlLoopParameters, AdmissionParameters, ActionQueueParameters)


@dataclass(frozen=True, slots=True)
class ReasoningParameters:
    """Inputs and outputs of the node."""

    autostart: bool = parameter(
        False, 'Configure and activate without a lifecycle manager.', read_only=True
    )
    instruction: str = parameter(
        '', 'Instruction to follow until the first one is heard on the topic.'
    )
    action_type: str = parameter(
        'joint_trajectory', 'Message type of the action topic.', choices=tuple(ACTION_TYPES),
        read_only=True,
    )
    use_joint_states: bool = parameter(
        True, 'Wait for joint states; without them the policy sees its mean pose.', read_only=True
    )
    trace_path: str = parameter(
        '', 'CSV file for one record a tick; empty for none.', read_only=True
    )

    def __post_init__(self):
        validate(self)


class ReasoningNode(ManagedNode):
    """
    Load a policy at configure, run the control loop while active.

    Parameters
    ----------
    interruptible : callable
        Context manager for loading and compiling, which a stop signal may abandon.
    load_policy, calibrate : callable
        As in ``nodes/engine.py``.
    clock, steady : Clock, optional
        Other clocks than the node's and the machine's.
    make_runner : callable
        Takes the steady clock, returns where the policy runs while the node is active.
    options
        For ``rclpy.node.Node``.

    """

    def __init__(
        self,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
        load_policy: Callable = engine.load_policy,
        calibrate: Callable = engine.calibrate,
        clock: Clock | None = None,
        steady: Clock | None = None,
        make_runner: Callable[[Clock], Runner] = ThreadRunner,
        **options,
    ):
        sets = (
            ReasoningParameters, engine.PolicyParameters, FrameBufferParameters,
            RealtimeParameters, *LIVE_SETS,
        )
        super().__init__('reasoning_node', sets, interruptible, **options)
        self._load_policy = load_policy
        self._calibrate = calibrate
        self._steady = steady or MonotonicClock()
        self._make_runner = make_runner
        self._clock_ros = clock or RosClock(self)
        self._policy = self._calibration = self._reader = None
        self._actions = self._observations = None
        self._loop = self._runner = self._control = self._trace = self._jump = None
        self._failure: Exception | None = None
        self._held = False
        self._inputs = RobotInputs(self._steady)
        self._heard = LoopReport()

        self.parameters.add_check(self._check_parameters)
        self.parameters.on_change(self._on_parameters)
        self.create_subscription(String, 'instruction', self._on_instruction, LATCHED)
        self.create_subscription(
            JointState, 'joint_states', self._on_joint_states, qos_profile_sensor_data
        )
        self.create_service(SetBool, '~/hold', self._on_hold)
        self.create_service(Trigger, '~/reset', self._on_reset)
        self._status = self.create_publisher(DiagnosticStatus, '~/status', 10)
        self._steady_ros = NodeClock(clock_type=ClockType.STEADY_TIME)
        self.create_timer(STATUS_PERIOD_S, self._on_status_timer, clock=self._steady_ros)
        DiagnosticsTimer(self, self._report)
        self._autostart = None
        if self.parameters[ReasoningParameters].autostart:
            self._autostart = self.create_timer(0.0, self._start_by_itself, clock=self._steady_ros)

    # Transitions.

    def _setup(self) -> None:
        parameters, log = self.parameters, self.get_logger()
        with self._interruptible():
            progress = ProgressLog(log.info, self._steady)
            self._policy = self._load_policy(parameters[engine.PolicyParameters], progress)
            log.info(f'memory plan:\n{format_plan(self._policy.memory_plan)}')
            if warning := self._inputs.attach(self._policy):
                log.warning(warning)
            self._check_parameters(parameters)
            self._calibration = self._calibrate(self._policy, progress)
        name = frame_buffer_name(parameters[FrameBufferParameters], self)
        self._reader = FrameInput(name, self._policy.frame_target, log.info)
        kind = parameters[ReasoningParameters].action_type
        self._actions = self.create_publisher(ACTION_TYPES[kind], 'action', 10)
        self._observations = self.create_publisher(TimeReference, '~/observation', 10)
        lock_memory(parameters[RealtimeParameters], log.warning)
        costs = '{:.1f} ms to observe and {:.1f} ms to decode'.format(*self._calibration)
        log.info(
            f'configured: reading {name} on {self._policy.backend}, a chunk costs {costs} of '
            f'{parameters[ControlLoopParameters].deadline_ms}')

    def _start(self) -> None:
        parameters = self.parameters
        self._failure, self._heard = None, LoopReport()
        admission = AdmissionController(parameters[AdmissionParameters])
        admission.seed(*self._calibration)
        self._runner = self._make_runner(self._steady)
        self._loop = ControlLoop(
            self._policy, self._reader, admission,
            ActionQueue(parameters[ActionQueueParameters]), self._runner, self._clock_ros,
            self._steady, parameters[ControlLoopParameters], self._read_joints,
        )
        self._loop.reset()
        self._loop.set_hold(self._held)
        self._follow_instruction()
        if parameters[ReasoningParameters].trace_path:
            self._trace = TraceWriter(
                parameters[ReasoningParameters].trace_path, self._policy.config.action_dim
            )
        follows_ros = self.get_parameter('use_sim_time').value
        if follows_ros:
            threshold = JumpThreshold(
                min_forward=None, min_backward=Duration(nanoseconds=-1), on_clock_change=False
            )
            self._jump = self.get_clock().create_jump_callback(
                threshold, post_callback=lambda _jump: self._loop.reset()
            )
        self._control = ControlThread(
            self._tick, parameters[ControlLoopParameters].period_ns, self._steady,
            self._on_control_start, self._on_control_error,
            self._clock_ros if follows_ros else None, between_ticks=self._loop.between_ticks,
        )
        # Nothing that lives now is garbage; what a tick leaves is collected in slack.
        self._switch_interval_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.collect()
        gc.freeze()
        gc.disable()
        self._control.start()

    def _stop(self) -> None:
        control, self._control = self._control, None
        if control is not None:
            if not control.stop():
                self.get_logger().error('the control thread does not end')
            gc.enable()
            gc.unfreeze()
            sys.setswitchinterval(self._switch_interval_s)
            self._send_safe_action()
        runner, self._runner = self._runner, None
        if runner is not None and not runner.close():
            self.get_logger().error('the policy does not end')
        jump, self._jump = self._jump, None
        if jump is not None:
            jump.unregister()
        trace, self._trace = self._trace, None
        if trace is not None and not trace.close():
            self.get_logger().error(f'the trace lacks {trace.dropped} ticks ({trace.error})')
        self._loop = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _teardown(self) -> None:
        for publisher in (self._actions, self._observations):
            if publisher is not None:
                self.destroy_publisher(publisher)
        self._actions = self._observations = None
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        self._policy = self._calibration = None
        self._inputs.attach(None)

    def _start_by_itself(self) -> None:
        self._autostart.cancel()
        if self.trigger_configure() is not SUCCESS or self.trigger_activate() is not SUCCESS:
            self._give_up()

    def _give_up(self) -> None:
        """End the process if nobody is there to try again; the log says why."""
        if self._autostart is not None:
            raise SystemExit(1)

    def _check_parameters(self, sets: Mapping[type, Any]) -> None:
        """Check what depends on the policy, once there is one."""
        if self._policy is None:
            return
        kind, text = sets[ReasoningParameters].action_type, sets[ReasoningParameters].instruction
        initial = sets[ActionQueueParameters].initial_action
        engine.check_actions(self._policy.config, kind, initial)
        steps = sets[ControlLoopParameters].chunk_steps
        check_chunk_steps(steps, self._policy.config.chunk_steps)
        # None at all is right from the start only: the loop cannot unlearn the one it follows.
        if text.strip() or text != self.parameters[ReasoningParameters].instruction:
            self._policy.check_instruction(text)

    def _follow_instruction(self) -> None:
        text = self._inputs.instruction or self.parameters[ReasoningParameters].instruction
        if self._loop is not None and text.strip():
            self._loop.set_instruction(text)

    # The control thread.

    def _on_control_start(self) -> None:
        wishes = self.parameters[RealtimeParameters]
        apply_to_thread(wishes, 0, self.get_logger().warning)
        apply_to_thread(wishes, self._runner.native_id, self.get_logger().warning)

    def _on_control_error(self, error: Exception) -> None:
        # The executor's thread takes the node out of active; the robot is made safe at once.
        self.get_logger().error(f'control thread failed:\n{traceback.format_exc()}')
        self._failure = error
        self._send_safe_action()

    def _tick(self, scheduled_ns: int) -> None:
        result = self._loop.tick(scheduled_ns)
        if result.action is not None:
            rows, step_ns = result.action[None], 0
            if result.cause in PLANNED_CAUSES:
                rows, step_ns = result.chunk.values[result.chunk_index:], result.chunk.step_ns
            self._publish_action(rows, step_ns, result.action_stamp_ns)
            self._observations.publish(observation_reference(
                result.action_stamp_ns, result.observation_stamp_ns or 0, result.cause.value
            ))
        if self._trace is not None:
            self._trace.record(result)
        self._heard.note(result)
        if result.tick % GARBAGE_TICKS == 0:
            gc.collect(1)

    def _publish_action(self, rows: np.ndarray, step_ns: int, stamp_ns: int) -> None:
        kind = self.parameters[ReasoningParameters].action_type
        names = self._policy.config.joint_names
        self._actions.publish(action_message(kind, stamp_ns, rows, step_ns, names))

    def _send_safe_action(self) -> None:
        """Publish what the fallback ladder ends in; the control thread must not tick any more."""
        queue = self._loop.queue
        queue.set_hold(True)
        safe = queue.take(self._steady.now_ns())
        if safe.action is not None:
            self._publish_action(safe.action[None], 0, self._clock_ros.now_ns())

    def _read_joints(self) -> tuple[np.ndarray, int] | None:
        config = self._policy.config
        if config.joint_names and self.parameters[ReasoningParameters].use_joint_states:
            return self._inputs.joints
        return np.asarray(config.proprioception_mean, np.float32), self._steady.now_ns()

    # Callbacks of the executor.

    def _on_joint_states(self, message: JointState) -> None:
        if warning := self._inputs.take_joint_states(message):
            self.get_logger().warning(warning, throttle_duration_sec=5.0)

    def _on_instruction(self, message: String) -> None:
        if warning := self._inputs.take_instruction(message.data):
            self.get_logger().warning(warning)
        else:
            self._follow_instruction()

    def _on_parameters(self) -> None:
        if self._loop is not None:
            for kind in LIVE_SETS:
                self._loop.set_parameters(self.parameters[kind])
            self._follow_instruction()

    def _on_hold(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        self._held = request.data
        if self._loop is not None:
            self._loop.set_hold(request.data)
        response.success = True
        response.message = 'holding' if request.data else 'released'
        return response

    def _on_reset(self, _request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = self._loop is not None
        response.message = 'reset' if response.success else f'nothing to reset while {self.state}'
        if response.success:
            self._loop.reset()
        return response

    def _on_status_timer(self) -> None:
        if self._failure is not None:
            self.trigger_deactivate()
            self._give_up()
        level, values = self._heard.status() if self._loop is not None else (OK, {})
        name = self.get_fully_qualified_name()
        self._status.publish(diagnostic_status(name, level, self.state, values))

    def _report(self) -> Report:
        loop = self._loop
        rejected = '; '.join(self._inputs.rejected.values())
        error = self.last_error or rejected
        values: dict[str, object] = {'state': self.state, 'last_error': error}
        values |= {f'rejected.{name}': n for name, n in self._inputs.rejections.items()}
        if loop is None or self._heard.last is None:
            return ERROR if self.last_error else WARN if error else OK, error or self.state, values
        warning, counts = self._heard.report(loop)
        values |= counts | {'frame_route': self._reader.tell_route()}
        if rejected or warning:
            return WARN, rejected or warning, values
        return OK, 'active', values
