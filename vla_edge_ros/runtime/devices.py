"""The devices a cost can be computed for, and the engine's figures: ``devices.yaml``, checked."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
import math
from pathlib import Path
from typing import Any

import yaml

from vla_edge_ros.errors import ConfigError, one_line

DATA = Path(__file__).with_name('devices.yaml')
BASES = ('measured', 'stated', 'derived', 'assumed')
WITH_BASIS = ('bandwidth_gb_s', 'tflop_s', 'clock_mhz', 'memory_gb', 'jitter')


@dataclass(frozen=True, slots=True)
class Jitter:
    """
    How the cost of a run varies about its median.

    Parameters
    ----------
    sigma : float
        Of the logarithm of the factor.
    spike_probability, spike_factor : float
        How often a run takes how much longer besides.

    """

    sigma: float
    spike_probability: float
    spike_factor: float

    def __post_init__(self):
        """Check every value."""
        _check_number('jitter.sigma', self.sigma, 0, 1)
        _check_number('jitter.spike_probability', self.spike_probability, 0, 1)
        _check_number('jitter.spike_factor', self.spike_factor, 1, 1000)

    def quantile(self, part: float) -> float:
        """Return below which factor a part of all runs stays, 0 < part < 1."""
        low, high = -20.0, 20.0
        for _ in range(100):
            middle = (low + high) / 2
            below = (1 - self.spike_probability) * self._below(middle)
            below += self.spike_probability * self._below(middle - math.log(self.spike_factor))
            low, high = (middle, high) if below < part else (low, middle)
        return math.exp(high)

    def _below(self, logarithm: float) -> float:
        if self.sigma == 0:
            return float(logarithm >= 0)
        return 0.5 * (1 + math.erf(logarithm / (self.sigma * math.sqrt(2))))


@dataclass(frozen=True, slots=True)
class Device:
    """
    One device.

    Parameters
    ----------
    name, title : str
        What an option calls it, and what its maker does.
    measured : bool
        Whether the engine was measured on it; otherwise every figure is a prediction.
    bandwidth_gb_s, tflop_s, clock_mhz, memory_gb : float
        Memory bandwidth, dense float16 products on the tensor cores, highest clock of the GPU, and
        memory.
    one_kernel_decode : bool
        Whether it decodes in one kernel, as from compute capability 9.0.
    shared_memory : bool
        Whether processor and GPU share the memory.
    jitter : Jitter
    basis : dict of str to str
        For each figure one of ``BASES``.
    source : str
        Where they come from.

    """

    name: str
    title: str
    measured: bool
    bandwidth_gb_s: float
    tflop_s: float
    clock_mhz: float
    one_kernel_decode: bool
    memory_gb: float
    shared_memory: bool
    jitter: Jitter
    basis: dict[str, str]
    source: str

    def __post_init__(self):
        """Check every value."""
        for name in ('bandwidth_gb_s', 'tflop_s', 'clock_mhz', 'memory_gb'):
            _check_number(f'{self.name}.{name}', getattr(self, name), 1e-3, 1e9)
        for name in ('measured', 'one_kernel_decode', 'shared_memory'):
            if type(getattr(self, name)) is not bool:
                rule = 'must be true or false'
                raise ConfigError(f'{self.name}.{name}', rule, getattr(self, name))
        if (not isinstance(self.basis, Mapping) or set(self.basis) != set(WITH_BASIS)
                or not set(self.basis.values()) <= set(BASES)):
            rule = f'must say for each of {", ".join(WITH_BASIS)} one of {", ".join(BASES)}'
            raise ConfigError(f'{self.name}.basis', rule, self.basis)
        for name in ('title', 'source'):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f'{self.name}.{name}', 'must not be blank', value)


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """
    Properties of the engine, fitted to the reference device.

    Parameters
    ----------
    read_efficiency, key_value_efficiency, compute_efficiency : float
        Part of the bandwidth that weights are read with, part of that for keys and values, and
        part of the tensor cores' rate.
    exchange_us, launch_us : float
        A wait within the decode kernel and a kernel behind another, at ``clock_mhz``, us.
    call_us : float
        A call into the engine, us.
    clock_mhz : float
        Of the reference device.

    """

    read_efficiency: float
    key_value_efficiency: float
    compute_efficiency: float
    exchange_us: float
    launch_us: float
    call_us: float
    clock_mhz: float

    def __post_init__(self):
        """Check every value."""
        for name in ('read_efficiency', 'key_value_efficiency', 'compute_efficiency'):
            _check_number(f'engine.{name}', getattr(self, name), 1e-6, 1)
        for name in ('exchange_us', 'launch_us', 'call_us'):
            _check_number(f'engine.{name}', getattr(self, name), 0, 1e6)


@dataclass(frozen=True, slots=True)
class Weights:
    """How weights are held: bytes of each, and whether this package has kernels for it."""

    bytes: float
    kernels: bool
    text: str

    def __post_init__(self):
        """Check every value."""
        _check_number('weights.bytes', self.bytes, 1e-3, 16)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All that ``devices.yaml`` says; ``texts`` tells where each figure of the engine is from."""

    engine: EngineFigures
    weights: dict[str, Weights]
    devices: dict[str, Device]
    texts: dict[str, str]


