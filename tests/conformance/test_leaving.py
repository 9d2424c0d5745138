"""What leaves a device that protects its owner: of every task of every method what is masked,
noised, or a few scores; else nothing.
"""

from dataclasses import dataclass, replace

import pytest
import torch

from coterie.aggregation.privacy import Privacy
from coterie.client.client import Client
from coterie.client.interfaces import AnyClient
from coterie.client.outbound import Outbound
from coterie.core.errors import ClientError, Refused
from coterie.core.protocol import Ask, ClientId, Replies, Sends, declared, find_task, task
from coterie.core.roles import ROUTER, SPECIALIST
from coterie.core.tensors import Named, Tensors
from coterie.engines import InProcess, Loopback
from coterie.methods import METHODS, Method
from coterie.methods.cobo import CoBo
from coterie.methods.comigs import CoMiGS
from coterie.methods.fedavg import FedAvg

from .test_forms import exchanges
from .test_methods import Run, World, case, language, method, pictures, world  # noqa: F401 - the fixtures

NOISY = Outbound(0, Privacy(where="local", clip=1.0, noise=1.0), secret=True, key=bytes(range(32)))
SECURE = Outbound(0, secret=True, secure=True)
FEW = 64  # numbers
Spoken = tuple[
    str, ClientId, Tensors, Tensors
]  # task, client, what was sent, what a device that protects nothing sends back


def spoken(method: Method, world: World) -> list[Spoken]:
    """All that clients are asked and answer: in a run, in an adaptation, and when they are
    scored and keep their models.
    """
    found = [
        (a.name, i, before[i], dict(replies[i]))
        for a, replies, before in exchanges(method, world)
        for i in replies
    ]
    run = Run(method, world).rounds(method.rounds)
    for function in (method.score, method.score_test, method.keep):
        synced = function.__name__ == "score_test" and not method.forgetful
        models = method.download(run.server, run.clients) if synced else run.models()
        sent = {i: {name: t.clone() for name, t in models[i].items()} for i in run.clients}
        replies: Replies = run.engine.answer(Ask(function, sent), method.rounds, -1)
        found += [(function.__name__, i, sent[i], dict(replies[i])) for i in replies]
    return found


@pytest.fixture(scope="module")
def heard() -> dict[tuple[str, str], list[Spoken]]:
    """Every case's, once."""
    return {}


@pytest.fixture
def said_by_clients(
    heard: dict[tuple[str, str], list[Spoken]],
    case: tuple[str, str],
    method: Method,
    world: World,
) -> list[Spoken]:
    if case not in heard:
        heard[case] = spoken(method, world)
    return heard[case]


def leaves(door: Outbound, method: Method, said: Spoken) -> Tensors | None:
    """What a device lets out, whatever number the server gave the exchange; None: it refuses."""
    name, client, sent, reply = said
    out = []
    for phase in (0, -1, -2):
        try:
            out.append(door(find_task(method, name), client, sent, dict(reply), 0, phase))
        except Refused:
            out.append(None)
    assert all((one is None) == (out[0] is None) for one in out)
    return out[0]


def few(reply: Named) -> bool:
    return sum(t.numel() for t in reply.values()) <= FEW


def test_with_local_privacy_nothing_leaves_but_noise_and_a_few_scores(
    method: Method,
    said_by_clients: list[Spoken],
) -> None:
    for said in said_by_clients:
        name, _, sent, reply = said
        out = leaves(NOISY, method, said)
        if out is None:
            continue
        large = {
            key
            for key, t in reply.items()
            if t.is_floating_point() and key in sent and not few({key: t})
        }
        assert all(not torch.equal(out[key], reply[key]) for key in large), name
        untouched = {key: t for key, t in out.items() if torch.equal(t, reply[key])}
        assert few(untouched), name  # a model cannot hide in what has no noise
        if declared(find_task(method, name)) is Sends.UPDATE:
            assert all(
                not torch.equal(t, reply[key])
                for key, t in out.items()
                if t.is_floating_point() and t.numel()
            ), name


def test_with_secure_aggregation_nothing_leaves_in_the_clear_but_a_few_scores(
    method: Method,
    said_by_clients: list[Spoken],
) -> None:
    for said in said_by_clients:
        out = leaves(SECURE, method, said)
        assert out is None or few(out), said[0]
        assert out is None or not any(
            t.dtype == torch.float32 and t.numel() > 1 for t in out.values()
        ), said[0]


def test_what_goes_under_masks_is_an_update(method: Method, said_by_clients: list[Spoken]) -> None:
    for said in said_by_clients:
        out = leaves(replace(SECURE, masked=True), method, said)
        if out is not None and not few(out):
            sent = said[2]
            assert all(
                out[key].shape == sent[key].shape for key in out if out[key].is_floating_point()
            )


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
        ({"w": torch.zeros(3), "other": torch.zeros(3)}, "'other'.*no update"),
        ({"w": torch.zeros(4)}, "'w'.*no update"),
        ({"w": torch.zeros(3).double()}, "'w'.*no update"),
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
        ("CoMiGSCoBo", "midpoint_gradients"),
        ("FC", "descend"),
        ("FC", "gradients"),
        ("FDLoRA", "local_round"),
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
            "specialist.*does not leave client 'ann': it is of the specialist, and Leaking "
            "shares generalist",
        ),
        ("flat", "'specialist' does not leave client 'ann': it is of the specialist"),
        ("prefixed", "'change/.*does not leave client 'ann': it is of the specialist"),
        (
            "renamed",
            "'x' does not leave client 'ann': it is .* numbers that are no tensor of a shared role",
        ),
    ],
)
def test_what_a_method_does_not_share_is_refused_where_it_leaves(
    leak: str,
    why: str,
    kind: type[Loopback],
    language: World,
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
