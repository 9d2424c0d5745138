"""The type of a check: a function of a method and a test world, with the clause that it checks."""

from collections.abc import Callable, Mapping
from functools import wraps

import torch

from coterie.core.protocol import State
from coterie.core.tensors import Named
from coterie.methods import Method
from coterie.testing.run import Run
from coterie.testing.worlds import World

Check = Callable[[Method, World], None]


class NotApplicable(Exception):
    """Raised by a check that does not apply to a method, with the reason."""


def clause(text: str) -> Callable[[Check], Check]:
    """Turn a function that tests one clause of the contract into a check.

    The check raises AssertionError with what is wrong and the clause, whatever the method's own
    code raised (that is chained), and NotApplicable where there is nothing to check.
    """

    def mark(function: Check) -> Check:
        @wraps(function)
        def check(method: Method, world: World) -> None:
            try:
                function(method, world)
            except NotApplicable:
                raise
            except Exception as error:
                required = isinstance(error, AssertionError)
                problem = str(error) if required else f"{type(error).__name__}: {error}"
                where = f"{type(method).__name__}, {world.name}, {function.__name__}"
                raise AssertionError(f"{where}: {problem}\n  The contract: {text}") from error

        return check

    return mark


def require(holds: bool, problem: str) -> None:
    """Raise AssertionError with the problem, unless something holds; under -O, too."""
    if not holds:
        raise AssertionError(problem)


def forms(state: Named) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shape and the dtype of each tensor."""
    return {name: (t.shape, t.dtype) for name, t in state.items()}


def require_same(a: Named, b: Named, what: str) -> None:
    """Raise AssertionError unless two dicts of tensors are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has {sorted(a.keys() ^ b.keys())}")
    differing = [name for name in a if not torch.equal(a[name], b[name])]
    require(not differing, f"{what}: {differing[:5]} differ")


def require_same_states(a: Mapping[str, State], b: Mapping[str, State], what: str) -> None:
    """Raise AssertionError unless the clients' states are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has a state of {sorted(a.keys() ^ b.keys())}")
    for i, state in a.items():
        require_same(state, b[i], f"{what}, state of client {i!r}")


def require_same_run(a: Run, b: Run, what: str) -> None:
    """Raise AssertionError unless two runs have equal results, to the bit."""
    require_same(a.server, b.server, f"{what}, server's state")
    require_same_states(a.engine.states(), b.engine.states(), what)
