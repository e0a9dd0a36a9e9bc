"""
The transformer a policy decodes with, over cache slots.

The seam between model and machine: a backend is a module (``kernels.cpu``,
``kernels.reference``, ``kernels.cuda``) that offers, under the same names,

- the operations ``pack_linear, linear, layer_norm, swiglu``, the latter three writing ``out``,
  which the vision encoder is built from, and perhaps an encoder ``Vision`` of its own, whose
  tokens stay where ``Engine.forward`` takes them;
- ``memory_plan(config, weights_dtype, total_slots, max_tokens)``;
- ``Engine(config, tensors, weights_dtype, total_slots, max_tokens, progress)`` with ``embed``,
  ``forward``, ``logits`` and ``decode_greedy``, each one launch for as many layers and tokens
  as it covers, and ``Engine.memory_mb()``, what there is of each memory.

Everything above that line is here, once: what a slot list may be, which weights type is held,
what is refused. An engine trusts its caller.

The rule every engine obeys: keys are cached unrotated; slot ``context_slots[i]`` has rotary
position ``i``, new tokens follow at ``len(context_slots)``, and token ``j`` of them sees the
whole context and the new tokens up to itself. Which slot holds what is ``kv_cache.py``'s.
"""

from collections.abc import Mapping
from types import ModuleType

import numpy as np

from vla_edge_ros.errors import ConfigError, ShapeError
from vla_edge_ros.kernels.checks import check_array
from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.kernels.memory_plan import Buffer
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.weights import Stored
from vla_edge_ros.progress import no_progress, Progress

WEIGHTS_DTYPES = ('auto', 'float32', 'bfloat16')


def resolve_weights_dtype(weights_dtype: str, tensors: Mapping[str, np.ndarray | Stored]) -> str:
    """
    Return 'float32' or 'bfloat16'; 'auto' takes what the checkpoint's embedding is stored as.

    Raises
    ------
    ConfigError
        The name is none of ``WEIGHTS_DTYPES``.

    """
    if weights_dtype not in WEIGHTS_DTYPES:
        rule = f'must be one of {", ".join(WEIGHTS_DTYPES)}'
        raise ConfigError('weights_dtype', rule, weights_dtype)
    if weights_dtype != 'auto':
        return weights_dtype
    stored = tensors['model.embed_tokens.weight'].dtype
    return 'bfloat16' if stored == np.uint16 else 'float32'


