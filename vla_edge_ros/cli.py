"""Console script ``vla-edge``; a subcommand is imported only when it is asked for."""

import argparse
from collections.abc import Sequence
import importlib
import os
import signal
import sys

from vla_edge_ros.errors import VlaEdgeError

# name -> (module with add_arguments and run, help)
COMMANDS = {
    'demo': ('vla_edge_ros.demo.demo', 'run the whole system for a while and report on it'),
    'sim': ('vla_edge_ros.sim.episode', 'run episodes in virtual time, without ROS'),
    'replay': ('vla_edge_ros.replay.replay', 'run a recorded bag through the policy'),
    'train': ('vla_edge_ros.lab.train.train', 'train the embedded default policy'),
    'doctor': ('vla_edge_ros.doctor', 'check this machine and measure the policy on it'),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Run one subcommand and return its exit code.

    What a user can fix ends with one line on stderr and code 2; SIGINT and SIGTERM are an
    ordinary way to end and give code 0.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _dispatch(sys.argv[1:] if arguments is None else list(arguments))
    except VlaEdgeError as error:
        print(f'vla-edge: {error}', file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader went away, as with `vla-edge doctor | head`; keep the exit quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 0


def _dispatch(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog='vla-edge', description='Vision-language-action policies under a deadline.')
    commands = parser.add_subparsers(dest='command', required=True, metavar='command')
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=f'{text[0].upper()}{text[1:]}.')
        if name in words[:1]:
            host = importlib.import_module(module)
            host.add_arguments(command)
            command.set_defaults(run=host.run)
    options = parser.parse_args(words)
    return options.run(options) or 0


if __name__ == '__main__':
    sys.exit(main())
