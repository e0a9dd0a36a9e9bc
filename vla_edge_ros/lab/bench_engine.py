"""
``vla-edge bench engine``: the CUDA engine against the memory floor, and against Hugging Face.

A chunk is a prefill of 32 tokens and 8 decoded ones behind a filled cache; the weights are
random. The floor is what a chunk has to read at the read bandwidth measured in the same run, which
is that of the vocabulary's product: one pass over the largest matrix.
"""

import argparse
from collections.abc import Callable
import json
from pathlib import Path

from vla_edge_ros.clock import MonotonicClock
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.kernels import load_backend
from vla_edge_ros.lab.bench_endurance import endure, Memory
from vla_edge_ros.lab.bench_energy import EnergyBench, find_source, measure_energy
from vla_edge_ros.lab.bench_lengths import find_peers, measure, middle_of
from vla_edge_ros.lab.bench_loop import measure_loop
from vla_edge_ros.lab.bench_page import document
from vla_edge_ros.lab.chunks import Endless, EngineChunks, PolicyChunks
from vla_edge_ros.lab.gpu_state import gpu_state, pci_address
from vla_edge_ros.lab.metered_policy import MeteredPolicy
from vla_edge_ros.lab.random_policy import fast_random_weights, load_policy
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.lab.roofline import DECODE_TOKENS, PREFILL_TOKENS
from vla_edge_ros.nodes.engine import calibrate
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, write_text
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.policy.shapes import RANDOM, SHAPES
from vla_edge_ros.progress import terminal_progress

POLICY = 'policy'
"""The shape that is the embedded policy, with its encoder."""
LENGTHS, CHUNKS, ENDURED_LENGTH = '32,512,2048,4064', '300', '2048'
MODES = ('endurance', 'loop', 'energy')
"""Options of which each is another measurement."""
MIN_ENERGY_S = 0.2
COMPILE_MODES = ('default', 'max-autotune-no-cudagraphs')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge bench``; None tells that one was not given."""
    parser.add_argument('what', choices=('engine',), help='what to measure')
    parser.add_argument(
        '--shape', choices=(*SHAPES, POLICY), default='1.5b',
        help='Qwen2.5 shape, or the embedded policy (default: 1.5b)')
    parser.add_argument('--lengths', help=f'cached slots (default: {LENGTHS})')
    parser.add_argument(
        '--chunks', help=f'timed chunks of each length, one number or a list (default: {CHUNKS})')
    parser.add_argument('--no-peers', action='store_true', help='leave Hugging Face out')
    parser.add_argument(
        '--compiled', nargs='?', const=COMPILE_MODES[-1], choices=COMPILE_MODES, metavar='MODE',
        help='Hugging Face also through torch.compile, which takes minutes; '
        f'{" or ".join(COMPILE_MODES)} (default: the latter)')
    parser.add_argument(
        '--endurance', type=int, metavar='N', help='instead: N chunks, same memory and tokens?')
    parser.add_argument(
        '--loop', type=float, metavar='SECONDS',
        help='instead: the control loop at 30 Hz behind a virtual camera')
    parser.add_argument(
        '--energy', type=float, metavar='SECONDS',
        help='instead: joules of a chunk and of a task, from six measurements of that length')
    parser.add_argument(
        '--backend', choices=('cuda', 'cpu'), default='cuda',
        help='kernels of --endurance, --loop and --energy (default: cuda)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the record there')


def run(options: argparse.Namespace, stop: StopRequest) -> int:
    """
    Run ``vla-edge bench``; exit status 1 when an endurance, a loop or a sum did not hold.

    A signal ends these early, with the record of what they saw until then.
    """
    _check_combination(options)
    lengths = _numbers('--lengths', options.lengths or LENGTHS, 1, 100_000)
    chunks = _numbers('--chunks', options.chunks or CHUNKS, 10, 1_000_000)
    if len(chunks) not in (1, len(lengths)):
        raise ConfigError('--chunks', f'must be 1 or {len(lengths)} numbers', options.chunks)
    if options.json:
        check_file('--json', options.json)
    gpu = None
    if options.backend == 'cuda':
        from vla_edge_ros.kernels.cuda.driver import Device

        device = Device()  # tells that there is no GPU before the weights are drawn
        gpu = pci_address(device) if options.energy else None
        device.close()
    if options.energy:
        options.energy_source = find_source(gpu)
    mode = next((name for name in MODES if getattr(options, name)), 'engine')
    record = {'mode': mode, 'environment': environment_record(), 'shape': options.shape}
    if mode == 'engine':
        with stop.interruptible():
            record |= _measure(options, lengths, chunks * (len(lengths) // len(chunks)))
    else:
        record |= {'endurance': _endure, 'loop': _loop, 'energy': _energy}[mode](options, stop)
    if options.json:
        write_text('--json', options.json, json.dumps(record, indent=2) + '\n')
    print(document(record))
    return 0 if record.get('passed', True) else 1


def _measure(options, lengths: list[int], chunks: list[int]) -> dict:
    peers = None if options.no_peers else find_peers(options.compiled or '')
    return measure(SHAPES[options.shape], lengths, chunks, _cuda_engine, peers)


def _endure(options, stop: StopRequest) -> dict:
    progress = terminal_progress()
    with stop.interruptible():
        if options.shape == POLICY:
            policy = _load_policy(options)
            engine, chunks, about = policy.transformer.engine, PolicyChunks(policy), {}
        else:
            length = middle_of(_numbers(
                '--lengths', options.lengths or ENDURED_LENGTH, 1, 100_000))
            config = SHAPES[options.shape]
            kernels, _ = load_backend(options.backend, config)
            engine = kernels.Engine(
                config, fast_random_weights(config), 'bfloat16',
                length + PREFILL_TOKENS + DECODE_TOKENS, PREFILL_TOKENS, progress)
            chunks, about = EngineChunks(engine, config, length), {'length': length}
    device = getattr(engine, 'device', None)
    record = about | endure(
        chunks, options.endurance, Memory(device), stopped=lambda: stop.requested,
        progress=progress)
    return record | _about_device(device, options, Endless(chunks))


def _loop(options, stop: StopRequest) -> dict:
    progress = terminal_progress()
    with stop.interruptible():
        policy = _load_policy(options)
        calibration = calibrate(policy, progress)
    device = getattr(policy.transformer.engine, 'device', None)
    record = {'kv_slots': policy.cache.layout.kv_slots} | measure_loop(
        policy, calibration, options.loop, Memory(device), stopped=lambda: stop.requested,
        progress=progress)
    return record | _about_device(device, options)


def _energy(options, stop: StopRequest) -> dict:
    progress, clock = terminal_progress(), MonotonicClock()
    with stop.interruptible():
        policy = _load_policy(options)
        calibration = calibrate(policy, progress)
        metered = MeteredPolicy(policy, clock)
    device = getattr(policy.transformer.engine, 'device', None)
    bench = EnergyBench(
        metered, options.energy_source, clock, stopped=lambda: stop.requested)

    def run(on_tick) -> dict:
        return measure_loop(
            metered, calibration, options.energy, Memory(device), stopped=bench.stopped,
            progress=progress, on_tick=on_tick)

    about = {'kv_slots': policy.cache.layout.kv_slots, 'source': options.energy_source.name}
    record = about | measure_energy(bench, options.energy, run, progress)
    return record | _about_device(device, options)


def _load_policy(options) -> Policy:
    model = '' if options.shape == POLICY else RANDOM + options.shape
    return load_policy(model, options.backend, 0, terminal_progress())


def _cuda_engine(config, weights, slots: int):
    from vla_edge_ros.kernels.cuda.engine import Engine

    return Engine(config, weights, 'bfloat16', slots, PREFILL_TOKENS, terminal_progress())


def _about_device(device, options, work: Callable[[], None] | None = None) -> dict:
    """Return what a record says of its device, the GPU's state under the load of ``work``."""
    record = {'backend': options.backend, 'device': 'CPU'}
    if device is not None:
        when = 'under_load' if work else 'at_the_end'
        record |= {'device': device.name, 'capability': device.capability,
                   'gpu': {when: gpu_state(pci_address(device), work)}}  # fmt: skip
    return record


