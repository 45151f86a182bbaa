"""Recipes: every option of a run, from flags, a TOML, YAML or JSON file, or Python; checked before any work.

The options themselves are declared in `fishleg.options`; here they are gathered under sections, read and
written. This file must stay light (no torch): `fishleg --help` is made from it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fishleg.options import (
    AuxiliaryOptions,
    DataOptions,
    FineTuningOptions,
    ModelOptions,
    OptionError,
    PruningOptions,
    RunOptions,
    ScheduleOptions,
)
from fishleg.options.declaration import differing, is_optional, nearest
from fishleg.options.run import BUDGETS
from fishleg.runs.errors import ToolError
from fishleg.runs.recipe_files import read_content


class RecipeError(ToolError):
    """A recipe cannot be read, or sets an option to a value that breaks its rule."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a run depends on: one group of options per section. The defaults need no search.

    Args:
        model: Where the model comes from.
        data: Where the data come from.
        schedule: How sparse the model becomes, and in which stages.
        pruning: How to prune; its `auxiliary` is the section of that name.
        fine_tuning: How to train in mode "gradual".
        run: Directory, seed and machine.
    """

    model: ModelOptions = field(default_factory=ModelOptions)
    data: DataOptions = field(default_factory=DataOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    pruning: PruningOptions = field(default_factory=PruningOptions)
    fine_tuning: FineTuningOptions = field(default_factory=FineTuningOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def __post_init__(self) -> None:
        if self.schedule.mode != "gradual":
            unused = [*differing(self.fine_tuning)]
            unused += ["train_data"] if self.data.train_data is not None else []
            if unused:
                raise OptionError(f"{unused[0]} needs mode = 'gradual', got mode = {self.schedule.mode!r}")

    @property
    def trains(self) -> FineTuningOptions | None:
        """How to train after each stage; None where the mode does not train."""
        return self.fine_tuning if self.schedule.mode == "gradual" else None

    def check(self) -> None:
        """Check what only the library can judge: the pattern, and sparsities that it must allow.

        Raises:
            RecipeError: The pattern is unknown, or does not allow a sparsity, or a value is no plain one.
        """
        from fishleg.pruning import as_pattern
        from fishleg.pruning.schedules import check_sparsities

        for section, values in self.sections().items():
            for key, value in values.items():
                if not isinstance(value, (str, int, float, tuple, type(None))):
                    raise RecipeError(
                        f"[{section}] {key} must be a name, which a file can hold, got {value!r}; "
                        "register the object under a name"
                    )
        pattern, schedule = self.pruning.pattern, self.schedule
        try:
            limit = as_pattern(pattern).limit
        except ValueError as error:
            raise RecipeError(f"pattern = {pattern!r}: {error}") from None
        try:
            if schedule.sparsities:
                check_sparsities(schedule.sparsities)
        except ValueError as error:
            raise RecipeError(f"sparsities = {list(schedule.sparsities)}: {error}") from None
        final = schedule.sparsities[-1] if schedule.sparsities else schedule.sparsity
        if final is not None and final > limit:
            raise RecipeError(f"pattern {pattern} allows a sparsity of {limit} at most, got {final}")

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the values of all options that are set.

        Returns:
            By section, the values by key.
        """
        found: dict[str, dict[str, Any]] = {}
        for section, keys in KEYS.items():
            options = self._options_of(section)
            values = {} if options is None else {key: getattr(options, key) for key in keys}
            found[section] = {
                key: v for key, v in values.items() if v != () and (v is not None or keys[key].default)
            }
        return found

    def value(self, section: str, key: str) -> Any:
        """Return the value of an option.

        Args:
            section: The section.
            key: The key in it.

        Returns:
            The value; None where the whole section has its defaults.
        """
        return getattr(self._options_of(section), key, None)

    def _options_of(self, section: str) -> Any:
        return self.pruning.auxiliary if section == "auxiliary" else getattr(self, section)

    def to_toml(self, leave_out: Collection[str] = ()) -> str:
        """Return the recipe as a file that `load_recipe` reads back.

        Args:
            leave_out: Keys that are not written.

        Returns:
            The text of a TOML file.
        """
        lines = []
        for section, values in self.sections().items():
            values = {key: value for key, value in values.items() if key not in leave_out}
            if values:
                lines += [f"[{section}]", *(f"{key} = {_toml(value)}" for key, value in values.items()), ""]
        return "\n".join(lines).rstrip() + "\n"

    def replace(self, **changes: Any) -> Recipe:
        """Return a copy with other values of some options.

        Args:
            changes: Values by the keys of `FIELDS`.

        Returns:
            A new recipe.
        """
        flat = {key: value for section in SECTIONS for key, value in self._flat(section).items()}
        return _build({**flat, **changes})

    def _flat(self, section: str) -> dict[str, Any]:
        options = self._options_of(section)
        if options is None:
            return {}
        return {flat_key(section, key): getattr(options, key) for key in KEYS[section]}


