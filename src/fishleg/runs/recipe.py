"""Recipes: every option of a run, from flags, a TOML or YAML file, or Python; checked before any work.

This file must stay light (no torch): `fishleg --help` is made from it. Checks that need the library run in
`Recipe.check`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fishleg.formats.toml import read_toml
from fishleg.runs.errors import ToolError, nearest

METHODS = ("fishleg", "magnitude", "diagonal", "obert", "mfac", "kfac", "ekfac", "exact")
MODES = ("staged", "one-shot", "gradual")
COMPENSATIONS = ("joint", "independent", "sum", "none")
SCHEDULES = ("exponential", "cubic", "linear")
LIKELIHOODS = ("categorical", "gaussian", "bernoulli")
OPTIMIZERS = ("fishleg", "sgd", "adam")
LR_SCHEDULES = ("cosine", "constant")
EMPIRICAL = ("fishleg", "magnitude", "diagonal", "obert", "mfac")  # fishleg goes on without labels
_PATTERNS = ("global", "layer", "rows", "block:4")  # for hints
SECTIONS = ("model", "data", "target", "method", "tuning", "run")


class RecipeError(ToolError):
    """A recipe says something that cannot be."""


def _option(section: str, default: Any, help: str, *, choices: tuple[str, ...] = (), rule: str = "") -> Any:
    meta = {"section": section, "help": help, "choices": choices, "rule": rule}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on. The defaults need no search."""

    model: str = _option(
        "model", "", "Where the model comes from: net.py:make, package.module:make, or workload:digits."
    )
    weights: str | None = _option("model", None, "State dict to load: a .safetensors or .pt file.")
    likelihood: str = _option("model", "categorical", "What the outputs mean.", choices=LIKELIHOODS)
    forward: str | None = _option(
        "model", None, "Function (model, batch) -> outputs, where calling the model on the inputs won't do."
    )

    data: str | None = _option(
        "data", None, "Function that returns the calibration loader (inputs suffice), e.g. data.py:loader."
    )
    train_data: str | None = _option("data", None, "The same for the training loader of --mode gradual.")
    eval_data: str | None = _option("data", None, "The same for the loader that accuracy is measured on.")
    metric: str | None = _option(
        "data", None, "Function (model, loader) -> number, larger is better; default: accuracy, or the loss."
    )

    sparsity: float | None = _option(
        "target",
        None,
        "Fraction of weights (of rows, if these go) to remove; default: 0.9, or all that N:M asks for.",
        rule="(0, 1)",
    )
    sparsities: list[float] = _option("target", [], "The whole schedule, instead of --sparsity.")
    max_drop: str | float | None = _option(
        "target", None, "Instead of a sparsity: the largest one whose metric drops by at most this, e.g. 1%."
    )
    max_params: int | None = _option("target", None, "Instead: keep at most so many parameters.", rule=">= 1")
    max_flops: str | float | None = _option(
        "target", None, "Instead: keep at most so many multiply-adds per example, a number or e.g. 40%."
    )
    pattern: str = _option("target", "global", "global, layer, N:M (2:4), block:SIZE or rows.")
    include: list[str] = _option("target", [], "Parameter, module or regex to prune; may be repeated.")
    exclude: list[str] = _option("target", [], "Parameter, module or regex to leave; may be repeated.")
    floor: float = _option(
        "target", 0.2, "Each weight keeps at least this share of the mean density.", rule="[0, 1)"
    )

    method: str = _option("method", "fishleg", "Which Q scores and compensates.", choices=METHODS)
    mode: str = _option("method", "staged", "staged and one-shot do not train.", choices=MODES)
    stages: int | None = _option(
        "method", None, "Pruning steps; default: each keeps 75 % (rows, without training: 95 %).", rule=">= 1"
    )
    schedule: str = _option("method", "exponential", "How the sparsity rises.", choices=SCHEDULES)
    compensation: str = _option(
        "method", "joint", "How the other weights make up for the removed ones.", choices=COMPENSATIONS
    )
    exchanges: int = _option(
        "method", 12, "Rounds that swap kept weights for removed ones worth more (FLS, joint).", rule=">= 0"
    )
    gamma: float | None = _option(
        "method", None, "Damping; default: relative_damping x mean diagonal of F.", rule="> 0"
    )
    relative_damping: float | None = _option(
        "method",
        None,
        "Damping relative to the Fisher's mean diagonal; default: 0.01 with exchanges, untrained; else 0.1.",
        rule="> 0",
    )
    samples: int = _option("method", 256, "Gradients per estimate of Q.", rule=">= 1")
    sub_batch: int = _option("method", 16, "Examples per gradient.", rule=">= 1")
    block_size: int = _option("method", 50, "Block size of method obert.", rule=">= 1")
    empirical: bool = _option("method", False, "Use the data's labels (empirical Fisher) in baselines.")
    batchnorm_batches: int = _option(
        "method", 20, "Batches to refresh BatchNorm with after pruning.", rule=">= 0"
    )
    measure_batches: int = _option("method", 2, "Batches to measure each step's loss on.", rule=">= 0")

    optimizer: str = _option("tuning", "fishleg", "Fine-tuning in --mode gradual.", choices=OPTIMIZERS)
    epochs: float = _option("tuning", 1.0, "Training after each pruning step.", rule="> 0")
    steps: int | None = _option("tuning", None, "The same in steps.", rule=">= 1")
    lr: float | None = _option("tuning", None, "Learning rate; default: the optimizer's.", rule="> 0")
    lr_schedule: str = _option(
        "tuning", "cosine", "The rate falls to zero after each pruning step, or not.", choices=LR_SCHEDULES
    )
    momentum: float = _option("tuning", 0.9, "Momentum of SGD and FishLeg.", rule="[0, 1)")
    weight_decay: float = _option("tuning", 0.0, "Weight decay.", rule=">= 0")
    max_kl: float = _option(
        "tuning", 0.012, "FishLeg's trust region at a loss 1 above the dense model's.", rule="> 0"
    )
    step_damping: float = _option(
        "tuning", 10.0, "FishLeg's damping, likewise, in multiples of gamma.", rule=">= 1"
    )
    regain: float = _option(
        "tuning", 0.0, "Train as if this much loss could be regained at least.", rule="[0, 1)"
    )
    update_every: int = _option("tuning", 10, "Training steps per step of Q's learning.", rule=">= 1")
    refine: int = _option("tuning", 24, "Steps of Q's learning before each pruning step.", rule=">= 0")
    cuts: int = _option("tuning", 3, "Cuts per pruning step, Q refined between them.", rule=">= 1")
    distill: bool = _option("tuning", False, "Train towards the dense model's outputs; needs no labels.")
    temperature: float = _option("tuning", 2.0, "At which these are compared, if logits.", rule="> 0")

    out: str = _option("run", "fishleg-run", "Directory for everything the run writes.")
    seed: int = _option("run", 0, "Seed of everything random.", rule="[0, 4294967296)")
    device: str = _option("run", "auto", "auto, cpu, cuda, cuda:1 ...")
    threads: int | None = _option("run", None, "CPU threads; default: torch's.", rule=">= 1")
    checkpoint_minutes: float = _option("run", 5.0, "A checkpoint this often while training.", rule="> 0")
    keep: int = _option("run", 3, "Checkpoints to keep.", rule=">= 1")
    tensorboard: bool = _option("run", False, "Log to TensorBoard too (needs tensorboard).")
    wandb: str | None = _option("run", None, "Log to this Weights & Biases project too (needs wandb).")

    def __post_init__(self) -> None:
        for f in fields(self):
            _check_value(f, getattr(self, f.name))
        budgets = [n for n in BUDGETS if getattr(self, n) not in (None, [])]
        if len(budgets) > 1:
            raise RecipeError(f"give one of {', '.join(BUDGETS)}, got {' and '.join(budgets)}")
        for name in ("max_drop", "max_flops"):
            if getattr(self, name) is not None:
                amount(name, getattr(self, name))
        if self.sparsities and self.stages is not None:
            raise RecipeError("sparsities is the schedule itself: leave out stages")
        if self.sparsities and self.mode == "one-shot":
            raise RecipeError("sparsities is a schedule of stages: leave out mode = 'one-shot'")
        if self.mode == "one-shot" and self.stages not in (None, 1):
            raise RecipeError(f"mode 'one-shot' is a single stage, got stages = {self.stages}")
        if self.mode == "one-shot" and self.schedule not in ("exponential", "one-shot"):
            raise RecipeError(f"mode 'one-shot' is a single stage, got schedule = {self.schedule!r}")
        if self.mode != "gradual":
            tuning = [n for n, f in FIELDS.items() if f.metadata["section"] == "tuning"]
            unused = [n for n in ("train_data", *tuning) if getattr(self, n) != FIELDS[n].default]
            if unused:
                raise RecipeError(f"{unused[0]} needs mode = 'gradual', got mode = {self.mode!r}")
        if self.empirical and self.method not in EMPIRICAL:
            raise RecipeError(
                f"empirical = true needs one of the methods {', '.join(EMPIRICAL)}, got {self.method!r}"
            )
        for name in ("include", "exclude"):
            for expression in getattr(self, name):
                try:
                    re.compile(expression)
                except re.error as error:
                    raise RecipeError(f"{name}: {expression!r} is no regular expression: {error}") from None

    def check(self) -> None:
        """What only the library can judge: patterns and sparsities."""
        from fishleg.pruning.patterns import as_pattern
        from fishleg.pruning.schedules import check_sparsities

        try:
            limit = as_pattern(self.pattern).limit
        except ValueError as error:
            swapped = ":".join(reversed(self.pattern.split(":")))
            hint = nearest(self.pattern, _PATTERNS)
            if re.fullmatch(r"[1-9]\d*:[1-9]\d*", swapped) and swapped != self.pattern:
                hint = f"; did you mean {swapped!r}?"
            raise RecipeError(f"pattern = {self.pattern!r}: {error}{hint}") from None
        try:
            if self.sparsities:
                check_sparsities(list(self.sparsities))
        except ValueError as error:
            raise RecipeError(f"sparsities = {self.sparsities}: {error}") from None
        final = self.sparsities[-1] if self.sparsities else self.sparsity
        if final is not None and final > limit:
            raise RecipeError(f"pattern {self.pattern} allows a sparsity of {limit} at most, got {final}")

    def sections(self) -> dict[str, dict[str, Any]]:
        """{section: {key: value}} of everything that is set."""
        found: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        for f in fields(self):
            value = getattr(self, f.name)
            if value is not None and value != []:
                found[f.metadata["section"]][f.name] = value
        return found

    def to_toml(self) -> str:
        """The recipe as a file that `load_recipe` reads back."""
        lines = []
        for section, values in self.sections().items():
            lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
        return "\n".join(lines).rstrip() + "\n"


