"""
The decoder on a GPU: compiled, packed and recorded when it is made; then a few launches a chunk.

A prefill and a greedy decode are one recorded graph each. The host writes the state (slots by
rank, counts, the first token) into pinned memory, starts the graph and waits; nothing happens on
the host for a layer or a token.
"""

from collections.abc import Callable

import numpy as np

from vla_edge_ros.kernels.bfloat16 import to_float32
from vla_edge_ros.kernels.cuda import layout
from vla_edge_ros.kernels.cuda.compiler import load_program
from vla_edge_ros.kernels.cuda.constants import (
    ARRANGE_FROM,
    CONTEXT,
    FIRST_ROW,
    FIRST_TOKEN,
    INNER_SCALE,
    MAX_CHUNKS,
    MAX_SPLITS,
    NEW_TOKENS,
    NUM_ROWS,
    PREFILL_WARPS,
    STATE_WORDS,
    STEP,
    THREADS,
    TOKENS,
    WARPS,
)
from vla_edge_ros.kernels.cuda.driver import Device, Launch

DECODE_ROWS = 8
"""Query heads of a KV head that the attention of one token keeps; more take that of prefill."""
BLOCKS_PER_PROCESSOR = 2
DEFAULT_SHARED = 40 * 1024
"""Dynamic shared memory that needs no leave, next to what the kernels take themselves."""


