"""The API server: one port, one thread for requests, and one for the batch."""

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from coterie.core.errors import Refused, extra
from coterie.personal.many import ManyModels
from coterie.personal.model import PersonalModel
from coterie.personal.running_batch import ROWS

try:
    from coterie.personal.api.app import Api
    from coterie.personal.api.guard import Guard, Limits, listening, new_token, running
except ImportError:
    raise Refused("--api needs uvicorn and starlette", extra("serve")) from None

from coterie.personal.api.preparation import Preparation
from coterie.personal.api.scheduler import Scheduler

CONTEXT = 4096  # most tokens of a prompt and its answer if the base's context is longer
QUEUE = 64
# printable ASCII, as a header allows, and not too short to resist guessing
_TOKEN = re.compile(r"[!-~]{8,200}")


@dataclass(frozen=True)
class Settings:
    """The settings of a server."""

    port: int
    host: str = "127.0.0.1"
    token: str = field(default_factory=new_token, repr=False)  # what callers must send
    rows: int = ROWS  # texts that are generated at once
    queue: int = QUEUE  # further texts that may wait
    # most tokens of a prompt and its answer; None: the base's context, at most `CONTEXT`
    context: int | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not _TOKEN.fullmatch(self.token):
            raise Refused(
                "the token is unusable",
                "Give 8 to 200 letters, digits or signs of ASCII without spaces, or leave it out: "
                "then one is made.",
            )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


@contextmanager
def served(
    models: Mapping[str, PersonalModel], settings: Settings, report: Callable[[str], None]
) -> Iterator[str]:
    """Serve models while the block runs; yield the address of the API.

    Args:
        models: A personal model for each client, on one backbone.
        settings: The settings of the server.
        report: Called with one line about each internal error of the server.

    Raises:
        Refused: The port is taken, the host is not an address of this machine, or the context is
            longer than the base's.
        ModelError: The base has no tokenizer.
    """
    together = ManyModels(models)
    limit = together.backbone.context_limit
    if settings.context is not None and settings.context > limit:
        raise Refused(
            f"--context {settings.context} is longer than the base's, {limit} tokens",
            f"Give at most {limit}.",
        )
    context = settings.context or min(limit, CONTEXT)
    preparation = Preparation(together, context, settings.rows + settings.queue, settings.rows)
    with listening(settings.host, settings.port) as listener:
        scheduler = Scheduler(together, settings.rows, settings.queue, report)
        api = Api(preparation, scheduler, settings.limits, report)
        guard = Guard(api.app(), settings.host, settings.token)
        with running(guard, listener, settings.limits):
            try:
                host = f"[{settings.host}]" if ":" in settings.host else settings.host
                yield f"http://{host}:{listener.getsockname()[1]}/v1"
            finally:
                preparation.interrupt()
                scheduler.close()
