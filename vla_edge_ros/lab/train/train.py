"""
Train the embedded default policy: ``vla-edge train``.

Films streams of the simulated table, trains the network by behaviour cloning of the scripted
expert, and writes a checkpoint the runtime loads. Every random choice follows from ``--seed``;
an interrupted run goes on from its last saved state.
"""

import argparse
from dataclasses import asdict, dataclass, fields
import hashlib
import json
import os
from pathlib import Path
import time

import numpy as np

from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.lab.train.dataset import collect, StreamShape
from vla_edge_ros.lab.train.tokenizer import (
    BEGIN_TOKEN,
    build_tokenizer,
    save_tokenizer,
    TEXT_TOKENS,
)
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_folder, FOLDERS_ARE_MADE
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.sim.scene import WORKSPACE_X, WORKSPACE_Y

BINS = 256
LABEL_SIGMA_BINS = 2.5  # targets are Gaussians over bins: near misses are nearly right
EARLY_TOKEN_WEIGHTS = (2.0, 2.0, 1.5, 1.5, 1.0, 1.0, 1.0, 1.0)
VALIDATION_BATCH = 64
TORCH_RULE = (
    'must find PyTorch: .venv/bin/pip install -c requirements/constraints.txt torch; '
    'outside this checkout: pip install torch')


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Size of a training run; ``learning_rate`` is the peak of a cosine with warm-up."""

    streams: int = 30_000
    validation: int = 512
    frames: int = 16
    steps: int = 9_000
    batch: int = 64
    learning_rate: float = 2e-3
    save_every: int = 500
    seed: int = 0


def transformer_section() -> dict:
    """Return the Hugging Face part of the default policy's ``config.json``."""
    return {
        'model_type': 'qwen2', 'architectures': ['Qwen2ForCausalLM'],
        'vocab_size': TEXT_TOKENS + BINS, 'hidden_size': 128, 'intermediate_size': 384,
        'num_hidden_layers': 4, 'num_attention_heads': 4, 'num_key_value_heads': 2,
        'rms_norm_eps': 1e-6, 'rope_theta': 10000.0, 'tie_word_embeddings': True,
        'max_position_embeddings': 1024, 'hidden_act': 'silu', 'torch_dtype': 'bfloat16',
    }


def default_config() -> PolicyConfig:
    """Return the configuration of the embedded default policy."""
    reach_x, reach_y = 1.1 * WORKSPACE_X, 1.1 * WORKSPACE_Y  # a margin at the table's edge
    return PolicyConfig(
        transformer=TransformerConfig.from_hugging_face(transformer_section()),
        image_width=96, image_height=80, patch_size=16,
        image_mean=(0.45, 0.45, 0.45), image_std=(0.25, 0.25, 0.25),
        vision_hidden_size=128, vision_intermediate_size=256,
        proprioception_mean=(0.0, 0.0), proprioception_std=(0.17, 0.14),
        prompt_slots=24, kv_slots=256,
        grounding_low=(-reach_x, -reach_y), grounding_high=(reach_x, reach_y),
        action_low=(-1.0, -1.0), action_high=(1.0, 1.0),
        chunk_steps=3, step_ms=1000.0 / 30.0,
        bins=BINS, begin_token=1, action_token_offset=TEXT_TOKENS,
        joint_names=('gantry_x', 'gantry_y'),
    )


def soft_cross_entropy(logits, targets, bins: int):
    """Weighted cross-entropy against Gaussians around real-valued bins; also the mean error."""
    import torch

    centres = torch.arange(bins, device=logits.device)
    distance = centres - targets.unsqueeze(-1)
    label = torch.softmax(-0.5 * (distance / LABEL_SIGMA_BINS) ** 2, -1)
    loss = -(label * torch.log_softmax(logits.float(), -1)).sum(-1)
    weights = torch.tensor(EARLY_TOKEN_WEIGHTS, device=logits.device)[:logits.shape[2]]
    error = (logits.argmax(-1) - targets).abs().mean((0, 1))
    return (loss * weights).mean(), error


