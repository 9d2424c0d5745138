"""Secure aggregation and a device that sends noise in the place of its masked update: nothing tells
which one it is, until sums without half of the suspects do.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import as_json
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st
from test_secagg import (  # noqa: F401 - the fixture
    SENT,
    Ear,
    InProcess,
    Pair,
    as_in_a_run,
    assert_is_mean,
    engine,
    with_masked,
)
from test_secagg_cohort import notes

from coterie.aggregation.secure import FEWEST
from coterie.core.callback import Callback
from coterie.core.protocol import Ask
from coterie.engines.flower.engine import Suspects
from coterie.runs import run
from coterie.runs.backends import DeviceBackend
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits
from coterie.runs.recipes.recipe import load


def noise(values: list[np.ndarray]) -> list[np.ndarray]:
    return [values[0], np.random.default_rng(0).integers(0, 2**32, values[1].shape)]


def test_who_sends_noise_in_every_round_is_found_and_the_others_have_their_sums() -> None:
    clients, spoilt, found = 8, 0, 0
    flower, ear = engine(InProcess(clients, tamper=with_masked(noise)))
    for round in range(12):
        ear.reasons.clear()
        ask = Ask(Pair().train, {f"c{k}": SENT for k in range(clients)})
        replies = dict(flower.answer(ask, round, 0))
        spoilt += flower.spoilt
        if replies:
            places = [int(name[1:]) for name in replies]
            assert 0 not in places
            assert_is_mean(replies, places, len(places))
        found = found + 1 if set(ear.reasons) == {"c0"} else 0
        assert bool(replies) is not flower.spoilt
    assert spoilt <= 1 + math.log2(clients)
    assert found >= 3
    assert "it was in every sum" in ear.reasons["c0"]


def test_of_fewer_than_six_nobody_is_left_out() -> None:
    """The difference of two sums would be of fewer clients than a sum may be."""
    flower, ear = engine(InProcess(5, tamper=with_masked(noise)))
    for round in range(2):
        assert flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(5)}), round, 0) == {}
        assert not flower.spoilt
        assert all("out of range" in reason for reason in ear.reasons.values())


@given(
    st.integers(6, 40),
    st.data(),
    st.lists(st.booleans(), min_size=60, max_size=60),
)
def test_one_liar_spoils_few_sums_and_no_other_is_taken_for_it(
    clients: int, data: Any, moods: list[bool]
) -> None:
    """Whenever it chooses to lie, and whoever is there."""
    names = [f"c{k:02}" for k in range(clients)]
    liar = data.draw(st.sampled_from(names))
    suspects, spoilt, absences = Suspects(), 0, dict.fromkeys(names, 0)
    for lies in moods:
        left_out = suspects.left_out(names)
        suspects.turn += 1
        assert not left_out or len(left_out) >= FEWEST or left_out == [liar]
        assert len(set(left_out)) == len(left_out)
        summed = [name for name in names if name not in left_out]
        assert len(summed) >= FEWEST
        absences |= {name: absences[name] + 1 for name in left_out}
        if lies and liar in summed:
            spoilt += 1
            suspects.learn(summed)
        assert not suspects.names or liar in suspects.names
    assert spoilt <= 1 + math.ceil(math.log2(clients)) + math.log2(len(moods))
    assert all(times <= 0.8 * len(moods) for name, times in absences.items() if name != liar)


def test_one_mistake_is_forgiven() -> None:
    names, suspects, left_out = [f"c{k}" for k in range(7)], Suspects(), []
    suspects.learn(names)
    for _ in range(4):
        left_out.append(set(suspects.left_out(names)))
        suspects.turn += 1
    assert left_out[0] | left_out[1] == set(names)
    assert left_out[2:] == [set(), set()]


def test_a_liar_that_is_left_out_at_last_may_not_make_a_sum_too_small() -> None:
    suspects = Suspects(names=["a"])
    assert suspects.left_out(["a", "b", "c", "d"]) == ["a"]
    assert suspects.left_out(["a", "b", "c"]) == []
    assert suspects.left_out(["b", "c", "d"]) == []


IDS = tuple(f"c{cluster}-{k}" for cluster in range(2) for k in range(3))


class Devices(InProcess):
    """Real devices with limits, one of which sends noise."""

    def __init__(self, home: Path) -> None:
        def handle(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
            client = IDS[node["partition-id"]]
            return Device(home / client, client, limits=Limits(secure=True)).answer(text, body)

        def tamper(node: int, stage: str, reply: Message) -> Message:
            return with_masked(noise)(node, stage, reply)

        super().__init__(len(IDS), handle=handle, tamper=tamper)


def test_a_run_goes_on_without_who_spoils_its_sums(tmp_path: Path) -> None:
    """No device answers twice: what is repeated is a later round, with other updates."""
    settings = (
        "method.name=fedavg",
        "method.local_steps=2",
        "compare_with=[]",
        "data.clusters=2",
        "data.clients_per_cluster=3",
        "method.rounds=9",
        "engine=flower",
        "secure=true",
        "checkpoint_every=9",
    )
    recipe, folder = load("cobo-digits", list(settings)), tmp_path / "run"
    backend = DeviceBackend.connect(Devices(tmp_path), recipe, len(IDS), 5.0, Ear())
    result = as_json(run.run(recipe, folder, reporter=Callback(), backend=backend))[-1]
    dropped = [note for note in notes(folder) if "is dropped" in note]
    assert result["rounds"] == 9
    assert 1 <= len(dropped) <= 4
    assert result["lost"]["c0-0"] == 9
    assert all(result["lost"].get(name, 0) < 9 for name in IDS[1:])


@pytest.mark.parametrize("names", [[], ["c1", "c3"]])
def test_suspects_outlive_a_server(names: list[str]) -> None:
    first, _ = engine(InProcess(3))
    first._suspects.names = names
    second, _ = engine(InProcess(3))
    second.restore({}, first.memo())
    assert second._suspects.names == names
