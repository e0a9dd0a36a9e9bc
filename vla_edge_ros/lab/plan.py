"""Whether a deadline holds on a device, and what would have to change where it does not."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
import math
from typing import Any

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.kernels.memory_plan import total_bytes
from vla_edge_ros.policy import vision
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.policy.shapes import head_rows, load_shape, RANDOM, SHAPES
from vla_edge_ros.policy.work import decoder_parameters
from vla_edge_ros.runtime.device_model import Cost, DeviceModel, full_slots, why_predicted
from vla_edge_ros.runtime.devices import catalogue, Device, Weights
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters, MAX_CHUNK_STEPS
from vla_edge_ros.telemetry.stages import Stage

P50, P99 = 0.5, 0.99


@dataclass(frozen=True)
class Plan:
    """
    A policy on a device under a deadline.

    Parameters
    ----------
    config : PolicyConfig
        The policy's shape.
    device : Device
    weights_name : str
        How its weights are held: a key of the catalogue's.
    loop : ControlLoopParameters
        Rate and deadline.
    margin_ms : float
        What a run has to end before the deadline, ms.
    length : int
        Cached slots behind which a run takes its frame in.
    tokens : int
        Decoded tokens of a chunk.
    head_rows : int
        Rows of the vocabulary that each is chosen from.

    """

    config: PolicyConfig
    device: Device
    weights_name: str
    loop: ControlLoopParameters
    margin_ms: float
    length: int
    tokens: int
    head_rows: int

    @property
    def weights(self) -> Weights:
        """How the weights are held."""
        return catalogue().weights[self.weights_name]

    @property
    def stages(self) -> dict[Stage, Cost]:
        """The cost of every stage of the median run."""
        model = DeviceModel(self.config, self.device, self.weights, self.head_rows)
        return model.stages(self.length, self.tokens)

    @property
    def total(self) -> Cost:
        """The cost of the median run."""
        return sum(self.stages.values(), Cost())

    @property
    def budget_ms(self) -> float:
        """What a run may take, ms."""
        return self.loop.deadline_ms - self.margin_ms

    def run_ms(self, part: float) -> float:
        """Return what a part of all runs stays below, ms."""
        return 1e3 * self.total.seconds * self.device.jitter.quantile(part)

    @property
    def slack_ms(self) -> dict[str, float]:
        """What is left of the budget, negative where it does not suffice, ms."""
        return {name: self.budget_ms - self.run_ms(part) for name, part in
                (('p50', P50), ('p99', P99))}  # fmt: skip

    @property
    def holds(self) -> bool:
        """Whether 99 of 100 runs end before the deadline by the margin."""
        return self.slack_ms['p99'] >= 0

    @property
    def needed_gb(self) -> float:
        """Memory of the CUDA backend's buffers at these weights, GB."""
        from vla_edge_ros.kernels import cuda

        network = self.config.transformer
        slots = self.length + self.config.slots_per_frame + self.tokens
        plan = [
            *cuda.memory_plan(network, 'bfloat16', slots, self.config.slots_per_frame),
            *vision.memory_plan(self.config, cuda)]
        layers, _ = decoder_parameters(network)
        return (total_bytes(plan) - (2 - self.weights.bytes) * layers) / 1e9

    @property
    def works(self) -> bool:
        """Whether the deadline holds and the memory suffices."""
        return self.holds and self.needed_gb <= self.device.memory_gb

    @property
    def prediction(self) -> str:
        """Why its figures are predictions, or '' where their like was measured."""
        return why_predicted(self.config, self.device, self.weights_name)


def make_plan(
    model: str, device: Device, weights: str, loop: ControlLoopParameters, margin_ms: float,
    slots: int | None = None, tokens: int | None = None,
) -> Plan:
    """Return the plan of a model by its name; by default a full cache and the policy's chunk."""
    config = load_shape(model)
    return Plan(
        config, device, weights, loop, margin_ms, full_slots(config) if slots is None else slots,
        config.decode_tokens if tokens is None else tokens, head_rows(model, config))


def with_steps(plan: Plan, steps: int) -> Plan:
    """Return the plan with chunks of so many actions."""
    config = replace(plan.config, chunk_steps=steps)
    return replace(plan, config=config, tokens=config.decode_tokens)


