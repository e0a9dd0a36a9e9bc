"""
The policy network in PyTorch, trained under the cache rule it is later run with.

A sample is a stream of ``T`` frames. Frame ``t`` sees the prompt that was valid then, the earlier
frames its cache still retained, and itself; its decode tokens see the same and are then
forgotten. Keys are rotated by rank among what is visible, exactly as ``policy.kv_cache`` and
``policy.decoder`` do at run time, so evictions and instruction changes are part of training.
Tensor names are those of the checkpoint.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - the usual alias

from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.policy.vision import sincos_positions


@dataclass
class Stream:
    """
    A batch of training streams.

    Attributes
    ----------
    images : uint8 [B, T, height, width, 3]
    proprioception : float32 [B, T, p], raw units
    prompt_ids : int64 [B, 2, prompt_slots], padded with 0
    prompt_lengths : int64 [B, 2]
    prompt_index : int64 [B, T], which of the two prompts is valid at frame t
    history : int64 [B, T, max_frames - 1], indices of retained earlier frames, oldest first
    history_lengths : int64 [B, T]
    decode_ids : int64 [B, T, decode_tokens], inputs: the begin token, then action tokens

    """

    images: torch.Tensor
    proprioception: torch.Tensor
    prompt_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    prompt_index: torch.Tensor
    history: torch.Tensor
    history_lengths: torch.Tensor
    decode_ids: torch.Tensor


class RMSNorm(nn.Module):
    """Root-mean-square normalisation, as Hugging Face's ``Qwen2RMSNorm``."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last axis in float32."""
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, size: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``down(silu(gate(x)) * up(x))``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class VisionEncoder(nn.Module):
    """Patches of a standardised image to one token each, plus the mean of them."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        width = config.vision_hidden_size
        self.patch_embed = nn.Linear(3 * config.patch_size**2, width)
        positions = sincos_positions(config.patch_rows, config.patch_columns, width)
        self.register_buffer('position_embedding', torch.from_numpy(positions))
        self.norm1 = nn.LayerNorm(width)
        self.mlp = MLP(width, config.vision_intermediate_size)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Map ``patches`` [..., patches, 3 * patch_size**2] to [..., patches, width]."""
        x = self.norm1(self.patch_embed(patches) + self.position_embedding)
        return self.norm2(x + self.mlp(x))


