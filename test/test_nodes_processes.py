"""The nodes as plain processes over DDS: the whole loop, and its end at any moment."""

from contextlib import contextmanager
from pathlib import Path
import signal
import subprocess
import sys
import time

from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState
import numpy as np
import pytest
from rcl_interfaces.msg import Parameter, ParameterType, ParameterValue
from rcl_interfaces.srv import SetParametersAtomically
from ros_testing import diagnostic_values, ros_graph
from sensor_msgs.msg import TimeReference

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.nodes.conversions import to_ns
from vla_edge_ros.nodes.environment import (
    free_domain_id,
    node_command,
    node_environment,
    start_process,
)
from vla_edge_ros.telemetry.trace import read_trace

HERE = Path(__file__).resolve().parent
NODES = ('camera_node', 'reasoning_node', 'sim_node')


def fake_reasoning_command(**values):
    """Return the command of the reasoning node around the fake policy."""
    command = node_command('reasoning_node', **values)
    return [command[0], str(HERE / 'fake_policy.py'), *command[3:]]


class Child:
    """A process whose output is kept and whose shared memory is looked after."""

    def __init__(self, command, environment, log):
        self.log = log
        with open(log, 'wb') as output:
            self.process = start_process(
                command, environment, stdout=output, stderr=subprocess.STDOUT)

    def output(self):
        return self.log.read_text()

    def segments(self):
        """Return the shared memory this process has mapped, its own and that of its peers."""
        try:
            maps = Path(f'/proc/{self.process.pid}/maps').read_text()
        except OSError:
            return set()
        names = {line.split()[-1] for line in maps.splitlines() if '/dev/shm/' in line}
        # LTTng's two files and Fast DDS's ports up to 7400 are shared by all of the machine.
        return {Path(name) for name in names if 'lttng' not in name and 'port70' not in name}

    def check_end(self):
        """Check that the process, once signalled, ends clean and quiet."""
        code = self.process.wait(15)
        assert code == 0, f'ended with {code}:\n{self.output()}'
        assert 'Traceback' not in self.output() and 'xception' not in self.output()


