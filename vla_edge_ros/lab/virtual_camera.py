"""
A camera that is none: moving pictures into a frame buffer, from a process of its own.

``python -m vla_edge_ros.lab.virtual_camera NAME WIDTH HEIGHT RATE_HZ`` films until its standard
input ends, as it does with the process that holds the other end, and prints how many frames
there were.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
import select
import subprocess
import sys
import time

import numpy as np

from vla_edge_ros.clock import Clock, NS_PER_S, SystemClock
from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter

START_TIMEOUT_S = 60.0
"""For importing, and compiling what was not compiled before."""
POLL_S = 0.01
SHIFT_PIXELS = 4


class Camera:
    """
    The other process.

    Attributes
    ----------
    published : int or None
        Frames it wrote; known once it has ended.

    """

    def __init__(self, process: subprocess.Popen):
        self.published: int | None = None
        self._process = process

    def stop(self) -> None:
        """End it and read what it says."""
        output, _ = self._process.communicate(timeout=START_TIMEOUT_S)
        self.published = int(output) if output.strip() else None


@contextmanager
def camera(name: str, width: int, height: int, rate_hz: float) -> Iterator[Camera]:
    """
    Let a camera write to frame buffer ``name`` for the time of a ``with`` block.

    Raises
    ------
    TimeoutError
        There is no frame in time.

    """
    command = [sys.executable, '-m', __name__, name, str(width), str(height), str(rate_hz)]
    # A session of its own: Ctrl-C is for the one who will end it.
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    running = Camera(process)
    try:
        ends_s = time.monotonic() + START_TIMEOUT_S
        with FrameReader(name) as reader:
            while reader.newest_sequence() == 0:
                if process.poll() is not None or time.monotonic() > ends_s:
                    raise TimeoutError('the virtual camera gives no frame')
                time.sleep(POLL_S)
        yield running
    finally:
        running.stop()


def film(
    writer: FrameWriter, shape: tuple[int, int, int], rate_hz: float, clock: Clock,
    wait: Callable[[float], bool],
) -> int:
    """
    Write frames at a steady rate and return how many.

    Parameters
    ----------
    writer : FrameWriter
        Takes them.
    shape : (int, int, int)
        Height, width and 3.
    rate_hz : float
        Frames a second; those that came due meanwhile are left out.
    clock : Clock
        ROS time, which the frames are stamped with.
    wait : callable
        Waits so many seconds and returns False when it is time to end.

    """
    picture = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    period_ns = round(NS_PER_S / rate_hz)
    due_ns = clock.now_ns()
    count = 0
    while wait(max(due_ns - clock.now_ns(), 0) / NS_PER_S):
        now_ns = clock.now_ns()
        writer.write(np.roll(picture, count * SHIFT_PIXELS, axis=1), now_ns, now_ns)
        count += 1
        late_ns = max(clock.now_ns() - due_ns, 0)
        due_ns += (late_ns // period_ns + 1) * period_ns
    return count


def main(words: list[str]) -> int:
    """Film until standard input ends."""
    name, width, height, rate_hz = words[0], int(words[1]), int(words[2]), float(words[3])

    def wait(seconds: float) -> bool:
        return not select.select([sys.stdin], [], [], seconds)[0]

    with FrameWriter(name, 3 * width * height) as writer:
        print(film(writer, (height, width, 3), rate_hz, SystemClock(), wait))
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