def train(
    settings: TrainSettings, out: Path, work: Path, device: str, workers: int, stop: StopRequest
) -> dict:
    """
    Collect, train and write the checkpoint to ``out``; intermediate state lives in ``work``.

    ``stop`` is looked at once a step; what was filmed and saved until then stays.

    Returns
    -------
    dict
        The figures that go into the card: validation errors, samples, seconds.

    """
    with stop.interruptible():
        try:
            import torch
        except ImportError:
            raise BackendUnavailable('train', TORCH_RULE, 'no torch') from None
        from rich.progress import Progress, TimeElapsedColumn, TimeRemainingColumn

        from vla_edge_ros.lab.train import checkpoint
        from vla_edge_ros.lab.train.batches import standardised, StreamSet
        from vla_edge_ros.lab.train.model import PolicyNetwork

    if device == 'auto':
        device = 'cuda' if torch.cuda.is_available() else 'cpu'
    started = time.monotonic()
    torch.manual_seed(settings.seed)
    config = default_config()
    tokenizer = build_tokenizer(config.bins, settings.seed)
    if tokenizer.convert_tokens_to_ids(BEGIN_TOKEN) != config.begin_token:
        raise RuntimeError('the begin token moved')
    shape = StreamShape(
        settings.frames, config.image_width, config.image_height,
        config.chunk_steps, config.step_ms / 1000.0)

    # Another run's films and state are not this run's: each has a folder of its own.
    digest = hashlib.sha256(repr((settings, shape, config)).encode()).hexdigest()[:12]
    work = work / digest
    columns = [*Progress.get_default_columns()[:-1], TimeElapsedColumn(), TimeRemainingColumn()]
    with Progress(*columns) as progress:
        total = settings.validation + settings.streams
        task = progress.add_task('film streams', total=total)
        shards = []
        seed_base = settings.seed * 10_000_000
        for path in collect(work / 'streams', total, seed_base, shape, workers, stop):
            shards.append(path)
            progress.update(task, completed=min(len(shards) * 128, total))
        with stop.interruptible():
            data = StreamSet(sorted(shards), config, tokenizer, device, settings.seed)
            network = PolicyNetwork(config).to(device)
            optimizer = _optimizer(network, settings)
        state = work / f'state_{settings.seed}.safetensors'
        first = checkpoint.restore(state, network, optimizer) if state.exists() else 0
        generator = torch.Generator(device=device)
        task = progress.add_task('train', total=settings.steps, completed=first)
        for step in range(first, settings.steps):
            stop.check()
            rng = np.random.default_rng([settings.seed, step])
            generator.manual_seed(settings.seed * 1_000_003 + step)
            rows = rng.integers(settings.validation, data.count, settings.batch)
            stream, targets = data.batch(rows, rng)
            for group in optimizer.param_groups:
                group['lr'] = _learning_rate(settings, step)
            with torch.autocast(device, torch.bfloat16, enabled=device == 'cuda'):
                logits = network(stream, standardised(stream.images, config, generator))
            loss, error = soft_cross_entropy(logits, targets, config.bins)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            if step % 50 == 0:
                bins = ' '.join(f'{value:.1f}' for value in error.tolist())
                progress.update(
                    task, completed=step, description=f'loss {loss.item():.3f} off {bins} bins')
            if step % 200 == 0 and not progress.console.is_terminal:
                progress.console.print(f'step {step} loss {loss.item():.3f} bins off {bins}')
            if (step + 1) % settings.save_every == 0:
                checkpoint.save(state, step + 1, network, optimizer)
        progress.update(task, completed=settings.steps)

    with stop.interruptible():
        bins_off = _validate(network, data, settings)
    figures = {
        'validation_bins_off': bins_off,
        'settings': asdict(settings), 'first_step': first,
        'seconds': round(time.monotonic() - started, 1), 'device': device,
        'environment': environment_record(),
    }
    checkpoint.export(out, network, {**transformer_section(), 'vla': config.vla_section()})
    save_tokenizer(tokenizer, out)
    (out / 'training.json').write_text(json.dumps(figures, indent=1) + '\n')
    return figures


def _optimizer(network, settings: TrainSettings):
    import torch

    matrices = [p for p in network.parameters() if p.ndim >= 2]
    vectors = [p for p in network.parameters() if p.ndim < 2]
    groups = [{'params': matrices, 'weight_decay': 0.05}, {'params': vectors, 'weight_decay': 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98))


def _learning_rate(settings: TrainSettings, step: int) -> float:
    warm_up = min(1.0, (step + 1) / 200)
    return settings.learning_rate * warm_up * (
        0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * step / settings.steps)))


def _validate(network, data, settings: TrainSettings) -> list[float]:
    """Mean distance in bins of each decoded token from the expert's, on unseen streams."""
    import torch

    from vla_edge_ros.lab.train.batches import standardised

    errors = []
    rng = np.random.default_rng(settings.seed)
    with torch.no_grad():
        for start in range(0, settings.validation, VALIDATION_BATCH):
            rows = np.arange(start, min(start + VALIDATION_BATCH, settings.validation))
            stream, targets = data.batch(rows, rng)
            logits = network(stream, standardised(stream.images, data.config))
            errors.append(soft_cross_entropy(logits, targets, data.config.bins)[1])
    return [round(value, 3) for value in torch.stack(errors).mean(0).tolist()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge train``."""
    parser.add_argument('--out', type=Path, default=Path('out/policy'),
                        help=f'checkpoint folder; {FOLDERS_ARE_MADE}')
    parser.add_argument('--work', type=Path, default=Path('out/train'),
                        help=f'films and resumable state; {FOLDERS_ARE_MADE}')
    helps = {
        'streams': 'films to train on', 'validation': 'films kept apart',
        'frames': 'frames a film', 'steps': 'optimizer steps', 'batch': 'films a step',
        'learning_rate': 'peak of the schedule', 'save_every': 'steps between saved states',
        'seed': 'equal seeds give equal films and batches',
    }
    for field in fields(TrainSettings):
        parser.add_argument(
            '--' + field.name.replace('_', '-'), type=field.type, default=field.default,
            help=f'{helps[field.name]} (default: {field.default})')
    parser.add_argument('--device', choices=['auto', 'cpu', 'cuda'], default='auto')
    parser.add_argument('--workers', type=int, default=os.cpu_count() or 1,
                        help='processes that film')


def run(arguments: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge train``."""
    settings = TrainSettings(**{
        field.name: getattr(arguments, field.name) for field in fields(TrainSettings)})
    for name, value in [*asdict(settings).items(), ('workers', arguments.workers)]:
        if name != 'seed' and not value > 0:
            raise ConfigError('--' + name.replace('_', '-'), 'must be > 0', value)
    if settings.seed < 0:
        raise ConfigError('--seed', 'must be >= 0', settings.seed)
    check_folder(
        '--out', arguments.out, 'config.json', 'model.safetensors', 'tokenizer.json',
        'training.json')
    check_folder('--work', arguments.work)
    figures = train(
        settings, arguments.out, arguments.work, arguments.device, arguments.workers, stop)
    print(f'wrote {arguments.out}; bins off on unseen films: {figures["validation_bins_off"]}')
    return 0
