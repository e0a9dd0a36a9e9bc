"""
``vla-edge bench engine --loop SECONDS``: the control loop in real time, with a virtual camera.

All parts are those of ``reasoning_node`` but ROS: frame buffer, admission, control loop, control
thread and policy thread. A process of its own films 640x480 at 60 Hz; the loop ticks at 30 Hz.
"""

from collections import Counter
from collections.abc import Callable
import gc
import os
import threading
import time
from typing import Any

import numpy as np

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_MS, NS_PER_S, SystemClock
from vla_edge_ros.lab.bench_endurance import compare_memory, Memory
from vla_edge_ros.lab.chunks import INSTRUCTION
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.lab.virtual_camera import camera
from vla_edge_ros.nodes.control_thread import ControlThread
from vla_edge_ros.progress import no_progress, Progress
from vla_edge_ros.runtime.action_queue import ActionQueue
from vla_edge_ros.runtime.admission import AdmissionController
from vla_edge_ros.runtime.control_loop import ControlLoop
from vla_edge_ros.runtime.frame_buffer import FrameReader
from vla_edge_ros.runtime.runner import Runner, ThreadRunner
from vla_edge_ros.telemetry.age import percentiles
from vla_edge_ros.telemetry.stages import Stage

CAMERA_WIDTH, CAMERA_HEIGHT, CAMERA_HZ = 640, 480, 60.0
GARBAGE_TICKS = 30
POLL_S = 0.2
WARM_UP_TICKS = 60
"""After which the memory counts: threads and buffers have been made by then."""
RSS_TOLERANCE_BYTES = 4 * 3 * CAMERA_WIDTH * CAMERA_HEIGHT
"""Frames that happen to be held at one moment and not at the other."""
POINTS = (50, 99, 99.9)
COLUMNS = ('scheduled', 'started', 'published')
STAGES = tuple(f'{stage.value}_ms' for stage in Stage)


class TickLog:
    """
    What is kept of each tick, in memory that is there before the first.

    Parameters
    ----------
    ticks : int
        How many at most.

    """

    def __init__(self, ticks: int):
        self.count = self.late = 0
        self.decisions: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._ns = np.ones((len(COLUMNS), ticks), np.int64)
        self._ms = np.ones((len(STAGES) + 1, ticks))

    def add(self, result) -> None:
        """Keep a ``StepResult``."""
        at = self.count
        self._ns[:, at] = [getattr(result, f'{name}_ns') for name in COLUMNS]
        self._ms[:, at] = [
            *(getattr(result, name) for name in STAGES), result.observation_age_ms]
        self.decisions[result.decision.value] += 1
        self.late += result.late
        if result.error is not None:
            self.errors[f'{type(result.error).__name__}: {result.error}'] += 1
        self.count += 1

    def summary(self, period_ns: int) -> dict[str, Any]:
        """Return counts and the percentiles of every time, ms; None where there is none."""
        scheduled, started, published = self._ns[:, : self.count]
        *stages, age = self._ms[:, : self.count]
        stages = np.array(stages)
        runs = np.nansum(stages, axis=0)[np.isfinite(stages).any(axis=0)]
        skipped = np.rint(np.diff(scheduled) / period_ns).astype(int) - 1
        first = float(runs[0]) if runs.size else None
        return {
            'ticks': self.count,
            'skipped_ticks': int(skipped.sum()),
            'decisions': dict(self.decisions),
            'late_results': self.late,
            'policy_errors': dict(self.errors),
            'tick_late_ms': _percentiles_ms(started - scheduled),
            'period_deviation_ms': _percentiles_ms(np.abs(np.diff(started) - period_ns)),
            'published_after_ms': _percentiles_ms(published - scheduled),
            'observation_age_ms': percentiles(age, POINTS),
            'run_ms': percentiles(runs, POINTS) | {'first': first},
            'stages_ms': {
                name.removesuffix('_ms'): percentiles(values, POINTS)
                for name, values in zip(STAGES, stages)},
        }  # fmt: skip


def _percentiles_ms(ns: np.ndarray) -> dict[str, float | None]:
    return percentiles(ns / NS_PER_MS, POINTS)


def make_loop(
    policy, frames, runner: Runner, clock: Clock, steady: Clock, calibration: tuple[float, float],
) -> ControlLoop:
    """
    Return a loop with default parameters that follows an instruction from the first tick on.

    Parameters
    ----------
    policy : Policy
        Calibrated.
    frames : FrameSource
        Where pictures come from.
    runner : Runner
        Where the policy runs.
    clock, steady : Clock
        As of ``ControlLoop``.
    calibration : (float, float)
        Cost of observing and of decoding, ms.

    """
    admission = AdmissionController()
    admission.seed(*calibration)
    pose = np.asarray(policy.config.proprioception_mean, np.float32)
    loop = ControlLoop(
        policy, frames, admission, ActionQueue(), runner, clock, steady,
        read_proprioception=lambda: (pose, steady.now_ns()))
    loop.reset()
    loop.set_instruction(INSTRUCTION)
    return loop


