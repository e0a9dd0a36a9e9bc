"""
The tables of ``docs/parameters.md``, generated from the declarations.

``python -m vla_edge_ros.lab.parameter_table docs/parameters.md`` renews them in place.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
import sys

from vla_edge_ros.lab.generated import renew
from vla_edge_ros.nodes.camera import CameraParameters, FrameBufferParameters
from vla_edge_ros.nodes.engine import PolicyParameters
from vla_edge_ros.nodes.realtime import RealtimeParameters
from vla_edge_ros.nodes.reasoning import ReasoningParameters
from vla_edge_ros.nodes.simulator import SimulatorParameters
from vla_edge_ros.parameters import describe
from vla_edge_ros.runtime.action_queue import ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoopParameters


def node_parameters() -> dict[str, Sequence[type]]:
    """Return the parameter sets of every node."""
    return {
        'camera_node': (CameraParameters, FrameBufferParameters),
        'reasoning_node': (
            ReasoningParameters, PolicyParameters, ControlLoopParameters, AdmissionParameters,
            ActionQueueParameters, FrameBufferParameters, RealtimeParameters),
        'sim_node': (SimulatorParameters,),
    }


def table(sets: Sequence[type]) -> Iterator[str]:
    """Yield the lines of one node's table; *live* marks what can be changed while it acts."""
    yield '| parameter | default | allowed | live | meaning |'
    yield '|---|---|---|---|---|'
    for parameters in sets:
        for name, default, metadata in describe(parameters):
            unit = f' {metadata["unit"]}' if metadata['unit'] else ''
            allowed = ''
            if metadata['range'] is not None:
                allowed = '{:,g} … {:,g}'.format(*metadata['range']) + unit
            elif metadata['choices']:
                allowed = ', '.join(f'`{choice}`' for choice in metadata['choices'])
            shown = str(default).lower() if isinstance(default, bool) else str(default) or "''"
            live = '' if metadata['read_only'] else 'yes'
            meaning = metadata['description'].rstrip('.')
            yield f'| `{name}` | `{shown}` | {allowed} | {live} | {meaning} |'


def tables() -> list[str]:
    """Return the lines of all tables, with a heading each."""
    lines = []
    for node, sets in node_parameters().items():
        lines += ['', f'#### {node}', '', *table(sets)]
    return lines[1:]


if __name__ == '__main__':
    path = Path(sys.argv[1])
    text = renew(path.read_text(encoding='utf-8'), 'parameters', tables())
    path.write_text(text, encoding='utf-8')
