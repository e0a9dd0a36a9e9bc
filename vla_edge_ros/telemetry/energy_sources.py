"""
Where this machine tells the energy it uses: NVIDIA's counter, hwmon sensors, RAPL.

All are looked for at run time and none is needed. The sources overlap (a Jetson's input rail feeds
its GPU, a platform counter the processor), so they are never added up. What cannot be read is an
``Unavailable`` with the reason; no source ever gives 0 J for what it could not read.
"""

from collections.abc import Callable
import ctypes
from dataclasses import dataclass
from pathlib import Path
import re
from typing import Any, NamedTuple, Protocol

from vla_edge_ros.clock import NS_PER_S

POWERCAP = Path('/sys/class/powercap')
HWMON = Path('/sys/class/hwmon')
NVML_LIBRARY = 'libnvidia-ml.so.1'
NVML_NAME_BYTES = 96
RAPL_ADVICE = (
    'sudo chmod a+r /sys/class/powercap/intel-rapl:*/energy_uj until the next start; root-only '
    'by default, for other users could learn secrets from it (CVE-2020-8694)')
RAPL_INSIDE_PACKAGE = ('core', 'uncore')
"""Zones whose energy their package's counter holds already."""
MAX_PLAUSIBLE_W = 10_000.0
COUNTER_SLACK_S = 1.0
"""A counter may catch up this much time at once; NVML's moves every 20 to 100 ms."""
MAX_POWER_GAP_S = 1.0
"""Between power samples further apart than this nothing is guessed."""


class Unreadable(Exception):
    """A source that was found cannot be read now; the message says why."""


@dataclass(frozen=True, slots=True)
class Unavailable:
    """A source that cannot be read, why, and what to do about it."""

    name: str
    reason: str
    advice: str = ''


class Reading(NamedTuple):
    """
    What a source tells.

    Parameters
    ----------
    joules : float
        Energy measured since the first reading.
    joined : bool
        Whether it holds all that was used since the reading before.
    fault : str
        What happened in between, to be counted.

    """

    joules: float
    joined: bool
    fault: str = ''


class EnergySource(Protocol):
    """Something that tells energy; one thread reads it."""

    name: str

    def read(self, now_ns: int) -> Reading | None:
        """
        Return the energy since the first reading, or None when there is nothing new.

        Raises
        ------
        Unreadable
            It cannot be read now; it may be tried again.

        """
        ...


class CounterSource:
    """
    A counter that grows with the energy used.

    A step that no machine could have used is a reset, and so is a step back that no wrap-around
    explains: the energy since the reading before is then unknown. A counter that wraps more than
    once between two readings looks as if it had wrapped once; RAPL's needs minutes for that.

    Parameters
    ----------
    name : str
        What to call it.
    read_j : callable
        Returns the counter, J; raises ``Unreadable``.
    range_j : float, optional
        Where it starts again from 0, J.

    """

    def __init__(self, name: str, read_j: Callable[[], float], range_j: float | None = None):
        self.name = name
        self._read_j = read_j
        self._range_j = range_j
        self._total_j = 0.0
        self._counter_j: float | None = None
        self._read_ns = 0

    def again(self) -> 'CounterSource':
        """Return another source on the same counter, which begins at 0 J for itself."""
        return CounterSource(self.name, self._read_j, self._range_j)

    def read(self, now_ns: int) -> Reading | None:
        """Return the energy since the first reading, None while the counter stands still."""
        counter_j, before_j = self._read_j(), self._counter_j
        if counter_j == before_j:
            return None
        limit_j = MAX_PLAUSIBLE_W * ((now_ns - self._read_ns) / NS_PER_S + COUNTER_SLACK_S)
        self._counter_j, self._read_ns = counter_j, now_ns
        if before_j is None:
            return Reading(0.0, False)
        step_j, fault = counter_j - before_j, ''
        if step_j < 0 and self._range_j is not None:
            step_j, fault = step_j + self._range_j, 'counter wrapped'
        if not 0 <= step_j <= limit_j:
            return Reading(self._total_j, False, 'counter reset')
        self._total_j += step_j
        return Reading(self._total_j, True, fault)


