"""
What the parts of a network have to move and to compute at least.

Bytes are weights, keys and values once, activations once in and once out, all of 16 bit unless
said. FLOP are those of the matrix products and of attention; a multiplication with its addition is
two.
"""

from typing import NamedTuple


class Work(NamedTuple):
    """What one launch or one stage has to move and to compute."""

    bytes: float
    flop: int

    def __add__(self, other: 'Work') -> 'Work':
        """Return both together."""
        return Work(self.bytes + other.bytes, self.flop + other.flop)

    def __mul__(self, times: int) -> 'Work':
        """Return it several times."""
        return Work(self.bytes * times, self.flop * times)


def product(
    rows: int, columns: int, tokens: int, weight_bytes: float = 2, activation_bytes: int = 2
) -> Work:
    """Return the work of a matrix [rows, columns] on some activations."""
    activations = activation_bytes * tokens * (rows + columns)
    return Work(weight_bytes * rows * columns + activations, 2 * rows * columns * tokens)


def attention(config, length: int, tokens: int, number_bytes: int = 2) -> Work:
    """Return the work of new tokens that see ``length`` others, and themselves in turn."""
    pairs = tokens * length + tokens * (tokens + 1) // 2
    cache = 2 * number_bytes * config.key_value_size * (length + tokens)
    return Work(
        cache + 2 * number_bytes * tokens * config.query_size, 4 * config.query_size * pairs)


def layer_products(config, tokens: int, weight_bytes: float = 2, activation_bytes: int = 2):
    """
    Return the work of the four matrices of a layer by name.

    Returns
    -------
    dict of str to Work
        ``qkv``, ``output``, ``mlp`` (gate and up) and ``down``.

    """
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        'qkv': (config.qkv_size, hidden), 'output': (hidden, config.query_size),
        'mlp': (2 * inner, hidden), 'down': (hidden, inner)}
    return {
        name: product(*shape, tokens, weight_bytes, activation_bytes)
        for name, shape in shapes.items()}


def arranged(config, slots: int) -> Work:
    """
    Return the work of bringing the keys and values of ``slots`` into order of rank.

    Keys are held as float32 and turned to float16; values are float16 in both places.
    """
    numbers = config.key_value_size * config.num_hidden_layers * slots
    return Work((4 + 2 + 2 + 2) * numbers, 0)


def vision(config, weight_bytes: float = 4, activation_bytes: int = 4) -> Work:
    """Return the work of encoding one picture to tokens, of a ``PolicyConfig``."""
    patches = config.patch_rows * config.patch_columns
    width, inner = config.vision_hidden_size, config.vision_intermediate_size
    hidden = config.transformer.hidden_size
    total = Work(0, 0)
    for rows, columns, tokens in (
        (width, 3 * config.patch_size**2, patches), (2 * inner, width, patches),
        (width, inner, patches), (hidden, width, patches), (hidden, width, 1),
    ):
        total += product(rows, columns, tokens, weight_bytes, activation_bytes)
    return total


def decoder_parameters(config) -> tuple[int, int]:
    """Return how many weights all layers have, and how many the vocabulary's matrix."""
    layer = config.hidden_size * (
        config.qkv_size + config.query_size + 3 * config.intermediate_size)
    return config.num_hidden_layers * layer, config.vocab_size * config.hidden_size
