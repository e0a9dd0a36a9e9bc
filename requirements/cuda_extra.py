"""
Print the extra of setup.py whose CUDA compiler fits the driver of this machine, on stderr why.

Nothing is printed where there is no GPU. Needs the standard library only.
"""

import ctypes
import os
import sys

DEVICES = ('/dev/nvidiactl', '/dev/nvhost-gpu', '/dev/nvgpu')  # the latter two: Jetson
OLDEST = 12


def find_device(exists=os.path.exists) -> str:
    """Return the device file of a GPU, '' where there is none."""
    return next(filter(exists, DEVICES), '')


def driver_version(load=ctypes.CDLL) -> int:
    """Return the newest CUDA that the driver knows, such as 13000 for 13.0; 0 without driver."""
    version = ctypes.c_int()
    try:
        failed = load('libcuda.so.1').cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return 0 if failed else version.value


def choose(device: str, version: int) -> tuple[str, str]:
    """Return the extra, '' for none, and a line that says why."""
    major, known = version // 1000, f'CUDA {version // 1000}.{version % 1000 // 10}'
    if not device:
        return '', ''
    if not version:
        return '', f'{device} is here, but no driver (libcuda.so.1): the CPU kernels will run'
    if major < OLDEST:
        return '', (
            f'the driver of {device} knows {known}, too old for the CUDA kernels, which need '
            f'{OLDEST}.0: the CPU kernels will run')
    extra = 'cuda' if major > OLDEST else 'cuda12'
    return extra, f'{device} has a driver for {known}: taking [{extra}] (several hundred MB)'


if __name__ == '__main__':
    taken, reason = choose(find_device(), driver_version())
    if reason:
        print(f'setup: {reason}', file=sys.stderr)
    print(taken)
