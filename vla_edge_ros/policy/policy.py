"""
The streaming policy: pictures and a sentence in, chunks of actions out.

``observe`` writes a frame's tokens into the KV cache; ``act`` decodes a chunk from all that the
cache holds and leaves no trace in it. A new instruction re-reads the prompt and keeps the
stream.
"""

from dataclasses import dataclass
from pathlib import Path
import time

import numpy as np
from tokenizers import Tokenizer

from vla_edge_ros.errors import ConfigError, ShapeError, WeightsError
from vla_edge_ros.kernels import load_backend
from vla_edge_ros.kernels.bfloat16 import to_float32
from vla_edge_ros.kernels.memory_plan import (
    Buffer,
    check_budgets,
    LYING_IN,
    select,
    total_bytes,
)
from vla_edge_ros.policy import vision
from vla_edge_ros.policy.action_tokens import ActionChunk, ActionTokenizer
from vla_edge_ros.policy.decoder import resolve_weights_dtype, Transformer
from vla_edge_ros.policy.eviction import make_eviction_policy
from vla_edge_ros.policy.kv_cache import CacheLayout, KVCache
from vla_edge_ros.policy.policy_config import DEFAULT_POLICY, PolicyConfig
from vla_edge_ros.policy.weights import (
    check_shapes,
    check_weights,
    expected_shapes,
    read_header,
    read_tensors,
)
from vla_edge_ros.progress import no_progress, Progress
from vla_edge_ros.telemetry.stages import Stage

MAX_DEVIATIONS = 100.0
MAX_CHARACTERS_PER_TOKEN = 100
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Observation:
    """What observing one frame did: the frame that left for it, frames held, time spent."""

    frame_id: int
    evicted_frame_id: int | None
    num_frames: int
    stage_ns: dict[Stage, int]