class PowerSource:
    """
    A power sensor, integrated by the trapezoid rule over the times it was really read at.

    Parameters
    ----------
    name : str
        What to call it.
    read_w : callable
        Returns the power, W; raises ``Unreadable``.

    """

    def __init__(self, name: str, read_w: Callable[[], float]):
        self.name = name
        self._read_w = read_w
        self._total_j = 0.0
        self._power_w: float | None = None
        self._read_ns = 0

    def read(self, now_ns: int) -> Reading:
        """Return the energy since the first reading."""
        before_w, self._power_w = self._power_w, None
        self._power_w = self._read_w()
        elapsed_s = (now_ns - self._read_ns) / NS_PER_S
        self._read_ns = now_ns
        if before_w is None:
            return Reading(self._total_j, False)
        if elapsed_s > MAX_POWER_GAP_S:
            return Reading(self._total_j, False, 'sampled too seldom')
        self._total_j += (before_w + self._power_w) / 2 * elapsed_s
        return Reading(self._total_j, True)


def find_sources() -> list[EnergySource | Unavailable]:
    """Return every source of this machine; each kind has at least one entry."""
    return [*nvml_sources(), *hwmon_sources(), *rapl_sources()]


def nvml_sources(load: Callable[[str], Any] = ctypes.CDLL) -> list[EnergySource | Unavailable]:
    """
    Return the total energy counter of every GPU that NVIDIA's management library knows.

    GPUs are numbered in PCI order, and ``CUDA_VISIBLE_DEVICES`` hides none. The library counts
    its initialisations; this one lasts until the process ends.
    """
    try:
        nvml = _Nvml(load(NVML_LIBRARY))
        count = nvml.count()
    except OSError:
        reason = f'{NVML_LIBRARY} cannot be loaded: no NVIDIA driver'
        return [Unavailable('nvml', reason)]
    except (AttributeError, Unreadable) as error:
        return [Unavailable('nvml', str(error))]
    sources = [_nvml_source(nvml, index) for index in range(count)]
    return sources or [Unavailable('nvml', 'the NVIDIA driver finds no GPU')]


def nvml_source_at(
    address: str, load: Callable[[str], Any] = ctypes.CDLL,
) -> EnergySource | Unavailable:
    """
    Return the total energy counter of one GPU.

    Parameters
    ----------
    address : str
        Its place on the PCI bus, such as ``00000000:01:00.0``.
    load : callable
        Opens a shared library.

    """
    name = f'nvml {address}'
    try:
        nvml = _Nvml(load(NVML_LIBRARY))
        device = nvml.device_at(address)
        name = f'nvml {nvml.name(device)}'
        nvml.energy_j(device)
    except OSError:
        return Unavailable(name, f'{NVML_LIBRARY} cannot be loaded: no NVIDIA driver')
    except (AttributeError, Unreadable) as error:
        return Unavailable(name, str(error))
    return CounterSource(name, lambda: nvml.energy_j(device))


def _nvml_source(nvml: '_Nvml', index: int) -> EnergySource | Unavailable:
    name = f'nvml {index}'
    try:
        device = nvml.device(index)
        name = f'{name} {nvml.name(device)}'
        nvml.energy_j(device)
    except (AttributeError, Unreadable) as error:
        return Unavailable(name, str(error))
    return CounterSource(name, lambda: nvml.energy_j(device))


class _Nvml:
    """The calls of NVIDIA's management library that energy needs; they release the GIL."""

    def __init__(self, library):
        self._library = library
        library.nvmlErrorString.restype = ctypes.c_char_p
        self._call('nvmlInit_v2')

    def count(self) -> int:
        count = ctypes.c_uint()
        self._call('nvmlDeviceGetCount_v2', ctypes.byref(count))
        return count.value

    def device(self, index: int) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call('nvmlDeviceGetHandleByIndex_v2', ctypes.c_uint(index), ctypes.byref(device))
        return device

    def device_at(self, address: str) -> ctypes.c_void_p:
        device = ctypes.c_void_p()
        self._call(
            'nvmlDeviceGetHandleByPciBusId_v2', ctypes.c_char_p(address.encode()),
            ctypes.byref(device))
        return device

    def name(self, device: ctypes.c_void_p) -> str:
        name = ctypes.create_string_buffer(NVML_NAME_BYTES)
        self._call('nvmlDeviceGetName', device, name, ctypes.c_uint(NVML_NAME_BYTES))
        return name.value.decode(errors='replace')

    def energy_j(self, device: ctypes.c_void_p) -> float:
        millijoules = ctypes.c_ulonglong()
        self._call('nvmlDeviceGetTotalEnergyConsumption', device, ctypes.byref(millijoules))
        return millijoules.value / 1e3

    def _call(self, function: str, *arguments) -> None:
        code = getattr(self._library, function)(*arguments)
        if code:
            text = self._library.nvmlErrorString(ctypes.c_int(code)) or b''
            raise Unreadable(f'{function}: {text.decode(errors="replace") or code}')


