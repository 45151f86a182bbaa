"""InverseFisher: whole-model products, restriction, state and dtypes."""

import io
from collections.abc import Callable

import pytest
import torch
from helpers import BagOfWords, dense_inverse, random_inverse, sentences, small_conv_net
from operator_makers import DenseOnly
from oracles import damped_inverse, exact_samples, flatten, random_fisher, random_like_parameters, unflatten
from torch import Tensor, nn

from fishleg import Categorical, InverseFisher, PruningOptions
from fishleg.curvature.samples import sample_h
from fishleg.inverse import learn_inverse, make_problem
from fishleg.inverse.operators import Diagonal
from fishleg.inverse.structures import STRUCTURES


def some_masks(model: nn.Module, seed: int = 1) -> dict[str, Tensor]:
    return {name: value > -0.3 for name, value in random_like_parameters(model, seed).items()}


def test_an_operator_with_nothing_but_dense_starts_as_it_was_made() -> None:
    inverse = InverseFisher.from_model(small_conv_net(), lambda layer: DenseOnly(layer.shape))
    assert float(inverse.trace().detach()) == sum(p.numel() for p in small_conv_net().parameters())
    with pytest.raises(NotImplementedError, match="DenseOnly has no scaled-identity initialisation"):
        InverseFisher.from_model(small_conv_net(), lambda layer: DenseOnly(layer.shape), scale=2.0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_products_are_those_of_the_block_diagonal_matrix(structure: str, masked: bool) -> None:
    model = small_conv_net()
    inverse = random_inverse(structure, model, block_size=4)
    if masked:
        inverse.restrict(some_masks(model))
    Q, v = dense_inverse(inverse, model), random_like_parameters(model)
    torch.testing.assert_close(inverse.matvec(v), unflatten(Q @ flatten(v), v))
    diagonal = inverse.diag()
    torch.testing.assert_close(flatten({name: diagonal[name] for name in v}), Q.diagonal())
    torch.testing.assert_close(inverse.trace(), torch.trace(Q))
    batched = {name: torch.stack([value, 2 * value]) for name, value in v.items()}
    torch.testing.assert_close(inverse.matvec(batched)["0.weight"][1], 2 * inverse.matvec(v)["0.weight"])


def test_layers_that_v_does_not_cover_are_left_out() -> None:
    v = random_like_parameters(small_conv_net())
    some = {name: v[name] for name in ("3.weight", "3.bias", "1.bias", "0.weight")}
    assert set(random_inverse().matvec(some)) == {"3.weight", "3.bias"}


@pytest.mark.parametrize("structure", ["full", "block", "eigen-kronecker"])
def test_restrict_twice_and_lift(structure: str) -> None:
    """Masks are those of the last call; a full factor is downdated to (F_MM+γI)⁻¹ each time."""
    model = nn.Sequential(nn.Linear(3, 2))
    inverse = InverseFisher.from_model(model, structure, block_size=4)
    F = random_fisher(8, torch.Generator().manual_seed(0))
    for _ in range(60):
        inverse.operator("0").natural_step_(exact_samples(F).reshape(-1, 2, 4), 0.1, 0.5)
    Q = inverse.operator("0").dense().detach()
    first = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 1]], dtype=torch.bool)
    second = first & torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]], dtype=torch.bool)
    for mask in (first, second):
        inverse.restrict(inverse.layers["0"].unpack(mask))
        keep = mask.flatten()
        assert torch.equal(inverse.mask("0"), mask)
        expected = damped_inverse(F[keep][:, keep], 0.1) if structure == "full" else Q[keep][:, keep]
        restricted = inverse.operator("0").dense()
        torch.testing.assert_close(restricted[keep][:, keep], expected)
        assert not restricted[~keep].any()
    inverse.restrict({})
    assert inverse.mask("0") is None
    assert inverse.operator("0") is inverse.unmasked("0")


