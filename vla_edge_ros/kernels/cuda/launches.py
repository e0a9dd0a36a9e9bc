"""Which kernels a prefill and a decode launch, with which grids and arguments."""

from collections.abc import Mapping

from vla_edge_ros.kernels.cuda import layout
from vla_edge_ros.kernels.cuda.attend import ROW_WARPS
from vla_edge_ros.kernels.cuda.constants import (
    AHEAD,
    BULK_COPY,
    DECODE_ROWS,
    INNER_SCALE,
    MAX_CANDIDATES,
    MAX_CHUNKS,
    MAX_SPLITS,
    MAX_STAGES,
    MIXED_HEADS,
    PREFILL_SCRATCH,
    PREFILL_SPLIT_WARPS,
    STAGE_BYTES,
    STATE_WORDS,
    STEP,
    STREAM_EXTRA,
    STREAM_SCRATCH,
    THREADS,
    TOKENS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.driver import Device, Launch

_CACHE = 'ppppp'
PREFILL_BLOCKS = 2
"""Blocks of a product that share a processor."""
DEEP = 64
"""Steps from which a block of a prefill takes several tiles of a chunk."""

KEYS_AND_VALUES = 2
"""Launches of a layer of a prefill until these are stored."""


def _chunks(tiles: int, steps: int, blocks: int) -> int:
    """Return in how many chunks a prefill splits the depth of a product onto the residual."""
    rounds = 4 if steps > DEEP else 1
    return max(min(rounds * blocks // tiles, MAX_CHUNKS, steps // WARPS), 1)


class Launches:
    """
    The launches of one engine, made of its addresses once.

    Parameters
    ----------
    device : Device
        With the kernels loaded.
    config : TransformerConfig
        Shape of the network.
    plan : mapping of str to Buffer
        What ``layout.memory_plan`` lists, by name.
    at : mapping of str to int
        Address of each of them, and of ``head``.
    total_slots : int
        Slots of the cache.

    """

    def __init__(self, device: Device, config, plan: Mapping, at: Mapping[str, int],
                 total_slots: int):  # fmt: skip
        self._device = device
        self._config = config
        self._plan = plan
        self._at = at
        self._slots = total_slots
        self._ranks = layout.rank_capacity(total_slots)
        self._processors = device.attribute('MULTIPROCESSOR_COUNT')
        self._order = at['state'] + 4 * STATE_WORDS
        self._head_blocks = min(2 * self._processors, MAX_CANDIDATES)
        self._tiles = {
            'qkv': layout.tiles(config.qkv_size),
            'output': layout.tiles(config.hidden_size),
            'gate_up': layout.tiles(2 * config.intermediate_size),
        }

    def layer(self, name: str, layer: int) -> int:
        """Return the address of one layer's part of a buffer."""
        buffer = self._plan[name]
        return self._at[name] + layer * (buffer.bytes // buffer.shape[0])

    def arrange(self) -> Launch:
        """Bring keys and values of the context into order of rank."""
        at, config = self._at, self._config
        return self._device.prepare(
            'arrange', (self._processors * 4,), THREADS, 'pppppppp' + 'iiii', at['state'],
            self._order, at['keys'], at['values'], at['cosine'], at['sine'], at['rotated'],
            at['pairs'], config.num_hidden_layers, self._slots, config.num_key_value_heads,
            self._ranks)

    def gather(self, count: int) -> Launch:
        """Fetch the embeddings of the first tokens in ``tokens`` to ``hidden``."""
        at = self._at
        return self._device.prepare(
            'gather', (count,), THREADS, 'ppip', at['tokens'], at['embedding'],
            self._config.hidden_size, at['hidden'])

    def embed(self, step: int, num_tokens: int) -> Launch:
        """Choose the token of the last step, and fetch its embedding but for the last."""
        at = self._at
        return self._device.prepare(
            'embed', (1,), THREADS, 'piippipipp', at['state'], step, num_tokens,
            at['candidates'], at['candidate_rows'], self._head_blocks, at['embedding'],
            self._config.hidden_size, self._residual(0), at['tokens'])

    def head(self, normed: bool = False) -> Launch:
        """Write logits and the best row of every block."""
        at, config = self._at, self._config
        last = 2 * config.num_hidden_layers
        chunks = 0 if normed else self._down_chunks
        return self._device.prepare(
            'decode_head', (self._head_blocks,), THREADS, 'pi' + 'pppipf' + 'pi' + 'ppp',
            at['head'], config.hidden_size // STEP,
            *self._row(0 if normed else last, chunks, at['final_norm']),
            at['state'], int(normed), at['logits'], at['candidates'], at['candidate_rows'],
            shared=10 * config.hidden_size)

    def decode_layer(self, layer: int, step: int) -> list[Launch]:
        """Take one token through a layer."""
        at, config, prepare = self._at, self._config, self._device.prepare
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = layout.query_rows(config, TOKENS)
        tiles = self._tiles
        attention, warps = self._attention(layer, step, single=True)
        down = self._down_chunks
        return [
            prepare(
                'decode_qkv', (min(tiles['qkv'], 2 * self._processors),), THREADS,
                'pii' + 'pppipf' + 'pppp' + 'ip' + _CACHE + 'iiii', self.layer('qkv', layer),
                tiles['qkv'], hidden // STEP,
                *self._row(2 * layer, down if layer else 0, self.layer('attention_norm', layer)),
                self.layer('qkv_bias', layer), at['cosine'], at['sine'], at['state'], step,
                self._order, *self._cache(layer), heads, kv_heads, self._ranks, rows,
                shared=10 * hidden),
            attention,
            prepare(
                'decode_output', (tiles['output'],), THREADS,
                'pii' + 'ppp' + 'iiiii' + 'p', self.layer('output', layer), tiles['output'],
                config.query_size // STEP, at['partials'], at['extremes'], at['state'], step,
                heads, kv_heads, rows, warps, at['sums'], shared=2 * config.query_size),
            prepare(
                'decode_mlp', (min(tiles['gate_up'], 2 * self._processors),), THREADS,
                'pii' + 'pppipf' + 'p', self.layer('gate_up', layer), tiles['gate_up'],
                hidden // STEP,
                *self._row(2 * layer + 1, 1, self.layer('mlp_norm', layer)), at['inner'],
                shared=10 * hidden),
            prepare(
                'decode_down', (tiles['output'] * down,), THREADS, 'piii' + 'pp',
                self.layer('down', layer), tiles['output'], inner // STEP, down, at['inner'],
                at['sums'], shared=2 * inner),
        ]  # fmt: skip

    def stream(self, num_tokens: int) -> Launch:
        """Decode all tokens in one launch; see ``stream.py``."""
        at, config = self._at, self._config
        per_slot = config.num_key_value_heads * config.head_dim
        room = self._device.attribute('MAX_SHARED_MEMORY_PER_BLOCK_OPTIN')
        stages = min((room - STREAM_SCRATCH - STREAM_EXTRA) // STAGE_BYTES, MAX_STAGES)
        return self._device.prepare(
            'decode_stream', (layout.stream_blocks(config, self._processors),), THREADS + 32,
            'ppppp' + 'pppp' + 'pppp' + 'ppp' + 'pp' + 'pp' + 'p' + 'pp' + 'ppp' + 'pp'
            + 'iiiii' + 'pp' + 'iiiiiiii' + 'ff' + 'iii',
            at['qkv'], at['output'], at['gate_up'], at['down'], at['head'],
            at['qkv_bias'], at['attention_norm'], at['mlp_norm'], at['final_norm'],
            at['keys'], at['values'], at['rotated'], at['pairs'],
            at['queries'], at['stream_partials'], at['stream_extremes'], at['cosine'], at['sine'],
            at['state'], self._order, at['embedding'], at['stream_residual'], at['inner'],
            at['logits'], at['candidates'], at['candidate_rows'], at['tokens'], at['shares'],
            config.num_hidden_layers, config.hidden_size, config.intermediate_size,
            config.num_attention_heads, config.num_key_value_heads,
            self._slots * per_slot, self._ranks * per_slot, self._ranks,
            layout.query_rows(config, TOKENS), layout.stream_splits(config, self._processors),
            config.hidden_size // STEP, config.intermediate_size // STEP, self._tiles['output'],
            self._tiles['qkv'], self._tiles['gate_up'], config.rms_norm_eps,
            1 / config.hidden_size, num_tokens, stages, AHEAD,
            shared=STREAM_SCRATCH + STREAM_EXTRA + stages * STAGE_BYTES, cooperative=True)

    def prefill(self) -> list[list[Launch]]:
        """Return the launches of each layer; the first of the one behind completes its sum."""
        at, config, prepare = self._at, self._config, self._device.prepare
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = layout.query_rows(config, TOKENS)
        tiles = self._tiles
        blocks = PREFILL_BLOCKS * self._processors
        down, output = (
            _chunks(tiles['output'], depth // STEP, blocks)
            for depth in (inner, config.query_size))
        streams = self._device.capability >= BULK_COPY and layout.prefill_stream_parts(
            config, self._processors,
            self._device.attribute('MAX_SHARED_MEMORY_PER_BLOCK_OPTIN'))
        if streams:
            down, stages = streams

        def partial(name, layer, depth, chunks, x, factor):
            grid = min(tiles['output'] * chunks, blocks // chunks * chunks)
            return prepare(
                'prefill_partial', (grid,), THREADS, 'piiipfp', self.layer(name, layer),
                tiles['output'], depth // STEP, chunks, x, factor, at['sums'])

        def mlp(layer):
            if streams:
                return [prepare(
                    'prefill_stream', (self._processors,), THREADS + 32, 'pppppp' + 'iiiiii',
                    self.layer('gate_up', layer), self.layer('down', layer), at['normed'],
                    at['inner'], at['sums'], at['state'], tiles['gate_up'], hidden // STEP,
                    tiles['output'], inner // STEP, down, stages,
                    shared=PREFILL_SCRATCH + stages * STAGE_BYTES)]
            return [
                prepare(
                    'prefill_mlp', (min(tiles['gate_up'], blocks),), THREADS, 'piipp',
                    self.layer('gate_up', layer), tiles['gate_up'], hidden // STEP,
                    at['normed'], at['inner']),
                partial('down', layer, inner, down, at['inner'], 1.0 / INNER_SCALE),
            ]  # fmt: skip

        plan = []
        for layer in range(config.num_hidden_layers):
            attention, warps = self._attention(layer, 0, single=False)
            plan.append([
                self._norm(self.layer('attention_norm', layer), down if layer else 0),
                prepare(
                    'prefill_qkv', (min(tiles['qkv'], blocks),), THREADS,
                    'piipppppp' + _CACHE + 'iiii', self.layer('qkv', layer), tiles['qkv'],
                    hidden // STEP, at['normed'], self.layer('qkv_bias', layer), at['cosine'],
                    at['sine'], at['state'], self._order, *self._cache(layer), heads, kv_heads,
                    self._ranks, rows),
                attention,
                prepare(
                    'prefill_mix', (TOKENS, -(-heads // MIXED_HEADS)), THREADS, 'pppiiiip',
                    at['partials'], at['extremes'], at['state'], heads, kv_heads, rows, warps,
                    at['mixed']),
                partial('output', layer, config.query_size, output, at['mixed'], 1.0),
                self._norm(self.layer('mlp_norm', layer), output),
                *mlp(layer),
            ])  # fmt: skip
        plan.append([self._norm(at['final_norm'], down, keep=True)])
        return plan

    def _norm(self, gain: int, num_sums: int, keep: bool = False) -> Launch:
        at, config = self._at, self._config
        return self._device.prepare(
            'prefill_norm', (TOKENS,), THREADS, 'ppipfipppi', self._residual(0), at['sums'],
            num_sums, gain, config.rms_norm_eps, config.hidden_size, at['state'], at['normed'],
            at['hidden'], int(keep), shared=8 * config.hidden_size)

    def _attention(self, layer: int, step: int, single: bool) -> tuple[Launch, int]:
        """Return the attention of one layer, and the sixteens of keys a split has at least."""
        at, config = self._at, self._config
        group = config.num_attention_heads // config.num_key_value_heads
        kv_heads, rows = config.num_key_value_heads, layout.query_rows(config, TOKENS)
        common = (at['queries'], self.layer('rotated', layer), self.layer('pairs', layer),
                  at['state'], step)  # fmt: skip
        if single and group <= DECODE_ROWS:
            return self._device.prepare(
                'decode_attention', (kv_heads, MAX_SPLITS), THREADS, 'ppppi' + 'ii' + 'pp',
                *common, rows, self._ranks, at['partials'], at['extremes']), WARPS
        mine = layout.query_rows(config, 1 if single else TOKENS)
        return self._device.prepare(
            'prefill_attention', (kv_heads, mine // (16 * ROW_WARPS), MAX_SPLITS),
            32 * ROW_WARPS, 'ppppi' + 'iiii' + 'pp', *common, int(single), group, rows,
            self._ranks, at['partials'], at['extremes']), PREFILL_SPLIT_WARPS

    def _residual(self, index: int) -> int:
        """Return the residual; decode alternates, so that none is written while it is read."""
        return self._at['residual'] + index % 2 * 4 * self._config.hidden_size

    def _row(self, index: int, chunks: int, gain: int) -> tuple:
        """Return the arguments of the ``index``-th normalisation of a token."""
        return (self._residual(index), self._residual(index + 1), self._at['sums'], chunks, gain,
                self._config.rms_norm_eps)  # fmt: skip

    def _cache(self, layer: int) -> tuple[int, ...]:
        names = ('keys', 'values', 'rotated', 'pairs')
        return (*(self.layer(name, layer) for name in names), self._at['queries'])

    @property
    def _down_chunks(self) -> int:
        """In how many chunks decode splits the depth of the way back from the MLP."""
        wanted = round(2 * self._processors / self._tiles['output'])
        return max(min(wanted, MAX_CHUNKS, self._config.intermediate_size // STEP // WARPS), 1)
