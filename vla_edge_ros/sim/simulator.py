"""
The virtual-time host: episodes through the same control loop as on the robot, without ROS.

Virtual time stands still while the policy computes; the runner then charges a modelled cost, and
the world moves on by it under the action in force. Results depend on the seed alone.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
import itertools
import math

import numpy as np

from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Observation, Policy
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionController
from vla_edge_ros.runtime.control_loop import ControlLoop, ControlLoopParameters, StepResult
from vla_edge_ros.runtime.profiles import LatencyProfile
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.sim.cell import Camera, CAMERA_HZ, Cell
from vla_edge_ros.sim.episode_energy import episode_energy
from vla_edge_ros.sim.episode_latency import check_latency, episode_profile
from vla_edge_ros.sim.task_kinds import (
    ONLY_TASK,
    RECALL_S,
    SLIP_PROBABILITY,
    TaskOptions,
    TASKS,
)
from vla_edge_ros.sim.tasks import COLOURS, Task, TICK_HZ
from vla_edge_ros.sim.world import World
from vla_edge_ros.telemetry.power_model import power_model

ORACLE_CHUNK_STEPS = 3
ONLY_POLICY = ('policy', 'eviction')
"""Parameters of an episode that have no effect on the oracle."""
KEPT = ('task', 'control', *ONLY_POLICY)
"""What a simulator cannot change once it is made."""


@dataclass(frozen=True, slots=True)
class EpisodeParameters:
    """What an episode is run with."""

    task: str = parameter('track', 'What is to be done', choices=tuple(TASKS))
    slip_probability: float = parameter(
        SLIP_PROBABILITY, 'Share of conveyor episodes in which the cube slips once after the '
        'grasp', range=(0.0, 1.0))
    recall_s: float = parameter(
        RECALL_S, 'Time from the cue of memory to when the robot may act', unit='s',
        range=(0.0, 600.0))
    delay_ms: float = parameter(
        0.0, 'Delay added to every observation, picture and joints', unit='ms', range=(0.0, 5e3))
    actuation_ms: float = parameter(
        0.0, 'Time from an action to the robot obeying it', unit='ms', range=(0.0, 20.0))
    compute_ms: float = parameter(
        8.0, 'Modelled cost of one run of the policy', unit='ms', range=(0.0, 1000.0))
    latency_trace: str = parameter(
        '', 'Trace of a live run whose stage times are drawn instead of compute_ms')
    latency_profile: str = parameter(
        '', 'What a run costs instead of compute_ms: measured (the engine of this machine), or a '
        'device as a model, such as agx-orin or agx-orin:int8')
    profile_model: str = parameter(
        '', 'Policy whose cost latency_profile tells: a folder, or a shape such as random:1.5b; '
        'empty takes the embedded policy')
    camera_phase_ms: float = parameter(
        -1.0, 'Time from a camera frame to the tick; -1 draws it for every episode', unit='ms',
        range=(-1.0, 1000.0 / CAMERA_HZ))
    object_speed: float = parameter(0.3, 'Speed of the cubes', unit='m/s', range=(0.0, 2.0))
    control: str = parameter(
        'none', 'Control experiment: the instruction names another cube, the pictures are blank, '
        'or the expert acts on the true but delayed state',
        choices=('none', 'wrong-colour', 'blank', 'oracle'))
    safe_action: str = parameter(
        'hold', 'What follows when no action is good enough: zeros let this robot stand still, '
        'hold lets it go on as it went', choices=('hold', 'zeros', 'stop_publishing'))
    policy: str = parameter('', 'Checkpoint folder; empty takes the default policy')
    eviction: str = parameter(
        'semantic', 'Which frame leaves a full cache', choices=('semantic', 'fifo', 'uniform'))
    power_model: str = parameter(
        '', 'Device whose modelled power an episode is charged with; empty for none')

    def __post_init__(self):
        """Check every value, and that each has an effect."""
        validate(self)
        check_latency(self)
        if self.power_model:
            power_model(self.power_model)
        for name in ONLY_POLICY if self.control == 'oracle' else ():
            if self._given(name):
                rule = "must not be given with control 'oracle', which replaces the policy"
                raise ConfigError(name, rule, getattr(self, name))
        for name, task in ONLY_TASK.items():
            if self.task != task and self._given(name):
                rule = f'must not be given with task {self.task!r}; it is of {task} only'
                raise ConfigError(name, rule, getattr(self, name))

    def _given(self, name: str) -> bool:
        return getattr(self, name) != type(self).__dataclass_fields__[name].default


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """
    What one episode came to.

    Parameters
    ----------
    succeeded : bool
        Whether the task was fulfilled.
    ages_ms : float32 [actions]
        Observation age of every published action, ms; NaN where it goes back to no picture.
    age_causes : str [actions]
        Where each of them came from.
    contact_ages_ms : float32 [contacts]
        Age of the action in force each time the tool came to the target, ms.
    runs : int
        Runs of the policy that ended.
    decisions, reasons, causes : dict of str to int
        Ticks by name.
    energy_j : dict of str to float, optional
        Modelled energy by part of the work, J; None without a power model.
    events : dict of str to int, optional
        What else the task counts, such as slips.

    """

    succeeded: bool
    ages_ms: np.ndarray
    age_causes: np.ndarray
    contact_ages_ms: np.ndarray
    runs: int
    decisions: dict[str, int]
    reasons: dict[str, int]
    causes: dict[str, int]
    energy_j: dict[str, float] | None = None
    events: dict[str, int] | None = None


class Oracle:
    """
    Stands in for the policy: the expert on the true state of the frame read last.

    Parameters
    ----------
    viewer : World
        Shows that state.
    steps : int
        Actions in a chunk.

    """

    def __init__(self, viewer: World, steps: int = ORACLE_CHUNK_STEPS):
        self._viewer = viewer
        self._steps = steps
        self._stamp_ns = 0
        self.task: Task | None = None
        """The episode's task, which has the expert."""

    def set_instruction(self, text: str) -> None:
        """Do nothing: the oracle is told its task."""

    def reset(self) -> None:
        """Do nothing: the task remembers, and each episode has its own."""

    def observe(self, image, proprioception, stamp_ns: int) -> Observation:
        """Note the stamp, and let the expert look at what the viewer shows."""
        self._stamp_ns = stamp_ns
        self.task.see(self._viewer)
        return Observation(0, None, 1, {})

    def act(self) -> ActionChunk:
        """Return the expert's chunk."""
        step_ns = NS_PER_S // TICK_HZ
        chunk = self.task.expert_chunk(self._viewer, self._steps, step_ns / NS_PER_S)
        grounding = self.task.goal(self._viewer).astype(np.float32)
        return ActionChunk(chunk, step_ns, grounding, np.empty(0, np.int32), self._stamp_ns)


