"""Learn Q by itself and hold it against the truth: the damped inverse Fisher matrix of a small layer."""

import torch
from digits import TRAIN_X
from torch import nn

from fishleg import Auxiliary, InverseFisher

torch.manual_seed(0)
x = nn.functional.avg_pool2d(TRAIN_X, 2).flatten(1)  # 16 pixels, so that 170 × 170 matrices are all there is
model = nn.Linear(16, 10)
gamma = 0.01

q = InverseFisher.from_model(model)
print(q.describe())
stats = Auxiliary(model, q, "categorical", gamma=gamma).learn(x.split(100), steps=400)
print(f"gauge {stats.gauge_smoothed:+.3f} after {stats.step} steps, converged: {stats.converged}")

# F of a softmax layer with weights [W b], row-major: the mean of (diag p − ppᵀ) ⊗ x̃x̃ᵀ
p = model(x).softmax(1).detach()
inputs = torch.cat([x, torch.ones(len(x), 1)], 1)
outputs = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
F = torch.einsum("nij,na,nb->iajb", outputs, inputs, inputs).reshape(170, 170) / len(x)
truth = torch.linalg.inv(F + gamma * torch.eye(170))

(name,) = q.layers
Q = q.operator(name).dense().detach()
rivals = {"Q": Q, "I/γ": torch.eye(170) / gamma, "diagonal": torch.diag(1 / (F.diag() + gamma))}
for what, matrix in rivals.items():
    values = torch.linalg.eigvals(matrix.double() @ torch.linalg.inv(truth.double())).real
    print(f"{what:<9} affine-invariant distance to the truth {values.log().norm():.2f}")
correlation = torch.corrcoef(torch.stack([Q.diag(), truth.diag()]))[0, 1]
print(f"diag(Q) against the truth's: correlation {correlation:.3f}")
