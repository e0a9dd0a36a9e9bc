"""
``vla-edge bench engine --energy SECONDS``: joules of a chunk and of a completed task, by part.

Six measurements of that length, in this order: nothing runs, only prefills, only decodes, whole
chunks back to back, the control loop at 30 Hz behind a virtual camera, and simulated tasks in real
time. Each begins and ends when the counter is seen to move, so that the counter's period, 20 to
100 ms with NVML, adds nothing to the whole. Its parts come from samples that a thread takes
meanwhile; between two movements of the counter the energy is spread evenly, so that a chunk of
10 ms in a period of 33 ms is not told from the idle time around it. What tells them apart are the
first four measurements, in which only one thing happens for seconds: ``by_steady_power`` is the
times of a run, each with the power measured there.
"""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
import time
from typing import Any

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_S
from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.lab.metered_policy import MeteredPolicy
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.progress import no_progress, Progress
from vla_edge_ros.sim.tasks import TICK_HZ
from vla_edge_ros.telemetry.energy import EnergyMeter, IDLE, Interval, UNAVAILABLE
from vla_edge_ros.telemetry.energy_sources import (
    CounterSource,
    EnergySource,
    find_sources,
    nvml_source_at,
    Unavailable,
    Unreadable,
)
from vla_edge_ros.telemetry.work import (
    DECODE,
    LATE,
    PREFILL,
    RETRIES,
    seconds_by_part,
    trace_columns,
    work_intervals,
)

SAMPLE_HZ = 200.0
SETTLE_S = 0.5
"""Work before a measurement, for clocks and power to follow it."""
MOVE_LIMIT_S = 2.0
"""A counter that has not moved for this long is none."""
IDLE_STEP_S = 0.002
CATCH_UP_S = 0.05
"""After the end, for the sampling thread to have seen the counter's last movement."""
TOLERANCE = 0.02
"""Of the sum of the parts, against the counter."""
STEADY = ('idle', 'prefill', 'decode', 'chunk')


@dataclass(slots=True)
class _Edge:
    """When the counter moved, and how far it had come; None for a power sensor."""

    time_ns: int
    joules: float | None
    works: int


