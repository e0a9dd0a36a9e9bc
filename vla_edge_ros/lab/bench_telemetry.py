"""
Time what tracing and age accounting add to a tick, on the control thread and in all.

Run as ``python -m vla_edge_ros.lab.bench_telemetry [--json FILE]``. The control thread ticks at
30 Hz as on a robot, without a policy, by turns with and without telemetry: then each record wakes
the writer's thread alone, which is the dear way. Once a second the ages are summed up as for
``/diagnostics``. The overhead is the process's CPU time with telemetry less that without.
"""

import argparse
from dataclasses import replace
import json
from pathlib import Path
import tempfile
import threading
import time

import numpy as np

from vla_edge_ros.clock import ManualClock, MonotonicClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.lab.bench_eviction import percentiles_us
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.nodes.control_thread import ControlThread
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import ActionQueue
from vla_edge_ros.runtime.admission import AdmissionController
from vla_edge_ros.runtime.control_loop import ControlLoop, StepResult
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.sim.cell import ACTION_DIM
from vla_edge_ros.telemetry.age import AgeWindow
from vla_edge_ros.telemetry.trace import TraceWriter

RATE_HZ = 30
PERIOD_NS = NS_PER_S // RATE_HZ
LIMIT = 0.01
"""Share of a tick."""


class _NoCamera:
    def read(self) -> None:
        return None


def make_result() -> StepResult:
    """Return a step result of the loop with every field that a full tick has."""
    clock = ManualClock(1_700_000_000 * NS_PER_S)
    loop = ControlLoop(
        None, _NoCamera(), AdmissionController(), ActionQueue(),
        VirtualRunner(clock, FixedLatency({})), clock, clock)
    values = np.array([[0.123456, -0.234567]] * 3, np.float32)
    stamp_ns = clock.now_ns() - 21 * NS_PER_MS
    chunk = ActionChunk(
        values, PERIOD_NS, np.zeros(2, np.float32), np.zeros(8, np.int32), stamp_ns)
    loop.queue.push(chunk, clock.now_ns())
    return replace(
        loop.tick(clock.now_ns()), frame_sequence=123_456, estimate_ms=12.345678,
        budget_ms=30.98765, preprocess_ms=0.123456, vision_ms=1.234567, prefill_ms=4.567891,
        decode_ms=6.789123, retained_frames=128, evicted_frame=123_000)


def run_ticks(ticks: int, trace: TraceWriter | None) -> tuple[float, np.ndarray]:
    """Tick ``ticks`` times; return CPU time of the process a tick, µs, and time on the thread."""
    result, window, done = make_result(), AgeWindow(), threading.Event()
    durations_ns = np.zeros(ticks, np.int64)
    at = 0

    def tick(_scheduled_ns: int) -> None:
        nonlocal at
        if at == ticks:
            done.set()
            return
        step = replace(result, tick=at)
        if trace is not None:
            started_ns = time.perf_counter_ns()
            trace.record(step)
            window.add(step.cause.value, step.observation_age_ms)
            durations_ns[at] = time.perf_counter_ns() - started_ns
            if at % RATE_HZ == 0:
                window.summary()  # the executor's work on a robot, here in the CPU time only
        at += 1

    thread = ControlThread(tick, PERIOD_NS, MonotonicClock(), lambda: None, lambda error: None)
    with quiet_interpreter():
        began_ns = time.process_time_ns()
        thread.start()
        done.wait()
        cpu_ns = time.process_time_ns() - began_ns
    thread.stop()
    return cpu_ns / ticks / 1e3, durations_ns


def measure(seconds: int, turns: int) -> dict:
    """Return what telemetry costs, µs a tick and as a share of the period."""
    ticks = seconds * RATE_HZ
    without_us, with_us, durations_ns, dropped = [], [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(turns):
            without_us.append(run_ticks(ticks, None)[0])
            with TraceWriter(Path(folder) / 'trace.csv', ACTION_DIM) as trace:
                cpu_us, on_thread_ns = run_ticks(ticks, trace)
            dropped += trace.dropped
            with_us.append(cpu_us)
            durations_ns.append(on_thread_ns)
        bytes_a_tick = (Path(folder) / 'trace.csv').stat().st_size / ticks
    # Neighbours in time share what else the machine does.
    cpu_us = float(np.median(np.subtract(with_us, without_us)))
    control = percentiles_us(np.concatenate(durations_ns))
    period_us = PERIOD_NS / 1e3
    return {
        'rate_hz': RATE_HZ, 'ticks': ticks * turns, 'turns': turns, 'dropped': dropped,
        'control_thread_us': control,
        'control_thread_share': control['p50'] / period_us,
        'cpu_us': {'with': with_us, 'without': without_us, 'difference': cpu_us},
        'cpu_share': cpu_us / period_us,
        'trace_bytes_a_tick': bytes_a_tick,
    }


def main() -> int:
    """Print and store the record; exit code 1 when the limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    parser.add_argument('--json', metavar='FILE', help='store the record here')
    parser.add_argument('--seconds', type=int, default=10, help='length of a turn')
    parser.add_argument('--turns', type=int, default=9)
    options = parser.parse_args()
    record = {'environment': environment_record(), 'limit_share': LIMIT}
    record |= measure(options.seconds, options.turns)
    text = json.dumps(record, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + '\n', encoding='utf-8')
    return 0 if record['cpu_share'] <= LIMIT and not record['dropped'] else 1


if __name__ == '__main__':
    raise SystemExit(main())