FIELDS = {f.name: f for f in fields(Recipe)}
BUDGETS = ("sparsity", "sparsities", "max_drop", "max_params", "max_flops")


def load_recipe(path: str | Path) -> dict[str, Any]:
    """The options that a .toml, .yaml or .json file sets, by name; unknown and misplaced keys are errors."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise RecipeError(f"recipe {path} is not a text file") from None
    try:
        content = _parse(path, text)
    except RecipeError:
        raise
    except Exception as error:
        raise RecipeError(f"recipe {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(content, Mapping):
        raise RecipeError(f"recipe {path} must hold sections, got {type(content).__name__}")
    return flatten(content)


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """{section: {key: value}} → {key: value}, checked."""
    options: dict[str, Any] = {}
    for section, values in content.items():
        if section not in SECTIONS:
            home = FIELDS[section].metadata["section"] if section in FIELDS else None
            hint = f"; it belongs under [{home}]" if home else nearest(str(section), SECTIONS)
            what = "key" if home or not isinstance(values, Mapping) else "section"
            allowed = "" if home else f" (sections are {', '.join(SECTIONS)})"
            raise RecipeError(f"unknown {what} {section!r} in the recipe{allowed}{hint}")
        if not isinstance(values, Mapping):
            raise RecipeError(f"[{section}] must be a section with keys, got {values!r}")
        here = [name for name, f in FIELDS.items() if f.metadata["section"] == section]
        for key, value in values.items():
            if key in here:
                options[key] = value
                continue
            if key in FIELDS:
                hint = f"; it belongs under [{FIELDS[key].metadata['section']}]"
            else:
                hint = nearest(str(key), FIELDS)
                meant = [n for n, f in FIELDS.items() if repr(n) in hint and f.metadata["section"] != section]
                hint += f" It belongs under [{FIELDS[meant[0]].metadata['section']}]" if meant else ""
            raise RecipeError(f"unknown key {key!r} in [{section}] (keys are {', '.join(here)}){hint}")
    return options


def make_recipe(*sources: Mapping[str, Any]) -> Recipe:
    """A recipe from options by name; later sources win. A budget in a later one replaces an earlier one."""
    merged: dict[str, Any] = {}
    for options in sources:
        for name in options:
            if name not in FIELDS:
                raise RecipeError(f"unknown option {name!r}{nearest(name, FIELDS)}")
        if any(name in options for name in BUDGETS):
            merged = {name: value for name, value in merged.items() if name not in BUDGETS}
        merged.update(options)
    for name, value in merged.items():
        kind = str(FIELDS[name].type)
        if "float" in kind and "str" not in kind and type(value) is int:
            merged[name] = _as_float(value)
    return Recipe(**merged)


def amount(name: str, value: str | float) -> tuple[float, bool]:
    """(number, whether it is a fraction) of `1%`, 0.01 or 12000000."""
    text = str(value).strip()
    try:
        number = float(text.removesuffix("%"))
    except ValueError:
        raise RecipeError(f"{name} must be a number or a percentage such as 1%, got {value!r}") from None
    relative = text.endswith("%") or name == "max_drop"
    number = number / 100 if text.endswith("%") else number
    if not (math.isfinite(number) and number > 0) or (relative and number >= 1):
        rule = "in (0 %, 100 %)" if relative else "> 0"
        raise RecipeError(f"{name} must be {rule}, got {value!r}")
    return number, relative


def _check_value(f: dataclasses.Field[Any], value: Any) -> None:
    kind, rule, choices = str(f.type), f.metadata["rule"], f.metadata["choices"]
    if value is None and "None" in kind:
        return
    if kind.startswith("list"):
        entry = str if "str" in kind else (int, float)
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, entry) for v in value):
            what = "texts" if entry is str else "numbers"
            raise RecipeError(f"{f.name} must be a list of {what}, got {value!r}")
        return
    accepted = {"str": str, "int": int, "float": (int, float), "bool": bool}
    kinds = [accepted[part] for part in kind.replace(" ", "").split("|") if part in accepted]
    wrong_bool = isinstance(value, bool) and "bool" not in kind
    if wrong_bool or not any(isinstance(value, k) for k in kinds):  # type: ignore[arg-type]
        names = {"str": "a text", "int": "a whole number", "float": "a number", "bool": "true or false"}
        expected = " or ".join(names[p] for p in kind.replace(" ", "").split("|") if p in names)
        hint = _unquoted(value) if "str" not in kind and "bool" not in kind else ""
        raise RecipeError(f"{f.name} must be {expected}, got {value!r}{hint}")
    if choices and value not in choices:
        hint = nearest(str(value), choices)
        raise RecipeError(f"{f.name} must be one of {', '.join(choices)}, got {value!r}{hint}")
    if isinstance(value, str) and ("\0" in value or any("\ud800" <= c <= "\udfff" for c in value)):
        raise RecipeError(f"{f.name} must be UTF-8 text without null characters, got {value!r}")
    if rule and not _holds(rule, _as_float(value)):
        hint = ""
        if f.name == "sparsity" and 1 < float(value) < 100:
            hint = f"; for {value:g} % write {float(value) / 100:g}"
        raise RecipeError(f"{f.name} must be {'in ' if rule[0] in '([' else ''}{rule}, got {value}{hint}")


def _unquoted(value: Any) -> str:
    """A hint for a number that is a text: in quotes, or 1e-3, which YAML takes for one."""
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {number!r}" if "e" in value.lower() else f"; write {value} without quotes"


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _holds(rule: str, value: float) -> bool:
    if not math.isfinite(value):
        return False
    if rule[0] in "([":
        low, high = (float(part) for part in rule[1:-1].split(","))
        return (low < value if rule[0] == "(" else low <= value) and value < high
    sign, bound = rule.split()
    return value >= float(bound) if sign == ">=" else value > float(bound)


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".toml":
        return read_toml(text)
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix in (".yaml", ".yml"):
        try:
            import yaml
        except ImportError:
            raise RecipeError("a YAML recipe needs PyYAML: pip install pyyaml, or write TOML") from None
        return yaml.safe_load(text)
    raise RecipeError(f"a recipe must be a .toml, .yaml or .json file, got {path.name!r}")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):  # as JSON writes it, and TOML wants one more character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # of a float is a TOML float
