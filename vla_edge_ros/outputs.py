"""
Output options of the commands: checked before the work, written after it.

Folders that are missing are made, in every command alike, but only when there is something to
put there: a check leaves nothing behind.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import os
from pathlib import Path
import tempfile

from vla_edge_ros.errors import ConfigError

FOLDERS_ARE_MADE = 'missing folders are made'
"""For the help of every option that is checked here."""


def check_file(option: str, path: Path) -> None:
    """
    Refuse a file that could not be written.

    Raises
    ------
    ConfigError
        It is a folder, or may not be made or written there.

    """
    with _told_as(option, path, 'a file that can be written'):
        if path.is_dir():
            raise IsADirectoryError(None, 'it is a folder')
        if not path.exists():
            _try_folder(path.parent)
        elif not os.access(path, os.W_OK):
            raise PermissionError(None, 'no permission')


def check_folder(option: str, path: Path, *names: str) -> None:
    """
    Refuse a folder in which ``names`` could not be written.

    Raises
    ------
    ConfigError
        It is no folder, files may not be made there, or one of them cannot be written.

    """
    with _told_as(option, path, 'a folder that can be written to'):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(None, 'it is a file')
        _try_folder(path)
    for name in names:
        check_file(option, path / name)


def write_text(option: str, path: Path, text: str, whole: bool = False) -> None:
    """
    Write a file, in folders made for it; ``whole`` never leaves a part of it, whoever kills us.

    Raises
    ------
    ConfigError
        It cannot be written after all, as on a full disk.

    """
    with _told_as(option, path, 'a file that can be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.with_name(f'.{path.name}.part') if whole else path
        target.write_text(text, encoding='utf-8')
        if whole:
            os.replace(target, path)


def write_bytes(option: str, path: Path, content: bytes) -> None:
    """Write a file as :func:`write_text` does."""
    with _told_as(option, path, 'a file that can be written'):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


@contextmanager
def _told_as(option: str, path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(option, f'must be {what} ({error.strerror})', str(path)) from None


def _try_folder(folder: Path) -> None:
    """Make the folder and a file in it, then take away what was made."""
    made = []
    try:
        for level in (*reversed(folder.parents), folder):
            if not level.exists():
                level.mkdir()
                made.append(level)
        # Permissions do not tell everything: /proc takes no file, whoever asks.
        with tempfile.TemporaryFile(dir=folder):
            pass
    finally:
        with suppress(OSError):  # another process may have put something there meanwhile
            for level in reversed(made):
                level.rmdir()
