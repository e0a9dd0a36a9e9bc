"""The ROS node of the demo itself: it listens, and writes down what it is asked to record."""

from contextlib import ExitStack
from pathlib import Path
import time

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
import rclpy
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.signals import SignalHandlerOptions
from rclpy.task import Future
from sensor_msgs.msg import Image, JointState, TimeReference
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

from vla_edge_ros.demo.state import REASONING, RunState
from vla_edge_ros.nodes.conversions import to_ns
from vla_edge_ros.nodes.messages import LATCHED
from vla_edge_ros.replay.bag import BagWriter

OBSERVATION, STATUS = f'/{REASONING}/observation', f'/{REASONING}/status'
# Best effort hears reliable publishers too.
LISTEN = QoSProfile(depth=60, reliability=ReliabilityPolicy.BEST_EFFORT)
RECORDED = (
    ('/camera/image_raw', Image, LISTEN),
    ('/joint_states', JointState, LISTEN),
    ('/instruction', String, LATCHED),
    ('/action', JointTrajectory, LISTEN),
    (OBSERVATION, TimeReference, LISTEN),
)


class Monitor:
    """
    Feed a ``RunState`` from the graph; a context manager that owns rclpy's context.

    Parameters
    ----------
    state : RunState
        What to feed.
    bag : Path, optional
        Where to record the demo's topics as rosbag2.

    Raises
    ------
    TransportError
        The bag exists already or cannot be written.

    """

    def __init__(self, state: RunState, bag: Path | None = None):
        self._state = state
        with ExitStack() as stack:
            writer = stack.enter_context(BagWriter(bag)) if bag else None
            rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
            stack.callback(rclpy.try_shutdown)
            node = Node('demo_monitor')
            stack.callback(node.destroy_node)
            self._executor = SingleThreadedExecutor()
            stack.callback(self._executor.shutdown)
            self._executor.add_node(node)
            node.create_subscription(DiagnosticArray, '/diagnostics', self._on_diagnostics, 10)
            node.create_subscription(DiagnosticStatus, STATUS, self._on_status, 10)
            node.create_subscription(TimeReference, OBSERVATION, self._on_observation, LISTEN)
            if writer is not None:
                for topic, kind, qos in RECORDED:
                    self._record(node, writer, topic, kind, qos)
            self._change_state = node.create_client(ChangeState, f'/{REASONING}/change_state')
            self._cleanup = stack.pop_all()

    def __enter__(self) -> 'Monitor':
        """Return this object."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """Shut down in the order rclpy survives, then complete the bag."""
        self._cleanup.close()

    def listen(self, seconds: float) -> None:
        """Take in whatever arrives during the next ``seconds``."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._executor.spin_once(timeout_sec=left)

    def deactivate_reasoning(self) -> Future:
        """Ask the reasoning node to stop acting; done when it has answered."""
        transition = Transition(id=Transition.TRANSITION_DEACTIVATE)
        return self._change_state.call_async(ChangeState.Request(transition=transition))

    def _on_diagnostics(self, message: DiagnosticArray) -> None:
        for status in message.status:
            self._on_status(status)

    def _on_status(self, status: DiagnosticStatus) -> None:
        values = {item.key: item.value for item in status.values}
        self._state.on_status(status.name, status.message, values)

    def _on_observation(self, message: TimeReference) -> None:
        self._state.on_observation(
            to_ns(message.header.stamp), to_ns(message.time_ref), message.source)

    @staticmethod
    def _record(node: Node, writer: BagWriter, topic: str, kind: type, qos: QoSProfile) -> None:
        package = kind.__module__.partition('.')[0]
        name = f'{package}/msg/{kind.__name__}'
        latched = qos.durability == DurabilityPolicy.TRANSIENT_LOCAL

        def write(data: bytes) -> None:
            writer.write(topic, name, data, time.time_ns(), latched)

        node.create_subscription(kind, topic, write, qos, raw=True)
