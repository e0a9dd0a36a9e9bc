"""Shapes of the streaming decode at the edge of what a block holds, without a GPU."""

from dataclasses import replace

import pytest
from test_cuda_emulated import Case, check, make_engine, play, TOY

from vla_edge_ros.kernels.cuda import layout
from vla_edge_ros.kernels.cuda.constants import MAX_HIDDEN
from vla_edge_ros.lab.random_model import QWEN_0_5B

pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')


def test_the_widest_embedding_is_not_cleared_with_the_sums_it_reaches_into():
    config = replace(
        TOY, hidden_size=MAX_HIDDEN, intermediate_size=192, num_hidden_layers=1)
    case = Case((9, 0), 8, config, streams=True)
    assert layout.can_stream(config, case.processors)
    check(case, play(make_engine(case), config))


def test_heads_of_which_a_stage_holds_no_whole_number_are_not_streamed():
    assert layout.can_stream(QWEN_0_5B, 132)
    assert not layout.can_stream(replace(QWEN_0_5B, head_dim=96), 132)
