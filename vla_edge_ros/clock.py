"""Sources of time, injected wherever time is read, so that no test has to sleep."""

import time
from typing import Protocol

NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


class Clock(Protocol):
    """Anything that tells the time in nanoseconds."""

    def now_ns(self) -> int:
        """Return the time in ns; the epoch is the clock's own."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Return ``time.monotonic_ns()``."""
        return time.monotonic_ns()


class SystemClock:
    """Wall time since the Unix epoch, as ROS time outside simulation."""

    def now_ns(self) -> int:
        """Return ``time.time_ns()``."""
        return time.time_ns()


class ManualClock:
    """Virtual time that moves only when told to."""

    def __init__(self, now_ns: int = 0):
        self._now_ns = now_ns

    def now_ns(self) -> int:
        """Return the virtual time in ns."""
        return self._now_ns

    def advance_ns(self, duration_ns: int) -> int:
        """Move on by ``duration_ns`` >= 0 and return the new time."""
        if duration_ns < 0:
            raise RuntimeError(f'virtual time cannot run backwards, got {duration_ns} ns')
        self._now_ns += duration_ns
        return self._now_ns

    def advance_to_ns(self, time_ns: int) -> int:
        """Move on to ``time_ns``; a time already past leaves the clock where it is."""
        self._now_ns = max(self._now_ns, time_ns)
        return self._now_ns
