"""The layouts for PlotJuggler and Foxglove can be read and name only what the nodes publish."""

import importlib
import json
from pathlib import Path
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

pytest.importorskip('rclpy')
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from loop_rig import rig_of
from sensor_msgs.msg import Image, JointState, TimeReference
from std_msgs.msg import String
from trajectory_msgs.msg import JointTrajectory

from vla_edge_ros.nodes.camera import CameraNode
from vla_edge_ros.nodes.loop_report import LoopReport
from vla_edge_ros.nodes.simulator import JOINT_NAMES
from vla_edge_ros.runtime.action_queue import Cause

CONFIG = Path(__file__).resolve().parent.parent / 'config'
TOPICS = {
    '/action': JointTrajectory,
    '/joint_states': JointState,
    '/camera/image_raw': Image,
    '/instruction': String,
    '/diagnostics': DiagnosticArray,
    '/reasoning_node/observation': TimeReference,
    '/reasoning_node/status': DiagnosticStatus,
}
PLOTTED = r'u?int(8|16|32|64)|float|double|octet|boolean'


def layouts():
    """Return every PlotJuggler curve and every Foxglove path."""
    root = ElementTree.parse(CONFIG / 'plotjuggler.xml').getroot()
    made = {snippet.get('name') for snippet in root.iter('snippet')}
    curves = {curve.get('name') for curve in root.iter('curve')} - made
    for snippet in root.iter('snippet'):
        curves.add(snippet.find('linked_source').text)
        curves |= {source.text for source in snippet.find('additional_sources')}
    panels = json.loads((CONFIG / 'foxglove.json').read_text())['configById'].values()
    paths = {path['value'] for panel in panels for path in panel.get('paths', ())}
    return curves, paths | {panel['topicPath'] for panel in panels if 'topicPath' in panel}


def field_type(message, names):
    """Return the ROS type of a field; its names may have an index."""
    name, *rest = names
    kind = message.get_fields_and_field_types()[re.sub(r'\[.*\]$', '', name)]
    sequence = re.fullmatch(r'sequence<(.*)>', kind)
    assert bool(sequence) == ('[' in name), f'{name} is {kind}'
    kind = sequence[1] if sequence else kind
    if not rest:
        return kind
    package, _, name = kind.partition('/')
    return field_type(getattr(importlib.import_module(f'{package}.msg'), name), rest)


def split_topic(text, separator):
    """Return a layout's topic with its type, and the fields behind it."""
    topic = next(topic for topic in TOPICS if text.startswith(topic + separator))
    return TOPICS[topic], text[len(topic) + 1:]


@pytest.fixture(scope='module')
def keys():
    """Return the diagnostic keys of every node that has ever had every cause."""
    rig, report = rig_of(8.0), LoopReport()
    for result in rig.run(3):
        report.note(result)
    for cause in Cause:
        report._ages.add(cause.value, 10.0)
    _, values = report.report(rig.loop)
    camera = SimpleNamespace(
        received=1, written=1, rejected=0, superseded=0, _reported=(0, 0), _last_error='')
    return {
        '/reasoning_node': {*values, 'cpu_percent'},
        '/camera_node': {*CameraNode._report(camera)[2], 'cpu_percent'},
        'status': set(report.status()[1]),
    }


def test_every_curve_of_plotjuggler_is_a_number_that_is_published(keys):
    curves, _ = layouts()
    assert len(curves) > 20
    for curve in curves:
        message, rest = split_topic(curve, '/')
        if message is DiagnosticArray:  # PlotJuggler: topic/name/key; names begin with a slash
            node, key = re.fullmatch(r'(/\w+)/(.*)', rest).groups()
            assert key in keys[node], curve
        elif message is JointState:  # and topic/joint/quantity
            joint, quantity = rest.split('/')
            assert joint in JOINT_NAMES and quantity in ('position', 'velocity'), curve
        else:
            assert re.fullmatch(PLOTTED, field_type(message, rest.split('/'))), curve


def test_every_path_of_foxglove_is_a_field_that_is_published(keys):
    _, paths = layouts()
    assert len(paths) > 12
    for path in paths:
        message, rest = split_topic(path, '.')
        filters = dict(re.findall(r'\{(\w+)=="([^"]*)"\}', rest))
        plain = re.sub(r'\{[^}]*\}', '', rest)
        assert field_type(message, plain.split('.')), path
        if 'key' in filters:
            assert filters['key'] in keys[filters.get('name', 'status')], path


def test_the_panels_of_foxglove_are_all_in_its_layout_once_and_name_published_topics():
    layout = json.loads((CONFIG / 'foxglove.json').read_text())
    shown = []

    def visit(node):
        if isinstance(node, str):
            return shown.append(node)
        assert node['direction'] in ('row', 'column') and 0 < node['splitPercentage'] < 100
        return [visit(node[side]) for side in ('first', 'second')]

    visit(layout['layout'])
    assert sorted(shown) == sorted(layout['configById'])
    for panel in layout['configById'].values():
        topics = [panel.get('topicToRender'), panel.get('imageMode', {}).get('imageTopic')]
        assert set(topics) - {None} <= set(TOPICS)


def test_all_that_a_robot_team_looks_at_is_in_both_layouts():
    curves, paths = layouts()
    for names in (curves, paths):
        for topic in ('/action', '/diagnostics', '/reasoning_node/observation',
                      '/reasoning_node/status', '/joint_states'):  # fmt: skip
            assert any(name.startswith(topic) for name in names), topic
        assert any('observation_age_p99_ms' in name for name in names)


def test_plotjuggler_computes_the_age_from_the_two_stamps():
    root = ElementTree.parse(CONFIG / 'plotjuggler.xml').getroot()
    snippet = root.find('.//snippet')
    sources = [snippet.find('linked_source').text,
               *(source.text for source in snippet.find('additional_sources'))]  # fmt: skip
    values = {'header/stamp/sec': 12, 'header/stamp/nanosec': 5_000_000,
              'time_ref/sec': 11, 'time_ref/nanosec': 990_000_000}  # fmt: skip
    given = [next(v for name, v in values.items() if source.endswith(name)) for source in sources]
    expression = snippet.find('function').text.removeprefix('return ')
    words = dict(zip(('value', 'v1', 'v2', 'v3'), given))
    for name, value in words.items():
        expression = re.sub(rf'\b{name}\b', str(value), expression)
    assert re.fullmatch(r'1000 \* \((\d+) - (\d+)\) \+ \((\d+) - (\d+)\) / 1000000', expression)
    numbers = [int(number) for number in re.findall(r'\((\d+) - (\d+)\)', expression)[0]]
    nanoseconds = [int(number) for number in re.findall(r'\((\d+) - (\d+)\)', expression)[1]]
    age_ms = 1000 * (numbers[0] - numbers[1]) + (nanoseconds[0] - nanoseconds[1]) / 1e6
    assert age_ms == 15
