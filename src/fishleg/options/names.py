"""The names that options accept: methods, structures of Q, likelihoods and patterns.

The code behind a name needs torch and lives in another room, which adds names here when a user registers
a new one. The built-in names are listed here so that `fishleg --help` knows them without torch.
"""

from __future__ import annotations

from collections.abc import Iterator


class Names:
    """An ordered collection of names that can grow.

    >>> fruit = Names("fruit", "apple", "pear")
    >>> fruit.add("plum")
    >>> list(fruit)
    ['apple', 'pear', 'plum']

    Args:
        kind: What the names stand for, for error messages.
        names: The names to begin with.
    """

    def __init__(self, kind: str, *names: str) -> None:
        self.kind, self._names = kind, list(names)

    def add(self, name: str) -> None:
        """Add a name.

        Args:
            name: A name that is not in the collection yet.

        Raises:
            ValueError: The name is empty or already there.
        """
        if not name or name in self._names:
            raise ValueError(f"the name of a new {self.kind} must be new and not empty, got {name!r}")
        self._names.append(name)

    def remove(self, name: str) -> None:
        """Remove a name that was added.

        Args:
            name: A name of the collection.
        """
        self._names.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __len__(self) -> int:
        return len(self._names)


METHODS = Names("method", "fishleg", "magnitude", "diagonal", "obert", "mfac", "kfac", "ekfac", "exact")
EMPIRICAL_METHODS = Names("empirical method", "diagonal", "obert", "mfac")
STRUCTURES = Names(
    "structure",
    "identity",
    "diagonal",
    "block",
    "full",
    "triangular",
    "kronecker",
    "scaled-kronecker",
    "ekfac",
    "eigen-kronecker",
)
LIKELIHOODS = Names("likelihood", "categorical", "gaussian", "bernoulli")
PATTERNS = Names("pattern", "global", "layer", "rows", "N:M", "block:SIZE")
COMPENSATIONS = ("joint", "independent", "sum", "none")
MODES = ("staged", "one-shot", "gradual")
SCHEDULES = ("exponential", "cubic", "linear")
ESTIMATORS = ("auto", "natural", "trace", "probe")
OPTIMIZERS = {"fishleg": 0.1, "sgd": 0.02, "adam": 1e-3}  # with their default learning rates
LEARNING_RATE_SCHEDULES = ("cosine", "constant")
