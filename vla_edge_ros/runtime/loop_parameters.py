"""How the control loop is timed, and which schedule it follows."""

from dataclasses import dataclass

from vla_edge_ros.clock import NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import parameter, validate

MAX_CHUNK_STEPS = 16


@dataclass(frozen=True, slots=True)
class ScheduleParameters:
    """When the policy runs, and how its chunks follow each other."""

    schedule: str = parameter(
        'deadline',
        'When the policy runs: deadline at each tick if it fits; sync when the chunk is used up, '
        'the robot held meanwhile; overlap before it is; latest all the time',
        choices=('deadline', 'sync', 'overlap', 'latest'),
    )
    overlap_percent: float = parameter(
        50.0,
        'Overlap: the next chunk is asked for when at most this part of the chunk is left',
        unit='%',
        range=(0.0, 100.0),
    )
    seam: str = parameter(
        'switch',
        'Overlap: the new chunk takes over at once, or the actions that both chunks have are '
        'blended',
        choices=('switch', 'blend'),
    )
    chunk_steps: int = parameter(
        0, 'Actions of a chunk that are played, the first ones; 0 for all',
        range=(0, MAX_CHUNK_STEPS),
    )

    def __post_init__(self):
        """Check every value."""
        validate(self)


def check_chunk_steps(wanted: int, available: int) -> None:
    """
    Refuse to play more actions than a chunk of the policy has.

    Raises
    ------
    ConfigError
        There are not as many.

    """
    if wanted > available:
        rule = f'must be at most {available}, the actions in a chunk of the policy'
        raise ConfigError('chunk_steps', rule, wanted)


@dataclass(frozen=True, slots=True)
class ControlLoopParameters(ScheduleParameters):
    """The timing of the loop and what it accepts as input."""

    rate_hz: float = parameter(
        30.0, 'Ticks per second', unit='Hz', range=(0.1, 1000.0), read_only=True
    )
    deadline_ms: float = parameter(
        33.0,
        'Time from the scheduled tick to the latest publication of its action',
        unit='ms',
        range=(0.1, 10_000.0),
    )
    publish: str = parameter(
        'on_ready',
        'Publish as soon as the action is ready, or only at the start of a tick',
        choices=('on_ready', 'on_tick'),
    )
    late_results: str = parameter(
        'use',
        'Deadline: what becomes of a chunk that missed its deadline',
        choices=('use', 'discard'),
    )
    max_observation_age_ms: float = parameter(
        500.0,
        'Frames whose stamp is further from now are not looked at',
        unit='ms',
        range=(1.0, 3.6e6),
    )
    max_joint_state_age_ms: float = parameter(
        500.0, 'Joint states received longer ago are not used', unit='ms', range=(1.0, 60_000.0)
    )
    frozen_camera_ticks: int = parameter(
        15,
        'Ticks in a row without a new frame after which the camera is frozen',
        range=(1, 100_000),
    )

    def __post_init__(self):
        """Check every value, and that the deadline lies within the period."""
        validate(self)
        if self.deadline_ms * NS_PER_MS > self.period_ns:
            rule = f'must not exceed the period of {self.rate_hz} Hz'
            raise ConfigError('deadline_ms', rule, self.deadline_ms)

    @property
    def period_ns(self) -> int:
        """Time between two ticks, ns."""
        return round(NS_PER_S / self.rate_hz)
