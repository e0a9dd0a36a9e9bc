"""
Where the time of a run goes: stages and their parts, with what bounds each.

Three times are measured: whole stages of the policy behind a full cache; the parts of the decoder
one by one; and how fast this machine reads and multiplies, in the same process with as many
threads. A part is bound by the roof that it reaches at least half of, by latency otherwise.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vla_edge_ros.policy.work import attention, layer_products, product, vision, Work
from vla_edge_ros.runtime.profiles import time_stages
from vla_edge_ros.telemetry.stages import Stage

NEAR_ROOF = 0.5
"""Part of a roof from which it is what bounds."""
IN_CACHE = 1.05
"""What reads faster than the memory roof finds in a cache nearer by what it reads."""
WHOLE_VOCABULARY = ('decode_stream', 'decode_head')
MEMORY, COMPUTE, LATENCY = 'memory', 'compute', 'latency'


class Roofs(NamedTuple):
    """What a machine can do: bytes and FLOP a second, the latter None if unknown."""

    bytes_s: float
    flop_s: float | None
    about: str


class Row(NamedTuple):
    """A stage (``part`` is '') or a part of it; ``seconds`` in a run, work None if not counted."""

    stage: str
    part: str
    seconds: float
    work: Work | None


def measure_cpu(policy, runs: int, repeats: int) -> tuple[list[Row], Roofs]:
    """
    Profile a policy on the CPU kernels, which run in one thread.

    Parameters
    ----------
    policy : Policy
        On backend ``cpu``; its cache is spoiled.
    runs, repeats : int
        Timed runs of the policy, and of each part.

    """
    from vla_edge_ros.kernels.cpu.measure import (
        MAIN_MEMORY_BYTES,
        part_times,
        product_rate,
        read_bandwidth,
    )

    config, engine = policy.config, policy.transformer.engine
    weight_bytes = 2 if policy.transformer.weights_dtype == 'bfloat16' else 4
    tokens, length = config.slots_per_frame, context_slots(policy)
    once = sum(decoder_works(config, 1, length + tokens, weight_bytes, 4).values(), Work(0, 0))
    touched = min(once.bytes, MAIN_MEMORY_BYTES)
    roofs = Roofs(
        read_bandwidth(touched), product_rate(),
        f'measured in this run, one thread: reading {touched / 1e6:,.1f} MB, as a decoded token '
        'does, over and over; float32 products out of the first-level cache')
    totals = _medians(time_stages(policy, runs))
    times = {}
    for stage, rows, seen, times_a_run in (
        (Stage.PREFILL, tokens, length, 1),
        (Stage.DECODE, 1, length + tokens, config.decode_tokens),
    ):
        found = part_times(
            engine, seen, rows, config.action_token_offset, config.bins, repeats)
        works = decoder_works(config, rows, seen, weight_bytes, 4)
        times[stage] = [
            Row(stage.value, part, seconds * times_a_run, works[part] * times_a_run)
            for part, seconds in found]
    return assemble(totals, {Stage.VISION: vision(config)}, times), roofs


def measure_cuda(policy, runs: int, repeats: int) -> tuple[list[Row], Roofs]:
    """
    Profile a policy on the CUDA kernels, as :func:`measure_cpu`; a part is a kernel.

    A decode that is one kernel has no parts, and the head counts to the rest: its kernel is timed
    over the whole vocabulary, of which a policy takes its action tokens.
    """
    from vla_edge_ros.kernels.cuda.measure import kernel_times, read_bandwidth
    from vla_edge_ros.lab.roofline import compute_roof, stage_rows

    config, engine = policy.config, policy.transformer.engine
    tflop_s, source = compute_roof(engine.device.name)
    bandwidth = read_bandwidth(engine)
    totals = _medians(time_stages(policy, runs))
    length = context_slots(policy)
    kernels = stage_rows(
        kernel_times(engine, length, config.decode_tokens, repeats), config.transformer, length,
        bandwidth, tflop_s)
    times: dict[Stage, list[Row]] = {Stage.PREFILL: [], Stage.DECODE: []}
    for row in kernels:
        if row['kernel'] in WHOLE_VOCABULARY:
            continue
        stage = Stage(row['pass']) if row['pass'] else Stage.PREFILL
        work = Work(row['bytes'], row['flop']) * row['launches'] if 'bytes' in row else None
        times[stage].append(Row(stage.value, row['stage'], 1e-3 * row['ms_of_chunk'], work))
    flop_s = None if tflop_s is None else 1e12 * tflop_s
    seen = length + config.slots_per_frame
    token = sum(decoder_works(config, 1, seen, 2, 2).values(), Work(0, 0))
    works = {Stage.VISION: vision(config), Stage.DECODE: token * config.decode_tokens}
    about = f'read bandwidth measured in this run; tensor cores {source}'
    return assemble(totals, works, times), Roofs(bandwidth, flop_s, about)


def context_slots(policy) -> int:
    """Return the slots behind which a frame is taken in once the cache of a policy is full."""
    layout = policy.cache.layout
    frames = layout.max_frames * policy.config.slots_per_frame
    return layout.prompt_slots + frames - policy.config.slots_per_frame


def decoder_works(
    config, tokens: int, length: int, weight_bytes: float, number_bytes: int
) -> dict[str, Work]:
    """Return the work of the parts of the decoder in one pass of so many new tokens."""
    network, layers = config.transformer, config.transformer.num_hidden_layers
    parts = {
        **layer_products(network, tokens, weight_bytes, number_bytes),
        'attention': attention(network, length, tokens, number_bytes)}
    works = {part: work * layers for part, work in parts.items()}
    works['head'] = product(config.bins, network.hidden_size, 1, weight_bytes, number_bytes)
    return works


def assemble(
    totals: Mapping[Stage, float], works: Mapping[Stage, Work],
    parts: Mapping[Stage, Sequence[Row]],
) -> list[Row]:
    """
    Return all rows: each stage, its parts behind it, and what of it they do not explain.

    Parameters
    ----------
    totals : mapping of Stage to float
        Whole stages, s.
    works : mapping of Stage to Work
        Of whole stages.
    parts : mapping of Stage to rows
        What they consist of; a stage that ``works`` leaves out has the work of its parts.

    """
    rows = []
    for stage, seconds in totals.items():
        inside = parts.get(stage, ())
        work = works.get(stage)
        if inside and work is None:
            work = sum((row.work for row in inside if row.work is not None), Work(0, 0))
        rows += [Row(stage.value, '', seconds, work), *inside]
        if inside:
            rest = seconds - sum(row.seconds for row in inside)
            rows.append(Row(stage.value, 'rest', rest, None))
    return rows


def judge(row: Row, roofs: Roofs) -> dict[str, Any]:
    """
    Return what is said of a row, ready for JSON.

    Returns
    -------
    dict
        Besides the row: ``memory_share`` and ``compute_share``, which part of each roof it
        reaches, and ``bound``; None where the work is not counted.

    """
    said = {'stage': row.stage, 'part': row.part, 'ms': 1e3 * row.seconds, 'bytes': None,
            'flop': None, 'memory_share': None, 'compute_share': None, 'bound': None}  # fmt: skip
    if row.work is None or row.seconds <= 0 or not row.work.bytes:
        return said
    memory = row.work.bytes / row.seconds / roofs.bytes_s
    compute = None if roofs.flop_s is None else row.work.flop / row.seconds / roofs.flop_s
    reached = {COMPUTE: compute or 0.0, MEMORY: memory if memory <= IN_CACHE else 0.0}
    highest = max(reached, key=reached.__getitem__)
    return said | {
        'bytes': row.work.bytes, 'flop': row.work.flop, 'memory_share': memory,
        'compute_share': compute, 'bound': highest if reached[highest] >= NEAR_ROOF else LATENCY}


def report(rows: Sequence[Row], roofs: Roofs) -> dict[str, Any]:
    """Return roofs and judged rows, with each one's share of the run, ready for JSON."""
    total = sum(row.seconds for row in rows if not row.part)
    return {
        'roofs': {'bytes_per_s': roofs.bytes_s, 'flop_per_s': roofs.flop_s, 'about': roofs.about},
        'run_ms': 1e3 * total,
        'rows': [{**judge(row, roofs), 'share': row.seconds / total} for row in rows],
    }


def _medians(samples_ns: Mapping[Stage, np.ndarray]) -> dict[Stage, float]:
    return {stage: 1e-9 * float(np.median(ns)) for stage, ns in samples_ns.items()}
