"""What one tick of the control loop came to."""

from dataclasses import dataclass

import numpy as np

from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import Cause
from vla_edge_ros.runtime.admission import DecisionKind, Reason


@dataclass(frozen=True, slots=True)
class StepResult:
    """
    One tick: what to publish, and how that came about; None where there is nothing to say.

    ``telemetry.trace.COLUMNS`` documents every field but the last three. ``action`` is what to
    publish (float32 [action_dim]); ``chunk`` is the chunk it was taken from, of which the rows
    from ``chunk_index`` on are still to come unless ``cause`` holds an action; ``error`` is the
    first that the policy raised; ``late`` tells that a result arrived which had missed its
    deadline. ``contact`` is for a host that knows the world, the loop leaves it None.
    """

    tick: int
    scheduled_ns: int
    started_ns: int
    published_ns: int
    action_stamp_ns: int
    decision: DecisionKind
    reason: Reason
    cause: Cause
    frame_sequence: int | None
    observation_stamp_ns: int | None
    observation_age_ms: float
    chunk_index: int | None
    estimate_ms: float
    budget_ms: float
    preprocess_ms: float
    vision_ms: float
    prefill_ms: float
    decode_ms: float
    late: bool
    evicted_frame: int | None
    retained_frames: int | None
    schedule: str
    runs: int
    contact: bool | None
    action: np.ndarray | None
    chunk: ActionChunk | None
    error: Exception | None
