"""Learning Q for pruning."""

from __future__ import annotations

import torch
from helpers import inputs_6, inputs_8, net_6_10_4, net_8_16_4

from fishleg import PruningOptions, Surgeon
from fishleg.inverse import learn_inverse, make_problem


def test_the_block_size_option_holds_for_a_learned_q() -> None:
    surgeon = Surgeon(
        net_8_16_4(), inputs_8(), options=PruningOptions(structure="block", block_size=4, samples=16)
    )
    Q = surgeon.curvature.estimate(surgeon.masks).operator("0").dense()
    blocks = torch.block_diag(*torch.ones(len(Q) // 4, 4, 4))
    assert bool(Q[blocks.bool()].all())
    assert not bool(Q[~blocks.bool()].any())


def test_batches_of_one_example_give_as_many_gradients() -> None:
    steps: list[int] = []
    one = [x[:1] for x in inputs_6(3)]
    learn_inverse(
        make_problem(net_6_10_4(), one, options=PruningOptions(samples=16, sub_batch=4)),
        relative_damping=0.1,
        on_step=lambda stats: steps.append(stats.step),
    )
    assert steps[-1] == 16
