"""What the reasoning node runs: loading, checking and calibrating a policy. No rclpy here."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
import statistics
from time import perf_counter_ns

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.kernels import BACKENDS
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.progress import no_progress, Progress

WARM_UP_INSTRUCTION = 'warm up'
CALIBRATION_RUNS = 20


@dataclass(frozen=True, slots=True)
class PolicyParameters:
    """Which policy is loaded, and how much memory it may take."""

    policy: str = parameter(
        '', 'Checkpoint folder; empty takes the embedded policy.', read_only=True
    )
    backend: str = parameter(
        'auto', 'Kernels to run on; auto takes cuda where there is a GPU, else cpu.',
        choices=('auto', *BACKENDS), read_only=True,
    )
    weights_dtype: str = parameter(
        'auto', 'How the weights are held in memory; on cuda float16 always.',
        choices=('auto', 'float32', 'bfloat16'), read_only=True,
    )
    kv_slots: int = parameter(
        0, 'KV slots for frames, 0 takes the number of the checkpoint.', range=(0, 1_000_000),
        read_only=True,
    )
    eviction: str = parameter(
        'semantic', 'Which frame leaves a full cache.', choices=('semantic', 'fifo', 'uniform'),
        read_only=True,
    )
    pin_first: bool = parameter(False, 'The first frame never leaves.', read_only=True)
    pin_newest: bool = parameter(True, 'The newest frame never leaves.', read_only=True)
    memory_budget_mb: float = parameter(
        0.0, 'Configuring is refused when the policy needs more main memory, 0 for no limit.',
        unit='MB', range=(0.0, 1e6), read_only=True,
    )
    vram_budget_mb: float = parameter(
        0.0, 'The same for GPU and pinned memory.', unit='MB', range=(0.0, 1e6), read_only=True,
    )

    def __post_init__(self):
        validate(self)


def load_policy(parameters: PolicyParameters, progress: Progress = no_progress):
    """
    Load the policy that the parameters name.

    Raises
    ------
    ConfigError
        It cannot be loaded (``WeightsError``) or needs more memory than allowed; the message
        then holds the table of all buffers.

    """
    # Imported here: loading is what a stop signal may interrupt.
    from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy

    options = asdict(parameters)
    return Policy.load(options.pop('policy') or DEFAULT_POLICY, **options, progress=progress)


def check_actions(config, action_type: str, initial_action: Sequence[float]) -> None:
    """
    Check what is to be published against the ``PolicyConfig`` of the policy.

    Raises
    ------
    ConfigError
        ``action_type`` cannot hold its joints, or the action before its first one has the wrong
        length or a value out of its range.

    """
    size = config.action_dim
    if action_type == 'twist' and size > 6:
        raise ConfigError('action_type', f'cannot be twist for {size} joints', action_type)
    if not initial_action:
        return
    if len(initial_action) != size:
        raise ConfigError('initial_action', f'must have {size} values', initial_action)
    bounds = list(zip(config.action_low, config.action_high))
    if not all(low <= value <= high for (low, high), value in zip(bounds, initial_action)):
        ranges = ', '.join(f'{low:g}..{high:g}' for low, high in bounds)
        raise ConfigError('initial_action', f"must lie in the policy's {ranges}", initial_action)


def calibrate(
    policy, progress: Progress = no_progress, runs: int = CALIBRATION_RUNS
) -> tuple[float, float]:
    """
    Compile, fill the cache, and measure what a tick costs from then on.

    Parameters
    ----------
    policy : Policy
        Left as after ``reset``.
    progress : Progress
        Told of every run.
    runs : int
        Timed runs behind the warm-up.

    Returns
    -------
    prefill_ms, decode_ms : float
        Median cost of observing a frame and of decoding a chunk with a full cache, ms.

    """
    config = policy.config
    image = np.zeros((config.image_height, config.image_width, 3), np.uint8)
    joints = np.asarray(config.proprioception_mean, np.float32)
    policy.set_instruction(WARM_UP_INSTRUCTION)
    prefill_ns, decode_ns = [], []
    total = policy.cache.layout.max_frames + runs
    for run in range(total):
        progress('warming up, run', run + 1, total)
        started_ns = perf_counter_ns()
        policy.observe(image, joints, run)
        observed_ns = perf_counter_ns()
        policy.act()
        prefill_ns.append(observed_ns - started_ns)
        decode_ns.append(perf_counter_ns() - observed_ns)
    policy.reset()
    return (
        statistics.median(prefill_ns[-runs:]) / NS_PER_MS,
        statistics.median(decode_ns[-runs:]) / NS_PER_MS,
    )
