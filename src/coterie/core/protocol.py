"""The one contract between methods and engines.

A method's `round` is a generator for one round: it yields `Ask`s, is sent the replies, and returns
the next server state. An engine is one function, `answer(ask, phase) -> replies`.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from coterie.core.errors import Refused, TensorError
from coterie.core.tensors import Named, Tensors, all_finite, check_alike

ClientId = str
State = Tensors  # the server's state: named tensors, so that checkpoints fall out
Replies = Mapping[ClientId, Tensors]  # in the order of `Ask.to`, without the clients that failed
Task = Callable[..., Tensors]
# by what a client was sent: tensors of the names, shapes and dtypes that it must send back
ReplySpec = Callable[[Named], Named]

_SENDS, _BATCHED = "__coterie_sends__", "__coterie_batched__"
MOST_SCORES = 64  # numbers in a reply that is called scores: more could smuggle out a model
MOST_COUNTS = 2  # integers beside an update
PARTS = "+"  # between the names of tasks that a client does for one part of a method each
PROTECTS = "It protects its owner, whatever the run asks for: see docs/privacy.md."
F = TypeVar("F", bound=Task)
R = TypeVar("R")


class Sends(Enum):
    """The declared content of a task's reply. A device that protects its owner sends nothing else,
    see `check_declared`.
    """

    PRIVATE = "private"  # anything at all, which leaves only a device that protects nothing
    # tensors that came, trained: their difference can be masked, or clipped and noised; and a few
    # counts
    UPDATE = "update"
    SCORES = "scores"  # a few sums of losses, or counts
    NOTHING = "nothing"


def task(sends: Sends = Sends.PRIVATE, *, batched: bool = False) -> Callable[[F], F]:
    """Mark a method of a `Method` as a client task: `(self, client, tensors) -> Tensors`. Messages
    refer to it by name.

    Args:
        sends: The declared content of its reply.
        batched: Whether it uses only what `Client` and `ClientBatch` have in common, so that one
            call can serve many clients.
    """

    def mark(function: F) -> F:
        setattr(function, _SENDS, sends)
        setattr(function, _BATCHED, batched)
        return function

    return mark


def declared(function: Task) -> Sends:
    """Return what a task is declared to send."""
    return getattr(function, _SENDS, Sends.PRIVATE)


def batched(function: Task) -> bool:
    """Return whether one call of a task can serve a batch of clients."""
    return bool(getattr(function, _BATCHED, False))


def trains(function: Task) -> bool:
    """Return whether a task sends an update."""
    return declared(function) is Sends.UPDATE


def check_declared(function: Task, sent: Named, reply: Named) -> None:
    """Raise Refused, naming task and tensor, if a reply to `sent` is not what the task declares."""
    sends = declared(function)
    for name in sorted(reply):
        if problem := _undeclared(sends, name, sent, reply):
            raise Refused(
                f"{function.__name__}: {name!r} does not leave this device: {problem}", PROTECTS
            )


def _undeclared(sends: Sends, name: str, sent: Named, reply: Named) -> str | None:
    """Return why a tensor of a reply is not as declared, or None."""
    tensor, form = reply[name], sent.get(name)
    if sends is Sends.PRIVATE:
        return "the task does not declare that its reply can be masked or noised, or is harmless"
    if sends is Sends.NOTHING:
        return "the task is declared to send nothing"
    if sends is Sends.SCORES:
        numbers = sum(t.numel() for t in reply.values())
        fits = numbers <= MOST_SCORES and tensor.dtype in (torch.float64, torch.int64)
        limit = f"scores are at most {MOST_SCORES}, float64 or int64"
        return None if fits else f"{tensor.dtype} among {numbers} numbers; {limit}"
    if not tensor.is_floating_point():
        counts = sum(not t.is_floating_point() for t in reply.values())
        fits = tensor.dim() == 0 and counts <= MOST_COUNTS
        limit = f"an update may come with at most {MOST_COUNTS} counts"
        return None if fits else f"integers of shape {tuple(tensor.shape)}; {limit}"
    if form is None or form.shape != tensor.shape or form.dtype != tensor.dtype:
        return "the server sent no tensor of its name, shape and dtype, so it is not an update"
    return None


def protects_examples(method: Any) -> bool:
    """Return whether all that clients send protects examples, as the own class declares."""
    return "by_examples" in vars(type(method)) and bool(method.by_examples)


def as_sent(sent: Named) -> Named:
    """Return the specification of a reply of the form of what was sent."""
    return sent


def empty_reply(sent: Named) -> Named:
    """Return the specification of an empty reply."""
    return {}


@dataclass(frozen=True)
class Ask:
    """A request that the server makes in one exchange.

    Args:
        task: A bound `@task` of the method.
        to: The tensors for each client asked; replies come back in this order.
        reply_spec: Returns the names, shapes and dtypes of a client's reply. Integers must be
            between 0 and those of the specification; its other values do not matter.
        smaller: Whether tensors may be smaller than the specification (truncated ranks).
    """

    task: Task
    to: Mapping[ClientId, Tensors]
    reply_spec: ReplySpec = as_sent
    smaller: bool = False

    def __post_init__(self) -> None:
        if not hasattr(self.task, _SENDS):
            raise TypeError(
                f"{self.task!r} is not a @task: an engine could not call it by name on another "
                f"machine"
            )

    @property
    def name(self) -> str:
        """The name of the task, which the client looks up in its own copy of the method."""
        return self.task.__name__

    def check(self, client: ClientId, reply: Named) -> None:
        """Refuse a reply that does not fit `reply_spec`. Raises TensorError: a tensor is
        unexpected, missing or of the wrong shape, a value is not finite, or an integer is out of
        range.
        """
        spec = dict(self.reply_spec(self.to[client]))
        what = f"reply of client {client!r} to {self.name}"
        if self.smaller:
            spec = {name: _cut(t, reply[name]) if name in reply else t for name, t in spec.items()}
        check_alike(spec, reply, what)
        if not all_finite(reply):
            bad = next(name for name in sorted(reply) if not all_finite({name: reply[name]}))
            problem = f"{what}: not all values of {bad!r} are finite"
            raise TensorError(problem, "Training diverged there: lower the learning rate.")
        for name, largest in spec.items():
            tensor = reply[name]
            if tensor.dtype.is_floating_point or not tensor.numel():
                continue
            if bool(((tensor < 0) | (tensor > largest.to(tensor.device))).any()):
                raise TensorError(
                    f"{what}: {name!r} is {tensor.tolist()}, expected from 0 to {largest.tolist()}"
                )


def _cut(form: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return the form with the shape of a tensor, if that fits into it."""
    fits = form.dim() == tensor.dim() and all(
        0 < n <= most for n, most in zip(tensor.shape, form.shape, strict=True)
    )
    return form.new_empty(tensor.shape) if fits else form


