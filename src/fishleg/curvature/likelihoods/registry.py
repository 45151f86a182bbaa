"""Likelihoods by name; `fishleg.options.names.LIKELIHOODS` lists the built-in ones."""

from __future__ import annotations

from fishleg.curvature.likelihoods.base import Likelihood
from fishleg.options.names import LIKELIHOODS


def register_likelihood(name: str, cls: type[Likelihood]) -> None:
    """Register a likelihood, so that it can be selected by name: `prune(..., likelihood=name)`.

    Args:
        name: The new name.
        cls: A subclass of `Likelihood` whose constructor needs no arguments.

    Raises:
        TypeError: If `cls` is not a subclass of `Likelihood`.
        ValueError: If the name is registered already.

    Example:
        >>> from fishleg.curvature.likelihoods.bernoulli import Bernoulli
        >>> class Binary(Bernoulli):
        ...     '''Binary outputs under another name.'''
        >>> register_likelihood("binary", Binary)
        >>> type(as_likelihood("binary")).__name__
        'Binary'
        >>> register_likelihood("binary", Binary)
        Traceback (most recent call last):
        ValueError: the name of a new likelihood must be new and not empty, got 'binary'
        >>> unregister_likelihood("binary")
    """
    if not (isinstance(cls, type) and issubclass(cls, Likelihood)):
        raise TypeError(f"a likelihood must be a subclass of Likelihood, got {cls!r}")
    LIKELIHOODS.add(name, cls)


def unregister_likelihood(name: str) -> None:
    """Remove a likelihood that `register_likelihood` added.

    Args:
        name: The name.
    """
    LIKELIHOODS.remove(name)


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
            f"likelihood must be a Likelihood or one of {', '.join(LIKELIHOODS)}, got {likelihood!r}"
        )
    found: type[Likelihood] = LIKELIHOODS.find(likelihood)
    return found()
