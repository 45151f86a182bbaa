"""Values of every option that differ from their defaults, for tests of options, recipes and flags."""

from typing import Any

from fishleg.options.declaration import is_list, plain_types
from fishleg.runs.recipe import FIELDS, KEYS, Recipe

# what --mode gradual alone knows
GRADUAL = ["train_data", *KEYS["fine_tuning"]]
SPECIAL: dict[str, Any] = {
    "sparsity": 0.25,
    "sparsities": (0.2, 0.4),
    "pattern": "2:4",
    "floor": 0.3,
    "momentum": 0.5,
    "regain": 0.5,
    "max_drop": "2%",
    "max_flops": 1e6,
    "empirical": True,
    "auxiliary_betas": (0.5, 0.25),
    "auxiliary_eta_floor": 0.5,
    "auxiliary_smoothing": 0.5,
    "auxiliary_exact_products": False,
    "mask_search_across_layers": False,
}
NEEDED = {**{name: {"mode": "gradual"} for name in GRADUAL}, "empirical": {"method": "obert"}}


def another_value(name: str) -> Any:
    """A value that differs from the default."""
    declared = FIELDS[name][1]
    if name in SPECIAL:
        return SPECIAL[name]
    if choices := tuple(declared.metadata["choices"]):
        return next(name for name in choices if name != declared.default)
    if is_list(declared):
        return ("a|b", r"\d")
    return {"str": "some:text é\n\\", "int": 7, "float": 2.5, "bool": True}[plain_types(declared)[0]]


def value_in(recipe: Recipe, name: str) -> Any:
    section, declared = FIELDS[name]
    return getattr(
        recipe.pruning.auxiliary if section == "auxiliary" else getattr(recipe, section), declared.name
    )
