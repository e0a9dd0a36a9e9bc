"""Console script ``vla-edge``; a subcommand is imported only when it is asked for."""

import argparse
from collections.abc import Sequence
import importlib
import os
import sys

from vla_edge_ros.errors import VlaEdgeError
from vla_edge_ros.nodes.process import Interrupted, StopRequest

# name -> (module with add_arguments and run, help)
COMMANDS = {
    'demo': ('vla_edge_ros.demo.demo', 'run the whole system for a while and report on it'),
    'sim': ('vla_edge_ros.sim.episode', 'run episodes in virtual time, without ROS'),
    'sweep': ('vla_edge_ros.lab.sweep.command', 'run a grid of episodes on all cores or on Ray'),
    'report': ('vla_edge_ros.lab.report_command', 'write a page from a sweep or from traces'),
    'replay': ('vla_edge_ros.replay.replay', 'run a recorded bag through the policy'),
    'plan': ('vla_edge_ros.lab.plan_command', 'tell whether a deadline holds on a device'),
    'profile': ('vla_edge_ros.lab.profile_command', 'tell where the time of a run goes, and why'),
    'bench': ('vla_edge_ros.lab.bench_engine', 'measure the CUDA engine on a GPU'),
    'parity': ('vla_edge_ros.lab.parity', 'compare the decoder with Hugging Face'),
    'train': ('vla_edge_ros.lab.train.train', 'train the embedded default policy'),
    'doctor': ('vla_edge_ros.doctor', 'check this machine and measure the policy on it'),
}


def main() -> int:
    """
    Run the console script and return its exit code.

    SIGINT is taken over even where it came ignored, as it does to what a script starts in the
    background: a robot's ``kill -INT`` has to work there too.
    """
    stop = StopRequest()
    stop.install()
    try:
        return run(sys.argv[1:], stop)
    finally:
        stop.ignore_further()


def run(words: Sequence[str], stop: StopRequest) -> int:
    """
    Run one subcommand and return its exit code.

    What a user can fix ends with one line on stderr and code 2; a signal is an ordinary way to
    end and gives code 0.
    """
    try:
        return _dispatch(list(words), stop)
    except VlaEdgeError as error:
        print(f'vla-edge: {error}', file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away, as with `vla-edge doctor | head`; keep the exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Interrupted:
        print('vla-edge: stopped', file=sys.stderr)
        return 0


def _dispatch(words: list[str], stop: StopRequest) -> int:
    parser = argparse.ArgumentParser(
        prog='vla-edge', description='Vision-language-action policies under a deadline.')
    commands = parser.add_subparsers(dest='command', required=True, metavar='command')
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
        if name in words[:1]:
            with stop.interruptible():
                host = importlib.import_module(module)
            host.add_arguments(command)
            command.set_defaults(run=host.run)
    options = parser.parse_args(words)
    return options.run(options, stop) or 0


if __name__ == '__main__':
    sys.exit(main())
