"""
The task ``conveyor``: pick the named cube from a belt whose speed changes, and bring it home.

The tool is a magnet. It takes hold of a cube that it stays over, lets go once if the cube slips,
and the cube then lies where it fell, on the belt or beside it.
"""

import math

import numpy as np

from vla_edge_ros.sim.scene import COLOURS
from vla_edge_ros.sim.tasks import approach
from vla_edge_ros.sim.world import OBJECT_LIMIT, PHYSICS_STEP_NS, World

LANES_Y = (0.00, 0.06, 0.12, 0.18)
"""Where the cubes lie across the belt, m."""
BELT_EDGE_Y = -0.03
"""The belt's edge towards the bin, m; what falls beyond it lies still."""
BIN = np.array([0.0, -0.20])
"""Centre of the bin, m."""
BIN_RADIUS = 0.04
GRASP_RADIUS = 0.025
"""Distance from tip to cube centre at which the magnet pulls, m."""
GRASP_S = 0.1
"""Time that it has to stay so, s."""
SLIP_S = (0.05, 0.12)
"""Time from grasp to slip, s: longer than a tick, and before any cube can be in the bin."""
RELEASED_S = 0.2
"""Time after a slip in which the magnet does not hold, s."""
SPEED_PERIOD_STEPS = 250
"""Physics steps between two draws of the belt's speed (0.5 s)."""
SPEED_FACTORS = (0.5, 1.5)
"""Range of the belt's speed, as factors of the object speed."""
SPEED_LAG_S = 0.1
NOTHING = -1
"""Row of no cube."""


class BeltWorld(World):
    """
    A belt along x carries the cubes; one that leaves it on the right comes back on the left.

    Parameters are those of :class:`~vla_edge_ros.sim.world.World`; ``object_speed`` is the mean
    speed of the belt.
    """

    PROPS = f"""
    <geom type="box" size="0.33 0.125 0.0006" pos="0 {BELT_EDGE_Y + 0.125} 0.0008"
          rgba="0.30 0.31 0.33 1"/>
    <geom type="box" size="0.05 0.05 0.0006" pos="{BIN[0]} {BIN[1]} 0.0008"
          rgba="0.96 0.96 0.98 1"/>"""

    held = NOTHING
    """Row of the cube that the magnet holds."""
    slips = 0
    """How often a cube slipped since the reset."""

    def reset(self, rng: np.random.Generator, randomisation: float = 0.0) -> None:
        """Lay the cubes on the belt at random, the tip anywhere, and set time to 0."""
        super().reset(rng, randomisation)
        count = len(COLOURS)
        self.object_positions[:, 0] = rng.uniform(-OBJECT_LIMIT[0], OBJECT_LIMIT[0], count)
        self.object_positions[:, 1] = rng.permutation(LANES_Y)
        self._factor = self._wanted_factor = float(rng.uniform(*SPEED_FACTORS))
        self.held, self.slips = NOTHING, 0
        self._near, self._near_s, self._released_s = NOTHING, 0.0, 0.0
        self._slip_s, self._held_s = math.inf, 0.0
        self._forward()

    def let_slip(self, after_s: float) -> None:
        """Let the next cube that is grasped slip once, ``after_s`` seconds later."""
        self._slip_s = after_s

    @property
    def belt_speed(self) -> float:
        """Speed of the belt, m/s."""
        return self.object_speed * self._factor

    @property
    def object_velocities(self) -> np.ndarray:
        """Velocities of the cubes, float64 [4, 2], m/s."""
        velocities = np.zeros((len(COLOURS), 2))
        velocities[self.object_positions[:, 1] >= BELT_EDGE_Y, 0] = self.belt_speed
        if self.held != NOTHING:
            velocities[self.held] = self.joint_velocities
        return velocities

    def get_state(self) -> np.ndarray:
        """Return the state as in ``World``, then the row held and the belt's speed factor."""
        return np.concatenate([super().get_state(), [self.held, self._factor]])

    def set_state(self, state: np.ndarray) -> None:
        """Show a state that ``get_state`` returned; time is left alone."""
        self.held, self._factor = int(state[-2]), float(state[-1])
        super().set_state(state[:-2])

    def _move_objects(self) -> None:
        """Advance belt, cubes and magnet by one physics step."""
        seconds = PHYSICS_STEP_NS * 1e-9
        if self._steps_done % SPEED_PERIOD_STEPS == 0:
            self._wanted_factor = float(self._turn_rng.uniform(*SPEED_FACTORS))
        self._factor += (self._wanted_factor - self._factor) * seconds / SPEED_LAG_S
        positions = self.object_positions
        positions += self.object_velocities * seconds
        positions[positions[:, 0] > OBJECT_LIMIT[0], 0] -= 2.0 * OBJECT_LIMIT[0]
        if self.held == NOTHING:
            self._pull(seconds)
        else:
            positions[self.held] = self.tip
            self._held_s += seconds
            if self._held_s >= self._slip_s:
                self.held, self._slip_s, self._released_s = NOTHING, math.inf, RELEASED_S
                self.slips += 1

    def _pull(self, seconds: float) -> None:
        """Take hold of the cube that the tip has stayed over long enough."""
        self._released_s -= seconds
        distances = np.hypot(*(self.object_positions - self.tip).T)
        nearest = int(distances.argmin())
        if distances[nearest] > GRASP_RADIUS or self._released_s > 0.0:
            self._near = NOTHING
            return
        self._near_s = self._near_s + seconds if nearest == self._near else 0.0
        self._near = nearest
        if self._near_s >= GRASP_S:
            self.held, self._held_s, self._near = nearest, 0.0, NOTHING


