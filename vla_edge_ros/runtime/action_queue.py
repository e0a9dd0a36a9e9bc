"""
The fallback ladder: which action a tick publishes when the policy has none ready.

fresh → the rest of the last chunk, by the time that passed → hold the last action → safe action.
The queue does not know whether an action is a velocity or a position; zeros are published only
where ``safe_action`` asks for them. Time here is the scheduled time of the ticks, so that jitter
of the host never moves an index.

Where two chunks meet, the actions that both have may be blended. The weight of the older one
falls as in the soft mask of real-time chunking (Black, Galliker and Levine 2025,
arXiv:2506.07339). There it guides a flow policy while it denoises; here it mixes finished
actions, which any policy allows and which is weaker: of two plans that pass an obstacle on
different sides the blend is a third one, through it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    BLENDED = 'blended'
    HOLD = 'hold'
    THINKING = 'thinking'
    SAFE_HOLD = 'safe_hold'
    SAFE_ZEROS = 'safe_zeros'
    SAFE_STOP = 'safe_stop'
    OPERATOR_HOLD = 'operator_hold'
    INITIAL = 'initial'
    WAITING = 'waiting'


PLANNED_CAUSES = (Cause.FRESH, Cause.LATE, Cause.QUEUED, Cause.BLENDED)
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
        The chunk the action was taken from, whichever tick it was first published in. Where two
        were blended, the stamp is the mean of their images' as the actions were weighted.
    chunk_index : int, optional
        Its row.

    """

    action: np.ndarray | None
    cause: Cause
    chunk: ActionChunk | None = None
    chunk_index: int | None = None


def blend_weights(shared: int) -> np.ndarray:
    """Return the weight of the older chunk in each of ``shared`` actions that two chunks have."""
    linear = np.arange(shared, 0, -1) / (shared + 1)
    return (linear * np.expm1(linear) / math.expm1(1)).astype(np.float32)


