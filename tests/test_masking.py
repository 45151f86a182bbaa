"""Pruned weights stay exactly zero under any optimizer; a refresh touches BatchNorm's statistics alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fishleg.optim.fishleg import FishLeg
from fishleg.pruning.keep_zeros import keep_zeros
from fishleg.pruning.masks import apply_masks, masks_of
from fishleg.runtime.batchnorm import refresh_batchnorm

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=0.1, weight_decay=0.1, amsgrad=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.1),
}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def random_masks(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters() if name != "2.bias"}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, check: Callable[[], None]) -> None:
    for _ in range(steps):
        x = torch.randn(32, 6)
        optimizer.zero_grad()
        functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
        optimizer.step()
        check()


def zeros_hold(model: nn.Module, masks: dict[str, Tensor]) -> bool:
    parameters = dict(model.named_parameters())
    return all(not bool(parameters[name][~mask].any()) for name, mask in masks.items())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_zeros_and_state_stay_zero(name: str) -> None:
    model = mlp()
    optimizer, masks = OPTIMIZERS[name](model), random_masks(model)
    train(model, optimizer, 3, lambda: None)  # state from before the masks
    handle = keep_zeros(optimizer, model, masks)
    assert zeros_hold(model, masks)
    parameters = dict(model.named_parameters())

    def check() -> None:
        assert zeros_hold(model, masks)
        for key, mask in masks.items():
            states = [v for v in optimizer.state[parameters[key]].values() if v.shape == mask.shape]
            assert states
            assert all(not bool(state[~mask].any()) and bool(state[mask].any()) for state in states)

    check()
    before = {key: p.detach().clone() for key, p in parameters.items()}
    train(model, optimizer, 20, check)
    assert all(not torch.equal(p, before[key]) for key, p in parameters.items())
    handle.remove()
    train(model, optimizer, 1, lambda: None)
    assert not zeros_hold(model, masks)


def test_fishleg_with_masks_keeps_zeros() -> None:
    model = mlp()
    masks = random_masks(model)
    optimizer = FishLeg(model, lr=0.1, weight_decay=0.1, update_every=2)
    optimizer.set_masks(masks)

    def check() -> None:
        assert zeros_hold(model, masks)

    before = model[0].weight.detach().clone()
    train(model, optimizer, 20, check)
    kept = masks["0.weight"]
    assert bool((model[0].weight[kept] != before[kept]).all())


def test_apply_masks_changes_nothing_else() -> None:
    model = mlp()
    before, masks = {k: v.clone() for k, v in model.state_dict().items()}, random_masks(model)
    apply_masks(model, masks)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] * masks.get(name, torch.ones(()).bool()))


@pytest.mark.parametrize("call", [apply_masks, lambda m, masks: keep_zeros(OPTIMIZERS["sgd"](m), m, masks)])
def test_unknown_parameter(call: Callable[[nn.Module, dict[str, Tensor]], object]) -> None:
    with pytest.raises(ValueError, match=r"mask for unknown parameter '0.wieght'"):
        call(mlp(), {"0.wieght": torch.ones(8, 6).bool()})


def test_masks_of_reads_the_zeros_of_matrices() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4), nn.Linear(4, 2))
    masks = {name: torch.rand(model.get_parameter(name).shape) < 0.5 for name in ("0.weight", "2.weight")}
    assert masks_of(model) == {}
    apply_masks(model, masks)
    nn.init.zeros_(model[2].bias)
    found = masks_of(model)
    assert found.keys() == masks.keys()
    for name, mask in found.items():
        assert mask.dtype == torch.bool
        assert torch.equal(mask, masks[name])
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert torch.equal(found["0.weight"], masks["0.weight"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_keep_zeros_without_masks_keeps_those_that_are_there(name: str) -> None:
    model = mlp()
    masks = {"2.weight": torch.rand(3, 8) < 0.5}
    apply_masks(model, masks)
    optimizer = OPTIMIZERS[name](model)
    handle = keep_zeros(optimizer, model)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}

    def check() -> None:
        assert torch.equal(model[2].weight == 0, ~masks["2.weight"])

    train(model, optimizer, 10, check)
    assert all(not torch.equal(p, before[key]) for key, p in model.named_parameters())
    handle.remove()
    train(model, optimizer, 1, lambda: None)
    assert not zeros_hold(model, masks)


@pytest.mark.parametrize("masks", [None, {}])
def test_no_zeros_to_keep(masks: dict[str, Tensor] | None) -> None:
    model = mlp()
    nn.init.zeros_(model[0].bias)
    optimizer = OPTIMIZERS["sgd"](model)
    with pytest.raises(ValueError, match="no zeros to keep: prune it first, or pass masks"):
        keep_zeros(optimizer, model, masks)
    assert not optimizer._optimizer_step_post_hooks


# --- BatchNorm ----------------------------------------------------------------------------------------------


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
    assert refresh_batchnorm(mlp(), [torch.randn(4, 6)]) == 0


def test_modes_are_restored_after_an_error() -> None:
    model = convnet().eval()
    with pytest.raises(RuntimeError):
        refresh_batchnorm(model, [torch.randn(4, 2, 6, 6)])
    assert not any(module.training for module in model.modules())
    assert model[1].momentum == 0.3
