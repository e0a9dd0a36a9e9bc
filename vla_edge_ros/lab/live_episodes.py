"""Episodes through DDS in real time: camera, reasoning and simulator as on a robot."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
import math
import os
from pathlib import Path
import re
import threading
import time

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.demo.processes import NodeFailed, NodeProcesses
from vla_edge_ros.demo.state import CAMERA, REASONING, RunState, SIM
from vla_edge_ros.errors import TransportError
from vla_edge_ros.nodes.environment import (
    free_domain_id,
    node_command,
    node_environment,
    share_directory,
)
from vla_edge_ros.runtime.frame_buffer import FrameReader
from vla_edge_ros.telemetry.trace import read_trace

START_LIMIT_S = 120.0
EPISODE_LIMIT_S = 6.0
"""3 s and the time that a new world stands still."""
SETTLE_LIMIT_S = 10.0
POLL_S = 0.05
PROBE_S = 0.001
PROBED_FRAMES = 600
LEAST_PERCENT = 5
"""Below it lie the looks that came while the clock was read."""
OUTCOME = re.compile(r'episode (\d+) (succeeded|failed) after (\d+) ticks')


@dataclass(frozen=True, slots=True)
class LiveRun:
    """
    What some episodes in real time came to.

    Parameters
    ----------
    outcomes : bool [episodes]
        Whether each succeeded.
    trace_path : Path
        Of the reasoning node; also a latency profile.
    trace : dict of str to array [ticks]
        The same, read, without the ticks behind the last episode.
    transport_ms : float [frames]
        From a picture's stamp until the reasoning node could look at it.
    action_transport_ms : float [reports]
        From an action's stamp until the robot had it, once a second.

    """

    outcomes: np.ndarray
    trace_path: Path
    trace: dict[str, np.ndarray]
    transport_ms: np.ndarray
    action_transport_ms: np.ndarray


class TransportProbe:
    """
    Looks at a frame buffer all the time and notes how late each frame came.

    Parameters
    ----------
    name : str
        Of the frame buffer.

    """

    def __init__(self, name: str):
        self._name = name
        self._received_ms: list[float] = []
        self._seen_ms: list[float] = []
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='transport', daemon=True)

    def __enter__(self) -> 'TransportProbe':
        """Start to look."""
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """End, and join the thread."""
        self._closing.set()
        self._thread.join()

    def transport_ms(self) -> np.ndarray:
        """
        Return the time from stamp to buffer of every frame that came meanwhile, ms.

        The camera node tells when it received a frame. What it needs from there to the buffer is
        the least that passes until a frame is seen, for looks come at any time.
        """
        if not self._seen_ms:
            return np.empty(0)
        return np.array(self._received_ms) + np.percentile(self._seen_ms, LEAST_PERCENT)

    def _run(self) -> None:
        newest = None
        with FrameReader(self._name) as reader:
            while len(self._seen_ms) < PROBED_FRAMES and not self._closing.wait(PROBE_S):
                frame = None
                with suppress(TransportError):  # the camera has not made it yet
                    frame = reader.read()
                if frame is None or frame.sequence == newest:
                    continue
                if newest is not None:  # of the first, nobody knows when it came
                    seen_ns = time.time_ns() - frame.received_ns
                    self._received_ms.append((frame.received_ns - frame.stamp_ns) / NS_PER_MS)
                    self._seen_ms.append(seen_ns / NS_PER_MS)
                newest = frame.sequence


def run_live(
    out: Path, seed: int, episodes: int, object_speed: float,
    check: Callable[[], None] = lambda: None, **reasoning: object,
) -> LiveRun:
    """
    Run episodes through the nodes.

    Parameters
    ----------
    out : Path
        Folder for trace and logs, made.
    seed : int
        With its number, of every episode.
    episodes : int
        How many.
    object_speed : float
        Speed of the cubes, m/s.
    check : callable
        Called all the time; what it raises ends the nodes.
    reasoning
        Parameters of the reasoning node.

    Raises
    ------
    NodeFailed
        A node ended by itself, or the episodes did not come to an end.

    """
    from vla_edge_ros.demo.monitor import Monitor

    out.mkdir(parents=True, exist_ok=True)
    trace = out / 'trace.csv'
    environment = node_environment(free_domain_id(), out)
    tuning = '--params-file', str(share_directory() / 'config' / 'tiny.yaml')
    buffer = f'vla_edge_live_{os.getpid()}'
    state = RunState()
    lags_ms: list[float] = []
    # This process listens on the same domain.
    with _changed_environment(environment), NodeProcesses(environment, out) as nodes, \
            TransportProbe(buffer) as probe:
        nodes.start(CAMERA, node_command(CAMERA, *tuning, frame_buffer=buffer))
        with Monitor(state) as monitor:

            def wait(done: Callable[[], bool], limit_s: float, what: str) -> None:
                until = time.monotonic() + limit_s
                while not done():
                    check()
                    if time.monotonic() > until:
                        raise NodeFailed(f'{what} took longer than {limit_s:.0f} s, see {out}')
                    nodes.check()
                    monitor.listen(POLL_S)
                    lag_ms = float(state.value(SIM, 'action_transport_ms', 'nan'))
                    if math.isfinite(lag_ms) and lag_ms not in lags_ms[-1:]:
                        lags_ms.append(lag_ms)

            wait(lambda: CAMERA in state.messages, START_LIMIT_S, 'the start of the camera')
            nodes.start(SIM, node_command(
                SIM, *tuning, seed=seed, object_speed=object_speed, wait_for_subscribers=1,
                fresh_episodes=True, episodes=episodes))
            wait(lambda: state.count(CAMERA, 'received') > 0, START_LIMIT_S, 'the first image')
            nodes.start(REASONING, node_command(
                REASONING, *tuning, autostart=True, trace_path=str(trace), frame_buffer=buffer,
                **reasoning))
            wait(lambda: state.acting, START_LIMIT_S, 'the first action')
            wait(lambda: state.camera_stopped, episodes * EPISODE_LIMIT_S, 'the episodes')
            deactivated = monitor.deactivate_reasoning()
            wait(deactivated.done, SETTLE_LIMIT_S, 'the end')
        nodes.end_all()
    return LiveRun(
        _outcomes(out / f'{SIM}.log', episodes), trace, _until_the_camera_stopped(
            read_trace(trace)), probe.transport_ms(), np.array(lags_ms))


@contextmanager
def _changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of this process, and put back what was there."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _until_the_camera_stopped(trace: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the ticks up to the last one whose action goes back to another picture."""
    known = np.flatnonzero(trace['observation_stamp_ns'] > 0)
    changes = np.flatnonzero(np.diff(trace['observation_stamp_ns'][known]))
    ticks = known[changes[-1] + 1] + 1 if changes.size else len(trace['tick'])
    return {name: column[:ticks] for name, column in trace.items()}


def _outcomes(log: Path, episodes: int) -> np.ndarray:
    found = OUTCOME.findall(log.read_text(errors='replace'))
    told = {int(number): outcome == 'succeeded' for number, outcome, _ in found}
    if sorted(told) != list(range(episodes)):
        raise NodeFailed(f'{log} tells of {len(told)} of {episodes} episodes')
    return np.array([told[number] for number in range(episodes)])
