"""Transformer operations; every backend offers the same names."""

import importlib
from types import ModuleType

from vla_edge_ros.errors import ConfigError

BACKENDS = ('cuda', 'cpu', 'reference')


def choose_backend(name: str, config) -> tuple[str, str]:
    """
    Return which backend is meant, and why it.

    Parameters
    ----------
    name : str
        One of ``BACKENDS``, or ``auto``: ``cuda`` where a GPU can run the network, else ``cpu``.
    config : TransformerConfig
        The network.

    Raises
    ------
    ConfigError
        There is no backend of that name.

    """
    reason = 'asked for'
    if name == 'auto':
        from vla_edge_ros.kernels.cuda.available import find_gpu

        gpu, reason = find_gpu(config)
        name = 'cuda' if gpu else 'cpu'
    if name not in BACKENDS:
        raise ConfigError('backend', f'must be one of auto, {", ".join(BACKENDS)}', name)
    return name, reason


def load_backend(name: str, config) -> tuple[ModuleType, str]:
    """Import the kernels that :func:`choose_backend` chooses; return them, and which and why."""
    name, reason = choose_backend(name, config)
    return importlib.import_module(f'vla_edge_ros.kernels.{name}'), f'{name} ({reason})'
