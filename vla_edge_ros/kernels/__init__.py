"""Transformer operations; every backend offers the same names."""

import importlib
from types import ModuleType

from vla_edge_ros.errors import BackendUnavailable, ConfigError

BACKENDS = ('cuda', 'cpu', 'reference')


def choose_backend(name: str) -> tuple[str, str]:
    """
    Return the backend that ``name`` stands for, and why.

    ``auto`` is ``cuda`` where a GPU and the CUDA bindings are at hand, else ``cpu``.

    Raises
    ------
    ConfigError
        There is no backend of that name.

    """
    if name in BACKENDS:
        return name, 'asked for'
    if name != 'auto':
        raise ConfigError('backend', f'must be one of auto, {", ".join(BACKENDS)}', name)
    from vla_edge_ros.kernels.cuda.driver import Device

    try:
        device = Device()
    except BackendUnavailable as error:
        return 'cpu', f'no CUDA: {error.value}'
    found = device.name
    device.close()
    return 'cuda', f'found {found}'


def load_backend(name: str) -> ModuleType:
    """
    Import the kernels of a backend, see :func:`choose_backend`.

    Raises
    ------
    ConfigError
        There is no backend of that name.

    """
    return importlib.import_module(f'vla_edge_ros.kernels.{choose_backend(name)[0]}')
