"""Which parameters form a layer, and packing of a weight with its bias."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from fishleg import register_layer
from fishleg.curvature import layers
from fishleg.curvature.layers import Layer, find_layers

# module, and the layers expected of it: parameter names -> (packed shape, whether it is a matrix)
Expected = dict[tuple[str, ...], tuple[tuple[int, ...], bool]]


MODULES: dict[str, tuple[Callable[[], nn.Module], Expected]] = {
    "linear": (lambda: nn.Linear(3, 2), {("weight", "bias"): ((2, 4), True)}),
    "linear-without-bias": (lambda: nn.Linear(3, 2, bias=False), {("weight",): ((2, 3), True)}),
    "conv1d": (lambda: nn.Conv1d(3, 4, 5), {("weight", "bias"): ((4, 16), True)}),
    "conv2d": (lambda: nn.Conv2d(3, 4, (2, 3)), {("weight", "bias"): ((4, 19), True)}),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2, bias=False), {("weight",): ((3, 16), True)}),
    "grouped-conv": (lambda: nn.Conv2d(4, 6, 3, groups=2), {("weight", "bias"): ((6, 19), True)}),
    "depthwise-conv": (lambda: nn.Conv1d(4, 4, 3, groups=4), {("weight", "bias"): ((4, 4), True)}),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2),
        {
            ("in_proj_weight", "in_proj_bias"): ((12, 5), True),
            ("out_proj.weight", "out_proj.bias"): ((4, 5), True),
        },
    ),
    "embedding": (lambda: nn.Embedding(7, 3), {("weight",): ((7, 3), True)}),
    "conv-transpose": (lambda: nn.ConvTranspose2d(2, 3, 2), {("weight", "bias"): ((27,), False)}),
    "batch-norm": (lambda: nn.BatchNorm2d(3), {("weight", "bias"): ((6,), False)}),
    "one-number": (lambda: nn.PReLU(), {("weight",): ((1,), False)}),
    "vectors-of-several-modules": (
        lambda: nn.Sequential(nn.LayerNorm((2, 3)), nn.Linear(3, 2), nn.PReLU()),
        {("1.weight", "1.bias"): ((2, 4), True), ("0.weight", "0.bias", "2.weight"): ((13,), False)},
    ),
}


class Tied(nn.Module):
    """Embedding and readout share a weight, three layers share a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.body = nn.Linear(3, 5)
        self.readout = nn.Linear(3, 5)
        self.readout.weight = self.embed.weight
        self.extra = nn.Linear(3, 5)
        self.extra.bias = self.readout.bias = self.body.bias


