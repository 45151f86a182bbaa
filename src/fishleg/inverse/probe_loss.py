"""The auxiliary loss from one probe vector u and one Fisher-vector product: the estimator of the paper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fishleg.inverse.inverse_fisher import InverseFisher


def probe_loss(
    inverse: InverseFisher,
    u: Mapping[str, Tensor],
    fisher_product: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
    gamma: float,
    *,
    precondition: bool,
) -> tuple[Tensor, float, float]:
    """Compute v·sg(P(F_γv − u))/‖u‖² at v = Qu; its gradient is that of the auxiliary loss.

    sg stops the gradient. P is Q or the identity.

    Paper: eq. (aux).

    Args:
        inverse: Q.
        u: The probe by parameter name, [*parameter.shape].
        fisher_product: Computes F v for v by parameter name.
        gamma: The damping γ.
        precondition: Whether P = Q.

    Returns:
        The loss, and uᵀQF_γQu/‖u‖² and uᵀQu/‖u‖², which estimate Tr(QF_γQ)/n and Tr(Q)/n.

    Raises:
        ValueError: The probe is zero or not finite.
    """
    masks = {name: mask for name in inverse.layers if (mask := inverse.mask(name)) is not None}
    u_packed = {
        name: value * masks[name] if name in masks else value for name, value in inverse.pack(u).items()
    }
    norm = sum(float(value.double().square().sum()) for value in u_packed.values())
    if not (norm > 0 and math.isfinite(norm)):
        raise ValueError(f"the probe u must be finite and not zero, got ‖u‖² = {norm}")
    v_packed = {name: inverse.operator(name).matvec(value) for name, value in u_packed.items()}
    v = inverse.unpack({name: value.detach() for name, value in v_packed.items()})
    F_v = inverse.pack(fisher_product(v))
    loss = torch.zeros((), dtype=torch.float64)
    quadratic = linear = 0.0
    for name, value in v_packed.items():
        damped = F_v[name] + gamma * value.detach()
        residual = damped - u_packed[name]
        if precondition:
            with torch.no_grad():
                residual = inverse.operator(name).matvec(residual)
        loss = loss + (value * residual).sum().double().cpu() / norm
        quadratic += float((value.detach() * damped).sum()) / norm
        linear += float((value.detach() * u_packed[name]).sum()) / norm
    return loss, quadratic, linear
