"""
The decoder on a GPU: compiled, packed and recorded; then two launches a chunk.

A prefill and a greedy decode are one recorded graph each, the latter for every number of tokens
when it is first asked for. The host writes the state (slots by
rank, counts, the first token) into pinned memory, starts the graph and waits; nothing happens on
the host for a layer or a token.
"""

from collections.abc import Iterator
from functools import partial
import weakref

import numpy as np

from vla_edge_ros.kernels.cuda import layout
from vla_edge_ros.kernels.cuda.compiler import load_program
from vla_edge_ros.kernels.cuda.constants import (
    ARRANGE_FROM,
    BULK_COPY,
    CONTEXT,
    DEPENDENT_LAUNCH,
    FIRST_ROW,
    FIRST_TOKEN,
    NEW_TOKENS,
    NUM_ROWS,
    STATE_WORDS,
    TOKENS,
)
from vla_edge_ros.kernels.cuda.driver import Device, Gpu, Launch
from vla_edge_ros.kernels.cuda.launches import KEYS_AND_VALUES, Launches
from vla_edge_ros.kernels.cuda.patience import Patience
from vla_edge_ros.kernels.cuda.upload import upload
from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.kernels.memory_plan import GPU, memory_mb, PINNED
from vla_edge_ros.progress import no_progress, Progress


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
    progress : Progress
        Told of every kernel that is compiled and every layer that is uploaded.

    Raises
    ------
    BackendUnavailable
        There is no GPU, or kernels for it cannot be made.
    MemoryError
        The device has no more memory.

    """

    def __init__(
        self, config, tensors, weights_dtype: str, total_slots: int, max_tokens: int,
        progress: Progress = no_progress,
    ):
        plan = layout.memory_plan(config, weights_dtype, total_slots, max_tokens)
        self.device = device = Device()
        self._finalizer = weakref.finalize(self, device.close)
        program = load_program(device.capability, config.head_dim, progress)
        device.load(program.cubin, program.entries)
        self._config = config
        self._at = {b.name: device.allocate(b.bytes) for b in plan if b.place == GPU}
        pinned = {
            b.name: device.allocate_pinned(b.shape, b.dtype) for b in plan if b.place == PINNED}
        self._at.setdefault('head', self._at['embedding'])
        self._launches = launches = Launches(
            device, config, {buffer.name: buffer for buffer in plan}, self._at, total_slots)
        self._dependent = device.capability >= DEPENDENT_LAUNCH
        processors = device.attribute('MULTIPROCESSOR_COUNT')
        self._streams = (
            device.capability >= BULK_COPY and layout.can_stream(config, processors))
        ranks = layout.rank_capacity(total_slots)
        self._host_state, self._host_rows = pinned['host_state'], pinned['host_rows']
        self._host_hidden, self._host_tokens = pinned['host_hidden'], pinned['host_tokens']
        self._held = 0
        """Ranks whose keys are arranged as the slots in ``_host_state`` have it."""

        def send(name: str, array: np.ndarray, layer: int = 0) -> None:
            device.copy_in(launches.layer(name, layer), np.ascontiguousarray(array))
            device.wait()

        upload(config, tensors, send, progress)
        for name, array in zip(
            ('cosine', 'sine'), layout.rotary_tables(config, ranks), strict=True
        ):
            send(name, array)
        if self._streams:
            send('shares', layout.stream_shares(config, processors))
        progress('recording the prefill', 1, 1)
        self._prefill_launches = launches.prefill()
        self._prefill_graphs = {
            (0, TOKENS, whole): device.record(partial(self._queue_prefill, 0, TOKENS, whole))
            for whole in (False, True)}
        self._decode_graphs: dict[int, object] = {}
        self._patience = Patience()

    @staticmethod
    def memory_mb() -> dict[str, float]:
        """Return what there is of each memory, MB."""
        return {**memory_mb(), GPU: Gpu().memory_bytes / 1e6}

    def embed(self, token_ids: np.ndarray) -> np.ndarray:
        """Return the embeddings float32 [n, hidden] of int token ids."""
        device = self.device
        device.use()
        out = np.empty((len(token_ids), self._config.hidden_size), np.float32)
        for start in range(0, len(token_ids), TOKENS):
            part = np.asarray(token_ids[start : start + TOKENS], np.int32)
            device.copy_in(self._at['tokens'], part)
            device.launch(self._launches.gather(len(part)))
            device.copy_out(out[start : start + len(part)], self._at['hidden'])
            device.wait()
        return out

    def forward(self, embeddings, context_slots, write_slots, layer_outputs=None) -> np.ndarray:
        """
        Run the new tokens through all layers, their keys and values going to ``write_slots``.

        Returns the final-normed hidden states float32 [n, hidden]; the residual after each
        layer goes to ``layer_outputs`` float32 [layers, n, hidden] when given. ``embeddings`` may
        lie on the device already.
        """
        hidden = np.empty((len(embeddings), self._config.hidden_size), np.float32)
        for start, stop in self._parts(embeddings, context_slots, write_slots):
            if layer_outputs is None:
                self._prefill(embeddings, start, stop, True)
            else:
                source, rows = self._source(embeddings, start, stop)
                self._queue_prefill(source, rows, True, layer_outputs[:, start:stop])
                self.device.wait()
            hidden[start:stop] = self._host_hidden[: stop - start]
        return hidden

    def fill(self, embeddings, context_slots, write_slots) -> None:
        """Do what ``forward`` does for the keys and values of new tokens, and no more."""
        for start, stop in self._parts(embeddings, context_slots, write_slots):
            self._prefill(embeddings, start, stop, False)

    def _parts(self, embeddings, context_slots, write_slots) -> Iterator[tuple[int, int]]:
        """Yield the first and last token of every prefill, its slots being set."""
        self.device.use()
        for start in range(0, len(embeddings), TOKENS):
            stop = min(start + TOKENS, len(embeddings))
            context = context_slots
            if start:
                context = np.concatenate([context_slots, write_slots[:start]])
            self._set_slots(context, write_slots[start:stop])
            yield start, stop

    def _source(self, embeddings, start: int, stop: int) -> tuple[int, int]:
        """Return where on the device rows lie, or 0 for the pinned ones, and how many to copy."""
        if isinstance(embeddings, DeviceArray):
            return embeddings.address + start * self._host_rows[0].nbytes, stop - start
        self._host_rows[: stop - start] = embeddings[start:stop]
        return 0, TOKENS

    def _prefill(self, embeddings, start: int, stop: int, whole: bool) -> None:
        """Run the recorded prefill of these rows, with the hidden states or without."""
        key = *self._source(embeddings, start, stop), whole
        graph = self._prefill_graphs.get(key)
        if graph is None:
            graph = self.device.record(lambda: self._queue_prefill(*key))
            self._prefill_graphs[key] = graph
        self._run(('prefill', whole), graph)

    def logits(self, hidden: np.ndarray, first_row: int, num_rows: int) -> np.ndarray:
        """Return the logits float32 [num_rows] of one hidden state float32 [hidden]."""
        device = self.device
        device.use()
        self._set_rows(first_row, num_rows)
        self._host_rows[0] = hidden
        device.copy_in(self._at['state'], self._host_state)
        device.copy_in(self._at['residual'], self._host_rows[:1])
        device.launch(self._launches.head(normed=True))
        out = np.empty(num_rows, np.float32)
        device.copy_out(out, self._at['logits'] + 4 * first_row)
        device.wait()
        return out

    def decode_greedy(
        self, first_token, num_tokens, context_slots, write_slots, first_row, num_rows
    ) -> np.ndarray:
        """Return int32 [num_tokens]: the best rows after ``first_token``, each fed back."""
        device = self.device
        device.use()
        self._set_slots(context_slots, write_slots)
        self._set_rows(first_row, num_rows)
        self._host_state[FIRST_TOKEN] = first_token
        graph = self._decode_graphs.get(num_tokens)
        if graph is None:
            graph = device.record(lambda: self._queue_decode(num_tokens))
            self._decode_graphs[num_tokens] = graph
        self._run(num_tokens, graph)
        return self._host_tokens[:num_tokens].copy()

    def _run(self, kind: str | int, graph) -> None:
        """Run a graph, asleep until shortly before its end."""
        self._patience.run(kind, lambda: self.device.run(graph), self.device.wait)

    def close(self) -> None:
        """Free everything on the device; also done when the engine is garbage."""
        self._finalizer()

    def _set_slots(self, context_slots, write_slots) -> None:
        """Write counts and slots, and from which rank on keys must be arranged anew."""
        context, tokens = len(context_slots), len(write_slots)
        state = self._host_state
        order = state[STATE_WORDS:]
        same = min(self._held, context)
        differ = order[:same] != context_slots[:same]
        first = int(differ.argmax()) if same else 0
        if same and not differ[first]:
            first = same
        state[CONTEXT], state[NEW_TOKENS], state[ARRANGE_FROM] = context, tokens, first
        order[first:context] = context_slots[first:]
        order[context : context + tokens] = write_slots
        self._held = context + tokens

    def _set_rows(self, first_row, num_rows) -> None:
        self._host_state[FIRST_ROW], self._host_state[NUM_ROWS] = first_row, num_rows

    def _queue_decode(self, num_tokens: int) -> None:
        device, launches = self.device, self._launches
        device.copy_in(self._at['state'], self._host_state)
        device.launch(launches.arrange())
        if self._streams:
            device.launch(launches.stream(num_tokens))
            device.copy_out(self._host_tokens[:num_tokens], self._at['tokens'])
            return
        for step in range(num_tokens):
            device.launch(launches.embed(step, num_tokens), self._dependent)
            for layer in range(self._config.num_hidden_layers):
                for launch in launches.decode_layer(layer, step):
                    device.launch(launch, self._dependent)
            device.launch(launches.head(), self._dependent)
        device.launch(launches.embed(num_tokens, num_tokens), self._dependent)
        device.copy_out(self._host_tokens[:num_tokens], self._at['tokens'])

    def _prefill_plan(self, whole: bool) -> list[list[Launch]]:
        """Return the launches of each layer, and of the last no more than is needed."""
        plan = self._prefill_launches
        return plan if whole else [*plan[:-2], plan[-2][:KEYS_AND_VALUES]]

    def _queue_prefill(
        self, source: int, rows: int, whole: bool, layer_outputs: np.ndarray | None = None,
    ) -> None:
        device, at = self.device, self._at
        device.copy_in(at['state'], self._host_state)
        if source:
            device.copy_across(at['residual'], source, rows * self._host_rows[0].nbytes)
        else:
            device.copy_in(at['residual'], self._host_rows)
        device.launch(self._launches.arrange())
        for layer, launches in enumerate(self._prefill_plan(whole)):
            for index, launch in enumerate(launches):
                device.launch(launch, self._dependent)
                if layer_outputs is not None and layer and not index:
                    rows = np.empty(layer_outputs.shape[1:], np.float32)
                    device.copy_out(rows, at['residual'])
                    device.wait()
                    layer_outputs[layer - 1] = rows
        if whole:
            device.copy_out(self._host_hidden, at['hidden'])
