"""
Power of a device as a model: what virtual time, in which nothing draws power, is charged with.

``power.yaml`` beside this file holds the models and says of every figure where it comes from.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
import math
from pathlib import Path
from typing import Any

import yaml

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.telemetry.energy import IDLE
from vla_edge_ros.telemetry.work import DECODE, PARTS, PREFILL, Work

MODELS = Path(__file__).with_name('power.yaml')
BASES = ('measured', 'stated', 'assumed')
_POWERS = ('idle_w', 'prefill_w', 'decode_w')


@dataclass(frozen=True, slots=True)
class PowerModel:
    """
    What a device draws.

    Parameters
    ----------
    device : str
        Its name.
    idle_w, prefill_w, decode_w : float
        Power while nothing runs, while a frame is taken in, and while a chunk is decoded, W.
    basis : dict of str to str
        For each of the three: ``measured``, ``stated`` by the maker, or ``assumed``.
    source : str
        Where the figures come from.

    Raises
    ------
    ConfigError
        A figure is negative or no number, or one lacks its basis, or the source is missing.

    """

    device: str
    idle_w: float
    prefill_w: float
    decode_w: float
    basis: dict[str, str]
    source: str

    def __post_init__(self):
        """Check every figure and that each says where it comes from."""
        for name in _POWERS:
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ConfigError(f'{self.device} {name}', 'must be a finite number >= 0 W', value)
        if not isinstance(self.basis, dict) or set(self.basis) != set(_POWERS) or not (
                set(self.basis.values()) <= set(BASES)):
            rule = f'must say for each of {", ".join(_POWERS)} one of {", ".join(BASES)}'
            raise ConfigError(f'{self.device} basis', rule, str(self.basis))
        if not isinstance(self.source, str) or not self.source.strip():
            raise ConfigError(f'{self.device} source', 'must not be blank', self.source)

    def joules(self, work: Iterable[Work], start_ns: int, end_ns: int) -> dict[str, float]:
        """
        Return the energy of a run by part, J; all of ``PARTS`` are there.

        Parameters
        ----------
        work : iterable of Work
            As of ``work_done``; what lies outside the run is cut off.
        start_ns, end_ns : int
            The run.

        """
        powers_w = {PREFILL: self.prefill_w, DECODE: self.decode_w, IDLE: self.idle_w}
        found = dict.fromkeys(PARTS, 0.0)
        left_s = (end_ns - start_ns) * 1e-9
        for part, stage, begins_ns, ends_ns in work:
            seconds = max(min(ends_ns, end_ns) - max(begins_ns, start_ns), 0) * 1e-9
            found[part] += powers_w[stage] * seconds
            left_s -= seconds
        found[IDLE] += self.idle_w * max(left_s, 0.0)
        return found

    def about(self) -> dict[str, Any]:
        """Return what a record says of the model."""
        return {'model': self.device, **{name: getattr(self, name) for name in _POWERS},
                'basis': self.basis, 'source': self.source}  # fmt: skip


def _models(path: Path) -> dict[str, PowerModel]:
    raw = yaml.safe_load(path.read_text(encoding='utf-8'))
    return {name: PowerModel(device=name, **values) for name, values in raw.items()}


def device_names() -> tuple[str, ...]:
    """Return the devices there is a model of."""
    return tuple(_own_models())


@cache
def _own_models() -> Mapping[str, PowerModel]:
    """Return what the package's own data file says."""
    return _models(MODELS)


def power_model(device: str) -> PowerModel:
    """
    Return the model of a device.

    Raises
    ------
    ConfigError
        There is none.

    """
    models = _own_models()
    if device not in models:
        raise ConfigError('power_model', f'must be one of {", ".join(models)}', device)
    return models[device]
