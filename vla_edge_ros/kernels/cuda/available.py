"""Whether this machine can run a network on the CUDA kernels; imports no compiler."""

from importlib import util
from importlib.metadata import version

from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.kernels.cuda import driver
from vla_edge_ros.kernels.cuda.layout import check_config

OLDEST = (7, 5)
"""Compute capability from which the kernels compile."""


def find_gpu(config) -> tuple[bool, str]:
    """Return whether ``auto`` takes the GPU for a network, and why or why not."""
    try:
        device = driver.Gpu()
    except BackendUnavailable as error:
        return False, f'no CUDA: {error.value}'
    try:
        check_config(config)
        if device.capability < OLDEST:
            return False, f'{device.name} is older than compute capability 7.5'
        if util.find_spec('numba_cuda') is None:
            return False, f'found {device.name}, but numba-cuda is not installed'
        if device.cuda_major < int(version('cuda-bindings').split('.')[0]):
            return False, f'the driver of {device.name} is older than the CUDA packages'
        # Others may hold it for themselves, or all of its memory.
        driver.Device().close()
        return True, f'found {device.name}'
    except ConfigError as error:
        return False, str(error)
    except (BackendUnavailable, driver.CudaError) as error:
        return False, f'found {device.name}, but it cannot be used: {error}'
