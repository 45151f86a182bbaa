"""Renewing the running statistics of BatchNorm changes nothing else."""

from __future__ import annotations

import pytest
import torch
from helpers import (
    inputs_6,
    inputs_8,
    net_6_8_3,
    net_with_batchnorm,
    net_with_two_norms,
    trained_net_with_batchnorm,
)
from torch import Tensor, nn

from fishleg.runtime.batchnorm import (
    batch_statistics_mode,
    batchnorm_input_moments,
    refresh_batchnorm,
    refreshable_norms,
)


def convnet() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4, momentum=0.3),
        nn.Dropout(0.5),
        nn.Conv2d(4, 2, 3),
        nn.BatchNorm2d(2, track_running_stats=False),
        nn.BatchNorm2d(2),
        nn.InstanceNorm2d(2, track_running_stats=True),
    )


@pytest.mark.parametrize("training", [True, False])
def test_refresh_is_the_average_over_the_batches(training: bool) -> None:
    model = convnet().train(training)
    batches = [3 + 2 * torch.randn(16, 1, 6, 6) for _ in range(3)]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    assert refresh_batchnorm(model, batches, batches=3) == 2
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.3
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    assert changed == {f"{layer}.{part}" for layer in (1, 5) for part in statistics}
    inputs = [model[0](x).transpose(0, 1).flatten(1) for x in batches]
    torch.testing.assert_close(model[1].running_mean, sum(x.mean(1) for x in inputs) / 3)
    torch.testing.assert_close(model[1].running_var, sum(x.var(1) for x in inputs) / 3)


def test_a_batchnorm_frozen_in_a_training_model_stays() -> None:
    model = convnet().train()
    model[1].eval()
    before = model[1].running_mean.clone()
    assert refresh_batchnorm(model, [1 + torch.randn(16, 1, 6, 6)], batches=2) == 1
    assert torch.equal(model[1].running_mean, before)
    assert not model[1].training


def test_nothing_to_refresh() -> None:
    model = convnet()
    before = model[1].running_mean.clone()
    assert refresh_batchnorm(model, [torch.randn(4, 1, 6, 6)], batches=0) == 0
    assert torch.equal(model[1].running_mean, before)
    assert refresh_batchnorm(net_6_8_3(), [torch.randn(4, 6)]) == 0


def test_modes_are_restored_after_an_error() -> None:
    model = convnet().eval()
    with pytest.raises(RuntimeError):
        refresh_batchnorm(model, [torch.randn(4, 2, 6, 6)])
    assert not any(module.training for module in model.modules())
    assert model[1].momentum == 0.3


def test_every_example_counts_the_same_in_renewed_statistics() -> None:
    model, x, _ = trained_net_with_batchnorm()
    x = x[torch.randperm(len(x))][:300]
    sizes = [128, 128, 42, 2]
    refresh_batchnorm(model, x.split(sizes), len(sizes))
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    torch.testing.assert_close(norm.running_mean, model[0](x).mean(0).detach())
    assert norm.momentum == 0.1
    assert not norm._forward_pre_hooks


def test_a_norm_that_is_called_twice_or_late_averages_over_what_it_has_seen() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.late, self.calls = nn.BatchNorm1d(8), nn.BatchNorm1d(8), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.norm(x) + self.norm(x + 2)
            return y + self.late(x) if self.calls > 1 else y

    model, x = Twice().eval(), inputs_8(3)
    refresh_batchnorm(model, x, 3)
    torch.testing.assert_close(model.norm.running_mean, torch.cat(x).mean(0) + 1)
    torch.testing.assert_close(model.late.running_mean, torch.cat(x[1:]).mean(0))


def test_batchnorm_and_a_last_batch_of_one(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(65, 6)
    assert refresh_batchnorm(model, list(x.split(32)), 3) == 1
    with torch.no_grad():
        expected = torch.stack([model[0](part).mean(0) for part in x[:64].split(32)]).mean(0)
    torch.testing.assert_close(model[1].running_mean, expected)
    refresh_batchnorm(model, [x[64:], *x[:64].split(32)], 3)  # it is left out wherever it comes
    torch.testing.assert_close(model[1].running_mean, expected)
    assert refresh_batchnorm(model, list(x[:2].split(1)), 3) == 0
    assert "needs batches of more than one example" in caplog.text
    torch.testing.assert_close(model[1].running_mean, expected)  # as it was
    model[1].requires_grad_(False)
    assert refresh_batchnorm(model, list((x + 5).split(32)), 3) == 0  # frozen on purpose
    torch.testing.assert_close(model[1].running_mean, expected)


def test_batchnorm_is_as_it_was_after_a_failure() -> None:
    model = net_with_two_norms().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError, match="shapes"):
        refresh_batchnorm(model, [*inputs_6(1), torch.randn(3, 5)], 3)
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def test_norms_that_are_not_called_or_by_keyword_or_twice() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.late = nn.BatchNorm1d(8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.norm(input=x) + self.norm(x + 2 + torch.rand(()))
            return y

    model, x, state = Odd(), inputs_8(3)[0], torch.get_rng_state()
    (first, second), late = (
        batchnorm_input_moments(model, x).values(),
        batchnorm_input_moments(model, x)[model.late],
    )
    del second
    assert late == []
    assert len(first) == 2
    torch.testing.assert_close(first[0], torch.stack([x.sum(0), x.square().sum(0)]))
    assert all(map(torch.equal, first, batchnorm_input_moments(model, x)[model.norm]))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert refresh_batchnorm(model, [x], 1, only=[model.norm]) == 1


class HeadForTraining(nn.Module):
    """A second head with a BatchNorm of its own, in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.head, self.other_norm, self.other = nn.Linear(8, 4), nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(self.body(x)).relu()
        return self.head(z) + self.other(self.other_norm(z)) if self.training else self.head(z)


def test_a_norm_that_the_evaluated_model_does_not_use_keeps_its_statistics() -> None:
    model = HeadForTraining()
    for x in inputs_6():
        model(x)
    model.eval()
    kept = {name: value.clone() for name, value in model.other_norm.named_buffers()}
    used = model.norm.running_mean.clone()
    assert refresh_batchnorm(model, inputs_6(), 3) == 1
    assert all(torch.equal(value, kept[name]) for name, value in model.other_norm.named_buffers())
    assert not torch.equal(model.norm.running_mean, used)


def test_frozen_norms_keep_their_statistics() -> None:
    model = net_with_batchnorm()
    assert refreshable_norms(model) == [model[1]]
    with batch_statistics_mode(model):
        assert model[1].training
        assert not model.training
    assert not model[1].training
    model.train()
    model[1].eval()  # frozen on purpose, within a model that is being trained
    assert refreshable_norms(model) == []
    model.eval()
    model[1].weight.requires_grad_(False)
    assert refreshable_norms(model) == []