class EnergyBench:
    """
    The measurements, one method each; every one returns a record.

    Parameters
    ----------
    policy : MeteredPolicy
        What runs.
    source : EnergySource
        What is read; no one else may use it.
    clock : Clock, optional
        Steady, the policy's too.
    pause : callable, optional
        Lets some seconds pass.
    stopped : callable
        Asked all the time; once it returns True, a measurement ends early.
    rate_hz : float
        Samples a second.

    """

    def __init__(
        self, policy: MeteredPolicy, source: EnergySource, clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep, stopped: Callable[[], bool] = lambda: False,
        rate_hz: float = SAMPLE_HZ,
    ):
        self.policy = policy
        self.clock = clock or MonotonicClock()
        self.meter = EnergyMeter([source], rate_hz, self.clock)
        self.stopped = stopped
        self._pause = pause
        # Of its own: what it adds up must not come from the samples it is compared with.
        self._counter = source.again() if isinstance(source, CounterSource) else None

    def steady(self, what: str, seconds: float) -> dict[str, Any]:
        """
        Do one thing for some time, one of ``STEADY``.

        Raises
        ------
        Unreadable
            The counter does not move or cannot be read.

        """
        work = {'idle': self._rest, 'prefill': self.policy.prefill, 'decode': self.policy.act,
                'chunk': self.policy.chunk}[what]  # fmt: skip
        with quiet_interpreter():
            self._repeat(work, SETTLE_S)
            self.policy.forget()
            start = self._edge(work)
            works = self._repeat(work, seconds)
            end = self._edge(work)
        works += end.works
        record = self._record(start, end, self.policy.intervals)
        return record if what == 'idle' else record | {
            'runs': works, 'run_ms': 1e3 * record['seconds'] / works,
            'joules_per_run': record['joules'] / works}

    def loop(self, run: Callable[[Callable[[Any], None]], dict[str, Any]]) -> dict[str, Any]:
        """
        Let a control loop run, and tell its energy by part.

        Parameters
        ----------
        run : callable
            Runs the loop, calls what it is given with each ``StepResult``, and returns the
            record that it makes.

        """
        results: list[Any] = []
        start = self._edge(self._rest)
        about = run(results.append)
        end = self._edge(self._rest)
        period_ns = round(NS_PER_S / about['rate_hz'])
        intervals = work_intervals(trace_columns(results), period_ns)
        whole = self._record(start, end, intervals)
        # Cameras and threads start and end around the ticks: they are no part of the loop.
        first_ns, last_ns = results[0].scheduled_ns, results[-1].scheduled_ns + period_ns
        ticks = self._between(first_ns, last_ns, intervals)
        chunks = sum(interval.kind == DECODE for interval in intervals)
        return {'whole': whole, 'ticks': len(results), 'chunks': chunks} | ticks | {
            'joules_per_chunk': ticks['joules'] / chunks if chunks else None,
            'decisions': about['decisions'], 'deadline_misses': about['deadline_misses']}

    def tasks(self, seconds: float, chunk_ms: float) -> dict[str, Any]:
        """
        Let the expert do simulated tasks in real time while the policy runs beside it.

        The actions are the expert's, for random weights complete nothing; what is measured is the
        engine's energy over the time that tasks take. An episode that has begun is ended.

        Parameters
        ----------
        seconds : float
            No episode begins after it.
        chunk_ms : float
            What the simulation takes a run to cost.

        """
        from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator

        policy, completed, episodes, late = self.policy, 0, 0, 0
        due_ns = 0
        policy.forget()

        def on_tick(result, _world) -> None:
            nonlocal due_ns, late
            if result.runs:
                policy.chunk()
            due_ns += NS_PER_S // TICK_HZ
            late += self.clock.now_ns() > due_ns
            while (left_ns := due_ns - self.clock.now_ns()) > 0:
                self._pause(left_ns / NS_PER_S)

        parameters = EpisodeParameters(control='oracle', compute_ms=chunk_ms)
        with closing(Simulator(parameters)) as simulator:
            start, due_ns = self._edge(self._rest), self.clock.now_ns()
            ends_ns = due_ns + int(seconds * NS_PER_S)
            while self.clock.now_ns() < ends_ns and not self.stopped():
                completed += simulator.run(0, episodes, on_tick).succeeded
                episodes += 1
            end = self._edge(self._rest)
        record = self._record(start, end, policy.intervals)
        return record | {
            'episodes': episodes, 'completed': completed, 'late_ticks': late,
            'joules_per_completed_task': record['joules'] / completed if completed else None}

    def _rest(self) -> None:
        self._pause(IDLE_STEP_S)

    def _repeat(self, work: Callable[[], None], seconds: float) -> int:
        ends_ns = self.clock.now_ns() + int(seconds * NS_PER_S)
        works = 0
        while self.clock.now_ns() < ends_ns and not self.stopped():
            work()
            works += 1
        return works

    def _edge(self, work: Callable[[], None]) -> _Edge:
        """Go on with ``work`` until the counter moves."""
        began_ns, works = self.clock.now_ns(), 0
        if self._counter is not None:
            self._counter.read(began_ns)  # what came before is no edge
        while True:
            work()
            works += 1
            now_ns = self.clock.now_ns()
            if self._counter is None:
                return _Edge(now_ns, None, works)
            reading = self._counter.read(now_ns)
            if reading is not None:
                return _Edge(now_ns, reading.joules, works)
            if now_ns - began_ns > MOVE_LIMIT_S * NS_PER_S:
                raise Unreadable(f'{self._counter.name} did not move for {MOVE_LIMIT_S:g} s')

    def _record(self, start: _Edge, end: _Edge, intervals: list[Interval]) -> dict[str, Any]:
        self._pause(CATCH_UP_S)
        found = self._between(start.time_ns, end.time_ns, intervals)
        if start.joules is not None:
            found['counter_joules'] = end.joules - start.joules
            # Nothing used over the time of a measurement is no measurement.
            ratio = sum(found['parts_joules'].values()) / max(found['counter_joules'], 1e-9)
            found |= {'parts_over_counter': ratio, 'passed': abs(ratio - 1) <= TOLERANCE}
        else:
            found |= {'counter_joules': f'{UNAVAILABLE}: a power sensor has no counter'}
        return found

    def _between(self, start_ns: int, end_ns: int, intervals: list[Interval]) -> dict[str, Any]:
        (told,) = self.meter.report(start_ns, end_ns, intervals).values()
        if isinstance(told, str):
            raise Unreadable(told.removeprefix(f'{UNAVAILABLE}: '))
        parts = told['joules_by_kind']
        return {
            'seconds': (end_ns - start_ns) / NS_PER_S, 'joules': told['joules'],
            'watts': told['joules'] / max(told['measured_s'], 1e-9),
            'parts_joules': {kind: joules or 0.0 for kind, joules in parts.items()},
            'parts_seconds': seconds_by_part(intervals, start_ns, end_ns),
            'idle_share': (parts.get(IDLE) or 0.0) / told['joules'] if told['joules'] else None,
            'counter_period_ms': told['resolution_ms'], 'faults': told['faults'],
        }  # fmt: skip


