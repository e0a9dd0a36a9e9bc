"""``vla-edge plan``: whether a deadline holds on a device, before there is one to try it on."""

from argparse import ArgumentParser, Namespace
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.plan import alternatives, make_plan, P50, P99, Plan
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, FOLDERS_ARE_MADE, write_text
from vla_edge_ros.policy.shapes import RANDOM
from vla_edge_ros.runtime.admission import AdmissionParameters
from vla_edge_ros.runtime.devices import catalogue, find_device
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters

MAX_SLOTS, MAX_TOKENS = 1_000_000, 1000


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``vla-edge plan``."""
    known = catalogue()
    parser.add_argument('--device', required=True, choices=tuple(known.devices),
                        help='what it is to run on')
    parser.add_argument('--model', default='', metavar='DIR|random:1.5b',
                        help='checkpoint folder, or a shape; the embedded policy by default')
    parser.add_argument('--weights', choices=tuple(known.weights), default='bf16',
                        help='how they are held (default: %(default)s)')
    parser.add_argument('--slots', type=int, metavar='N',
                        help='cached slots behind which a run is planned; a full cache by default')
    parser.add_argument('--tokens', type=int, metavar='N',
                        help="decoded tokens of a chunk; the policy's by default")
    parser.add_argument('--deadline-ms', type=float, default=33.0,
                        help='from tick to action (default: %(default)s)')
    parser.add_argument('--rate-hz', type=float, default=30.0,
                        help='ticks a second (default: %(default)s)')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help=f'write the plan to a file; {FOLDERS_ARE_MADE}')


def run(options: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge plan``; whether it holds is an answer, so that both end with 0."""
    for name, value, low, high in (
        ('--slots', options.slots, 0, MAX_SLOTS), ('--tokens', options.tokens, 1, MAX_TOKENS),
    ):
        if value is not None and not low <= value <= high:
            raise ConfigError(name, f'must be in {low}..{high}', value)
    if options.json is not None:
        check_file('--json', options.json)
    try:
        loop = ControlLoopParameters(rate_hz=options.rate_hz, deadline_ms=options.deadline_ms)
        with stop.interruptible():
            plan = make_plan(
                options.model, find_device(options.device), options.weights, loop,
                AdmissionParameters().margin_ms, options.slots, options.tokens)
            record = describe(plan, options.model or 'embedded policy')
    except ConfigError as error:
        if error.field not in ('rate_hz', 'deadline_ms', 'model'):
            raise
        raise ConfigError('--' + error.field.replace('_', '-'), error.rule, error.value) from None
    if options.json is not None:
        text = json.dumps({'environment': environment_record(), **record}, indent=2)
        write_text('--json', options.json, text + '\n')
    show(record, Console())
    return 0


def describe(plan: Plan, model: str) -> dict[str, Any]:
    """Return all that is said of a plan, ready for JSON."""
    return {
        'model': model,
        'device': plan.device.name,
        'device_title': plan.device.title,
        'weights': plan.weights_name,
        'weights_have_kernels': plan.weights.kernels,
        'prediction': plan.prediction,
        'slots': plan.length,
        'tokens': plan.tokens,
        'chosen_from': plan.head_rows,
        'rate_hz': plan.loop.rate_hz,
        'deadline_ms': plan.loop.deadline_ms,
        'margin_ms': plan.margin_ms,
        'stages_ms': {
            stage.value: {**{name: 1e3 * value for name, value in cost._asdict().items()},
                          'total': 1e3 * cost.seconds, 'bound': cost.bound}
            for stage, cost in plan.stages.items()},
        'run_ms': {'p50': plan.run_ms(P50), 'p99': plan.run_ms(P99)},
        'holds': plan.holds,
        'fits': plan.needed_gb <= plan.device.memory_gb,
        'slack_ms': plan.slack_ms,
        'bound': plan.total.bound,
        'memory_gb': {'needed': plan.needed_gb, 'device': plan.device.memory_gb,
                      'shared_with_the_processor': plan.device.shared_memory},
        'alternatives': alternatives(plan),
        'assumptions': {'basis': dict(plan.device.basis), 'source': plan.device.source,
                        'engine': catalogue().texts},
    }  # fmt: skip


