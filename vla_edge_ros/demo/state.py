"""What a run looks like from outside: diagnostics, heartbeats and observation stamps."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

SIM, CAMERA, REASONING = 'sim_node', 'camera_node', 'reasoning_node'
NODES = (REASONING, CAMERA, SIM)
AGES_SHOWN = 300


@dataclass(slots=True)
class RunState:
    """
    Everything the view shows and the orchestrator decides by; fed by a monitor.

    ``messages`` and ``values`` hold the newest diagnostics by node, ``cpu_percent`` the use of
    one core.
    """

    messages: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, str]] = field(default_factory=dict)
    ages_ms: deque[float] = field(default_factory=lambda: deque(maxlen=AGES_SHOWN))
    causes: Counter[str] = field(default_factory=Counter)
    cpu_percent: dict[str, float] = field(default_factory=dict)

    def on_status(self, name: str, message: str, values: Mapping[str, str]) -> None:
        """Take one diagnostic status or heartbeat; those of other nodes are ignored."""
        node = name.rsplit('/', 1)[-1]
        if node in NODES:
            self.messages[node] = message
            self.values.setdefault(node, {}).update(values)

    def on_observation(self, action_ns: int, image_ns: int, cause: str) -> None:
        """Take the stamps of one published action, ROS time, ns."""
        self.causes[cause] += 1
        if image_ns > 0:
            self.ages_ms.append((action_ns - image_ns) / 1e6)

    def value(self, node: str, key: str, default: str = '') -> str:
        """Return one diagnostic value of a node as text."""
        return self.values.get(node, {}).get(key, default)

    def count(self, node: str, key: str) -> int:
        """Return one diagnostic counter of a node, 0 before its first report."""
        return int(self.value(node, key, '0'))

    @property
    def acting(self) -> bool:
        """True once an action was published."""
        return bool(self.causes)

    @property
    def camera_stopped(self) -> bool:
        """True once the simulator has reported the end of its run."""
        return self.value(SIM, 'running') == 'False'

    @property
    def camera_counts(self) -> tuple[int, int]:
        """Frames published by the simulator and received by the camera node."""
        return self.count(SIM, 'published'), self.count(CAMERA, 'received')

    def age_percentiles(self) -> tuple[float, float, float] | None:
        """Return p50, p95 and p99 of the newest observation ages, ms."""
        if not self.ages_ms:
            return None
        return tuple(np.percentile(self.ages_ms, (50, 95, 99)).tolist())
