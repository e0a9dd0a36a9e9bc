"""
``vla-edge doctor``: what this machine offers, and whether the policy holds its deadline on it.

Every check is one line; only a broken essential makes the exit code 1. Nothing but the standard
library is imported before the check that needs it.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from importlib import import_module, metadata
import json
import math
import os
from pathlib import Path
import platform
import shutil
import subprocess
import sys
import time
from typing import Any

from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.progress import terminal_progress

OK, NOTE, WARNING, BROKEN = 'ok', 'note', 'warning', 'broken'
SHM = Path('/dev/shm')
MIN_SHM_BYTES = 64 * 1024**2
"""Four participants with segments of 8 MB, their ports, and the frame buffer."""
LEFTOVER_BYTES = 64 * 1024**2
MARGIN_MS = 2.0
DEADLINE_RANGE_MS = (0.1, 10_000.0)
"""Of the reasoning node's ``deadline_ms``; a test compares them, for importing it needs NumPy."""
MAX_RUNS = 10_000
"""Minutes of the embedded policy; more tells nothing new."""
WARM_UP_RUNS = 10


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found; ``advice`` says what to do about it."""

    name: str
    status: str
    message: str
    advice: str = ''
    figures: dict[str, Any] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge doctor``."""
    parser.add_argument('--json', action='store_true', help='print one JSON object')
    parser.add_argument('--policy', type=Path, metavar='FOLDER',
                        help='checkpoint to measure; the embedded one by default')
    parser.add_argument('--deadline-ms', type=float, default=33.0,
                        help='what has to be held (default: %(default)s)')
    parser.add_argument('--runs', type=int, default=100,
                        help='chunks to measure (default: %(default)s)')


