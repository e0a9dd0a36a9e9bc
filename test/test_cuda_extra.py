"""Which CUDA packages setup takes, by the driver that is there."""

import importlib.util
import os
from pathlib import Path
import platform
import subprocess
import sys

import pytest

ROOT = Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location('cuda_extra', ROOT / 'requirements/cuda_extra.py')
cuda_extra = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cuda_extra)


class Driver:
    """What libcuda offers: its version, or the number of an error."""

    def __init__(self, version, error=0):
        self._version, self._error = version, error

    def cuDriverGetVersion(self, reference):  # noqa: N802 - the driver's name
        reference._obj.value = self._version
        return self._error


@pytest.mark.parametrize(
    ('version', 'extra', 'reason'),
    [
        (14010, 'cuda', 'has a driver for CUDA 14.1: taking [cuda]'),
        (13000, 'cuda', 'has a driver for CUDA 13.0: taking [cuda]'),
        (12060, 'cuda12', 'has a driver for CUDA 12.6: taking [cuda12]'),
        (12000, 'cuda12', 'has a driver for CUDA 12.0: taking [cuda12]'),
        (11040, '', 'knows CUDA 11.4, too old for the CUDA kernels, which need 12.0'),
        (0, '', 'no driver (libcuda.so.1)'),
    ],
)
def test_the_packages_fit_the_driver_and_one_line_says_so(version, extra, reason):
    taken, why = cuda_extra.choose('/dev/nvidiactl', version)
    assert taken == extra and reason in why and why.count('\n') == 0
    assert '/dev/nvidiactl' in why
    # Without a GPU there is nothing to say, whatever library lies about.
    assert cuda_extra.choose('', version) == ('', '')


def test_the_extras_it_names_exist():
    setup = (ROOT / 'setup.py').read_text()
    for version in (12060, 13000):
        assert f"'{cuda_extra.choose('/dev/nvgpu', version)[0]}': [" in setup


@pytest.mark.parametrize('device', ['/dev/nvidiactl', '/dev/nvhost-gpu', '/dev/nvgpu'])
def test_a_gpu_is_found_by_its_device_file_also_on_a_jetson(device):
    assert cuda_extra.find_device(lambda path: path == device) == device
    assert cuda_extra.find_device(lambda path: False) == ''


def test_a_driver_that_is_missing_broken_or_fails_has_no_version():
    def missing(name):
        raise OSError(f'{name}: cannot open shared object file')

    assert cuda_extra.driver_version(missing) == 0
    assert cuda_extra.driver_version(lambda name: object()) == 0
    assert cuda_extra.driver_version(lambda name: Driver(13000, error=34)) == 0
    assert cuda_extra.driver_version(lambda name: Driver(13000)) == 13000


@pytest.mark.skipif(platform.machine() != 'x86_64', reason='make setup is for x86_64')
@pytest.mark.parametrize('extra', ['cuda12', ''])
def test_setup_installs_the_extra_that_fits(tmp_path, extra):
    programs = {
        'pip': f'echo "$@" >> {tmp_path}/calls',
        'python': f'case "$*" in *cuda_extra.py) echo {extra};; esac',
    }
    (tmp_path / 'bin').mkdir()
    for name, command in programs.items():
        path = tmp_path / 'bin' / name
        path.write_text(f'#!/bin/sh\n{command}\n')
        path.chmod(0o755)
    subprocess.run(
        ['sh', 'requirements/bootstrap.sh', str(tmp_path)], cwd=ROOT, check=True,
        capture_output=True, env={**os.environ, 'PYTHON': sys.executable, 'DISTRO': 'jazzy'})
    first, *more = (tmp_path / 'calls').read_text().splitlines()
    assert '.[ros,test]' in first
    assert [call.split()[-1] for call in more] == ([f'.[{extra}]'] if extra else [])
