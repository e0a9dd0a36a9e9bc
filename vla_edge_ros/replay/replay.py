"""
Host: drive the control loop from a recording, in deterministic virtual time.

Messages become available when the recorder received them, ticks fall on a fixed grid from the
first frame on, and every policy run costs what the latency model says, so two replays of one bag
are equal to the byte.
"""

import argparse
from collections import Counter
import json
from pathlib import Path

import numpy as np

from vla_edge_ros.clock import ManualClock, NS_PER_MS
from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.replay.bag import BagReader
from vla_edge_ros.replay.inputs import BagInputs, input_topics, ReplayParameters
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionController, AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoop, ControlLoopParameters
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import VirtualRunner
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.summary import summarize
from vla_edge_ros.telemetry.trace import read_trace, TraceWriter


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
        Folder for ``trace.csv``, one record a tick, and ``summary.json``.
    parameters : ReplayParameters, optional
        What to read, and the virtual costs.
    loop, admission, queue
        Parameters of the parts; left out, their defaults.

    Raises
    ------
    TransportError
        The bag cannot be read or lacks a topic.
    ConfigError
        The trace cannot be written.

    """
    parameters = parameters or ReplayParameters()
    latency = FixedLatency(
        {
            Stage.PREFILL: round(parameters.prefill_ms * NS_PER_MS),
            Stage.DECODE: round(parameters.decode_ms * NS_PER_MS),
        }
    )
    trace_path = Path(out) / 'trace.csv'
    with BagReader(path) as bag:
        inputs = BagInputs(bag, parameters, policy.config)
        clock = ManualClock(inputs.start_ns)
        read_joints = inputs.read_joints
        if not policy.config.joint_names:
            pose = np.asarray(policy.config.proprioception_mean, np.float32)
            read_joints = lambda: (pose, clock.now_ns())  # noqa: E731
        controller = AdmissionController(admission)
        controller.seed(parameters.prefill_ms, parameters.decode_ms)
        control_loop = ControlLoop(
            policy,
            inputs,
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
    if trace.error is not None:
        raise ConfigError('trace', f'must be writable ({trace.error})', str(trace_path))
    summary = summarize(
        read_trace(trace_path),
        period_ms=control_loop.parameters.period_ns / NS_PER_MS,
        camera={'published': inputs.images, 'received': inputs.frames},
    )
    summary |= {
        'reasons': control_loop.counts,
        'causes': control_loop.causes,
        'input_errors': dict(inputs.errors),
        'policy_errors': dict(errors),
    }
    text = json.dumps(summary, indent=2)
    (Path(out) / 'summary.json').write_text(text + '\n', encoding='utf-8')
    return summary


def _run(
    loop: ControlLoop, inputs: BagInputs, clock: ManualClock, trace: TraceWriter
) -> Counter[str]:
    """Tick from the first image until the bag is exhausted; count what the policy raised."""
    errors: Counter[str] = Counter()
    scheduled_ns = inputs.start_ns
    while not inputs.exhausted:
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
    """Declare the options of ``vla-edge replay``."""
    parser.add_argument('bag', help='rosbag2 directory, .db3 or .mcap file')
    parser.add_argument('--topic', default='', help='image topic (default: the only one)')
    parser.add_argument('--joint-topic', default='joint_states', metavar='TOPIC')
    parser.add_argument('--instruction-topic', default='instruction', metavar='TOPIC')
    parser.add_argument(
        '--instruction', default='', metavar='TEXT', help='follow this, not the recorded ones'
    )
    parser.add_argument('--policy', default='', metavar='DIR', help='checkpoint folder')
    parser.add_argument('--out', default='out/replay', metavar='DIR', help='for trace and summary')
    parser.add_argument(
        '--latency-ms',
        default='8,8',
        metavar='PREFILL,DECODE',
        help='what a policy run costs in virtual time (default: %(default)s)',
    )
    parser.add_argument(
        '--live',
        action='store_true',
        help='publish the messages and /clock through DDS instead; for nodes with use_sim_time',
    )
    parser.add_argument('--rate', type=float, default=1.0, help='speed of --live (default: 1)')


def run(arguments: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge replay``."""
    prefill_ms, decode_ms = _parse_latency(arguments.latency_ms)
    parameters = ReplayParameters(
        image_topic=arguments.topic,
        joint_topic=arguments.joint_topic,
        instruction_topic=arguments.instruction_topic,
        instruction=arguments.instruction,
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
    )
    if arguments.live:
        _play_live(arguments.bag, parameters, arguments.rate, stop)
        return 0
    with stop.interruptible():
        with BagReader(arguments.bag) as bag:  # a wrong bag is told before the policy loads
            input_topics(bag, parameters)
        from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy

        policy = Policy.load(arguments.policy or DEFAULT_POLICY)
        summary = replay_bag(arguments.bag, policy, arguments.out, parameters)
    print(json.dumps(summary, indent=2))
    return 0


def _play_live(path: str, parameters: ReplayParameters, rate: float, stop: StopRequest) -> None:
    if not rate > 0:
        raise ConfigError('rate', 'must be > 0', rate)
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


def _parse_latency(text: str) -> tuple[float, float]:
    try:
        prefill_ms, decode_ms = (float(part) for part in text.split(','))
    except ValueError:
        raise ConfigError('latency-ms', 'must be PREFILL,DECODE in ms', text) from None
    return prefill_ms, decode_ms
