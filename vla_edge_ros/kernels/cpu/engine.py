"""
The decoder on the CPU: one compiled call per prefill, one per greedy decode.

A layer reads as a recipe in :func:`_forward`. Calling it op by op from Python would cost more
than the arithmetic of a small model, so the layer loop and the token loop are compiled too.
"""

import numpy as np

from vla_edge_ros.kernels.bfloat16 import convert, to_float32
from vla_edge_ros.kernels.cpu.attention import attend, hold, rotate_context, store_heads
from vla_edge_ros.kernels.cpu.compiled import compiled
from vla_edge_ros.kernels.cpu.elementwise import rms_norm_row, swiglu_row
from vla_edge_ros.kernels.cpu.layout import buffer_plan, Buffers, weight_plan, Weights
from vla_edge_ros.kernels.cpu.linear import multiply, pack_linear
from vla_edge_ros.kernels.cpu.tile import PANEL, widen
from vla_edge_ros.kernels.memory_plan import allocate, memory_mb
from vla_edge_ros.progress import no_progress, Progress

# Plain literals would compile every function they are passed to once more.
_ONE = np.intp(1)
_NONE = np.intp(0)


@compiled
def _embed(packed, token, out):
    """Write row ``token`` of the packed embedding as float32."""
    panel, column = divmod(token, PANEL)
    for i in range(packed.shape[1]):
        out[i] = widen(packed[panel, i, column])


@compiled
def _norm_rows(x, weight, eps, rows, out):
    for row in range(rows):
        rms_norm_row(x[row], weight, eps, out[row])


@compiled
def _forward(weights, buffers, rows, first, layer_outputs, only_fill):
    """
    Take ``rows`` tokens in ``residual`` at ranks ``first``... through all layers.

    ``order`` holds the slots of the context, then those of the new tokens. Writes ``hidden``,
    and each layer's residual to ``layer_outputs [layers or 0, rows, hidden]``; with ``only_fill``
    neither, but keys and values alone.
    """
    b = buffers
    layers = b.keys.shape[0]
    hidden, inner = b.normed.shape[1], b.inner.shape[1]
    residual, width = b.residual.reshape(b.residual.size), b.residual.shape[1]
    normed, qkv, gate_up = b.normed, b.qkv, b.gate_up
    rotate_context(b, first)
    for layer in range(layers):
        _norm_rows(b.residual, weights.attention_norm[layer], weights.eps, rows, normed)
        multiply(
            normed.reshape(normed.size), hidden, rows, weights.qkv[layer],
            weights.qkv_bias[layer], _NONE, qkv.reshape(qkv.size), qkv.shape[1],
        )  # fmt: skip
        store_heads(b, layer, rows, first)
        if only_fill and layer == layers - 1:
            break
        attend(b, layer, rows, first)
        multiply(
            b.mixed.reshape(b.mixed.size), b.mixed.shape[1], rows, weights.output[layer],
            residual, width, residual, width,
        )  # fmt: skip
        _norm_rows(b.residual, weights.mlp_norm[layer], weights.eps, rows, normed)
        multiply(
            normed.reshape(normed.size), hidden, rows, weights.gate_up[layer],
            b.zeros, _NONE, gate_up.reshape(gate_up.size), gate_up.shape[1],
        )  # fmt: skip
        for row in range(rows):
            swiglu_row(gate_up[row], gate_up[row, inner:], b.inner[row])
        multiply(
            b.inner.reshape(b.inner.size), inner, rows, weights.down[layer],
            residual, width, residual, width,
        )  # fmt: skip
        if layer_outputs.shape[0] > 0:
            for row in range(rows):
                for i in range(hidden):
                    layer_outputs[layer, row, i] = b.residual[row, i]
    hold(b, first, first + rows)
    if not only_fill:
        _norm_rows(b.residual, weights.final_norm, weights.eps, rows, b.hidden)


@compiled
def _logits(weights, buffers, hidden, first_row, num_rows):
    """Write ``logits[first_row : first_row + num_rows]`` (and their panels' neighbours)."""
    first = first_row // PANEL
    last = (first_row + num_rows - 1) // PANEL + 1
    multiply(
        hidden, hidden.size, _ONE, weights.head[first:last],
        buffers.zeros, _NONE, buffers.logits[first * PANEL :], _NONE,
    )  # fmt: skip


@compiled
def _decode_greedy(weights, buffers, token, first, first_row, num_rows, no_layers, tokens):
    """Feed ``token`` at rank ``first``, the best row after it at the next rank, and so on."""
    for step in range(tokens.size):
        _embed(weights.embedding, token, buffers.residual[0])
        _forward(weights, buffers, _ONE, first + step, no_layers, False)
        _logits(weights, buffers, buffers.hidden[0], first_row, num_rows)
        token = first_row
        for row in range(first_row + 1, first_row + num_rows):
            if buffers.logits[row] > buffers.logits[token]:
                token = row
        tokens[step] = token


