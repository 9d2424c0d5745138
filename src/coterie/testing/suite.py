"""All checks on one method: `check_method`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

from pydantic import TypeAdapter

from coterie.core.errors import Refused
from coterie.engines import ENGINES
from coterie.methods import METHODS, Method
from coterie.methods.section import build_method
from coterie.testing import leaving, run, training
from coterie.testing.run import Check, NotApplicable

# From the most specific checks to those that many mistakes break.
CHECKS: tuple[Check, ...] = (
    training.only_shared_tensors_travel,
    training.state_keeps_its_form,
    training.two_runs_are_alike,
    leaving.replies_have_the_form_asked_for,
    leaving.training_tasks_say_so,
    training.training_changes_the_clients,
    training.batch_is_as_one_by_one,
    training.engines_are_alike,
    training.absent_client_keeps_everything,
    training.failing_clients_are_left_out,
    training.resumed_run_ends_the_same,
    training.some_clients_a_round,
    training.clients_come_and_go,
    training.devices_are_alike,
    training.schedules_run_over_the_rounds,
    training.order_changes_nothing,
    training.one_client_alone,
    leaving.local_privacy_leaves_only_noise,
    leaving.secure_aggregation_leaves_only_scores,
    leaving.masked_replies_are_updates,
)
# Settings of small runs: two rounds exercise the whole method.
SMALL = {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1}


@dataclass(frozen=True)
class Checked:
    """The result of checking a method; `str` of it is a short summary.

    Args:
        method: The method, with its settings.
        engines: The engines that it ran on.
        held: The checks that hold, by the name of the world.
        left_out: The reason why a check does not apply, by the names of the world and the check.
    """

    method: Method
    engines: tuple[str, ...]
    held: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        """Return one line for each world, and one for each thing that does not apply."""
        lines = [f"{type(self.method).__name__} keeps the contract, on {', '.join(self.engines)}"]
        lines += [f"  {world}: {len(held)} checks hold" for world, held in self.held.items()]
        lines += [f"  does not apply: {what}: {why}" for what, why in self.left_out.items()]
        return "\n".join(lines)


def check_method(
    method: Method | type[Method] | str,
    *,
    leave_out: Mapping[str, str] | None = None,
    **settings: Any,
) -> Checked:
    """Check that a method keeps the contract: in every world with models for it, on every engine.

    Needs no data, no download and no pytest; a method that holds takes seconds.

    Args:
        method: Its name (`my_package.my_file:MyMethod` is one), its class, or an instance.
        leave_out: Names of checks that cannot hold for this method, and why.
        settings: Fields of the method; those of a name or class not given are as in `SMALL`.

    Raises:
        AssertionError: The first check that fails: what is wrong, and the clause of the contract.
        ValueError: There is no such setting, or no such check to leave out.
        Refused: No world has a model for this method.

    Examples:
        >>> from coterie.testing import check_method
        >>> print(check_method("fedavg"))  # doctest: +SKIP
    """
    built, reasons = build(method, settings), dict(leave_out or {})
    if unknown := reasons.keys() - {check.__name__ for check in CHECKS}:
        raise ValueError(f"leave_out: there is no check {sorted(unknown)[0]!r}")
    held: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    for world in (run.language(), run.pictures()):
        if why := world.refuses(built):
            left_out[world.name] = why
            continue
        missing = dict(_held_back(built, world, reasons))
        left_out |= {f"{world.name}, {name}": why for name, why in missing.items()}
        held[world.name] = tuple(c.__name__ for c in CHECKS if c.__name__ not in missing)
    if not held:
        raise Refused(
            f"no kind of model has the layout of {type(built).__name__}",
            "\n".join(left_out.values()),
        )
    engines = (*ENGINES, *(["flower"] if find_spec("flwr") else []))
    return Checked(built, engines, held, left_out)


def _held_back(
    method: Method, world: run.World, leave_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Run all checks in a world; yield those that do not apply, and why."""
    for check in CHECKS:
        if check.__name__ in leave_out:
            yield check.__name__, leave_out[check.__name__]
            continue
        try:
            check(method, world)
        except NotApplicable as reason:
            yield check.__name__, str(reason)


def build(method: Method | type[Method] | str, settings: Mapping[str, Any]) -> Method:
    """Return the method of a name, class or instance with settings."""
    if isinstance(method, Method):
        return replace(method, **settings)
    if isinstance(method, str):
        entry = METHODS.get(method)
        small = {} if entry is None else _small(entry.method, entry.fixed)
        return build_method({"name": method, **small, **settings})
    built: Method = TypeAdapter(method).validate_python({**_small(method, {}), **settings})
    return built


def _small(method: type[Method], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `SMALL` that a class has as fields and that its name does not fix."""
    # rounds that are 0 by default are always 0: such a method trains nothing
    names = {f.name for f in fields(method) if f.default != 0} - set(fixed)
    return {name: value for name, value in SMALL.items() if name in names}
