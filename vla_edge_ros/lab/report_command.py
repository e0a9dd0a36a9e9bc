"""``vla-edge report``: one page from a sweep, or from the traces of live runs and replays."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.sweep.names import CELLS, CONFIGURATION, FINDINGS, REPORT
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, FOLDERS_ARE_MADE, write_text


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``vla-edge report``."""
    parser.add_argument(
        'sources', type=Path, nargs='+', metavar='DIR|TRACE.csv',
        help='The folder of a finished sweep, or one or more traces')
    parser.add_argument(
        '--out', type=Path, metavar='FILE.html',
        help=f'Where the page goes, alone; {FOLDERS_ARE_MADE} (default: {REPORT} in the folder, '
        f'with {FINDINGS} beside it, or beside the first trace under its name)')


def run(args: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge report``."""
    first = args.sources[0]
    is_sweep = first.is_dir()
    if is_sweep and len(args.sources) > 1:
        rule = 'must be one folder of a sweep, or traces'
        raise ConfigError('report', rule, ' '.join(map(str, args.sources)))
    out = args.out or (first / REPORT if is_sweep else first.with_suffix('.report.html'))
    findings_out = first / FINDINGS if is_sweep and not args.out else None
    for path in filter(None, (out, findings_out)):
        check_file('--out', path)
    if is_sweep and not (first / CELLS).exists() and not (first / CONFIGURATION).exists():
        rule = f'must be the folder of a sweep, with a {CELLS}, or a trace'
        raise ConfigError('report', rule, str(first))
    with stop.interruptible():
        page, findings = _sweep_page(first) if is_sweep else (_trace_page(args.sources), None)
    write_text('--out', out, page, whole=True)
    if findings_out is not None:
        write_text('--out', findings_out, findings, whole=True)
    print(out)
    return 0


def _sweep_page(folder: Path) -> tuple[str, str]:
    # Matplotlib takes a while to load; what is wrong with the arguments is told before.
    from vla_edge_ros.lab.sweep.page import findings_text, report_page
    from vla_edge_ros.lab.sweep.results import read_results

    results = read_results(folder)
    return report_page(results), findings_text(results)


def _trace_page(paths: list[Path]) -> str:
    from vla_edge_ros.lab.trace_page import trace_page

    return trace_page(paths)
