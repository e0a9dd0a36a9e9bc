"""How far something slow has come; what compiles, loads or warms up takes a callback for it."""

from collections.abc import Callable
import sys

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_S

Progress = Callable[[str, int, int], None]
"""Called with what begins now and which of how many it is: ``('uploading layer', 3, 28)``."""


def no_progress(what: str, number: int, count: int) -> None:
    """Tell nobody."""


class ProgressLog:
    """
    Tell when other work begins, and then how far it is, but no more often than once a second.

    Parameters
    ----------
    say : callable
        Takes a line.
    clock : Clock
        Steady.

    """

    def __init__(self, say: Callable[[str], None], clock: Clock):
        self._say = say
        self._clock = clock
        self._what = ''
        self._due_ns = 0

    def __call__(self, what: str, number: int, count: int) -> None:
        """Take note of what begins now."""
        now_ns = self._clock.now_ns()
        if what == self._what and now_ns < self._due_ns:
            return
        self._what, self._due_ns = what, now_ns + NS_PER_S
        self._say(f'{what} {number} of {count}' if count > 1 else what)


def terminal_progress() -> Progress:
    """Return what tells a person at a terminal, on stderr."""
    if not sys.stderr.isatty():
        return no_progress
    return ProgressLog(lambda line: print(line, file=sys.stderr, flush=True), MonotonicClock())