class ActionQueue:
    """
    Hold the newest chunk and walk down the ladder; one thread calls it.

    Attributes
    ----------
    parameters : ActionQueueParameters
        May be replaced between two calls.
    held : bool
        Whether the operator hold is engaged.
    ran_out : bool
        Whether a tick has found nothing left of the chunk at hand.

    """

    def __init__(self, parameters: ActionQueueParameters | None = None):
        self.parameters = parameters or ActionQueueParameters()
        self.held = False
        self.reset()

    def reset(self) -> None:
        """Forget every action, as before the first one; an operator hold stays."""
        self._chunk: ActionChunk | None = None
        self._stamps_ns: Sequence[int] = ()
        self._base_ns = self._observed_ns = 0
        self._arrival: Cause | None = None
        self._holds = 0
        self._last: QueuedAction | None = None
        self._usable = self.ran_out = False

    def set_hold(self, engaged: bool) -> None:
        """Engage or release the operator hold; the chunk at hand is not taken up again."""
        self.held = engaged
        self._usable = self.ran_out = False

    @property
    def rows(self) -> int:
        """Return how many actions the chunk at hand has in all."""
        return 0 if self._chunk is None else len(self._chunk.values)

    def remaining(self, now_ns: int) -> int:
        """Return how many actions of the chunk at hand the ticks from ``now_ns`` on will find."""
        return max(0, self.rows - self._index(now_ns)) if self._in_time(now_ns) else 0

    def ready(self, now_ns: int) -> bool:
        """Tell whether the tick scheduled at ``now_ns`` finds an action that is planned."""
        return self._in_time(now_ns) and (self._arrival is not None or self.remaining(now_ns) > 0)

    def push(
        self,
        chunk: ActionChunk,
        base_ns: int,
        late: bool = False,
        *,
        observed_ns: int | None = None,
        blend_from_ns: int | None = None,
    ) -> None:
        """
        Take a new chunk, which supersedes the last one.

        Parameters
        ----------
        chunk : ActionChunk
            Actions in time order.
        base_ns : int
            When its first row is due: the scheduled time of a tick, or between two, ns.
        late : bool
            True when it missed its deadline.
        observed_ns : int, optional
            Scheduled time of the tick whose observation the chunk was computed from, ns; left
            out, it is ``base_ns``.
        blend_from_ns : int, optional
            Blend the rows due from then on with those of the chunk at hand.

        """
        stamps_ns: Sequence[int] = ()
        if blend_from_ns is not None and self.remaining(blend_from_ns):
            chunk, stamps_ns = self._blend(chunk, base_ns, blend_from_ns)
        self._chunk, self._stamps_ns = chunk, stamps_ns
        self._base_ns = base_ns
        self._observed_ns = base_ns if observed_ns is None else observed_ns
        self._arrival = Cause.LATE if late else Cause.FRESH
        self._holds = 0
        self._usable, self.ran_out = True, False

    def take(self, now_ns: int, pauses: bool = False, thinking: bool = False) -> QueuedAction:
        """
        Return what the tick scheduled at ``now_ns`` publishes.

        Parameters
        ----------
        now_ns : int
            Scheduled time of the tick, ns.
        pauses : bool
            Whether the safe action follows a used up chunk at once.
        thinking : bool
            Whether that is because the next one is being computed.

        """
        if self.held:
            return self._safe(Cause.OPERATOR_HOLD)
        pause = Cause.THINKING if thinking and self._last is not None else None
        if not self._usable:
            return self._safe(pause)
        if not self._in_time(now_ns):
            self._usable, self.ran_out = False, True
            return self._safe()

        chunk, index = self._chunk, self._index(now_ns)
        last_index = len(chunk.values) - 1
        cause, self._arrival = self._arrival, None
        if cause is None:
            cause = Cause.QUEUED if index <= last_index else Cause.HOLD
        if cause is Cause.HOLD:
            self.ran_out = True
            self._holds += 1
            if pauses or self._holds > self.parameters.max_consecutive_fallbacks:
                self._usable = False
                return self._safe(pause)
        # A chunk that arrives wholly in the past still knows more than the one before it.
        index = min(index, last_index)
        if self._stamps_ns and self._stamps_ns[index] != chunk.observation_stamp_ns:
            chunk = replace(chunk, observation_stamp_ns=self._stamps_ns[index])
            cause = Cause.BLENDED if cause in PLANNED_CAUSES else cause
        self._last = QueuedAction(chunk.values[index], cause, chunk, index)
        return self._last

    def _in_time(self, now_ns: int) -> bool:
        limit_ns = self.parameters.max_action_age_ms * NS_PER_MS
        return self._usable and now_ns - self._observed_ns <= limit_ns

    def _index(self, now_ns: int) -> int:
        step_ns = self._chunk.step_ns
        return max(0, (now_ns - self._base_ns + step_ns // 2) // step_ns)

    def _blend(
        self, chunk: ActionChunk, base_ns: int, from_ns: int
    ) -> tuple[ActionChunk, list[int]]:
        """Return the new chunk blended with the one at hand, and the mean stamp of each row."""
        old = self._chunk
        first = max(0, (from_ns - base_ns + chunk.step_ns // 2) // chunk.step_ns)
        due_ns = base_ns + np.arange(first, len(chunk.values)) * chunk.step_ns
        old_rows = np.maximum(due_ns - self._base_ns + old.step_ns // 2, 0) // old.step_ns
        old_rows = old_rows[old_rows < len(old.values)]
        rows = slice(first, first + len(old_rows))
        weights = blend_weights(len(old_rows))
        values = chunk.values.copy()
        values[rows] += weights[:, None] * (old.values[old_rows] - values[rows])
        stamps_ns = [chunk.observation_stamp_ns] * len(values)
        for row, old_row, weight in zip(range(first, len(values)), old_rows, weights):
            old_ns = self._stamps_ns[old_row] if self._stamps_ns else old.observation_stamp_ns
            stamps_ns[row] += round(float(weight) * (old_ns - stamps_ns[row]))
        return replace(chunk, values=values), stamps_ns

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
