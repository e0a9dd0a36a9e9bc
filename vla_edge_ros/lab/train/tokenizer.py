"""The small byte-level BPE tokenizer of the default policy."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import decoders, models, normalizers, pre_tokenizers, Tokenizer, trainers

from vla_edge_ros.sim.tasks import COLOURS, sample_instruction

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PAD_TOKEN = '<|pad|>'
BEGIN_TOKEN = '<|act|>'
TEXT_TOKENS = 512  # 256 bytes, two special tokens, and merges until every usual word is one token
_CORPUS_SENTENCES = 20_000


def build_tokenizer(bins: int, seed: int) -> 'PreTrainedTokenizerFast':
    """
    Train on sampled instructions; ids ``TEXT_TOKENS .. TEXT_TOKENS + bins`` are action bins.

    Any text can be encoded, since every byte is in the vocabulary.
    """
    # Imported late: without torch it prints advice before train can say what is missing.
    from transformers import PreTrainedTokenizerFast

    rng = np.random.default_rng(seed)
    names = list(COLOURS)
    corpus = [
        sample_instruction(rng, names[rng.integers(len(names))]) for _ in range(_CORPUS_SENTENCES)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=TEXT_TOKENS,
        special_tokens=[PAD_TOKEN, BEGIN_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))
    unused = TEXT_TOKENS - tokenizer.get_vocab_size()
    tokenizer.add_special_tokens([f'<|unused_{i}|>' for i in range(unused)])
    tokenizer.add_special_tokens([f'<|bin_{i}|>' for i in range(bins)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD_TOKEN)


def save_tokenizer(tokenizer: 'PreTrainedTokenizerFast', folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``."""
    tokenizer.save_pretrained(str(folder))
