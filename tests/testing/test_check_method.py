"""A right method passes; one that breaks the contract is refused, and the clause named."""

import itertools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from coterie import testing
from coterie.client.blueprint import AnyClient
from coterie.client.client import Client
from coterie.core.errors import Refused
from coterie.core.protocol import Ask, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods import Method
from coterie.methods.comigs import CoMiGS
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.models.layout import Layout
from coterie.testing import CHECKS, check_method

QUICK = {"rounds": 2, "local_steps": 1}


@dataclass(frozen=True)
class Half(FedAvg):
    """Right: half a step to the mean."""

    def round(self, state, clients, rng):
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        mean = self.combine(replies, state)
        return state | {name: (state[name] + mean[name]) / 2 for name in mean}


@dataclass(frozen=True)
class Leaking(CoMiGS):
    """Sends its specialists too."""

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        return super().local_round(client, theta_g) | client.read(SPECIALIST)


@dataclass(frozen=True)
class Growing(FedAvg):
    """Its state gets a tensor that `init` did not give it, and that stays at the server."""

    def download(self, state, clients):
        return {i: {name: t for name, t in state.items() if name != "best"} for i in clients}

    def round(self, state, clients, rng):
        state = yield from super().round(state, clients, rng)
        return state | {"best": torch.zeros(3)}


@dataclass(frozen=True)
class Doubling(FedAvg):
    """Its state gets another dtype."""

    def round(self, state, clients, rng):
        state = yield from super().round({n: t.float() for n, t in state.items()}, clients, rng)
        return {n: t.double() for n, t in state.items()}


@dataclass(frozen=True)
class Chancy(FedAvg):
    """Its server draws from a generator of its own, which goes on from run to run."""

    generator: ClassVar[torch.Generator] = torch.Generator()

    def round(self, state, clients, rng):
        state = yield from super().round(state, clients, rng)
        return {
            n: t + 1e-3 * torch.randn(t.shape, generator=self.generator) for n, t in state.items()
        }


@dataclass(frozen=True)
class Dropping(Local):
    """Its state has a tensor for each client, and drops those of clients that are not drawn."""

    def init(self, model, clients) -> State:
        return {f"{i}/turns": torch.zeros(1) for i in clients}

    def round(self, state, clients, rng):
        yield Ask(self.local_round, {i: {} for i in clients}, empty_reply)
        return {f"{i}/turns": state[f"{i}/turns"] + 1 for i in clients}


@dataclass(frozen=True)
class Lopsided(FedAvg):
    """Its batched task does another thing for a batch."""

    @task(Sends.UPDATE, batched=True)
    def local_round(self, client: AnyClient, theta: Tensors) -> Tensors:
        found = super().local_round(client, theta)
        return found if isinstance(client, Client) else {n: 1.1 * t for n, t in found.items()}


@dataclass(frozen=True)
class Undeclared(FedAvg):
    """Its task sends a trained model, and is not declared to."""

    @task()
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        return super().local_round(client, theta)


@dataclass(frozen=True)
class Scoring(Undeclared):
    """Its task sends a trained model, and is declared to send scores."""

    @task(Sends.SCORES)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        return FedAvg.local_round(self, client, theta)


@dataclass(frozen=True)
class Formless(FedAvg):
    """Its task sends back less than the form of what was sent."""

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        return dict(itertools.islice(super().local_round(client, theta).items(), 1))


@dataclass(frozen=True)
class Remembering(FedAvg):
    """Its clients remember the round in Python rather than in their state."""

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        turns = self.__dict__.setdefault("turns", {})
        turns[client.id] = 1 if client.round == 0 else turns.get(client.id, 0) + 1
        return {n: t + turns[client.id] for n, t in super().local_round(client, theta).items()}


@dataclass(frozen=True)
class Expecting(FedAvg):
    """Its server counts on a reply of everybody."""

    def round(self, state, clients, rng):
        replies = yield Ask(self.local_round, self.download(state, clients))
        return {n: sum(replies[i][n] for i in clients) / len(clients) for n in state}


