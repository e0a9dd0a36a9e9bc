"""Installable by colcon and by pip, with one set of facts."""

import importlib
from importlib.metadata import distribution
from pathlib import Path
import re
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ElementTree.parse(ROOT / 'package.xml').getroot()
DEPENDENCIES = {node.text for node in MANIFEST if node.tag.endswith('depend')}


def test_colcon_sees_an_ament_python_package(tmp_path):
    colcon = shutil.which('colcon', path=Path(sys.executable).parent) or shutil.which('colcon')
    if colcon is None:
        pytest.skip('colcon is not installed')
    # An invalid maintainer address silently makes it a plain Python package.
    done = subprocess.run(
        [colcon, '--log-base', tmp_path, 'list', '--base-paths', ROOT],
        capture_output=True, text=True)
    assert '(ros.ament_python)' in done.stdout, done.stderr


def test_version_and_licence_agree_everywhere():
    setup = (ROOT / 'setup.py').read_text()
    assert f"version='{MANIFEST.findtext('version')}'" in setup
    assert f"license='{MANIFEST.findtext('license')}'" in setup
    licence = (ROOT / 'LICENSE').read_text()
    assert 'Apache License' in licence and 'Version 2.0' in licence


def test_manifest_names_every_ros_package_the_code_imports():
    names = r'rclpy|launch\w*|\w+_msgs|std_srvs|builtin_interfaces|ament_index_python'
    pattern = re.compile(rf'^\s*(?:from|import) ({names})\b', re.M)
    used = set()
    for path in [*ROOT.glob('vla_edge_ros/**/*.py'), *ROOT.glob('launch/*.py')]:
        used.update(pattern.findall(path.read_text()))
    assert used and used <= DEPENDENCIES, used - DEPENDENCIES


def test_every_executable_exists():
    points = [p for p in distribution('vla_edge_ros').entry_points
              if p.group == 'console_scripts']
    names = {point.name for point in points}
    assert names == {'camera_node', 'reasoning_node', 'sim_node', 'vla-edge'}
    for point in points:
        module, _, attribute = point.value.partition(':')
        assert callable(getattr(importlib.import_module(module), attribute))


def test_ready_sweeps_are_installed_with_the_package():
    program = (
        'import runpy, setuptools\n'
        'setuptools.setup = lambda **facts: print(*dict(facts["data_files"])'
        '["share/vla_edge_ros/config"])\n'
        'runpy.run_path("setup.py")')
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT)
    assert {'config/sweep_small.yaml', 'config/sweep_paper.yaml'} <= set(done.stdout.split())


def test_every_data_file_of_the_package_is_installed_with_it():
    program = (
        'import runpy, setuptools\n'
        'setuptools.setup = lambda **facts: print(*facts["package_data"]["vla_edge_ros"])\n'
        'runpy.run_path("setup.py")')
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, cwd=ROOT)
    package = ROOT / 'vla_edge_ros'
    installed = {path for pattern in done.stdout.split() for path in package.glob(pattern)}
    assert set(package.rglob('*.yaml')) <= installed and installed


def test_source_speaks_of_no_absolute_path():
    needle = '/' + 'work/'
    for path in [*ROOT.glob('vla_edge_ros/**/*.py'), *ROOT.glob('config/*'), ROOT / 'Makefile']:
        assert needle not in path.read_text(), path
