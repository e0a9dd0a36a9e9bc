"""``vla-edge sweep``: runs a grid of episodes to the end, however often it is interrupted."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import datetime, timezone
from functools import partial
import hashlib
from importlib import metadata
import json
import math
import os
from pathlib import Path
import platform
from typing import Any

import numpy as np
import yaml

import vla_edge_ros
from vla_edge_ros.clock import MonotonicClock, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.lab.sweep.blocks import (
    Finished,
    import_ray,
    make_blocks,
    run_here,
    run_on_ray,
    time_episodes,
)
from vla_edge_ros.lab.sweep.grid import read_sweep, Sweep
from vla_edge_ros.lab.sweep.names import (
    AGES,
    CELLS,
    CONFIGURATION,
    DAMAGED,
    EPISODES,
    RECORD,
    SESSIONS,
)
from vla_edge_ros.lab.sweep.record import differences, EpisodeRecord, read_rows
from vla_edge_ros.lab.sweep.tables import age_table, cell_table, episode_table
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_folder, FOLDERS_ARE_MADE, write_text
from vla_edge_ros.progress import duration, SlowProgress
from vla_edge_ros.sim.episode import WILSON_Z

FORMAT = 1
SAMPLES = 48
"""Episodes that ``--dry-run`` times."""
SOURCES = (
    'kernels', 'policy', 'runtime', 'sim', 'telemetry', 'clock.py', 'parameters.py',
    'schedule_options.py', 'lab/sweep/grid.py', 'lab/sweep/record.py', 'lab/sweep/tables.py')
"""Code of the package that can change a row or a table."""
SUFFIXES = ('.py', '.yaml')
LIBRARIES = ('mujoco', 'numba', 'numpy', 'opencv-python-headless', 'tokenizers')
MAX_WORKERS = 1024


def add_arguments(parser: ArgumentParser) -> None:
    """Declare the options of ``vla-edge sweep``."""
    parser.add_argument('file', type=Path, metavar='FILE.yaml', help='What to run')
    parser.add_argument(
        '--out', type=Path, metavar='DIR',
        help='Folder for record and tables; one that holds part of this sweep is gone on with; '
        f'{FOLDERS_ARE_MADE} (default: out/ and the name of the file)')
    parser.add_argument(
        '--workers', type=int, default=0, metavar='N',
        help='Processes, one thread each; 0 takes one a core; results do not depend on it')
    parser.add_argument(
        '--ray', metavar='ADDRESS', help='Run on this Ray cluster instead: auto, host:port or '
        'ray://host:port; its machines need this package and the files that the sweep names')
    parser.add_argument(
        '--dry-run', action='store_true',
        help='Only tell cells, episodes and the estimated time of what is left to do')


def run(args: Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge sweep``."""
    if not 0 <= args.workers <= MAX_WORKERS:
        raise ConfigError('--workers', f'must be in 0..{MAX_WORKERS}', args.workers)
    if args.ray and args.workers:
        rule = 'must not be given with --ray, which takes every CPU of the cluster'
        raise ConfigError('--workers', rule, args.workers)
    workers = args.workers or len(os.sched_getaffinity(0))
    ray = import_ray() if args.ray else None
    with stop.interruptible():
        sweep = read_sweep(args.file)
    folder = args.out or Path('out') / args.file.stem
    text = partial(print, flush=True)
    text(f'{len(sweep.cells):,} cells, {sweep.episodes:,} episodes')
    check_configuration(sweep, folder)
    if args.dry_run:
        if ray is not None:
            rule = 'must not be given with --ray: it times episodes on this machine'
            raise ConfigError('--dry-run', rule, args.dry_run)
        text(_estimate(sweep, folder, workers, stop))
        return 0
    check_folder('--out', folder, CONFIGURATION, RECORD, SESSIONS, EPISODES, CELLS, AGES)
    with closing(EpisodeRecord(folder / RECORD)) as record:
        # Again, now that nobody else can write it: another sweep may have begun meanwhile.
        check_configuration(sweep, folder)
        write_text('--out', folder / CONFIGURATION, configuration_text(sweep), whole=True)
        _tell_start(text, sweep, record)
        blocks = make_blocks(sweep, record.rows)
        setups = [cell.setup for cell in sweep.cells]
        if ray is None:
            finished = run_here(setups, blocks, workers, stop)
        else:
            finished = run_on_ray(ray, args.ray, setups, blocks, stop)
        seconds = _collect(finished, sweep, record, folder, args.ray or workers)
        for name, table in (
                (EPISODES, episode_table), (CELLS, cell_table), (AGES, age_table)):
            write_text('--out', folder / name, table(sweep, record.rows), whole=True)
    text(f'finished after {duration(seconds)}; vla-edge report {folder} shows what came out')
    return 0


