"""Action chunks and the tokens they are made of."""

from dataclasses import dataclass, replace

import numpy as np

from vla_edge_ros.policy.policy_config import PolicyConfig


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

    def first(self, rows: int) -> 'ActionChunk':
        """Return the chunk with its first ``rows`` actions only, all of them for 0."""
        if not 0 < rows < len(self.values):
            return self
        return replace(self, values=self.values[:rows])


class ActionTokenizer:
    """
    Maps the decoded tokens to numbers: bin ``i`` of ``bins`` equal parts means its centre.

    Parameters
    ----------
    config : PolicyConfig
        Ranges of grounding and actions, in the robot's units.

    """

    def __init__(self, config: PolicyConfig):
        self._offset = config.action_token_offset
        self._bins = config.bins
        self._grounding_dim = config.grounding_dim
        self._shape = (config.chunk_steps, config.action_dim)
        low = [*config.grounding_low, *config.action_low * config.chunk_steps]
        high = [*config.grounding_high, *config.action_high * config.chunk_steps]
        self._low = np.asarray(low, np.float32)
        self._width = (np.asarray(high, np.float32) - self._low) / np.float32(config.bins)

    def decode(self, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Return ``(grounding float32 [grounding_dim], actions float32 [steps, action_dim])``.

        Parameters
        ----------
        tokens : int [decode_tokens]
            Ids inside the range of action tokens.

        """
        bins = np.asarray(tokens) - self._offset
        values = (self._low + (bins + 0.5) * self._width).astype(np.float32)
        return values[:self._grounding_dim], values[self._grounding_dim:].reshape(self._shape)
