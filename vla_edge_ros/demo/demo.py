"""
``vla-edge demo``: the whole system for a while, then what it did.

Camera, reasoning and simulator run as processes of their own and talk DDS, as on a robot; this
process only watches. Counting starts with the first action. At the end the reasoning node is
deactivated and the camera stops a moment later, so that no tick is counted that had no camera to
look at; then all nodes end together, which leaves no Fast DDS files behind.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import sys
import time

from vla_edge_ros.demo.options import check_options
from vla_edge_ros.demo.processes import CpuMeter, NodeFailed, NodeProcesses
from vla_edge_ros.demo.state import CAMERA, REASONING, RunState, SIM
from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.nodes.environment import (
    free_domain_id,
    node_command,
    node_environment,
    share_directory,
)
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import FOLDERS_ARE_MADE
from vla_edge_ros.telemetry.energy import EnergyMeter
from vla_edge_ros.telemetry.energy_sources import find_sources

START_LIMIT_S = 120.0
"""Loading and compiling on a slow machine."""
FIRST_ACTION_LIMIT_S = 10.0
"""From active to the first action."""
CAMERA_LEAD_S = 1.0
"""How much longer than the reasoning node the camera runs."""
SETTLE_LIMIT_S = 4.0
"""Two reports of each node, for counts that agree."""
DEACTIVATE_LIMIT_S = 10.0
POLL_S = 0.05
PERIOD_MS = 1000.0 / 30.0
FILM = 'robot.webp'
OUTPUTS = ('summary.json', 'report.html', FILM, 'trace.csv', 'states.npz')
TUNING = 'tiny.yaml'

Wait = Callable[[Callable[[], bool], float], bool]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge demo``."""
    parser.add_argument('--seconds', type=float, default=30.0, help='length of the run')
    parser.add_argument('--out', type=Path, default=Path('out/demo'),
                        help=f'folder for results; {FOLDERS_ARE_MADE}')
    parser.add_argument('--instruction',
                        help='one instruction for all episodes; otherwise drawn anew each time')
    parser.add_argument('--policy', default='', metavar='FOLDER',
                        help='checkpoint; the embedded one by default')
    parser.add_argument('--record', type=Path, metavar='BAG', help='also record a rosbag2 there')
    parser.add_argument('--seed', type=int, default=0, help='seed of world and instructions')
    parser.add_argument('--no-video', action='store_true', help='draw no film afterwards')


