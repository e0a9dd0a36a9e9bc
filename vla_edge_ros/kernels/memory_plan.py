"""The list of every buffer a model needs, known before the first is allocated."""

from collections.abc import Collection, Iterable
import math
from typing import NamedTuple

import numpy as np
import psutil

from vla_edge_ros.errors import ConfigError

MAIN, PINNED, GPU = 'main', 'pinned', 'GPU'
"""Where a buffer lies; pinned is main memory that the GPU reads and writes by itself."""
LYING_IN = {MAIN: (MAIN, PINNED), GPU: (GPU,)}
"""What takes of the memory a machine has."""
BUDGETS = {'memory_budget_mb': (MAIN, PINNED), 'vram_budget_mb': (GPU, PINNED)}
"""What each budget counts. Pinned memory is in both: on a Jetson all is one memory."""
NOT_COUNTED = 'not counted: what the driver takes for its context, kernels and recorded graphs'


class Buffer(NamedTuple):
    """One allocation."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # a NumPy name; bfloat16 is kept as uint16
    place: str = MAIN

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def select(plan: Iterable[Buffer], places: Collection[str]) -> list[Buffer]:
    """Return the buffers that lie in one of some places."""
    return [buffer for buffer in plan if buffer.place in places]


def total_bytes(plan: Iterable[Buffer]) -> int:
    """Return the bytes of all buffers together."""
    return sum(buffer.bytes for buffer in plan)


def check_budgets(plan: Collection[Buffer], **budgets_mb: float) -> None:
    """
    Refuse a plan over one of ``BUDGETS``, which are MB, and 0 for no limit.

    Raises
    ------
    ConfigError
        Names the budget and what is needed; below it the table of what it counts.

    """
    for name, budget_mb in budgets_mb.items():
        counted = select(plan, BUDGETS[name])
        needed_mb = total_bytes(counted) / 1e6
        if budget_mb and needed_mb > budget_mb:
            rule = f'must be >= the {needed_mb:.1f} MB of this policy'
            raise ConfigError(name, rule, budget_mb, format_plan(counted))


def allocate(plan: Iterable[Buffer]) -> dict[str, np.ndarray]:
    """Allocate every buffer, zeroed, by name."""
    return {buffer.name: np.zeros(buffer.shape, buffer.dtype) for buffer in plan}


def format_plan(plan: Collection[Buffer]) -> str:
    """Return the plan as a text table: name, shape, dtype, place, MB; and the sums."""
    places = list(dict.fromkeys(buffer.place for buffer in plan))
    rows = [('buffer', 'shape', 'dtype', 'place', 'MB')]
    rows += [
        (b.name, 'x'.join(map(str, b.shape)), b.dtype, b.place, _megabytes(b.bytes)) for b in plan]
    rows += [
        ('total', '', '', place, _megabytes(total_bytes(select(plan, [place]))))
        for place in places]
    if len(places) > 1:
        rows.append(('total', '', '', '', _megabytes(total_bytes(plan))))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        '  '.join([*(f'{cell:<{width}}' for cell, width in zip(row, widths[:-1])),
                   f'{row[-1]:>{widths[-1]}}'])  # fmt: skip
        for row in rows]
    return '\n'.join([*lines, NOT_COUNTED] if GPU in places else lines)


def _megabytes(num_bytes: int) -> str:
    return f'{num_bytes / 1e6:,.3f}'


def memory_mb() -> dict[str, float]:
    """Return what there is of each memory, MB."""
    return {MAIN: psutil.virtual_memory().total / 1e6}
