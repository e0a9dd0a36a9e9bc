"""Messages to and from the plain values of the core; no node, no state."""

from collections.abc import Mapping, Sequence

from builtin_interfaces.msg import Duration, Time
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from geometry_msgs.msg import TwistStamped
import numpy as np
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import TimeReference
from std_msgs.msg import Float64MultiArray, MultiArrayDimension
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.nodes.conversions import to_ns

ACTION_TYPES = {
    'joint_trajectory': JointTrajectory,
    'twist': TwistStamped,
    'float64_multi_array': Float64MultiArray,
}
LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
"""A topic whose last message reaches those that join later, as the instruction's."""
_TWIST_AXES = (
    ('linear', 'x'), ('linear', 'y'), ('linear', 'z'),
    ('angular', 'x'), ('angular', 'y'), ('angular', 'z'),
)


def to_time(stamp_ns: int) -> Time:
    """Return ``stamp_ns`` as a ROS time."""
    return Time(sec=stamp_ns // NS_PER_S, nanosec=stamp_ns % NS_PER_S)


def action_message(
    kind: str, stamp_ns: int, actions: np.ndarray, step_ns: int, joint_names: Sequence[str]
) -> JointTrajectory | TwistStamped | Float64MultiArray:
    """
    Return velocities as a message.

    Parameters
    ----------
    kind : str
        One of ``ACTION_TYPES``; only a trajectory carries more than the first step.
    stamp_ns : int
        When the first action is due, ROS time, ns.
    actions : float [steps, action_dim]
        Velocities of the joints or axes, first the one due now.
    step_ns : int
        Time between two steps, ns.
    joint_names : sequence of str
        One name a column, for trajectories.

    """
    stamp = to_time(stamp_ns)
    if kind == 'joint_trajectory':
        message = JointTrajectory(joint_names=list(joint_names))
        message.header.stamp = stamp
        for step, row in enumerate(actions):
            seconds, nanoseconds = divmod(step * step_ns, NS_PER_S)
            point = JointTrajectoryPoint(velocities=row.tolist())
            point.time_from_start = Duration(sec=seconds, nanosec=nanoseconds)
            message.points.append(point)
        return message
    first = actions[0].tolist()
    if kind == 'twist':
        message = TwistStamped()
        message.header.stamp = stamp
        for (part, axis), value in zip(_TWIST_AXES, first, strict=False):
            setattr(getattr(message.twist, part), axis, value)
        return message
    message = Float64MultiArray(data=first)
    message.layout.dim = [MultiArrayDimension(label='velocity', size=len(first), stride=1)]
    return message


def velocities_at(message, elapsed_ns: int, joint_names: Sequence[str]) -> list[float]:
    """
    Return the velocities a message of any action type asks for, in the order of ``joint_names``.

    Parameters
    ----------
    message : JointTrajectory, TwistStamped or Float64MultiArray
        The command.
    elapsed_ns : int
        Time since it became due, ns; chooses the point of a trajectory.
    joint_names : sequence of str
        What is wanted; messages without names are taken to be in this order.

    Raises
    ------
    ConfigError
        The message has no point, lacks a joint, or holds too few or non-finite values.

    """
    if isinstance(message, JointTrajectory):
        due = [p for p in message.points if to_ns(p.time_from_start) <= elapsed_ns]
        if not message.points:
            raise ConfigError('action.points', 'must not be empty', 0)
        point = due[-1] if due else message.points[0]
        by_name = dict(zip(message.joint_names, point.velocities, strict=False))
        values = [by_name.get(name, float('nan')) for name in joint_names]
    elif isinstance(message, TwistStamped):
        values = [getattr(getattr(message.twist, part), axis) for part, axis in _TWIST_AXES]
    else:
        values = list(message.data)
    values = values[:len(joint_names)]
    if len(values) < len(joint_names) or not np.isfinite(values).all():
        rule = f'must give a finite velocity for each of {", ".join(joint_names)}'
        raise ConfigError('action', rule, values)
    return values


def observation_reference(action_ns: int, image_ns: int, cause: str) -> TimeReference:
    """Return which image the action published at ``action_ns`` was computed from."""
    message = TimeReference(time_ref=to_time(image_ns), source=cause)
    message.header.stamp = to_time(action_ns)
    return message


def diagnostic_status(
    name: str, level: bytes, text: str, values: Mapping[str, object]
) -> DiagnosticStatus:
    """Return a status; numbers keep their full precision as text."""
    status = DiagnosticStatus(level=level, name=name, message=text)
    status.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
    return status


def diagnostic_array(stamp_ns: int, status: DiagnosticStatus) -> DiagnosticArray:
    """Return one status as ``/diagnostics`` wants it."""
    message = DiagnosticArray(status=[status])
    message.header.stamp = to_time(stamp_ns)
    return message