def _tell_start(text: Callable[[str], None], sweep: Sweep, record: EpisodeRecord) -> None:
    if record.damaged:
        text(f'damaged lines moved from the record to {DAMAGED}: {record.damaged}; '
             'what they told of runs again')
    if record.rows:
        text(f'{len(record.rows):,} are done, {sweep.episodes - len(record.rows):,} left')


def _collect(
    finished: Finished, sweep: Sweep, record: EpisodeRecord, folder: Path, who: int | str,
) -> float:
    """Append what comes to the record; return how long it took, s."""
    clock = MonotonicClock()
    begin_ns, before = clock.now_ns(), len(record.rows)
    session = {'workers': who, 'environment': environment_record()}
    _note(folder, {'started': _now(), 'done': before, **session})
    with SlowProgress('episodes', sweep.episodes, before) as progress:
        for episode, row in finished:
            record.append(episode, row)
            progress.update(len(record.rows))
    record.sync()
    seconds = (clock.now_ns() - begin_ns) / NS_PER_S
    ran = len(record.rows) - before
    _note(folder, {'ended': _now(), 'ran': ran, 'seconds': round(seconds, 1)})
    return seconds


def _note(folder: Path, entry: dict[str, Any]) -> None:
    """Append a line about this session; what it says enters no table."""
    try:
        with open(folder / SESSIONS, 'a', encoding='utf-8') as file:
            file.write(json.dumps(entry) + '\n')
    except OSError as error:
        rule = f'must be writable ({error.strerror})'
        raise ConfigError('--out', rule, str(folder / SESSIONS)) from None


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec='seconds')


def configuration(sweep: Sweep) -> dict[str, Any]:
    """Return all that the rows depend on: the grid in full, contents of files, versions."""
    return {
        'format': FORMAT,
        'episodes': sweep.parameters.episodes,
        'seeds': sweep.parameters.seeds,
        'grids': sweep.grids,
        'cells': len(sweep.cells),
        'files': sweep.files,
        'versions': {
            'vla_edge_ros': metadata.version('vla_edge_ros'),
            'sources': sources_digest(),
            'python': platform.python_version(),
            'machine': platform.machine(),
            **{name: metadata.version(name) for name in LIBRARIES},
        },
    }


def configuration_text(sweep: Sweep) -> str:
    """Return ``sweep.yaml``."""
    return yaml.safe_dump(
        configuration(sweep), sort_keys=False, default_flow_style=None, width=99)


def sources_digest() -> str:
    """Return a digest of the code that rows come from; reports and hosts are not in it."""
    root = Path(vla_edge_ros.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for name in SOURCES for path in _sources(root / name)):
        digest.update(str(path.relative_to(root)).encode() + b'\0' + path.read_bytes())
    return digest.hexdigest()[:16]


def _sources(path: Path) -> Iterator[Path]:
    parts = path.rglob('*') if path.is_dir() else [path]
    return (part for part in parts if part.suffix in SUFFIXES)


def check_configuration(sweep: Sweep, folder: Path) -> None:
    """
    Refuse a folder that holds another sweep than this.

    Raises
    ------
    ConfigError
        It does; the differences are listed, or it cannot be read.

    """
    path = folder / CONFIGURATION
    if not path.exists():
        # One that a sweep was killed before is empty: the lock is taken on it first.
        if (folder / RECORD).exists() and (folder / RECORD).stat().st_size:
            rule = f'must have a {CONFIGURATION} beside its {RECORD}'
            raise ConfigError('--out', rule, str(folder))
        return
    try:
        before = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        rule = f'must hold a readable {CONFIGURATION} ({" ".join(str(error).split())[:200]})'
        raise ConfigError('--out', rule, str(folder)) from None
    lines = differences(before, configuration(sweep))
    if lines:
        shown = [*lines[:20], *([f'and {len(lines) - 20} more'] if len(lines) > 20 else [])]
        rule = 'must be empty or hold part of the same sweep; choose another folder'
        raise ConfigError('--out', rule, str(folder), '\n'.join(shown))


def _estimate(sweep: Sweep, folder: Path, workers: int, stop: StopRequest) -> str:
    done = read_rows(folder / RECORD)[0] if (folder / RECORD).exists() else {}
    blocks = make_blocks(sweep, done)
    if not blocks:
        return 'nothing is left to do'
    setups = [cell.setup for cell in sweep.cells]
    times_s = time_episodes(setups, blocks, SAMPLES, workers, stop)
    left = sweep.episodes - len(done)
    mean_s = float(np.mean(times_s))
    # Cells differ tenfold in cost: a sample tells the mean no better than this.
    spread_s = WILSON_Z * float(np.std(times_s)) / math.sqrt(len(times_s))
    low, middle, high = (
        duration(left * max(seconds, 0.0) / workers)
        for seconds in (mean_s - spread_s, mean_s, mean_s + spread_s))
    return (
        f'{left:,} left to do: an estimated {middle} ({low} to {high}) with {workers} '
        f'processes here, from {len(times_s)} episodes timed now, {1000 * mean_s:.0f} ms each')