def end_all(children, number):
    """
    End all processes of a domain; return what they should have removed of shared memory.

    All at once, as Ctrl-C does: of nodes that end one after the other while one still starts, the
    later may open Fast DDS's port of the earlier anew and leave it.
    """
    segments = set().union(*(child.segments() for child in children))
    for child in children:
        child.process.send_signal(number)
    for child in children:
        child.check_end()
    return {segment for segment in segments if segment.exists()}


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a command and ends it with the test."""
    children = []

    def start(name, command, environment):
        child = Child(command, environment, tmp_path / f'{name}{len(children)}.log')
        children.append(child)
        return child

    yield start
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
            child.process.wait()


@pytest.fixture
def environment(tmp_path):
    return node_environment(free_domain_id(), tmp_path)


def refused_ticks(diagnostics):
    """Return how many ticks admission has refused for lack of time so far."""
    values = diagnostic_values(diagnostics, 'reasoning_node')
    reasons = ('reason.over_budget', 'reason.decode_over_budget')
    return sum(int(values.get(reason, 0)) for reason in reasons)


def require_gl():
    from vla_edge_ros.sim.world import World
    world = World()
    try:
        world.render()
    except BackendUnavailable as error:
        pytest.skip(f'no GL to render with: {error}')
    finally:
        world.close()


@pytest.mark.parametrize('name', NODES)
def test_help_tells_that_it_is_a_ros_node_and_starts_none(name, environment):
    for word in ('-h', '--help'):
        command = [sys.executable, '-m', f'vla_edge_ros.nodes.{name}', word]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0 and not done.stderr
        assert f'usage: {name} [--ros-args -p NAME:=VALUE' in done.stdout


@pytest.mark.parametrize('words', [['--width', '96'], ['stray'], ['stray', '--ros-args']])
def test_arguments_that_are_none_of_ros_are_refused_in_one_line(words, environment):
    command = [sys.executable, '-m', 'vla_edge_ros.nodes.camera_node', *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith('camera_node: arguments must stand behind --ros-args')
    assert done.stderr.count('\n') == 1 and words[0] in done.stderr


@contextmanager
def running_system(tmp_path, start):
    """Yield graph, children and heard references with all three nodes acting."""
    require_gl()
    with ros_graph(tmp_path) as graph:
        references = graph.listen(TimeReference, '/reasoning_node/observation')
        commands = {
            'camera_node': node_command('camera_node', width=24, height=20),
            'reasoning_node': fake_reasoning_command(
                autostart=True, trace_path=str(tmp_path / 'trace.csv'), safe_action='zeros'),
            'sim_node': node_command('sim_node', wait_for_subscribers=1),
        }
        children = {
            name: start(name, command, graph.environment) for name, command in commands.items()
        }
        assert graph.spin_until(lambda: any(ref.source == 'fresh' for ref in references), 60.0), (
            [child.output() for child in children.values()])
        yield graph, children, references, commands


def test_the_whole_loop_keeps_its_rate_survives_its_camera_and_ends_clean(tmp_path, start):
    with running_system(tmp_path, start) as (graph, children, references, commands):
        diagnostics = graph.listen(DiagnosticArray, '/diagnostics')
        begin = len(references)
        assert graph.spin_until(lambda: len(references) >= begin + 90)
        stamps_ns = [to_ns(ref.header.stamp) for ref in references[begin:begin + 90]]
        # The median stands a busy machine, on which single releases are skipped.
        assert 1e9 / np.median(np.diff(stamps_ns)) == pytest.approx(30.0, abs=0.5)

        camera = children['camera_node']
        killed = camera.segments()
        camera.process.kill()
        assert graph.spin_until(lambda: references[-1].source == 'safe_zeros')
        children['camera_node'] = start('camera_node', commands['camera_node'], graph.environment)
        assert graph.spin_until(lambda: references[-1].source == 'fresh')

        request = SetParametersAtomically.Request(parameters=[Parameter(
            name='margin_ms',
            value=ParameterValue(type=ParameterType.PARAMETER_DOUBLE, double_value=32.0))])
        name = '/reasoning_node/set_parameters_atomically'
        assert graph.call(SetParametersAtomically, name, request).result.successful
        assert graph.spin_until(lambda: refused_ticks(diagnostics) > 3)
        request.parameters[0].value.double_value = 2000.0
        refused = graph.call(SetParametersAtomically, name, request).result
        assert not refused.successful and 'margin_ms' in refused.reason

        assert all(diagnostic_values(diagnostics, node) for node in NODES)
        left = end_all([children[node] for node in sorted(NODES, reverse=True)], signal.SIGINT)
    # What a killed process leaves is known and Fast DDS's; our own buffer was taken over.
    left = {segment for segment in left if segment.exists()}
    assert not left - killed and not [path for path in left if path.name.startswith('vla_edge')]
    for segment in left:
        segment.unlink()
    trace = read_trace(tmp_path / 'trace.csv')
    assert (np.diff(trace['tick']) == 1).all() and (trace['cause'] != '').all()


@pytest.mark.parametrize('delay_s', [0.0, 0.1, 0.3, 0.8, 2.0])
def test_a_signal_at_any_moment_of_the_start_ends_every_node_clean(start, environment, delay_s):
    number = signal.SIGTERM if delay_s in (0.1, 0.8) else signal.SIGINT
    commands = {name: node_command(name) for name in ('camera_node', 'sim_node')}
    commands['reasoning_node'] = fake_reasoning_command(autostart=True)
    children = [start(name, command, environment) for name, command in commands.items()]
    time.sleep(delay_s)
    children = [child for child in children if 'SimulatorNode:' not in child.output()]
    assert not end_all(children, number)


def test_a_domain_with_what_a_killed_process_left_is_avoided_while_there_are_others(tmp_path):
    for domain_id in range(1, 102):
        if domain_id != 58:
            name = 'sem.fastdds_port{}_mutex' if domain_id % 2 else 'fastrtps_port{}'
            (tmp_path / name.format(7400 + 250 * domain_id + 11)).touch()
    assert free_domain_id(tmp_path) == 58
    (tmp_path / 'fastrtps_port21900').touch()
    assert 1 <= free_domain_id(tmp_path) <= 101


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts_loading_and_compiling(start, environment, number):
    command = fake_reasoning_command(autostart=True)
    child = start('reasoning_node', command, environment | {'LOAD_FOREVER': '1'})
    end_s = time.monotonic() + 30.0
    while 'loading' not in child.output():
        assert time.monotonic() < end_s and child.process.poll() is None, child.output()
        time.sleep(0.05)
    assert not end_all([child], number)


def test_an_interruption_that_c_code_prints_and_drops_is_quiet_and_comes_again():
    program = (
        'import ctypes, time\n'
        'from vla_edge_ros.nodes.process import Interrupted, StopRequest\n'
        'stop = StopRequest()\n'
        'stop.install()\n'
        'try:\n'
        '    with stop.interruptible():\n'
        '        ctypes.pythonapi.PyRun_SimpleString(b"import signal; signal.raise_signal(2)")\n'
        '        time.sleep(60)\n'
        'except Interrupted:\n'
        '    print("ended")\n'
    )
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, 'ended\n', '')


@pytest.mark.parametrize('node', NODES)
def test_an_unknown_parameter_is_one_line_and_exit_code_1(environment, node):
    done = subprocess.run(
        node_command(node, widht=3), env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'widht is not a parameter of ' + node in done.stderr
    assert 'Traceback' not in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_missing_library_is_one_line_and_exit_code_1(environment, tmp_path):
    (tmp_path / 'rclpy.py').write_text('raise ModuleNotFoundError("No module named \'rclpy\'")')
    environment['PYTHONPATH'] = f'{tmp_path}:{environment.get("PYTHONPATH", "")}'
    done = subprocess.run(
        node_command('camera_node'), env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr == "CameraNode: cannot be loaded: No module named 'rclpy'\n"


@pytest.mark.parametrize('words', [
    ['--params-file', '/nowhere.yaml'], ['--bogus'], ['-p', 'width']])
def test_wrong_ros_arguments_are_one_line_and_exit_code_1(words, environment):
    command = node_command('camera_node', *words)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and words[-1] in done.stderr
    assert done.stderr.startswith('camera_node: wrong ROS arguments: ')
    assert 'Traceback' not in done.stderr


def test_with_autostart_a_missing_checkpoint_is_one_line_and_exit_code_1(environment):
    command = node_command('reasoning_node', autostart=True, policy='/nowhere')
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert 'cannot configure: policy must be a folder' in done.stderr and '/nowhere' in done.stderr
    assert done.stderr.count('\n') == 1, done.stderr


def test_without_autostart_a_missing_checkpoint_leaves_the_node_configurable(start, environment):
    child = start('reasoning_node', node_command('reasoning_node', policy='/nowhere'), environment)
    with ros_graph(child.log.parent, int(environment['ROS_DOMAIN_ID'])) as graph:
        request = ChangeState.Request(transition=Transition(id=Transition.TRANSITION_CONFIGURE))
        for _ in range(2):
            name = '/reasoning_node/change_state'
            assert not graph.call(ChangeState, name, request).success
        # Each call was refused for itself; one whose answer got lost was made twice.
        assert child.output().count('cannot configure') >= 2
        child.process.send_signal(signal.SIGINT)
        child.check_end()


def test_the_entry_modules_are_light_so_that_signals_are_handled_from_the_start():
    program = (
        'import sys\n'
        'from vla_edge_ros.nodes import camera_node, reasoning_node, sim_node\n'
        'heavy = {"rclpy", "numpy", "cv2", "numba", "mujoco", "transformers"}\n'
        'print(sorted(heavy & set(sys.modules)))\n'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr
