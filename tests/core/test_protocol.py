"""The contract, without any engine or model: dictionaries in, dictionaries out."""

import pytest
import torch

from coterie.core.errors import TensorError
from coterie.core.protocol import Ask, Replies, Round, derive_seed, drive, find_task, task
from coterie.core.roles import GENERALIST, ROUTER, by_role


class Doubling:
    """Two exchanges a round."""

    @task()
    def twice(self, client: object, x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"x": 2 * x["x"]}

    def helper(self) -> None:
        """Not a task."""

    def round(self, state: dict[str, torch.Tensor]) -> Round:
        first = yield Ask(self.twice, {"a": state})
        second = yield Ask(self.twice, {i: dict(r) for i, r in first.items()})
        return dict(second["a"])


def test_a_round_is_driven_through_its_exchanges() -> None:
    phases = []

    def answer(ask: Ask, phase: int) -> Replies:
        phases.append(phase)
        return {i: ask.task(None, tensors) for i, tensors in ask.to.items()}

    assert drive(Doubling().round({"x": torch.tensor(1.0)}), answer)["x"] == 4
    assert phases == [0, 1]


def test_a_round_without_exchange_returns_its_state() -> None:
    def idle() -> Round:
        yield from ()
        return {"x": torch.tensor(3.0)}

    assert drive(idle(), lambda ask, phase: {})["x"] == 3


def test_only_tasks_travel() -> None:
    with pytest.raises(TypeError, match="not a @task"):
        Ask(Doubling().helper, {})  # type: ignore[arg-type]
    assert find_task(Doubling(), "twice").__name__ == "twice"
    for name in ("helper", "__init__", "none"):
        with pytest.raises(TensorError, match="has no task"):
            find_task(Doubling(), name)


def test_seeds_depend_on_everything_that_names_them() -> None:
    seeds = {
        derive_seed(s, r, p, c) for s in (0, 1) for r in (0, 1) for p in (0, 1) for c in ("a", "b")
    }
    assert len(seeds) == 16
    # the same on every machine and release
    assert derive_seed(0, 1, 2, "ann") == 8400349575667448047
    assert all(0 <= seed < 2**63 for seed in seeds)


class Tagged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.frozen = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.roles = {"a": GENERALIST, "b": ROUTER}


def test_roles_are_declared_by_modules() -> None:
    found = by_role(torch.nn.Sequential(Tagged()))
    assert list(found[GENERALIST]) == ["0.a"]
    assert list(found[ROUTER]) == ["0.b"]


def test_an_untagged_trainable_tensor_is_an_error() -> None:
    with pytest.raises(TensorError, match=r"'1.weight' of Linear has no role"):
        by_role(torch.nn.Sequential(Tagged(), torch.nn.Linear(1, 1)))
