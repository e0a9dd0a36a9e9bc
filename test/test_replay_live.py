"""Replay of a bag through DDS."""

import json
import subprocess
import sys

from bag_maker import make_bag
import pytest

from vla_edge_ros.nodes.environment import free_domain_id, node_environment
from vla_edge_ros.replay.bag import BagReader

rclpy = pytest.importorskip('rclpy', reason='needs ROS 2')

LISTENER = """
import json, sys, time
import rclpy
from rclpy.qos import DurabilityPolicy, qos_profile_sensor_data, QoSProfile
from rosgraph_msgs.msg import Clock
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import String

rclpy.init()
node = rclpy.create_node('listener')
latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
received = {}
for topic, kind, qos in (
    ('/clock', Clock, qos_profile_sensor_data),
    ('/camera/image_raw', Image, qos_profile_sensor_data),
    ('/joint_states', JointState, qos_profile_sensor_data),
    ('/instruction', String, latched),
):
    def note(data, messages=received.setdefault(topic, [])):
        messages.append(data.hex())
    node.create_subscription(kind, topic, note, qos, raw=True)
print('ready', flush=True)
quiet_s, last, deadline = 1.5, None, time.monotonic() + 30
while time.monotonic() < deadline:
    rclpy.spin_once(node, timeout_sec=0.1)
    count = sum(map(len, received.values()))
    if count and count == last and time.monotonic() > changed + quiet_s:
        break
    if count != last:
        last, changed = count, time.monotonic()
print(json.dumps(received))
node.destroy_node()
rclpy.shutdown()
"""


def test_live_replay_publishes_the_recorded_bytes_and_the_clock(tmp_path):
    bag = make_bag(tmp_path / 'bag', 31)
    environment = node_environment(free_domain_id(), tmp_path)
    with subprocess.Popen(
        [sys.executable, '-c', LISTENER], env=environment, stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout.readline() == 'ready\n'
        command = [sys.executable, '-m', 'vla_edge_ros.cli', 'replay', str(bag), '--live']
        player = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=60
        )
        received = json.loads(listener.stdout.readline())
    assert player.returncode == 0, player.stderr
    published = {'/camera/image_raw': 31, '/joint_states': 31, '/instruction': 1}
    assert json.loads(player.stdout) == {'published': published}
    with BagReader(bag) as reader:
        for topic in published:
            recorded = [record.data.hex() for record in reader.records([topic])]
            # DDS pads a message to a multiple of four bytes
            assert [m.rstrip('0') for m in received[topic]] == [m.rstrip('0') for m in recorded]
    assert len(received['/clock']) >= 40  # 0.5 s at 100 Hz, best effort