def run(options: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge demo``."""
    with stop.interruptible():
        check_options(options, OUTPUTS)
    try:
        demo = Demo(options, stop)
        demo.run_nodes()
        demo.write_results()
    except NodeFailed as error:
        print(f'vla-edge: {error}', file=sys.stderr)
        return 1
    return 0


class Demo:
    """
    One run.

    Parameters
    ----------
    options : Namespace
        As :func:`add_arguments` declares them.
    stop : StopRequest
        Looked at while the nodes run.

    """

    def __init__(self, options: argparse.Namespace, stop: StopRequest):
        self._options = options
        self._stop = stop
        self._state = RunState()
        self._out: Path = options.out.resolve()
        self._trace = self._out / 'trace.csv'
        self._states = self._out / 'states.npz'
        self._out.mkdir(parents=True, exist_ok=True)
        for name in OUTPUTS:
            (self._out / name).unlink(missing_ok=True)
        # A checkpoint of the user's own comes with its own needs.
        tuning = share_directory() / 'config' / TUNING
        self._tuning = () if options.policy else ('--params-file', str(tuning))
        self._measured: dict = {}
        self._successes = 0
        self._energy: EnergyMeter | None = None

    def run_nodes(self) -> None:
        """
        Start the nodes, watch them, end them.

        Raises
        ------
        NodeFailed
            A node ended by itself, or no action came.
        Interrupted
            A signal came; the nodes are ended all the same.

        """
        logs = self._out / 'log'
        logs.mkdir(exist_ok=True)
        environment = node_environment(free_domain_id(), logs)
        # This process listens on the same domain.
        os.environ.update(environment)
        with self._stop.interruptible():
            try:
                from vla_edge_ros.demo.live_view import LiveView
                from vla_edge_ros.demo.monitor import Monitor
            except ImportError as error:
                rule = "must be importable: source ROS 2, or pip install '.[ros]'"
                raise BackendUnavailable('rclpy', rule, str(error)) from error

        # Steady time is one for all processes, so that it is the trace's.
        self._energy = EnergyMeter(find_sources())
        with self._energy, NodeProcesses(environment, logs) as nodes:
            nodes.start(CAMERA, node_command(CAMERA, *self._tuning))
            with (
                Monitor(self._state, self._options.record) as monitor,
                LiveView(self._state, self._options.seconds) as view,
            ):
                def wait(done: Callable[[], bool], limit_s: float) -> bool:
                    until = time.monotonic() + limit_s
                    while not done():
                        self._stop.check()
                        if time.monotonic() > until:
                            return False
                        nodes.check()
                        monitor.listen(POLL_S)
                        view.refresh()
                    return True

                self._watch(nodes, wait, view, monitor)
            nodes.end_all()

    def _watch(self, nodes: NodeProcesses, wait: Wait, view, monitor) -> None:
        state, options, seconds = self._state, self._options, self._options.seconds
        # Each node starts when the one it meets is there: a subscriber still busy loading misses
        # the first images, and a loop without a camera has ticks with nothing to look at.
        wait(lambda: CAMERA in state.messages, START_LIMIT_S)
        nodes.start(SIM, node_command(
            SIM, *self._tuning, seed=options.seed, instruction=options.instruction or '',
            wait_for_subscribers=2 if options.record else 1, run_seconds=seconds + CAMERA_LEAD_S,
            state_log_path=str(self._states)))
        if not wait(lambda: state.count(CAMERA, 'received') > 0, START_LIMIT_S):
            raise NodeFailed(nodes.describe(CAMERA, 'received no image'))
        nodes.start(REASONING, node_command(
            REASONING, *self._tuning, autostart=True, trace_path=str(self._trace),
            policy=options.policy))

        def settled() -> bool:
            return state.acting or bool(state.value(REASONING, 'last_error'))

        wait(lambda: settled() or state.messages.get(REASONING) == 'active', START_LIMIT_S)
        wait(settled, FIRST_ACTION_LIMIT_S)
        if not state.acting:
            values = (state.value(REASONING, key) for key in ('last_error', 'reason'))
            reason = next(filter(None, values), 'not active')
            raise NodeFailed(nodes.describe(REASONING, f'gave no action ({reason})'))
        meter = CpuMeter(nodes)
        view.start_clock()
        end_s = time.monotonic() + seconds

        def passed() -> bool:
            state.cpu_percent = meter.read()
            return time.monotonic() >= end_s

        wait(passed, seconds + 1.0)
        episodes, successes = state.count(SIM, 'episodes'), state.count(SIM, 'successes')
        view.stop_clock()
        deactivated = monitor.deactivate_reasoning()
        if not wait(deactivated.done, DEACTIVATE_LIMIT_S) or not deactivated.result().success:
            raise NodeFailed(nodes.describe(REASONING, 'was not deactivated'))
        wait(lambda: state.camera_stopped, CAMERA_LEAD_S + SETTLE_LIMIT_S)
        wait(lambda: state.camera_counts[0] == state.camera_counts[1], SETTLE_LIMIT_S)
        published, received = state.camera_counts
        self._successes = successes
        self._measured = {
            'camera': {'published': published, 'received': received},
            'episodes': episodes,
            'success_rate': successes / episodes if episodes else None,
            'cpu_percent': state.cpu_percent,
        }

    def write_results(self) -> None:
        """Write ``summary.json``, the film and ``report.html``."""
        with self._stop.interruptible():
            from vla_edge_ros.lab.record import environment_record
            from vla_edge_ros.lab.report import write_report
            from vla_edge_ros.telemetry.energy_summary import measured_energy
            from vla_edge_ros.telemetry.summary import summarize
            from vla_edge_ros.telemetry.trace import read_trace

        trace = read_trace(self._trace)
        energy = measured_energy(
            self._energy, trace, PERIOD_MS, self._successes, self._measured['episodes'])
        summary = summarize(trace, period_ms=PERIOD_MS, **self._measured, energy=energy)
        summary['record'] = environment_record()
        text = json.dumps(summary, indent=2)
        (self._out / 'summary.json').write_text(text + '\n', encoding='utf-8')
        with self._stop.interruptible():
            film = None
            if not self._options.no_video:
                from vla_edge_ros.sim.video import render_video

                print('drawing the film ...', flush=True)
                film = self._out / FILM
                render_video(self._states, self._trace, film, fps=15.0)
            write_report(self._out / 'report.html', summary, trace, film)
        print(f'wrote {self._options.out}/report.html, summary.json, trace.csv')
        if self._options.record:
            print(f'recorded {self._options.record}')
