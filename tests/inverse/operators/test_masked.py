"""The operator of a layer in which some weights are removed."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from operator_makers import Dims, definition, dims, make


@given(dims, st.data())
def test_remove_is_the_schur_downdate(d: Dims, data: st.DataObject) -> None:
    q = make("gram-full", d)
    removed = torch.tensor(data.draw(st.lists(st.booleans(), min_size=d.n, max_size=d.n).filter(any)))
    Q, M, P = definition(q).detach(), ~removed, removed
    q.remove_(removed.reshape(d.shape))
    after = definition(q).detach()
    schur = Q[M][:, M] - Q[M][:, P] @ torch.linalg.solve(Q[P][:, P], Q[P][:, M])
    torch.testing.assert_close(after[M][:, M], schur)
    torch.testing.assert_close(schur, torch.linalg.inv(torch.linalg.inv(Q)[M][:, M]))
    torch.testing.assert_close(after[M][:, P], torch.zeros_like(after[M][:, P]))
    torch.testing.assert_close(after[P][:, P], torch.eye(int(P.sum())) * Q.diagonal().mean())
