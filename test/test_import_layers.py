"""Imports point downward: hosts, then runtime, then policy, then kernels."""

import ast
from pathlib import Path
import subprocess
import sys

import pytest

import vla_edge_ros

ROOT = Path(vla_edge_ros.__file__).parent
LEAVES = ('errors', 'clock', 'parameters', 'progress')
# What each part of the core may import of this package, beside itself and the leaves.
MAY_IMPORT = {
    'kernels': (),
    'telemetry': (),
    'policy': ('kernels', 'telemetry.stages'),
    'runtime': ('policy', 'kernels', 'telemetry'),
}
# What only hosts, the training and the CUDA kernels may use, not even lazily elsewhere.
FOREIGN = ('rclpy', 'mujoco', 'torch', 'numba.cuda', 'rosbags')


def core_files() -> list[Path]:
    return [path for part in MAY_IMPORT for path in sorted((ROOT / part).rglob('*.py'))
            if 'cuda' not in path.parts]


def imported_names(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module)
            names.update(f'{node.module}.{alias.name}' for alias in node.names)
    return names


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + '.')


@pytest.mark.parametrize('path', core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_file_imports_only_what_lies_below_it(path):
    part = path.relative_to(ROOT).parts[0]
    allowed = (*LEAVES, part, *MAY_IMPORT[part])
    for name in imported_names(path):
        assert not any(within(name, foreign) for foreign in FOREIGN), f'{path}: {name}'
        if name.startswith('vla_edge_ros.'):
            inner = name.removeprefix('vla_edge_ros.')
            assert any(within(inner, module) for module in allowed), f'{path}: {name}'


def test_core_in_a_fresh_process_loads_no_host_library():
    modules = [
        '.'.join(('vla_edge_ros', *path.relative_to(ROOT).with_suffix('').parts))
        for path in core_files() if path.name != '__init__.py'
    ]
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
print([name for name in {FOREIGN!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[]'