class Transformer:
    """
    A Qwen2 decoder whose keys and values live in numbered slots.

    Not thread safe: one thread at a time may call.

    Parameters
    ----------
    config : TransformerConfig
        Shape of the network.
    weights : dict of str to ndarray
        As :func:`vla_edge_ros.policy.weights.load_weights` returns them.
    kernels : module
        The backend.
    total_slots : int
        Slots of the cache: prompt, frames and scratch together.
    max_tokens : int
        The most tokens of one prefill.
    weights_dtype : 'auto', 'float32' or 'bfloat16'
        How weight matrices are held.
    progress : Progress
        Told how far loading is.

    """

    def __init__(
        self,
        config: TransformerConfig,
        weights: dict[str, np.ndarray],
        kernels: ModuleType,
        total_slots: int,
        max_tokens: int = 32,
        weights_dtype: str = 'auto',
        progress: Progress = no_progress,
    ):
        for name, value in (('total_slots', total_slots), ('max_tokens', max_tokens)):
            if value < 1:
                raise ConfigError(name, 'must be >= 1', value)
        self.config = config
        self.total_slots = total_slots
        self.max_tokens = max_tokens
        self.weights_dtype = resolve_weights_dtype(weights_dtype, weights)
        self._kernels = kernels
        self._engine = kernels.Engine(
            config, weights, self.weights_dtype, total_slots, max_tokens, progress
        )
        self._marks = np.zeros(total_slots, np.uint8)

    @property
    def engine(self):
        """The backend's engine, beside which the backend's own encoder runs."""
        return self._engine

    def memory_plan(self) -> list[Buffer]:
        """Return every buffer held; before there is a Transformer, ask the backend's own."""
        return self._kernels.memory_plan(
            self.config, self.weights_dtype, self.total_slots, self.max_tokens
        )

    def embed(self, token_ids) -> np.ndarray:
        """
        Return the embeddings float32 [n, hidden] of token ids [n].

        Raises
        ------
        ShapeError
            An id is outside the vocabulary.

        """
        token_ids = np.asarray(token_ids, dtype=np.int64)
        vocab_size = self.config.vocab_size
        if token_ids.ndim != 1 or np.any((token_ids < 0) | (token_ids >= vocab_size)):
            rule = f'must be a list of ids in 0..{vocab_size - 1}'
            raise ShapeError('token_ids', rule, token_ids.tolist())
        return self._engine.embed(token_ids)

    def prefill(
        self,
        embeddings: np.ndarray,
        write_slots: np.ndarray,
        context_slots: np.ndarray,
        layer_outputs: np.ndarray | None = None,
    ) -> np.ndarray:
        """
        Run new tokens through the network and keep their keys and values.

        Parameters
        ----------
        embeddings : float32 [n, hidden]
            Inputs, n in 1..max_tokens; a ``DeviceArray`` of the same backend as well.
        write_slots : int32 [n]
            Where each token's keys and values go.
        context_slots : int32 [m]
            What the tokens see before them, in time order; position = index.
        layer_outputs : float32 [layers, n, hidden], optional
            Receives the residual stream after every layer.

        Returns
        -------
        float32 [n, hidden]
            Hidden states after the final norm.

        Raises
        ------
        ShapeError
            Sizes do not agree, or the slots of both lists together are not distinct slots.

        """
        tokens = self._check_new(embeddings, write_slots, context_slots)
        if layer_outputs is not None:
            shape = (self.config.num_hidden_layers, tokens, self.config.hidden_size)
            check_array('layer_outputs', layer_outputs, shape, np.float32, np.float64)
        return self._engine.forward(embeddings, context_slots, write_slots, layer_outputs)

    def fill(
        self, embeddings: np.ndarray, write_slots: np.ndarray, context_slots: np.ndarray
    ) -> None:
        """Keep the keys and values of new tokens, as :meth:`prefill` does, and return nothing."""
        self._check_new(embeddings, write_slots, context_slots)
        self._engine.fill(embeddings, context_slots, write_slots)

    def decode(self, token_id: int, write_slot: int, context_slots: np.ndarray) -> np.ndarray:
        """Run one token, see :meth:`prefill`; returns its hidden state float32 [hidden]."""
        slots = np.array([write_slot], np.int32)
        return self.prefill(self.embed([token_id]), slots, context_slots)[0]

    def logits(
        self, hidden: np.ndarray, first_row: int = 0, num_rows: int | None = None
    ) -> np.ndarray:
        """
        Return the head's logits float32 [num_rows] of one hidden state.

        Parameters
        ----------
        hidden : float32 [hidden]
            One row of what :meth:`prefill` returns.
        first_row, num_rows : int
            Restrict the head to these vocabulary rows; all from ``first_row`` by default.

        """
        check_array('hidden', hidden, (self.config.hidden_size,), np.float32, np.float64)
        return self._engine.logits(hidden, first_row, self._check_rows(first_row, num_rows))

    def decode_greedy(
        self,
        first_token: int,
        num_tokens: int,
        scratch_slots: np.ndarray,
        context_slots: np.ndarray,
        first_row: int = 0,
        num_rows: int | None = None,
    ) -> np.ndarray:
        """
        Feed ``first_token``, then each token chosen, and return those chosen, in one call.

        Parameters
        ----------
        first_token : int
            The token before the first chosen one.
        num_tokens : int
            How many to choose.
        scratch_slots : int32 [num_tokens or more]
            Where the fed tokens' keys and values go, in order.
        context_slots : int32 [m]
            What they see before them.
        first_row, num_rows : int
            Vocabulary rows to choose from; all from ``first_row`` by default.

        Returns
        -------
        int32 [num_tokens]
            Token ids: the largest logit, the lowest id of equals.

        """
        if not 1 <= num_tokens <= len(scratch_slots):
            raise ShapeError('num_tokens', f'must be 1..{len(scratch_slots)} scratch', num_tokens)
        if not 0 <= first_token < self.config.vocab_size:
            rule = f'must be in 0..{self.config.vocab_size - 1}'
            raise ShapeError('first_token', rule, first_token)
        write_slots = scratch_slots[:num_tokens]
        self._check_slots(write_slots, context_slots, num_tokens)
        num_rows = self._check_rows(first_row, num_rows)
        return self._engine.decode_greedy(
            int(first_token), num_tokens, context_slots, write_slots, first_row, num_rows
        )

    def _check_new(self, embeddings, write_slots, context_slots):
        size = self.config.hidden_size
        if not isinstance(embeddings, DeviceArray):
            check_array('embeddings', embeddings, (None, size), np.float32, np.float64)
        tokens = len(embeddings)
        if not 1 <= tokens <= self.max_tokens:
            raise ShapeError('embeddings', f'must be 1..{self.max_tokens} tokens', tokens)
        self._check_slots(write_slots, context_slots, tokens)
        return tokens

    def _check_rows(self, first_row, num_rows):
        vocab_size = self.config.vocab_size
        num_rows = vocab_size - first_row if num_rows is None else num_rows
        if first_row < 0 or num_rows < 1 or first_row + num_rows > vocab_size:
            rule = f'must be a range of rows in 0..{vocab_size - 1}'
            raise ShapeError('first_row, num_rows', rule, (first_row, num_rows))
        return num_rows

    def _check_slots(self, write_slots, context_slots, tokens):
        check_array('write_slots', write_slots, (tokens,), np.int32)
        check_array('context_slots', context_slots, (None,), np.int32)
        marks = self._marks
        marks.fill(0)
        for slots in (context_slots, write_slots):
            if len(slots) and not 0 <= slots.min() <= slots.max() < self.total_slots:
                rule = f'must be in 0..{self.total_slots - 1}'
                raise ShapeError('slots', rule, slots.tolist())
            marks[slots] = 1
        if np.count_nonzero(marks) != len(context_slots) + tokens:
            rule = 'must be distinct, and no write slot in the context'
            raise ShapeError('slots', rule, (context_slots.tolist(), write_slots.tolist()))
