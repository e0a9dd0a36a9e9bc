"""
The table of predictions in ``docs/lab.md``, computed from the device model.

``python -m vla_edge_ros.lab.plan_table docs/lab.md`` renews it in place.
"""

from collections.abc import Iterator
from pathlib import Path
import sys

from vla_edge_ros.lab.generated import renew
from vla_edge_ros.lab.plan import make_plan, P50, P99
from vla_edge_ros.runtime.admission import AdmissionParameters
from vla_edge_ros.runtime.devices import catalogue
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters

COLUMNS = (
    ('1.5B', 'random:1.5b', 'bf16'), ('1.5B, int8', 'random:1.5b', 'int8'),
    ('1.5B, int4', 'random:1.5b', 'int4'), ('0.5B', 'random:0.5b', 'bf16'),
    ('embedded policy', '', 'bf16'),
)
"""Heading, model and weights of each."""


def table() -> Iterator[str]:
    """Yield the lines of the table: a run's p50 and p99 on every device, behind a full cache."""
    yield f'| device | {" | ".join(heading for heading, *_ in COLUMNS)} |'
    yield '|---|' + '---|' * len(COLUMNS)
    loop, margin_ms = ControlLoopParameters(), AdmissionParameters().margin_ms
    for name, device in catalogue().devices.items():
        cells = []
        for _, model, weights in COLUMNS:
            plan = make_plan(model, device, weights, loop, margin_ms)
            text = f'{plan.run_ms(P50):.1f} / {plan.run_ms(P99):.1f}'
            cells.append(f'**{text}**' if plan.works else text)
        yield f'| `{name}` | {" | ".join(cells)} |'


if __name__ == '__main__':
    path = Path(sys.argv[1])
    path.write_text(renew(path.read_text(encoding='utf-8'), 'plans', table()), encoding='utf-8')
