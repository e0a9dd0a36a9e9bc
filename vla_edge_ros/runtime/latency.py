"""What the engine costs in virtual time, stage by stage."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.trace import HEADER_LINES, read_trace

MAX_STAGE_MS = 3.6e6
"""An hour: more is no cost of a stage but another unit."""


class LatencyModel(Protocol):
    """A source of stage costs for :class:`~vla_edge_ros.runtime.runner.VirtualRunner`."""

    def draw(self) -> Mapping[Stage, int]:
        """Return the cost of every modelled stage of the next run, ns."""
        ...


def _check_ns(stage: Stage, values: np.ndarray) -> None:
    if values.size == 0 or values.min() < 0:
        raise ConfigError(f'latency of {stage.value}', 'must be one or more times >= 0 ns', values)


class FixedLatency:
    """
    Every run costs the same.

    Parameters
    ----------
    stage_ns : mapping of Stage to int
        Cost of each stage, ns; a stage left out costs nothing.

    """

    def __init__(self, stage_ns: Mapping[Stage, int]):
        self._stage_ns = {Stage(stage): int(ns) for stage, ns in stage_ns.items()}
        for stage, ns in self._stage_ns.items():
            _check_ns(stage, np.array([ns]))

    def draw(self) -> Mapping[Stage, int]:
        """Return the fixed costs."""
        return self._stage_ns


class RecordedLatency:
    """
    Runs drawn with replacement from a recording.

    A run is drawn whole, so that stages that were slow together stay slow together.

    Parameters
    ----------
    samples : mapping of Stage to int [runs]
        Measured cost of each stage, ns; row ``i`` of every stage is the same run.
    seed : int
        Equal seeds give equal sequences.

    """

    def __init__(self, samples: Mapping[Stage, np.ndarray], seed: int = 0):
        self._samples = {
            Stage(stage): np.asarray(values, np.int64) for stage, values in samples.items()
        }
        for stage, values in self._samples.items():
            _check_ns(stage, values)
        lengths = {values.shape for values in self._samples.values()}
        if len(lengths) != 1 or len(next(iter(lengths))) != 1:
            raise ConfigError('samples', 'must be equally long rows, one a stage', lengths)
        self._runs = next(iter(lengths))[0]
        self._rng = np.random.default_rng(seed)

    def draw(self) -> Mapping[Stage, int]:
        """Return the costs of one recorded run."""
        run = self._rng.integers(self._runs)
        return {stage: int(values[run]) for stage, values in self._samples.items()}


def read_stage_costs(path: str | Path, field: str = 'trace') -> dict[Stage, np.ndarray]:
    """
    Return what the stages of every full run in a trace cost, ns, for :class:`RecordedLatency`.

    Parameters
    ----------
    path : str or Path
        A trace of a live run.
    field : str
        What an error calls it.

    Raises
    ------
    ConfigError
        The file is no trace, holds no run with a chunk, or an impossible time; the line, the
        column and the value are named.

    """
    trace = read_trace(path, field)
    columns_ms = {stage: trace[f'{stage.value}_ms'] for stage in Stage}
    for stage, column in columns_ms.items():
        wrong = np.flatnonzero(~(np.isnan(column) | (column >= 0) & (column <= MAX_STAGE_MS)))
        if wrong.size:
            line = wrong[0] + HEADER_LINES + 1
            where = f'line {line}, column {stage.value}_ms of {path}'
            rule = f'must hold times in 0..{MAX_STAGE_MS:.0f} ms ({where})'
            raise ConfigError(field, rule, float(column[wrong[0]]))
    full = ~np.isnan(columns_ms[Stage.DECODE])
    if not full.any():
        raise ConfigError(field, 'must hold a run that decoded a chunk', str(path))
    # A stage that was not measured apart is part of another one.
    return {
        stage: np.rint(np.nan_to_num(column[full]) * NS_PER_MS).astype(np.int64)
        for stage, column in columns_ms.items()
    }
