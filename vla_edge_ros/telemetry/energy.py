"""
Energy over time: sampled on a thread of its own, told between two moments, shared out by kind.

Between two movements of a counter its energy is spread evenly over the time. So an interval much
shorter than ``resolution_ms`` gets the mean power around it, not its own: NVML's counter moves
every 20 to 100 ms, and many intervals of a kind tell more than one.
"""

from array import array
from collections.abc import Iterable, Sequence
import threading
from typing import Any, NamedTuple

import numpy as np

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.telemetry.energy_sources import EnergySource, Unavailable, Unreadable

IDLE = 'idle'
"""The kind of all time that no interval covers."""
UNAVAILABLE = 'unavailable'
RATE_RANGE_HZ = (2.0, 1000.0)
"""Slower, power sensors would be read too seldom to be integrated."""
MAX_SAMPLES = 1 << 20
"""29 hours at 10 Hz, 17 bytes each; then the oldest quarter is forgotten."""


class Interval(NamedTuple):
    """What was done from ``start_ns`` to ``end_ns``, on the meter's clock."""

    kind: str
    start_ns: int
    end_ns: int


class _Track:
    """What one source told; the lock guards it, for its thread may be appending."""

    def __init__(self, source: EnergySource, max_samples: int):
        self.source = source
        self.faults: dict[str, int] = {}
        self._failure = ''
        self._max_samples = max_samples
        self._lock = threading.Lock()
        self._times_ns = array('q')
        self._joules = array('d')
        self._joined = array('b')

    def sample(self, clock: Clock) -> None:
        """Read the source once; what goes wrong is counted."""
        now_ns = clock.now_ns()
        try:
            reading = self.source.read(now_ns)
        except Unreadable as error:
            self._failure = str(error)
            self._count(self._failure)
            return
        self._failure = ''
        if reading is None:
            return
        if reading.fault:
            self._count(reading.fault)
        with self._lock:
            columns = self._times_ns, self._joules, self._joined
            for column, value in zip(columns, (now_ns, reading.joules, reading.joined)):
                column.append(value)
            if len(self._times_ns) > self._max_samples:
                for column in columns:
                    del column[: max(self._max_samples // 4, 1)]

    def read(self, edges_ns: Sequence[int]) -> tuple[np.ndarray, np.ndarray, float | None]:
        """
        Return energy, J, and measured time, s, up to every edge, and the median step, ms.

        Both stand still over what was not measured.
        """
        with self._lock:
            times_ns = np.array(self._times_ns)
            joules, joined = np.array(self._joules), np.array(self._joined, bool)
        edges_ns = np.asarray(edges_ns, np.int64)
        if times_ns.size < 2:
            return np.zeros(edges_ns.size), np.zeros(edges_ns.size), None
        # Nanoseconds since boot need more digits than a float has.
        times_s = (times_ns - times_ns[0]) / NS_PER_S
        edges_s = (edges_ns - times_ns[0]) / NS_PER_S
        steps_s = np.diff(times_s)
        measured_s = np.concatenate(([0.0], np.cumsum(np.where(joined[1:], steps_s, 0.0))))
        median_ms = float(np.median(steps_s)) * NS_PER_S / NS_PER_MS
        at_edges = (np.interp(edges_s, times_s, column) for column in (joules, measured_s))
        return *at_edges, median_ms

    def why_nothing(self) -> str:
        """Say why a time has no measurement."""
        if self._failure:
            return self._failure
        if not self._times_ns:
            return 'it was never read'
        if len(self._times_ns) == 1:
            return 'it was read once only, or its counter has not moved'
        counted = ''.join(f'; {fault}: {count}' for fault, count in dict(self.faults).items())
        return f'nothing was measured at that time{counted}'

    def _count(self, fault: str) -> None:
        self.faults[fault] = self.faults.get(fault, 0) + 1


class EnergyMeter:
    """
    Sample energy sources on a thread of its own; nobody else ever waits for one.

    Parameters
    ----------
    sources : iterable of EnergySource or Unavailable
        As of ``find_sources``.
    rate_hz : float
        Samples per second.
    clock : Clock, optional
        What samples are stamped with and moments are told in: steady time.
    max_samples : int
        Samples kept of each source.

    Notes
    -----
    The thread starts with ``start``; without it the owner calls ``sample``. Use it as a context
    to have it started and joined.

    """

    def __init__(
        self,
        sources: Iterable[EnergySource | Unavailable],
        rate_hz: float = 10.0,
        clock: Clock | None = None,
        max_samples: int = MAX_SAMPLES,
    ):
        low, high = RATE_RANGE_HZ
        if not low <= rate_hz <= high:
            raise ConfigError('rate_hz', f'must be in {low}..{high} Hz', rate_hz)
        sources = list(sources)
        self.unavailable = [item for item in sources if isinstance(item, Unavailable)]
        self._tracks = [
            _Track(item, max_samples) for item in sources if not isinstance(item, Unavailable)]
        if len({track.source.name for track in self._tracks}) < len(self._tracks):
            raise ValueError('two energy sources have the same name')
        self._clock = clock or MonotonicClock()
        self._period_s = 1 / rate_hz
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name='energy', daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> bool:
        """Sample once more, join the thread; False when a source does not return in time."""
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def __enter__(self) -> 'EnergyMeter':
        """Start the thread."""
        self.start()
        return self

    def __exit__(self, *_exception) -> None:
        """Join the thread."""
        self.close()

    def sample(self) -> None:
        """Read every source once; for the thread, or an owner that has not started it."""
        for track in self._tracks:
            track.sample(self._clock)

    def report(
        self, start_ns: int, end_ns: int, intervals: Iterable[Interval] = ()
    ) -> dict[str, Any]:
        """
        Return the energy of a run, ready for JSON.

        Every source has its own entry: ``joules``, ``measured_s``, ``unmeasured_s``,
        ``resolution_ms``, ``faults``, and ``joules_by_kind`` (None where nothing was measured);
        or 'unavailable: ' and the reason. The parts add up to the whole: what no interval covers
        is ``IDLE``.

        Parameters
        ----------
        start_ns, end_ns : int
            The run.
        intervals : iterable of Interval
            In any order; what lies outside is cut off.

        Raises
        ------
        ValueError
            Two intervals overlap, or one ends before it begins: parts would count twice.

        """
        edges_ns, kinds = _cut(intervals, start_ns, end_ns)
        found: dict[str, Any] = {
            item.name: f'{UNAVAILABLE}: {item.reason}' for item in self.unavailable}
        for track in self._tracks:
            joules, measured_s, resolution_ms = track.read(edges_ns)
            known_s = float(measured_s[-1] - measured_s[0])
            if known_s <= 0:
                found[track.source.name] = f'{UNAVAILABLE}: {track.why_nothing()}'
                continue
            found[track.source.name] = {
                'joules': float(joules[-1] - joules[0]),
                'joules_by_kind': _by_kind(kinds, np.diff(joules), np.diff(measured_s)),
                'measured_s': known_s,
                'unmeasured_s': max((end_ns - start_ns) / NS_PER_S - known_s, 0.0),
                'resolution_ms': resolution_ms,
                'faults': dict(track.faults),
            }
        return found

    def _run(self) -> None:
        self.sample()
        while not self._closing.wait(self._period_s):
            self.sample()
        self.sample()


def _cut(
    intervals: Iterable[Interval], start_ns: int, end_ns: int
) -> tuple[list[int], list[str]]:
    """Return the edges of a run's parts, in order, and the kind of each part."""
    if end_ns < start_ns:
        raise ValueError(f'the run ends at {end_ns} ns, before it begins at {start_ns} ns')
    edges_ns, kinds = [start_ns], []

    def add(kind: str, until_ns: int) -> None:
        until_ns = min(max(until_ns, edges_ns[-1]), end_ns)
        if until_ns > edges_ns[-1]:
            edges_ns.append(until_ns)
            kinds.append(kind)

    before: Interval | None = None
    for interval in sorted(intervals, key=lambda interval: interval[1:]):
        if interval.end_ns < interval.start_ns:
            raise ValueError(f'{interval} ends before it begins')
        if before is not None and interval.start_ns < before.end_ns:
            raise ValueError(f'{before} and {interval} overlap')
        add(IDLE, interval.start_ns)
        add(interval.kind, interval.end_ns)
        before = interval
    add(IDLE, end_ns)
    return edges_ns, kinds


def _by_kind(
    kinds: Sequence[str], joules: np.ndarray, measured_s: np.ndarray,
) -> dict[str, float | None]:
    """Return the energy of every kind, J, None where nothing was measured of it."""
    sums = {kind: np.zeros(2) for kind in kinds}
    for kind, *part in zip(kinds, joules, measured_s):
        sums[kind] += part
    return {kind: float(part) if known > 0 else None for kind, (part, known) in sums.items()}