def run_loop(
    loop: ControlLoop,
    ticks: int,
    memory: Memory,
    steady: Clock,
    on_tick: Callable[[Any], None] = lambda _: None,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = no_progress,
) -> dict[str, Any]:
    """
    Let the control thread tick and return what was seen, with ``passed``.

    Parameters
    ----------
    loop : ControlLoop
        From :func:`make_loop`.
    ticks : int
        How many.
    memory : Memory
        Compared from tick ``WARM_UP_TICKS`` on.
    steady : Clock
        Of the loop.
    on_tick : callable
        Takes each ``StepResult``, in the control thread.
    stopped : callable
        Asked several times a second; once it returns True, what was seen so far is returned.
    progress : Progress
        Told of the ticks as often.

    Raises
    ------
    RuntimeError
        A tick failed, or the thread does not end.

    """
    log, samples = TickLog(ticks), []
    done = threading.Event()
    failures: list[Exception] = []

    def tick(scheduled_ns: int) -> None:
        if log.count == ticks:
            return
        result = loop.tick(scheduled_ns)
        log.add(result)
        if log.count == min(WARM_UP_TICKS, ticks):
            samples.append(memory.sample())
        if log.count % GARBAGE_TICKS == 0:
            gc.collect(1)
        on_tick(result)
        if log.count == ticks:
            done.set()

    def fail(error: Exception) -> None:
        failures.append(error)
        done.set()

    period_ns = loop.parameters.period_ns
    control = ControlThread(tick, period_ns, steady, lambda: None, fail)
    with quiet_interpreter():
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        control.start()
        while not done.wait(POLL_S) and not stopped():
            progress('tick', log.count, ticks)
        ended = control.stop()
        seconds, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
    if failures or not ended:
        raise RuntimeError('the control thread failed') from (failures or [None])[0]
    samples.append(memory.sample())
    summary = log.summary(period_ns)
    missed = loop.counts['deadline_missed']
    change = compare_memory(samples[0], samples[-1], RSS_TOLERANCE_BYTES)
    clean = not (missed or log.late or log.errors or summary['skipped_ticks'])
    return summary | {
        'asked_ticks': ticks,
        'rate_hz': loop.parameters.rate_hz,
        'deadline_ms': loop.parameters.deadline_ms,
        'publish': loop.parameters.publish,
        'schedule': loop.parameters.schedule,
        'deadline_misses': missed,
        'reasons': {name: count for name, count in loop.counts.items() if count},
        'causes': {name: count for name, count in loop.causes.items() if count},
        'cpu_percent': 100 * cpu_s / seconds,
        'memory': change,
        'passed': log.count > 0 and clean and change['passed'],
    }


def measure_loop(
    policy, calibration: tuple[float, float], seconds: float, memory: Memory,
    stopped: Callable[[], bool] = lambda: False, progress: Progress = no_progress,
    on_tick: Callable[[Any], None] = lambda _: None,
) -> dict[str, Any]:
    """
    Run the loop in real time behind a virtual camera.

    Parameters
    ----------
    policy : Policy
        After ``nodes.engine.calibrate``.
    calibration : (float, float)
        What that returned, ms.
    seconds : float
        How long.
    memory : Memory
        Of this process and the policy's device.
    stopped, progress, on_tick
        As of :func:`run_loop`.

    """
    steady = MonotonicClock()
    name = f'vla_edge_bench_{os.getpid()}'
    runner = ThreadRunner(steady)
    try:
        with (
            camera(name, CAMERA_WIDTH, CAMERA_HEIGHT, CAMERA_HZ) as filming,
            FrameReader(name, policy.frame_target) as frames,
        ):
            loop = make_loop(policy, frames, runner, SystemClock(), steady, calibration)
            ticks = max(round(seconds * NS_PER_S / loop.parameters.period_ns), 1)
            record = run_loop(
                loop, ticks, memory, steady, on_tick, stopped, progress)
    finally:
        runner.close()
    return record | {
        'calibration_ms': {'observe': calibration[0], 'decode': calibration[1]},
        'camera': {'width': CAMERA_WIDTH, 'height': CAMERA_HEIGHT, 'rate_hz': CAMERA_HZ,
                   'frames': filming.published},
    }  # fmt: skip
