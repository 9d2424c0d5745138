"""Messages between server and devices: one request, one reply; tensors follow as safetensors bytes.
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
    """Return a valid name of a client, or of all clients' data together. Raises ValueError."""
    if client != names.CENTRALIZED and (mistake := names.mistake(client)):
        raise ValueError(f"no client can have this name: {mistake}")
    return client


Name = Annotated[str, Field(max_length=names.LONGEST), AfterValidator(_named)]


def _is_matrix(value: Metric) -> bool:
    rows = value if isinstance(value, list) else []
    lengths = {len(row) if isinstance(row, list) else 0 for row in rows}
    return len(lengths) == 1 and lengths != {0}


class BaseMessage(BaseModel):
    """The fields of messages in both directions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: str = Field(__version__, max_length=50)


class Request(BaseMessage):
    """A message to a device."""

    # "hello": who it is; "task": one task; "keep": a last task, after which the personal model is
    # written.
    action: Literal["hello", "task", "keep"]
    run: Id  # its name, by which a device keeps its states
    # Resolved, JSON values; the device replaces the data's paths by its own.
    recipe: dict[str, Any]
    client: Name | None = None  # expected on the device; None in a hello
    task: str = ""
    round: Count = 0  # rounds done before
    phase: int = 0  # of the method's exchanges of the round
    number: Count = 0  # of all exchanges of the round, rising
    position: Count = 0  # the client's place in the federation, for per-client lists
    # round, number of its last reply; None: a new client
    expects: tuple[Count, Count] | None = None
    rounds_kept: Count = 0  # the server may resume from here: later states are kept
    # Equal numbers give equal results, to the bit; None: the device chooses.
    threads: int | None = Field(None, ge=1, le=MOST_THREADS)
    folder: str | None = None  # where a simulated device keeps everything; a real one refuses it
    masked: bool = False  # whether the reply leaves only under masks of secure aggregation


class Member(BaseModel):
    """A client as the server knows it: its name and the amount of its data, not their content."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    client: Name
    position: Count  # among the clients whose data the device has
    windows: tuple[Count, Count, Count]  # rows of training, validation and test data
    group: str = Field("", max_length=200)
    cluster: Count | None = None  # the true one, if known
    anchor: Count | None = None  # the number of the expert that it is tied to
    labels: tuple[Count, ...] | None = None  # its classes, if known


class Reply(BaseMessage):
    """A message from a device."""

    client: Name | None = None
    task: str = Field("", max_length=200)
    round: Count = 0  # of the request
    number: Count = 0  # of the request
    member: Member | None = None  # in answer to a hello
    # What the task measured: `tokens`, losses and mean routing weights; finite.
    metrics: dict[Annotated[str, Field(max_length=200)], Metric] = Field(
        {}, max_length=MOST_MEASURED
    )
    state_bytes: Count = 0
    # for the server; stops nothing, for example that a state was lost
    note: str = Field("", max_length=2000)
    problem: str = Field("", max_length=MOST_SAID)
    remedy: str = Field("", max_length=MOST_SAID)

    @field_validator("metrics")
    @classmethod
    def _check_metrics(cls, metrics: dict[str, Metric]) -> dict[str, Metric]:
        """Refuse measurements that a server cannot add up, and reserved names, such as `round`."""
        if taken := _OF_LINES & metrics.keys():
            raise ValueError(f"{min(taken)} cannot be the name of a measurement")
        if not isinstance(metrics.get("tokens", 0), int):
            raise ValueError("tokens must be a whole number")
        for name, value in metrics.items():
            if not _MEASURED.fullmatch(name):
                raise ValueError(f"{name!r} is not a valid name of a measurement")
            if name.startswith("router/") and not _is_matrix(value):
                raise ValueError(f"{name} must have the same number of weights for each block")
            if name.startswith("loss/") and isinstance(value, list):
                raise ValueError(f"{name} must be one number")
        return metrics


def check_answers(reply: Reply, request: Request) -> None:
    """Raise TensorError for a reply of another client, or to another request."""
    for name in ("client", "task", "round", "number"):
        if getattr(reply, name) != getattr(request, name):
            raise TensorError(
                f"a reply of {reply.client!r} to {reply.task}, round {reply.round + 1}, that was "
                f"not requested"
            )


def failed(problem: str, remedy: str = "", **request: Any) -> Reply:
    """Return the reply of a device that failed, with the problem made valid and short enough."""
    problem, remedy = (
        text.encode(errors="replace").decode()[:MOST_SAID] for text in (problem, remedy)
    )
    return Reply(problem=problem, remedy=remedy, **request)


def parsed(kind: type[Request] | type[Reply], text: str) -> Any:
    """Return a request or reply from its text. Raises TensorError: it is too long, no JSON, has
    unknown or missing fields, or is of another version of coterie.
    """
    what = kind.__name__.lower()
    if len(text) > MOST_HEADER:
        raise TensorError(f"{what} of {len(text):,} characters, at most {MOST_HEADER:,}", _DAMAGED)
    try:
        message = kind.model_validate(json_of(text, finite=False))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "it"
        remedy = "Install the same version of coterie on server and devices."
        raise TensorError(f"{what}: {where}: {first['msg']}", remedy) from None
    except ValueError as error:
        raise TensorError(f"{what}: {error}", _DAMAGED) from None
    if message.version != __version__:
        problem = f"{what} from coterie {message.version}, but this is coterie {__version__}"
        raise TensorError(problem, "Install the same version on server and devices.")
    return message
