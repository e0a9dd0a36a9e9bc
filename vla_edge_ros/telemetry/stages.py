"""The stages of one control tick; these names label traces, plots and documents."""

from enum import Enum


class Stage(str, Enum):
    """One timed part of a tick, in the order in which a frame meets them."""

    PREPROCESS = 'preprocess'
    VISION = 'vision'
    PREFILL = 'prefill'
    DECODE = 'decode'
