"""Messages between server and devices without their tensors: one request, one reply. Tensors follow
as safetensors bytes.

Nothing here needs torch: the program of a device may only hand a request on to the process that
does the work.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    ValidationError,
    field_validator,
)

from coterie.core import names
from coterie.core.errors import TensorError
from coterie.core.foreign import json_of
from coterie.core.version import __version__

MOST_HEADER = 1 << 20  # bytes of a request or reply without its tensors
MOST_THREADS = 1024
MOST_SAID = 20000  # characters of a problem or a remedy
MOST_MEASURED = 1000  # names of measurements in a reply; each is kept, and shown by trackers
# may name a folder
Id = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]*$")]
# as large as other programs read numbers of JSON without loss
Count = Annotated[int, Field(ge=0, le=1 << 53)]
Metric = Count | FiniteFloat | list[FiniteFloat] | list[list[FiniteFloat]]
_DAMAGED = "It was damaged, or did not come from coterie."
_MEASURED = re.compile(r"[A-Za-z0-9_.+/-]+")
_OF_LINES = {"kind", "round", "iteration", "client"}  # what a line of metrics.jsonl says itself


def _named(client: str) -> str:
    """Return a client's name if it is valid, or the name of the union of all clients' data, which a
    simulation has. Raises ValueError.
    """
    if client != names.CENTRALIZED and (mistake := names.mistake(client)):
        raise ValueError(f"no client can have this name: {mistake}")
    return client


Name = Annotated[str, Field(max_length=names.LONGEST), AfterValidator(_named)]


def _is_matrix(value: Metric) -> bool:
    """Whether a measurement is a list of lists that are equally long and not empty."""
    lengths = (
        {len(row) if isinstance(row, list) else 0 for row in value}
        if isinstance(value, list)
        else set()
    )
    return len(lengths) == 1 and lengths != {0}


class BaseMessage(BaseModel):
    """The fields of messages in both directions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: Annotated[str, Field(max_length=50)] = __version__


class Request(BaseMessage):
    """A message to a device.

    Attributes:
        action: "hello": who it is; "task": one task of the recipe's method; "keep": a last task,
            after which its personal model is written.
        run: The run's own name: a device keeps its states by it.
        recipe: The resolved recipe, JSON values. The device puts its own data in the place of the
            recipe's paths.
        client: The client that the server expects on the device; None in a hello.
        task: Name of the task.
        round: Rounds done before.
        phase: Which exchange of the round it is to the method.
        number: Which exchange of the round it is: of two requests of a round the later one has the
            greater number.
        position: The client's place in the federation, for per-client lists.
        expects: Round and number of the last exchange that the server has this client's reply of;
            None for one that is new to it.
        rounds_kept: The server may resume from here: states of the rounds since are kept.
        threads: The number of threads for the arithmetic, so that results are the same to the bit;
            None: the device chooses.
        folder: Where a simulated device keeps everything. A real one does not let itself be told.
        masked: Whether the reply leaves the device under the masks of secure aggregation only.
    """

    action: Literal["hello", "task", "keep"]
    run: Id
    recipe: dict[str, Any]
    client: Name | None = None
    task: str = ""
    round: Count = 0
    phase: int = 0
    number: Count = 0
    position: Count = 0
    expects: tuple[Count, Count] | None = None
    rounds_kept: Count = 0
    threads: Annotated[int | None, Field(ge=1, le=MOST_THREADS)] = None
    folder: str | None = None
    masked: bool = False


