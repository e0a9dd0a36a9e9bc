"""Sizes that the kernels, their arguments and their buffers share; imports nothing."""

STEP = 32
"""Elements of a row that one step of a product consumes."""
FRAGMENT_BYTES = 512
"""Eight rows (or columns) of one step: 32 lanes with 16 bytes each."""
TILE_BYTES = 2 * FRAGMENT_BYTES
"""Sixteen rows of one step."""
WARPS = 8
THREADS = 32 * WARPS
SUMS = WARPS * 16
"""Sums of one tile of one column: sixteen rows of every warp."""
BATCH = 16
"""Tiles whose sums wait in shared memory together."""
PREFILL_SPLIT_WARPS = 2
"""Sixteens of keys that a split of a prefill has at least."""
DECODE_ROWS = 8
"""Query heads of a KV head that the attention of one token keeps; more take that of prefill."""
TOKENS = 32
"""The most tokens of one prefill launch."""
TOKEN_TILES = TOKENS // 8
SUM_PADDING = 8
"""Numbers between two rows of sums in shared memory, so that lanes meet no bank twice."""
TOKENS_BYTES = TOKEN_TILES * FRAGMENT_BYTES
"""What all tokens have of one step."""
STATE_WORDS = 16
CONTEXT, NEW_TOKENS, FIRST_TOKEN, FIRST_ROW, NUM_ROWS, ARRANGE_FROM, ARRIVED = range(7)
"""Words of the state: context slots, new tokens, the token fed first, the rows of the head to
choose from, the first rank to arrange, and of the stream how often a block has projected and, in
the word behind, chosen."""
SPOILED = 8
"""The word that says that a number left the range of the stream; the slot of each rank follows
behind STATE_WORDS."""
JOINED = 9
"""The word that says how often a block of a prefill has reached the middle of an MLP."""
AHEAD = 2
"""Stages of weights under way to a block of the stream; what else is read queues behind more."""
PREFILL_AHEAD = 3
"""The same to a block of a streamed prefill."""
MAX_SPLITS = 32
"""Parts the keys of one head are attended in."""
STREAM_SPLITS = 64
"""The same at most in a stream."""
MAX_CHUNKS = 16
"""Parts the depth of a product is split in, for different blocks."""
MAX_HEADS = 128
MIXED_HEADS = 4
"""Heads of a token that one block of a prefill puts together."""
MAX_CANDIDATES = 4096
"""Blocks of the head at most; each leaves its best row."""
INNER_SCALE = 1 / 16
"""Of the activations between the two MLP matrices, so that float16 holds them up to a million."""
ARRANGE_RANKS = 32
"""Ranks that one unit of ``arrange`` rotates."""
TENSOR_16 = (8, 0)
"""Compute capability from which one instruction takes 16 elements of k; before, 8."""
DEPENDENT_LAUNCH = (9, 0)
"""Compute capability from which a kernel can start before the one ahead of it has ended."""
BULK_COPY = (9, 0)
"""Compute capability from which one instruction copies kilobytes to shared memory."""
STAGE_STEPS = 2 * WARPS
"""Steps of weights in one stage of the stream: two for every warp that multiplies."""
STAGE_BYTES = STAGE_STEPS * TILE_BYTES
HELD_STEPS = 6
"""Steps of all tokens that a warp of a streamed prefill holds in registers."""
MAX_STAGES = 16
STREAM_SCRATCH = 32768
"""Bytes of shared memory of a stream for what a phase multiplies, and for its sums."""
STREAM_EXTRA = 2048
"""Bytes behind them: what is exchanged between warps, and the barriers."""
STREAM_SUMS = STREAM_SCRATCH - BATCH * SUMS * 4
"""Where in the scratch the sums of a batch lie."""
BARRIER_BYTES = 16 * MAX_STAGES
WIDE_SUMS = 4 * WARPS * 16 * TOKENS
"""Bytes of the sums of one tile of all tokens in a streamed prefill."""
PREFILL_SCRATCH = 2 * WIDE_SUMS + BARRIER_BYTES
"""Bytes of its shared memory before the ring: the sums of two tiles, which take turns."""
FIXED_SCALE = 2.0**26
FIXED_RANGE = 2.0**24
"""Of the residual of a stream: fixed point, so that no order of additions changes a bit; and how
large what is added to it may be."""
COUNT_BITS = 12
"""Below it: how many steps of products were added, which tells a reader that it is complete."""
MAX_PROCESSORS = 256
"""Blocks of a stream at most."""
MAX_HIDDEN = 2048
"""Of a row that a stream normalises."""
