"""The whole loop on one machine: simulated robot and camera, camera node, reasoning node."""

import os

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import DeclareLaunchArgument, IncludeLaunchDescription
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.actions import Node

PACKAGE = 'vla_edge_ros'


def generate_launch_description() -> LaunchDescription:
    """Return the description."""
    share = get_package_share_directory(PACKAGE)
    arguments = {
        'params_file': (os.path.join(share, 'config', 'tiny.yaml'), 'Parameters of all nodes'),
        'namespace': ('', 'Namespace of all nodes'),
        'autostart': ('true', 'Configure and activate the reasoning node at once'),
        'instruction': ('', 'Instruction of every episode, empty for random ones'),
        'object_speed': ('0.3', 'Speed of the cubes, m/s'),
        'seed': ('0', 'Seed of world and instructions'),
    }
    camera_reasoning = os.path.join(share, 'launch', 'camera_reasoning.launch.py')
    passed_on = ('params_file', 'namespace', 'autostart')
    return LaunchDescription([
        *(
            DeclareLaunchArgument(name, default_value=default, description=text)
            for name, (default, text) in arguments.items()
        ),
        # Included first: it sets the Fast DDS profile for the simulator too.
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(camera_reasoning),
            launch_arguments=[(name, LaunchConfiguration(name)) for name in passed_on],
        ),
        Node(
            package=PACKAGE,
            executable='sim_node',
            name='sim_node',
            namespace=LaunchConfiguration('namespace'),
            output='screen',
            emulate_tty=True,
            parameters=[LaunchConfiguration('params_file')] + [
                {name: LaunchConfiguration(name)}
                for name in ('instruction', 'object_speed', 'seed')
            ],
        ),
    ])
