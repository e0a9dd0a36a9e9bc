"""
Every operation in float64, as plain as NumPy can say it.

What the fast kernels are measured against; nothing here is tuned, packed or cached.
"""

import numpy as np

from vla_edge_ros.kernels.bfloat16 import convert, to_float32
from vla_edge_ros.kernels.memory_plan import allocate, Buffer, memory_mb
from vla_edge_ros.progress import no_progress, Progress


def pack_linear(weight: np.ndarray, weights_dtype: str = 'float32') -> np.ndarray:
    """Return the weight [out, depth], rounded to ``weights_dtype``, as float64."""
    return to_float32(convert(weight, weights_dtype)).astype(np.float64)


def linear(x, packed, bias, out):
    """Compute ``out = x @ packed.T + bias``."""
    out[:] = x.astype(np.float64) @ packed.T
    if bias is not None:
        out += bias
    return out


def rms_norm(x, weight, eps, out):
    """Divide each row by its root mean square and scale by ``weight``."""
    x = x.astype(np.float64)
    out[:] = weight * x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
    return out


def layer_norm(x, weight, bias, eps, out):
    """Normalise each row to mean 0 and variance 1, then scale and shift."""
    x = x.astype(np.float64)
    centred = x - x.mean(axis=-1, keepdims=True)
    out[:] = weight * centred / np.sqrt(x.var(axis=-1, keepdims=True) + eps) + bias
    return out


def swiglu(gate, up, out):
    """Compute ``silu(gate) * up``."""
    gate = gate.astype(np.float64)
    out[:] = gate / (1 + np.exp(-gate)) * up
    return out


def rotate(heads: np.ndarray, positions: np.ndarray, rope_theta: float) -> np.ndarray:
    """Rotate float64 [n, heads, head_dim] by [n] positions, Hugging Face's half-rotation."""
    half = heads.shape[-1] // 2
    angles = positions[:, None] * rope_theta ** (-np.arange(half) / half)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    low, high = heads[..., :half], heads[..., half:]
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def attention(queries, keys, values, first):
    """
    Attend causally: query ``i`` sees keys 0..``first + i``.

    Parameters
    ----------
    queries : float64 [n, heads, head_dim]
        Rotated.
    keys, values : float64 [first + n, kv_heads, head_dim]
        By rank; keys rotated.
    first : int
        Ranks before the first query.

    Returns
    -------
    float64 [n, heads, head_dim]

    """
    group = queries.shape[1] // keys.shape[1]
    mixed = np.empty_like(queries)
    for token, heads in enumerate(queries):
        seen = first + token + 1
        for head, query in enumerate(heads):
            scores = keys[:seen, head // group] @ query / np.sqrt(len(query))
            weights = np.exp(scores - scores.max())
            mixed[token, head] = weights / weights.sum() @ values[:seen, head // group]
    return mixed


def memory_plan(config, weights_dtype: str, total_slots: int, max_tokens: int) -> list[Buffer]:
    """Return the cache's buffers; the rest is NumPy's own."""
    shape = (
        config.num_hidden_layers,
        total_slots,
        config.num_key_value_heads,
        config.head_dim,
    )
    return [Buffer('keys', shape, 'float64'), Buffer('values', shape, 'float64')]


class Engine:
    """The decoder in float64; same methods as ``kernels.cpu.Engine``."""

    def __init__(
        self, config, tensors, weights_dtype: str, total_slots: int, max_tokens: int,
        progress: Progress = no_progress,
    ):
        self._config = config
        self._tensors = {
            name: pack_linear(tensor, weights_dtype if tensor.ndim == 2 else 'float32')
            for name, tensor in tensors.items()
        }
        cache = allocate(memory_plan(config, weights_dtype, total_slots, max_tokens))
        self._keys, self._values = cache['keys'], cache['values']

    memory_mb = staticmethod(memory_mb)

    def embed(self, token_ids):
        """Return the embeddings of token ids."""
        return self._tensors['model.embed_tokens.weight'][token_ids]

    def forward(self, embeddings, context_slots, write_slots, layer_outputs=None):
        """Run the new tokens through all layers and return the final-normed hidden states."""
        residual = embeddings.astype(np.float64)
        for layer in range(self._config.num_hidden_layers):
            residual = residual + self._attend(layer, residual, context_slots, write_slots)
            residual = residual + self._feed_forward(layer, residual)
            if layer_outputs is not None:
                layer_outputs[layer] = residual
        return self._norm('model.norm', residual)

    def fill(self, embeddings, context_slots, write_slots):
        """Run the new tokens for their keys and values alone."""
        self.forward(embeddings, context_slots, write_slots)

    def logits(self, hidden, first_row, num_rows):
        """Return the logits of a row range."""
        tied = self._config.tie_word_embeddings
        head = self._tensors['model.embed_tokens.weight' if tied else 'lm_head.weight']
        return head[first_row : first_row + num_rows] @ hidden

    def decode_greedy(
        self, first_token, num_tokens, context_slots, write_slots, first_row, num_rows
    ):
        """Return the best rows after ``first_token``, each fed back."""
        tokens = np.empty(num_tokens, np.int32)
        token = first_token
        for step in range(num_tokens):
            context = np.concatenate([context_slots, write_slots[:step]])
            hidden = self.forward(self.embed([token]), context, write_slots[step : step + 1])[0]
            token = first_row + int(np.argmax(self.logits(hidden, first_row, num_rows)))
            tokens[step] = token
        return tokens

    def _attend(self, layer, residual, context_slots, write_slots):
        config, prefix = self._config, f'model.layers.{layer}'
        normed = self._norm(f'{prefix}.input_layernorm', residual)
        queries, keys, values = (
            self._linear(f'{prefix}.self_attn.{name}_proj', normed).reshape(
                len(residual), -1, config.head_dim
            )
            for name in 'qkv'
        )
        self._keys[layer, write_slots] = keys
        self._values[layer, write_slots] = values
        order = np.concatenate([context_slots, write_slots])
        ranks = np.arange(len(order))
        first = len(context_slots)
        mixed = attention(
            rotate(queries, ranks[first:], config.rope_theta),
            rotate(self._keys[layer, order], ranks, config.rope_theta),
            self._values[layer, order],
            first,
        )
        return self._linear(f'{prefix}.self_attn.o_proj', mixed.reshape(len(residual), -1))

    def _feed_forward(self, layer, residual):
        prefix = f'model.layers.{layer}'
        normed = self._norm(f'{prefix}.post_attention_layernorm', residual)
        gate = self._linear(f'{prefix}.mlp.gate_proj', normed)
        up = self._linear(f'{prefix}.mlp.up_proj', normed)
        return self._linear(f'{prefix}.mlp.down_proj', swiglu(gate, up, gate))

    def _norm(self, name, x):
        weight = self._tensors[f'{name}.weight']
        return rms_norm(x, weight, self._config.rms_norm_eps, np.empty_like(x))

    def _linear(self, name, x):
        weight = self._tensors[f'{name}.weight']
        out = np.empty((len(x), len(weight)))
        return linear(x, weight, self._tensors.get(f'{name}.bias'), out)
