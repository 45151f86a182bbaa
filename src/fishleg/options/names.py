"""The names that options accept, each with the place of its code.

A new method, likelihood, structure of Q or pattern of the library is its code and one line here. The code
needs torch and is imported when a name is first used, so that `fishleg --help` lists all names without
torch. Users add names from outside with `register_method`, `register_likelihood`, `register_structure` and
`register_pattern`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any


class Names:
    """An ordered collection of names that can grow, each with a value or the place where it is.

    >>> fruit = Names("fruit", {"apple": "", "root": "math:sqrt"})
    >>> fruit.add("plum", 3)
    >>> list(fruit), fruit.find("plum"), fruit.find("root")(9)
    (['apple', 'root', 'plum'], 3, 3.0)

    Args:
        kind: What the names stand for, for error messages.
        places: The built-in names, each with the place of its value, `module:attribute`.
    """

    def __init__(self, kind: str, places: Mapping[str, str]) -> None:
        self.kind = kind
        self._places, self._values = dict(places), dict[str, Any]()

    def add(self, name: str, value: Any = None) -> None:
        """Add a name.

        Args:
            name: A name that is not in the collection yet.
            value: What it stands for.

        Raises:
            ValueError: The name is empty or already there.
        """
        if not name or name in self:
            raise ValueError(f"the name of a new {self.kind} must be new and not empty, got {name!r}")
        self._values[name] = value

    def remove(self, name: str) -> None:
        """Remove a name that was added.

        Args:
            name: A name that is not built in.
        """
        del self._values[name]

    def find(self, name: str) -> Any:
        """Return what a name stands for; the code of a built-in name is imported now.

        Args:
            name: A name of the collection.

        Returns:
            The value.

        Raises:
            ValueError: The name is unknown.
        """
        if name not in self:
            raise ValueError(f"{self.kind} must be one of {', '.join(self)}, got {name!r}")
        if name not in self._places:
            return self._values[name]
        module, _, attribute = self._places[name].partition(":")
        return getattr(import_module(module), attribute)

    def __iter__(self) -> Iterator[str]:
        return iter([*self._places, *self._values])

    def __contains__(self, name: object) -> bool:
        return name in self._places or name in self._values

    def __len__(self) -> int:
        return len(self._places) + len(self._values)


METHODS = Names(
    "method",
    {
        "fishleg": "fishleg.inverse.estimators.learned:METHOD",
        "magnitude": "fishleg.inverse.estimators.magnitude:METHOD",
        "diagonal": "fishleg.inverse.estimators.diagonal:METHOD",
        "obert": "fishleg.inverse.estimators.obert:METHOD",
        "mfac": "fishleg.inverse.estimators.mfac:METHOD",
        "kfac": "fishleg.inverse.estimators.kfac:METHOD",
        "ekfac": "fishleg.inverse.estimators.ekfac:METHOD",
        "wanda": "fishleg.inverse.estimators.layerwise:WANDA",
        "sparsegpt": "fishleg.inverse.estimators.layerwise:SPARSEGPT",
        "alps": "fishleg.inverse.estimators.layerwise:ALPS",
        "exact": "fishleg.inverse.estimators.exact:METHOD",
    },
)
# The methods that can use the empirical Fisher.
EMPIRICAL_METHODS = Names("empirical method", {"diagonal": "", "obert": "", "mfac": ""})
STRUCTURES = Names(
    "structure",
    {
        "identity": "fishleg.inverse.structures:IDENTITY",
        "diagonal": "fishleg.inverse.structures:DIAGONAL",
        "block": "fishleg.inverse.structures:BLOCK",
        "full": "fishleg.inverse.structures:FULL",
        "triangular": "fishleg.inverse.structures:TRIANGULAR",
        "kronecker": "fishleg.inverse.structures:KRONECKER",
        "scaled-kronecker": "fishleg.inverse.structures:SCALED_KRONECKER",
        "ekfac": "fishleg.inverse.structures:EKFAC",
        "eigen-kronecker": "fishleg.inverse.structures:EIGEN_KRONECKER",
    },
)
LIKELIHOODS = Names(
    "likelihood",
    {
        "categorical": "fishleg.curvature.likelihoods.categorical:Categorical",
        "gaussian": "fishleg.curvature.likelihoods.gaussian:Gaussian",
        "bernoulli": "fishleg.curvature.likelihoods.bernoulli:Bernoulli",
    },
)
# Functions that make a pattern from the text after the colon, which is empty where there is none. N:M has
# digits instead of a name; `as_pattern` reads it.
PATTERNS = Names(
    "pattern",
    {
        "global": "fishleg.pruning.patterns:make_global",
        "layer": "fishleg.pruning.patterns:make_layer",
        "rows": "fishleg.pruning.patterns:make_rows",
        "block": "fishleg.pruning.patterns:make_blocks",
    },
)
MASK_SEARCHES = ("swap", "admm")
COMPENSATIONS = ("joint", "independent", "sum", "none")
MODES = ("staged", "one-shot", "gradual")
SCHEDULES = ("exponential", "cubic", "linear")
ESTIMATORS = ("auto", "natural", "trace", "probe")
OPTIMIZERS = {"fishleg": 0.1, "sgd": 0.02, "adam": 1e-3}  # with their default learning rates
LEARNING_RATE_SCHEDULES = ("cosine", "constant")
