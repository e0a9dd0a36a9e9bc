"""Whether two backends of a policy choose the same tokens, but for what is as good as equal."""

import numpy as np

TOLERANCE = 0.1
"""Of logits that span about 15; float16 activations on one side, float32 on the other."""


def drawn(frame: int, height: int, width: int) -> np.ndarray:
    """Return a picture uint8 [height, width, 3]: four coloured squares that move on a table."""
    image = np.full((height, width, 3), (120, 110, 100), np.uint8)
    side = height // 8
    for index, colour in enumerate(((200, 40, 40), (40, 180, 60), (50, 70, 200), (210, 190, 50))):
        angle = 0.05 * frame * (1 + index / 3) + 1.6 * index
        row = int((0.5 + 0.3 * np.sin(angle)) * (height - side))
        column = int((0.5 + 0.35 * np.cos(1.3 * angle)) * (width - side))
        image[row : row + side, column : column + side] = colour
    return image


def logits_after(policy, tokens) -> np.ndarray:
    """Return float32 [tokens, bins]: what a policy would choose each of these from."""
    transformer, config = policy.transformer, policy.config
    context, scratch = policy.cache.context_slots, policy.cache.scratch_slots
    rows = []
    for step, token in enumerate([config.begin_token, *tokens[:-1]]):
        seen = np.concatenate([context, scratch[:step]]).astype(np.int32)
        hidden = transformer.decode(int(token), int(scratch[step]), seen)
        rows.append(transformer.logits(hidden, config.action_token_offset, config.bins))
    return np.array(rows)


def check_same_choice(ours, exact, always: bool) -> bool:
    """
    Let both act, and return whether they chose the same.

    Where not, or ``always``, their logits have to agree, and the first choice that differs has to
    be between two that the exact one holds for equally good.
    """
    chosen, expected = ours.act().tokens, exact.act().tokens
    same = bool((chosen == expected).all())
    if always or not same:
        logits = logits_after(exact, expected)
        assert np.abs(logits_after(ours, expected) - logits).max() < TOLERANCE
        if not same:
            best, next_best = np.sort(logits[np.flatnonzero(chosen != expected)[0]])[:-3:-1]
            assert best - next_best < TOLERANCE
    return same
