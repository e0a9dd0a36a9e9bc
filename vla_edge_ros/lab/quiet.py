"""The interpreter as ``reasoning_node`` sets it while it is active."""

from collections.abc import Iterator
from contextlib import contextmanager
import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""A thread that waits for the interpreter lock asks for it after this, not after 5 ms."""


@contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Leave garbage alone and hand the interpreter lock over early; undone at the end."""
    before_s, collects = sys.getswitchinterval(), gc.isenabled()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
        gc.unfreeze()
        sys.setswitchinterval(before_s)
