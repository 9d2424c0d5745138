"""Names of tensors in a server's state and in messages; made and parsed only here.

`<client>/<what>` is a client's own (`ann/generalist`), `expert/<number>` a member of a pool, and
`<kind>/<name>` one of several sets of tensors (`mean/...`), see `tensors.prefixed`.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from coterie.core.protocol import ClientId
from coterie.core.roles import EXPERT, GENERALIST


def of_client(client: ClientId, what: str = GENERALIST) -> str:
    """Return the name of a client's own tensor."""
    return f"{client}/{what}"


def by_client(values: Mapping[ClientId, Tensor], what: str = GENERALIST) -> dict[str, Tensor]:
    """Return each client's own tensor under its name."""
    return {of_client(i, what): value for i, value in values.items()}


def clients_with(named: Iterable[str], what: str = GENERALIST) -> list[ClientId]:
    """Return the clients whose own tensors are among the names, in order."""
    return sorted(name.removesuffix(f"/{what}") for name in named if name.endswith(f"/{what}"))


def client_of(name: str) -> ClientId | None:
    """Return the client that a tensor belongs to; None if it belongs to no client."""
    client, sign, _ = name.partition("/")
    return client if sign else None


def of_expert(number: int) -> str:
    """Return the name of a member of a pool."""
    return f"{EXPERT}/{number}"


def numbers_of_experts(named: Iterable[str]) -> list[int]:
    """Return the numbers of the pool's members among the names, in order."""
    start = of_expert(0)[:-1]
    return sorted(int(name.removeprefix(start)) for name in named if name.startswith(start))
