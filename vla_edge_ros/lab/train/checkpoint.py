"""Write checkpoints for the runtime, and the state of an unfinished training run."""

import json
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
import torch


def export(folder: Path, network: torch.nn.Module, config: dict) -> None:
    """Write ``model.safetensors`` (bfloat16) and ``config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: parameter.detach().to('cpu', torch.bfloat16).contiguous()
        for name, parameter in network.named_parameters()}
    save_file(tensors, folder / 'model.safetensors', metadata={'format': 'pt'})
    (folder / 'config.json').write_text(json.dumps(config, indent=1) + '\n', encoding='utf-8')


def save(path: Path, step: int, network: torch.nn.Module, optimizer) -> None:
    """Save parameters and AdamW moments so that training can go on from ``step``."""
    tensors = {f'parameter.{name}': p.detach() for name, p in network.named_parameters()}
    for i, p in enumerate(_parameters(optimizer)):
        for key, value in optimizer.state[p].items():
            tensors[f'optimizer.{i}.{key}'] = value.detach()
    partial = path.with_suffix('.partial')
    save_file({k: v.contiguous() for k, v in tensors.items()}, partial, {'step': str(step)})
    partial.rename(path)


def restore(path: Path, network: torch.nn.Module, optimizer) -> int:
    """Load what :func:`save` wrote and return the step to go on from."""
    parameters = dict(network.named_parameters())
    ordered = _parameters(optimizer)
    with safe_open(path, 'pt') as archive:
        with torch.no_grad():
            for key in archive.keys():
                kind, name = key.split('.', 1)
                value = archive.get_tensor(key)
                if kind == 'parameter':
                    parameters[name].copy_(value)
                else:
                    index, field = name.split('.', 1)
                    p = ordered[int(index)]
                    on_device = value if field == 'step' else value.to(p.device)
                    optimizer.state[p][field] = on_device
        return int(archive.metadata()['step'])


def _parameters(optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group['params']]
