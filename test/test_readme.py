"""What the README says about the code is generated from it, or checked against it."""

from pathlib import Path
import re

import pytest

from vla_edge_ros.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / 'README.md').read_text(encoding='utf-8')


def test_parameter_tables_are_current():
    pytest.importorskip('rclpy')
    from vla_edge_ros.lab.parameter_table import renew

    assert renew(README) == README, 'run python -m vla_edge_ros.lab.parameter_table README.md'


def test_results_and_card_are_written_from_the_saved_records():
    from vla_edge_ros.lab import results

    assert results.renew(README) == README, 'run python -m vla_edge_ros.lab.results write'
    assert results.card() == results.CARD.read_text(encoding='utf-8')


def test_every_command_and_make_target_it_names_exists():
    named = set(re.findall(r'vla-edge (\w+)', README))
    assert named == set(COMMANDS)
    targets = set(re.findall(r'^(\w+):', (ROOT / 'Makefile').read_text(), re.M))
    assert set(re.findall(r'^make (\w+)', README, re.M)) <= targets


def test_every_file_it_names_exists():
    for name in re.findall(r'\]\(((?!http)[\w/.]+)\)', README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r'\b(?:\w+\.launch\.py|config/\w+\.\w+)', README):
        assert (ROOT / name).is_file() or (ROOT / 'launch' / name).is_file(), name
