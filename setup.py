"""Package vla_edge_ros for colcon (ament_python) and for pip."""

from glob import glob

from setuptools import find_packages, setup

PACKAGE = 'vla_edge_ros'


def ros_wheels(distribution, rclpy, interfaces):
    """Return the wheels of one ROS 2 distribution; the common interfaces share a version."""
    names = ('diagnostic-msgs', 'sensor-msgs', 'std-srvs', 'trajectory-msgs')
    return [f'ros-{distribution}-rclpy[fastrtps]=={rclpy}',
            *(f'ros-{name}=={interfaces}' for name in names)]


setup(
    name=PACKAGE,
    version='0.1.0',
    description='Vision-language-action policies on a robot, under a hard deadline.',
    maintainer='vla_edge_ros maintainers',
    maintainer_email='maintainers@vla-edge-ros.example',
    license='Apache-2.0',
    python_requires='>=3.10',
    packages=find_packages(include=[PACKAGE, f'{PACKAGE}.*']),
    package_data={PACKAGE: ['policies/*/*', 'sim/assets/*', 'runtime/*.yaml', 'telemetry/*.yaml']},
    data_files=[
        ('share/ament_index/resource_index/packages', [f'resource/{PACKAGE}']),
        (f'share/{PACKAGE}', ['package.xml']),
        (f'share/{PACKAGE}/launch', glob('launch/*.py')),
        (f'share/{PACKAGE}/config', glob('config/*')),
    ],
    zip_safe=False,
    install_requires=[
        'setuptools',
        'matplotlib>=3.6',
        'mujoco>=3.1',
        'numba>=0.59',
        'numpy>=1.26,<2.5',
        'opencv-python-headless>=4.9',
        'psutil>=5.9',
        'PyYAML>=6.0',
        'rich>=13',
        'rosbags>=0.11.9',
        'safetensors>=0.4.3',
        'tokenizers>=0.21',
        'transformers>=4.51',
    ],
    extras_require={
        # Unofficial wheels for development and CI; a robot uses its ROS installation.
        'ros': ros_wheels('jazzy', '7.1.6', '5.3.6'),
        'ros-kilted': ros_wheels('kilted', '9.1.2', '5.5.1'),
        # Pinned to what a driver of CUDA 13.0 accepts; newer toolkits emit PTX that it refuses.
        'cuda': [
            'cuda-bindings==13.0.*',
            'cuda-toolkit[cccl,cudart,nvrtc,nvvm]==13.0.*',
            'numba-cuda[cu13]==0.30.4',
            'nvidia-nvjitlink==13.0.*',
        ],
        # JetPack 6.
        'cuda12': [
            'cuda-toolkit[cccl,cudart,nvrtc,nvvm]==12.6.*',
            'numba-cuda[cu12]==0.30.4',
            'nvidia-nvjitlink-cu12==12.6.*',
        ],
        'ray': ['ray>=2.9'],
        'train': ['torch>=2.4'],
        'test': [
            'colcon-common-extensions',
            'hypothesis>=6.100',
            'pydocstyle==6.3.0',
            'pytest>=7.4,<8.4',
            'ruff==0.17.6',
        ],
    },
    entry_points={
        'console_scripts': [
            f'camera_node = {PACKAGE}.nodes.camera_node:main',
            f'reasoning_node = {PACKAGE}.nodes.reasoning_node:main',
            f'sim_node = {PACKAGE}.nodes.sim_node:main',
            f'vla-edge = {PACKAGE}.cli:main',
        ],
    },
)
