"""Transformer operations; every backend offers the same names."""

import importlib
from types import ModuleType

from vla_edge_ros.errors import ConfigError

BACKENDS = ('cpu', 'reference')


def load_backend(name: str) -> ModuleType:
    """
    Import the kernels of a backend; ``auto`` takes the best one this machine can run.

    Raises
    ------
    ConfigError
        There is no backend of that name.

    """
    if name == 'auto':
        name = 'cpu'
    if name not in BACKENDS:
        raise ConfigError('backend', f'must be one of auto, {", ".join(BACKENDS)}', name)
    return importlib.import_module(f'vla_edge_ros.kernels.{name}')
