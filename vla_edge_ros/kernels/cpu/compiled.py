"""
How the CPU kernels are compiled, and kept between runs.

Numba keeps machine code beside each source file and compiles again when that file changes, but
not when a function that was inlined from another file did: an update of one kernel would leave
its callers stale. Here the key of the kept code names the sources of all kernels.
"""

import contextlib
import hashlib
from pathlib import Path

from numba import njit
from numba.core.caching import FunctionCache

# Lets LLVM split sums over vector lanes and fuse multiply-adds; NaN and infinity stay honest.
_FAST_SUMS = {'reassoc', 'nsz', 'contract', 'arcp'}


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob('*.py')):
        digest.update(path.read_bytes())
    return digest.hexdigest()


_SOURCES = _digest_of_sources()


class _KernelCache(FunctionCache):
    """Numba's cache of one function, with the sources of all kernels in its key."""

    def _index_key(self, sig, codegen):
        return (*super()._index_key(sig, codegen), _SOURCES)


def compiled(function):
    """
    Compile a function without the interpreter lock, kept on disk where there is room for it.

    Division follows IEEE 754, since a check for zero would keep loops from vectorising.
    """
    dispatcher = njit(nogil=True, error_model='numpy', fastmath=_FAST_SUMS)(function)
    with contextlib.suppress(RuntimeError):  # no writable place: compiled anew by every process
        dispatcher._cache = _KernelCache(function)
    return dispatcher
