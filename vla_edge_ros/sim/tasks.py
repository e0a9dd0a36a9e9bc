"""
Tasks in which time matters: what all have in common, and the first, ``track``.

``track``: keep the tool over the cube that the instruction names, while everything moves.
"""

import re
from typing import Protocol

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.sim.scene import COLOURS, SPEED_LIMIT

__all__ = [
    'approach', 'COLOURS', 'expert_action', 'expert_chunk', 'MAX_SEED', 'named_colour',
    'sample_instruction', 'Task', 'TICK_HZ', 'TrackTask',
]

EXPERT_GAIN = 8.0
"""Commanded speed per metre of distance, 1/s."""
TICK_HZ = 30
MAX_SEED = 2**31 - 1
"""Largest seed of a simulation, wherever it runs: what a ROS parameter tool takes."""

_VERBS = (
    'reach', 'touch', 'track', 'follow', 'chase', 'go to', 'move to', 'point at', 'stay on',
    'keep up with', 'get to', 'hover over', 'head for', 'aim at',
)
_NOUNS = ('cube', 'block', 'box')
_FRAMES = (
    '{verb} the {colour} {noun}',
    '{verb} the {colour} {noun}',
    '{verb} the {colour} one',
    'please {verb} the {colour} {noun}',
    '{verb} the {colour} {noun} please',
    '{verb} the {noun} that is {colour}',
    'can you {verb} the {colour} {noun}?',
    'could you {verb} the {colour} {noun}, please?',
    'now {verb} the {colour} {noun}',
    'robot, {verb} the {colour} {noun}',
    'I want you to {verb} the {colour} {noun}',
)


class SceneState(Protocol):
    """What the expert may know; a :class:`~vla_edge_ros.sim.world.World` or a copy of one."""

    tip: np.ndarray
    object_positions: np.ndarray
    object_velocities: np.ndarray


class Task(Protocol):
    """
    An episode's aim, its judge and its scripted expert.

    The expert is asked through ``see`` and ``expert_chunk`` with what a camera saw, which may be
    late; the judge through ``update`` with the world as it is.
    """

    instruction: str
    target: int
    """Row of the cube that counts."""
    contact: bool
    """Whether the tool came to the target since the tick before."""
    succeeded: bool

    @property
    def done(self) -> bool:
        """True once the task is decided."""

    @property
    def events(self) -> dict[str, int]:
        """What else happened, counted by name."""

    def update(self, state: SceneState) -> bool:
        """Count one 30 Hz tick and return whether the task has succeeded."""

    def see(self, state: SceneState) -> None:
        """Let the expert note what a frame shows."""

    def goal(self, state: SceneState) -> np.ndarray:
        """Return where the expert wants the tip, float64 [2], m."""

    def expert_chunk(self, state: SceneState, steps: int, step_s: float) -> np.ndarray:
        """Return the expert's next actions, float32 [steps, 2], m/s."""


def named_colour(text: str) -> str:
    """
    Return the one colour that an instruction names.

    Raises
    ------
    ConfigError
        It names none or several, or is more than one line of printable text.

    """
    if not text.isprintable():
        raise ConfigError('instruction', 'must be one line of printable text', text)
    named = set(re.findall(r'[a-z]+', text.lower())) & set(COLOURS)
    if len(named) != 1:
        rule = f'must name exactly one of {", ".join(COLOURS)}'
        raise ConfigError('instruction', rule, text)
    return named.pop()


def sample_instruction(rng: np.random.Generator, colour: str) -> str:
    """Return one of many ways to name the cube of that colour as the target."""
    text = str(rng.choice(_FRAMES)).format(
        verb=rng.choice(_VERBS), colour=colour, noun=rng.choice(_NOUNS))
    case = rng.random()
    if case < 0.4:
        text = text[0].upper() + text[1:]
    elif case < 0.45:
        text = text.upper()
    if text[-1] != '?' and rng.random() < 0.3:
        text += str(rng.choice(['.', '!']))
    return text


def expert_action(state: SceneState, target: int) -> np.ndarray:
    """
    Return the velocity that brings the tip to a cube and keeps it there.

    Parameters
    ----------
    state : SceneState
        The true state, which no policy gets to see.
    target : int
        Row of the cube.

    Returns
    -------
    float32 [2]
        Velocity along x and y, m/s.

    """
    return expert_chunk(state, target, 1, 0.0)[0]


def expert_chunk(state: SceneState, target: int, steps: int, step_s: float) -> np.ndarray:
    """
    Return the next ``steps`` expert actions, float32 [steps, 2], m/s.

    The cube is taken to go straight on and the tip to move exactly as commanded.
    """
    distance = state.object_positions[target] - state.tip
    return approach(distance, state.object_velocities[target], steps, step_s)


def approach(
    distance: np.ndarray, velocity: np.ndarray, steps: int, step_s: float,
) -> np.ndarray:
    """
    Return the actions that close in on something that goes straight on.

    Parameters
    ----------
    distance, velocity : float [2]
        From the tip to the thing, m, and the thing's, m/s.
    steps : int
        Actions wanted.
    step_s : float
        Time between two of them, s.

    Returns
    -------
    float32 [steps, 2]
        Velocities along x and y, m/s.

    """
    velocity = np.asarray(velocity)
    chunk = np.empty((steps, 2), np.float32)
    for row in chunk:
        row[:] = np.clip(EXPERT_GAIN * distance + velocity, -SPEED_LIMIT, SPEED_LIMIT)
        distance = distance + (velocity - row) * step_s
    return chunk


class TrackTask:
    """
    Success: tip within ``RADIUS`` of the target at ``HOLD_TICKS`` consecutive 30 Hz ticks.

    Parameters
    ----------
    instruction : str
        Sentence for the policy.
    target : int
        Row of the cube that counts.

    """

    RADIUS = 0.04
    """Distance from tip to cube centre, seen from above, m."""
    HOLD_TICKS = 15
    LIMIT_TICKS = 90
    """Ticks after which an episode has failed (3 s)."""

    def __init__(self, instruction: str, target: int):
        self.instruction = instruction
        self.target = target
        self.ticks = 0
        self.held = 0
        self.contact = False
        """Whether the tool came to the target since the tick before."""
        self.succeeded = False

    @property
    def done(self) -> bool:
        """True once the task is decided."""
        return self.succeeded or self.ticks >= self.LIMIT_TICKS

    def update(self, state: SceneState) -> bool:
        """Count one 30 Hz tick and return whether the task has succeeded."""
        distance = np.linalg.norm(state.tip - state.object_positions[self.target])
        self.ticks += 1
        self.held = self.held + 1 if distance <= self.RADIUS else 0
        self.contact = self.held == 1
        self.succeeded |= self.held >= self.HOLD_TICKS
        return self.succeeded

    @property
    def events(self) -> dict[str, int]:
        """Nothing but contacts happens."""
        return {}

    def see(self, state: SceneState) -> None:
        """Do nothing: the expert is told its target."""

    def goal(self, state: SceneState) -> np.ndarray:
        """Return where the expert wants the tip, float64 [2], m."""
        return state.object_positions[self.target]

    def expert_chunk(self, state: SceneState, steps: int, step_s: float) -> np.ndarray:
        """Return the expert's next actions, float32 [steps, 2], m/s."""
        return expert_chunk(state, self.target, steps, step_s)
