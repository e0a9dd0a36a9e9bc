"""Films of the robot: states logged while it runs, drawn afterwards beside the trace."""

from collections.abc import Iterator
import math
from pathlib import Path
from zipfile import BadZipFile

import cv2
import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.sim.world import VIDEO_SIZE, World
from vla_edge_ros.telemetry.trace import read_trace

CAUSE_COLOURS = {
    'fresh': (70, 170, 90),
    'queued': (60, 130, 210),
    'blended': (60, 130, 210),
    'thinking': (225, 150, 40),
    'hold': (225, 150, 40),
}
"""Colour of a tick by the cause of its action, RGB; any other cause is ``OTHER_COLOUR``."""
OTHER_COLOUR = (205, 60, 60)
PANEL_COLOUR = (24, 27, 32)
TEXT_COLOUR = (240, 240, 240)
STRIP_TICKS = 128
STRIP_HEIGHT = 30
STRIP_FULL_MS = 200.0
"""Observation age that fills the strip's height, ms."""


class StateLog:
    """States of a world with their stamps, kept in memory until saved as one ``.npz``."""

    def __init__(self):
        self._stamps_ns: list[int] = []
        self._states: list[np.ndarray] = []
        self._instructions: list[str] = []
        self._instruction_indices: list[int] = []

    def __len__(self) -> int:
        """Return the number of states."""
        return len(self._stamps_ns)

    def append(self, stamp_ns: int, state: np.ndarray, instruction: str) -> None:
        """Add what ``World.get_state`` returned at ``stamp_ns`` (ROS time, ns)."""
        if not self._instructions or self._instructions[-1] != instruction:
            self._instructions.append(instruction)
        self._stamps_ns.append(stamp_ns)
        self._states.append(np.array(state))
        self._instruction_indices.append(len(self._instructions) - 1)

    def save(self, path: Path | str) -> None:
        """Write stamps, states, sentences and the sentence valid at each state."""
        np.savez_compressed(
            path,
            stamps_ns=np.array(self._stamps_ns, np.int64),
            states=np.array(self._states, np.float32),
            instructions=np.array(self._instructions, np.str_),
            instruction_indices=np.array(self._instruction_indices, np.int64),
        )


def render_video(
    state_log_path: Path | str, trace_path: Path | str, out_path: Path | str, fps: float = 30.0
) -> int:
    """
    Draw a state log as a film in real time and return the number of pictures.

    Parameters
    ----------
    state_log_path : Path or str
        What ``StateLog.save`` wrote.
    trace_path : Path or str
        CSV trace of the same run.
    out_path : Path or str
        ``.mp4``, or ``.gif`` or ``.webp``, which web browsers show without a player.
    fps : float
        Pictures a second, 1 to 60.

    Raises
    ------
    ConfigError
        Log or trace cannot be read, the log is empty, ``fps`` is out of range, or the suffix is
        unknown.
    BackendUnavailable
        There is no GL.

    """
    out_path = Path(out_path)
    if not 1.0 <= fps <= 60.0:
        raise ConfigError('fps', 'must be in 1..60', fps)
    if out_path.suffix not in ('.mp4', '.gif', '.webp'):
        raise ConfigError('out_path', 'must end in .mp4, .gif or .webp', str(out_path))
    try:
        with np.load(state_log_path, allow_pickle=False) as log:
            arrays = dict(log)
    except (OSError, ValueError, BadZipFile) as error:
        rule = f'must be a readable state log ({error})'
        raise ConfigError('state_log_path', rule, str(state_log_path)) from None
    if not len(arrays['stamps_ns']):
        raise ConfigError('state_log_path', 'must hold at least one state', str(state_log_path))
    pictures = _draw_pictures(arrays, read_trace(trace_path), fps)
    if out_path.suffix == '.mp4':
        return _write_mp4(pictures, out_path, fps)
    return _write_animation(pictures, out_path, fps)


