"""Executable ``reasoning_node``; light to import, so that signals are handled from the start."""

import sys

from vla_edge_ros.nodes.process import run_node


def main() -> None:
    """Run the reasoning node until SIGINT or SIGTERM."""
    sys.exit(run_node('vla_edge_ros.nodes.reasoning', 'ReasoningNode'))


if __name__ == '__main__':
    main()