def test_a_mask_of_the_weight_alone_keeps_the_bias() -> None:
    inverse = random_inverse(model=nn.Sequential(nn.Linear(2, 2)))
    inverse.restrict({"0.weight": torch.tensor([[True, False], [False, True]])})
    assert inverse.mask("0").tolist() == [[True, False, True], [False, True, True]]


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ({"5.weight": torch.ones(2, 3).bool()}, "mask for unknown parameter '5.weight'"),
        ({"3.weight": torch.ones(2, 3)}, "must be boolean .* got torch.float.. for '3.weight'"),
        (
            {"3.weight": torch.ones(3, 2).bool()},
            r"'3.weight' has shape \(3, 2\), the parameter \(2, 3\)",
        ),
        ({"3.bias": torch.ones(1).bool()}, r"mask of '3.bias' has shape \(1,\), the parameter \(2,\)"),
    ],
)
def test_bad_masks_change_nothing(masks: dict[str, Tensor], message: str) -> None:
    model = small_conv_net()
    inverse = random_inverse("full", model)
    inverse.restrict({"0.weight": some_masks(model)["0.weight"]})
    before = dense_inverse(inverse, model)
    with pytest.raises(ValueError, match=message):
        inverse.restrict({"0.weight": torch.zeros(3, 2, 2, 2).bool(), **masks})
    assert torch.equal(dense_inverse(inverse, model), before)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_state_round_trip_with_masks(structure: str) -> None:
    model = small_conv_net()
    inverse = random_inverse(structure, model)
    inverse.restrict(some_masks(model))
    file = io.BytesIO()
    torch.save(inverse.state_dict(), file)
    file.seek(0)
    other = InverseFisher.from_model(model, structure)
    other.restrict({"3.bias": torch.tensor([True, False])})
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(dense_inverse(other, model), dense_inverse(inverse, model))
    assert all(torch.equal(other.mask(name), inverse.mask(name)) for name in inverse.layers)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_to_dtype_keeps_masks(structure: str) -> None:
    model = small_conv_net()
    inverse = random_inverse(structure, model)
    inverse.restrict(some_masks(model))
    before = dense_inverse(inverse, model)
    inverse.to(torch.float32)
    assert all(inverse.operator(name).diag().dtype == torch.float32 for name in inverse.layers)
    assert all(inverse.mask(name).dtype == torch.bool for name in inverse.layers)
    torch.testing.assert_close(dense_inverse(inverse, model).float(), before.float())
    v = random_like_parameters(model)
    assert {value.dtype for value in inverse.matvec(v).values()} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_low_precision_models_get_a_float32_inverse(dtype: torch.dtype) -> None:
    model = small_conv_net().to(dtype)
    inverse = random_inverse("scaled-kronecker", model)
    precise = dtype if dtype == torch.float64 else torch.float32
    assert {p.dtype for p in inverse.parameters()} == {precise}
    v = {name: value.to(dtype) for name, value in random_like_parameters(model).items()}
    product = inverse.matvec(v)
    assert {value.dtype for value in product.values()} == {dtype}
    expected = inverse.operator("3").matvec(inverse.layers["3"].pack(v).to(precise))
    assert torch.equal(product["3.weight"], expected[:, :-1].to(dtype))


@pytest.mark.parametrize("name", ["keys", "values", "type"])
def test_layers_may_have_any_name(name: str) -> None:
    """`keys` and `values` are ordinary names of projections in attention, and methods of containers."""
    model = nn.Module()
    model._modules[name] = nn.Linear(2, 2)
    assert f"{name}.weight" in InverseFisher.from_model(model).diag()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: InverseFisher.from_model(m, scale=0.0), "scale must be > 0 and finite, got 0.0"),
        (lambda m: InverseFisher.from_model(m, scale=float("nan")), "scale must be > 0 and finite, got nan"),
        (lambda m: InverseFisher.from_model(m, "dense"), "structure must be one of identity, .* got 'dense'"),
        (lambda m: InverseFisher.from_model(m, block_size=0), "must be >= 1, got 0 and 2048"),
        (lambda m: InverseFisher.from_model(m, max_factor_dim=-1), "must be >= 1, got 50 and -1"),
        (lambda m: InverseFisher.from_model(m.requires_grad_(False)), "no trainable parameters"),
        (
            lambda m: InverseFisher.from_model(m, lambda layer: Diagonal((1,))),
            r"layer 'weight' needs an operator of shape \(2, 4\), got \(1,\)",
        ),
    ],
)
def test_errors(call: Callable[[nn.Module], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(nn.Linear(3, 2))


def test_padding_is_not_moved_by_steps_along_q_either() -> None:
    model = BagOfWords()
    q = learn_inverse(
        make_problem(model, sentences(), options=PruningOptions(samples=16, sub_batch=4)),
        relative_damping=0.1,
    ).inverse
    with torch.no_grad():  # as Adam leaves it in the end
        q.unmasked("words").L.matrix.add_(0.1 * torch.randn(40, 40))
    h = {name: value[0] for name, value in sample_h(model, sentences()[0], Categorical()).items()}
    step = q.matvec(h)["words.weight"]
    assert not bool(step[0].any())
    assert bool(step[1:].any())
    tied = {**h, "words.weight": h["words.weight"] + 1}  # a gradient of another kind, as of a tied head
    assert bool(q.matvec(tied)["words.weight"][0].any())


def test_which_words_occurred_is_part_of_the_state_of_q() -> None:
    model = BagOfWords()
    q = learn_inverse(
        make_problem(model, sentences(30), options=PruningOptions(samples=16, sub_batch=4)),
        relative_damping=0.1,
    ).inverse
    restored = InverseFisher.from_model(model)
    assert restored.unseen("words") is None  # it has no samples to tell by
    restored.load_state_dict(q.state_dict())
    unseen = restored.unseen("words")
    assert unseen is not None
    assert unseen.tolist() == [False] * 30 + [True] * 10
    assert restored.unseen("head") is None
    old = q.state_dict()
    del old["_extra_state"]["seen"]  # as an earlier version wrote it
    restored.load_state_dict(old)
    assert restored.unseen("words") is None