class Engine:
    """
    One decoder: its packed weights, its cache, and everything it works in.

    The caller (``policy/decoder.py``) has checked every argument. Results are copies.

    Parameters
    ----------
    config : TransformerConfig
        Shape of the network.
    tensors : dict of str to ndarray
        Checkpoint tensors by their Hugging Face names, float32 or uint16 (bfloat16).
    weights_dtype : 'float32' or 'bfloat16'
        How matrices are held; biases and norm gains are float32 always.
    total_slots, max_tokens : int
        Cache slots, and the most tokens of one prefill.
    progress : Progress
        Told of every layer that is packed.

    """

    def __init__(
        self, config, tensors, weights_dtype: str, total_slots: int, max_tokens: int,
        progress: Progress = no_progress,
    ):
        weights = allocate(weight_plan(config, weights_dtype))
        self.weights = _pack(config, tensors, weights, progress)
        self.buffers = Buffers(**allocate(buffer_plan(config, total_slots, max_tokens)))
        half = config.head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(half) / half)
        angles = np.arange(total_slots)[:, None] * frequencies
        self.buffers.cosine[:] = np.cos(angles)
        self.buffers.sine[:] = np.sin(angles)
        self._hidden_size = config.hidden_size
        self._no_layers = np.empty((0, 0, 0), np.float32)

    memory_mb = staticmethod(memory_mb)

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the embeddings float32 [n, hidden] of int token ids."""
        out = np.empty((len(token_ids), self._hidden_size), np.float32)
        for row, token in zip(out, token_ids):
            _embed(self.weights.embedding, int(token), row)
        return out

    def forward(self, embeddings, context_slots, write_slots, layer_outputs=None) -> np.ndarray:
        """
        Run the new tokens through all layers, their keys and values going to ``write_slots``.

        Returns the final-normed hidden states float32 [n, hidden]; the residual after each
        layer goes to ``layer_outputs`` float32 [layers, n, hidden] when given.
        """
        layers = self._no_layers if layer_outputs is None else layer_outputs
        self._take(embeddings, context_slots, write_slots, layers, False)
        return self.buffers.hidden[: len(embeddings)].copy()

    def fill(self, embeddings, context_slots, write_slots) -> None:
        """Do what ``forward`` does for the keys and values of new tokens, and no more."""
        self._take(embeddings, context_slots, write_slots, self._no_layers, True)

    def _take(self, embeddings, context_slots, write_slots, layer_outputs, only_fill) -> None:
        rows, first = len(embeddings), len(context_slots)
        self.buffers.order[:first] = context_slots
        self.buffers.order[first : first + rows] = write_slots
        self.buffers.residual[:rows, : self._hidden_size] = embeddings
        _forward(self.weights, self.buffers, rows, first, layer_outputs, only_fill)

    def logits(self, hidden: np.ndarray, first_row: int, num_rows: int) -> np.ndarray:
        """Return the logits float32 [num_rows] of one hidden state float32 [hidden]."""
        _logits(self.weights, self.buffers, hidden, first_row, num_rows)
        return self.buffers.logits[first_row : first_row + num_rows].copy()

    def decode_greedy(
        self, first_token, num_tokens, context_slots, write_slots, first_row, num_rows
    ) -> np.ndarray:
        """Return int32 [num_tokens]: the best rows after ``first_token``, each fed back."""
        first = len(context_slots)
        self.buffers.order[:first] = context_slots
        self.buffers.order[first : first + num_tokens] = write_slots
        tokens = np.empty(num_tokens, np.int32)
        _decode_greedy(
            self.weights, self.buffers, first_token, first, first_row, num_rows,
            self._no_layers, tokens,
        )  # fmt: skip
        return tokens


def _pack(config, tensors, arrays, progress: Progress) -> Weights:
    """Fill the planned arrays from a checkpoint's tensors."""
    weights_dtype = 'bfloat16' if arrays['qkv'].dtype == np.uint16 else 'float32'

    def matrix(*names):
        stack = [convert(tensors[f'{name}.weight'], weights_dtype) for name in names]
        return pack_linear(np.concatenate(stack), weights_dtype)

    def vector(*names):
        return np.concatenate([to_float32(tensors[name]) for name in names])

    arrays['embedding'][:] = matrix('model.embed_tokens')
    arrays['final_norm'][:] = vector('model.norm.weight')
    for layer in range(config.num_hidden_layers):
        progress('packing layer', layer + 1, config.num_hidden_layers)
        prefix = f'model.layers.{layer}'
        attention, mlp = f'{prefix}.self_attn', f'{prefix}.mlp'
        qkv = [f'{attention}.{name}_proj' for name in 'qkv']
        arrays['attention_norm'][layer] = vector(f'{prefix}.input_layernorm.weight')
        arrays['qkv'][layer] = matrix(*qkv)
        arrays['qkv_bias'][layer, : config.qkv_size] = vector(*(f'{name}.bias' for name in qkv))
        arrays['output'][layer] = matrix(f'{attention}.o_proj')
        arrays['mlp_norm'][layer] = vector(f'{prefix}.post_attention_layernorm.weight')
        arrays['gate_up'][layer] = matrix(f'{mlp}.gate_proj', f'{mlp}.up_proj')
        arrays['down'][layer] = matrix(f'{mlp}.down_proj')
    if config.tie_word_embeddings:
        arrays['head'] = arrays['embedding']
    else:
        arrays['head'][:] = matrix('lm_head')
    return Weights(**arrays, eps=np.float32(config.rms_norm_eps))
