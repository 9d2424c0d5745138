"""What leaves a device that protects its owner: of every task of every method what is masked,
noised, or a few scores; else nothing.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from coterie.client.blueprint import AnyClient
from coterie.client.client import Client
from coterie.client.outbound import Outbound
from coterie.core.errors import ClientError, Refused
from coterie.core.protocol import Ask, Sends, declared, find_task, task
from coterie.core.roles import ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.engines.inprocess import InProcess, Loopback
from coterie.methods import METHODS
from coterie.methods.cobo import CoBo
from coterie.methods.comigs import CoMiGS
from coterie.methods.fedavg import FedAvg
from coterie.testing import Run, World
from coterie.testing.suite import NOISY, SECURE


@dataclass(frozen=True)
class Forgetful(FedAvg):
    """A new method whose author has declared nothing: as of any method, its device must not send
    what it trained.
    """

    @task()
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        return super().local_round(client, theta)

    @task(Sends.SCORES)
    def score(self, client: Client, tensors: Tensors) -> Tensors:
        return client.read("generalist")  # type: ignore[arg-type]

    @task(Sends.NOTHING)
    def keep(self, client: Client, tensors: Tensors) -> Tensors:
        return {"a": torch.zeros(1)}


@pytest.mark.parametrize(
    "door", [NOISY, SECURE, replace(SECURE, masked=True)], ids=["noisy", "secure", "masked"]
)
def test_a_new_method_without_declarations_or_with_false_ones_fails_safe(door: Outbound) -> None:
    method = Forgetful()
    model = {"w": torch.randn(30, 30)}
    for name, reply in (
        ("local_round", model),
        ("score", model),
        ("score", {"w": torch.randn(2)}),
        ("keep", {"a": torch.zeros(1)}),
    ):
        with pytest.raises(Refused, match=name):
            door(find_task(method, name), "ann", model, dict(reply), 0, 0)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"w": torch.zeros(3), "other": torch.zeros(3)}, "'other'.*not an update"),
        ({"w": torch.zeros(4)}, "'w'.*not an update"),
        ({"w": torch.zeros(3).double()}, "'w'.*not an update"),
        ({"w": torch.zeros(3), "n": torch.zeros(3, dtype=torch.int64)}, "'n'.*counts"),
        ({"w": torch.zeros(3), **{f"n{k}": torch.tensor(k) for k in range(3)}}, "'n0'.*counts"),
    ],
)
def test_an_update_has_the_form_of_what_came(reply: Tensors, said: str) -> None:
    for door in (NOISY, replace(SECURE, masked=True)):
        with pytest.raises(Refused, match=said):
            door(FedAvg().local_round, "ann", {"w": torch.zeros(3)}, dict(reply), 0, 0)


def test_every_task_says_what_it_sends_or_never_leaves_a_device_that_protects() -> None:
    private = {
        (entry.method.__name__, name)
        for entry in METHODS.values()
        for name in dir(entry.method)
        if hasattr(found := getattr(entry.method, name), "__coterie_sends__")
        and declared(found) is Sends.PRIVATE
    }
    assert private == {
        ("CoBo", "descend"),
        ("CoBo", "midpoint_gradients"),
        ("FC", "descend"),
        ("FC", "gradients"),
        ("FDLoRA", "local_round"),
        ("FedAMoLE", "embed"),
        ("FedFomo", "local_round"),
        ("FedLEASE", "upload"),
        ("IFCA", "local_round"),
    }


@dataclass(frozen=True)
class Leaking(CoMiGS):
    """A method whose author sends more than it shares."""

    leak: str = ""

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        specialists, flat, router = (
            client.read(SPECIALIST),
            client.flat(SPECIALIST),
            client.flat(ROUTER),
        )
        (name, tensor), *_ = specialists.items()
        leaks = {
            "named": specialists,
            "flat": {"specialist": flat},
            "prefixed": {f"change/{name}": tensor},
            "renamed": {"x": router},
        }
        return super().local_round(client, theta_g) | leaks.get(self.leak, {})


@pytest.mark.parametrize("kind", [InProcess, Loopback])
@pytest.mark.parametrize(
    ("leak", "why"),
    [
        (
            "named",
            "specialist.*does not leave client 'ann': its role is specialist, and Leaking "
            "shares generalist",
        ),
        ("flat", "'specialist' does not leave client 'ann': its role is specialist"),
        ("prefixed", "'change/.*does not leave client 'ann': its role is specialist"),
        (
            "renamed",
            "'x' does not leave client 'ann': its .* numbers are not a tensor of a shared role",
        ),
    ],
)
def test_what_a_method_does_not_share_is_refused_where_it_leaves(
    leak: str, why: str, kind: type[Loopback], language: World
) -> None:
    run = Run(Leaking(local_steps=1, leak=leak), language)
    with pytest.raises(ClientError, match=why):
        kind(run.site, run.method).answer(Ask(run.method.local_round, {"ann": run.server}), 0, 0)
    honest = Leaking(local_steps=1)
    assert (
        kind(run.site, honest)
        .answer(Ask(honest.local_round, {"ann": run.server}), 0, 0)["ann"]
        .keys()
        == run.server.keys()
    )


@dataclass(frozen=True)
class LeakingTogether(FedAvg):
    """As `Leaking`, of clients in one batch."""

    @task(Sends.UPDATE, batched=True)
    def local_round(self, client: AnyClient, theta: Tensors) -> Tensors:
        return super().local_round(client, theta) | {"x": client.flat()[..., :-1]}


def test_of_a_batch_of_clients_nothing_else_leaves_either(pictures: World) -> None:
    run = Run(LeakingTogether(local_steps=1), pictures)
    with pytest.raises(Refused, match="'x' does not leave client 'ann'"):
        InProcess(run.site, run.method).answer(
            Ask(run.method.local_round, dict.fromkeys(run.clients, run.server)), 0, 0
        )


def test_a_client_may_be_called_as_a_role_is(pictures: World) -> None:
    data = pictures.federation.clients
    world = pictures.among(
        {"router": data["ann"], "expert": data["ben"], "specialist": data["cleo"]}
    )
    run = Run(CoBo(rounds=1, pairs="all"), world).rounds(1)
    assert run.server["router/generalist"].isfinite().all()
