"""
Host: drive the control loop from a recording, in deterministic virtual time.

Messages become available when the recorder received them, ticks fall on a fixed grid from the
first frame on, and every policy run costs what the latency model says, so two replays of one bag
are equal to the byte.
"""

import argparse
from collections import Counter
from dataclasses import asdict
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from vla_edge_ros.clock import ManualClock, NS_PER_MS
from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_folder, FOLDERS_ARE_MADE, write_text
from vla_edge_ros.progress import terminal_progress
from vla_edge_ros.replay.bag import BagReader
from vla_edge_ros.replay.inputs import BagInputs, input_topics, ReplayParameters
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionController, AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoop, ControlLoopParameters
from vla_edge_ros.runtime.frame_buffer import Frame
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.loop_parameters import check_chunk_steps
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.schedule_options import add_schedule_arguments, loop_parameters, NAMES
from vla_edge_ros.telemetry.energy_summary import modelled_energy
from vla_edge_ros.telemetry.power_model import device_names
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.summary import summarize
from vla_edge_ros.telemetry.trace import read_trace, TraceWriter

TRACE, SUMMARY = 'trace.csv', 'summary.json'
OUT = 'out/replay'
OPTIONS = {
    'image_topic': '--topic',
    'joint_topic': '--joint-topic',
    'instruction_topic': '--instruction-topic',
    'instruction': '--instruction',
    'prefill_ms': '--latency-ms',
    'decode_ms': '--latency-ms',
    'policy': '--policy',
    'out': '--out',
    'schedule': '--schedule',
    'overlap_percent': '--overlap-percent',
    'seam': '--seam',
    'chunk_steps': '--chunk-steps',
    'power_model': '--power-model',
}
"""Which option sets what an error names."""


def replay_bag(
    path: Path | str,
    policy,
    out: Path | str,
    parameters: ReplayParameters | None = None,
    *,
    loop: ControlLoopParameters | None = None,
    admission: AdmissionParameters | None = None,
    queue: ActionQueueParameters | None = None,
) -> dict:
    """
    Run a recording through a policy; return the summary, also written to ``out``.

    Parameters
    ----------
    path : path
        The bag.
    policy : Policy
        Forgets its frames first; its ``config`` tells image size, joint names and action size.
    out : path
        Folder for ``trace.csv``, one record a tick, and ``summary.json``. Those of an earlier
        replay go first, so that what lies there after a failure is not taken for its result.
    parameters : ReplayParameters, optional
        What to read, and the virtual costs.
    loop, admission, queue
        Parameters of the parts; left out, their defaults.

    Raises
    ------
    TransportError
        The bag cannot be read, lacks a topic, or holds no image that can be used.
    ConfigError
        The trace cannot be written, or the policy refuses the instruction.

    """
    parameters = parameters or ReplayParameters()
    if parameters.instruction:
        policy.check_instruction(parameters.instruction)
    trace_path, summary_path = Path(out) / TRACE, Path(out) / SUMMARY
    check_folder('out', Path(out), TRACE, SUMMARY)
    for old in (trace_path, summary_path):
        old.unlink(missing_ok=True)
    latency = FixedLatency(
        {
            Stage.PREFILL: round(parameters.prefill_ms * NS_PER_MS),
            Stage.DECODE: round(parameters.decode_ms * NS_PER_MS),
        }
    )
    with BagReader(path) as bag:
        inputs = BagInputs(bag, parameters, policy)
        clock = ManualClock(inputs.start_ns)
        read_joints = inputs.read_joints
        if not policy.config.joint_names:
            pose = np.asarray(policy.config.proprioception_mean, np.float32)
            read_joints = lambda: (pose, clock.now_ns())  # noqa: E731
        controller = AdmissionController(admission)
        controller.seed(parameters.prefill_ms, parameters.decode_ms)
        control_loop = ControlLoop(
            policy,
            _Newest(inputs, clock),
            controller,
            ActionQueue(queue),
            VirtualRunner(clock, latency),
            clock,
            clock,
            loop,
            read_joints,
        )
        control_loop.reset()
        with TraceWriter(trace_path, policy.config.action_dim, lossless=True) as trace:
            errors = _run(control_loop, inputs, clock, trace)
    inputs.check_images()
    if trace.error is not None:
        raise ConfigError('trace', f'must be writable ({trace.error})', str(trace_path))
    columns = read_trace(trace_path)
    summary = summarize(
        columns,
        period_ms=control_loop.parameters.period_ns / NS_PER_MS,
        camera={'published': inputs.images, 'received': inputs.frames},
        energy=modelled_energy(
            parameters.power_model, columns, control_loop.parameters.period_ns),
    )
    summary |= {
        'reasons': control_loop.counts,
        'causes': control_loop.causes,
        'input_errors': [asdict(errors) for errors in inputs.errors.values()],
        'policy_errors': dict(errors),
    }
    write_text('out', summary_path, json.dumps(summary, indent=2) + '\n')
    return summary


