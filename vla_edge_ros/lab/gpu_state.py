"""Clocks, power and temperature of the GPU as NVIDIA's own program tells them."""

from collections.abc import Callable
import subprocess
import time

FIELDS = {
    'driver_version': 'driver',
    'pstate': 'performance_state',
    'clocks.sm': 'sm_clock_mhz',
    'clocks.max.sm': 'sm_clock_max_mhz',
    'clocks.mem': 'memory_clock_mhz',
    'clocks.max.mem': 'memory_clock_max_mhz',
    'power.draw': 'power_w',
    'power.limit': 'power_limit_w',
    'temperature.gpu': 'temperature_c',
}
UNAVAILABLE = 'unavailable'
TIMEOUT_S = 30.0


def pci_address(device) -> str:
    """Return by which address ``nvidia-smi`` knows a ``driver.Gpu``, whose number may differ."""
    domain, bus, slot = (
        device.attribute(name) for name in ('PCI_DOMAIN_ID', 'PCI_BUS_ID', 'PCI_DEVICE_ID'))
    return f'{domain:08x}:{bus:02x}:{slot:02x}.0'


def gpu_state(address: str, work: Callable[[], object] | None = None) -> dict | str:
    """
    Return what ``nvidia-smi`` tells of one GPU, or 'unavailable'; a field it lacks is that too.

    Parameters
    ----------
    address : str
        As of :func:`pci_address`.
    work : callable, optional
        Called again and again meanwhile, so that the state is that under load.

    """
    command = ['nvidia-smi', f'--id={address}', f'--query-gpu={",".join(FIELDS)}',
               '--format=csv,noheader,nounits']  # fmt: skip
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        return UNAVAILABLE
    with process:
        ends_s = time.monotonic() + TIMEOUT_S
        while work is not None and process.poll() is None and time.monotonic() < ends_s:
            work()
        try:
            output, _ = process.communicate(timeout=max(ends_s - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            return UNAVAILABLE
    words = [word.strip() for word in output.split(',')]
    if process.returncode or len(words) != len(FIELDS):
        return UNAVAILABLE
    return {name: _value(word) for name, word in zip(FIELDS.values(), words, strict=True)}


def _value(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        # Such as P0 or a version; what a card does not tell stands in brackets.
        return UNAVAILABLE if word.startswith('[') else word
