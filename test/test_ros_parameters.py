"""Parameter sets as ROS parameters: described, checked, refused and changed as one."""

from dataclasses import dataclass

import pytest
import rclpy
from rclpy.context import Context
from rclpy.exceptions import ParameterNotDeclaredException
from rclpy.node import Node
from rclpy.parameter import Parameter

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.nodes.ros_parameters import RosParameters
from vla_edge_ros.parameters import parameter, validate


@dataclass(frozen=True, slots=True)
class Timing:
    deadline_ms: float = parameter(33.0, 'Latest end of a job.', unit='ms', range=(1.0, 1000.0))
    margin_ms: float = parameter(2.0, 'Time kept free.', unit='ms', range=(0.0, 100.0))

    def __post_init__(self):
        validate(self)
        if self.margin_ms >= self.deadline_ms:
            raise ConfigError('margin_ms', 'must be < deadline_ms', self.margin_ms)


@dataclass(frozen=True, slots=True)
class Model:
    model_path: str = parameter('', 'Where the checkpoint lies.', read_only=True)
    kv_slots: int = parameter(256, 'Slots of the frames.', range=(32, 65536), read_only=True)
    eviction: str = parameter('fifo', 'Who goes first.', choices=('fifo', 'semantic'))
    joint_names: list = parameter([], 'Names of the joints.')
    initial_action: list = parameter([], 'Numbers.')

    def __post_init__(self):
        validate(self)


@pytest.fixture
def make_node():
    context = Context()
    rclpy.init(context=context, args=[])
    nodes = []

    def make(*arguments, locked=None):
        node = Node('tested', context=context, cli_args=['--ros-args', *arguments])
        nodes.append(node)
        return node, RosParameters(node, [Timing, Model], locked)

    yield make
    for node in nodes:
        node.destroy_node()
    context.try_shutdown()


def test_fields_are_declared_with_description_unit_range_and_choices(make_node):
    node, _ = make_node()
    deadline = node.describe_parameter('deadline_ms')
    assert deadline.description == 'Latest end of a job.'
    assert 'unit: ms' in deadline.additional_constraints
    assert deadline.floating_point_range[0].to_value == 1000.0
    assert node.describe_parameter('kv_slots').integer_range[0].from_value == 32
    assert 'one of: fifo, semantic' in node.describe_parameter('eviction').additional_constraints
    assert node.describe_parameter('model_path').read_only


def test_overrides_reach_the_sets_and_integers_widen(make_node):
    overrides = ('margin_ms:=3', 'joint_names:=[a, b]', 'initial_action:=[0.5, 1.0]')
    node, sets = make_node(*(word for item in overrides for word in ('-p', item)))
    assert sets[Timing].margin_ms == 3.0
    assert list(sets[Model].joint_names) == ['a', 'b']
    assert sets[Model].initial_action == [0.5, 1.0]
    assert node.get_parameter('margin_ms').value == 3.0
    changed = [Parameter('initial_action', value=[0.0, 2.0])]
    assert node.set_parameters(changed)[0].successful
    assert sets[Model].initial_action == [0.0, 2.0]


def test_ros_own_parameters_are_no_strangers(make_node):
    node, _ = make_node('-p', 'use_sim_time:=true')
    assert node.get_parameter('use_sim_time').value is True


@pytest.mark.parametrize(
    'override, message',
    [
        ('margin:=3.0', 'margin is not a parameter of tested'),
        ('margin_ms:=-1.0', 'margin_ms must be in 0.0..100.0 ms, got -1.0'),
        ('margin_ms:=.nan', 'margin_ms must be finite'),
        ('margin_ms:=fast', 'margin_ms must be of type float'),
        ('margin_ms:=40.0', 'margin_ms must be < deadline_ms'),
        ('eviction:=lru', 'eviction must be one of fifo, semantic'),
    ],
)
def test_a_wrong_override_is_refused_by_name_rule_and_value(make_node, override, message):
    with pytest.raises(ConfigError, match=message):
        make_node('-p', override)


@pytest.mark.parametrize('set_them', [
    Node.set_parameters, Node.set_parameters_atomically])
def test_a_live_change_of_an_unknown_parameter_is_refused_by_name(make_node, set_them):
    node, sets = make_node()
    changes = [Parameter('margin_ms', value=5.0), Parameter('widht', value=3)]
    with pytest.raises(ParameterNotDeclaredException) as caught:
        set_them(node, changes[1:])
    assert str(caught.value).startswith('widht is not a parameter of tested (known: ')
    assert str(caught.value).endswith('), got 3')
    with pytest.raises(ParameterNotDeclaredException, match='widht is not'):
        node.set_parameters_atomically(changes)
    assert sets[Timing].margin_ms == 2.0
    assert node.set_parameters([Parameter('use_sim_time', value=True)])[0].successful


def test_a_live_change_takes_effect_and_is_announced(make_node):
    node, sets = make_node()
    heard = []
    sets.on_change(lambda: heard.append(sets[Timing].margin_ms))
    (result,) = node.set_parameters([Parameter('margin_ms', value=5)])
    assert result.successful and heard == [5.0]


def test_a_change_is_all_or_nothing(make_node):
    node, sets = make_node()
    result = node.set_parameters_atomically(
        [Parameter('margin_ms', value=9.0), Parameter('deadline_ms', value=8.0)]
    )
    assert not result.successful and 'margin_ms must be < deadline_ms' in result.reason
    assert sets[Timing] == Timing() and node.get_parameter('margin_ms').value == 2.0
    both = [Parameter('margin_ms', value=40.0), Parameter('deadline_ms', value=80.0)]
    assert node.set_parameters_atomically(both).successful
    assert sets[Timing] == Timing(deadline_ms=80.0, margin_ms=40.0)


def test_read_only_fields_are_fixed_only_while_configured(make_node):
    configured = [False]
    node, sets = make_node(locked=lambda: configured[0])
    assert node.set_parameters([Parameter('kv_slots', value=512)])[0].successful
    configured[0] = True
    (result,) = node.set_parameters([Parameter('kv_slots', value=1024)])
    assert not result.successful and 'clean it up first' in result.reason
    assert sets[Model].kv_slots == 512
    assert node.set_parameters([Parameter('eviction', value='semantic')])[0].successful