class _Newest:
    """Frame source of what was recorded until now, also between two ticks."""

    def __init__(self, inputs: BagInputs, clock: ManualClock):
        self._inputs = inputs
        self._clock = clock

    def read(self) -> Frame | None:
        self._inputs.advance_to(self._clock.now_ns())
        return self._inputs.read()


def _run(
    loop: ControlLoop, inputs: BagInputs, clock: ManualClock, trace: TraceWriter
) -> Counter[str]:
    """Tick from the first image until the bag is exhausted; count what the policy raised."""
    errors: Counter[str] = Counter()
    scheduled_ns = inputs.start_ns
    while not inputs.exhausted:
        loop.between_ticks(scheduled_ns)
        clock.advance_to_ns(scheduled_ns)
        inputs.advance_to(scheduled_ns)
        instruction = inputs.take_instruction()
        if instruction is not None:
            loop.set_instruction(instruction)
        result = loop.tick(scheduled_ns)
        trace.record(result)
        if result.error is not None:
            errors[f'{type(result.error).__name__}: {result.error}'] += 1
        scheduled_ns += loop.parameters.period_ns
    return errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge replay``; None tells that one was not given."""
    defaults = ReplayParameters()
    parser.add_argument('bag', help='rosbag2 directory, .db3 or .mcap file')
    parser.add_argument('--topic', help='image topic (default: the only one)')
    for name in ('joint', 'instruction'):
        default = getattr(defaults, f'{name}_topic')
        parser.add_argument(f'--{name}-topic', metavar='TOPIC', help=f'(default: {default})')
    parser.add_argument(
        '--instruction', metavar='TEXT', help='follow this, not the recorded ones'
    )
    parser.add_argument(
        '--policy', metavar='FOLDER', help='checkpoint (default: the embedded one)'
    )
    parser.add_argument(
        '--out',
        type=Path,
        metavar='FOLDER',
        help=f'for {TRACE} and {SUMMARY}, which are replaced; {FOLDERS_ARE_MADE} (default: {OUT})',
    )
    parser.add_argument(
        '--latency-ms',
        metavar='PREFILL,DECODE',
        help='what a policy run costs in virtual time '
        f'(default: {defaults.prefill_ms:g},{defaults.decode_ms:g})',
    )
    parser.add_argument(
        '--power-model',
        metavar='DEVICE',
        help='charge the replay with the modelled power of a device: '
        f'{", ".join(device_names())} (default: energy is unavailable)',
    )
    add_schedule_arguments(parser)
    parser.add_argument(
        '--live',
        action='store_true',
        help='publish the messages and /clock through DDS instead, for nodes that run with '
        'use_sim_time:=true; nothing is written',
    )
    parser.add_argument('--rate', type=float, help='speed of --live (default: 1)')


def run(arguments: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge replay``."""
    _check_combination(arguments)
    try:
        parameters = ReplayParameters(**_given(arguments))
        loop = loop_parameters(arguments)
        if arguments.live:
            rate = 1.0 if arguments.rate is None else arguments.rate
            _play_live(arguments.bag, parameters, rate, stop)
        else:
            out = arguments.out or Path(OUT)
            check_folder('--out', out, TRACE, SUMMARY)
            with stop.interruptible():
                _replay(arguments.bag, arguments.policy, out, parameters, loop)
    except ConfigError as error:
        name, *rest = error.field.split(' ', 1)
        if name not in OPTIONS:
            raise
        field = ' '.join([OPTIONS[name], *rest])
        raise type(error)(field, error.rule, error.value) from error
    return 0


