"""A policy that notes when it works, for sharing energy out."""

from collections.abc import Callable
from typing import Any

import numpy as np

from vla_edge_ros.clock import Clock
from vla_edge_ros.lab.bench_loop import CAMERA_HEIGHT, CAMERA_WIDTH
from vla_edge_ros.lab.chunks import INSTRUCTION
from vla_edge_ros.telemetry.energy import Interval
from vla_edge_ros.telemetry.work import DECODE, PREFILL

PICTURES = 4


class MeteredPolicy:
    """
    A policy that notes when it observes and acts, and keeps its cache full.

    Parameters
    ----------
    policy : Policy
        After ``nodes.engine.calibrate``.
    clock : Clock
        Steady.

    Attributes
    ----------
    intervals : list of Interval
        What it did since :meth:`forget`.

    """

    def __init__(self, policy, clock: Clock):
        self.config, self.frame_target = policy.config, policy.frame_target
        self.intervals: list[Interval] = []
        self._policy, self._clock = policy, clock
        self._newest_stamp_ns = self._count = 0
        shape = (PICTURES, CAMERA_HEIGHT, CAMERA_WIDTH, 3)
        self._pictures = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self._joints = np.asarray(policy.config.proprioception_mean, np.float32)
        policy.set_instruction(INSTRUCTION)
        for _ in range(policy.cache.layout.max_frames):
            self.prefill()

    def set_instruction(self, text: str) -> None:
        """Pass it on."""
        self._policy.set_instruction(text)

    def reset(self) -> None:
        """Do nothing: a cache that filled anew would make the first chunks cheaper."""

    def observe(self, image, proprioception, stamp_ns: int):
        """Pass it on."""
        self._newest_stamp_ns = stamp_ns
        return self._noted(PREFILL, self._policy.observe, image, proprioception, stamp_ns)

    def act(self):
        """Pass it on."""
        return self._noted(DECODE, self._policy.act)

    def prefill(self) -> None:
        """Take in the next of some random pictures."""
        self._count += 1
        picture = self._pictures[self._count % PICTURES]
        self.observe(picture, self._joints, self._newest_stamp_ns + 1)

    def chunk(self) -> None:
        """Take in a picture and act."""
        self.prefill()
        self.act()

    def forget(self) -> None:
        """Drop the intervals so far."""
        self.intervals = []

    def _noted(self, kind: str, call: Callable[..., Any], *arguments: Any) -> Any:
        starts_ns = self._clock.now_ns()
        result = call(*arguments)
        self.intervals.append(Interval(kind, starts_ns, self._clock.now_ns()))
        return result