def rotate(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotate ``x`` [..., n, heads, head_dim] by ``positions`` [..., n] (half rotation)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = (positions.float().unsqueeze(-1) * frequencies).unsqueeze(-2)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half].float(), x[..., half:].float()
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return rotated.to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with QKV bias; the caller says who sees whom."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        t = config.transformer
        self.heads, self.kv_heads, self.head_dim = (
            t.num_attention_heads, t.num_key_value_heads, t.head_dim)
        self.q_proj = nn.Linear(t.hidden_size, self.heads * self.head_dim)
        self.k_proj = nn.Linear(t.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(t.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(self.heads * self.head_dim, t.hidden_size, bias=False)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return unrotated q, k and v, each [..., n, heads, head_dim]."""
        return (
            self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)),
            self.k_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)),
            self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)),
        )

    def attend(self, q, k, v, mask) -> torch.Tensor:
        """Attend q [g, n, H, d] over k, v [g, m, KV, d] where ``mask`` [g, n, m]."""
        groups = self.heads // self.kv_heads
        k = k.transpose(1, 2).repeat_interleave(groups, 1)
        v = v.transpose(1, 2).repeat_interleave(groups, 1)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k, v, attn_mask=mask.unsqueeze(1))
        return self.o_proj(out.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        t = config.transformer
        self.input_layernorm = RMSNorm(t.hidden_size, t.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(t.hidden_size, t.rms_norm_eps)
        self.mlp = MLP(t.hidden_size, t.intermediate_size)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the feed-forward branch."""
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The Qwen2 decoder stack; holds the tensors named ``model.*``."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        t = config.transformer
        self.embed_tokens = nn.Embedding(t.vocab_size, t.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(t.num_hidden_layers))
        self.norm = RMSNorm(t.hidden_size, t.rms_norm_eps)


class PolicyNetwork(nn.Module):
    """Vision encoder, projectors and decoder of the streaming policy."""

    def __init__(self, config: PolicyConfig):
        super().__init__()
        self.config = config
        hidden = config.transformer.hidden_size
        width = config.vision_hidden_size
        self.vision = VisionEncoder(config)
        self.patch_projector = nn.Linear(width, hidden)
        self.pooled_projector = nn.Linear(width, hidden)
        self.proprioception_projector = nn.Linear(config.proprioception_dim, hidden)
        self.model = Decoder(config)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5 * 0.7)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def frame_tokens(self, images: torch.Tensor, proprioception: torch.Tensor) -> torch.Tensor:
        """Turn standardised images [..., h, w, 3] into frame tokens [..., slots, hidden]."""
        c = self.config
        p = c.patch_size
        x = images.unflatten(-3, (c.patch_rows, p)).unflatten(-2, (c.patch_columns, p))
        patches = x.transpose(-4, -3).flatten(-3).flatten(-3, -2)
        features = self.vision(patches)
        mean = torch.tensor(c.proprioception_mean, device=images.device)
        std = torch.tensor(c.proprioception_std, device=images.device)
        state = self.proprioception_projector((proprioception - mean) / std)
        pooled = self.pooled_projector(features.mean(-2))
        return torch.cat(
            [self.patch_projector(features), pooled.unsqueeze(-2), state.unsqueeze(-2)], -2)

    def forward(self, stream: Stream, images: torch.Tensor) -> torch.Tensor:
        """
        Return the logits of every decode step, [B, T, decode_tokens, bins].

        ``images`` are the stream's images already standardised (and augmented), float32.
        """
        c = self.config
        theta = c.transformer.rope_theta
        batch = len(stream.proprioception)
        slots, decode = c.slots_per_frame, c.decode_tokens
        device = images.device

        x = torch.cat([
            self.frame_tokens(images, stream.proprioception),
            self.model.embed_tokens(stream.decode_ids),
        ], 2)  # [B, T, slots + decode, hidden]
        prompt = self.model.embed_tokens(stream.prompt_ids)  # [B, 2, P, hidden]
        plan = self._visibility(stream)

        prompt_positions = torch.arange(prompt.shape[2], device=device).expand(batch * 2, -1)
        prompt_mask = torch.ones(
            prompt.shape[2], prompt.shape[2], dtype=torch.bool, device=device
        ).tril().expand(batch * 2, -1, -1)
        rows = torch.arange(batch, device=device)[:, None]

        for layer in self.model.layers:
            attention = layer.self_attn
            pq, pk, pv = (
                a.flatten(0, 1) for a in attention.project(layer.input_layernorm(prompt)))
            pk = rotate(pk, prompt_positions, theta)
            pq = rotate(pq, prompt_positions, theta)
            prompt = prompt + attention.attend(pq, pk, pv, prompt_mask).view_as(prompt)
            prompt = layer.feed_forward(prompt)

            q, k, v = attention.project(layer.input_layernorm(x))
            keys, values = [], []
            for own, valid, seen in ((k, pk, keys), (v, pv, values)):
                seen.append(valid.unflatten(0, (batch, 2))[rows, stream.prompt_index])
                past = own[:, :, :slots][rows[:, :, None], stream.history]
                seen.append(past.flatten(2, 3))
                seen.append(own)
            # The prompt's keys are rotated already: their positions in the plan are 0.
            all_k = rotate(torch.cat(keys, 2), plan.key_positions, theta).flatten(0, 1)
            all_v = torch.cat(values, 2).flatten(0, 1)
            q = rotate(q, plan.query_positions, theta).flatten(0, 1)
            x = x + attention.attend(q, all_k, all_v, plan.mask).view_as(x)
            x = layer.feed_forward(x)

        hidden = self.model.norm(x[:, :, slots:slots + decode])
        head = self.model.embed_tokens.weight[c.action_token_offset:]
        return hidden @ head[:c.bins].T.to(hidden.dtype)

    def _visibility(self, stream: Stream) -> '_Visibility':
        """Work out the rank positions and the mask; the same for every layer."""
        c = self.config
        batch, frames = stream.history_lengths.shape
        slots, decode = c.slots_per_frame, c.decode_tokens
        past = stream.history.shape[2]
        device = stream.history.device
        rows = torch.arange(batch, device=device)[:, None]

        prompt_length = stream.prompt_lengths[rows, stream.prompt_index]  # [B, T]
        width = stream.prompt_ids.shape[2]
        own = torch.arange(slots + decode, device=device)
        start = prompt_length + stream.history_lengths * slots
        query_positions = start[..., None] + own
        history_positions = prompt_length[..., None] + torch.arange(past * slots, device=device)
        key_positions = torch.cat([
            torch.zeros(batch, frames, width, dtype=torch.long, device=device),
            history_positions, query_positions], 2)

        prompt_seen = torch.arange(width, device=device) < prompt_length[..., None]
        history_seen = (
            torch.arange(past * slots, device=device)
            < stream.history_lengths[..., None] * slots)
        context = torch.cat([prompt_seen, history_seen], 2)
        context = context[:, :, None].expand(-1, -1, slots + decode, -1)
        causal = (own[:, None] >= own[None, :]).expand(batch, frames, -1, -1)
        mask = torch.cat([context, causal], 3).flatten(0, 1)
        return _Visibility(query_positions, key_positions, mask)


@dataclass
class _Visibility:
    query_positions: torch.Tensor  # [B, T, n]
    key_positions: torch.Tensor  # [B, T, m]
    mask: torch.Tensor  # [B * T, n, m]
