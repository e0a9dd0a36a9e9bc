"""simulation.launch.py as a user starts it; needs launch_testing, so a ROS 2 installation."""

import os
import signal
import sys
import tempfile
import unittest

import psutil
import pytest

pytest.importorskip('launch_testing', reason='launch_testing comes with a ROS 2 installation')

# ruff: noqa: E402
from ament_index_python.packages import get_package_share_directory
import launch
from launch.actions import IncludeLaunchDescription, SetEnvironmentVariable
from launch.launch_description_sources import PythonLaunchDescriptionSource
import launch_testing
import launch_testing.actions
import launch_testing.asserts
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
import numpy as np
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParametersAtomically
from sensor_msgs.msg import TimeReference

sys.path.insert(0, os.path.dirname(__file__))
from ros_testing import Graph

from vla_edge_ros.nodes.conversions import to_ns
from vla_edge_ros.nodes.environment import free_domain_id, node_command, start_process

NAMESPACE = '/launched'
REASONING = f'{NAMESPACE}/reasoning_node'
DOMAIN_ID = free_domain_id()
COMPILE_LIMIT_S = 180.0


@pytest.mark.launch_test
def generate_test_description():
    """Launch the simulation, unconfigured."""
    path = os.path.join(
        get_package_share_directory('vla_edge_ros'), 'launch', 'simulation.launch.py')
    return launch.LaunchDescription([
        SetEnvironmentVariable('ROS_DOMAIN_ID', str(DOMAIN_ID)),
        SetEnvironmentVariable('ROS_AUTOMATIC_DISCOVERY_RANGE', 'LOCALHOST'),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(path),
            launch_arguments=[('namespace', NAMESPACE), ('autostart', 'false')],
        ),
        launch_testing.actions.ReadyToTest(),
    ])


class TestSimulation(unittest.TestCase):
    """One story, told in order."""

    def setUp(self):
        self.graph = Graph(tempfile.mkdtemp(), DOMAIN_ID)
        self.references = self.graph.listen(TimeReference, f'{REASONING}/observation')

    def tearDown(self):
        self.graph.close()

    def change(self, transition):
        request = ChangeState.Request(transition=Transition(id=transition))
        future = self.call(ChangeState, 'change_state', request)
        return future.success

    def call(self, kind, service, request):
        client = self.graph.peer.create_client(kind, f'{REASONING}/{service}')
        self.assertTrue(self.graph.spin_until(client.service_is_ready, COMPILE_LIMIT_S))
        future = client.call_async(request)
        self.assertTrue(self.graph.spin_until(future.done, COMPILE_LIMIT_S))
        return future.result()

    def state(self):
        return self.call(GetState, 'get_state', GetState.Request()).current_state.label

    def wait_for(self, condition):
        self.assertTrue(self.graph.spin_until(condition, 60.0))

    def test_the_story_of_a_run(self):
        self.assertEqual(self.state(), 'unconfigured')
        self.assertTrue(self.change(Transition.TRANSITION_CONFIGURE))
        self.assertEqual(self.state(), 'inactive')
        self.assertTrue(self.change(Transition.TRANSITION_ACTIVATE))

        self.wait_for(lambda: sum(ref.source == 'fresh' for ref in self.references) > 90)
        stamps_ns = [to_ns(ref.header.stamp) for ref in self.references[-80:]]
        self.assertAlmostEqual(1e9 / np.median(np.diff(stamps_ns)), 30.0, delta=0.5)

        camera = next(
            child for child in psutil.Process().children(recursive=True)
            if any('camera_node' in word for word in child.cmdline()))
        camera.send_signal(signal.SIGKILL)
        self.wait_for(lambda: self.references[-1].source == 'safe_zeros')
        restarted = start_process(
            node_command('camera_node', '-r', f'__ns:={NAMESPACE}'), self.graph.environment)
        self.wait_for(lambda: self.references[-1].source == 'fresh')

        value = ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=3.0)
        request = SetParametersAtomically.Request(
            parameters=[Parameter(name='margin_ms', value=value)])
        service = 'set_parameters_atomically'
        self.assertTrue(self.call(SetParametersAtomically, service, request).result.successful)

        self.assertTrue(self.change(Transition.TRANSITION_DEACTIVATE))
        self.assertEqual(self.state(), 'inactive')
        self.assertTrue(self.change(Transition.TRANSITION_CLEANUP))
        self.assertEqual(self.state(), 'unconfigured')
        self.assertTrue(self.change(Transition.TRANSITION_CONFIGURE))
        self.assertTrue(self.change(Transition.TRANSITION_ACTIVATE))
        self.assertTrue(self.change(Transition.TRANSITION_ACTIVE_SHUTDOWN))
        self.assertEqual(self.state(), 'finalized')
        restarted.send_signal(signal.SIGINT)
        self.assertEqual(restarted.wait(15), 0)


@launch_testing.post_shutdown_test()
class TestEnd(unittest.TestCase):
    """After SIGINT from launch."""

    def test_all_processes_ended_clean(self, proc_info):
        launch_testing.asserts.assertExitCodes(proc_info, allowable_exit_codes=[0, -9])
        clean = [info for info in proc_info if info.returncode == 0]
        self.assertEqual(len(clean), 2)