def _draw_pictures(
    log: dict[str, np.ndarray], trace: dict[str, np.ndarray], fps: float
) -> Iterator[np.ndarray]:
    stamps_ns = log['stamps_ns']
    world = World()
    try:
        count = 1 + int((stamps_ns[-1] - stamps_ns[0]) / NS_PER_S * fps)
        for time_ns in (stamps_ns[0] + np.arange(count) * (NS_PER_S / fps)).astype(np.int64):
            index = int(np.searchsorted(stamps_ns, time_ns, side='right')) - 1
            world.set_state(log['states'][index])
            picture = world.render_video()
            sentence = str(log['instructions'][log['instruction_indices'][index]])
            ticks = int(np.searchsorted(trace['action_stamp_ns'], time_ns, side='right'))
            _annotate(picture, sentence, trace, ticks)
            yield picture
    finally:
        world.close()


def _annotate(
    picture: np.ndarray, sentence: str, trace: dict[str, np.ndarray], ticks: int
) -> None:
    """Draw the sentence above; below, the last of ``ticks`` ticks and a strip of their ages."""
    height, width = picture.shape[:2]
    cv2.rectangle(picture, (0, 0), (width, 40), PANEL_COLOUR, -1)
    _write(picture, f'"{sentence}"', (14, 27), 0.65)
    top = height - 62
    cv2.rectangle(picture, (0, top), (width, height), PANEL_COLOUR, -1)
    if not ticks:
        _write(picture, 'no tick yet', (14, top + 20), 0.5)
        return
    pitch = width // STRIP_TICKS
    for tick in range(max(0, ticks - STRIP_TICKS), ticks):
        bar = STRIP_HEIGHT * np.clip(trace['observation_age_ms'][tick] / STRIP_FULL_MS, 0.0, 1.0)
        left = width - pitch * (ticks - tick)
        corner = (left + pitch - 2, height - 2 - int(np.nan_to_num(bar, nan=STRIP_HEIGHT)))
        cv2.rectangle(picture, (left, height - 2), corner, _cause_colour(trace, tick), -1)
    newest = ticks - 1
    cv2.rectangle(picture, (14, top + 8), (26, top + 20), _cause_colour(trace, newest), -1)
    age_ms = trace['observation_age_ms'][newest]
    age = 'no observation' if math.isnan(age_ms) else f'observation {age_ms:.0f} ms old'
    number, decision, reason, cause = (
        trace[name][newest] for name in ('tick', 'decision', 'reason', 'cause'))
    text = f'tick {number}   {decision} ({reason})   action: {cause}   {age}'
    _write(picture, text, (34, top + 19), 0.47)


def _cause_colour(trace: dict[str, np.ndarray], tick: int) -> tuple[int, int, int]:
    return CAUSE_COLOURS.get(str(trace['cause'][tick]), OTHER_COLOUR)


def _write(picture: np.ndarray, text: str, origin: tuple[int, int], scale: float) -> None:
    cv2.putText(
        picture, text, origin, cv2.FONT_HERSHEY_SIMPLEX, scale, TEXT_COLOUR, 1, cv2.LINE_AA)


def _write_mp4(pictures: Iterator[np.ndarray], path: Path, fps: float) -> int:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*'mp4v'), fps, VIDEO_SIZE)
    if not writer.isOpened():
        raise ConfigError('out_path', 'must be writable as mp4v video', str(path))
    count = 0
    try:
        for picture in pictures:
            writer.write(picture[:, :, ::-1])
            count += 1
    finally:
        writer.release()
    return count


def _write_animation(pictures: Iterator[np.ndarray], path: Path, fps: float) -> int:
    from PIL import Image

    images = [Image.fromarray(cv2.resize(p, None, fx=0.5, fy=0.5, interpolation=cv2.INTER_AREA))
              for p in pictures]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=round(1000.0 / fps), loop=0)
    return len(images)