class Engine:
    """
    One decoder on one GPU; same methods and rule as ``kernels.cpu.Engine``.

    Parameters
    ----------
    config : TransformerConfig
        Shape of the network, see ``layout.check_config``.
    tensors : dict of str to ndarray
        Checkpoint tensors by their Hugging Face names, float32 or uint16 (bfloat16).
    weights_dtype : str
        Not looked at: matrices are held as float16, see ``layout.pack_matrix``.
    total_slots, max_tokens : int
        Cache slots, and the most tokens of one prefill; more than 32 run in parts.
    report : callable, optional
        Called with (kernels done, of how many, name) while kernels are compiled.

    Raises
    ------
    BackendUnavailable
        There is no GPU, or kernels for it cannot be made.

    """

    def __init__(
        self, config, tensors, weights_dtype: str, total_slots: int, max_tokens: int, report=None
    ):
        plan = layout.memory_plan(config, weights_dtype, total_slots, max_tokens)
        self.device = device = Device()
        program = load_program(device.capability, config.head_dim, report)
        device.load(program.cubin, program.entries)
        self._config = config
        self._sizes = {buffer.name: buffer for buffer in plan}
        self._at = {buffer.name: device.allocate(buffer.bytes) for buffer in plan}
        self._at.setdefault('head', self._at['embedding'])
        self._slots = total_slots
        self._ranks = layout.rank_capacity(total_slots)
        self._processors = device.attribute('MULTIPROCESSOR_COUNT')
        self._dependent = device.capability >= (9, 0)
        self._host_state = device.allocate_pinned((STATE_WORDS + self._ranks,), np.int32)
        self._host_rows = device.allocate_pinned((TOKENS, config.hidden_size), np.float32)
        self._host_hidden = device.allocate_pinned((TOKENS, config.hidden_size), np.float32)
        self._host_tokens = device.allocate_pinned((self._ranks,), np.int32)
        self._held = np.empty(0, np.int32)
        self._upload(tensors)
        self._prefill_launches = self._plan_prefill()
        self._prefill_graph = device.record(self._queue_prefill)
        self._decode_graphs: dict[int, object] = {}

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the embeddings float32 [n, hidden] of int token ids."""
        self.device.use()
        out = np.empty((len(token_ids), self._config.hidden_size), np.float32)
        for start in range(0, len(token_ids), TOKENS):
            part = np.asarray(token_ids[start : start + TOKENS], np.int32)
            rows = out[start : start + len(part)]
            self.device.copy_in(self._at['tokens'], part)
            self.device.launch(self.device.prepare(
                'gather', (len(part),), THREADS, 'ppip', self._at['tokens'],
                self._at['embedding'], self._config.hidden_size, self._at['hidden']))
            self.device.copy_out(rows, self._at['hidden'])
            self.device.wait()
        return out

    def forward(self, embeddings, context_slots, write_slots, layer_outputs=None) -> np.ndarray:
        """
        Run the new tokens through all layers, their keys and values going to ``write_slots``.

        Returns the final-normed hidden states float32 [n, hidden]; the residual after each
        layer goes to ``layer_outputs`` float32 [layers, n, hidden] when given.
        """
        self.device.use()
        hidden = np.empty((len(embeddings), self._config.hidden_size), np.float32)
        for start in range(0, len(embeddings), TOKENS):
            stop = min(start + TOKENS, len(embeddings))
            context = np.concatenate([context_slots, write_slots[:start]])
            self._set_state(context, write_slots[start:stop])
            self._host_rows[: stop - start] = embeddings[start:stop]
            if layer_outputs is None:
                self.device.run(self._prefill_graph)
            else:
                self._queue_prefill(layer_outputs[:, start:stop])
            self.device.wait()
            hidden[start:stop] = self._host_hidden[: stop - start]
        return hidden

    def logits(self, hidden: np.ndarray, first_row: int, num_rows: int) -> np.ndarray:
        """Return the logits float32 [num_rows] of one hidden state float32 [hidden]."""
        device = self.device
        device.use()
        self._set_rows(first_row, num_rows)
        self._host_rows[0] = hidden
        device.copy_in(self._at['state'], self._host_state)
        device.copy_in(self._at['residual'], self._host_rows)
        device.launch(self._head(normed=1))
        out = np.empty(num_rows, np.float32)
        device.copy_out(out, self._at['logits'] + 4 * first_row)
        device.wait()
        return out

    def decode_greedy(
        self, first_token, num_tokens, context_slots, write_slots, first_row, num_rows
    ) -> np.ndarray:
        """Return int32 [num_tokens]: the best rows after ``first_token``, each fed back."""
        self.device.use()
        self._set_state(context_slots, write_slots)
        self._set_rows(first_row, num_rows)
        self._host_state[FIRST_TOKEN] = first_token
        graph = self._decode_graphs.get(num_tokens)
        if graph is None:
            graph = self.device.record(lambda: self._queue_decode(num_tokens))
            self._decode_graphs[num_tokens] = graph
        self.device.run(graph)
        self.device.wait()
        return self._host_tokens[:num_tokens].copy()

    def close(self) -> None:
        """Free everything on the device."""
        self.device.close()

    def _set_state(self, context_slots, write_slots) -> None:
        """Write counts and slots, and from which rank on keys must be arranged anew."""
        context, tokens = len(context_slots), len(write_slots)
        same = min(len(self._held), context)
        differ = np.flatnonzero(self._held[:same] != context_slots[:same])
        state = self._host_state
        state[CONTEXT], state[NEW_TOKENS] = context, tokens
        state[ARRANGE_FROM] = differ[0] if len(differ) else same
        order = state[STATE_WORDS:]
        order[:context] = context_slots
        order[context : context + tokens] = write_slots
        self._held = order[: context + tokens].copy()

    def _set_rows(self, first_row, num_rows) -> None:
        self._host_state[FIRST_ROW], self._host_state[NUM_ROWS] = first_row, num_rows

    # Launches.

    def _layer(self, name: str, layer: int) -> int:
        """Return the address of one layer's part of a buffer."""
        buffer = self._sizes[name]
        return self._at[name] + layer * (buffer.bytes // buffer.shape[0])

    def _blocks(self, units: int) -> int:
        return min(units, self._processors * BLOCKS_PER_PROCESSOR)

    def _shared(self, depth: int) -> dict[str, int]:
        return {'shared': 2 * depth}

    @property
    def _order(self) -> int:
        return self._at['state'] + 4 * STATE_WORDS

    def _cache(self, layer: int) -> tuple[int, ...]:
        names = ('keys', 'values', 'rotated', 'pairs')
        return (*(self._layer(name, layer) for name in names), self._at['queries'])

    def _chunks(self, tiles: int, steps: int) -> int:
        wanted = max(-(-self._processors * BLOCKS_PER_PROCESSOR // tiles), -(-steps // 64))
        return min(wanted, MAX_CHUNKS, steps)

    def _arrange(self) -> Launch:
        at, config = self._at, self._config
        return self.device.prepare(
            'arrange', (self._processors * 4,), THREADS, 'pppppppp' + 'iiii',
            at['state'], self._order, at['keys'], at['values'], at['cosine'], at['sine'],
            at['rotated'], at['pairs'], config.num_hidden_layers, self._slots,
            config.num_key_value_heads, self._ranks)

    def _attention(self, layer: int, step: int, single: bool) -> tuple[Launch, int]:
        """Return the attention of one layer and the warps of its blocks."""
        at, config = self._at, self._config
        group = config.num_attention_heads // config.num_key_value_heads
        few = single and group <= DECODE_ROWS
        name, warps = ('decode', WARPS) if few else ('prefill', PREFILL_WARPS)
        rows = layout.query_rows(config, 1 if single else TOKENS)
        launch = self.device.prepare(
            f'{name}_attention', (config.num_key_value_heads, rows // 16, MAX_SPLITS), 32 * warps,
            'pppp' + 'iiiii' + 'pp', at['queries'], self._layer('rotated', layer),
            self._layer('pairs', layer), at['state'], step, int(single), group,
            layout.query_rows(config, TOKENS), self._ranks, at['partials'], at['extremes'])
        return launch, warps

    def _head(self, normed: int) -> Launch:
        at, config = self._at, self._config
        return self.device.prepare(
            'decode_head', (self._head_blocks,), THREADS, 'pippfpippp', at['head'],
            config.hidden_size // STEP, at['residual'], at['final_norm'], config.rms_norm_eps,
            at['state'], normed, at['logits'], at['candidates'], at['candidate_rows'],
            **self._shared(config.hidden_size))

    @property
    def _head_blocks(self) -> int:
        return min(self._processors * BLOCKS_PER_PROCESSOR, layout.MAX_CANDIDATES)

    def _plan_decode_layer(self, layer: int, step: int) -> list[Launch]:
        at, config, prepare = self._at, self._config, self.device.prepare
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = layout.query_rows(config, TOKENS)
        qkv, out, mlp = (
            layout.tiles(count) for count in (config.qkv_size, hidden, 2 * inner))
        attention, warps = self._attention(layer, step, single=True)
        return [
            prepare(
                'decode_qkv', (self._blocks(qkv),), THREADS, 'piippfppppip' + 'ppppp' + 'iiii',
                self._layer('qkv', layer), qkv, hidden // STEP, at['residual'],
                self._layer('attention_norm', layer), config.rms_norm_eps,
                self._layer('qkv_bias', layer), at['cosine'], at['sine'], at['state'], step,
                self._order, *self._cache(layer), heads, kv_heads, self._ranks, rows,
                **self._shared(hidden)),
            attention,
            prepare(
                'decode_output', (self._blocks(out),), THREADS, 'piipppp' + 'iiiii',
                self._layer('output', layer), out, config.query_size // STEP, at['residual'],
                at['partials'], at['extremes'], at['state'], step, heads, kv_heads, rows, warps,
                **self._shared(config.query_size)),
            prepare(
                'decode_mlp', (self._blocks(mlp),), THREADS, 'piippfp',
                self._layer('gate_up', layer), mlp, hidden // STEP, at['residual'],
                self._layer('mlp_norm', layer), config.rms_norm_eps, at['inner'],
                **self._shared(hidden)),
            prepare(
                'decode_down', (self._blocks(out),), THREADS, 'piipp',
                self._layer('down', layer), out, inner // STEP, at['residual'], at['inner'],
                **self._shared(inner)),
        ]  # fmt: skip

    def _queue_decode(self, num_tokens: int) -> None:
        device, at = self.device, self._at
        device.copy_in(at['state'], self._host_state)
        device.launch(self._arrange())
        for step in range(num_tokens + 1):
            device.launch(device.prepare(
                'embed', (1,), THREADS, 'piippipipp', at['state'], step, num_tokens,
                at['candidates'], at['candidate_rows'], self._head_blocks, at['embedding'],
                self._config.hidden_size, at['residual'], at['tokens']), self._dependent)
            if step == num_tokens:
                break
            for layer in range(self._config.num_hidden_layers):
                for launch in self._plan_decode_layer(layer, step):
                    device.launch(launch, self._dependent)
            device.launch(self._head(normed=0), self._dependent)
        device.copy_out(self._host_tokens[:num_tokens], at['tokens'])

    def _norm(self, gain: int, num_sums: int, keep: bool) -> Launch:
        at, config = self._at, self._config
        return self.device.prepare(
            'prefill_norm', (TOKENS,), THREADS, 'ppipfipppi', at['residual'], at['sums'],
            num_sums, gain, config.rms_norm_eps, config.hidden_size, at['state'], at['normed'],
            at['hidden'], int(keep))

    def _plan_prefill(self) -> list[list[Launch]]:
        """Return the launches of each layer; the first of the one behind completes its sum."""
        at, config, prepare = self._at, self._config, self.device.prepare
        hidden, inner = config.hidden_size, config.intermediate_size
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = layout.query_rows(config, TOKENS)
        qkv, out, mlp = (
            layout.tiles(count) for count in (config.qkv_size, hidden, 2 * inner))
        mix_chunks = self._chunks(out, config.query_size // STEP)
        down_chunks = self._chunks(out, inner // STEP)
        plan = []
        for layer in range(config.num_hidden_layers):
            attention, warps = self._attention(layer, 0, single=False)
            plan.append([
                self._norm(
                    self._layer('attention_norm', layer), down_chunks if layer else 0, False),
                prepare(
                    'prefill_qkv', (self._blocks(qkv),), THREADS, 'piipppppp' + 'ppppp' + 'iiii',
                    self._layer('qkv', layer), qkv, hidden // STEP, at['normed'],
                    self._layer('qkv_bias', layer), at['cosine'], at['sine'], at['state'],
                    self._order, *self._cache(layer), heads, kv_heads, self._ranks, rows),
                attention,
                prepare(
                    'prefill_mix', (TOKENS,), THREADS, 'pppiiiip', at['partials'],
                    at['extremes'], at['state'], heads, kv_heads, rows, warps, at['mixed']),
                prepare(
                    'prefill_partial', (self._blocks(out * mix_chunks),), THREADS, 'piiipfp',
                    self._layer('output', layer), out, config.query_size // STEP, mix_chunks,
                    at['mixed'], 1.0, at['sums']),
                self._norm(self._layer('mlp_norm', layer), mix_chunks, False),
                prepare(
                    'prefill_mlp', (self._blocks(mlp),), THREADS, 'piippp',
                    self._layer('gate_up', layer), mlp, hidden // STEP, at['normed'],
                    at['state'], at['inner']),
                prepare(
                    'prefill_partial', (self._blocks(out * down_chunks),), THREADS, 'piiipfp',
                    self._layer('down', layer), out, inner // STEP, down_chunks, at['inner'],
                    1.0 / INNER_SCALE, at['sums']),
            ])  # fmt: skip
        plan.append([self._norm(at['final_norm'], down_chunks, True)])
        return plan

    def _queue_prefill(self, layer_outputs: np.ndarray | None = None) -> None:
        device, at = self.device, self._at
        device.copy_in(at['state'], self._host_state)
        device.copy_in(at['residual'], self._host_rows)
        device.launch(self._arrange())
        for layer, launches in enumerate(self._prefill_launches):
            for index, launch in enumerate(launches):
                device.launch(launch, self._dependent)
                if layer_outputs is not None and layer and not index:
                    rows = np.empty(layer_outputs.shape[1:], np.float32)
                    device.copy_out(rows, at['residual'])
                    device.wait()
                    layer_outputs[layer - 1] = rows
        device.copy_out(self._host_hidden, at['hidden'])

    # Weights.

    def _upload(self, tensors) -> None:
        """Pack and copy every weight, one matrix at a time."""
        config = self._config
        head_dim = config.head_dim

        def send(address: int, array: np.ndarray) -> None:
            array = np.ascontiguousarray(array)
            self.device.copy_in(address, array)
            self.device.wait()

        def matrix(name: str, change: Callable = lambda weight: weight) -> np.ndarray:
            return change(tensors[f'{name}.weight'])

        def vector(name: str) -> np.ndarray:
            return to_float32(tensors[name])

        half = head_dim // 2
        frequencies = config.rope_theta ** (-np.arange(half) / half)
        angles = np.arange(self._ranks)[:, None] * frequencies
        send(self._at['cosine'], np.cos(angles).astype(np.float32))
        send(self._at['sine'], np.sin(angles).astype(np.float32))
        send(self._at['embedding'],
             layout.pack_matrix(matrix('model.embed_tokens'), 'embed_tokens'))  # fmt: skip
        if not config.tie_word_embeddings:
            send(self._at['head'], layout.pack_matrix(matrix('lm_head'), 'lm_head'))
        send(self._at['final_norm'], vector('model.norm.weight'))
        for layer in range(config.num_hidden_layers):
            prefix = f'model.layers.{layer}'
            attention, mlp = f'{prefix}.self_attn', f'{prefix}.mlp'
            names = [f'{attention}.{name}_proj' for name in 'qkv']
            qkv = np.concatenate(
                [layout.pair_heads(matrix(name), head_dim) for name in names])
            bias = np.concatenate(
                [layout.pair_heads(vector(f'{name}.bias'), head_dim) for name in names])
            gate_up = layout.pair_rows(matrix(f'{mlp}.gate_proj'), matrix(f'{mlp}.up_proj'))
            for name, array in (
                ('attention_norm', vector(f'{prefix}.input_layernorm.weight')),
                ('qkv', layout.pack_matrix(qkv, names[0])),
                ('qkv_bias', bias),
                ('output', layout.pack_matrix(matrix(f'{attention}.o_proj'), 'o_proj')),
                ('mlp_norm', vector(f'{prefix}.post_attention_layernorm.weight')),
                ('gate_up', layout.pack_matrix(gate_up, 'gate_up')),
                ('down', layout.pack_matrix(matrix(f'{mlp}.down_proj'), 'down_proj')),
            ):
                send(self._layer(name, layer), array)
