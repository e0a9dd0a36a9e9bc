"""
The task ``memory``: a colour is shown once, and much later the cube of that colour is to be met.

A board behind the table lights up for a moment. Until the wait is over a brake holds the tool, so
that nothing but memory carries the colour over; the cubes move all the time.
"""

import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.sim.scene import COLOURS
from vla_edge_ros.sim.tasks import TrackTask
from vla_edge_ros.sim.world import World

CUE_START_S = (0.3, 0.8)
"""When the board lights up, s; not in the first frame, which a cache may keep anyway."""
CUE_S = 0.2
"""How long it is lit, s: some six ticks."""
NOTHING = -1
"""Row of no colour."""
_SENTENCES = (
    'go to the colour that was shown', 'reach the colour that was shown',
    'touch the colour that was shown', 'follow the colour that was shown',
)


class CueWorld(World):
    """
    The world of ``track`` with a board that lights up and a brake on the tool.

    Parameters are those of :class:`~vla_edge_ros.sim.world.World`.
    """

    PROPS = """
    <geom name="cue" type="box" size="0.16 0.006 0.05" pos="0 0.31 0.055" rgba="0 0 0 0"/>"""

    def reset(self, rng: np.random.Generator, randomisation: float = 0.0) -> None:
        """Place tip and cubes at random and set time to 0; no cue is planned, no brake set."""
        self._cue = (NOTHING, 0, 0)
        self._release_ns = 0
        self._light(NOTHING)
        super().reset(rng, randomisation)

    def plan_cue(self, row: int, start_ns: int, end_ns: int, release_ns: int) -> None:
        """
        Show a colour from ``start_ns`` until before ``end_ns``, and brake before ``release_ns``.

        Times are virtual, since the reset.
        """
        self._cue = (row, start_ns, end_ns)
        self._release_ns = release_ns
        self._look()

    @property
    def shown(self) -> int:
        """Row of the colour on the board, ``NOTHING`` while it is dark."""
        return self._shown

    @property
    def braked(self) -> bool:
        """Whether the tool is held."""
        return self.time_ns < self._release_ns

    def step(self, velocity_command, duration_ns: int) -> None:
        """Let time pass, as ``World`` does; the tool stands until the brake opens."""
        braked_ns = min(max(self._release_ns - self.time_ns, 0), duration_ns)
        if braked_ns:
            super().step(np.zeros(2), braked_ns)
        if duration_ns > braked_ns:
            super().step(velocity_command, duration_ns - braked_ns)
        self._look()

    def get_state(self) -> np.ndarray:
        """Return the state as in ``World``, then the row that is shown."""
        return np.concatenate([super().get_state(), [self._shown]])

    def set_state(self, state: np.ndarray) -> None:
        """Show a state that ``get_state`` returned; time is left alone."""
        super().set_state(state[:-1])
        self._light(int(state[-1]))

    def _look(self) -> None:
        row, start_ns, end_ns = self._cue
        self._light(row if start_ns <= self.time_ns < end_ns else NOTHING)

    def _light(self, row: int) -> None:
        self._shown = row
        colour = (0.0, 0.0, 0.0, 0.0) if row == NOTHING else (*list(COLOURS.values())[row], 1.0)
        self._model.geom_rgba[self._model.geom('cue').id] = colour


class MemoryTask(TrackTask):
    """
    Success: as in ``track``, with the cube of the colour that was shown, after the brake opened.

    The expert knows only a cue that it saw in a frame; it never forgets one.

    Parameters
    ----------
    instruction : str
        Sentence for the policy; it names no colour.
    target : int
        Row of the cube that counts.
    release_ns : int
        When the brake opens, ns since the reset.

    """

    def __init__(self, instruction: str, target: int, release_ns: int):
        super().__init__(instruction, target)
        self.release_ns = release_ns
        self.remembered = NOTHING
        """Row of the colour that the expert saw."""

    def update(self, state: CueWorld) -> bool:
        """Count one 30 Hz tick once the brake is open; return whether the task has succeeded."""
        return super().update(state) if state.time_ns > self.release_ns else False

    @property
    def events(self) -> dict[str, int]:
        """Whether the expert, if one was asked, saw the cue."""
        return {'cues_seen_by_expert': int(self.remembered != NOTHING)}

    def see(self, state: CueWorld) -> None:
        """Let the expert note a colour that is shown."""
        if state.shown != NOTHING:
            self.remembered = state.shown

    def goal(self, state: CueWorld) -> np.ndarray:
        """Return where the expert wants the tip, float64 [2], m."""
        if self.remembered == NOTHING:
            return state.tip
        return state.object_positions[self.remembered]

    def expert_chunk(self, state: CueWorld, steps: int, step_s: float) -> np.ndarray:
        """Return the expert's next actions, float32 [steps, 2], m/s; zeros without a cue."""
        if self.remembered == NOTHING:
            return np.zeros((steps, 2), np.float32)
        known = TrackTask(self.instruction, self.remembered)
        return known.expert_chunk(state, steps, step_s)


def plan_memory(
    rng: np.random.Generator, world: CueWorld, target: int, cue: int, recall_s: float,
) -> MemoryTask:
    """
    Draw when the cue comes and how the instruction puts it.

    Parameters
    ----------
    rng : numpy.random.Generator
        Of the episode.
    world : CueWorld
        Just reset; it is told what to show.
    target, cue : int
        Rows of the cube that counts and of the colour shown.
    recall_s : float
        From the end of the cue to the opening of the brake, s.

    """
    start_ns = int(rng.uniform(*CUE_START_S) * NS_PER_S)
    end_ns = start_ns + int(CUE_S * NS_PER_S)
    release_ns = end_ns + int(recall_s * NS_PER_S)
    world.plan_cue(cue, start_ns, end_ns, release_ns)
    return MemoryTask(str(rng.choice(_SENTENCES)), target, release_ns)