class Policy:
    """
    One checkpoint on one backend with its cache; not safe to use from two threads at once.

    Made by :meth:`load`.
    """

    def __init__(
        self, config, memory_plan, tokenizer, encoder, proprioception, transformer, cache,
        backend,
    ):
        self.config: PolicyConfig = config
        self.memory_plan: list[Buffer] = memory_plan
        """Every buffer of the policy: name, shape, dtype, place."""
        self.backend: str = backend
        """The kernels it runs on, and why."""
        self.instruction: str | None = None
        self.cache: KVCache = cache
        self.transformer: Transformer = transformer
        self._tokenizer: Tokenizer = tokenizer
        self._vision: vision.VisionEncoder | vision.DeviceVisionEncoder = encoder
        self.frame_target = encoder.frame_target
        """Takes frames to where this policy looks at them, for a ``FrameReader``, or None."""
        self._state_weight, self._state_bias = proprioception
        self._actions = ActionTokenizer(config)
        self._state_mean = np.asarray(config.proprioception_mean, np.float32)
        self._state_std = np.asarray(config.proprioception_std, np.float32)
        self._newest_stamp_ns = 0

    @classmethod
    def load(
        cls,
        folder: Path | str = DEFAULT_POLICY,
        *,
        backend: str = 'auto',
        kv_slots: int = 0,
        eviction: str = 'semantic',
        pin_first: bool = False,
        pin_newest: bool = True,
        weights_dtype: str = 'auto',
        memory_budget_mb: float = 0.0,
        vram_budget_mb: float = 0.0,
        progress: Progress = no_progress,
    ) -> 'Policy':
        """
        Load ``config.json``, ``model.safetensors`` and the tokenizer from a folder.

        Parameters
        ----------
        folder : Path or str
            Checkpoint folder.
        backend : {'auto', 'cuda', 'cpu', 'reference'}
            Kernels to run on, see ``kernels.load_backend``.
        kv_slots : int
            Size of the frames region, slots; 0 takes the checkpoint's.
        eviction : {'semantic', 'fifo', 'uniform'}
            Which frame leaves a full cache.
        pin_first, pin_newest : bool
            Frames that never leave.
        weights_dtype : {'auto', 'float32', 'bfloat16'}
            How the weights are held in memory.
        memory_budget_mb, vram_budget_mb : float
            The policy may not hold more of main memory, and of the GPU's and pinned memory, MB; 0
            for no limit. Loading itself takes the size of the checkpoint besides.
        progress : Progress
            Told how far loading is.

        Raises
        ------
        WeightsError
            A file is missing, corrupt, or does not fit ``config.json``.
        ConfigError
            A value is out of range, or the memory plan exceeds a budget or the memory of the
            machine; no weight has been read and nothing allocated then. Over a budget, the
            message holds the plan.

        """
        folder = Path(folder)
        config = PolicyConfig.load(folder)
        header = read_header(folder)
        shapes = _extra_shapes(config)
        check_shapes(header, expected_shapes(config.transformer) | shapes)
        weights_dtype = resolve_weights_dtype(weights_dtype, header)
        kernels, backend = load_backend(backend, config.transformer)
        layout = CacheLayout(
            config.prompt_slots, kv_slots or config.kv_slots,
            config.slots_per_frame, config.decode_tokens)
        max_tokens = max(config.slots_per_frame, config.prompt_slots)
        plan = [
            *kernels.memory_plan(
                config.transformer, weights_dtype, layout.total_slots, max_tokens),
            *vision.memory_plan(config, kernels),
            *(Buffer(name, shape, 'float32') for name, shape in _state_shapes(config).items()),
        ]
        check_budgets(plan, memory_budget_mb=memory_budget_mb, vram_budget_mb=vram_budget_mb)
        # Memory that is not there would be granted at first, and the process killed when it fills.
        for memory, present_mb in kernels.Engine.memory_mb().items():
            needed_mb = total_bytes(select(plan, LYING_IN[memory])) / 1e6
            if needed_mb > present_mb:
                lack = f'there are {present_mb:.1f} MB of {memory} memory'
                raise _too_large(layout, config, needed_mb, lack)
        tensors = read_tensors(folder, progress)
        decoder_weights = check_weights(tensors, config.transformer)
        try:
            cache = KVCache(
                layout, make_eviction_policy(eviction), config.vision_hidden_size,
                pin_first=pin_first, pin_newest=pin_newest)
            extra = _extra_weights(config, tensors)
            transformer = Transformer(
                config.transformer, decoder_weights, kernels, layout.total_slots, max_tokens,
                weights_dtype, progress)
            state = [extra.pop(f'proprioception_projector.{part}') for part in ('weight', 'bias')]
            encoder = vision.make_encoder(config, extra, kernels, transformer.engine)
        except MemoryError:
            needed_mb = total_bytes(plan) / 1e6
            raise _too_large(layout, config, needed_mb, 'the system gave less') from None
        return cls(
            config, plan, _load_tokenizer(folder), encoder, state, transformer, cache,
            backend)

    def set_instruction(self, text: str) -> None:
        """
        Make ``text`` the instruction from the next observed frame on; the frames stay.

        Raises
        ------
        ConfigError
            The text is empty, or longer than the prompt slots.

        """
        ids = self.tokenize(text)
        slots = np.arange(len(ids), dtype=np.int32)
        self.cache.set_prompt(len(ids))
        self.transformer.fill(self.transformer.embed(ids), slots, slots[:0])
        self.instruction = text

    def check_instruction(self, text: str) -> None:
        """
        Refuse what :meth:`set_instruction` would refuse, and change nothing.

        May be called from any thread, also while another one uses the policy.

        Raises
        ------
        ConfigError
            The text is empty, or longer than the prompt slots.

        """
        self.tokenize(text)

    def tokenize(self, text: str) -> np.ndarray:
        """
        Return the prompt tokens of an instruction, int64 [n]; from any thread.

        Raises
        ------
        ConfigError
            The text is empty, or longer than the prompt slots.

        """
        if not isinstance(text, str) or not text.strip():
            raise ConfigError('instruction', 'must not be empty', text)
        slots = self.config.prompt_slots
        rule = f'must fit {slots} prompt tokens, this one has'
        # A book sent by mistake would keep the interpreter busy for seconds.
        if len(text) > MAX_CHARACTERS_PER_TOKEN * slots:
            raise ConfigError('instruction', f'{rule} {len(text)} characters', _shown(text))
        # Encoding leaves the tokenizer as it is; that is what makes it safe from any thread.
        encoded = self._tokenizer.encode(text.strip(), add_special_tokens=False)
        ids = np.asarray(encoded.ids, np.int64)
        if len(ids) > slots:
            raise ConfigError('instruction', f'{rule} {len(ids)}', _shown(text))
        if not len(ids) or ids.max() >= self.config.transformer.vocab_size:
            rule = 'must consist of tokens that the policy knows'
            raise ConfigError('instruction', rule, _shown(text))
        return ids

    def observe(
        self, image: np.ndarray, proprioception: np.ndarray, stamp_ns: int,
    ) -> Observation:
        """
        Write one frame into the cache, evicting one first when it is full.

        Parameters
        ----------
        image : uint8 [height, width, 3]
            RGB, of any size; may be what a ``FrameReader`` with this ``frame_target`` read.
        proprioception : float [proprioception_dim]
            Joint positions, in the robot's units.
        stamp_ns : int
            Header stamp of the image, ns. A stamp before the newest frame's begins a new stream.

        Raises
        ------
        ShapeError
            An array has the wrong shape or dtype, or a joint position is not finite.

        """
        times = [time.perf_counter_ns()]
        state = np.asarray(proprioception, np.float64)
        if state.shape != self._state_mean.shape:
            rule = f'must be {self._state_mean.size} joint positions'
            raise ShapeError('proprioception', rule, proprioception)
        normalised = (state - self._state_mean) / self._state_std
        # One absurd reading would stay in the cache and speak through every later action.
        if not (np.abs(normalised) <= MAX_DEVIATIONS).all():
            rule = f'must be finite and within {MAX_DEVIATIONS:g} deviations of its mean'
            raise ShapeError('proprioception', rule, proprioception)
        patches = self._vision.preprocess(image)
        times.append(time.perf_counter_ns())
        state_row = self._state_weight @ normalised + self._state_bias
        tokens, embedding = self._vision.encode(patches, state_row)
        times.append(time.perf_counter_ns())
        if stamp_ns < self._newest_stamp_ns:
            self.cache.reset()
        self._newest_stamp_ns = stamp_ns
        insertion = self.cache.insert(embedding, stamp_ns)
        self.transformer.fill(tokens, insertion.slots, insertion.context_slots)
        times.append(time.perf_counter_ns())
        stages = (Stage.PREPROCESS, Stage.VISION, Stage.PREFILL)
        spent = {stage: times[i + 1] - times[i] for i, stage in enumerate(stages)}
        return Observation(
            insertion.frame_id, insertion.evicted_frame_id, self.cache.num_frames, spent)

    def embed(self, image: np.ndarray) -> np.ndarray:
        """
        Return the embedding that eviction would compare, float32 [vision_hidden_size].

        Nothing enters the cache.

        Parameters
        ----------
        image : uint8 [height, width, 3]
            RGB, of any size.

        Raises
        ------
        ShapeError
            It is no such image.

        """
        patches = self._vision.preprocess(image)
        return np.array(self._vision.encode(patches, self._state_bias)[1], np.float32)

    def act(self) -> ActionChunk:
        """
        Decode a chunk from the frames in the cache.

        Raises
        ------
        ConfigError
            There is no instruction or no frame yet.

        """
        if self.instruction is None:
            raise ConfigError('instruction', 'must be set before acting', None)
        if not self.cache.num_frames:
            raise ConfigError('frames', 'must be observed before acting', 0)
        c = self.config
        tokens = self.transformer.decode_greedy(
            c.begin_token, c.decode_tokens, self.cache.scratch_slots, self.cache.context_slots,
            c.action_token_offset, c.bins)
        grounding, values = self._actions.decode(tokens)
        return ActionChunk(
            values, round(c.step_ms * 1e6), grounding, tokens, self._newest_stamp_ns)

    def reset(self) -> None:
        """Forget all frames; instruction and weights stay."""
        self.cache.reset()
        self._newest_stamp_ns = 0


