"""The nodes of a demo as child processes: started, watched, ended in order."""

from collections.abc import Mapping, Sequence
from pathlib import Path
import signal
import subprocess
import time

import psutil

from vla_edge_ros.nodes.environment import start_process

END_TIMEOUT_S = 10.0
TAIL_LINES = 15


class NodeFailed(Exception):
    """A child ended by itself; the message holds the end of its log."""


class NodeProcesses:
    """
    Child processes by node name; a context manager that leaves none behind.

    Parameters
    ----------
    environment : mapping
        For every child.
    log_directory : Path
        Holds one ``NAME.log`` a child.

    """

    def __init__(self, environment: Mapping[str, str], log_directory: Path):
        self._environment = environment
        self._log_directory = log_directory
        self._children: dict[str, subprocess.Popen] = {}
        self._meters: dict[str, psutil.Process] = {}

    def __enter__(self) -> 'NodeProcesses':
        """Return this object."""
        return self

    def __exit__(self, *_exception: object) -> None:
        """End whatever still runs, without a word: the exception under way says why."""
        self._end_all()

    def start(self, name: str, command: Sequence[str]) -> None:
        """Start one child with its output in its log."""
        with open(self._log_directory / f'{name}.log', 'wb') as log:
            child = start_process(
                command, self._environment, stdout=log, stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL)
        self._children[name] = child
        self._meters[name] = psutil.Process(child.pid)

    def check(self) -> None:
        """
        Look after the children.

        Raises
        ------
        NodeFailed
            One has ended.

        """
        for name, child in self._children.items():
            if child.poll() is not None:
                raise NodeFailed(self.describe(name, _end_text(child.returncode)))

    def end_all(self) -> None:
        """
        Ask all children to end and wait for them.

        Raises
        ------
        NodeFailed
            One did not end in time and was killed, or ended with another code than 0.

        """
        for name, code in self._end_all().items():
            if code is None:
                raise NodeFailed(self.describe(name, f'did not end within {END_TIMEOUT_S:.0f} s'))
            if code:
                raise NodeFailed(self.describe(name, _end_text(code)))

    def _end_all(self) -> dict[str, int | None]:
        """Return the exit codes, None for a child that had to be killed."""
        children, self._children = self._children, {}
        for child in children.values():
            if child.poll() is None:
                child.send_signal(signal.SIGINT)
        until = time.monotonic() + END_TIMEOUT_S
        codes: dict[str, int | None] = {}
        for name, child in children.items():
            try:
                codes[name] = child.wait(max(until - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
                codes[name] = None
        return codes

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time every living child has used so far, s."""
        used = {}
        for name, meter in self._meters.items():
            try:
                times = meter.cpu_times()
            except psutil.Error:
                continue
            used[name] = times.user + times.system
        return used

    def describe(self, name: str, what: str) -> str:
        """Return what happened to a child, with the end of its log."""
        path = self._log_directory / f'{name}.log'
        lines = path.read_text(errors='replace').splitlines()[-TAIL_LINES:]
        return '\n'.join([f'{name} {what}; the end of {path}:', *(f'  {x}' for x in lines)])


def _end_text(code: int) -> str:
    """Return how a child ended; a negative code is the signal that did it."""
    if code >= 0:
        return f'ended with code {code}'
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f'signal {-code}'
    return f'was killed ({name})'


class CpuMeter:
    """CPU use of the children between two readings, percent of one core."""

    def __init__(self, processes: NodeProcesses):
        self._processes = processes
        self.restart()

    def restart(self) -> None:
        """Begin a new interval."""
        self._start_s, self._used = time.monotonic(), self._processes.cpu_seconds()

    def read(self) -> dict[str, float]:
        """Return the mean use by node since the interval began."""
        elapsed = max(time.monotonic() - self._start_s, 1e-9)
        return {
            name: round(100.0 * (used - self._used[name]) / elapsed, 1)
            for name, used in self._processes.cpu_seconds().items() if name in self._used
        }
