"""The simulator node: a world that goes on in real time, with a camera and a commanded tool."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from rclpy.clock import Clock, ClockType
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import String
from std_srvs.srv import Trigger

from vla_edge_ros.clock import MonotonicClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.nodes.conversions import to_ns
from vla_edge_ros.nodes.diagnostics import DiagnosticsTimer, OK, Report
from vla_edge_ros.nodes.messages import ACTION_TYPES, LATCHED, to_time, velocities_at
from vla_edge_ros.nodes.ros_parameters import RosParameters
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.sim.tasks import (
    COLOURS,
    MAX_SEED,
    named_colour,
    sample_instruction,
    TrackTask,
)
from vla_edge_ros.sim.video import StateLog
from vla_edge_ros.sim.world import object_index, World

CAMERA_HZ = 60
FRAMES_PER_TICK = 2
"""The task counts at 30 Hz."""
REASONING = 'reasoning_node'
JOINT_NAMES = ('gantry_x', 'gantry_y')
"""As in the embedded policy's checkpoint."""
MAX_LOGGED_STATES = 3600 * 30
MAX_STEP_NS = 100 * NS_PER_MS
"""A stalled process must not make the world leap."""


@dataclass(frozen=True, slots=True)
class SimulatorParameters:
    """What the world shows and how it is run."""

    camera: str = parameter(
        'raw', 'Which image message the camera sends.', choices=('raw', 'compressed'),
        read_only=True,
    )
    width: int = parameter(
        192, 'Width of the camera image.', unit='px', range=(16, 4096), read_only=True
    )
    height: int = parameter(
        160, 'Height of the camera image.', unit='px', range=(16, 4096), read_only=True
    )
    action_type: str = parameter(
        'joint_trajectory', 'Message type of the action topic.', choices=tuple(ACTION_TYPES),
        read_only=True,
    )
    instruction: str = parameter(
        '', 'Instruction of every episode; empty draws a colour and a wording each time.'
    )
    object_speed: float = parameter(
        0.3, 'Speed of the cubes.', unit='m/s', range=(0.0, 2.0), read_only=True
    )
    seed: int = parameter(
        0, 'Seed of world and instructions.', range=(0, MAX_SEED), read_only=True
    )
    command_timeout_ms: float = parameter(
        200.0, 'The tool stops this long after the last command.', unit='ms',
        range=(1.0, 60000.0),
    )
    wait_for_subscribers: int = parameter(
        0, 'Send the first image only when that many listen to the camera.', range=(0, 100),
        read_only=True,
    )
    run_seconds: float = parameter(
        0.0, 'The camera stops this long after the first action, 0 for never.', unit='s',
        range=(0.0, 1e6), read_only=True,
    )
    episodes: int = parameter(
        0, 'The camera stops after that many episodes, 0 for never.', range=(0, 1_000_000),
        read_only=True,
    )
    fresh_episodes: bool = parameter(
        False, 'Every episode begins in a world of its own, that of vla-edge sim for the same '
        'seed and number, and with ~/reset of the reasoning node.', read_only=True,
    )
    state_log_path: str = parameter(
        '', 'File (.npz) for the world states at 30 Hz, for films; empty for none.',
        read_only=True,
    )

    def __post_init__(self):
        validate(self)
        self.colour()

    def colour(self) -> str:
        """Return the one colour that ``instruction`` names, '' when it is empty."""
        return named_colour(self.instruction) if self.instruction else ''


