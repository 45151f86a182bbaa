"""Context managers for the way a model is called: evaluation mode, gradients, attention, compilation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def evaluation_mode(model: nn.Module, *, batch_statistics: bool = False) -> Iterator[None]:
    """Put a model into evaluation mode, and restore the mode of every module afterwards.

    Recurrent layers keep their mode, because cuDNN computes no gradients for them in evaluation mode; their
    dropout is switched off instead.

    Args:
        model: The model.
        batch_statistics: Whether each BatchNorm that is in training mode normalises by the statistics of the
            batch, as in training. Its running statistics are not updated.
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
            norm.training, norm.track_running_stats = True, False  # no buffer is written
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
    """Enable gradients and disable autocast, whatever the caller has set.

    Autocast caches low-precision copies of the weights, and would continue to use copies made before pruning.
    To run the model under autocast, use it inside of `forward`.

    Raises:
        ValueError: If `torch.inference_mode()` is active, which allows no gradients.
    """
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "Q is learned from gradients, which torch.inference_mode() disables: call this outside of it"
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
    """Compute attention by plain operations, because torch's fused kernels support neither jvp nor vmap."""
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def eager_mode() -> Iterator[None]:
    """Run compiled models uncompiled, because compiled graphs ignore hooks that are registered later."""
    stance = getattr(torch.compiler, "set_stance", None)  # exists since torch 2.6
    with nullcontext() if stance is None else stance("force_eager"):
        yield
