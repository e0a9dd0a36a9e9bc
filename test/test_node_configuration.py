"""The parameter files and launch files against the parameter sets they set."""

import ast
from pathlib import Path

import pytest
import yaml

from vla_edge_ros.lab.parameter_table import node_parameters
from vla_edge_ros.nodes import simulator
from vla_edge_ros.parameters import describe, from_mapping

ROOT = Path(__file__).resolve().parent.parent
SETS = node_parameters()
PARAMETER_FILES = [
    path for path in sorted((ROOT / 'config').glob('*.yaml'))
    if not path.name.startswith('sweep_')]


@pytest.mark.parametrize('path', PARAMETER_FILES, ids=lambda p: p.name)
def test_every_value_of_a_parameter_file_is_known_and_valid(path):
    for key, section in yaml.safe_load(path.read_text()).items():
        sets = SETS[key.removeprefix('/**/')]
        values = section['ros__parameters']
        owners = {name: cls for cls in sets for name, _, _ in describe(cls)}
        assert values.keys() <= owners.keys()
        for cls in sets:
            from_mapping(cls, {k: v for k, v in values.items() if owners[k] is cls})


@pytest.mark.parametrize('path', PARAMETER_FILES, ids=lambda p: p.name)
def test_every_number_with_a_unit_has_it_in_its_comment(path):
    units = {
        name: metadata['unit']
        for sets in SETS.values() for cls in sets for name, _, metadata in describe(cls)
    }
    for line in path.read_text().splitlines():
        name = line.strip().partition(':')[0]
        unit = units.get(name, '')
        if unit and not line.lstrip().startswith('#'):
            assert f'# {unit}' in line, line


def test_the_tiny_file_states_the_defaults_of_timing():
    values = yaml.safe_load((ROOT / 'config/tiny.yaml').read_text())
    values = values['/**/reasoning_node']['ros__parameters']
    defaults = {n: d for cls in SETS['reasoning_node'] for n, d, _ in describe(cls)}
    differing = {name for name, value in values.items() if value != defaults[name]}
    assert differing == {'kv_slots', 'safe_action'}


@pytest.mark.parametrize('path', sorted((ROOT / 'launch').glob('*.py')), ids=lambda p: p.name)
def test_a_launch_file_passes_on_only_known_parameters(path):
    known = {n for sets in SETS.values() for cls in sets for n, _, _ in describe(cls)}
    known |= {'use_sim_time'}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.keyword) and node.arg == 'parameters':
            for inner in ast.walk(node.value):
                keys = inner.keys if isinstance(inner, ast.Dict) else []
                names = {key.value for key in keys if isinstance(key, ast.Constant)}
                assert names <= known


def test_the_simulated_robot_has_the_joints_of_the_embedded_policy():
    from vla_edge_ros.policy.policy import DEFAULT_POLICY
    from vla_edge_ros.policy.policy_config import PolicyConfig
    config = PolicyConfig.load(DEFAULT_POLICY)
    assert config.joint_names == simulator.JOINT_NAMES
    values = yaml.safe_load((ROOT / 'config/tiny.yaml').read_text())
    size = values['/**/camera_node']['ros__parameters']
    assert (size['width'], size['height']) == (config.image_width, config.image_height)
