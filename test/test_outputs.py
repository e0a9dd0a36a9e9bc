"""Where results go is checked before the work begins, and the check leaves nothing behind."""

from pathlib import Path

import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.outputs import check_file, check_folder, write_text


@pytest.mark.parametrize('name', ['a.json', 'new/deep/a.json'])
def test_file_that_can_be_written_passes_and_is_not_made_yet(tmp_path, name):
    check_file('--json', tmp_path / name)
    assert not list(tmp_path.iterdir())
    write_text('--json', tmp_path / name, 'text')
    check_file('--json', tmp_path / name)
    assert (tmp_path / name).read_text() == 'text'


@pytest.mark.parametrize('name', ['.', 'new/deep'])
def test_folder_that_can_be_written_passes_and_is_not_made_yet(tmp_path, name):
    check_folder('--out', tmp_path / name, 'a.csv')
    assert not list(tmp_path.iterdir())


def test_relative_paths_are_those_of_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_file('--json', Path('a.json'))
    check_folder('--out', Path('out/run'))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(('check', 'what', 'name', 'reason'), [
    (check_file, 'a file that can be written', '.', 'it is a folder'),
    (check_file, 'a file that can be written', 'file/a.json', 'Not a directory'),
    (check_file, 'a file that can be written', 'x' * 300, 'File name too long'),
    (check_folder, 'a folder that can be written to', 'file', 'it is a file'),
    (check_folder, 'a folder that can be written to', 'file/run', 'Not a directory'),
    (check_folder, 'a folder that can be written to', 'x' * 300, 'File name too long'),
])
def test_what_cannot_be_written_is_refused_in_one_line(tmp_path, check, what, name, reason):
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError) as caught:
        check('--out', tmp_path / name)
    expected = f'--out must be {what} ({reason}), got {str(tmp_path / name)!r}'
    assert str(caught.value) == expected


def test_file_in_the_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / 'summary.json').mkdir()
    with pytest.raises(ConfigError, match=r'--out must be a file .*/summary\.json'):
        check_folder('--out', tmp_path, 'trace.csv', 'summary.json')


@pytest.mark.parametrize('path', ['/proc', '/proc/none'])
def test_place_that_takes_no_file_is_found_out(path):
    with pytest.raises(ConfigError, match='--out must be a folder that can be written to'):
        check_folder('--out', Path(path))
    with pytest.raises(ConfigError, match='--json must be a file that can be written'):
        check_file('--json', Path(path, 'a.json'))


def test_disk_that_is_full_afterwards_is_one_line():
    check_file('--json', Path('/dev/full'))
    with pytest.raises(ConfigError, match='No space left on device'):
        write_text('--json', Path('/dev/full'), 'text')