class ConveyorTask:
    """
    Success: the named cube, held, is over the bin; holding another one is failure.

    Parameters
    ----------
    instruction : str
        Sentence for the policy.
    target : int
        Row of the cube that counts.

    """

    LIMIT_TICKS = 180
    """Ticks after which an episode has failed (6 s)."""

    def __init__(self, instruction: str, target: int):
        self.instruction = instruction
        self.target = target
        self.ticks = 0
        self.contact = False
        """Whether the magnet took hold of the target since the tick before."""
        self.succeeded = self.failed = False
        self._held = NOTHING
        self._grasps = self._slips = 0

    @property
    def done(self) -> bool:
        """True once the task is decided."""
        return self.succeeded or self.failed or self.ticks >= self.LIMIT_TICKS

    @property
    def events(self) -> dict[str, int]:
        """Grasps of the target, slips, and slips after which it was grasped again."""
        return {
            'grasps': self._grasps, 'slips': self._slips,
            'slips_noticed': self._slips if self._grasps > self._slips else 0,
            'wrong_grasps': int(self.failed)}

    def update(self, state: BeltWorld) -> bool:
        """Count one 30 Hz tick and return whether the task has succeeded."""
        self.ticks += 1
        # Between two ticks a cube cannot slip and be grasped again: the magnet is off for longer.
        self.contact = state.held == self.target != self._held
        self._grasps += self.contact
        self._held, self._slips = state.held, state.slips
        self.failed = state.held not in (NOTHING, self.target)
        self.succeeded |= (
            state.held == self.target
            and bool(np.linalg.norm(state.tip - BIN) <= BIN_RADIUS))
        return self.succeeded

    def see(self, state: BeltWorld) -> None:
        """Do nothing: whether the cube is held is in every frame."""

    def goal(self, state: BeltWorld) -> np.ndarray:
        """Return where the expert wants the tip, float64 [2], m."""
        return BIN if state.held == self.target else state.object_positions[self.target]

    def expert_chunk(self, state: BeltWorld, steps: int, step_s: float) -> np.ndarray:
        """Return the expert's next actions, float32 [steps, 2], m/s."""
        velocity = np.zeros(2)
        if state.held != self.target:
            velocity = state.object_velocities[self.target]
        return approach(self.goal(state) - state.tip, velocity, steps, step_s)


def sample_conveyor_instruction(rng: np.random.Generator, colour: str) -> str:
    """Return one of many ways to ask for the cube of that colour."""
    verb = rng.choice(('pick', 'take', 'fetch', 'grab', 'pick up'))
    noun = rng.choice(('cube', 'block', 'box'))
    return f'{verb} the {colour} {noun}'
