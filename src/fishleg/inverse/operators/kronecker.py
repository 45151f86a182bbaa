"""Kronecker-factored Q blocks: the form of KFAC, that of the paper, and those with an inner diagonal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fishleg.inverse.operators.base import Operator
from fishleg.inverse.operators.factors import DiagonalFactor, Factor, Moment, add_moments

_ENTRIES_AT_A_TIME = 2**24  # of the products in `blocks`: bounds their memory
_INDICES_AT_A_TIME = 4096  # of `entries`: bounds the memory of the gathered rows of L and R


class Kronecker(Operator):
    """Q = D (L ⊗ R) E² (L ⊗ R)ᵀ D on matrices [n_out, n_in]; D and E² are optional diagonals.

    Without E this is D (LLᵀ ⊗ RRᵀ) D, the form of the paper. Without D and E it is the form of KFAC. With L
    and R orthogonal and D = I it is the form of EKFAC. vec is row-major: without E,
    Q vec(V) = vec(D∘(LLᵀ (D∘V) RRᵀ)).

    Paper: eq. (block_linear).

    Args:
        L: The factor of the output side, of dimension n_out.
        R: The factor of the input side, of dimension n_in.
        outer: Whether Q has the diagonal D.
        inner: Whether Q has the diagonal E².
    """

    has_natural_step = True

    def __init__(self, L: Factor, R: Factor, *, outer: bool = True, inner: bool = False) -> None:
        super().__init__()
        self.shape = (L.dim, R.dim)
        self.L, self.R = L, R
        self.log_d = nn.Parameter(torch.zeros(self.shape)) if outer else None
        self.log_e = nn.Parameter(torch.zeros(self.shape)) if inner else None

    def dense(self) -> Tensor:
        """Return Q, [n, n]."""
        S = torch.kron(self.L.dense().contiguous(), self.R.dense().contiguous())
        if self.log_d is not None:
            S = self.log_d.exp().flatten()[:, None] * S
        if self.log_e is not None:
            S = S * self.log_e.exp().flatten()
        return S @ S.mT

    def _scales(self) -> tuple[Tensor | None, Tensor | None]:
        """Return D and E², each None where this form has none."""
        D = None if self.log_d is None else self.log_d.exp()
        return D, None if self.log_e is None else (2 * self.log_e).exp()

    def _whiten(self, V: Tensor, D: Tensor | None) -> Tensor:
        """Return (L ⊗ R)ᵀ D v, the coordinates in which Q is E² (or the identity)."""
        return self.R.apply_transpose(self.L.left_transpose(V if D is None else D * V))

    def matvec(self, V: Tensor) -> Tensor:
        """Return Q v for each v of V [..., *shape]."""
        return self._matvec(V, *self._scales())

    def _matvec(self, V: Tensor, D: Tensor | None, E2: Tensor | None) -> Tensor:
        G = self._whiten(V, D)
        out = self.R.apply_matrix(self.L.left(G if E2 is None else G * E2))
        return out if D is None else D * out

    def damped_matvec(self, V: Tensor, extra_damping: float) -> Tensor:
        """Compute (Q⁻¹ + extra_damping·I)⁻¹ v for each v of a batch.

        With E² the extra damping is added to the eigenvalues 1/E². This is exact if L and R are orthogonal
        and D = I, as after the warm start, and an approximation otherwise.

        Args:
            V: The vectors v, [..., n_out, n_in].
            extra_damping: The additional damping, ≥ 0.

        Returns:
            The products, [..., n_out, n_in].
        """
        D, E2 = self._scales()
        if E2 is None:
            return super().damped_matvec(V, extra_damping)
        return self._matvec(V, D, E2 / (1 + extra_damping * E2))

    def solve(self, V: Tensor) -> Tensor:
        """Return Q⁻¹ v for each v of V [..., *shape]."""
        D, E2 = self._scales()
        G = self.R.solve_matrix(self.L.solve_matrix((V if D is None else V / D).mT).mT)
        out = self.R.solve_transpose(self.L.solve_transpose((G if E2 is None else G / E2).mT).mT)
        return out if D is None else out / D

    def diag(self) -> Tensor:
        """Return the diagonal of Q, [*shape]."""
        return self._diag(*self._scales())

    def _diag(self, D: Tensor | None, E2: Tensor | None) -> Tensor:
        if E2 is None:
            product = torch.outer(self.L.gram_diag(), self.R.gram_diag())
        else:
            product = self.R.apply_squares(self.L.left_squares(E2))
        return product if D is None else D.square() * product

    def inverse_diag(self) -> Tensor:
        """Return diag(Q⁻¹), [*shape]."""
        D, E2 = self._scales()
        L, R = self.L.inverse_transpose(), self.R.inverse_transpose()
        if E2 is None:
            product = torch.outer(L.gram_diag(), R.gram_diag())
        else:
            product = R.apply_squares(L.left_squares(1 / E2))
        return product if D is None else product / D.square()

    def loss_terms(self, V: Tensor) -> tuple[Tensor, Tensor]:
        """Return Σ‖Q v‖² over the batch V [..., *shape], and Tr(Q)."""
        D, E2 = self._scales()
        return self._matvec(V, D, E2).square().sum(), self._trace(D, E2)

    def trace(self) -> Tensor:
        """Return Tr(Q)."""
        return self._trace(*self._scales())

    def _trace(self, D: Tensor | None, E2: Tensor | None) -> Tensor:
        if D is not None or E2 is None:
            return self._diag(D, E2).sum()
        # Without D the trace needs only the column lengths of L and R: Σ_ab e²_ab ‖l_a‖² ‖r_b‖²
        return self.L.column_norms() @ E2 @ self.R.column_norms()

    def frobenius_sq(self) -> Tensor:
        """Return ‖Q‖_F²."""
        if self.log_e is not None:
            return super().frobenius_sq()
        LL, RR = self.L.dense(), self.R.dense()
        d = torch.ones_like(self.diag()) if self.log_d is None else (2 * self.log_d).exp()
        return (d * ((LL @ LL.mT).square() @ d @ (RR @ RR.mT).square())).sum()

    def entries(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return Q[rows, columns] for flat indices of shapes that broadcast."""
        rows, columns = torch.broadcast_tensors(rows, columns)
        shape, n_in = rows.shape, self.shape[1]
        r, c = rows.flatten(), columns.flatten()
        L, R = self.L.dense(), self.R.dense()
        e2 = None if self.log_e is None else (2 * self.log_e).exp()
        parts = []
        for start in range(0, len(r), _INDICES_AT_A_TIME):
            a, b = r[start : start + _INDICES_AT_A_TIME], c[start : start + _INDICES_AT_A_TIME]
            left = L[a // n_in] * L[b // n_in]
            right = R[a % n_in] * R[b % n_in]
            parts.append(left.sum(-1) * right.sum(-1) if e2 is None else ((left @ e2) * right).sum(-1))
        values = torch.cat(parts) if parts else L.new_zeros(0)
        if self.log_d is not None:
            d = self.log_d.exp().flatten()
            values = d[r] * d[c] * values
        return values.reshape(shape)

    def blocks(self, groups: Tensor) -> Tensor:
        """Compute Q[g, g] for groups g of parameters.

        For a group within one row o of the weight, Q_ij = d_i d_j Σ_b r_ib s_ob r_jb with s = (L∘L)E², which
        is one small matrix product. Other groups use the derived form.

        Args:
            groups: Flat indices, one group per row, [G, k].

        Returns:
            The blocks, [G, k, k].
        """
        n_in = self.shape[1]
        rows, columns = groups // n_in, groups % n_in
        if not groups.numel() or not bool((rows == rows[:, :1]).all()):
            return super().blocks(groups)
        D, E2 = self._scales()
        s = self.L.left_squares(self.R.ones().expand(self.shape) if E2 is None else E2)
        R = None if isinstance(self.R, DiagonalFactor) else self.R.dense()
        chunk = 1 + _ENTRIES_AT_A_TIME // (n_in * groups.shape[1])
        parts = []
        for row, column in zip(rows[:, 0].split(chunk), columns.split(chunk), strict=True):
            if R is None:
                squares = self.R.gram_diag()[column] * s[row].gather(1, column)
                same = column.unsqueeze(-1) == column.unsqueeze(-2)
                parts.append(same * squares.unsqueeze(-1))
            else:
                parts.append((R[column] * s[row].unsqueeze(1)) @ R[column].mT)
        values = torch.cat(parts)
        if D is not None:
            d = D.flatten()[groups]
            values = d.unsqueeze(-1) * d.unsqueeze(-2) * values
        return values

    def set_scale_(self, scale: float) -> None:
        """Set Q = scale · I."""
        self.L.eye_()
        self.R.eye_()
        if self.log_d is None and self.log_e is None:
            self.L.scale_(scale**0.25)
            self.R.scale_(scale**0.25)
            return
        with torch.no_grad():
            if self.log_e is not None:
                self.log_e.zero_()
            carrier = self.log_e if self.log_d is None else self.log_d
            assert carrier is not None
            carrier.fill_(scale).log_().mul_(0.5)

    def natural_step_(self, H: Tensor, gamma: float, eta: float, mask: Tensor | None = None) -> None:
        """Take one inverse-free step towards (F+γI)⁻¹ from samples H [g, *shape]."""
        with torch.no_grad():
            precision = torch.full_like(H[0], gamma)
            if mask is not None:
                H = H * mask
                precision = torch.where(mask, precision, 1 / self.diag())
            if self.log_e is not None:
                self._natural_step_inner_(H, precision, eta, self.log_e, uniform=mask is None)
            else:
                self._natural_step_sides_(H, precision, eta, mask)

    def _natural_step_inner_(
        self, H: Tensor, precision: Tensor, eta: float, log_e: Tensor, *, uniform: bool
    ) -> None:
        """Set 1/e² ← (1−η)/e² + η E[G²], with G the samples in the basis L ⊗ R: EKFAC's eigenvalues."""
        if self.log_d is None and uniform:
            noise = precision[0, 0] * torch.outer(self.L.column_norms(), self.R.column_norms())
        else:
            d2 = 1.0 if self.log_d is None else (2 * self.log_d).exp()
            rows = self.L.apply_function((d2 * precision).mT, torch.square, True).mT
            noise = self.R.apply_function(rows, torch.square, True)
        ratio = (2 * log_e).exp() * (
            self._whiten(H, self._scales()[0]).square().mean(0) + noise
        )  # 1 at the fixed point
        log_e.sub_(0.5 * torch.log((1 - eta) + eta * ratio))

    def _natural_step_sides_(self, H: Tensor, precision: Tensor, eta: float, mask: Tensor | None) -> None:
        """Take natural steps on L, R and D of ½Tr(QF_γ) − ½log det Q. Damping enters in closed form."""
        n_out, n_in = self.shape
        G = self._whiten(H, self._scales()[0])
        damped = precision if self.log_d is None else (2 * self.log_d).exp() * precision
        row_noise = self.L.noise_moment(damped @ self.R.gram_diag() / n_in)
        column_noise = self.R.noise_moment(damped.mT @ self.L.gram_diag() / n_out)
        rows = G.mT.reshape(-1, n_out) / (len(H) * n_in) ** 0.5
        columns = G.reshape(-1, n_in) / (len(H) * n_out) ** 0.5
        M_L = add_moments(self.L.moment(rows), row_noise)
        M_R = add_moments(self.R.moment(columns), column_noise)
        if self.log_d is not None:  # the derivative of the objective by log d_i is (Q F_γ)_ii − 1
            excess = (H * self.matvec(H)).mean(0) + precision * self.diag() - 1
            if mask is not None:
                excess = excess * mask
            self.log_d.sub_(0.25 * (eta * excess).clamp(-1.0, 1.0))
        self.L.natural_step_(M_L, eta)
        self.R.natural_step_(M_R, eta)

    def eigenbasis_(self, left: Moment, right: Moment, gamma: float) -> None:
        """Set L and R to eigenvectors, D = I, and E² to the eigenvalues of a Kronecker-factored F.

        L gets the eigenvectors of C_L = E[HHᵀ], R those of C_R = E[HᵀH]. E² gets the eigenvalues that Q has
        in this basis if F = C_L ⊗ C_R / Tr(C_L).

        Args:
            left: The second moment C_L of the output side, as `L.moment` returns it.
            right: The second moment C_R of the input side, as `R.moment` returns it.
            gamma: The damping γ.
        """
        rows, columns = self.L.eigenbasis_(left).clamp(min=0), self.R.eigenbasis_(right).clamp(min=0)
        with torch.no_grad():
            if self.log_d is not None:
                self.log_d.zero_()
            if self.log_e is not None:
                total = rows.sum().clamp(min=torch.finfo(rows.dtype).tiny)
                self.log_e.copy_(-0.5 * torch.log(torch.outer(rows, columns / total) + gamma))