def largest(low: int, high: int, holds: Callable[[int], bool]) -> int | None:
    """Return the largest whole number in low..high that holds, where smaller ones hold too."""
    if high < low or not holds(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def overlap_of(run_ms: float, period_ms: float, steps: int) -> dict[str, float] | None:
    """
    Return how ``overlap`` hides a run behind the chunk before it, None where it cannot.

    A run starts at tick ``k`` of a chunk of ``steps``, which is at hand from tick ``run / period``
    on, and must end before the chunk does. Of all that do, the latest start computes least. That a
    tick with nothing to publish may wait within its period is not counted on.

    Returns
    -------
    dict
        ``overlap_percent`` to set, and ``runs_per_s``.

    """
    start = math.floor(steps - run_ms / period_ms)
    if start < max(math.ceil(run_ms / period_ms), 1):
        return None
    # Rounded up, for the schedule compares.
    return {'overlap_percent': math.ceil(100 * (steps - start) / steps),
            'runs_per_s': 1e3 / (start * period_ms)}  # fmt: skip


def latest_covers(run_ms: float, period_ms: float, steps: int) -> bool:
    """Return whether ``latest`` always has an action: a chunk lasts for two runs."""
    return 2 * run_ms <= steps * period_ms


def alternatives(plan: Plan) -> dict[str, Any]:
    """
    Return what would hold the deadline and fit the memory, and what schedules make of the run.

    Returns
    -------
    dict
        ``weights``, ``model``, ``model_and_weights``, ``actions``, ``slots`` and ``rate_hz``: the
        best that holds, None where none does. ``p99_ms``: a run of each that was tried.
        ``schedules``: as of :func:`schedules`.

    """
    own = plan.config
    lighter = [name for name, held in catalogue().weights.items()
               if held.bytes < plan.weights.bytes]  # fmt: skip
    weights = _first(lighter, lambda name: replace(plan, weights_name=name))
    size = sum(decoder_parameters(own.transformer))
    smaller = [name for name in reversed(SHAPES)
               if sum(decoder_parameters(SHAPES[name])) < size]  # fmt: skip
    shape = _first(smaller, lambda name: _with_network(plan, name))
    both = next((
        [RANDOM + name, held] for held in catalogue().weights for name in smaller
        if replace(_with_network(plan, name), weights_name=held).works), None)
    actions = largest(1, own.chunk_steps - 1, lambda steps: with_steps(plan, steps).works)
    slots = largest(0, plan.length - 1, lambda length: replace(plan, length=length).works)
    deadline_ms = math.ceil(10 * (plan.run_ms(P99) + plan.margin_ms)) / 10
    return {
        'weights': weights,
        'weights_have_kernels': None if weights is None else catalogue().weights[weights].kernels,
        'model': None if shape is None else RANDOM + shape,
        'model_and_weights': both,
        'actions': actions,
        'slots': slots,
        'rate_hz': math.floor(1e4 / deadline_ms) / 10 or None,
        'deadline_ms': deadline_ms,
        'p99_ms': {
            **{name: replace(plan, weights_name=name).run_ms(P99) for name in lighter},
            **{RANDOM + name: _with_network(plan, name).run_ms(P99) for name in smaller}},
        'schedules': schedules(plan),
    }


def schedules(plan: Plan) -> dict[str, Any]:
    """
    Return what each schedule makes of a run that takes its p99, at the rate of the plan.

    Returns
    -------
    dict
        ``overlap`` and ``latest``: ``covers``, whether there is always an action that was planned,
        with the policy's chunk; ``steps``, the shortest chunk with which there is, None where no
        chunk of 16 or fewer does, for a longer one also takes longer to decode. ``sync``:
        ``moving``, the part of the time in which the robot moves.

    """
    period_ms, own = plan.loop.period_ns / NS_PER_MS, plan.config.chunk_steps
    run_ms = plan.run_ms(P99)

    def shortest(covers: Callable[[float, float, int], Any]) -> int | None:
        return next((
            steps for steps in range(1, MAX_CHUNK_STEPS + 1)
            if covers(with_steps(plan, steps).run_ms(P99), period_ms, steps)), None)

    overlap = overlap_of(run_ms, period_ms, own)
    return {
        'overlap': {'covers': overlap is not None, **(overlap or {}),
                    'steps': shortest(overlap_of)},
        'latest': {'covers': latest_covers(run_ms, period_ms, own),
                   'steps': shortest(latest_covers)},
        'sync': {'moving': own * period_ms / (own * period_ms + run_ms)},
    }  # fmt: skip


def _with_network(plan: Plan, shape: str) -> Plan:
    network = SHAPES[shape]
    if network.vocab_size < plan.config.action_token_offset + plan.config.bins:
        network = replace(network, vocab_size=plan.config.transformer.vocab_size)
    return replace(plan, config=replace(plan.config, transformer=network))


def _first(names: Iterable[str], change: Callable[[str], Plan]) -> str | None:
    return next((name for name in names if change(name).works), None)
