"""What a measurement has to say about where it came from."""

from datetime import datetime, timezone
import os
from pathlib import Path
import platform
import subprocess
import sys

import numba
import numpy as np


def environment_record() -> dict:
    """Return command, commit, machine and versions, ready for JSON."""
    return {
        'command': [Path(sys.executable).name, *sys.orig_argv[1:]],
        'time_utc': datetime.now(timezone.utc).isoformat(timespec='seconds'),
        # A copy of the sources can be told what it is a copy of.
        'commit': os.environ.get('VLA_EDGE_COMMIT') or _git('rev-parse', 'HEAD'),
        'uncommitted_changes': bool(_git('status', '--porcelain', '--untracked-files=no')),
        'cpu': _cpu_model(),
        'cores': len(os.sched_getaffinity(0)),
        'memory_bytes': os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'),
        'load_average_1min': os.getloadavg()[0],
        'system': platform.platform(),
        'python': platform.python_version(),
        'numpy': np.__version__,
        'numba': numba.__version__,
    }


def statistics(milliseconds) -> dict[str, float]:
    """Return median, p99, p99.9 and maximum."""
    values = np.asarray(milliseconds)
    median, p99, p999 = np.percentile(values, (50, 99, 99.9))
    return {'median': float(median), 'p99': float(p99), 'p99.9': float(p999),
            'max': float(values.max())}  # fmt: skip


def _git(*arguments: str) -> str:
    """Return what git says about the source tree, or '' without git or outside a checkout."""
    command = ['git', '-C', str(Path(__file__).parent), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ''


def _cpu_model() -> str:
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.partition(':')[2].strip()
    return platform.machine()
