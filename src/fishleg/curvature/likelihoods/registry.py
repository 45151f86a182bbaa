"""Likelihoods by name. A new likelihood is one subclass of `Likelihood` and one line of this registry."""

from __future__ import annotations

from fishleg.curvature.likelihoods.base import Likelihood
from fishleg.curvature.likelihoods.bernoulli import Bernoulli
from fishleg.curvature.likelihoods.categorical import Categorical
from fishleg.curvature.likelihoods.gaussian import Gaussian
from fishleg.options.names import LIKELIHOODS as LIKELIHOOD_NAMES

LIKELIHOODS: dict[str, type[Likelihood]] = {
    "categorical": Categorical,
    "gaussian": Gaussian,
    "bernoulli": Bernoulli,
}


def register_likelihood(name: str, cls: type[Likelihood]) -> None:
    """Register a likelihood, so that it can be selected by name: `prune(..., likelihood=name)`.

    Args:
        name: The new name.
        cls: A subclass of `Likelihood` whose constructor needs no arguments.

    Raises:
        TypeError: If `cls` is not a subclass of `Likelihood`.
        ValueError: If the name is registered already.

    Example:
        >>> class Binary(Bernoulli):
        ...     '''Binary outputs under another name.'''
        >>> register_likelihood("binary", Binary)
        >>> type(as_likelihood("binary")).__name__
        'Binary'
        >>> register_likelihood("binary", Binary)
        Traceback (most recent call last):
        ValueError: likelihood 'binary' is registered already (for Binary): choose another name
        >>> unregister_likelihood("binary")
    """
    if not (isinstance(cls, type) and issubclass(cls, Likelihood)):
        raise TypeError(f"a likelihood must be a subclass of Likelihood, got {cls!r}")
    if name in LIKELIHOODS:
        raise ValueError(
            f"likelihood {name!r} is registered already (for {LIKELIHOODS[name].__name__}): "
            "choose another name"
        )
    LIKELIHOOD_NAMES.add(name)  # the options list all names, because they do not import this package
    LIKELIHOODS[name] = cls


def unregister_likelihood(name: str) -> None:
    """Remove a likelihood that `register_likelihood` added.

    Args:
        name: The name.
    """
    LIKELIHOOD_NAMES.remove(name)
    del LIKELIHOODS[name]


def as_likelihood(likelihood: Likelihood | str) -> Likelihood:
    """Return a likelihood, given itself or its registered name.

    Args:
        likelihood: A likelihood, or a name such as "categorical".

    Returns:
        The likelihood.

    Raises:
        ValueError: If the name is not registered.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in LIKELIHOODS:
        raise ValueError(
            f"likelihood must be a Likelihood or one of {sorted(LIKELIHOODS)}, got {likelihood!r}"
        )
    return LIKELIHOODS[likelihood]()
