"""A control loop in virtual time around a fake policy, with everything at hand."""

from dataclasses import dataclass, field
import math
from types import SimpleNamespace

import numpy as np

from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionController, AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoop
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.telemetry.stages import Stage

PERIOD_NS = ControlLoopParameters().period_ns
SCHEDULES = [
    {'schedule': 'deadline'},
    {'schedule': 'sync'},
    {'schedule': 'overlap', 'overlap_percent': 0.0},
    {'schedule': 'overlap'},
    {'schedule': 'overlap', 'overlap_percent': 100.0, 'seam': 'blend'},
    {'schedule': 'latest'},
]
"""Every schedule, as parameters of the loop."""


class FakePolicy:
    """Each chunk says which frame it was made from; ``fail`` is raised by ``act``."""

    def __init__(self):
        self.calls = []
        self.fail = None
        self.values = 0.0
        self.steps = 3
        self._stamp_ns = None

    def set_instruction(self, text):
        if len(text) > 40:
            raise ConfigError('instruction', 'must fit the prompt slots', text)
        self.calls.append(('instruction', text))

    def reset(self):
        self.calls.append(('reset',))

    def observe(self, image, proprioception, stamp_ns):
        self.calls.append(('observe', stamp_ns, proprioception))
        self._stamp_ns = stamp_ns
        return SimpleNamespace(stage_ns={Stage.PREFILL: 1}, evicted_frame_id=3, num_frames=8)

    def act(self):
        self.calls.append(('act',))
        if self.fail is not None:
            raise self.fail
        values = np.full((self.steps, 2), self.values, np.float32)
        return ActionChunk(values, PERIOD_NS, np.zeros(2), np.zeros(8, np.int32), self._stamp_ns)


class ScriptedLatency:
    """Observation costs ``prefill_ms``; decoding takes the next of ``decode_ms``, then 8 ms."""

    def __init__(self, decode_ms=(), prefill_ms=10.0):
        self.decode_ms = list(decode_ms)
        self.prefill_ms = prefill_ms

    def draw(self):
        decode_ms = self.decode_ms.pop(0) if self.decode_ms else 8.0
        return {
            Stage.PREPROCESS: 0,
            Stage.PREFILL: int(self.prefill_ms * NS_PER_MS),
            Stage.DECODE: int(decode_ms * NS_PER_MS),
        }


@dataclass
class Camera:
    """A camera whose newest frame follows from the time; ``stop_ns`` freezes it."""

    clock: object
    rate_hz: float = 60.0
    delay_ms: float = 0.0
    stop_ns: float = math.inf
    reads: list = field(default_factory=list)

    def read(self):
        """Return the newest frame."""
        now_ns = min(self.clock.now_ns(), self.stop_ns) - self.delay_ms * NS_PER_MS
        if now_ns < 0:
            return None
        sequence = int(now_ns * self.rate_hz / NS_PER_S) + 1
        stamp_ns = round((sequence - 1) / self.rate_hz * NS_PER_S)
        self.reads.append(sequence)
        return SimpleNamespace(image=None, stamp_ns=stamp_ns, sequence=sequence)


class Rig:
    """A loop in virtual time with everything at hand."""

    def __init__(self, latency=None, camera=None, queue=None, admission=None, **loop):
        self.clock = ManualClock()
        self.policy = FakePolicy()
        self.camera = Camera(self.clock, **(camera or {}))
        self.admission = AdmissionController(AdmissionParameters(**(admission or {})))
        self.runner = VirtualRunner(self.clock, latency or ScriptedLatency())
        self.joints = (np.zeros(2, np.float32), math.inf)  # as if just received
        self.loop = ControlLoop(
            self.policy,
            self.camera,
            self.admission,
            ActionQueue(ActionQueueParameters(**(queue or {}))),
            self.runner,
            self.clock,
            self.clock,
            ControlLoopParameters(**loop),
            lambda: self.joints,
        )
        self.loop.set_instruction('reach the red cube')
        self.next_ns = 0

    def run(self, ticks=1):
        """Tick on schedule and return the results."""
        results = []
        for _ in range(ticks):
            self.loop.between_ticks(self.next_ns)
            self.clock.advance_to_ns(self.next_ns)
            assert self.clock.now_ns() == self.next_ns, 'an overrun delayed the next tick'
            results.append(self.loop.tick(self.next_ns))
            self.next_ns += PERIOD_NS
        return results

    def tick(self):
        """Run one tick."""
        return self.run()[0]


def names(results, name):
    return [getattr(result, name).value for result in results]


def rig_of(cost_ms=(), steps=3, camera=None, queue=None, **loop):
    """Make a rig of ``steps`` actions a chunk; ``cost_ms`` is a cost for ever, or each in turn."""
    if isinstance(cost_ms, (int, float)):
        cost_ms = [cost_ms] * 10_000
    rig = Rig(ScriptedLatency(cost_ms, prefill_ms=0.0), camera, queue, **loop)
    rig.policy.steps = steps
    return rig