class SimulatorNode(Node):
    """
    Publish camera, joint states and instructions; obey the action topic; judge the episodes.

    The world never restarts: an episode is an instruction, and it ends with success or after
    3 s. The first one starts with the first action, so that nobody is judged for compiling. With
    ``fresh_episodes`` each has a world of its own, which stands still until it was shown once and
    the reasoning node has answered that it forgets the one before.

    Parameters
    ----------
    interruptible : callable
        Unused; every node is built with it.
    world : World, optional
        A world to use instead of one built from the parameters.
    steady : Clock, optional
        Monotonic time.
    options
        For ``rclpy.node.Node``.

    """

    def __init__(
        self,
        interruptible: Callable[[], AbstractContextManager] = nullcontext,
        world: World | None = None,
        steady=None,
        **options,
    ):
        super().__init__('sim_node', **options)
        self.parameters = RosParameters(self, [SimulatorParameters])
        parameters = self.parameters[SimulatorParameters]
        self._steady = steady or MonotonicClock()
        self._rng = np.random.default_rng(parameters.seed)
        self._world = world or World(
            parameters.width, parameters.height, object_speed=parameters.object_speed
        )
        self._world.reset(self._rng)
        # GL is set up here, before anybody waits for an image.
        self._world.render()
        self.published = self.episodes = self.successes = 0
        self._task: TrackTask | None = None
        self._command, self._command_ns = None, 0
        self._first_action_ns: int | None = None
        self._stepped_ns = self._steady.now_ns()
        self._unshown, self._resetting, self._frames = False, None, 0
        self._action_lag_ms = float('nan')

        compressed = parameters.camera == 'compressed'
        topic = self.resolve_topic_name('camera/image_raw')
        self._camera = self.create_publisher(
            CompressedImage if compressed else Image,
            f'{topic}/compressed' if compressed else topic, qos_profile_sensor_data,
        )
        self._joints = self.create_publisher(JointState, 'joint_states', qos_profile_sensor_data)
        self._instruction = self.create_publisher(String, 'instruction', LATCHED)
        self.create_subscription(
            ACTION_TYPES[parameters.action_type], 'action', self._on_action, 1
        )
        self._reset = self.create_client(Trigger, f'{REASONING}/reset')
        self._log = self._open_log(parameters.state_log_path)
        self._next_episode(fresh=False)
        steady_ros = Clock(clock_type=ClockType.STEADY_TIME)
        self._timer = self.create_timer(1.0 / CAMERA_HZ, self.advance, clock=steady_ros)
        DiagnosticsTimer(self, self._report)

    @property
    def running(self) -> bool:
        """Tell whether the camera sends images."""
        parameters = self.parameters[SimulatorParameters]
        if parameters.episodes and self.episodes >= parameters.episodes:
            return False
        run_ns = parameters.run_seconds * NS_PER_S
        started_ns = self._first_action_ns
        if not run_ns or started_ns is None:
            return True
        return self._steady.now_ns() - started_ns < run_ns

    def advance(self) -> None:
        """Let the time since the last call pass in the world and send what is seen then."""
        if not self.running:
            self._timer.cancel()
            return
        restarting = self._restarting
        self._move_to(self._steady.now_ns())
        awaited = self.parameters[SimulatorParameters].wait_for_subscribers
        if not self.published and self._camera.get_subscription_count() < awaited:
            return
        stamp_ns = self.get_clock().now().nanoseconds
        self._send_camera(stamp_ns)
        self._send_joints(stamp_ns)
        self.published += 1
        # A tick is two pictures; the one at which an episode begins is none of its first.
        self._frames = 0 if restarting else self._frames + 1
        if self._unshown:
            self._unshown = False
            if self._reset.service_is_ready():
                self._resetting = self._reset.call_async(Trigger.Request())
        elif self._frames and self._frames % FRAMES_PER_TICK == 0:
            self._judge(stamp_ns)

    def close(self) -> None:
        """Free the renderer and write the state log."""
        self._world.close()
        if self._log is not None:
            self._log.save(self.parameters[SimulatorParameters].state_log_path)

    def _move_to(self, now_ns: int) -> None:
        """Let the world go on under the command in force; one that is new stands still."""
        if self._resetting is not None and self._resetting.done():
            self._resetting = self._command = None
        elif not self._restarting:
            # The point of the trajectory that was due when this span began, for all of it.
            elapsed_ns = min(now_ns - self._stepped_ns, MAX_STEP_NS)
            self._world.step(self._velocity(self._stepped_ns), elapsed_ns)
        self._stepped_ns = now_ns

    @property
    def _restarting(self) -> bool:
        return self._unshown or self._resetting is not None

    def _velocity(self, time_ns: int) -> list[float]:
        """Return the commanded velocity due at ``time_ns``, m/s."""
        elapsed_ns = time_ns - self._command_ns
        timeout_ns = self.parameters[SimulatorParameters].command_timeout_ms * NS_PER_MS
        if self._command is None or elapsed_ns > timeout_ns:
            return [0.0, 0.0]
        return velocities_at(self._command, elapsed_ns, JOINT_NAMES)

    def _on_action(self, message) -> None:
        try:
            velocities_at(message, 0, JOINT_NAMES)
        except VlaEdgeError as error:
            self.get_logger().warning(f'action rejected: {error}', throttle_duration_sec=5.0)
            return
        now_ns = self._steady.now_ns()
        # What was commanded before holds until this moment, not until the next picture.
        self._move_to(now_ns)
        if self._restarting:
            return
        self._command, self._command_ns = message, now_ns
        if hasattr(message, 'header'):
            lag_ns = self.get_clock().now().nanoseconds - to_ns(message.header.stamp)
            self._action_lag_ms = round(lag_ns / NS_PER_MS, 3)
        if self._first_action_ns is None:
            self._first_action_ns = self._command_ns
            if self.parameters[SimulatorParameters].fresh_episodes:
                self._next_episode(fresh=True)

    def _send_camera(self, stamp_ns: int) -> None:
        image = self._world.render()
        if self.parameters[SimulatorParameters].camera == 'compressed':
            message = CompressedImage(format='jpeg')
            message.data = cv2.imencode('.jpg', image[..., ::-1])[1].tobytes()
        else:
            height, width, channels = image.shape
            message = Image(height=height, width=width, encoding='rgb8', step=width * channels)
            message.data = image.tobytes()
        message.header.stamp = to_time(stamp_ns)
        message.header.frame_id = 'camera'
        self._camera.publish(message)

    def _send_joints(self, stamp_ns: int) -> None:
        message = JointState(name=list(JOINT_NAMES))
        message.header.stamp = to_time(stamp_ns)
        message.position = self._world.joint_positions.tolist()
        message.velocity = self._world.joint_velocities.tolist()
        self._joints.publish(message)

    def _judge(self, stamp_ns: int) -> None:
        if self._log is not None and len(self._log) < MAX_LOGGED_STATES:
            self._log.append(stamp_ns, self._world.get_state(), self._task.instruction)
        if self._first_action_ns is None or self._restarting:
            return
        self._task.update(self._world)
        if self._task.done:
            fresh = self.parameters[SimulatorParameters].fresh_episodes
            if fresh:
                outcome = 'succeeded' if self._task.succeeded else 'failed'
                self.get_logger().info(
                    f'episode {self.episodes} {outcome} after {self._task.ticks} ticks')
            self.episodes += 1
            self.successes += self._task.succeeded
            if self.running:
                self._next_episode(fresh)

    def _next_episode(self, fresh: bool) -> None:
        parameters = self.parameters[SimulatorParameters]
        rng, colours = self._rng, list(COLOURS)
        if fresh:  # drawn in the order of the virtual-time simulator
            rng = np.random.default_rng([parameters.seed, self.episodes])
            self._world.reset(rng)
            self._unshown, self._command = True, None
            drawn = colours[int(rng.integers(len(colours)))]
        else:
            drawn = str(rng.choice(colours))
        colour = parameters.colour() or drawn
        text = parameters.instruction or sample_instruction(rng, colour)
        self._task = TrackTask(text, object_index(colour))
        self._instruction.publish(String(data=text))

    @staticmethod
    def _open_log(path: str) -> StateLog | None:
        if not path:
            return None
        try:
            Path(path).touch()
        except OSError as error:
            rule = f'must be a writable file ({error.strerror})'
            raise ConfigError('state_log_path', rule, path) from None
        return StateLog()

    def _report(self) -> Report:
        values = {
            'published': self.published,
            'episodes': self.episodes,
            'successes': self.successes,
            'running': self.running,
            'instruction': self._task.instruction,
            'action_transport_ms': self._action_lag_ms,
        }
        return OK, 'running' if self.running else 'run ended', values
