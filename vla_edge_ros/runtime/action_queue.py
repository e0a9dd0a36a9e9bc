"""
The fallback ladder: which action a tick publishes when the policy has none ready.

fresh → the rest of the last chunk, by the time that passed → hold the last action → safe action.
The queue does not know whether an action is a velocity or a position; zeros are published only
where ``safe_action`` asks for them. Time here is the scheduled time of the ticks, so that jitter
of the host never moves an index.
"""

from dataclasses import dataclass
from enum import Enum
import math
from typing import NamedTuple

import numpy as np

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.policy.action_tokens import ActionChunk


@dataclass(frozen=True, slots=True)
class ActionQueueParameters:
    """When old actions stop being good enough, and what follows."""

    max_consecutive_fallbacks: int = parameter(
        15, 'Ticks in a row that hold the last action before the safe action', range=(0, 100_000)
    )
    max_action_age_ms: float = parameter(
        1000.0,
        'Time since the tick that began a chunk after which its actions are not used',
        unit='ms',
        range=(1.0, 3.6e6),
    )
    safe_action: str = parameter(
        'hold',
        'What follows when no action is good enough, and during an operator hold',
        choices=('hold', 'zeros', 'stop_publishing'),
    )
    initial_action: list = parameter(
        [], 'Action published before the first one of the policy; empty publishes nothing'
    )

    def __post_init__(self):
        """Check every value."""
        validate(self)
        if not all(
            type(value) in (int, float) and math.isfinite(value) for value in self.initial_action
        ):
            rule = 'must be a list of finite numbers'
            raise ConfigError('initial_action', rule, self.initial_action)


class Cause(str, Enum):
    """Where a published action comes from, or why none is published."""

    FRESH = 'fresh'
    LATE = 'late'
    QUEUED = 'queued'
    HOLD = 'hold'
    SAFE_HOLD = 'safe_hold'
    SAFE_ZEROS = 'safe_zeros'
    SAFE_STOP = 'safe_stop'
    OPERATOR_HOLD = 'operator_hold'
    INITIAL = 'initial'
    WAITING = 'waiting'


PLANNED_CAUSES = (Cause.FRESH, Cause.LATE, Cause.QUEUED)
"""Only these go on to the next rows of their chunk; any other holds one action."""


class QueuedAction(NamedTuple):
    """
    What one tick publishes.

    Parameters
    ----------
    action : float32 [action_dim], optional
        None publishes nothing.
    cause : Cause
        Where it comes from.
    chunk : ActionChunk, optional
        The chunk the action was taken from, whichever tick it was first published in.
    chunk_index : int, optional
        Its row.

    """

    action: np.ndarray | None
    cause: Cause
    chunk: ActionChunk | None = None
    chunk_index: int | None = None


class ActionQueue:
    """
    Hold the newest chunk and walk down the ladder; one thread calls it.

    Attributes
    ----------
    parameters : ActionQueueParameters
        May be replaced between two calls.

    """

    def __init__(self, parameters: ActionQueueParameters | None = None):
        self.parameters = parameters or ActionQueueParameters()
        self.held = False
        self.reset()

    def reset(self) -> None:
        """Forget every action, as before the first one; an operator hold stays."""
        self._chunk: ActionChunk | None = None
        self._base_ns = 0
        self._arrival: Cause | None = None
        self._holds = 0
        self._last: QueuedAction | None = None
        self._usable = False

    def set_hold(self, engaged: bool) -> None:
        """Engage or release the operator hold; the chunk at hand is not taken up again."""
        self.held = engaged
        self._usable = False

    def push(self, chunk: ActionChunk, base_ns: int, late: bool = False) -> None:
        """
        Take a new chunk, which supersedes the last one.

        Parameters
        ----------
        chunk : ActionChunk
            Actions in time order.
        base_ns : int
            Scheduled time of the tick whose observation the chunk was computed from, ns.
        late : bool
            True when it missed its deadline.

        """
        self._chunk = chunk
        self._base_ns = base_ns
        self._arrival = Cause.LATE if late else Cause.FRESH
        self._holds = 0
        self._usable = True

    def take(self, now_ns: int) -> QueuedAction:
        """Return what the tick scheduled at ``now_ns`` publishes."""
        if self.held:
            return self._safe(Cause.OPERATOR_HOLD)
        chunk, parameters = self._chunk, self.parameters
        if not self._usable:
            return self._safe()
        age_ns = now_ns - self._base_ns
        if age_ns > parameters.max_action_age_ms * NS_PER_MS:
            self._usable = False
            return self._safe()

        index = max(0, (age_ns + chunk.step_ns // 2) // chunk.step_ns)
        last_index = len(chunk.values) - 1
        cause, self._arrival = self._arrival, None
        if cause is None:
            cause = Cause.QUEUED if index <= last_index else Cause.HOLD
        if cause is Cause.HOLD:
            self._holds += 1
            if self._holds > parameters.max_consecutive_fallbacks:
                self._usable = False
                return self._safe()
        # A chunk that arrives wholly in the past still knows more than the one before it.
        index = min(index, last_index)
        self._last = QueuedAction(chunk.values[index], cause, chunk, index)
        return self._last

    def _safe(self, cause: Cause | None = None) -> QueuedAction:
        if self._last is None:
            initial = self.parameters.initial_action
            action = np.array(initial, np.float32) if initial else None
            return QueuedAction(action, cause or (Cause.INITIAL if initial else Cause.WAITING))
        safe_action = self.parameters.safe_action
        if safe_action == 'hold':
            return self._last._replace(cause=cause or Cause.SAFE_HOLD)
        if safe_action == 'zeros':
            # What was published last is what a hold would repeat from now on.
            self._last = QueuedAction(np.zeros_like(self._last.action), Cause.SAFE_ZEROS)
            return self._last._replace(cause=cause or Cause.SAFE_ZEROS)
        return QueuedAction(None, cause or Cause.SAFE_STOP)
