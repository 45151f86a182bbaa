"""A smaller model: rows and columns that do nothing are cut out, and it computes the same, faster.

Whole rows that are zero (pattern "rows") cost as much as any others until they are gone. `shrink` follows
them through the model, cuts all that belongs to them, and holds the result to the model it came from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.utils._pytree import tree_leaves

from fishleg.runtime.batches import Forward, default_forward, inputs_of, map_tensors, move_batch
from fishleg.runtime.models import abbreviate, copy_model
from fishleg.runtime.random_state import seeded
from fishleg.shrinking.channels import ChannelGraph

logger = logging.getLogger(__name__)
_STUCK = (
    "their outputs are added to others that are not zero, are the model's own, or go where the trace cannot "
    "follow"
)
_WRITTEN = "the model does not run without its zero rows: somewhere it counts on a size that is written down"


def shrink(model: nn.Module, batch: Any, *, forward: Forward = default_forward) -> nn.Module:
    """A copy of a pruned model without the rows and columns that its outputs do not depend on.

    `batch` is one of the loader's: the model is traced on it in evaluation mode (torch.export), and in the
    end both models must give the same outputs for it, and for random numbers in its place. All that the model
    returns stays as it is; a `forward` of your own may return less. Branches that the batch does not take
    are not seen. The copy is of the same class; its state loads with `load_shrunk`.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> with torch.no_grad():
    ...     model[0].weight[:10], model[0].bias[:10] = 0, 0
    >>> shrink(model, torch.randn(2, 8))
    Sequential(
      (0): Linear(in_features=8, out_features=6, bias=True)
      (1): ReLU()
      (2): Linear(in_features=6, out_features=4, bias=True)
    )
    """
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        model = model.module
    if not any(True for _ in model.parameters()):
        raise ValueError("nothing can be cut out: the model has no parameters")
    batch = move_batch(batch, next(model.parameters()).device)
    graph, unused = _trace(copy_model(model).eval(), batch, forward)
    small = copy_model(model)
    cut = {
        name: _sliced(_tensor(small, name), {dim: graph.keep(name, dim) for dim in places})
        for name, places in graph.places.items()
        if not all(bool(graph.keep(name, dim).all()) for dim in places)
    }
    stuck = _stuck_rows(small, graph)
    if not cut:
        found = 'no whole row of a weight is zero, with its bias (pattern="rows" makes such)'
        if stuck:
            found = f"{sum(stuck.values())} rows of {abbreviate(list(stuck))} are zero, but {_STUCK}"
        raise ValueError(f"nothing can be cut out: {found}")
    _replace(small, cut)
    _check_same(model, small, batch, forward, unused)
    if stuck:
        rows = sum(stuck.values())
        logger.warning("%d rows of %s are zero and stay: %s", rows, abbreviate(list(stuck)), _STUCK)
    if unused:
        logger.warning(
            "%s had no part in the outputs for this batch, and stay as they are: used on what was cut out, "
            "in training, say, they would not fit any more",
            abbreviate(unused),
        )
    return small


def load_shrunk(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Cut a model down to the sizes of a shrunk model's state, and load that; returns the model.

    >>> model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> small = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))
    >>> load_shrunk(model, small.state_dict())[0].out_features
    6
    """
    own = model.state_dict()
    if own.keys() != state.keys():
        differ = sorted(own.keys() ^ state.keys())
        raise ValueError(f"the state is that of another model: only one of the two has {abbreviate(differ)}")
    for name in own:
        shapes = tuple(state[name].shape), tuple(own[name].shape)
        if len(shapes[0]) != len(shapes[1]) or any(a > b for a, b in zip(*shapes, strict=True)):
            raise ValueError(
                f"{name} has shape {shapes[0]} in the state, which is no part of {shapes[1]}, the model's: "
                "it is that of another model"
            )
    cut = {name: value for name, value in state.items() if value.shape != own[name].shape}
    _replace(model, {name: value.detach().clone().to(own[name]) for name, value in cut.items()})
    model.load_state_dict(state)
    return model


def _outputs(model: nn.Module, batch: Any, forward: Forward) -> list[Tensor]:
    """All tensors that the model returns; those that a forward of the user's own returns."""
    if forward is not default_forward:
        outputs: Any = forward(model, batch)
    else:
        inputs = inputs_of(batch)
        outputs = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]


class _Call(nn.Module):
    """The model as it is called on a batch."""

    def __init__(self, model: nn.Module, call: Forward) -> None:
        super().__init__()
        self.model, self._call = model, call

    def forward(self, batch: Any) -> list[Tensor]:
        return _outputs(self.model, batch, self._call)


def _trace(model: nn.Module, batch: Any, forward: Forward) -> tuple[ChannelGraph, list[str]]:
    """The channels of the model, and the parameters that the trace does not need."""
    try:
        with torch.no_grad():
            program = torch.export.export(
                _Call(model, forward), (map_tensors(batch, Tensor.clone),), strict=False
            )
    except Exception as error:
        reason = str(error).strip().splitlines()
        raise ValueError(
            f"torch.export cannot trace the model, so that nobody knows which rows can go: "
            f"{type(error).__name__}: {reason[0] if reason else ''}"
        ) from error
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names = {node: name.removeprefix("model.") for node, name in names.items()}
    used = {names[node.name] for node in program.graph.nodes if node.name in names and node.users}
    used_ids = {id(_tensor(model, name)) for name in used}
    unused = [name for name, p in model.named_parameters() if id(p) not in used_ids]
    tensors = {name: _tensor(model, name).detach().cpu() for name in names.values()}
    forgotten = tensors.keys() - model.state_dict().keys()  # buffers that no state dict could bring back
    return ChannelGraph(program.graph, names, tensors, forgotten), unused