def hwmon_sources(root: Path = HWMON) -> list[EnergySource | Unavailable]:
    """
    Return the power sensors of the kernel, among them the INA3221 of a Jetson.

    Batteries are left out: what they tell is charging as well as use.
    """
    sources: list[EnergySource | Unavailable] = []
    for chip in sorted(root.glob('hwmon*')):
        if _text_or(chip / 'device' / 'type', '') == 'Battery':
            continue
        kind = _text_or(chip / 'name', '')
        name = f'{chip.name} {kind}'.strip()
        channels = {_number_in(path) for path in chip.glob('power*_input')}
        averages = {_number_in(path) for path in chip.glob('power*_average')} - channels
        for channel in sorted(channels | averages):
            suffix = 'average' if channel in averages else 'input'
            label = _text_or(chip / f'power{channel}_label', '')
            sources.append(_power_source(
                f'{name} power{channel} {label}'.strip(),
                _MillionthsFile(chip / f'power{channel}_{suffix}')))
        if kind == 'ina3221':  # It tells voltage and current only; in4 to in7 are its shunts.
            for channel in (1, 2, 3):
                rail = _Rail(chip / f'in{channel}_input', chip / f'curr{channel}_input')
                if rail.exists():
                    label = _text_or(chip / f'in{channel}_label', '')
                    sources.append(_power_source(f'{name} in{channel} {label}'.strip(), rail))
    return sources or [Unavailable('hwmon', f'no power sensor in {root}')]


def _power_source(name: str, read_w: Callable[[], float]) -> EnergySource | Unavailable:
    try:
        read_w()
    except Unreadable as error:
        return Unavailable(name, str(error))
    return PowerSource(name, read_w)


@dataclass(frozen=True, slots=True)
class _MillionthsFile:
    """Power, µW, or energy, µJ."""

    path: Path

    def __call__(self) -> float:
        return _number(self.path) / 1e6


@dataclass(frozen=True, slots=True)
class _Rail:
    """Voltage, mV, and current, mA."""

    voltage: Path
    current: Path

    def exists(self) -> bool:
        return self.voltage.exists() and self.current.exists()

    def __call__(self) -> float:
        return _number(self.voltage) * _number(self.current) / 1e6


def rapl_sources(root: Path = POWERCAP) -> list[EnergySource | Unavailable]:
    """Return the energy counters of the processor's packages, their memory and the platform."""
    sources: list[EnergySource | Unavailable] = []
    for zone in sorted(root.glob('intel-rapl:*')):
        domain = _text_or(zone / 'name', '')
        if domain in RAPL_INSIDE_PACKAGE:
            continue
        name = ' '.join(['rapl', zone.name.removeprefix('intel-rapl:'), domain]).strip()
        counter = _MillionthsFile(zone / 'energy_uj')
        try:
            range_j = _number(zone / 'max_energy_range_uj') / 1e6
            counter()
        except Unreadable as error:
            denied = isinstance(error.__cause__, PermissionError)
            sources.append(Unavailable(name, str(error), RAPL_ADVICE if denied else ''))
        else:
            sources.append(CounterSource(name, counter, range_j))
    reason = f'no intel-rapl zone in {root}: a virtual machine, a container, or another processor'
    return sources or [Unavailable('rapl', reason)]


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except OSError as error:
        raise Unreadable(f'{path}: {error.strerror}') from error
    except ValueError:
        raise Unreadable(f'{path} holds no number') from None


def _number_in(path: Path) -> int:
    return int(re.search(r'\d+', path.name)[0])


def _text_or(path: Path, default: str) -> str:
    try:
        return path.read_text().strip() or default
    except (OSError, UnicodeDecodeError):
        return default