def run(options: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge doctor``."""
    if not 1 <= options.runs <= MAX_RUNS:
        raise ConfigError('--runs', f'must be in 1..{MAX_RUNS}', options.runs)
    low, high = DEADLINE_RANGE_MS
    if not low <= options.deadline_ms <= high:
        raise ConfigError('--deadline-ms', f'must be in {low}..{high} ms', options.deadline_ms)
    checks = []
    for name, check in (
        ('python', check_python),
        ('packages', check_packages),
        ('rclpy', check_rclpy),
        ('dds profile', check_dds_profile),
        ('shared memory', check_shared_memory),
        ('gl', check_gl),
        ('gpu', check_gpu),
        ('energy', check_energy),
        ('backend', lambda: check_backend(options.policy)),
        ('policy', lambda: check_policy(options.policy, options.deadline_ms, options.runs)),
    ):
        # An interrupted frame buffer would stay in shared memory, and that check is short.
        with nullcontext() if check is check_shared_memory else stop.interruptible():
            checks.append(guarded(name, check))
        stop.check()
        if not options.json:
            print_check(checks[-1])
    healthy = all(check.status != BROKEN for check in checks)
    if options.json:
        print(json.dumps({'ok': healthy, 'checks': [asdict(check) for check in checks]}, indent=2))
    return 0 if healthy else 1


def guarded(name: str, check: Callable[[], Check]) -> Check:
    """Run one check; what it raises is a finding, not a crash."""
    try:
        return check()
    except VlaEdgeError as error:
        return Check(name, BROKEN, str(error))
    except Exception as error:
        return Check(name, BROKEN, f'{type(error).__name__}: {error}')


def print_check(check: Check) -> None:
    """Print one check, its advice below it."""
    print(f'{check.status:8} {check.name:14} {check.message}', flush=True)
    if check.advice:
        print(f'{"":8} {"":14} -> {check.advice}', flush=True)


def check_python() -> Check:
    """Check the interpreter and the processor it runs on."""
    cores = len(os.sched_getaffinity(0))
    message = f'{platform.python_version()} on {platform.machine()}, {cores} cores'
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Check('python', BROKEN, message, 'use Python 3.10 to 3.13')
    return Check('python', OK, message, figures={'cores': cores})


def check_packages() -> Check:
    """Check that what the package needs at run time is installed and imports."""
    versions, missing = {}, []
    for module, distribution in (
        ('numpy', 'numpy'), ('numba', 'numba'), ('cv2', 'opencv-python-headless'),
        ('yaml', 'PyYAML'), ('psutil', 'psutil'), ('safetensors', 'safetensors'),
        ('tokenizers', 'tokenizers'), ('rosbags', 'rosbags'),
    ):
        try:
            loaded = import_module(module)
            versions[module] = getattr(loaded, '__version__', '') or metadata.version(distribution)
        except (ImportError, metadata.PackageNotFoundError):
            missing.append(distribution)
    message = ', '.join(f'{name} {version}' for name, version in versions.items())
    if missing:
        return Check(
            'packages', BROKEN, f'missing: {", ".join(missing)}; {message}',
            f'pip install {" ".join(missing)}')
    return Check('packages', OK, message, figures=versions)


def check_rclpy() -> Check:
    """Check that ROS 2 can be imported, and which middleware it would use."""
    try:
        rclpy = import_module('rclpy')
        middleware = rclpy.get_rmw_implementation_identifier()
    except ImportError as error:
        return Check('rclpy', BROKEN, f'cannot be imported ({error})',
                     "source /opt/ros/<distro>/setup.bash, or pip install '.[ros]' (x86_64)")
    distribution = os.environ.get('ROS_DISTRO', 'from Python wheels')
    return Check('rclpy', OK, f'{distribution}, {middleware}, {Path(rclpy.__file__).parent}',
                 figures={'middleware': middleware})


def check_dds_profile() -> Check:
    """Check that the Fast DDS profile for large images can be found."""
    from vla_edge_ros.nodes.environment import PROFILE_VARIABLES, profile_variables

    (path,) = profile_variables().values()
    other = {os.environ[name] for name in PROFILE_VARIABLES if name in os.environ} - {path}
    if other:
        return Check(
            'dds profile', NOTE, f'{path}, but this shell sets {", ".join(sorted(other))}',
            'large raw images get lost unless that profile has segments of 8 MB or more')
    return Check('dds profile', OK, f'{path} (demo and launch files set it)')


def check_shared_memory() -> Check:
    """Check space and permission by passing a frame, and look for what dead processes left."""
    import numpy as np

    from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter

    name = f'vla_edge_doctor_{os.getpid()}'
    image = np.full((480, 640, 3), 7, np.uint8)
    with FrameWriter(name, image.nbytes) as writer:
        writer.write(image, time.time_ns())
        reader = FrameReader(name)
        frame = reader.read()
        reader.close()
    if frame is None or not np.array_equal(frame.image, image):
        return Check('shared memory', BROKEN, 'a frame written was not read back')
    usage = shutil.disk_usage(SHM)
    message = f'{usage.free / 1e6:,.0f} of {usage.total / 1e6:,.0f} MB free, a frame passed'
    if usage.free < MIN_SHM_BYTES:
        advice = f'needs {MIN_SHM_BYTES / 1e6:.0f} MB; a container: docker run --shm-size=256m'
        return Check('shared memory', WARNING, message, advice)
    left = sum(path.stat().st_size for path in SHM.glob('fastrtps_*') if path.is_file())
    if left > LEFTOVER_BYTES:
        message += f'; Fast DDS segments hold {left / 1e6:,.0f} MB'
        advice = 'if no ROS node runs: fastdds shm clean, or rm /dev/shm/fastrtps_*'
        return Check('shared memory', NOTE, message, advice)
    return Check('shared memory', OK, message, figures={'free_bytes': usage.free})


def check_gl() -> Check:
    """Check that the simulator can draw, and how fast."""
    from vla_edge_ros.sim.world import World

    try:
        world = World()
    except VlaEdgeError as error:
        return Check('gl', WARNING, f'{error}', 'only the simulator and the demo need it')
    try:
        world.render()
        start = time.perf_counter()
        for _ in range(20):
            world.render()
        frame_ms = (time.perf_counter() - start) / 20 * 1e3
    finally:
        world.close()
    message = f'a camera image takes {frame_ms:.1f} ms'
    return Check('gl', OK, message, figures={'frame_ms': frame_ms})


def check_gpu() -> Check:
    """Report the GPU and its driver, or say plainly that there is none."""
    tool = shutil.which('nvidia-smi')
    if tool is None:
        return Check('gpu', NOTE, 'no NVIDIA driver (nvidia-smi not found): the CPU kernels run')
    query = '--query-gpu=name,driver_version,memory.total'
    done = subprocess.run(
        [tool, query, '--format=csv,noheader'], capture_output=True, text=True, timeout=20)
    if done.returncode or not done.stdout.strip():
        reason = (done.stderr or done.stdout).strip().splitlines()[:1]
        return Check('gpu', NOTE, f'nvidia-smi finds no usable GPU: {" ".join(reason)}')
    return Check('gpu', OK, '; '.join(done.stdout.strip().splitlines()))


def check_energy() -> Check:
    """Report which sources tell the energy used, and what stands in the way of the others."""
    from vla_edge_ros.telemetry.energy_sources import find_sources, Unavailable

    sources = find_sources()
    missing = [source for source in sources if isinstance(source, Unavailable)]
    names = [source.name for source in sources if not isinstance(source, Unavailable)]
    message = f'can be read: {", ".join(names)}' if names else 'unavailable'
    message += ''.join(f'; {source.name}: {source.reason}' for source in missing)
    advice = '; '.join(dict.fromkeys(source.advice for source in missing if source.advice))
    figures = {'sources': names, 'unavailable': {item.name: item.reason for item in missing}}
    return Check('energy', OK if names else NOTE, message, advice, figures)


def check_backend(folder: Path | None) -> Check:
    """Report which kernels ``backend: auto`` takes for the policy, and why."""
    from vla_edge_ros.kernels import choose_backend
    from vla_edge_ros.policy.policy import DEFAULT_POLICY
    from vla_edge_ros.policy.policy_config import PolicyConfig

    config = PolicyConfig.load(folder or DEFAULT_POLICY)
    name, reason = choose_backend('auto', config.transformer)
    status = OK if name == 'cuda' else NOTE
    return Check('backend', status, f'auto takes {name} ({reason})', figures={'backend': name})


def measure_policy(folder: Path | None, runs: int) -> tuple[float, list[float]]:
    """Return the seconds to load and warm up a policy, and the cost of each chunk, ms."""
    import numpy as np

    from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy

    start = time.perf_counter()
    policy = Policy.load(folder or DEFAULT_POLICY, progress=terminal_progress())
    config = policy.config
    policy.set_instruction('reach the red cube')
    rng = np.random.default_rng(0)
    shape = (config.image_height, config.image_width, 3)
    state = np.asarray(config.proprioception_mean, np.float32)
    costs_ms, ready = [], 0.0
    # The cache is filled first: a full one is what every later chunk pays for.
    for index in range(max(WARM_UP_RUNS, config.max_frames + 1) + runs):
        image = rng.integers(0, 256, shape, np.uint8)
        if index == WARM_UP_RUNS:
            ready = time.perf_counter() - start
        begin = time.perf_counter()
        policy.observe(image, state, 1 + index)
        policy.act()
        costs_ms.append((time.perf_counter() - begin) * 1e3)
    return ready, costs_ms[-runs:]


def check_policy(folder: Path | None, deadline_ms: float, runs: int) -> Check:
    """Measure the chosen policy on this machine and judge it by the deadline."""
    import numpy as np

    ready_s, costs_ms = measure_policy(folder, runs)
    p50, p99 = np.percentile(costs_ms, (50, 99)).tolist()
    figures = {'ready_s': ready_s, 'chunk_ms': {'p50': p50, 'p99': p99, 'max': max(costs_ms)},
               'deadline_ms': deadline_ms, 'runs': runs}
    message = f'a chunk takes p50 {p50:.1f}, p99 {p99:.1f} ms; ready after {ready_s:.0f} s'
    status, advice = judge(p50, p99, deadline_ms)
    return Check('policy', status, message, advice, figures)


def judge(p50_ms: float, p99_ms: float, deadline_ms: float) -> tuple[str, str]:
    """Say whether the deadline can be held, and what to change if not."""
    budget_ms = deadline_ms - MARGIN_MS
    if p99_ms <= budget_ms:
        return OK, f'{deadline_ms:g} ms can be held with {budget_ms - p99_ms:.1f} ms to spare'
    needed_ms = math.ceil(p99_ms + MARGIN_MS)
    slower = f'set rate_hz to {1e3 / needed_ms:.3g} and deadline_ms to {needed_ms}'
    if p50_ms <= budget_ms:
        return WARNING, (
            f'{deadline_ms:g} ms can be held mostly: close other programs, keep a core free '
            f'(cpu_affinity, rt_priority), or {slower}')
    return WARNING, (
        f'{deadline_ms:g} ms cannot be held: {slower}; else take fewer kv_slots, a smaller '
        'model, more threads for a large one (NUMBA_NUM_THREADS), or a faster machine')