def _numbers(option: str, text: str, low: int, high: int) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(',')]
    except ValueError:
        raise ConfigError(option, 'must be numbers like 32,2048', text) from None
    if not all(low <= number <= high for number in numbers):
        raise ConfigError(option, f'must be in {low}..{high}', text)
    return numbers


def _check_combination(options) -> None:
    """Refuse what would have no effect, and what cannot be measured."""
    given = [name for name in MODES if getattr(options, name) is not None]
    if len(given) > 1:
        raise ConfigError(
            f'--{given[1]}', f'must not be given with --{given[0]}', getattr(options, given[1]))
    if options.endurance is not None and not 1 <= options.endurance <= 100_000_000:
        raise ConfigError('--endurance', 'must be in 1..100000000', options.endurance)
    if options.loop is not None and not 0 < options.loop <= 1e6:
        raise ConfigError('--loop', 'must be > 0 and <= 1e6 s', options.loop)
    if options.energy is not None and not MIN_ENERGY_S <= options.energy <= 1e4:
        raise ConfigError('--energy', f'must be in {MIN_ENERGY_S}..1e4 s', options.energy)
    if not given:
        rule = 'must be given with --endurance, --loop or --energy'
        for name, idle in (('backend', ['cuda']), ('shape', list(SHAPES))):
            value = getattr(options, name)
            if value not in idle:
                raise ConfigError(f'--{name}', f'{rule}, or be one of {idle}', value)
        return
    useless = ['chunks', 'compiled', 'no_peers']
    if options.endurance is None or options.shape == POLICY:
        useless.append('lengths')
    for name in useless:
        value = getattr(options, name)
        if value not in (None, False):
            option = '--' + name.replace('_', '-')
            raise ConfigError(option, 'must not be given here, it has no effect', str(value))
