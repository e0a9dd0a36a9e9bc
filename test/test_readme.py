"""What the documents say about the code is generated from it, or checked against it."""

import argparse
from importlib import import_module
from pathlib import Path
import re

import pytest

from vla_edge_ros.cli import COMMANDS
from vla_edge_ros.lab.generated import renew
from vla_edge_ros.nodes.conversions import ENCODINGS
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.runtime.action_queue import Cause
from vla_edge_ros.runtime.admission import Reason
from vla_edge_ros.sim.scene import COLOURS

ROOT = Path(__file__).resolve().parent.parent
README, EVIDENCE, LAB, PARAMETERS = (
    (ROOT / name).read_text(encoding='utf-8')
    for name in ('README.md', 'docs/evidence.md', 'docs/lab.md', 'docs/parameters.md'))
PAGES = {
    ROOT / 'README.md': README,
    **{page: page.read_text(encoding='utf-8') for page in (ROOT / 'docs').glob('*.md')}}
ALL = '\n'.join(PAGES.values())


def test_parameter_tables_are_current():
    pytest.importorskip('rclpy')
    from vla_edge_ros.lab.parameter_table import tables

    how = 'run python -m vla_edge_ros.lab.parameter_table docs/parameters.md'
    assert renew(PARAMETERS, 'parameters', tables()) == PARAMETERS, how


@pytest.mark.parametrize('text', [
    'no marks', '<!-- a: end --> <!-- a: generated -->', '<!-- a: generated -->',
    '<!-- a: generated --> <!-- a: end --> <!-- a: generated --> <!-- a: end -->',
    '<!-- b: generated --> <!-- b: end -->'])
def test_page_without_the_part_that_is_to_be_renewed_is_refused(text):
    with pytest.raises(ValueError, match='must have <!-- a: generated --> and then <!-- a: end'):
        renew(text, 'a', ['line'])


def test_results_and_card_are_written_from_the_saved_records():
    from vla_edge_ros.lab import results

    how = 'run python -m vla_edge_ros.lab.results write'
    for page, text in results.renewed_pages().items():
        assert page.read_text(encoding='utf-8') == text, how


def test_what_is_measured_on_a_gpu_is_a_command_with_options_that_exist():
    from vla_edge_ros.lab.results import ON_A_GPU

    for words in ON_A_GPU.values():
        command, *options = words.split()
        parser = argparse.ArgumentParser()
        import_module(COMMANDS[command][0]).add_arguments(parser)
        parser.parse_args([*options, '--json', 'F'])


def test_predictions_are_what_the_device_model_says():
    from vla_edge_ros.lab import plan_table

    how = 'run python -m vla_edge_ros.lab.plan_table docs/lab.md'
    assert renew(LAB, 'plans', plan_table.table()) == LAB, how


def test_every_command_and_make_target_they_name_exists():
    named = set(re.findall(r'vla-edge (\w+)', ALL))
    assert named == set(COMMANDS)
    targets = set(re.findall(r'^(\w+):', (ROOT / 'Makefile').read_text(), re.M))
    assert set(re.findall(r'^make (\w+)', ALL, re.M)) <= targets


@pytest.mark.parametrize('page', PAGES, ids=lambda page: page.name)
def test_every_file_a_page_names_exists(page):
    for name in re.findall(r'\]\(((?!http)[\w/.]+)\)', PAGES[page]):
        assert (page.parent / name).is_file(), name
    for name in re.findall(r'\b(?:\w+\.launch\.py|config/\w+\.\w+)', PAGES[page]):
        assert (ROOT / name).is_file() or (ROOT / 'launch' / name).is_file(), name


def table(head):
    """Return the names in the first column of a table."""
    rows = PARAMETERS.split(f'| {head} |')[1].split('\n\n')[0].splitlines()[2:]
    return [name for row in rows for name in re.findall(r'`(\w+)`', row.split('|')[1])]


def test_tables_explain_every_cause_and_every_reason_once():
    assert sorted(table('cause')) == sorted(cause.value for cause in Cause)
    assert sorted(table('reason')) == sorted(reason.value for reason in Reason)


def test_it_lists_the_encodings_colours_and_prompt_tokens_of_the_code():
    listing = README.split('Raw encodings: ')[1].split('.\n')[0]
    assert re.findall(r'`(\w+)`', listing) == list(ENCODINGS)
    tokens = PolicyConfig.load(DEFAULT_POLICY).prompt_slots
    rule = f'names exactly one of {", ".join(COLOURS)} and has at most {tokens} prompt tokens'
    assert rule.replace(', yellow', ' and yellow') in ' '.join(README.split())


def test_it_tells_the_quality_of_service_of_the_code():
    pytest.importorskip('rclpy')
    from rclpy.qos import qos_profile_sensor_data, ReliabilityPolicy

    from vla_edge_ros.nodes.camera import IMAGES
    from vla_edge_ros.nodes.messages import LATCHED

    for topic, profile in (
        ('camera/image_raw', IMAGES), ('instruction', LATCHED),
        ('joint_states', qos_profile_sensor_data),
    ):
        row = next(line for line in README.splitlines() if line.startswith(f'| in | `{topic}`'))
        kind = {ReliabilityPolicy.BEST_EFFORT: 'best effort'}.get(profile.reliability, 'reliable')
        assert row.split('|')[4].strip().startswith(f'{kind}, {profile.depth}')
