"""Executable ``sim_node``; light to import, so that signals are handled from the start."""

import sys

from vla_edge_ros.nodes.process import run_node


def main() -> None:
    """Run the simulator node until SIGINT or SIGTERM."""
    sys.exit(run_node('vla_edge_ros.nodes.simulator', 'SimulatorNode'))


if __name__ == '__main__':
    main()