def _tensor(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer, also one that is not in the state."""
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found


def _sliced(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    layout = formats.get(tensor.dim(), torch.contiguous_format)
    if tensor.is_contiguous() or not tensor.is_contiguous(memory_format=layout):
        layout = torch.contiguous_format
    value = tensor.detach()
    for dim, keep in kept.items():
        value = value.index_select(dim, keep.nonzero().flatten().to(value.device))
    return value.clone(memory_format=layout)


def _stuck_rows(model: nn.Module, graph: ChannelGraph) -> dict[str, int]:
    """By weight: rows that are zero, and are not cut."""
    matrices = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
    found = {}
    for module_name, module in model.named_modules():
        weight = getattr(module, "weight", None) if isinstance(module, matrices) else None
        if weight is None or not bool((weight != 0).any()):
            continue
        name = f"{module_name}.weight" if module_name else "weight"
        zero = (weight.detach().flatten(1) == 0).all(1).cpu()
        if 0 in graph.places.get(name, {}):
            zero &= graph.keep(name, 0)
        if bool(zero.any()):
            found[name] = int(zero.sum())
    return found


def _replace(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Put tensors of other shapes in the place of parameters and buffers, wherever these are used."""
    new = {id(_tensor(model, name)): value for name, value in values.items()}
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        changed = False
        for name, p in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(p) in new:
                made.setdefault(id(p), nn.Parameter(new[id(p)], requires_grad=p.requires_grad))
                setattr(module, name, made[id(p)])
                changed = True
        for name, buffer in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(buffer) in new:
                setattr(module, name, new[id(buffer)])
                changed = True
        if changed:
            _tell_sizes(module)


def _tell_sizes(module: nn.Module) -> None:
    """The sizes that modules keep beside their tensors."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, _ConvNd) and not module.transposed:
        if module.groups > 1 and module.groups == module.in_channels == module.out_channels:
            module.groups = len(module.weight)
        module.out_channels, module.in_channels = len(module.weight), module.groups * module.weight.shape[1]
    elif isinstance(module, _BatchNorm):
        sizes = [len(t) for t in (module.weight, module.running_mean) if t is not None]
        module.num_features = sizes[0] if sizes else module.num_features
    elif isinstance(module, nn.PReLU):
        module.num_parameters = module.weight.numel()


@torch.no_grad()
def _check_same(model: nn.Module, small: nn.Module, batch: Any, forward: Forward, unused: list[str]) -> None:
    """An error where the smaller model does something else, or nothing at all.

    On copies, and in float64, where only a mistake makes a difference; where that does not run, as it is.
    """
    twins = [copy_model(each).eval() for each in (model, small)]
    try:
        wide = [copy_model(each).double() for each in twins]
        widened = _widened(batch)
        _call(wide[0], widened, forward)
    except (RuntimeError, TypeError, ValueError):  # dtypes that are written down
        wide, widened = twins, batch
    trials = [widened, map_tensors(widened, _random_like)]
    for trial in trials:
        expected = _call(wide[0], trial, forward)
        try:
            found = _call(wide[1], trial, forward)
        except Exception as error:
            also = f", or calls {abbreviate(unused)}, which the outputs do not need" if unused else ""
            raise ValueError(
                f"{_WRITTEN} (x.view(-1, 512), say, which x.flatten(1) would not){also}: "
                f"{type(error).__name__}: {error}"
            ) from error
        for a, b in zip(expected, found, strict=True):
            _check_equal(a, b)


def _call(model: nn.Module, batch: Any, forward: Forward) -> list[Tensor]:
    """On a copy of the batch, in case the model writes into it, and with the same random numbers."""
    with seeded(0):
        return _outputs(model, map_tensors(batch, Tensor.clone), forward)


def _widened(batch: Any) -> Any:
    return map_tensors(batch, lambda t: t.double() if t.is_floating_point() else t)


def _random_like(tensor: Tensor) -> Tensor:
    """Other numbers of the same size; what is not floating-point may be words, and stays."""
    if not tensor.is_floating_point() or not tensor.numel():
        return tensor
    scale = tensor.std(correction=0).nan_to_num(1.0).clamp(min=1e-3)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return (tensor.mean() + scale * drawn.to(tensor)).to(tensor)


def _check_equal(expected: Tensor, found: Tensor) -> None:
    if found.shape != expected.shape:
        raise ValueError(f"{_WRITTEN}: outputs are {list(found.shape)} and not {list(expected.shape)}")
    if not expected.is_floating_point():
        same, difference, tolerance = torch.equal(expected, found), torch.inf, 0.0
    else:
        finite = expected.isfinite()
        size = float(expected[finite].abs().max()) if bool(finite.any()) else 0.0
        precise = expected.dtype == torch.float64
        tolerance = (1e-9 if precise else torch.finfo(expected.dtype).eps ** 0.5) * size
        same = torch.allclose(found, expected, rtol=0, atol=tolerance, equal_nan=True)
        difference = float((found - expected)[finite].abs().max()) if bool(finite.any()) else torch.inf
    if not same:
        raise RuntimeError(
            f"the smaller model's outputs differ by {difference:.3g} (allowed: {tolerance:.3g}); the model "
            "itself is unchanged. Unless it draws random numbers when evaluated, please report it"
        )
