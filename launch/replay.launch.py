"""
A recorded bag through the live nodes, in the bag's own time.

``ros2 bag play`` publishes ``/clock`` and starts only when the reasoning node is active, so that
no frame is lost to loading and compiling.
"""

import os

from ament_index_python.packages import get_package_share_directory
from launch import LaunchDescription
from launch.actions import (
    DeclareLaunchArgument,
    ExecuteProcess,
    IncludeLaunchDescription,
    RegisterEventHandler,
    Shutdown,
)
from launch.launch_description_sources import PythonLaunchDescriptionSource
from launch.substitutions import LaunchConfiguration
from launch_ros.event_handlers import OnStateTransition

CLOCK_HZ = '200'


def generate_launch_description() -> LaunchDescription:
    """Return the description."""
    share = get_package_share_directory('vla_edge_ros')
    passed_on = {
        'params_file': (os.path.join(share, 'config', 'tiny.yaml'), 'Parameters of both nodes'),
        'image_topic': ('camera/image_raw', 'Raw image topic in the bag'),
        'joint_states_topic': ('joint_states', 'Joint state topic in the bag'),
        'instruction_topic': ('instruction', 'Instruction topic in the bag'),
        'action_topic': ('replay/action', 'Where the commands go, apart from recorded ones'),
    }
    play = ExecuteProcess(
        cmd=[
            'ros2', 'bag', 'play', LaunchConfiguration('bag'),
            '--clock', CLOCK_HZ, '--rate', LaunchConfiguration('rate'),
        ],
        output='screen',
        on_exit=Shutdown(reason='the bag has been played'),
    )
    return LaunchDescription([
        DeclareLaunchArgument('bag', description='The recording, a folder or an mcap file'),
        DeclareLaunchArgument('rate', default_value='1.0', description='Speed of the replay'),
        *(
            DeclareLaunchArgument(name, default_value=default, description=text)
            for name, (default, text) in passed_on.items()
        ),
        # The reasoning node is the only one with a lifecycle.
        RegisterEventHandler(OnStateTransition(goal_state='active', entities=[play])),
        IncludeLaunchDescription(
            PythonLaunchDescriptionSource(
                os.path.join(share, 'launch', 'camera_reasoning.launch.py')
            ),
            launch_arguments=[
                ('use_sim_time', 'true'),
                *((name, LaunchConfiguration(name)) for name in passed_on),
            ],
        ),
    ])