def _too_large(layout: CacheLayout, config: PolicyConfig, needed_mb: float, lack: str):
    """Return the error of a policy without enough memory; it names what claims most slots."""
    slots = {
        'kv_slots': layout.kv_slots,
        'vla.prompt_slots': layout.prompt_slots,
        'vla.chunk_steps': config.chunk_steps,
    }
    field = max(slots, key=slots.__getitem__)
    rule = f'must leave the policy enough memory: {needed_mb:.1f} MB are planned, {lack}'
    return ConfigError(field, rule, slots[field])


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARACTERS else f'{text[:SHOWN_CHARACTERS]}...'


def _extra_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor outside the decoder."""
    return {**vision.weight_shapes(config), **_state_shapes(config)}


def _state_shapes(config: PolicyConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of what makes a token of the joint positions."""
    hidden = config.transformer.hidden_size
    return {
        'proprioception_projector.weight': (hidden, config.proprioception_dim),
        'proprioception_projector.bias': (hidden,),
    }


def _extra_weights(config: PolicyConfig, tensors: dict) -> dict[str, np.ndarray]:
    """Return the tensors outside the decoder as float32, checked against the configuration."""
    shapes = _extra_shapes(config)
    check_shapes(tensors, shapes)
    weights = {}
    for name in shapes:
        weights[name] = np.ascontiguousarray(to_float32(tensors[name]))
        if not np.isfinite(weights[name]).all():
            raise WeightsError(name, 'must hold finite values only', 'NaN or infinity')
    return weights


def _load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that the file describes, and no more than that."""
    path = folder / 'tokenizer.json'
    if not path.is_file():
        raise WeightsError('tokenizer', 'must be a file tokenizer.json', str(path))
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise WeightsError('tokenizer.json', f'must be readable ({error})', str(path)) from None
    # Saved with the file, they would cut an instruction short or fill it up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
