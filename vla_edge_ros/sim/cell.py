"""The cell that an episode looks at: world and camera, moved on together in virtual time."""

from collections import deque
from collections.abc import Callable

import numpy as np

from vla_edge_ros.clock import ManualClock, NS_PER_S
from vla_edge_ros.runtime.frame_buffer import Frame
from vla_edge_ros.sim.world import World

ACTION_DIM = 2
CAMERA_HZ = 60


class Camera:
    """
    Frame source of 60 Hz pictures that arrive ``delay_ns`` late, drawn only when read.

    Parameters
    ----------
    clock : ManualClock
        Virtual time.
    viewer : World
        Shows the state of the frame read last.
    draw : callable
        Returns the picture of what ``viewer`` shows.
    delay_ns : int
        Time from a frame's stamp to its arrival, ns.

    """

    def __init__(
        self, clock: ManualClock, viewer: World, draw: Callable[[], np.ndarray], delay_ns: int,
    ):
        self._clock = clock
        self._viewer = viewer
        self._draw = draw
        self._delay_ns = delay_ns
        self._states: deque[tuple[int, int, np.ndarray]] = deque()
        self._sequence = 0
        self._frame: Frame | None = None

    def record(self, world: World) -> None:
        """Take the picture of this moment."""
        self._sequence += 1
        self._states.append((self._sequence, world.time_ns, world.get_state()))

    def read(self) -> Frame | None:
        """Return the newest frame that has arrived."""
        limit_ns = self._clock.now_ns() - self._delay_ns
        while len(self._states) > 1 and self._states[1][1] <= limit_ns:
            self._states.popleft()
        sequence, stamp_ns, state = self._states[0]
        if stamp_ns > limit_ns:
            return None
        if self._frame is None or self._frame.sequence != sequence:
            self._viewer.set_state(state)
            self._frame = Frame(self._draw(), stamp_ns, stamp_ns + self._delay_ns, sequence)
        return self._frame

    def read_joints(self) -> tuple[np.ndarray, int]:
        """Return the joint positions that belong to the frame read last, and the time."""
        return self._viewer.joint_positions, self._clock.now_ns()


class Cell:
    """World and camera, moved on together under the command in force; what the loop looks at."""

    def __init__(self, world: World, camera: Camera, clock: ManualClock):
        self._world = world
        self._camera = camera
        self._clock = clock
        self._frames = 0
        self.command = np.zeros(ACTION_DIM)

    def read(self) -> Frame | None:
        """Return the newest frame, also between two ticks."""
        self.advance_to(self._clock.now_ns())
        return self._camera.read()

    def advance_to(self, time_ns: int) -> None:
        """Move on to ``time_ns``, taking a picture at every camera period on the way."""
        while (frame_ns := self._frames * NS_PER_S // CAMERA_HZ) <= time_ns:
            self._world.step(self.command, frame_ns - self._world.time_ns)
            self._camera.record(self._world)
            self._frames += 1
        self._world.step(self.command, max(time_ns - self._world.time_ns, 0))
