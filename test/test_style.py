"""The linters of a ROS 2 installation where there is one, and ruff and pydocstyle elsewhere."""

from pathlib import Path
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [str(ROOT / name) for name in ('vla_edge_ros', 'test', 'launch', 'setup.py')]
# The ignore list of ament_pep257.
PEP257_IGNORED = 'D100,D101,D102,D103,D104,D105,D106,D107,D203,D212,D404'


def run_module(module: str, *arguments: str) -> None:
    pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, '-m', module, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing():
    run_module('ruff', 'check', '--no-cache', *SOURCES)


def test_docstrings_follow_pep257():
    run_module(
        'pydocstyle', '--match=.*\\.py', '--ignore=' + PEP257_IGNORED,
        str(ROOT / 'vla_edge_ros'))


def test_ament_flake8_finds_nothing():
    linter = pytest.importorskip('ament_flake8.main', reason='no ROS 2 installation')
    code, errors = linter.main_with_errors(argv=['--linelength', '99', *SOURCES])
    assert code == 0, errors


def test_ament_pep257_finds_nothing():
    linter = pytest.importorskip('ament_pep257.main', reason='no ROS 2 installation')
    assert linter.main(argv=[str(ROOT / 'vla_edge_ros')]) == 0


def test_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): count
        for path in ROOT.glob('vla_edge_ros/**/*.py')
        if (count := len(path.read_text().splitlines())) > 400
    }
    assert not long