class Simulator:
    """
    Runs episodes one after the other in this thread.

    Parameters
    ----------
    parameters : EpisodeParameters
        Delay, cost and kind of run.
    policy : Policy, optional
        What acts; left out, it is loaded as ``parameters`` say.
    loop : ControlLoopParameters, optional
        Schedule and timing, at the rate of the tasks.
    profile : LatencyProfile, optional
        What runs cost; left out, as ``parameters`` say.

    Raises
    ------
    WeightsError
        The checkpoint cannot be used.
    ConfigError
        The latency trace cannot be used.

    """

    def __init__(
        self, parameters: EpisodeParameters, policy: Policy | None = None,
        loop: ControlLoopParameters | None = None, profile: LatencyProfile | None = None,
    ):
        self._given_profile = profile
        make_world = TASKS[parameters.task].world
        self._world = make_world(object_speed=parameters.object_speed)
        self._viewer = make_world(object_speed=parameters.object_speed)
        self._draw = self._viewer.render
        self._policy = policy
        self._configure(parameters, loop)
        if parameters.control in ('oracle', 'blank'):
            blank = np.full((160, 192, 3), 128, np.uint8)
            self._draw = lambda: blank
        if self._policy is None:
            # The same on every machine, and one of many processes.
            self._policy = Policy.load(
                parameters.policy or DEFAULT_POLICY, backend='cpu', eviction=parameters.eviction)

    def reconfigure(
        self, parameters: EpisodeParameters, loop: ControlLoopParameters | None = None,
    ) -> None:
        """
        Go on with other parameters; worlds, renderer and policy are kept, episodes come out equal.

        Raises
        ------
        ConfigError
            One of ``KEPT`` changes, or the latency trace cannot be used.

        """
        for name in KEPT:
            if getattr(parameters, name) != getattr(self._parameters, name):
                rule = f'must stay {getattr(self._parameters, name)!r} in one simulator'
                raise ConfigError(name, rule, getattr(parameters, name))
        self._configure(parameters, loop)

    def runs_with(self, parameters: EpisodeParameters, loop: ControlLoopParameters) -> bool:
        """Tell whether it is set to these."""
        return (parameters, loop) == (self._parameters, self._loop_parameters)

    def _configure(
        self, parameters: EpisodeParameters, loop: ControlLoopParameters | None,
    ) -> None:
        self._parameters = parameters
        self._loop_parameters = loop or ControlLoopParameters()
        self._profile = self._given_profile or episode_profile(parameters)
        self._world.object_speed = self._viewer.object_speed = parameters.object_speed
        if parameters.control == 'oracle':
            steps = self._loop_parameters.chunk_steps or ORACLE_CHUNK_STEPS
            self._policy = Oracle(self._viewer, steps)

    def close(self) -> None:
        """Free the GL context."""
        self._viewer.close()

    def run(
        self, seed: int, index: int, on_tick: Callable[[StepResult, World], None] | None = None,
    ) -> EpisodeResult:
        """
        Run one episode.

        Parameters
        ----------
        seed, index : int
            Together they determine the episode.
        on_tick : callable, optional
            Called after every tick with its result and contacts, and the world at that moment.

        """
        rng = np.random.default_rng([seed, index])
        world = self._world
        world.reset(rng)
        task = self._make_task(rng)
        if isinstance(self._policy, Oracle):
            self._policy.task = task
        self._policy.reset()
        clock = ManualClock()
        camera = Camera(
            clock, self._viewer, self._draw, int(self._parameters.delay_ms * NS_PER_MS))
        # Camera and loop keep no common time: their phase is another one in every episode.
        phase_ns = int(rng.integers(NS_PER_S // CAMERA_HZ))
        if self._parameters.camera_phase_ms >= 0.0:
            phase_ns = int(self._parameters.camera_phase_ms * NS_PER_MS)
        actuation_ns = int(self._parameters.actuation_ms * NS_PER_MS)
        latency = self._profile.make(int(rng.integers(2**63)))
        admission = AdmissionController()
        admission.seed(*self._profile.medians_ms)
        cell = Cell(world, camera, clock)
        queue = ActionQueue(ActionQueueParameters(safe_action=self._parameters.safe_action))
        runner = VirtualRunner(clock, latency)
        loop = ControlLoop(
            self._policy, cell, admission, queue, runner, clock, clock, self._loop_parameters,
            camera.read_joints)
        loop.set_instruction(task.instruction)
        ages_ms, age_causes, contact_ages_ms = [], [], []
        age_in_force_ms, runs = math.nan, 0
        decisions: Counter[str] = Counter()
        steps: list[StepResult] = []
        for tick in itertools.count():
            scheduled_ns = phase_ns + tick * NS_PER_S // TICK_HZ
            loop.between_ticks(scheduled_ns)
            cell.advance_to(scheduled_ns)
            if tick:
                task.update(world)
            if task.contact:
                contact_ages_ms.append(age_in_force_ms)
            if task.done:
                break
            clock.advance_to_ns(scheduled_ns)
            result = loop.tick(scheduled_ns)
            if result.error is not None:
                raise result.error
            cell.advance_to(result.published_ns + actuation_ns)
            decisions[result.decision.value] += 1
            steps.append(result)
            runs += result.runs
            if result.action is not None:
                cell.command = result.action
                age_in_force_ms = result.observation_age_ms
                ages_ms.append(age_in_force_ms)
                age_causes.append(result.cause.value)
            if on_tick is not None:
                on_tick(replace(result, contact=task.contact), world)
        return EpisodeResult(
            task.succeeded, np.array(ages_ms, np.float32), np.array(age_causes, str),
            np.array(contact_ages_ms, np.float32), runs, dict(decisions), dict(loop.counts),
            dict(loop.causes),
            episode_energy(self._parameters.power_model, steps, runner.unfinished, scheduled_ns),
            task.events)

    def _make_task(self, rng: np.random.Generator) -> Task:
        target = int(rng.integers(len(COLOURS)))
        named = target
        if self._parameters.control == 'wrong-colour':
            named = (target + int(rng.integers(1, len(COLOURS)))) % len(COLOURS)
        options = TaskOptions(**{name: getattr(self._parameters, name) for name in ONLY_TASK})
        kind = TASKS[self._parameters.task]
        return kind.begin(rng, self._world, target, named, options)