def show(record: dict[str, Any], console: Console) -> None:
    """Print a plan."""
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    what = 'PREDICTION: ' + record['prediction'] if record['prediction'] else (
        'This device was measured; the figures are those of the model fitted to it')
    say(what)
    say(f'{record["model"]} on {record["device_title"]}, weights {record["weights"]}: a chunk of '
        f'{record["tokens"]} tokens, each of {record["chosen_from"]:,}, behind '
        f'{record["slots"]:,} cached slots')  # fmt: skip
    table = Table('stage', *(f'{name}, ms' for name in ('memory', 'compute', 'latency', 'total')),
                  'bound by')  # fmt: skip
    for stage, cost in record['stages_ms'].items():
        values = [f'{cost[name]:.2f}' for name in ('memory', 'compute', 'latency', 'total')]
        table.add_row(stage, *values, cost['bound'])
    console.print(table)
    run_ms, slack_ms = record['run_ms'], record['slack_ms']
    say(f'A run takes p50 {run_ms["p50"]:.1f}, p99 {run_ms["p99"]:.1f} ms, most of it for '
        f'{record["bound"]}.')  # fmt: skip
    verdict = 'HOLDS' if record['holds'] else 'DOES NOT HOLD'
    say(f'{verdict}: {record["deadline_ms"]:g} ms with {record["margin_ms"]:g} ms of margin; '
        f'slack p50 {slack_ms["p50"]:+.1f}, p99 {slack_ms["p99"]:+.1f} ms.')
    memory = record['memory_gb']
    fits = 'fits' if record['fits'] else 'DOES NOT FIT'
    shared = ', which processor and cameras share' if memory['shared_with_the_processor'] else ''
    say(f'Memory: {memory["needed"]:.2f} of {memory["device"]:g} GB{shared}: {fits}.')
    if not (record['holds'] and record['fits']):
        say('What would do, each by itself:')
        for line in _changes(record):
            say(f'  {line}')
    say(f'Schedules at {record["rate_hz"]:g} Hz, for a run of the p99:')
    for line in _schedule_lines(record):
        say(f'  {line}')


def _changes(record: dict[str, Any]) -> list[str]:
    other = record['alternatives']
    weights, kernels = other['weights'], other['weights_have_kernels']
    missing = '' if kernels or weights is None else ', for which there are no kernels here'
    slots, tried = other['slots'], other['p99_ms']

    def none_of(shapes: bool) -> str:
        runs = [f'{name} {ms:.1f} ms' for name, ms in tried.items()
                if name.startswith(RANDOM) is shapes]  # fmt: skip
        return f'none suffices (p99: {", ".join(runs)})' if runs else 'there is none'

    lines = [
        f'lighter weights: {none_of(False) if weights is None else weights + missing}',
        f'smaller model: {other["model"] or none_of(True)}']
    if weights is None and other['model'] is None:
        both = other['model_and_weights']
        lines.append('both: ' + (' with '.join(both) if both else 'none suffices'))
    actions = other['actions']
    lines += [
        f'chunk: a policy with {actions} of its actions' if actions else
        'chunk: a single action takes too long',
        'cache: fewer slots do not suffice' if slots is None else f'cache: {slots:,} slots']
    rate = other['rate_hz']
    lines.append('rate: none' if rate is None else
                 f'rate: {rate:g} Hz with deadline_ms {other["deadline_ms"]:g}')
    return lines


def _schedule_lines(record: dict[str, Any]) -> list[str]:
    found = record['alternatives']['schedules']
    lines = [f'deadline: {"every tick" if record["holds"] else "refuses nearly every run"}']
    for name in ('overlap', 'latest'):
        entry = found[name]
        if entry['covers']:
            with_what = (f' with overlap_percent {entry["overlap_percent"]}'
                         if name == 'overlap' else '')
            text = f'an action at every tick{with_what}'
        elif entry['steps'] is None:
            text = 'not always an action when it is due, nor with longer chunks: they take longer'
        else:
            text = f'not always an action when it is due; with chunks of {entry["steps"]} there is'
        lines.append(f'{name}: {text}')
    lines.append(f'sync: moves {100 * found["sync"]["moving"]:.0f} % of the time')
    return lines
