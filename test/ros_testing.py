"""Helpers of the tests that speak DDS: a domain of their own, and waiting with a limit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import os
import time

import rclpy
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node

from vla_edge_ros.nodes.environment import free_domain_id, node_environment

TIMEOUT_S = 30.0


class Graph:
    """A context on a free domain with one executor, spun only while a test waits."""

    def __init__(self, log_directory, domain_id: int | None = None):
        self.domain_id = domain_id or free_domain_id()
        self.environment = node_environment(self.domain_id, log_directory)
        os.environ.update(self.environment)
        self.context = Context()
        rclpy.init(context=self.context, args=[], domain_id=self.domain_id)
        self.executor = SingleThreadedExecutor(context=self.context)
        self._nodes: list[Node] = []
        self.peer = self.add(Node('peer', context=self.context))

    def add(self, node: Node) -> Node:
        """Spin ``node`` from now on and destroy it at the end."""
        self._nodes.append(node)
        self.executor.add_node(node)
        return node

    def listen(self, kind: type, topic: str, qos=10) -> list:
        """Return a list that fills with the messages of a topic."""
        heard: list = []
        self.peer.create_subscription(kind, topic, heard.append, qos)
        return heard

    def spin_until(self, condition: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> bool:
        """Spin until ``condition()``; False when the time is up."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end_s:
                return False
            self.executor.spin_once(timeout_sec=0.02)
        return True

    def call(self, kind: type, name: str, request):
        """
        Call a service and return its response.

        DDS loses the answer to a client that the service has not discovered yet, though the
        client knows the service; then the call is made anew.
        """
        client = self.peer.create_client(kind, name)
        assert self.spin_until(client.service_is_ready), f'no service {name}'
        futures = []
        for _ in range(3):
            futures.append(client.call_async(request))
            if self.spin_until(lambda: any(f.done() for f in futures), TIMEOUT_S / 3):
                break
        answers = [future.result() for future in futures if future.done()]
        assert answers, f'no answer from {name}'
        self.peer.destroy_client(client)
        return answers[0]

    def close(self) -> None:
        """Shut down in the order rclpy survives."""
        self.executor.shutdown()
        for node in self._nodes:
            if hasattr(node, 'close'):
                node.close()
            node.destroy_node()
        self.context.try_shutdown()


@contextmanager
def ros_graph(log_directory, domain_id: int | None = None) -> Iterator[Graph]:
    """Yield a ``Graph`` and close it."""
    before = dict(os.environ)
    graph = Graph(log_directory, domain_id)
    try:
        yield graph
    finally:
        graph.close()
        os.environ.clear()
        os.environ.update(before)


def diagnostic_values(messages: list, node: str) -> dict[str, str]:
    """Return the newest diagnostic values of a node, {} before its first report."""
    for message in reversed(messages):
        for status in message.status:
            if status.name.endswith(node):
                return {item.key: item.value for item in status.values} | {
                    'level': status.level[0], 'message': status.message}
    return {}
