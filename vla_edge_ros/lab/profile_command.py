"""``vla-edge profile``: each stage's time, bytes and FLOP, and which roof bounds it."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.kernels import choose_backend
from vla_edge_ros.lab.profile import LATENCY, measure_cpu, measure_cuda, report
from vla_edge_ros.lab.quiet import quiet_interpreter
from vla_edge_ros.lab.random_policy import load_policy
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, FOLDERS_ARE_MADE, write_bytes, write_text
from vla_edge_ros.policy.shapes import load_shape
from vla_edge_ros.progress import terminal_progress

MAX_RUNS = 10_000
PICTURES = ('.svg', '.png')


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``vla-edge profile``."""
    parser.add_argument('--model', default='', metavar='DIR|random:0.5b',
                        help='checkpoint folder, or a shape with random weights; the embedded '
                        'policy by default')
    parser.add_argument('--backend', choices=('auto', 'cpu', 'cuda'), default='auto',
                        help='kernels; auto takes cuda where there is a GPU (default: auto)')
    parser.add_argument('--slots', type=int, default=0, metavar='N',
                        help="cached slots for frames; the policy's by default, of a shape 4096")
    parser.add_argument('--runs', type=int, default=100,
                        help='runs to time behind a full cache (default: %(default)s)')
    parser.add_argument('--repeats', type=int, default=20,
                        help='runs of every part to time (default: %(default)s)')
    parser.add_argument('--json', type=Path, metavar='FILE',
                        help=f'write the record to a file; {FOLDERS_ARE_MADE}')
    parser.add_argument('--plot', type=Path, metavar='FILE',
                        help=f'draw the roofline to an .svg or .png; {FOLDERS_ARE_MADE}')


def run(options: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge profile``."""
    for name in ('runs', 'repeats'):
        if not 1 <= getattr(options, name) <= MAX_RUNS:
            raise ConfigError(f'--{name}', f'must be in 1..{MAX_RUNS}', getattr(options, name))
    if options.slots < 0:
        raise ConfigError('--slots', 'must be >= 0', options.slots)
    if options.plot is not None and options.plot.suffix not in PICTURES:
        raise ConfigError('--plot', f'must end with {" or ".join(PICTURES)}', str(options.plot))
    for name in ('json', 'plot'):
        if getattr(options, name) is not None:
            check_file(f'--{name}', getattr(options, name))
    with stop.interruptible():
        record = profile(
            options.model, options.backend, options.slots, options.runs, options.repeats)
    if options.json is not None:
        text = json.dumps({'environment': environment_record(), **record}, indent=2)
        write_text('--json', options.json, text + '\n')
    if options.plot is not None:
        from vla_edge_ros.lab.roofline_plot import draw_roofline

        picture = io.BytesIO()
        draw_roofline(record, picture, options.plot.suffix[1:])
        write_bytes('--plot', options.plot, picture.getvalue())
    show(record, Console())
    return 0


def profile(model: str, backend: str, slots: int, runs: int, repeats: int) -> dict[str, Any]:
    """
    Load a policy and return its profile, ready for JSON.

    Raises
    ------
    ConfigError
        The model, its slots or the backend cannot be had.

    """
    config = load_shape(model, '--model')
    name, reason = choose_backend(backend, config.transformer)
    policy = load_policy(model, name, slots, terminal_progress())
    measure = measure_cuda if name == 'cuda' else measure_cpu
    with quiet_interpreter():
        rows, roofs = measure(policy, runs, repeats)
    return {
        'model': model or 'embedded policy',
        'backend': f'{name} ({reason})',
        'weights_dtype': 'float16' if name == 'cuda' else policy.transformer.weights_dtype,
        'slots': policy.cache.layout.kv_slots,
        'decode_tokens': policy.config.decode_tokens,
        'threads': None if name == 'cuda' else 1,
        'runs': runs,
        'repeats': repeats,
        **report(rows, roofs),
    }


def show(record: Mapping[str, Any], console: Console) -> None:
    """Print a profile."""
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    roofs = record['roofs']
    flop = 'unavailable' if roofs['flop_per_s'] is None else (
        f'{roofs["flop_per_s"] / 1e9:,.0f} GFLOP/s')
    say(f'{record["model"]} on {record["backend"]}, {record["weights_dtype"]}, '
        f'{record["slots"]:,} slots for frames, median of {record["runs"]} runs')
    say(f'Roofs: {roofs["bytes_per_s"] / 1e9:,.1f} GB/s, {flop} ({roofs["about"]})')
    table = Table('stage', 'ms', 'of run', 'MB', 'MFLOP', 'memory', 'compute', 'bound by')
    for row in record['rows']:
        counted = row['bytes'] is not None
        table.add_row(
            f'  {row["part"]}' if row['part'] else row['stage'], _short(row['ms']),
            f'{100 * row["share"]:.1f} %', _short(row['bytes'] / 1e6) if counted else '-',
            _short(row['flop'] / 1e6) if counted else '-', _percent(row['memory_share']),
            _percent(row['compute_share']), row['bound'] or '-',
            style='' if row['part'] else 'bold')
    console.print(table)
    say(f'A run takes {record["run_ms"]:.2f} ms. memory, compute: which part of the roof is '
        f'reached; {LATENCY}: neither to half. rest: what the parts, timed one by one, do not '
        'explain, such as the order of rank.')


def _short(number: float) -> str:
    digits = 0 if abs(number) >= 100 else 1 if abs(number) >= 10 else 3
    return f'{number:,.{digits}f}'


def _percent(share: float | None) -> str:
    return '-' if share is None else f'{100 * share:.0f} %'
