"""TODO."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def evaluation_mode(model: nn.Module, *, batch_statistics: bool = False) -> Iterator[None]:
    """Eval mode inside, the old mode of every module after.

    Recurrent layers stay in training mode, without which cuDNN has no gradient, but lose their dropout.

    With `batch_statistics`, BatchNorm normalises by the batch, as it does in training, but its running
    statistics stay untouched all the same.
    """
    modes = {module: module.training for module in model.modules()}
    norms = [m for m in modes if isinstance(m, _BatchNorm) and m.training] if batch_statistics else []
    tracked = [norm.track_running_stats for norm in norms]
    dropouts = {m: m.dropout for m in modes if isinstance(m, nn.RNNBase)}
    try:
        model.eval()
        for recurrent in dropouts:
            recurrent.training, recurrent.dropout = modes[recurrent], 0.0
        for norm in norms:
            norm.training, norm.track_running_stats = True, False  # no buffer is written, not even by NaN
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for recurrent, dropout in dropouts.items():
            recurrent.dropout = dropout
        for norm, track in zip(norms, tracked, strict=True):
            norm.track_running_stats = track


@contextmanager
def gradients_enabled() -> Iterator[None]:
    """Gradients on and autocast off inside, whatever the caller has around it; inference mode is an error.

    (Autocast keeps low-precision copies of weights and would go on with those from before a pruning. To run
    the model under it, put it into `forward`.)
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Q is learned from gradients, which torch.inference_mode() rules out: call it outside"
        )
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.callback(torch.clear_autocast_cache)
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention by differentiable operations inside: torch's fused kernels have neither jvp nor vmap."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def eager_mode() -> Iterator[None]:
    """Inside, compiled models run as they were written: their graphs know nothing of hooks."""
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    with nullcontext() if stance is None else stance("force_eager"):
        yield