class Member(BaseModel):
    """A client as the server knows it: its name, and how much data it has, but nothing of the data
    themselves.

    Attributes:
        client: Its id.
        position: Its place among those that the device's data hold: 0 where it holds its own data
            alone.
        windows: Rows of its training, validation and test data.
        group: The group of unseen clients that it belongs to; empty for one that trains.
        cluster: Its true cluster, where the data tell.
        anchor: The number of the expert that it is tied to, where the data have anchors.
        labels: The classes that it has, where the data tell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    client: Name
    position: Count
    windows: tuple[Count, Count, Count]
    group: Annotated[str, Field(max_length=200)] = ""
    cluster: Count | None = None
    anchor: Count | None = None
    labels: tuple[Count, ...] | None = None


class Reply(BaseMessage):
    """A message from a device.

    Attributes:
        client: Who it is.
        task: The completed task.
        round: Of the request.
        number: Of the request.
        member: In answer to a hello.
        metrics: What the task measured: `tokens`, losses and mean routing weights; finite.
        state_bytes: What the client remembers.
        note: Information for the server that does not stop the run, for example that a client
            starts without its former state.
        problem: What went wrong, if something did.
        remedy: What to do about it.
    """

    client: Name | None = None
    task: Annotated[str, Field(max_length=200)] = ""
    round: Count = 0
    number: Count = 0
    member: Member | None = None
    metrics: Annotated[
        dict[Annotated[str, Field(max_length=200)], Metric], Field(max_length=MOST_MEASURED)
    ] = {}
    state_bytes: Count = 0
    note: Annotated[str, Field(max_length=2000)] = ""
    problem: Annotated[str, Field(max_length=MOST_SAID)] = ""
    remedy: Annotated[str, Field(max_length=MOST_SAID)] = ""

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Refuse measurements that a server could not add up, and names that lines of metrics
        use for themselves, such as the round.
        """
        if taken := _OF_LINES & metrics.keys():
            raise ValueError(f"{min(taken)} cannot be the name of a measurement")
        if not isinstance(metrics.get("tokens", 0), int):
            raise ValueError("tokens must be a whole number")
        if odd := [name for name in metrics if not _MEASURED.fullmatch(name)]:
            raise ValueError(f"{odd[0]!r} is not a valid name of a measurement")
        if ragged := [
            name
            for name, value in metrics.items()
            if name.startswith("router/") and not _is_matrix(value)
        ]:
            raise ValueError(f"{ragged[0]} must have the same number of weights for each block")
        if lists := [
            name
            for name, value in metrics.items()
            if name.startswith("loss/") and isinstance(value, list)
        ]:
            raise ValueError(f"{lists[0]} must be one number")
        return metrics


def check_answers(reply: Reply, request: Request) -> None:
    """Refuse a reply of another client, or to another request. Raises TensorError."""
    for name in ("client", "task", "round", "number"):
        if getattr(reply, name) != getattr(request, name):
            raise TensorError(
                f"a reply of {reply.client!r} to {reply.task}, round {reply.round + 1}, that was "
                f"not requested"
            )


def failed(problem: str, remedy: str = "", **request: Any) -> Reply:
    """Return the reply of a device that could not do what it was asked, whatever characters the
    problem is made of, and however many.
    """
    problem, remedy = (
        text.encode(errors="replace").decode()[:MOST_SAID] for text in (problem, remedy)
    )
    return Reply(problem=problem, remedy=remedy, **request)


def parsed(kind: type[Request] | type[Reply], text: str) -> Any:
    """Return a request or a reply from its text. Raises TensorError: it is too long, no JSON, has
    unknown or missing fields, or is of another version of coterie.
    """
    what = kind.__name__.lower()
    if len(text) > MOST_HEADER:
        raise TensorError(
            f"{what} of {len(text):,} characters, at most {MOST_HEADER:,}",
            _DAMAGED,
        )
    try:
        message = kind.model_validate(json_of(text, finite=False))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise TensorError(
            f"{what}: {where}: {first['msg']}",
            "Install the same version of coterie on server and devices.",
        ) from None
    except ValueError as error:
        raise TensorError(f"{what}: {error}", _DAMAGED) from None
    if message.version != __version__:
        raise TensorError(
            f"{what} from coterie {message.version}, but this is coterie {__version__}",
            "Install the same version on server and devices.",
        )
    return message
