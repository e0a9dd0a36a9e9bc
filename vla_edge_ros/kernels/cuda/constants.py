"""Sizes that the kernels, their arguments and their buffers share; imports nothing."""

STEP = 32
"""Elements of a row that one step of a product consumes."""
FRAGMENT_BYTES = 512
"""Eight rows (or columns) of one step: 32 lanes with 16 bytes each."""
TILE_BYTES = 2 * FRAGMENT_BYTES
"""Sixteen rows of one step."""
WARPS = 8
THREADS = 32 * WARPS
PREFILL_WARPS = 4
"""Warps of an attention block that keeps all sixteen rows."""
TOKENS = 32
"""The most tokens of one prefill launch."""
STATE_WORDS = 16
CONTEXT, NEW_TOKENS, FIRST_TOKEN, FIRST_ROW, NUM_ROWS, ARRANGE_FROM = range(6)
"""Words of the state: context slots, new tokens, the token fed first, the rows of the head to
choose from, and the first rank to arrange; the slot of each rank follows behind STATE_WORDS."""
MAX_SPLITS = 16
"""Parts the keys of one head are attended in."""
MAX_HEADS = 128
MAX_CHUNKS = 16
"""Parts the depth of a product is split in during prefill."""
INNER_SCALE = 1 / 16
"""Of the activations between the two MLP matrices, so that float16 holds them up to a million."""
