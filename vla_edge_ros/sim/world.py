"""The simulated world: a gantry robot over moving cubes, stepped in virtual time."""

from collections.abc import Sequence
import math

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.sim.rendering import import_mujoco, Renderer
from vla_edge_ros.sim.scene import (
    build_scene,
    COLOURS,
    OBJECT_SIZE,
    WORKSPACE_X,
    WORKSPACE_Y,
)

PHYSICS_STEP_NS = 2_000_000
TURN_PERIOD_STEPS = 125
"""Physics steps between two draws of the cubes' turn rates (0.25 s)."""
TURN_RATE_STD = 0.5
"""Standard deviation of a cube's turn rate, rad/s."""
OBJECT_LIMIT = np.array([WORKSPACE_X - OBJECT_SIZE / 2, WORKSPACE_Y - OBJECT_SIZE / 2])
TIP_LIMIT = np.array([WORKSPACE_X, WORKSPACE_Y])
OBJECT_GAP = OBJECT_SIZE * math.sqrt(2.0)
"""Distance of centres at which two cubes turn away from each other, m."""
FIRST, SECOND = np.triu_indices(len(COLOURS), 1)
"""Rows of the two cubes of every pair."""
MAX_OBJECT_SPEED = 2.0
VIDEO_SIZE = (640, 480)