@dataclass(frozen=True)
class Idle(FedAvg):
    """Its clients train nothing, and say that they did."""

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        client.load(theta)
        return client.read(GENERALIST)


@dataclass(frozen=True)
class Homeless(FedAvg):
    """No kind of model has its layout."""

    def layout(self, position: int, base: Layout) -> Layout:
        class Other(Layout):
            pass

        return Other(specialists=1)


@pytest.mark.parametrize(
    ("method", "said", "clause"),
    [
        (
            Leaking,
            "specialist.*does not leave client 'ann'",
            "only tensors of a role in `shared` leave",
        ),
        (
            Growing,
            "a different form than at the start: 'best' was None",
            "state of the form that `init` gave",
        ),
        (
            Doubling,
            "a different form than at the start: .*float64",
            "state of the form that `init` gave",
        ),
        (
            Chancy,
            "two runs with the same seed, server's state: .* differ",
            "all random numbers come from `rng`",
        ),
        (
            Dropping,
            "in which 'cleo' took no part.*the server's state lost .'cleo/turns'",
            "not drawn keeps its state",
        ),
        (
            Lopsided,
            "in one batch, server's state: .* differs from that of one client at a time",
            "marked `batched`",
        ),
        (
            Undeclared,
            "local_round is declared to send private, but a model that came goes back",
            "declared Sends.UPDATE",
        ),
        (
            Scoring,
            "local_round is declared to send scores, but a model that came goes back",
            "declared Sends.UPDATE",
        ),
        (Formless, "TensorError: .*reply of client 'ann' to local_round", "`Ask.reply_spec` says"),
        (
            Remembering,
            "the engines inprocess and loopback, server's state: .* differ",
            "everything needed later is in the states",
        ),
        (Expecting, "KeyError: 'ben'", "clients that fail are missing from the replies"),
        (Idle, "it sends back what came, unchanged", "declared Sends.UPDATE"),
    ],
)
def test_a_wrong_method_is_refused_with_what_is_wrong_and_the_clause(
    method: type[Method], said: str, clause: str
) -> None:
    with pytest.raises(AssertionError, match=f"(?s){said}.*\n  The contract: .*{clause}"):
        check_method(method, **QUICK)


def test_a_right_method_passes_and_says_what_was_checked() -> None:
    why = "its server takes half a step"
    checked = check_method(Half, leave_out={"one_client_alone": why}, **QUICK)
    assert checked.method == Half(**QUICK)
    assert {world: len(held) for world, held in checked.held.items()} == {
        "language": len(CHECKS) - 2,
        "pictures": len(CHECKS) - 1,
    }
    assert checked.left_out["language, one_client_alone"] == why
    assert "Half keeps the contract, on inprocess, loopback, flower" in str(checked)
    assert f"does not apply: pictures, one_client_alone: {why}" in str(checked)


def test_by_its_name_and_as_it_is() -> None:
    checked = check_method("ddome", pool=3)
    assert (checked.method.rounds, checked.method.local_steps) == (2, 2)
    assert checked.held.keys() == {"pictures"}
    assert "whole networks" in checked.left_out["language"]
    assert check_method(checked.method, rounds=1).method.rounds == 1


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no check 'speed'"):
        check_method("fedavg", leave_out={"speed": "slow"})
    with pytest.raises(ValueError, match="nothing"):
        check_method("fedavg", nothing=1)
    with pytest.raises(Refused, match="no kind of model has the layout of Homeless"):
        check_method(Homeless, **QUICK)


def test_it_needs_no_pytest() -> None:
    code = "import sys; sys.modules['pytest'] = None; from coterie.testing import check_method; "
    code += "check_method('pretrained')"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_suite_imports_no_shipped_method() -> None:
    for file in Path(testing.__file__).parent.glob("*.py"):
        imports = re.findall(r"^\s*(?:from|import) (coterie\.methods\.\w+)", file.read_text(), re.M)
        imports = [name for name in imports if name != "coterie.methods.section"]
        assert not imports, f"{file.name} imports {imports}"
