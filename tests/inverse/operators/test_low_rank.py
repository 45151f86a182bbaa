"""The low-rank operator of M-FAC."""

import torch
from operator_makers import Dims, definition, make


def test_low_rank_cache_follows_its_samples() -> None:
    q = make("low-rank", Dims(2, 3, 1, 4, 0))
    with torch.no_grad():
        before = q.diag()
        assert torch.equal(q.diag(), before)
        q.samples.mul_(2)
        torch.testing.assert_close(q.diag().flatten(), definition(q).diagonal())
