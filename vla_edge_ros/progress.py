"""How far something slow has come; what compiles, loads or warms up takes a callback for it."""

from collections.abc import Callable
import sys

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_S

LINE_NS, LOG_NS = NS_PER_S // 5, 30 * NS_PER_S
"""How often a terminal and a log file are told of the progress of many equal parts."""

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


class SlowProgress:
    """
    Tell how many of many parts are done and how long the rest may take, on stderr.

    A terminal keeps one line up to date; a file gets a line every half minute.

    Parameters
    ----------
    what : str
        What the parts are, in the plural.
    count, done : int
        How many there are, and how many of them were done before.
    clock : Clock, optional
        Steady.

    """

    def __init__(self, what: str, count: int, done: int = 0, clock: Clock | None = None):
        self._what = what
        self._count = count
        self._before = done
        self._done = done
        self._clock = clock or MonotonicClock()
        self._terminal = sys.stderr.isatty()
        self._begin_ns = self._clock.now_ns()
        self._due_ns = self._begin_ns + (LINE_NS if self._terminal else LOG_NS)

    def update(self, done: int) -> None:
        """Take note that so many are done, those of before included."""
        self._done = done
        now_ns = self._clock.now_ns()
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + (LINE_NS if self._terminal else LOG_NS)
            self._say(self.line())

    def line(self) -> str:
        """Return where it stands: done, share, and the time left at the pace so far."""
        text = f'{self._done:,} of {self._count:,} {self._what}'
        if self._count:
            text += f', {100 * self._done / self._count:.0f} %'
        ran = self._done - self._before
        if ran:
            seconds = (self._clock.now_ns() - self._begin_ns) / NS_PER_S
            text += f', {duration((self._count - self._done) * seconds / ran)} left'
        return text

    def __enter__(self) -> 'SlowProgress':
        """Return the progress."""
        return self

    def __exit__(self, *_exception) -> None:
        """Leave the last state behind."""
        self._say(self.line())
        if self._terminal:
            print(file=sys.stderr, flush=True)

    def _say(self, line: str) -> None:
        # Blanks cover the end of a longer line before.
        text = f'\r{line:<70}' if self._terminal else f'{line}\n'
        print(text, end='', file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """Return a time in words: ``40 s``, ``12 min``, ``3 h 05 min``."""
    if seconds < 99.5:
        return f'{seconds:.0f} s'
    minutes = round(seconds / 60)
    return f'{minutes} min' if minutes < 100 else f'{minutes // 60} h {minutes % 60:02} min'
