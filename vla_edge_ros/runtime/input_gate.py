"""Which frame the policy may look at, and the name of the reason when there is none."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from vla_edge_ros.clock import Clock, NS_PER_MS
from vla_edge_ros.runtime.admission import Reason
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters


class FrameSource(Protocol):
    """Where frames come from."""

    def read(self) -> Any:
        """Return the newest ``Frame``, the caller's own, or None when there is none."""
        ...


class InputGate:
    """
    Look at the newest frame and joint state, and judge whether they are good enough.

    Parameters
    ----------
    frame_source : FrameSource
        Where frames come from.
    read_proprioception : callable, optional
        Returns the joint state as the caller's own array with the steady time of its reception,
        ns; or None while there is none.
    clock, steady : Clock
        ROS time, which stamps are told in, and monotonic time.

    Attributes
    ----------
    frame : Frame or None
        What the last look found, good or not.
    proprioception : float32 [joints] or None
        The joint state that goes with a good frame.

    """

    def __init__(
        self,
        frame_source: FrameSource,
        read_proprioception: Callable[[], tuple[np.ndarray, int] | None] | None,
        clock: Clock,
        steady: Clock,
    ):
        self.frame: Any = None
        self.proprioception: np.ndarray | None = None
        self._frame_source = frame_source
        self._read_proprioception = read_proprioception
        self._clock = clock
        self._steady = steady
        self.reset()

    def reset(self) -> None:
        """Forget which frames were seen."""
        self._newest_sequence: int | None = None
        self._observed_sequence: int | None = None
        self._same_frame_ticks = 0

    def mark_observed(self) -> None:
        """Note that a run takes in the frame of the last look, which is thus not good again."""
        self._observed_sequence = self.frame.sequence

    def look(self, parameters: ControlLoopParameters, at_tick: bool = True) -> Reason | None:
        """
        Look at what is there now; return the reason not to use it, if any.

        Parameters
        ----------
        parameters : ControlLoopParameters
            What is too old.
        at_tick : bool
            Only ticks count towards a frozen camera.

        """
        self.proprioception = None
        self.frame = frame = self._frame_source.read()
        if frame is None:
            return Reason.NO_FRAME
        if at_tick:
            same = frame.sequence == self._newest_sequence
            self._same_frame_ticks = self._same_frame_ticks + 1 if same else 0
            self._newest_sequence = frame.sequence
            if self._same_frame_ticks >= parameters.frozen_camera_ticks:
                return Reason.FROZEN_CAMERA
        if frame.sequence == self._observed_sequence:
            return Reason.REPEATED_FRAME
        # A stamp from the future is no fresher than one from the past: two clocks disagree.
        age_ns = abs(self._clock.now_ns() - frame.stamp_ns)
        if age_ns > parameters.max_observation_age_ms * NS_PER_MS:
            return Reason.STALE_FRAME
        if self._read_proprioception is None:
            return None
        joints = self._read_proprioception()
        oldest_ns = self._steady.now_ns() - parameters.max_joint_state_age_ms * NS_PER_MS
        if joints is None or joints[1] < oldest_ns:
            return Reason.NO_PROPRIOCEPTION
        self.proprioception = joints[0]
        return None
