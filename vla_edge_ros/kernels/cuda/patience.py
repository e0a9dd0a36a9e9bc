"""Waiting for work of known length without keeping a core busy, and without waking late."""

from collections.abc import Callable, Hashable
import time

SPIN_S = 20e-6
"""How long before the expected end a waiter is awake, besides what sleeping takes too long."""
_RISE, _FALL = 0.05, 0.15
"""How much of the last run is taken over when it was longer than expected, and when shorter, so
that about every tenth is: who is never late spins for as long as runs vary."""
_AT_ONCE_S = 10e-6
"""A wait as short as this found the work done."""
_FORGET = 6
"""After so many of them in a row the work has become another, and is measured anew."""


class Patience:
    """
    Sleep through most of a wait, then spin.

    The driver either spins, which keeps a core from everything else on the machine, or blocks,
    and is then woken late. How long a graph runs is nearly the same every time, so sleep until
    shortly before the end, by the shorter of the last runs, and let the driver spin from there.

    Parameters
    ----------
    clock : callable
        Returns seconds.
    sleep : callable
        Takes seconds.

    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self._clock = clock
        self._sleep = sleep
        self._expected: dict[Hashable, float] = {}
        self._overslept: dict[Hashable, int] = {}
        self._late = 0.0

    def run(self, kind: Hashable, start: Callable[[], None], wait: Callable[[], None]) -> None:
        """
        Start work and wait until it is done.

        Parameters
        ----------
        kind : hashable
            Work of one kind takes about as long every time.
        start : callable
            Begins it, and returns at once.
        wait : callable
            Returns when it is done.

        """
        clock = self._clock
        began = clock()
        start()
        expected = self._expected.get(kind, 0.0)
        wanted = expected - SPIN_S - self._late - (clock() - began)
        if wanted > 0:
            before = clock()
            self._sleep(wanted)
            self._late += _RISE * (max(clock() - before - wanted, 0.0) - self._late)
        woke = clock()
        wait()
        took = clock() - began
        late = wanted > 0 and clock() - woke < _AT_ONCE_S
        self._overslept[kind] = self._overslept.get(kind, 0) + 1 if late else 0
        if self._overslept[kind] == _FORGET:
            # It may have ended long before.
            del self._expected[kind]
        elif wanted <= 0:
            self._expected[kind] = took
        else:
            part = _FALL if took < expected else _RISE
            self._expected[kind] = expected + part * (took - expected)
