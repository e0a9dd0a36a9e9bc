"""The thread that ticks: an absolute schedule that an overrun shifts by whole periods only."""

from collections.abc import Callable
import threading
import time

from vla_edge_ros.clock import Clock, NS_PER_MS, NS_PER_S

CLOCK_POLL_NS = NS_PER_MS
"""How often a clock that cannot be slept on is looked at."""
MAX_SLEEP_NS = 100 * NS_PER_MS
"""Longer sleeps are cut, so that stopping never waits for a long period."""


class Schedule:
    """
    Release times on one clock.

    Parameters
    ----------
    period_ns : int
        Distance of two releases, ns.

    """

    def __init__(self, period_ns: int):
        self.period_ns = period_ns
        self.due_ns: int | None = None
        """The release last waited for, ns; None before the first."""

    def advance(self, now_ns: int) -> int:
        """
        Choose the next release, given the time at which the last tick ended, and return it.

        Releases missed meanwhile are skipped, not made up for.
        """
        next_ns = now_ns if self.due_ns is None else self.due_ns + self.period_ns
        self.due_ns = next_ns + max(now_ns - next_ns, 0) // self.period_ns * self.period_ns
        return self.due_ns

    def remaining_ns(self, now_ns: int) -> int:
        """Return the time to the release; a clock that jumped backwards makes it due now."""
        if self.due_ns - now_ns > self.period_ns:
            self.due_ns = now_ns
        return self.due_ns - now_ns


class ControlThread:
    """
    Call ``tick(scheduled_ns)`` once a period from a thread of its own.

    Parameters
    ----------
    tick : callable
        One control step; takes its release time on the steady clock, ns.
    period_ns : int
        Time between two releases, ns.
    steady : Clock
        The machine's monotonic clock.
    on_start : callable
        Called first in the new thread, for priority and affinity.
    on_error : callable
        Called in the thread with the exception that ended it.
    clock : Clock, optional
        What the schedule follows instead of ``steady``: ROS time, which may stop and jump.
    name : str
        Thread name.
    between_ticks : callable, optional
        Called while the thread waits, with the steady time, ns, at which it must have returned.

    """

    def __init__(
        self,
        tick: Callable[[int], None],
        period_ns: int,
        steady: Clock,
        on_start: Callable[[], None],
        on_error: Callable[[Exception], None],
        clock: Clock | None = None,
        name: str = 'control',
        between_ticks: Callable[[int], None] | None = None,
    ):
        self._tick = tick
        self._schedule = Schedule(period_ns)
        self._steady = steady
        self._clock = clock or steady
        self._on_start = on_start
        self._on_error = on_error
        self._between_ticks = between_ticks
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start ticking, at once."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Let the running tick end, join the thread; False when it did not end in time."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._on_start()
            while not self._stopping.is_set():
                self._schedule.advance(self._clock.now_ns())
                if self._wait():
                    self._tick(self._due_on_steady_ns())
        except Exception as error:
            self._on_error(error)

    def _due_on_steady_ns(self) -> int:
        if self._clock is self._steady:
            return self._schedule.due_ns
        return self._steady.now_ns() + self._schedule.remaining_ns(self._clock.now_ns())

    def _wait(self) -> bool:
        """Return True when the release is due, False when the thread is to stop."""
        poll_ns = MAX_SLEEP_NS if self._clock is self._steady else CLOCK_POLL_NS
        while not self._stopping.is_set():
            wait_ns = min(self._schedule.remaining_ns(self._clock.now_ns()), poll_ns)
            if wait_ns <= 0:
                return True
            until_ns = self._steady.now_ns() + wait_ns
            if self._between_ticks is not None:
                self._between_ticks(until_ns)
            time.sleep(max(until_ns - self._steady.now_ns(), 0) / NS_PER_S)
        return False
