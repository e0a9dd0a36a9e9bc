"""
What a run costs on a device, computed from what it has to move and to compute.

Each part takes the longer of its bytes over the bandwidth that is reached and its FLOP over the
rate that is reached, and on top what cannot be hidden: kernels that follow each other, waits for
results of others, and the call itself. ``devices.yaml`` has the figures and where they come from.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.policy.shapes import SHAPES
from vla_edge_ros.policy.work import arranged, attention, layer_products, product, vision, Work
from vla_edge_ros.runtime.devices import catalogue, Device, EngineFigures, Jitter, Weights
from vla_edge_ros.telemetry.stages import Stage

PREFILL_TOKENS = 32
"""Tokens that one pass of the engine takes in at most."""
PREFILL_KERNELS, STREAMED_KERNELS, STORING_KERNELS = 8, 7, 2
"""Kernels of a layer to prefill, with the MLP as one, and until keys and values are stored."""
STREAMED_HIDDEN = 1536
"""Hidden size up to which a device that decodes in one kernel has the MLP of a prefill as one."""
DECODE_PHASES, VISION_KERNELS = 5, 3
"""Dependent steps of a layer to decode, kernels of a picture."""
MEASURED_SHAPE = '1.5b'
"""What the figures of the engine are fitted to."""
BOUNDS = ('memory', 'compute', 'latency')


class Cost(NamedTuple):
    """Seconds by what they are spent on: moving, computing, and waiting."""

    memory: float = 0.0
    compute: float = 0.0
    latency: float = 0.0

    def __add__(self, other: 'Cost') -> 'Cost':
        """Return both together."""
        return Cost(*(a + b for a, b in zip(self, other)))

    def __mul__(self, times: float) -> 'Cost':
        """Return it several times."""
        return Cost(*(times * value for value in self))

    @property
    def seconds(self) -> float:
        """All of it."""
        return sum(self)

    @property
    def bound(self) -> str:
        """What most of it is spent on."""
        return BOUNDS[self.index(max(self))]


def full_slots(config: PolicyConfig) -> int:
    """Return the slots behind which a frame is taken in once the cache is full."""
    return config.prompt_slots + config.kv_slots - config.slots_per_frame


def why_predicted(config: PolicyConfig, device: Device, weights_name: str) -> str:
    """Return why the figures of a model are predictions, '' where their like was measured."""
    reasons = []
    if not device.measured:
        reasons.append(f'nothing was measured on {device.title}')
    elif config.transformer != SHAPES[MEASURED_SHAPE]:
        reasons.append(f'on {device.title} only the {MEASURED_SHAPE} shape was measured')
    if not catalogue().weights[weights_name].kernels:
        reasons.append(f'this package has no kernels for {weights_name} weights')
    return '; '.join(reasons)


class DeviceModel:
    """
    The cost of a policy's stages on one device.

    Parameters
    ----------
    config : PolicyConfig
        The policy's shape.
    device : Device
    weights : Weights
        How the matrices of the layers are held.
    head_rows : int, optional
        Rows of the vocabulary that a token is chosen from; the action tokens when left out.
    figures : EngineFigures, optional
        Of the engine; the package's own when left out.

    """

    def __init__(
        self, config: PolicyConfig, device: Device, weights: Weights,
        head_rows: int | None = None, figures: EngineFigures | None = None,
    ):
        self._head_rows = config.bins if head_rows is None else head_rows
        self._config = config
        self._network = config.transformer
        self._weights = weights
        self._figures = figures = figures or catalogue().engine
        self._bandwidth = 1e9 * device.bandwidth_gb_s * figures.read_efficiency
        self._rate = 1e12 * device.tflop_s * figures.compute_efficiency
        slower = figures.clock_mhz / device.clock_mhz
        self._launch_s = 1e-6 * figures.launch_us * slower
        self._exchange_s = 1e-6 * figures.exchange_us * slower
        self._call = Cost(latency=1e-6 * figures.call_us)
        self._streams = device.one_kernel_decode
        streams_mlp = self._streams and self._network.hidden_size <= STREAMED_HIDDEN
        self._kernels = STREAMED_KERNELS if streams_mlp else PREFILL_KERNELS

    def prefill(self, length: int) -> Cost:
        """
        Return the cost of taking in a frame's tokens behind ``length`` cached slots.

        The frame takes the place of the oldest, so that all slots behind that one change their
        rank and are arranged anew, once. Of the last layer only keys and values are computed.
        """
        left, total = self._config.slots_per_frame, self._call
        total += self._roof(arranged(self._network, max(length - left, 0)))
        while left > 0:
            tokens = min(left, PREFILL_TOKENS)
            costs = {name: self._roof(work) for name, work in layer_products(
                self._network, tokens, self._weights.bytes).items()}  # fmt: skip
            layer = self._attention(length, tokens) + Cost(latency=self._kernels * self._launch_s)
            for cost in costs.values():
                layer += cost
            last = costs['qkv'] + Cost(latency=STORING_KERNELS * self._launch_s)
            arranging = Cost(latency=self._launch_s)
            total += layer * (self._network.num_hidden_layers - 1) + last + arranging
            length, left = length + tokens, left - tokens
        return total

    def decoded_token(self, length: int) -> Cost:
        """Return the cost of one decoded token that sees ``length`` slots."""
        layers = self._network.num_hidden_layers
        steps = DECODE_PHASES * layers
        waits = (steps + 1) * self._exchange_s if self._streams else (steps + 2) * self._launch_s
        layer = Cost()
        for work in layer_products(self._network, 1, self._weights.bytes).values():
            layer += self._roof(work)
        layer += self._attention(length, 1)
        head = self._roof(product(self._head_rows, self._network.hidden_size, 1))
        return layer * layers + head + Cost(latency=waits)

    def stages(self, length: int | None = None, tokens: int | None = None) -> dict[Stage, Cost]:
        """
        Return the cost of every stage of a run.

        Parameters
        ----------
        length : int, optional
            Cached slots; left out, those of a full cache.
        tokens : int, optional
            Decoded tokens; left out, those of the policy's chunk.

        """
        length = full_slots(self._config) if length is None else length
        tokens = self._config.decode_tokens if tokens is None else tokens
        seen = length + self._config.slots_per_frame
        picture = self._roof(vision(self._config))
        return {
            Stage.PREPROCESS: self._call,
            Stage.VISION: self._call + picture + Cost(latency=VISION_KERNELS * self._launch_s),
            Stage.PREFILL: self.prefill(length),
            Stage.DECODE: self._call + self.decoded_token(seen) * tokens,
        }

    def _attention(self, length: int, tokens: int) -> Cost:
        work = attention(self._network, length, tokens)
        moved = Work(work.bytes / self._figures.key_value_efficiency, work.flop)
        return self._roof(moved)

    def _roof(self, work: Work) -> Cost:
        moving, computing = work.bytes / self._bandwidth, work.flop / self._rate
        return Cost(memory=moving) if moving >= computing else Cost(compute=computing)


class DeviceLatency:
    """
    Costs of a device with its jitter; a ``LatencyModel``.

    All stages of a run vary together.

    Parameters
    ----------
    costs : mapping of Stage to Cost
        The median run.
    jitter : Jitter
    seed : int
        Equal seeds give equal sequences.

    """

    def __init__(self, costs: Mapping[Stage, Cost], jitter: Jitter, seed: int = 0):
        self._seconds = {stage: cost.seconds for stage, cost in costs.items()}
        self._jitter = jitter
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Mapping[Stage, int]:
        """Return the costs of the next run, ns."""
        factor = np.exp(self._jitter.sigma * self._rng.standard_normal())
        if self._rng.random() < self._jitter.spike_probability:
            factor *= self._jitter.spike_factor
        return {
            stage: round(seconds * factor * NS_PER_S) for stage, seconds in self._seconds.items()}
