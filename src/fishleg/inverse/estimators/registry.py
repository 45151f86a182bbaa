"""What a method is, and how one is added from outside; `fishleg.options.names` lists the built-in ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fishleg.curvature.layers import Layer
from fishleg.inverse.estimators.problem import EstimationProblem
from fishleg.inverse.operators import Operator
from fishleg.options.names import EMPIRICAL_METHODS, METHODS

Build = Callable[[EstimationProblem], dict[str, Operator]]
Check = Callable[[list[Layer]], None]


@dataclass(frozen=True)
class Method:
    """A way to estimate Q.

    Args:
        build: Returns the operator of each layer of a problem.
        check: Raises where the method cannot handle some of the layers, before any work.
        needs_gamma: Whether γ has to be known before `build` is called.
        predicts: Whether Q is in units of the loss, so that its predictions can be compared with measured
            increases.
        learns: Whether Q is learned and can be refined after the weights have changed.
    """

    build: Build
    check: Check | None = None
    needs_gamma: bool = True
    predicts: bool = True
    learns: bool = False


def register_method(
    name: str,
    build: Build,
    *,
    check: Check | None = None,
    empirical: bool = False,
    needs_gamma: bool = True,
    predicts: bool = True,
) -> None:
    """Add a method that estimates Q, to be selected by `PruningOptions(method=name)`.

    Args:
        name: The name of the method.
        build: A function from an `EstimationProblem` to `{layer name: operator}`.
        check: A function that raises where some layers are beyond the method.
        empirical: Whether the method may use the empirical Fisher.
        needs_gamma: Whether γ is measured first where the user gives none.
        predicts: Whether Q is in units of the loss; False for scores of another kind, such as magnitudes.

    Raises:
        ValueError: There is a method of that name already.
    """
    METHODS.add(name, Method(build, check, needs_gamma, predicts))
    if empirical:
        EMPIRICAL_METHODS.add(name)


def unregister_method(name: str) -> None:
    """Remove a method that `register_method` added.

    Args:
        name: The name of the method.
    """
    METHODS.remove(name)
    if name in EMPIRICAL_METHODS:
        EMPIRICAL_METHODS.remove(name)


def find_method(name: str) -> Method:
    """Return the method of a name.

    Args:
        name: A registered name; option objects have checked it.

    Returns:
        The method.
    """
    method: Method = METHODS.find(name)
    return method