# The option class of each section; [auxiliary] sets PruningOptions.auxiliary.
SECTIONS: dict[str, Any] = {
    "model": ModelOptions,
    "data": DataOptions,
    "schedule": ScheduleOptions,
    "pruning": PruningOptions,
    "auxiliary": AuxiliaryOptions,
    "fine_tuning": FineTuningOptions,
    "run": RunOptions,
}
# The declared options of each section, by key.
KEYS: dict[str, dict[str, dataclasses.Field[Any]]] = {
    section: {f.name: f for f in fields(options) if "help" in f.metadata}
    for section, options in SECTIONS.items()
}


def flat_key(section: str, key: str) -> str:
    """Return the name of an option among all options; those of [auxiliary] get a prefix.

    Args:
        section: The section.
        key: The key in it.

    Returns:
        A name that is unique among all sections.
    """
    return f"auxiliary_{key}" if section == "auxiliary" else key


# Every option by its unique name: its section and its declaration.
FIELDS: dict[str, tuple[str, dataclasses.Field[Any]]] = {
    flat_key(section, key): (section, declared)
    for section, keys in KEYS.items()
    for key, declared in keys.items()
}


def make_recipe(*sources: Mapping[str, Any]) -> Recipe:
    """Make a recipe from options by name.

    Args:
        sources: Values by the keys of `FIELDS`; later sources win. A budget in a later one replaces that of
            an earlier one.

    Returns:
        The recipe.

    Raises:
        RecipeError: An option is unknown or breaks its rule.
    """
    merged: dict[str, Any] = {}
    for options in sources:
        for name in options:
            if name not in FIELDS:
                raise RecipeError(f"unknown option {name!r}{nearest(name, FIELDS)}")
        if any(name in options for name in BUDGETS):
            merged = {name: value for name, value in merged.items() if name not in BUDGETS}
        merged.update(options)
    try:
        return _build(merged)
    except RecipeError:
        raise
    except OptionError as error:
        raise RecipeError(str(error)) from None


def _build(flat: Mapping[str, Any]) -> Recipe:
    """Return the recipe with these options, by unique name.

    Raises:
        OptionError: A value is wrong.
    """
    by_section: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
    for name, value in flat.items():
        section, declared = FIELDS[name]
        is_none = isinstance(value, str) and value.lower() == "none" and is_optional(declared)
        by_section[section][declared.name] = None if is_none else value
    if by_section["schedule"].get("max_flops") is not None:
        # Multiply-adds are planned from the number of weights that each layer keeps. The recipe records it.
        by_section["pruning"]["mask_search_across_layers"] = False
    auxiliary = by_section.pop("auxiliary")
    if auxiliary:
        try:
            by_section["pruning"]["auxiliary"] = AuxiliaryOptions(**auxiliary)
        except OptionError as error:  # other sections have options of the same names
            raise OptionError(f"[auxiliary] {error}") from None
    return Recipe(**{section: SECTIONS[section](**values) for section, values in by_section.items()})


def load_recipe(path: str | Path) -> dict[str, Any]:
    """Read the options that a .toml, .yaml or .json file sets.

    Args:
        path: The file.

    Returns:
        The values by unique option name.

    Raises:
        RecipeError: The file cannot be read, or a key is unknown or in the wrong section.
    """
    path = Path(path)
    try:
        content = read_content(path)
    except OSError as error:
        raise RecipeError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise RecipeError(f"recipe {path} cannot be read: {error}") from None
    if not isinstance(content, Mapping):
        raise RecipeError(f"recipe {path} must hold sections, got {type(content).__name__}")
    return flatten(content)


def flatten(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a parsed recipe by unique name.

    Args:
        content: By section, the values by key.

    Returns:
        The values by unique option name.

    Raises:
        RecipeError: A section or key is unknown or misplaced.
    """
    options: dict[str, Any] = {}
    for section, values in content.items():
        if section not in SECTIONS:
            raise RecipeError(_unknown_section(str(section), values))
        if not isinstance(values, Mapping):
            raise RecipeError(f"[{section}] must be a section with keys, got {values!r}")
        for key, value in values.items():
            if key not in KEYS[section]:
                raise RecipeError(_unknown_key(section, str(key)))
            options[flat_key(section, key)] = value
    return options


def _homes(key: str) -> list[str]:
    return [section for section, keys in KEYS.items() if key in keys]


def _sections_text(sections: list[str]) -> str:
    return " or ".join(f"[{section}]" for section in sections)


def _unknown_section(section: str, values: Any) -> str:
    if homes := _homes(section):
        return f"unknown key {section!r} in the recipe; it belongs under {_sections_text(homes)}"
    what = "section" if isinstance(values, Mapping) else "key"
    known = ", ".join(SECTIONS)
    return f"unknown {what} {section!r} in the recipe (sections are {known}){nearest(section, SECTIONS)}"


def _unknown_key(section: str, key: str) -> str:
    if homes := _homes(key):
        hint = f"; it belongs under {_sections_text(homes)}"
    else:
        every = [name for keys in KEYS.values() for name in keys]
        hint = nearest(key, every)
        meant = [name for name in every if repr(name) in hint and section not in _homes(name)]
        hint += f" It belongs under {_sections_text(_homes(meant[0]))}" if meant else ""
    return f"unknown key {key!r} in [{section}] (keys are {', '.join(KEYS[section])}){hint}"


def _toml(value: Any) -> str:
    if value is None:
        return '"none"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):  # as JSON writes it; TOML wants one more character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)  # of a float is a TOML float
