"""What the policy's runs cost in an episode: a fixed time, a recording, or a profile."""

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.latency import read_stage_costs
from vla_edge_ros.runtime.profiles import LatencyProfile, load_profile, MEASURED, recorded_profile
from vla_edge_ros.telemetry.stages import Stage

STAGE_SHARES = {
    Stage.PREPROCESS: 0.05, Stage.VISION: 0.10, Stage.PREFILL: 0.35, Stage.DECODE: 0.50,
}
"""How a fixed cost of a run is split over its stages."""


def check_latency(parameters) -> None:
    """
    Refuse what contradicts itself, has no effect or is not known; measures nothing.

    Raises
    ------
    ConfigError
        Of ``EpisodeParameters``: two sources of the cost, a model without a profile, or a profile
        or model that does not exist.

    """
    profile = parameters.latency_profile
    if profile and parameters.latency_trace:
        rule = 'must not be given with latency_trace, which says what a run costs'
        raise ConfigError('latency_profile', rule, profile)
    if parameters.profile_model and not profile:
        rule = 'must be given with latency_profile only'
        raise ConfigError('profile_model', rule, parameters.profile_model)
    if profile and profile != MEASURED:
        episode_profile(parameters)


def episode_profile(parameters) -> LatencyProfile:
    """
    Return the profile that ``EpisodeParameters`` ask for; ``measured`` measures it now.

    Raises
    ------
    ConfigError
        The trace, the profile or the model cannot be used.

    """
    if parameters.latency_profile:
        return load_profile(parameters.latency_profile, parameters.profile_model)
    if parameters.latency_trace:
        costs_ns = read_stage_costs(parameters.latency_trace, 'latency_trace')
        return recorded_profile(parameters.latency_trace, costs_ns)
    costs_ns = {
        stage: np.array([int(share * parameters.compute_ms * NS_PER_MS)])
        for stage, share in STAGE_SHARES.items()}
    return recorded_profile(f'{parameters.compute_ms:g} ms', costs_ns)
