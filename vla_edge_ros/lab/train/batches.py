"""Batches of training streams on a device."""

from pathlib import Path

import numpy as np
import torch

from vla_edge_ros.lab.train.dataset import sample_histories
from vla_edge_ros.lab.train.model import Stream
from vla_edge_ros.policy.policy_config import PolicyConfig

TOKEN_NOISE_BINS = 3.0  # fed-back tokens are jittered, as the policy's own will be off
HISTORY_POOL = 4096


def values_to_bins(values: np.ndarray, low, high, bins: int) -> np.ndarray:
    """Return the real-valued bin coordinate of ``values``; bin ``i`` is centred on ``i``."""
    low, high = np.asarray(low, np.float32), np.asarray(high, np.float32)
    return np.clip((values - low) / (high - low) * bins - 0.5, 0, bins - 1)


class StreamSet:
    """All streams of a run in memory, and batches of them on a device."""

    def __init__(self, shards: list[Path], config: PolicyConfig, tokenizer, device, seed: int):
        parts = []
        for path in shards:
            with np.load(path, allow_pickle=False) as archive:
                parts.append({key: archive[key] for key in archive.files})
        self.arrays = {
            key: np.concatenate([part.pop(key) for part in parts]) for key in list(parts[0])}
        self.images = torch.from_numpy(self.arrays.pop('images')).to(device)
        self.config = config
        self.device = device
        self.count, self.frames = self.arrays['proprioception'].shape[:2]
        grounding = values_to_bins(
            self.arrays['grounding'], config.grounding_low, config.grounding_high, config.bins)
        actions = values_to_bins(
            self.arrays['actions'], config.action_low, config.action_high, config.bins)
        self.targets = np.concatenate(
            [grounding, actions.reshape(*actions.shape[:2], -1)], -1).astype(np.float32)
        self._encode(tokenizer)
        rng = np.random.default_rng(seed)
        self.histories, self.history_lengths = sample_histories(
            rng, HISTORY_POOL, self.frames, config.max_frames)

    def _encode(self, tokenizer) -> None:
        texts = self.arrays['instructions'].reshape(-1).tolist()
        width = self.config.prompt_slots
        self.prompt_ids = np.zeros((len(texts), width), np.int64)
        lengths = np.zeros(len(texts), np.int64)
        for i, ids in enumerate(tokenizer(texts)['input_ids']):
            self.prompt_ids[i, :len(ids)] = ids
            lengths[i] = len(ids)
        self.prompt_ids = self.prompt_ids.reshape(-1, 2, width)
        self.prompt_lengths = lengths.reshape(-1, 2)

    def batch(self, rows: np.ndarray, rng: np.random.Generator):
        """Return ``(Stream, targets [B, T, decode_tokens] in bins)`` for the given streams."""
        c = self.config
        targets = self.targets[rows]
        noisy = targets[..., :-1] + rng.normal(0, TOKEN_NOISE_BINS, targets[..., :-1].shape)
        decode_ids = np.full(targets.shape, c.begin_token, np.int64)
        decode_ids[..., 1:] = c.action_token_offset + np.clip(
            np.rint(noisy), 0, c.bins - 1).astype(np.int64)
        plan = rng.integers(len(self.histories), size=len(rows))

        def send(array):
            return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)

        stream = Stream(
            images=self.images[send(rows)],
            proprioception=send(self.arrays['proprioception'][rows]),
            prompt_ids=send(self.prompt_ids[rows]),
            prompt_lengths=send(self.prompt_lengths[rows]),
            prompt_index=send(self.arrays['prompt_index'][rows]),
            history=send(self.histories[plan]),
            history_lengths=send(self.history_lengths[plan]),
            decode_ids=send(decode_ids),
        )
        return stream, send(targets)


def standardised(images, config: PolicyConfig, generator=None):
    """Standardise uint8 images; with a generator also vary brightness, contrast and noise."""
    x = images.float() / 255.0
    if generator is not None:
        def normal(*shape):
            return torch.randn(*shape, generator=generator, device=images.device)

        batch = images.shape[0]
        x = x * (1 + 0.12 * normal(batch, 1, 1, 1, 1)) + 0.05 * normal(batch, 1, 1, 1, 3)
        x = (x + 0.02 * normal(*x.shape)).clamp(0, 1)
    mean = torch.tensor(config.image_mean, device=images.device)
    std = torch.tensor(config.image_std, device=images.device)
    return (x - mean) / std