def by_steady_power(record: dict[str, Any], steady: dict[str, dict]) -> dict[str, Any]:
    """
    Return what the times of a run come to, each with the power measured for it alone.

    Parameters
    ----------
    record : dict
        Of a loop or of tasks.
    steady : dict
        Records of ``STEADY``.

    Returns
    -------
    dict
        ``prefill_joules``, ``decode_joules``, and of what was late or a probe
        ``late_or_aborted_joules`` and ``retries_joules``; ``rest_joules`` and ``rest_watts``, what
        the counter has beyond them; ``predicted_joules`` with the rest at the power measured
        before, and its ratio to the counter. The clocks stay up between chunks, so that the rest
        can draw more.

    """
    seconds = record['parts_seconds']
    work = {what: seconds[what] * steady[what]['watts'] for what in (PREFILL, DECODE)}
    # What was late or a probe kept the device as busy as any other chunk.
    work |= {what: seconds.get(what, 0.0) * steady['chunk']['watts'] for what in (LATE, RETRIES)}
    rest_s = record['seconds'] - sum(seconds.get(what, 0.0) for what in work)
    rest_j = record['joules'] - sum(work.values())
    predicted_j = sum(work.values()) + rest_s * steady['idle']['watts']
    return {
        **{f'{what}_joules': joules for what, joules in work.items()},
        'rest_joules': rest_j, 'rest_seconds': rest_s,
        'rest_watts': rest_j / rest_s if rest_s > 0 else None,
        'rest_share': rest_j / record['joules'] if record['joules'] else None,
        'predicted_joules': predicted_j,
        'predicted_over_counter': predicted_j / record['joules'] if record['joules'] else None,
    }


def find_source(pci_address: str | None) -> EnergySource:
    """
    Return the counter of a GPU, or without one a counter of this machine, else a power sensor.

    Raises
    ------
    BackendUnavailable
        There is none, with every reason.

    """
    found = find_sources() if pci_address is None else [
        nvml_source_at(pci_address), *find_sources()]
    usable = [source for source in found if not isinstance(source, Unavailable)]
    if pci_address is None:
        usable = [source for source in usable if not source.name.startswith('nvml')]
    usable.sort(key=lambda source: not isinstance(source, CounterSource))
    if not usable:
        reasons = '; '.join(dict.fromkeys(f'{item.name}: {item.reason}' for item in found
                                          if isinstance(item, Unavailable)))
        raise BackendUnavailable('--energy', 'needs a source of energy', reasons or 'none')
    return usable[0]


def measure_energy(
    bench: EnergyBench, seconds: float,
    run_loop: Callable[[Callable[[Any], None]], dict[str, Any]], progress: Progress = no_progress,
) -> dict[str, Any]:
    """
    Make all measurements and return one record, with ``passed``.

    A measurement that fails is 'unavailable' with its reason, and the others stand.

    Parameters
    ----------
    bench : EnergyBench
        Its meter is started and joined here.
    seconds : float
        Of each measurement.
    run_loop : callable
        As of :meth:`EnergyBench.loop`.
    progress : Progress
        Told of every measurement.

    """
    record: dict[str, Any] = {'tolerance': TOLERANCE, 'sample_hz': SAMPLE_HZ}

    def attempt(name: str, make: Callable[[], dict]) -> None:
        progress('energy, measurement', len(record) - 1, len(STEADY) + 2)
        try:
            record[name] = make()
        except Exception as error:  # those made before must not be lost
            record[name] = f'{UNAVAILABLE}: {type(error).__name__}: {error}'

    with bench.meter:
        for what in STEADY:
            attempt(what, lambda what=what: bench.steady(what, seconds))
        chunk = record['chunk']
        # What the simulation is told of the cost; it decides nothing that is measured.
        chunk_ms = min(chunk['run_ms'], 1000.0) if isinstance(chunk, dict) else 10.0
        attempt('loop', lambda: bench.loop(run_loop))
        attempt('tasks', lambda: bench.tasks(seconds, chunk_ms))
    whole = all(isinstance(record[what], dict) for what in STEADY)
    for name in ('loop', 'tasks'):
        if whole and isinstance(record[name], dict):
            record[name]['by_steady_power'] = by_steady_power(record[name], record)
    checked = [record[what] for what in (*STEADY, 'tasks') if isinstance(record[what], dict)]
    if isinstance(record['loop'], dict):
        checked.append(record['loop']['whole'])
    complete = whole and isinstance(record['loop'], dict)
    record['passed'] = complete and all(part.get('passed', True) for part in checked)
    return record
