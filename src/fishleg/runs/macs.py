"""Count the multiply-adds of a forward pass for each weight matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.runtime.batches import Forward, batch_size, move_batch
from fishleg.runtime.modes import evaluation_mode


@torch.no_grad()
def count_macs(model: nn.Module, batch: Any, forward: Forward) -> dict[str, int]:
    """Return the multiply-adds per example of each weight matrix.

    Each entry of a weight is used once per output position: their number is positions × size.

    Args:
        model: The model.
        batch: A batch.
        forward: How the model is called on a batch.

    Returns:
        Multiply-adds by parameter name, for the weights that take part in the forward pass. Embeddings are
        looked up and need none.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[str, int] = {}
    size = batch_size(batch)

    def add(weight: Any, positions: int) -> None:
        if torch.is_tensor(weight) and id(weight) in names:
            name = names[id(weight)]
            found[name] = found.get(name, 0) + positions * weight.numel()

    def count(module: nn.Module, _: Any, output: Any) -> None:
        if isinstance(module, nn.MultiheadAttention):  # it uses all its weights without calling out_proj
            positions = output[0].numel() // (size * module.embed_dim)
            for name in ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
                add(getattr(module, name, None), positions)
            add(module.out_proj.weight, positions)
            return
        weight = getattr(module, "weight", None)
        if (
            not torch.is_tensor(weight)
            or weight.dim() < 2
            or id(weight) not in names
            or not torch.is_tensor(output)
        ):
            return
        if isinstance(module, nn.Embedding):
            return
        # the channels are dimension 1 of a convolution's output, and the last one of other layers
        channels = output.shape[1] if weight.dim() > 2 else output.shape[-1]
        add(weight, output.numel() // (size * max(channels, 1)))

    handles = [module.register_forward_hook(count) for module in model.modules()]
    try:
        with evaluation_mode(model):
            forward(model, move_batch(batch, next(model.parameters()).device))
    finally:
        for handle in handles:
            handle.remove()
    return found


def kept_macs(macs: Mapping[str, int], masks: Mapping[str, Tensor]) -> int:
    """Return the multiply-adds that remain after pruning.

    Args:
        macs: Multiply-adds by weight name.
        masks: Masks by weight name; True = kept.

    Returns:
        Their number per example.
    """
    return sum(round(m * float(masks[n].float().mean())) if n in masks else m for n, m in macs.items())