def _check_combination(arguments: argparse.Namespace) -> None:
    """Refuse what would have no effect."""
    text = arguments.instruction
    if text is not None and not text.strip():
        raise ConfigError('--instruction', 'must not be blank', text)
    if arguments.live:
        useless = ('out', 'policy', 'latency_ms', 'power_model', *NAMES)
        rule = 'must not be given with --live, where the nodes act'
    else:
        useless = ('rate',)
        rule = 'must be given with --live only: virtual time has no speed'
    for name in useless:
        value = getattr(arguments, name)
        if value is not None:
            shown = value if isinstance(value, (int, float)) else str(value)
            raise ConfigError('--' + name.replace('_', '-'), rule, shown)
    if arguments.rate is not None and not 0 < arguments.rate < math.inf:
        raise ConfigError('--rate', 'must be a finite number > 0', arguments.rate)
    if text is not None and arguments.instruction_topic is not None and not arguments.live:
        rule = 'must not be given with --instruction, which replaces the recorded ones'
        raise ConfigError('--instruction-topic', rule, arguments.instruction_topic)


def _replay(
    path: str, folder: str | None, out: Path, parameters: ReplayParameters,
    loop: ControlLoopParameters,
) -> None:
    from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
    from vla_edge_ros.policy.policy_config import PolicyConfig

    # A wrong folder or bag is told before the policy loads.
    config = PolicyConfig.load(folder or DEFAULT_POLICY)
    check_chunk_steps(loop.chunk_steps, config.chunk_steps)
    with BagReader(path) as bag:
        input_topics(bag, parameters, bool(config.joint_names))
    policy = Policy.load(folder or DEFAULT_POLICY, progress=terminal_progress())
    summary = replay_bag(path, policy, out, parameters, loop=loop)
    print(json.dumps(summary, indent=2))


def _play_live(path: str, parameters: ReplayParameters, rate: float, stop: StopRequest) -> None:
    with stop.interruptible():
        try:
            from vla_edge_ros.replay.live import play
        except ImportError as error:
            raise BackendUnavailable('live', f'needs ROS 2 ({error})', True) from error
    with BagReader(path) as bag:
        topics = list(input_topics(bag, parameters).values())
        instruction = (parameters.instruction_topic, parameters.instruction)
        published = play(bag, topics, rate, stop, instruction if parameters.instruction else None)
    print(json.dumps({'published': published}, indent=2))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the parameters that were given by options."""
    values = {
        'image_topic': arguments.topic,
        'joint_topic': arguments.joint_topic,
        'instruction_topic': arguments.instruction_topic,
        'instruction': arguments.instruction,
        'power_model': arguments.power_model,
    }
    if arguments.latency_ms is not None:
        values['prefill_ms'], values['decode_ms'] = _parse_latency(arguments.latency_ms)
    return {name: value for name, value in values.items() if value is not None}


def _parse_latency(text: str) -> tuple[float, float]:
    try:
        prefill_ms, decode_ms = (float(part) for part in text.split(','))
    except ValueError:
        raise ConfigError('--latency-ms', 'must be PREFILL,DECODE in ms', text) from None
    return prefill_ms, decode_ms