class Pair(nn.Module):
    """A user's module with two matrices, and a third parameter that is not one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.up_bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))
        self.down = nn.Parameter(torch.randn(3, 4))
        self.gain = nn.Parameter(torch.tensor(1.0))


@pytest.fixture
def _restore_registry() -> Iterator[None]:
    before = dict(layers._MATRICES)
    yield
    layers._MATRICES.clear()
    layers._MATRICES.update(before)


def assert_partition(model: nn.Module, found: list[Layer]) -> None:
    """Every trainable parameter in exactly one layer."""
    covered = [name for layer in found for name in layer.names]
    assert sorted(covered) == sorted(name for name, p in model.named_parameters() if p.requires_grad)
    assert len({layer.name for layer in found}) == len(found)


@pytest.mark.parametrize("name", MODULES)
def test_layers_of_each_module(name: str) -> None:
    maker, expected = MODULES[name]
    for prefix, model in (("", maker()), ("0.", nn.Sequential(maker()))):
        found = find_layers(model)
        assert_partition(model, found)
        names = [tuple(name.removeprefix(prefix) for name in x.names) for x in found]
        assert dict(zip(names, [(x.shape, x.is_matrix) for x in found], strict=True)) == expected


def written_out(layer: Layer, tensors: dict[str, Tensor], batch: tuple[int, ...]) -> Tensor:
    """Row by row, inputs and kernel positions row-major, then the bias; vectors one after another."""
    flat = [tensors[name].reshape(*batch, -1) for name in layer.names]
    if not layer.is_matrix:
        return torch.cat(flat, -1)
    rows = list(flat[0].chunk(layer.shape[0], -1))
    if layer.bias is not None:
        rows = [torch.cat([row, flat[1][..., o, None]], -1) for o, row in enumerate(rows)]
    return torch.stack(rows, len(batch))


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("name", MODULES)
def test_pack_and_unpack_are_inverse(name: str, batch: tuple[int, ...]) -> None:
    model = MODULES[name][0]()
    for layer in find_layers(model):
        tensors = {part: torch.randn(*batch, *model.get_parameter(part).shape) for part in layer.names}
        packed = layer.pack(tensors)
        assert packed.shape == (*batch, *layer.shape)
        assert torch.equal(packed, written_out(layer, tensors, batch))
        unpacked = layer.unpack(packed)
        assert list(unpacked) == list(tensors)
        assert all(torch.equal(unpacked[part], tensors[part]) for part in tensors)


def test_a_packed_linear_layer_acts_on_inputs_with_a_one() -> None:
    """Bias is the last column: W x + b = pack @ [x; 1]. For a convolution, unfolded patches play x."""
    linear, conv = nn.Linear(3, 2), nn.Conv2d(2, 4, 3)
    x, image = torch.randn(5, 3), torch.randn(1, 2, 5, 5)
    patches = nn.functional.unfold(image, 3)[0].T
    for module, inputs, outputs in (
        (linear, x, linear(x)),
        (conv, patches, conv(image).flatten(2)[0].T),
    ):
        (layer,) = find_layers(module)
        packed = layer.pack(dict(module.named_parameters()))
        with_one = torch.cat([inputs, torch.ones(len(inputs), 1)], 1)
        torch.testing.assert_close(with_one @ packed.T, outputs)


def test_channels_and_kernel_of_a_convolution() -> None:
    (layer,) = find_layers(nn.Conv2d(4, 6, (3, 2), groups=2))
    assert (layer.channels, layer.kernel) == (2, 6)
    (layer,) = find_layers(nn.Linear(4, 6))
    assert (layer.channels, layer.kernel) == (4, 1)


def test_tied_parameters_are_counted_once() -> None:
    model = Tied()
    found = find_layers(model)
    assert_partition(model, found)
    assert [(x.name, x.weight, x.bias) for x in found] == [
        ("embed", "embed.weight", None),
        ("body", "body.weight", "body.bias"),
        ("extra", "extra.weight", None),
    ]


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [
        (["weight", "bias"], []),
        (["weight"], [(("bias",), (2,), False)]),
        (["bias"], [(("weight",), (2, 3), True)]),
    ],
)
def test_frozen_parameters_are_left_out(frozen: list[str], expected: list[object]) -> None:
    model = nn.Linear(3, 2)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    found = find_layers(model)
    assert_partition(model, found)
    assert [(x.names, x.shape, x.is_matrix) for x in found] == expected


def test_whole_networks_are_partitioned_matrices_first() -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 8)
    model = nn.Sequential(nn.Embedding(6, 4), encoder, nn.LSTM(4, 3), nn.BatchNorm1d(3), Pair(), Tied())
    found = find_layers(model)
    assert_partition(model, found)
    assert [layer.is_matrix for layer in found] == [True] * 8 + [False]
    order = [name for name, _ in model.named_parameters()]
    for names in ([layer.weight for layer in found[:-1]], found[-1].names):
        positions = [order.index(name) for name in names]
        assert positions == sorted(positions)


def test_vectors_are_packed_by_dtype() -> None:
    model = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(2).to(torch.bfloat16), nn.LayerNorm(4))
    assert [(x.names, x.shape) for x in find_layers(model)] == [
        (("0.weight", "0.bias", "2.weight", "2.bias"), (14,)),
        (("1.weight", "1.bias"), (4,)),
    ]


@pytest.mark.usefixtures("_restore_registry")
def test_register_layer() -> None:
    model = nn.Sequential(Pair())
    assert not any(layer.is_matrix for layer in find_layers(model))
    register_layer(Pair, [("up", "up_bias"), ("down", None)])
    found = find_layers(model)
    assert_partition(model, found)
    assert {x.name: (x.names, x.shape, x.is_matrix) for x in found} == {
        "0.up": (("0.up", "0.up_bias"), (4, 4), True),
        "0.down": (("0.down",), (3, 4), True),
        "vectors:0": (("0.gain",), (1,), False),
    }


@pytest.mark.usefixtures("_restore_registry")
def test_a_bias_that_does_not_fit_the_rows_stays_apart() -> None:
    register_layer(nn.ConvTranspose1d, [("weight", "bias")])  # its weight has the inputs first
    found = find_layers(nn.ConvTranspose1d(2, 3, 4))
    assert [(x.names, x.shape) for x in found] == [(("weight",), (2, 12)), (("bias",), (3,))]


@pytest.mark.usefixtures("_restore_registry")
def test_a_registered_subclass_comes_before_its_base() -> None:
    class Scaled(nn.Linear):
        pass

    register_layer(Scaled, [("weight", None)])
    assert [x.names for x in find_layers(Scaled(2, 2))] == [("weight",), ("bias",)]
    assert [x.names for x in find_layers(nn.Linear(2, 2))] == [("weight", "bias")]


def test_tied_embeddings_are_not_marked_as_embeddings() -> None:
    model = nn.ModuleDict({"words": nn.Embedding(5, 4, padding_idx=-1), "head": nn.Linear(4, 5, bias=False)})
    assert [(layer.is_embedding, layer.padding) for layer in find_layers(model)] == [
        (True, (4,)),
        (False, ()),
    ]
    model["head"].weight = model["words"].weight
    assert [(layer.is_embedding, layer.padding) for layer in find_layers(model)] == [(False, (4,))]
