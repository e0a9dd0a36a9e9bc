"""The tasks by name: which world each needs, and how an episode of it begins."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vla_edge_ros.sim.conveyor import BeltWorld, ConveyorTask, sample_conveyor_instruction, SLIP_S
from vla_edge_ros.sim.memory import CueWorld, plan_memory
from vla_edge_ros.sim.tasks import COLOURS, sample_instruction, Task, TrackTask
from vla_edge_ros.sim.world import World

SLIP_PROBABILITY = 0.5
RECALL_S = 3.0


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What an episode's task is drawn with; each option has an effect on one task only."""

    slip_probability: float = SLIP_PROBABILITY
    recall_s: float = RECALL_S


ONLY_TASK = {'slip_probability': 'conveyor', 'recall_s': 'memory'}
"""Options by the one task that they have an effect on."""


@dataclass(frozen=True, slots=True)
class TaskKind:
    """
    One task.

    Parameters
    ----------
    world : type of World
        Where it takes place.
    begin : callable
        Takes the episode's generator, the world, just reset, the row of the cube that counts, the
        row that the robot is told, and ``TaskOptions``; returns the ``Task``.

    """

    world: type[World]
    begin: Callable[[np.random.Generator, World, int, int, TaskOptions], Task]


def _begin_track(rng, world, target, told, options) -> Task:
    return TrackTask(sample_instruction(rng, list(COLOURS)[told]), target)


def _begin_conveyor(rng, world, target, told, options) -> Task:
    slips, after_s = rng.random() < options.slip_probability, rng.uniform(*SLIP_S)
    if slips:
        world.let_slip(float(after_s))
    return ConveyorTask(sample_conveyor_instruction(rng, list(COLOURS)[told]), target)


def _begin_memory(rng, world, target, told, options) -> Task:
    return plan_memory(rng, world, target, told, options.recall_s)


TASKS = {
    'track': TaskKind(World, _begin_track),
    'conveyor': TaskKind(BeltWorld, _begin_conveyor),
    'memory': TaskKind(CueWorld, _begin_memory),
}
