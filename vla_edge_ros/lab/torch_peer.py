"""The same network in torch, as it is usually run: Hugging Face, and plain fused calls."""

import numpy as np
import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM, StaticCache

from vla_edge_ros.kernels.bfloat16 import to_float32
from vla_edge_ros.lab.random_model import hugging_face_config
from vla_edge_ros.policy.config import TransformerConfig


def hugging_face_model(
    config: TransformerConfig,
    tensors: dict[str, np.ndarray],
    dtype: torch.dtype = torch.float32,
) -> Qwen2ForCausalLM:
    """Return Hugging Face's model with these weights, in evaluation mode."""
    model = Qwen2ForCausalLM(Qwen2Config(**hugging_face_config(config)))
    state = {name: torch.from_numpy(to_float32(t).copy()) for name, t in tensors.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - {'lm_head.weight'}:
        raise RuntimeError(f'checkpoint does not fit: {missing} missing, {unexpected} unexpected')
    model.tie_weights()
    return cast_parameters(model, dtype).eval()


def cast_parameters(model: Qwen2ForCausalLM, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Cast the parameters only: ``model.to`` would spoil the rotary frequencies as well."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class HuggingFaceChunk:
    """
    Prefill and greedy decode through ``Qwen2ForCausalLM`` and its ``StaticCache``.

    Parameters
    ----------
    config, tensors
        As for the engine.
    total_slots : int
        Of the cache; all of them are attended to, whatever is in them.
    dtype : torch.dtype
        Of the weights and the cache.
    device : str
        Where it runs.

    """

    def __init__(
        self, config, tensors, total_slots: int, dtype: torch.dtype = torch.float32,
        device: str = 'cpu',
    ):
        self._model = hugging_face_model(config, tensors, dtype).to(device)
        self._cache = StaticCache(config=self._model.config, max_cache_len=total_slots)
        self._take_in, self._predict = self._model.model, self._model
        self._dtype, self._device = dtype, device

    def compile(self, mode: str) -> None:
        """Let ``torch.compile`` make both passes anew when they next run."""
        self._take_in, self._predict = (
            torch.compile(part, mode=mode, dynamic=False)
            for part in (self._model.model, self._model))

    @torch.inference_mode()
    def rewind(self, length: int):
        """Forget what follows the first ``length`` cached tokens."""
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(length)

    def to_device(self, array: np.ndarray) -> torch.Tensor:
        """Return embeddings as the model takes them."""
        return torch.from_numpy(array).to(self._device, self._dtype)

    @torch.inference_mode()
    def prefill(self, embeddings: np.ndarray | torch.Tensor):
        """Append embeddings [n, hidden] to the cache."""
        if isinstance(embeddings, np.ndarray):
            embeddings = self.to_device(embeddings)
        self._take_in(inputs_embeds=embeddings[None], cache=self._cache, use_cache=True)

    @torch.inference_mode()
    def decode(self, ids: torch.Tensor, num_tokens: int, first_row: int = 0) -> torch.Tensor:
        """Return the best rows from ``first_row`` on, each fed back after ``ids`` [1, 1]."""
        tokens = []
        for _ in range(num_tokens):
            output = self._predict(input_ids=ids, cache=self._cache, use_cache=True)
            ids = output.logits[:, -1:, first_row:].argmax(-1)
            ids = ids + first_row if first_row else ids  # no kernel more than needed
            tokens.append(ids)
        return torch.cat(tokens)[:, 0]

    def decode_greedy(self, token: int, num_tokens: int, first_row: int) -> list[int]:
        """Return the same as numbers, after a token that is one."""
        ids = torch.tensor([[token]], device=self._device)
        return self.decode(ids, num_tokens, first_row).tolist()


class PlainTorchChunk:
    """The fewest torch calls: fused projections, preallocated cache of rotated keys, SDPA."""

    def __init__(self, config: TransformerConfig, tensors, total_slots: int):
        def get(name):
            return torch.from_numpy(to_float32(tensors[name]).copy())

        self._config = config
        self._layers = []
        for layer in range(config.num_hidden_layers):
            prefix = f'model.layers.{layer}.'
            qkv = [f'{prefix}self_attn.{name}_proj' for name in 'qkv']
            mlp = [f'{prefix}mlp.{name}_proj.weight' for name in ('gate', 'up')]
            self._layers.append(
                (
                    get(prefix + 'input_layernorm.weight'),
                    torch.cat([get(f'{name}.weight') for name in qkv]),
                    torch.cat([get(f'{name}.bias') for name in qkv]),
                    get(prefix + 'self_attn.o_proj.weight'),
                    get(prefix + 'post_attention_layernorm.weight'),
                    torch.cat([get(name) for name in mlp]),
                    get(prefix + 'mlp.down_proj.weight'),
                )
            )
        self._embedding = get('model.embed_tokens.weight')
        tied = config.tie_word_embeddings
        self._head = self._embedding if tied else get('lm_head.weight')
        self._norm = get('model.norm.weight')
        shape = (config.num_hidden_layers, config.num_key_value_heads, total_slots)
        self._keys = torch.zeros(*shape, config.head_dim)
        self._values = torch.zeros(*shape, config.head_dim)
        half = config.head_dim // 2
        angles = torch.outer(
            torch.arange(total_slots), config.rope_theta ** (-torch.arange(half) / half)
        )
        self._cosine, self._sine = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        self._mask = torch.ones(total_slots, total_slots, dtype=torch.bool).tril()
        self._length = 0

    def rewind(self, length: int):
        """Forget what follows the first ``length`` cached tokens."""
        self._length = length

    @torch.inference_mode()
    def prefill(self, embeddings: np.ndarray):
        """Append embeddings [n, hidden] to the cache."""
        self._forward(torch.from_numpy(embeddings))

    @torch.inference_mode()
    def decode_greedy(self, token: int, num_tokens: int, first_row: int) -> list[int]:
        """Return the best rows from ``first_row`` on, each fed back."""
        tokens = []
        for _ in range(num_tokens):
            hidden = self._forward(self._embedding[token : token + 1])
            token = first_row + int(functional.linear(hidden, self._head[first_row:]).argmax())
            tokens.append(token)
        return tokens

    def _rotate(self, heads, positions):
        low, high = heads.chunk(2, dim=-1)
        turned = torch.cat([-high, low], dim=-1)
        return heads * self._cosine[positions] + turned * self._sine[positions]

    def _forward(self, x):
        config, new = self._config, len(x)
        size, eps = (config.hidden_size,), config.rms_norm_eps
        first, last = self._length, self._length + new
        self._length = last
        split = [config.query_size, config.key_value_size, config.key_value_size]
        mask = None if new == 1 else self._mask[first:last, :last]
        for layer, (norm, qkv, bias, output, mlp_norm, gate_up, down) in enumerate(self._layers):
            projected = functional.linear(functional.rms_norm(x, size, norm, eps), qkv, bias)
            queries, keys, values = (
                part.view(new, -1, config.head_dim).transpose(0, 1)
                for part in projected.split(split, dim=-1)
            )
            self._keys[layer, :, first:last] = self._rotate(keys, slice(first, last))
            self._values[layer, :, first:last] = values
            mixed = functional.scaled_dot_product_attention(
                self._rotate(queries, slice(first, last))[None],
                self._keys[None, layer, :, :last],
                self._values[None, layer, :, :last],
                attn_mask=mask,
                enable_gqa=True,
            )
            mixed = mixed[0].transpose(0, 1).reshape(new, -1)
            x = x + functional.linear(mixed, output)
            normed = functional.rms_norm(x, size, mlp_norm, eps)
            gate, up = functional.linear(normed, gate_up).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, down)
        return functional.rms_norm(x, size, self._norm, eps)