def read_catalogue(path: Path = DATA) -> Catalogue:
    """
    Read the data file.

    Raises
    ------
    ConfigError
        It cannot be read, or a key is missing, unknown, or breaks its rule.

    """
    try:
        raw = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (OSError, UnicodeError, yaml.YAMLError) as error:
        rule = f'must be a readable YAML file ({one_line(error)})'
        raise ConfigError('devices', rule, str(path)) from None
    sections = _mapping('devices file', raw, ('engine', 'weights', 'devices'))
    devices = {}
    for name, values in _mapping('devices', sections['devices']).items():
        values = _mapping(name, values, [f.name for f in fields(Device)][1:])
        jitter = _mapping(f'{name}.jitter', values['jitter'], [f.name for f in fields(Jitter)])
        devices[name] = Device(name, **{**values, 'jitter': Jitter(**jitter)})
    weights = {
        name: Weights(**_mapping(f'weights.{name}', values, ('bytes', 'kernels', 'text')))
        for name, values in _mapping('weights', sections['weights']).items()}
    names = [field.name for field in fields(EngineFigures)][:-1]
    engine = _mapping('engine', sections['engine'], ('reference', *names))
    reference = engine.pop('reference')
    if reference not in devices:
        raise ConfigError('engine.reference', f'must be one of {", ".join(devices)}', reference)
    figures, texts = {}, {}
    for name, entry in engine.items():
        entry = _mapping(f'engine.{name}', entry, ('value', 'text'))
        figures[name], texts[name] = entry['value'], str(entry['text'])
    clock_mhz = devices[reference].clock_mhz
    return Catalogue(EngineFigures(**figures, clock_mhz=clock_mhz), weights, devices, texts)


@lru_cache(maxsize=1)
def catalogue() -> Catalogue:
    """Return what the package's own data file says."""
    return read_catalogue()


def find_device(name: str) -> Device:
    """
    Return a device by its name.

    Raises
    ------
    ConfigError
        There is none.

    """
    return _find('device', catalogue().devices, name)


def find_weights(name: str, field: str = 'weights') -> Weights:
    """
    Return how weights are held, by its name.

    Raises
    ------
    ConfigError
        There is none.

    """
    return _find(field, catalogue().weights, name)


def _find(field: str, known: Mapping[str, Any], name: str) -> Any:
    if name not in known:
        raise ConfigError(field, f'must be one of {", ".join(known)}', name)
    return known[name]


def _mapping(field: str, value: Any, keys=None) -> dict:
    if not isinstance(value, dict) or not value:
        raise ConfigError(field, 'must be a mapping', value)
    for key in value if keys is not None else ():
        if key not in keys:
            raise ConfigError(f'{field}.{key}', 'is not a known key', value[key])
    for key in keys or ():
        if key not in value:
            raise ConfigError(f'{field}.{key}', 'must be given', None)
    return dict(value)


def _check_number(field: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:
        raise ConfigError(field, f'must be a number in {low:g}..{high:g}', value)
