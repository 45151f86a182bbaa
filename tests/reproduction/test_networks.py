"""The ResNets and the autoencoder."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from fishleg.workloads.digits import normalize
from reproduction.workloads.networks import CifarResNet, ResNet18, autoencoder, resnet20


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_resnet20_has_the_published_size() -> None:
    """Shortcuts without parameters (He et al., option A)."""
    convolutions = 9 * (3 * 16 + 6 * 16 * 16 + 16 * 32 + 5 * 32 * 32 + 32 * 64 + 5 * 64 * 64)
    norms = 2 * (7 * 16 + 6 * 32 + 6 * 64)
    assert size(resnet20()) == convolutions + norms + 64 * 10 + 10 == 269_722
    assert resnet20(7)(torch.randn(2, 3, 32, 32)).shape == (2, 7)
    assert size(CifarResNet(depth=9)) == 853_018  # ResNet56


def test_resnet_shortcut_is_a_strided_slice_with_zero_channels() -> None:
    block = resnet20().layer2[0].eval()
    with torch.no_grad():
        block.bn2.weight.zero_()  # leaves the shortcut alone
    x = torch.rand(2, 16, 6, 6)
    expected = torch.zeros(2, 32, 3, 3)
    expected[:, 8:24] = x[:, :, ::2, ::2]
    torch.testing.assert_close(block(x).detach(), expected)


def test_autoencoder() -> None:
    model = autoencoder()
    assert model(torch.rand(5, 64)).shape == (5, 64)
    widths = [module.out_features for module in model if isinstance(module, nn.Linear)]
    assert widths == [48, 24, 8, 24, 48, 64]
    assert isinstance(model[-1], nn.Linear), "outputs are logits"


def test_resnet20_loads_the_shared_weights() -> None:
    beside = Path(__file__).parents[3] / "shared" / "models"
    places = [Path(os.environ[name]) for name in ("FISHLEG_DATA",) if name in os.environ] + [beside]
    found = [p for place in places if (p := place / "resnet20-cifar10.pt").is_file()]
    if not found:
        pytest.skip("resnet20-cifar10.pt is neither in $FISHLEG_DATA nor beside the repository")
    torch.set_default_dtype(torch.float32)
    state = torch.load(found[0], weights_only=True)
    model = resnet20()
    model.load_state_dict(state)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())
    logits = model.eval()(normalize(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)))
    assert bool(torch.isfinite(logits).all())
    assert float(logits.detach().abs().max()) > 1, "not a network at initialisation"


def test_resnet18_has_its_usual_size() -> None:
    assert size(ResNet18()) == 11_173_962
    assert size(ResNet18(width=16)) == 701_466
    assert ResNet18(40, 4, stem_stride=2)(torch.randn(2, 3, 64, 64)).shape == (2, 40)
