"""Publish a bag's messages through DDS as they were recorded; imported only when asked for."""

from collections.abc import Iterator
import importlib
import os
import time

import rclpy
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data, QoSProfile
from rclpy.signals import SignalHandlerOptions
from rosgraph_msgs.msg import Clock
from std_msgs.msg import String

from vla_edge_ros.clock import NS_PER_MS, NS_PER_S
from vla_edge_ros.nodes.environment import profile_variables
from vla_edge_ros.nodes.messages import LATCHED, to_time
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.replay.bag import BagReader, COMPRESSED_IMAGE, IMAGE, Record, STRING

CLOCK_PERIOD_NS = 10 * NS_PER_MS
DISCOVERY_TIMEOUT_S = 10.0
POLL_S = 0.05
DRAIN_S = 0.3
"""The last messages are lost when their publisher goes before the subscribers have read them."""


def with_clock(records: Iterator[Record]) -> Iterator[tuple[int, Record | None]]:
    """Yield ``(time_ns, record)`` with a clock tick ``(time_ns, None)`` every 10 ms."""
    tick_ns = None
    for record in records:
        if tick_ns is None:
            tick_ns = record.recorded_ns
        while tick_ns <= record.recorded_ns:
            yield tick_ns, None
            tick_ns += CLOCK_PERIOD_NS
        yield record.recorded_ns, record


def play(
    bag: BagReader,
    topics: list[str],
    rate: float,
    stop: StopRequest,
    instruction: tuple[str, str] | None = None,
) -> dict[str, int]:
    """
    Publish ``topics`` and ``/clock`` at ``rate`` times the recorded pace.

    Bytes and header stamps stay as they are, so the consumers run with ``use_sim_time``.

    Parameters
    ----------
    bag : BagReader
        Open bag.
    topics : list of str
        What to publish, under the recorded names.
    rate : float
        Speed, > 0.
    stop : StopRequest
        Ends the play between two messages.
    instruction : (topic, text), optional
        Latched before the first message.

    Returns
    -------
    dict
        Messages published a topic.

    Raises
    ------
    Interrupted
        A signal came.

    """
    for variable, path in profile_variables().items():
        os.environ.setdefault(variable, path)
    node = None
    try:
        rclpy.init(signal_handler_options=SignalHandlerOptions.NO)
        node = Node('vla_edge_replay')
        publishers = {topic: make_publisher(node, topic, bag.topics[topic]) for topic in topics}
        if instruction is not None:
            topic, text = instruction
            instructor = make_publisher(node, topic, STRING)
            instructor.publish(String(data=text))
        clock = node.create_publisher(Clock, '/clock', 1)
        _await_subscribers(node, publishers.values(), stop)
        published = _play(bag.records(topics), publishers, clock, rate, stop)
        with stop.interruptible():
            time.sleep(DRAIN_S)
        return published
    finally:
        if node is not None:
            node.destroy_node()
        rclpy.try_shutdown()


def _play(records, publishers, clock, rate, stop) -> dict[str, int]:
    published = dict.fromkeys(publishers, 0)
    first_ns = started_ns = None
    for time_ns, record in with_clock(records):
        if first_ns is None:
            first_ns, started_ns = time_ns, time.monotonic_ns()
        due_ns = started_ns + round((time_ns - first_ns) / rate)
        with stop.interruptible():
            time.sleep(max(due_ns - time.monotonic_ns(), 0) / NS_PER_S)
        if record is None:
            clock.publish(Clock(clock=to_time(time_ns)))
        else:
            publishers[record.topic].publish(record.data)
            published[record.topic] += 1
    return published


def make_publisher(node: Node, topic: str, message_type: str):
    """Return a publisher for serialised messages, with the quality of service of its kind."""
    package, _, name = message_type.split('/')
    message_class = getattr(importlib.import_module(f'{package}.msg'), name)
    if message_type in (IMAGE, COMPRESSED_IMAGE):
        qos = qos_profile_sensor_data
    elif message_type == STRING:
        qos = LATCHED
    else:
        qos = QoSProfile(depth=10)
    return node.create_publisher(message_class, topic, qos)


def _await_subscribers(node: Node, publishers, stop: StopRequest) -> None:
    deadline_ns = time.monotonic_ns() + round(DISCOVERY_TIMEOUT_S * NS_PER_S)
    waiting = list(publishers)
    while waiting and time.monotonic_ns() < deadline_ns:
        waiting = [publisher for publisher in waiting if not publisher.get_subscription_count()]
        with stop.interruptible():
            time.sleep(POLL_S)
    for publisher in waiting:
        node.get_logger().warning(f'nobody subscribes to {publisher.topic_name}')
