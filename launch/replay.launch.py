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
    RegisterEventHandler,
    SetEnvironmentVariable,
    Shutdown,
)
from launch.substitutions import EnvironmentVariable, LaunchConfiguration
from launch_ros.actions import LifecycleNode, Node
from launch_ros.event_handlers import OnStateTransition

PACKAGE = 'vla_edge_ros'
CLOCK_HZ = '200'


def generate_launch_description() -> LaunchDescription:
    """Return the description."""
    config = os.path.join(get_package_share_directory(PACKAGE), 'config')
    profile = os.path.join(config, 'fastdds_large_images.xml')
    arguments = {
        'params_file': (os.path.join(config, 'tiny.yaml'), 'Parameters of both nodes'),
        'image_topic': ('camera/image_raw', 'Raw image topic in the bag'),
        'joint_states_topic': ('joint_states', 'Joint state topic in the bag'),
        'instruction_topic': ('instruction', 'Instruction topic in the bag'),
        'action_topic': ('replay/action', 'Where the commands go, apart from recorded ones'),
        'rate': ('1.0', 'Speed of the replay'),
    }
    parameters = [LaunchConfiguration('params_file'), {'use_sim_time': True}]
    camera = Node(
        package=PACKAGE,
        executable='camera_node',
        name='camera_node',
        output='screen',
        parameters=parameters,
        remappings=[('camera/image_raw', LaunchConfiguration('image_topic'))],
    )
    reasoning = LifecycleNode(
        package=PACKAGE,
        executable='reasoning_node',
        name='reasoning_node',
        namespace='',
        output='screen',
        parameters=[*parameters, {'autostart': True}],
        remappings=[
            (name, LaunchConfiguration(f'{name}_topic'))
            for name in ('joint_states', 'instruction', 'action')
        ],
    )
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
        *(
            DeclareLaunchArgument(name, default_value=default, description=text)
            for name, (default, text) in arguments.items()
        ),
        # Jazzy's Fast DDS reads the first, Kilted's the second; a profile already set stays.
        *(
            SetEnvironmentVariable(name, EnvironmentVariable(name, default_value=profile))
            for name in ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
        ),
        RegisterEventHandler(
            OnStateTransition(
                target_lifecycle_node=reasoning, goal_state='active', entities=[play]
            )
        ),
        camera,
        reasoning,
    ])
