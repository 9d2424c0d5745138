"""Clients that compute at once in threads: as one after the other, to the bit."""

import threading
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.cases import PICTURES, method_of

from coterie.client.client import Client
from coterie.core.errors import ClientError
from coterie.core.tensors import Tensors
from coterie.engines.engine import Listener
from coterie.engines.inprocess import InProcess
from coterie.engines.states import States
from coterie.methods.fedavg import FedAvg
from coterie.models.backbone import Backbone
from coterie.testing import Run, World
from coterie.testing import run as worlds
from coterie.testing.run import require_same_run

# one or more of every family: plain, routed, pools, several layouts, pairs, several models a client
LANGUAGE = (
    "fedavg",
    "comigs-1gxs",
    "fdlora",
    "hetlora",
    "ifca",
    "ditto",
)


class Hears(Listener):
    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, object]]] = []

    def measured(self, client: str, metrics: dict[str, object]) -> None:
        self.heard.append((client, metrics))


def run_of(method: Any, world: World, at_once: int, kept: States | None = None) -> Run:
    """A run in which so many clients compute at once, whose listener is kept."""
    found = Run(method, world)
    found.engine = InProcess(found.site, method, Hears(), kept or States(), at_once)
    return found


def same_at_once(method: Any, world: World, at_once: int = 3) -> Run:
    """Compare two rounds of clients at once with two of one after the other; return the former."""
    single, several = (run_of(method, world, most).rounds(2) for most in (1, at_once))
    require_same_run(single, several, "at once")
    assert single.engine.listener.heard == several.engine.listener.heard  # type: ignore[attr-defined]
    return several


@pytest.fixture(scope="module")
def language() -> World:
    return worlds.language()


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models(name: str, language: World) -> None:
    same_at_once(method_of(name), language)


@pytest.mark.parametrize("name", PICTURES)
def test_classifiers(name: str) -> None:
    same_at_once(method_of(name), worlds.pictures().one_by_one, at_once=2)


def test_dropout_draws_as_if_one_after_the_other(
    language: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.testing.run.BASE", replace(worlds.BASE, dropout=0.3))
    before = torch.get_rng_state()
    several = same_at_once(method_of("comigs-1g1s"), language)
    assert several.engine._drawing == {"local_round"}  # type: ignore[attr-defined]
    assert torch.equal(torch.get_rng_state(), before)


def test_states_in_files(language: World, tmp_path: Path) -> None:
    method = method_of("comigs-1g1s")
    single = run_of(method, language, 1).rounds(2)
    several = run_of(method, language, 2, States(tmp_path, most=0)).rounds(2)
    require_same_run(single, several, "in files")


def trained_by(
    monkeypatch: pytest.MonkeyPatch, task: Callable[[Client], None], language: World
) -> Run:
    """A run of three clients of FedAvg, two at once, which do something else before they train."""
    own = FedAvg.local_round

    def local_round(self: FedAvg, client: Client, sent: Tensors) -> Tensors:
        task(client)
        return own(self, client, sent)

    local_round.__dict__ |= own.__dict__
    monkeypatch.setattr(FedAvg, "local_round", local_round)
    return run_of(method_of("fedavg"), language, 2)


def test_two_at_once_are_heard_in_the_order_asked(
    language: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, most = set[str](), 0

    def task(client: Client) -> None:
        nonlocal most
        at_work.add(client.id)
        most = max(most, len(at_work))
        time.sleep(0.2 if client.id == "ann" else 0.01)
        at_work.remove(client.id)

    found = trained_by(monkeypatch, task, language).rounds(1)
    assert [i for i, _ in found.engine.listener.heard] == ["ann", "ben", "cleo"]  # type: ignore[attr-defined]
    assert most == 2


def test_the_first_error_in_the_order_asked_is_raised(
    language: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = []

    def task(client: Client) -> None:
        began.append(client.id)
        time.sleep(0.1 if client.id == "ann" else 0)
        raise ValueError(f"no {client.id}")

    found = trained_by(monkeypatch, task, language)
    with pytest.raises(ClientError, match="'ann', task local_round, round 1: ValueError: no ann"):
        found.rounds(1)
    assert sorted(began) == ["ann", "ben"]  # nobody was begun after one had failed
    assert found.engine.listener.heard == []  # type: ignore[attr-defined]


def test_an_interruption_stops_all_at_their_next_batch(
    language: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Event()

    def task(client: Client) -> None:
        if client.id == "ben":
            began.set()
            while True:
                client.draw(client.train)

    def interrupted(client: str, metrics: object) -> None:
        began.wait()
        raise KeyboardInterrupt

    found = trained_by(monkeypatch, task, language)
    found.engine.listener.measured = interrupted  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        found.rounds(1)
    assert not [t for t in threading.enumerate() if t.name.startswith("client")]


def test_a_twin_of_a_base_shares_its_weights_and_nothing_that_is_attached(
    language: World,
) -> None:
    model: Any = language.build(worlds.BASE)
    base: Backbone = model.backbone
    twin = deepcopy(base)
    for own, other in zip(base.model.parameters(), twin.model.parameters(), strict=True):
        assert own is other
    ids = torch.arange(8)[None]
    plain = twin.logits(ids)
    for parameter in model.adapter.parameters():
        parameter.data.fill_(0.1)
    with base.using(model.adapter):
        assert not torch.equal(base.logits(ids), plain)
        assert torch.equal(twin.logits(ids), plain)