Round = Generator[Ask, Replies, State]
# returns what each new client gets
Adaptation = Generator[Ask, Replies, Mapping[ClientId, Tensors]]


def find_task(method: Any, name: str) -> Task:
    """Return the bound task `name`, nothing else. Raises TensorError if there is none."""
    task = getattr(method, name, None)
    if not hasattr(task, _SENDS):
        problem = f"{type(method).__name__} has no task {name!r}"
        raise TensorError(problem, "Server and client must run the same version of coterie.")
    return task  # type: ignore[return-value]


def drive(round: Generator[Ask, Replies, R], answer: Callable[[Ask, int], Replies]) -> R:
    """Run a round or an adaptation: send each Ask and phase to `answer`, and replies back."""
    try:
        ask, phase = next(round), 0
        while True:
            ask, phase = round.send(answer(ask, phase)), phase + 1
    except StopIteration as end:
        result: R = end.value
        return result


_remarks: ContextVar[dict[str, None] | None] = ContextVar("remarks", default=None)


def remark(text: str) -> None:
    """Tell those who read about the run what a method's server has left out in this round."""
    if (remarks := _remarks.get()) is not None:
        remarks[text] = None


@contextmanager
def remarked() -> Iterator[dict[str, None]]:
    """Provide the remarks that are made within the block, each once, in order."""
    remarks = dict[str, None]()
    token = _remarks.set(remarks)
    try:
        yield remarks
    finally:
        _remarks.reset(token)


def derive_seed(seed: int, *parts: int | str) -> int:
    """Return a 63-bit seed for one purpose, from the run's seed and the parts that name the
    purpose, such as (round, phase, client id). BLAKE2b over the parts as text makes it equal on all
    machines, and different for different purposes.
    """
    text = "/".join(map(str, (seed, *parts)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