class World:
    """
    Gantry, table and four moving cubes; the same seed gives the same run.

    Physics works without GL. The first ``render`` makes a GL context, which belongs to the
    calling thread from then on: render in one thread only, and after a fork or in a spawned
    process make a new ``World``.

    Parameters
    ----------
    camera_width, camera_height : int
        Size of the policy camera's picture, pixels.
    object_speed : float
        Speed of every cube, m/s, 0 to 2.

    Raises
    ------
    ConfigError
        A size or the speed is out of range.

    """

    PROPS = ''
    """What else stands in the scene, MJCF."""

    def __init__(
        self,
        camera_width: int = 192,
        camera_height: int = 160,
        object_speed: float = 0.3,
    ):
        for name, value in (('camera_width', camera_width), ('camera_height', camera_height)):
            if not 16 <= value <= 4096:
                raise ConfigError(name, 'must be in 16..4096 pixels', value)
        self.object_speed = object_speed
        self._mujoco = import_mujoco()
        self._model = self._mujoco.MjModel.from_xml_string(build_scene(self.PROPS))
        self._data = self._mujoco.MjData(self._model)
        self._size = (camera_width, camera_height)
        self._renderers: dict[str, Renderer] = {}
        self._joints = np.array(
            [self._model.joint(name).qposadr[0] for name in ('trolley', 'bridge')]
        )
        self._nominal = {
            'light_pos': self._model.light_pos.copy(),
            'light_diffuse': self._model.light_diffuse.copy(),
            'mat_rgba': self._model.mat_rgba.copy(),
            'cam_pos': self._model.cam_pos.copy(),
        }
        self._headings = np.zeros(len(COLOURS))
        self._turn_rates = np.zeros(len(COLOURS))
        self._turn_rng = np.random.default_rng(0)
        self.object_positions = np.zeros((len(COLOURS), 2))
        """Centres of the cubes on the table, float64 [4, 2], m."""
        self.time_ns = 0
        """Virtual time since the last reset, ns."""
        self._steps_done = 0
        self.reset(np.random.default_rng(0))

    def reset(self, rng: np.random.Generator, randomisation: float = 0.0) -> None:
        """
        Place tip and cubes at random, apart from each other, and set time to 0.

        Parameters
        ----------
        rng : numpy.random.Generator
            Source of everything random in the episode, later turns included.
        randomisation : float
            Strength, 0 to 1, of random light, tints and camera offset (for training).

        """
        self._mujoco.mj_resetData(self._model, self._data)
        self._data.qpos[self._joints] = rng.uniform(-TIP_LIMIT, TIP_LIMIT)
        placed: list[np.ndarray] = []
        while len(placed) < len(COLOURS):
            candidate = rng.uniform(-OBJECT_LIMIT, OBJECT_LIMIT)
            if all(np.linalg.norm(candidate - other) > 1.5 * OBJECT_GAP for other in placed):
                placed.append(candidate)
        self.object_positions[:] = placed
        self._headings[:] = rng.uniform(-math.pi, math.pi, len(COLOURS))
        self._turn_rng = np.random.default_rng(rng.integers(2**63))
        self._turn_rates[:] = 0.0
        self.time_ns = 0
        self._steps_done = 0
        self._randomise(rng, randomisation)
        self._forward()

    def step(self, velocity_command: Sequence[float], duration_ns: int) -> None:
        """
        Let ``duration_ns`` pass with the tool commanded to a velocity (x, y) in m/s.

        How a span is cut into calls does not matter: physics advances in whole steps of 2 ms
        counted from the reset, and the rest is carried over.
        """
        self._data.ctrl[:] = velocity_command
        self.time_ns += duration_ns
        due = self.time_ns // PHYSICS_STEP_NS
        while self._steps_done < due:
            self._mujoco.mj_step(self._model, self._data)
            self._move_objects()
            self._steps_done += 1
        self._forward()

    @property
    def object_speed(self) -> float:
        """Speed of every cube, m/s; setting it raises ``ConfigError`` out of 0 to 2."""
        return self._object_speed

    @object_speed.setter
    def object_speed(self, speed: float) -> None:
        if not 0.0 <= speed <= MAX_OBJECT_SPEED:
            rule = f'must be in 0..{MAX_OBJECT_SPEED} m/s'
            raise ConfigError('object_speed', rule, speed)
        self._object_speed = speed

    @property
    def joint_positions(self) -> np.ndarray:
        """Positions of trolley (x) and bridge (y), float64 [2], m."""
        return self._data.qpos[self._joints]

    @property
    def joint_velocities(self) -> np.ndarray:
        """Velocities of trolley and bridge, float64 [2], m/s."""
        return self._data.qvel[self._joints]

    @property
    def tip(self) -> np.ndarray:
        """Place of the tool tip over the table, float64 [2], m; this robot's joint positions."""
        return self.joint_positions

    @property
    def object_velocities(self) -> np.ndarray:
        """Velocities of the cubes, float64 [4, 2], m/s."""
        return self._object_speed * np.stack([np.cos(self._headings), np.sin(self._headings)], 1)

    def get_state(self) -> np.ndarray:
        """
        Return what can be seen and what moves, float64 [20]; turns still to come are not in it.

        Order: joint positions, joint velocities, cube positions, headings, turn rates.
        """
        return np.concatenate([
            self.joint_positions, self.joint_velocities, self.object_positions.ravel(),
            self._headings, self._turn_rates,
        ])

    def set_state(self, state: np.ndarray) -> None:
        """Show a state that ``get_state`` returned; time is left alone."""
        count = len(COLOURS)
        sections = np.split(np.asarray(state, np.float64), np.cumsum([2, 2, 2 * count, count]))
        self._data.qpos[self._joints], self._data.qvel[self._joints] = sections[:2]
        self.object_positions[:] = sections[2].reshape(count, 2)
        self._headings[:], self._turn_rates[:] = sections[3:]
        self._forward()

    def render(self) -> np.ndarray:
        """Return the policy camera's picture, a new uint8 [height, width, 3] array, RGB."""
        return self._render('policy', *self._size)

    def render_video(self) -> np.ndarray:
        """Return a larger picture from the side, uint8 [480, 640, 3], for films."""
        return self._render('video', *VIDEO_SIZE, samples=4)

    def close(self) -> None:
        """Free the GL contexts, if any; call it in the thread that rendered."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()

    def _render(self, camera: str, width: int, height: int, samples: int = 0) -> np.ndarray:
        if camera not in self._renderers:
            self._renderers[camera] = Renderer(self._model, camera, width, height, samples)
        return self._renderers[camera].render(self._data)

    def _forward(self) -> None:
        self._data.mocap_pos[:, :2] = self.object_positions
        self._mujoco.mj_kinematics(self._model, self._data)
        self._mujoco.mj_camlight(self._model, self._data)

    def _move_objects(self) -> None:
        """Advance the cubes by one physics step; they turn, and bounce off walls and cubes."""
        seconds = PHYSICS_STEP_NS * 1e-9
        if self._steps_done % TURN_PERIOD_STEPS == 0:
            self._turn_rates[:] = self._turn_rng.normal(0.0, TURN_RATE_STD, len(COLOURS))
        self._headings += self._turn_rates * seconds
        velocities = self.object_velocities
        self.object_positions += velocities * seconds
        outside = np.sign(self.object_positions) * (np.abs(self.object_positions) > OBJECT_LIMIT)
        bounced = outside * velocities > 0.0
        velocities[bounced] *= -1.0
        # Of two touching cubes, each that moves towards the other turns back: speeds are kept
        # and a pair that overlaps can only part.
        gaps = self.object_positions[SECOND] - self.object_positions[FIRST]
        distances = np.hypot(gaps[:, 0], gaps[:, 1])
        touching = np.flatnonzero(distances < OBJECT_GAP)
        for pair in touching:
            normal = gaps[pair] / max(distances[pair], 1e-9)
            for index, sign in ((FIRST[pair], 1.0), (SECOND[pair], -1.0)):
                along = velocities[index] @ normal
                if sign * along > 0.0:
                    velocities[index] -= 2.0 * along * normal
        if touching.size or bounced.any():
            self._headings[:] = np.arctan2(velocities[:, 1], velocities[:, 0])

    def _randomise(self, rng: np.random.Generator, strength: float) -> None:
        """Set light, tints and camera to nominal plus a random change of given strength."""
        if not 0.0 <= strength <= 1.0:
            raise ConfigError('randomisation', 'must be in 0..1', strength)
        for name, value in self._nominal.items():
            getattr(self._model, name)[:] = value
        if strength == 0.0:
            return
        self._model.light_pos[:] += strength * rng.uniform(-0.5, 0.5, 3)
        self._model.light_diffuse[:] *= 1.0 + strength * rng.uniform(-0.35, 0.35)
        tints = rng.uniform(-0.06, 0.06, (self._model.nmat, 3))
        brightness = rng.uniform(-0.1, 0.1)
        colours = self._model.mat_rgba[:, :3] + strength * (tints + brightness)
        self._model.mat_rgba[:, :3] = np.clip(colours, 0.0, 1.0)
        self._model.cam_pos[:] += strength * rng.uniform(-0.006, 0.006, 3)


def object_index(colour: str) -> int:
    """
    Return the row of a colour in the object arrays.

    Raises
    ------
    ConfigError
        There is no cube of that colour.

    """
    names = list(COLOURS)
    if colour not in names:
        raise ConfigError('colour', f'must be one of {", ".join(names)}', colour)
    return names.index(colour)
