"""The 1 Hz report every node makes on ``/diagnostics``, on the machine's own time."""

from collections.abc import Callable, Mapping

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
import psutil
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from vla_edge_ros.nodes.messages import diagnostic_array, diagnostic_status

OK, WARN, ERROR = DiagnosticStatus.OK, DiagnosticStatus.WARN, DiagnosticStatus.ERROR
PERIOD_S = 1.0

Report = tuple[bytes, str, Mapping[str, object]]


class RosClock:
    """The clock of a node as the core wants it."""

    def __init__(self, node: Node):
        self._clock = node.get_clock()

    def now_ns(self) -> int:
        """Return ROS time in ns: wall time, or ``/clock`` when ``use_sim_time`` is set."""
        return self._clock.now().nanoseconds


class DiagnosticsTimer:
    """
    Publish what ``report`` returns once a second, with the CPU use of this process.

    Parameters
    ----------
    node : Node
        Whose name and executor are used.
    report : callable
        Returns level, message and values.

    """

    def __init__(self, node: Node, report: Callable[[], Report]):
        self._node = node
        self._report = report
        self._process = psutil.Process()
        self._process.cpu_percent()
        self._publisher = node.create_publisher(DiagnosticArray, '/diagnostics', 10)
        # A paused /clock must not silence the report.
        steady = Clock(clock_type=ClockType.STEADY_TIME)
        node.create_timer(PERIOD_S, self.publish, clock=steady)

    def publish(self) -> None:
        """Publish one report now."""
        level, text, values = self._report()
        values = {**values, 'cpu_percent': self._process.cpu_percent()}
        name = self._node.get_fully_qualified_name()
        stamp_ns = self._node.get_clock().now().nanoseconds
        status = diagnostic_status(name, level, text, values)
        self._publisher.publish(diagnostic_array(stamp_ns, status))
