"""What the fuzzer tries: five kinds of files, valid samples of each, and what reading them must do.

Reading a file either returns content that keeps its promises, or raises a ToolError or ValueError with a
message of one line, and then the model is as it was. Anything else is a finding.
"""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fishleg.formats import checkpoint
from fishleg.formats.packed import pack, unpack
from fishleg.formats.tensor_files import checksum, to_bytes
from fishleg.runs.inspection import inspect_path
from fishleg.runs.recipe import load_recipe, make_recipe
from fishleg.runs.weights import SHRUNK, apply_weights, load_weights
from reproduction.benchmarks import fuzz_mutators as mutators


class Broken(AssertionError):
    """A promise that the content of a file does not keep."""


@dataclass(frozen=True)
class Target:
    """One kind of input file.

    Args:
        seeds: Returns valid files.
        check: Reads a file; raises a ValueError if it is refused, and anything else if a promise is broken.
        mutate: Changes a file.
    """

    seeds: Callable[[], list[bytes]]
    check: Callable[[bytes, Path], None]
    mutate: mutators.Mutator


@cache
def network(hidden: int = 6) -> nn.Module:
    """A small model; do not change it."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 3)
    )  # fmt: skip
    with torch.no_grad():
        model[0].weight[::2] = 0
    return model.eval()


def one_line(error: ValueError) -> None:
    if "\n" in str(error) or not str(error):
        raise Broken(f"the message does not have one line: {str(error)!r}") from error


# -- recipes

SUFFIXES = {b"t": ".toml", b"j": ".json", b"y": ".yaml"}
TOML = """[model]
model = "net.py:make"
weights = "a.pt"
[schedule]
sparsities = [0.5, 0.75]
mode = "gradual"
[pruning]
pattern = "2:4"
exclude = ["^fc"]
[auxiliary]
betas = [0.9, 0.95]
[fine_tuning]
steps = 10
[run]
seed = 3
threads = 2
"""
JSON = (
    '{"model": {"model": "net.py:make"},\n "schedule": {"max_drop": "1%"},\n "run": {"out": "a", "seed": 1}}'
)
YAML = "model:\n  model: net.py:make\nschedule:\n  sparsity: 0.8\n  stages: 3\npruning: {exclude: [a, 'b']}\n"


def recipe_seeds() -> list[bytes]:
    full = make_recipe({"model": "a:b"}).to_toml()
    return [b"t" + TOML.encode(), b"t" + full.encode(), b"j" + JSON.encode(), b"y" + YAML.encode()]


def check_recipe(data: bytes, folder: Path) -> None:
    path = folder / f"recipe{SUFFIXES.get(data[:1], '.toml')}"
    path.write_bytes(data[1:])
    recipe = make_recipe(load_recipe(path))
    (folder / "again.toml").write_text(recipe.to_toml(), encoding="utf-8")
    if make_recipe(load_recipe(folder / "again.toml")) != recipe:
        raise Broken("the recipe is not the same when it is written and read again")


# -- checkpoints


def checkpoint_bytes(state: Any) -> bytes:
    tensors: dict[str, Tensor] = {}
    structure = checkpoint.json.dumps(checkpoint._encode(state, tensors))
    metadata = {
        "format": "fishleg-1", "structure": structure, "sha256": checksum(tensors, structure),
    }  # fmt: skip
    return to_bytes(tensors or {"": torch.zeros(0)}, metadata)


def checkpoint_seeds() -> list[bytes]:
    model = network().state_dict()
    masks = {"0.weight": model["0.weight"] != 0}
    surgeon = {"masks": masks, "history": [{"target": 0.5}]}
    run = {"model": model, "session": {"surgeon": surgeon, "fine_tuner": {"step": 3}}, "plan": (1, 0.5, None)}
    return [checkpoint_bytes(state) for state in (run, dict(model), {"a": [1, "x", {2: (True, None)}]}, [])]


def check_checkpoint(data: bytes, folder: Path) -> None:
    path = folder / "000000.ckpt"
    path.write_bytes(data)
    try:
        state = checkpoint.load(path)
    except checkpoint.CheckpointError as error:
        one_line(error)
        raise
    try:
        checkpoint._encode(state, {})
    except (TypeError, RecursionError) as error:
        raise Broken(f"the state cannot be saved again: {error}") from error
    shown(path)


# -- files of weights


def safetensors_bytes(state: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    whole = {name: value.detach().contiguous().clone() for name, value in state.items()}
    return to_bytes(whole, metadata or {})


def packed_seeds() -> list[bytes]:
    state = network().state_dict()
    half = {name: value.half() if value.is_floating_point() else value for name, value in state.items()}
    prefixed = {f"module.{name}": value for name, value in state.items()}
    return [safetensors_bytes(pack(each), {"recipe": TOML}) for each in (state, half, prefixed)]


def check_packed(data: bytes, folder: Path) -> None:
    path = folder / "packed.safetensors"
    path.write_bytes(data)
    state = unpack(path)
    again = unpack(pack(state))
    for name, value in state.items():
        if again[name].shape != value.shape or again[name].dtype != value.dtype:
            raise Broken(f"{name} is not the same when it is packed and unpacked again")
    load_into_model(path)


def shrunk_seeds() -> list[bytes]:
    states = [network(hidden).state_dict() for hidden in (5, 6, 1)]
    return [safetensors_bytes(state, {SHRUNK: "yes", "recipe": TOML}) for state in states]


def check_shrunk(data: bytes, folder: Path) -> None:
    path = folder / "small.safetensors"
    path.write_bytes(data)
    load_into_model(path)


def state_dict_seeds() -> list[bytes]:
    state = network().state_dict()
    found = [
        b"s" + safetensors_bytes(state),
        b"s" + safetensors_bytes({f"_orig_mod.{n}": v for n, v in state.items()}),
    ]
    for content in (state, {"state_dict": {f"module.{n}": v for n, v in state.items()}, "epoch": 3}):
        for zipped in (True, False):
            file = io.BytesIO()
            torch.save(content, file, _use_new_zipfile_serialization=zipped)
            found.append(b"p" + file.getvalue())
    return found


def check_state_dict(data: bytes, folder: Path) -> None:
    path = folder / ("a.safetensors" if data[:1] == b"s" else "a.pt")
    path.write_bytes(data[1:])
    shown(path)
    load_into_model(path)


def load_into_model(path: Path) -> None:
    """Load a file into the small model: all values finite and the sizes consistent, or nothing changed."""
    model = copy.deepcopy(network())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = [id(parameter) for parameter in model.parameters()]
    try:
        apply_weights(model, load_weights(path), path)
    except ValueError:
        after = model.state_dict()
        same = all(torch.equal(after[name], value) for name, value in before.items())
        if not same or kept != [id(parameter) for parameter in model.parameters()]:
            raise Broken("the model was changed, and then the file was refused") from None
        raise
    for name, value in model.state_dict().items():
        old = before[name]
        if value.dtype != old.dtype or any(a > b for a, b in zip(value.shape, old.shape, strict=True)):
            raise Broken(f"{name} became {value.dtype} of shape {tuple(value.shape)}")
        if value.is_floating_point() and not bool(value.isfinite().all()):
            raise Broken(f"{name} holds NaN or Inf")
    for layer in (model[0], model[1], model[3]):
        rows = {tensor.shape[0] for tensor in layer.state_dict().values() if tensor.dim()}
        if len(rows) > 1:
            raise Broken(f"the tensors of a layer have different numbers of rows: {rows}")


def shown(path: Path) -> None:
    """Inspect a file as `fishleg inspect` does."""
    try:
        table = inspect_path(path).table()
    except ValueError as error:
        one_line(error)
        return
    if any(ord(character) < 32 and character not in "\n\t" for character in table):
        raise Broken("the table holds control characters")


TARGETS = {
    "recipe": Target(recipe_seeds, check_recipe, mutators.mutate_text),
    "checkpoint": Target(checkpoint_seeds, check_checkpoint, mutators.mutate_checkpoint),
    "packed": Target(packed_seeds, check_packed, mutators.mutate_safetensors),
    "shrunk": Target(shrunk_seeds, check_shrunk, mutators.mutate_safetensors),
    "state_dict": Target(state_dict_seeds, check_state_dict, mutators.mutate_state_dict),
}
