"""The one contract between methods and engines.

A method's `round` is a generator for one round: it yields `Ask`s, is sent the replies, and returns the next server state. An engine is
one function, `answer(ask, phase) -> replies`.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeVar

from coterie.errors import TensorError
from coterie.tensors import Tensors

ClientId = str
State = Tensors  # the server's state: named tensors, so that checkpoints fall out
Replies = Mapping[ClientId, Tensors]  # in the order of `Ask.to`, without the clients that failed
Task = Callable[..., Tensors]

_MARK = "__coterie_task__"
F = TypeVar("F", bound=Task)
R = TypeVar("R")


def task(function: F) -> F:
    """Mark a method of a method's class as the client half: `(self, client, tensors) -> Tensors`. It travels by its name."""
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True)
class Ask:
    """A request that the server makes in one exchange.

    Args:
        task: A bound `@task` of the method that yields this.
        to: What each client gets; the clients asked are its keys, and replies come back in their order.
    """

    task: Task
    to: Mapping[ClientId, Tensors]

    def __post_init__(self) -> None:
        if not getattr(self.task, _MARK, False):
            raise TypeError(f"{self.task!r} is not a @task: an engine could not call it by name on another machine")

    @property
    def name(self) -> str:
        """The name under which the task is found on the client's own copy of the method."""
        return self.task.__name__


Round = Generator[Ask, Replies, State]
Adaptation = Generator[Ask, Replies, Mapping[ClientId, Tensors]]  # ends in what each new client gets


def find_task(method: Any, name: str) -> Task:
    """The bound task `name` of `method`, for engines that receive it as text.

    Raises:
        TensorError: The method has no such task (its other attributes cannot be called from outside).
    """
    found = getattr(method, name, None)
    if not getattr(found, _MARK, False):
        raise TensorError(f"{type(method).__name__} has no task {name!r}", "Server and client must run the same version of coterie.")
    return found  # type: ignore[return-value]


def find_together(method: Any, name: str) -> Callable[..., Replies] | None:
    """The batched form of a task, if it has one: `<name>_together(cohort, tensors by client)`. It must equal the task, one by one."""
    for owner in type(method).__mro__:
        if f"{name}_together" in vars(owner):
            together: Callable[..., Replies] = getattr(method, f"{name}_together")
            return together
        if name in vars(owner):  # the task is another one than its batched form was written for
            return None
    return None


def drive(round: Generator[Ask, Replies, R], answer: Callable[[Ask, int], Replies]) -> R:
    """Run one round, or one adaptation, to its end: pass every Ask, with the number of its phase, to `answer`, and the replies back."""
    try:
        ask, phase = next(round), 0
        while True:
            ask, phase = round.send(answer(ask, phase)), phase + 1
    except StopIteration as end:
        result: R = end.value
        return result


def mix(seed: int, *parts: int | str) -> int:
    """A seed of 63 bits for one purpose, from the run's seed and what names the purpose: (round, phase, client id) for a client's task.

    BLAKE2b over the parts as text, so that it is the same on every machine and no two purposes share a stream.
    """
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
