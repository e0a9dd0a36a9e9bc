"""
Latency profiles by name: what the engine costs in virtual time.

``measured`` is the engine of this machine, timed now; the name of a device of ``devices.yaml`` is
that device as a model. ``agx-orin:int8`` is one with other weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
import time
from typing import Any

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.policy_config import DEFAULT_POLICY
from vla_edge_ros.policy.shapes import head_rows, load_shape, RANDOM
from vla_edge_ros.runtime.device_model import DeviceLatency, DeviceModel, why_predicted
from vla_edge_ros.runtime.devices import catalogue, find_device, find_weights
from vla_edge_ros.runtime.latency import LatencyModel, RecordedLatency
from vla_edge_ros.telemetry.stages import Stage

MEASURED = 'measured'
DEFAULT_WEIGHTS = 'bf16'
MEASURED_RUNS = 200


@dataclass(frozen=True, slots=True)
class LatencyProfile:
    """
    Where latency models come from; one for each seed.

    Parameters
    ----------
    name : str
        What it is called.
    medians_ns : mapping of Stage to int
        Cost of the median run, ns: what a node calibrates.
    make : callable
        Takes a seed; returns a ``LatencyModel``.
    about : mapping of str to value
        What a record says of it.

    """

    name: str
    medians_ns: Mapping[Stage, int]
    make: Callable[[int], LatencyModel]
    about: Mapping[str, Any]

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Median cost of observing a frame and of decoding a chunk, ms."""
        decode_ns = self.medians_ns.get(Stage.DECODE, 0)
        observe_ns = sum(self.medians_ns.values()) - decode_ns
        return observe_ns / NS_PER_MS, decode_ns / NS_PER_MS


def profile_names() -> tuple[str, ...]:
    """Return the names of all profiles, without weights."""
    return (MEASURED, *catalogue().devices)


def load_profile(name: str, model: str = '', backend: str = 'auto') -> LatencyProfile:
    """
    Return a profile by its name.

    Parameters
    ----------
    name : str
        ``measured``, or a device, perhaps with ``:`` and how its weights are held.
    model : str
        For which policy: a checkpoint folder or a shape such as ``random:1.5b``, see
        ``policy.shapes.load_shape``; empty for the embedded policy.
    backend : str
        Kernels that are measured.

    Raises
    ------
    ConfigError
        There is no such profile, weights or model; or ``measured`` is asked of a shape without
        weights.

    """
    config = load_shape(model, 'profile_model')
    if name == MEASURED:
        if model.startswith(RANDOM):
            rule = f'must be a checkpoint folder with latency_profile {MEASURED}'
            raise ConfigError('profile_model', rule, model)
        return recorded_profile(MEASURED, measure_stages(model, backend=backend))
    device_name, _, weights_name = name.partition(':')
    if device_name not in catalogue().devices:
        rule = f'must be one of {", ".join(profile_names())}'
        raise ConfigError('latency_profile', rule, name)
    device = find_device(device_name)
    weights = find_weights(weights_name or DEFAULT_WEIGHTS, 'weights of latency_profile')
    costs = DeviceModel(config, device, weights, head_rows(model, config)).stages()
    medians_ns = {stage: round(cost.seconds * 1e9) for stage, cost in costs.items()}
    about = {
        'profile': name, 'model': model or 'embedded policy',
        'prediction': why_predicted(config, device, weights_name or DEFAULT_WEIGHTS),
        'stages_ms': {stage.value: ns / NS_PER_MS for stage, ns in medians_ns.items()},
    }
    return LatencyProfile(name, medians_ns, partial(DeviceLatency, costs, device.jitter), about)


def recorded_profile(name: str, samples: Mapping[Stage, np.ndarray]) -> LatencyProfile:
    """
    Return the profile of recorded or measured runs.

    Parameters
    ----------
    name : str
        What it is called.
    samples : mapping of Stage to int [runs]
        Cost of each stage, ns.

    """
    RecordedLatency(samples)  # refuses what cannot be drawn from
    decode = np.asarray(samples.get(Stage.DECODE, [0]))
    # The halves of a run are calibrated as sums: the median of a sum is not that of its parts.
    observe = sum(np.asarray(ns) for stage, ns in samples.items() if stage is not Stage.DECODE)
    medians_ns = {Stage.PREFILL: float(np.median(observe)), Stage.DECODE: float(np.median(decode))}
    about = {
        'profile': name, 'runs': int(decode.size),
        'stages_ms': {
            stage.value: {
                f'p{part}': float(np.percentile(ns, part)) / NS_PER_MS for part in (50, 99)}
            for stage, ns in samples.items()},
    }
    return LatencyProfile(name, medians_ns, partial(RecordedLatency, samples), about)


def measure_stages(
    folder: str = '', runs: int = MEASURED_RUNS, backend: str = 'auto',
) -> dict[Stage, np.ndarray]:
    """
    Time a policy's stages behind a full cache on this machine.

    Parameters
    ----------
    folder : str
        Checkpoint folder; empty for the embedded policy.
    runs : int
        Timed runs.
    backend : str
        Its kernels.

    Returns
    -------
    dict of Stage to int64 [runs]
        Cost of each, ns.

    """
    from vla_edge_ros.policy.policy import Policy  # imports the kernels

    return time_stages(Policy.load(folder or DEFAULT_POLICY, backend=backend), runs)


def time_stages(policy, runs: int = MEASURED_RUNS) -> dict[Stage, np.ndarray]:
    """Time the stages of a loaded policy behind a full cache, as :func:`measure_stages`."""
    config = policy.config
    policy.set_instruction('reach the red cube')
    rng = np.random.default_rng(0)
    shape = (config.image_height, config.image_width, 3)
    joints = np.asarray(config.proprioception_mean, np.float32)
    rows = []
    for index in range(policy.cache.layout.max_frames + 1 + runs):
        observation = policy.observe(rng.integers(0, 256, shape, np.uint8), joints, 1 + index)
        began_ns = time.perf_counter_ns()
        policy.act()
        rows.append({**observation.stage_ns, Stage.DECODE: time.perf_counter_ns() - began_ns})
    return {stage: np.array([row[stage] for row in rows[-runs:]], np.int64) for stage in Stage}
