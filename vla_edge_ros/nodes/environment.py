"""
The environment in which child processes of this package speak DDS.

Used by the demo, the replay and the tests; a robot's launch files set what they need
themselves. Imports no rclpy.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
import json
import os
from pathlib import Path
import random
import re
import signal
import socket
import subprocess
import sys

from vla_edge_ros.errors import TransportError
from vla_edge_ros.nodes.process import SIGNALS

PACKAGE = 'vla_edge_ros'
DDS_PROFILE = 'fastdds_large_images.xml'
# Jazzy's Fast DDS reads the first variable, Kilted's the second and complains about the first.
PROFILE_VARIABLES = ('FASTRTPS_DEFAULT_PROFILES_FILE', 'FASTDDS_DEFAULT_PROFILES_FILE')
JAZZY_RCLPY_MAJOR = 7
MAX_DOMAIN_ID = 101
FIRST_PORT, PORTS_A_DOMAIN = 7400, 250
"""As the DDS specification gives them to domains."""


def share_directory() -> Path:
    """Return the directory holding ``config`` and ``launch``: installed, else the sources."""
    source = Path(__file__).resolve().parents[2]
    prefixes = [*filter(None, os.environ.get('AMENT_PREFIX_PATH', '').split(':')), sys.prefix]
    candidates = [Path(prefix) / 'share' / PACKAGE for prefix in prefixes]
    for candidate in [source, *candidates]:
        if (candidate / 'config' / DDS_PROFILE).is_file():
            return candidate
    searched = ', '.join(str(candidate) for candidate in [source, *candidates])
    raise TransportError('share directory', f'must hold config/{DDS_PROFILE}', searched)


def profile_variables() -> dict[str, str]:
    """Return the variable that makes Fast DDS use the profile for large images."""
    try:
        rclpy_major = int(version('rclpy').split('.')[0])
    except PackageNotFoundError:
        rclpy_major = JAZZY_RCLPY_MAJOR
    variable = PROFILE_VARIABLES[rclpy_major > JAZZY_RCLPY_MAJOR]
    return {variable: str(share_directory() / 'config' / DDS_PROFILE)}


def free_domain_id(shared_memory: Path = Path('/dev/shm')) -> int:
    """
    Return a ROS domain whose first discovery port nobody on this machine uses.

    Domains are avoided in which a killed process left its ports in ``shared_memory``: the locks
    among them can keep Fast DDS from cleaning up after the next one.
    """
    ports = [re.search(r'_port(\d+)', path.name) for path in shared_memory.glob('*fast*_port*')]
    left = {(int(port[1]) - FIRST_PORT) // PORTS_A_DOMAIN for port in ports if port}
    domain_ids = list(range(1, MAX_DOMAIN_ID + 1))
    random.SystemRandom().shuffle(domain_ids)
    for domain_id in sorted(domain_ids, key=left.__contains__):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(('127.0.0.1', FIRST_PORT + 10 + PORTS_A_DOMAIN * domain_id))
            except OSError:
                continue
            return domain_id
    raise TransportError('ROS_DOMAIN_ID', f'must be free in 1..{MAX_DOMAIN_ID}', 'none is')


def node_environment(
    domain_id: int, log_directory: str | Path, base: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """
    Return the environment for nodes that talk on this machine only.

    Parameters
    ----------
    domain_id : int
        ROS domain, see :func:`free_domain_id`.
    log_directory : path
        Where the nodes write their ROS logs.
    base : mapping
        Environment to extend.

    """
    environment = dict(base)
    # Wheels in a virtual environment carry no setup file that would set the prefix.
    environment.setdefault('AMENT_PREFIX_PATH', sys.prefix)
    environment.update(profile_variables())
    environment.update(
        ROS_DOMAIN_ID=str(domain_id),
        ROS_AUTOMATIC_DISCOVERY_RANGE='LOCALHOST',
        ROS_LOG_DIR=str(log_directory),
        NUMBA_NUM_THREADS=environment.get('NUMBA_NUM_THREADS', '1'),
    )
    return environment


def node_command(name: str, *arguments: str, **values: object) -> list[str]:
    """
    Return the command line of one of our nodes.

    Parameters
    ----------
    name : str
        ``camera_node``, ``reasoning_node`` or ``sim_node``.
    arguments : str
        ROS arguments, such as ``-r __ns:=/left`` or ``--params-file FILE``, one word each.
    values
        ROS parameters by name.

    """
    command = [sys.executable, '-m', f'{PACKAGE}.nodes.{name}', '--ros-args', *arguments]
    for key, value in values.items():
        # A JSON string is a YAML string, so '' and 'off' stay strings.
        command += ['-p', f'{key}:={json.dumps(value)}']
    return command


def start_process(command: Sequence[str], environment: Mapping[str, str], **options):
    """
    Start ``command`` with SIGINT and SIGTERM blocked until the child takes them over.

    So a signal that comes while the interpreter still starts is kept, and the node ends with
    exit code 0 as at any other moment. ``options`` go to ``subprocess.Popen``.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        return subprocess.Popen(command, env=dict(environment), **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
