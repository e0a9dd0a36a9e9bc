"""Action chunks and the tokens they are made of."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class ActionChunk:
    """
    A short plan of actions computed from one observation.

    Parameters
    ----------
    values : float32 [steps, action_dim]
        One action a row; row ``i`` is meant for ``i * step_ns`` after the observing tick.
    step_ns : int
        Time between two rows, ns.
    grounding : float32 [2]
        Where the policy believes the target to be, x and y, m.
    tokens : int32 [decode_tokens]
        The token ids the chunk was decoded from.
    observation_stamp_ns : int
        Header stamp of the newest image behind the chunk, ROS time, ns.

    """

    values: np.ndarray
    step_ns: int
    grounding: np.ndarray
    tokens: np.ndarray
    observation_stamp_ns: int
