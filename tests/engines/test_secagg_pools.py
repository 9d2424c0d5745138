"""Pools of experts under secure aggregation: the state is that of the plain sum, and what the
server receives no longer tells who has which expert.
"""

from typing import Any

import numpy as np
import pytest
import torch
from test_secagg import InProcess, as_in_a_run, engine, masked_values  # noqa: F401 - the fixture

from coterie.aggregation import secure
from coterie.aggregation.means import Mean
from coterie.core.protocol import Ask, Replies, drive
from coterie.core.tensors import Tensors, from_bytes, to_bytes
from coterie.data.federation import Federation
from coterie.engines.messages import Member, Reply, Request, parsed
from coterie.methods import Method
from coterie.methods.ddome import DDOME
from coterie.methods.fedmix import FedMix
from coterie.testing import Run
from coterie.testing.run import World, pictures_of

UNIFORM = Mean(weighting="uniform")
DEVICES = DDOME(rounds=2, local_steps=2, pool=4, choice="device", aggregation=UNIFORM)


@pytest.fixture(scope="module")
def world(tiny_pictures: Federation) -> World:
    return pictures_of(tiny_pictures)


def secured(method: Method, world: World, rounds: int) -> tuple[Run, InProcess]:
    """A run whose clients train behind Flower's secure aggregation, and its grid."""
    run, round = Run(method, world), [0]

    def device(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
        request: Request = parsed(Request, text)
        name = list(world.federation.clients)[node["partition-id"]]
        if request.action == "hello":
            member = Member(client=name, position=node["partition-id"], windows=(1, 1, 1))
            return Reply(client=name, member=member).model_dump_json(), b""
        assert request.masked
        sent = from_bytes(body)
        ask = Ask(getattr(run.method, request.task), {name: sent})
        (reply,) = run.engine.answer(ask, request.round, request.phase).values()
        said = Reply(
            client=name, task=request.task, round=request.round, number=request.number
        ).model_dump_json()
        return said, to_bytes({secure.UPDATE: secure.update(sent, reply)})

    grid = InProcess(len(world.federation.clients), handle=device)
    flower, _ = engine(grid)

    def answer(ask: Ask, phase: int) -> Replies:
        return flower.answer(ask, round[0], phase)

    for round[0] in range(rounds):
        state = run.method.round(run.server, run.clients, torch.Generator())
        run.server = drive(state, answer)
        run.round += 1
    return run, grid


@pytest.mark.parametrize(
    "method",
    [DEVICES, FedMix(rounds=2, local_steps=2, aggregation=UNIFORM)],
    ids=["ddome", "fedmix"],
)
def test_the_secure_sum_is_the_plain_one(method: Method, world: World) -> None:
    """To the step of the levels, for each share of an expert's holders (a third of all at least)
    and each round, and the last places of float32.
    """
    plain = Run(method, world).rounds(2)
    hidden, _ = secured(method, world, 2)
    for name, tensor in plain.server.items():
        error = (hidden.server[name].double() - tensor.double()).abs().max()
        assert error <= 2 * 3 * secure.step(3) + 2e-6, name
    start = Run(method, world).server
    moved = max(float((plain.server[n] - t.double()).abs().max()) for n, t in start.items())
    assert moved > 1e-3  # training moves it by far more than that


def zeros_of(values: np.ndarray, sent: Tensors) -> list[int]:
    """What a curious server takes for the experts that a client did not choose: those whose
    values did not move.
    """
    start, still = 0, []
    for name in sorted(sent):
        size = sent[name].numel()
        if name.startswith("expert/") and not values[start : start + size].any():
            still.append(int(name.removeprefix("expert/")))
        start += size
    return still


def test_who_has_which_expert_is_seen_without_masks_and_not_with_them(world: World) -> None:
    run = Run(DEVICES, world)
    asks: list[Ask] = []

    def answer(ask: Ask, phase: int) -> Replies:
        asks.append(ask)
        return run.answer(ask, phase)

    drive(run.method.round(run.server, run.clients, torch.Generator()), answer)
    (ask,) = asks
    replies = run.engine.answer(ask, 0, 0)
    for i, reply in replies.items():
        update = secure.update(ask.to[i], reply).numpy()
        chosen = np.flatnonzero(reply["held"][:-1].numpy()).tolist()
        assert zeros_of(update, ask.to[i]) == [m for m in range(4) if m not in chosen]
        assert len(chosen) == (1 if i == world.federation.anchors[0] else 2)
    _, grid = secured(DEVICES, world, 1)
    for values in masked_values(grid).values():
        assert zeros_of(values, next(iter(ask.to.values()))) == []
        # what did not move is masked as all the rest: uniform modulo 2^32
        mean = (values / secure.MODULUS).mean()
        assert abs(mean - 0.5) < 5 / np.sqrt(12 * len(values))
