"""The list of every buffer a model needs, known before the first is allocated."""

from collections.abc import Iterable
import math
from typing import NamedTuple

import numpy as np
import psutil


class Buffer(NamedTuple):
    """One allocation."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a NumPy name; bfloat16 is kept as uint16

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def total_bytes(plan: Iterable[Buffer]) -> int:
    """Return the bytes of all buffers together."""
    return sum(buffer.bytes for buffer in plan)


def allocate(plan: Iterable[Buffer]) -> dict[str, np.ndarray]:
    """Allocate every buffer, zeroed, by name."""
    return {buffer.name: np.zeros(buffer.shape, buffer.dtype) for buffer in plan}


def format_plan(plan: Iterable[Buffer]) -> str:
    """Return the plan as a text table: name, shape, dtype, bytes, and the sum."""
    rows = [(b.name, 'x'.join(map(str, b.shape)), b.dtype, f'{b.bytes:,}') for b in plan]
    rows.append(('total', '', '', f'{total_bytes(plan):,}'))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return '\n'.join(
        f'{a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}'
        for a, b, c, d in rows
    )


def memory_mb() -> float:
    """Return the memory of this machine in MB."""
    return psutil.virtual_memory().total / 1e6
