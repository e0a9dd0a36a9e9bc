"""
Camera and reasoning node beside a robot's own camera driver.

Example: ``ros2 launch vla_edge_ros camera_reasoning.launch.py namespace:=left
image_topic:=/left/camera/color/image_raw``.
"""

import os

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, SetEnvironmentVariable
from launch.substitutions import EnvironmentVariable, LaunchConfiguration
from launch_ros.actions import LifecycleNode, Node

from vla_edge_ros.nodes.environment import profile_variables

PACKAGE = 'vla_edge_ros'


def generate_launch_description() -> LaunchDescription:
    """Return the description."""
    config = os.path.join(get_package_share_directory(PACKAGE), 'config')
    arguments = {
        'params_file': (os.path.join(config, 'tiny.yaml'), 'Parameters of both nodes'),
        'namespace': ('', 'Namespace of both nodes and all relative topics'),
        'image_topic': ('camera/image_raw', 'Raw image topic; compressed adds /compressed'),
        'joint_states_topic': ('joint_states', 'Joint positions of the robot'),
        'instruction_topic': ('instruction', 'What to do'),
        'action_topic': ('action', 'Where the commands go'),
        'autostart': ('true', 'Configure and activate at once; false leaves it to a manager'),
        'use_sim_time': ('false', 'Follow /clock'),
    }
    common = {
        'package': PACKAGE,
        'namespace': LaunchConfiguration('namespace'),
        'output': 'screen',
        'emulate_tty': True,
    }
    parameters = LaunchConfiguration('params_file')
    use_sim_time = {'use_sim_time': LaunchConfiguration('use_sim_time')}
    return LaunchDescription([
        *(
            DeclareLaunchArgument(name, default_value=default, description=text)
            for name, (default, text) in arguments.items()
        ),
        # A profile already set stays.
        *(
            SetEnvironmentVariable(name, EnvironmentVariable(name, default_value=profile))
            for name, profile in profile_variables().items()
        ),
        Node(
            executable='camera_node',
            name='camera_node',
            parameters=[parameters, use_sim_time],
            remappings=[('camera/image_raw', LaunchConfiguration('image_topic'))],
            **common,
        ),
        LifecycleNode(
            executable='reasoning_node',
            name='reasoning_node',
            parameters=[
                parameters, use_sim_time, {'autostart': LaunchConfiguration('autostart')},
            ],
            remappings=[
                (name, LaunchConfiguration(f'{name}_topic'))
                for name in ('joint_states', 'instruction', 'action')
            ],
            **common,
        ),
    ])
