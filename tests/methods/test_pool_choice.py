"""DDOME whose clients choose their experts themselves: as if the server chose, by one sum; what one
client can move in that sum, an attack on it, and what is refused.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from test_ddome import Run, algorithm_1, newcomer

from coterie.aggregation.means import Mean
from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Privacy, central
from coterie.core.errors import RecipeError
from coterie.core.protocol import Replies, trains
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.methods.cobo import CoBo
from coterie.methods.ddome import DDOME
from coterie.methods.fedmix import FedMix
from coterie.methods.pool_choice import WEIGHT
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run
from coterie.testing import Run as Pairs
from coterie.testing.run import pictures_of

UNIFORM = Mean(weighting="uniform")
CLIP = 0.1
SMALL = [
    *("compare_with=[]", "samples=false", "participation={}", "data.clients=12"),
    *("method.rounds=3", "method.aggregation.weighting=uniform", "evaluate_every=3"),
    *("model.common.pretraining.epochs=2", "method.choice=device"),
]


def by_devices(anchors: bool = True, top_k: int = 2, rounds: int = 3) -> DDOME:
    return DDOME(
        rounds=rounds,
        local_steps=3,
        pool=4,
        top_k=top_k,
        anchors=anchors,
        aggregation=UNIFORM,
        choice="device",
    )


@pytest.mark.parametrize("anchors", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
def test_it_is_algorithm_1_by_one_sum(tiny_pictures: Federation, anchors: bool, top_k: int) -> None:
    """Each expert is the mean over those that had it, though all that is used is everybody's."""
    method = by_devices(anchors, top_k)
    run = Run(method, tiny_pictures)
    expected = algorithm_1(run.server, tiny_pictures, method, [run.clients] * 3)
    run.rounds(3)
    assert {ask.name for ask in run.asks} == {"choose_and_train"}
    for name in expected:
        torch.testing.assert_close(run.server[name], expected[name], rtol=1e-4, atol=1e-6)


def test_it_needs_only_everybodys_mean(tiny_pictures: Federation) -> None:
    """If every client is said to have sent the mean of all, the server comes to the same state."""
    states = []
    for secure in (False, True):
        run = Run(by_devices(), tiny_pictures)
        answer = run.answer

        def summed(ask, phase, answer=answer, secure=secure) -> Replies:  # type: ignore[no-untyped-def]
            replies = answer(ask, phase)
            if not (secure and trains(ask.task)):
                return replies
            mean = {
                n: torch.stack([reply[n] for reply in replies.values()]).mean(dim=0)
                for n in replies["ann"]
            }
            return dict.fromkeys(replies, mean)

        run.answer = summed  # type: ignore[method-assign]
        states.append(run.rounds(2).server)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)


def test_no_message_tells_by_its_form_who_has_which_expert(tiny_pictures: Federation) -> None:
    run = Run(by_devices(), newcomer(tiny_pictures)).rounds(2)
    for ask, replies in zip(run.asks, run.replies, strict=True):
        sent = next(iter(ask.to.values()))
        for i, reply in replies.items():
            assert ask.to[i] is sent
            assert {n: (t.shape, t.dtype) for n, t in reply.items()} == {
                n: (t.shape, t.dtype) for n, t in sent.items()
            }
            assert all(t.is_floating_point() for t in reply.values())
    asked = len(run.asks)
    tensors = run.adapted("cleo")
    assert len(run.asks) == asked  # a newcomer sends nothing
    # nor does its score say which experts its samples went to
    score = run.scores(tensors)["cleo"]
    assert score.keys() == {"valid", "test"}
    # and is what it has where the server chooses
    served = Run(replace(run.method, choice="server"), run.federation)
    served.server = run.server
    expected = served.scores(served.adapted("cleo"))["cleo"]
    for split in ("valid", "test"):
        torch.testing.assert_close(score[split], expected[split])


# What one client can move


def updates(federation: Federation) -> dict[str, Tensors]:
    """What each client changes in a first round, in float64."""
    run = Run(replace(by_devices(rounds=1), local_steps=30), federation).rounds(1)
    (ask,), (replies,) = run.asks, run.replies
    return {
        i: {n: t.double() - ask.to[i][n].double() for n, t in reply.items()}
        for i, reply in replies.items()
    }


def flat(named: Mapping[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([named[name].flatten() for name in sorted(named)]).numpy()


def cut(vector: np.ndarray) -> np.ndarray:
    return vector / max(1.0, float(np.linalg.norm(vector)) / CLIP)


def cut_by_parts(update: Tensors) -> np.ndarray:
    """The mistake that looks alike: the norm holds for each expert and for the gate."""
    return flat({name: torch.from_numpy(cut(t.flatten().numpy())) for name, t in update.items()})


def test_one_client_moves_the_sum_by_c_whichever_experts_it_had(
    tiny_pictures: Federation,
) -> None:
    """Also if other data would have made it choose others: then by 2C, as of two vectors."""
    federation = replace(tiny_pictures, anchors=())
    cleo = federation.clients["cleo"]
    other = replace(federation, clients=dict(federation.clients) | {"ann": replace(cleo, id="ann")})
    ours, theirs = updates(federation), updates(other)
    assert not torch.equal(ours["ann"]["held"], theirs["ann"]["held"]), "they chose alike"
    for i in ours:
        vector = flat(ours[i])
        assert np.linalg.norm(vector) > CLIP  # or the test could not fail
        assert np.linalg.norm(cut(vector)) <= CLIP * (1 + 1e-12)
        assert np.linalg.norm(cut_by_parts(ours[i])) > 1.5 * CLIP
        assert int((ours[i]["held"] == WEIGHT).sum()) == 3  # two experts, and the gate
    total = sum(cut(flat(u)) for u in ours.values())
    without = sum(cut(flat(u)) for i, u in ours.items() if i != "ann")
    replaced = sum(cut(flat(u)) for u in theirs.values())
    assert np.linalg.norm(total - without) <= CLIP * (1 + 1e-9)
    # the others' updates are of their own data alone
    assert np.linalg.norm(total - replaced) <= 2 * CLIP * (1 + 1e-9)
    assert len(ours) == 3


def released(updates: Mapping[str, Tensors], z: float, seed: int) -> np.ndarray:
    """The sum that a server with central privacy lets out of these updates, by its own code."""
    zero = {name: torch.zeros_like(t) for name, t in next(iter(updates.values())).items()}
    privacy = Privacy(where="central", clip=CLIP, noise=z, delta=1e-5)
    noisy, _ = central(
        updates, dict.fromkeys(updates, zero), privacy, CLIP, Source.seeded(seed, "tests")
    )
    return np.sum([flat(reply) for reply in noisy.values()], axis=0)


def test_an_attack_that_knows_all_other_clients(tiny_pictures: Federation) -> None:
    """It asks whether ann took part, knows everybody's update, and takes the best test there is.
    Without noise it is always right; with noise of 2 C it gains what the accountant says, and no
    more; if each expert were clipped by itself it would gain more than that.
    """
    ours = updates(replace(tiny_pictures, anchors=()))
    none = {name: torch.zeros_like(t) for name, t in ours["ann"].items()}
    others = sum(cut(flat(u)) for i, u in ours.items() if i != "ann")

    def advantage(z: float, hers: np.ndarray, draws: int = 600) -> float:
        """How often it is right where she took part, less how often where she did not."""
        right = [0, 0]
        for here in (0, 1):
            for seed in range(draws):
                at = released(ours | {"ann": ours["ann"] if here else none}, z, 2 * seed + here)
                # the same noise, if she was clipped in another way
                at = at + here * (hers - cut(flat(ours["ann"])))
                right[here] += float((at - others) @ hers) > hers @ hers / 2
        return (right[1] - right[0]) / draws

    hers = cut(flat(ours["ann"]))
    assert advantage(1e-4, hers, draws=3) == 1.0
    promised = 2 * stats.norm.cdf(1 / (2 * 2.0)) - 1  # of mu = C / (z C), z = 2
    error = 3 * np.sqrt(2 * 0.25 / 600)
    measured = advantage(2.0, hers)
    assert promised - error < measured < promised + error
    assert advantage(2.0, cut_by_parts(ours["ann"])) > promised + error


@pytest.mark.parametrize("where", ["central", "local"])
def test_a_run_spends_one_gaussian_mechanism_a_round(where: str, tmp_path: Path) -> None:
    """As no scores are sent: epsilon is that of T exchanges in closed form."""
    pytest.importorskip("opacus")
    noise = f"privacy={{where: {where}, clip: 1.0, noise: 4.0, delta: 1.0e-5}}"
    result = run(load("ddome-digits", [*SMALL, noise]), tmp_path / "run")[-1].to_json()
    mu = np.sqrt(3) / (4.0 if where == "central" else 2.0)
    epsilon = result["privacy"]["epsilon"]
    delta = stats.norm.cdf(-epsilon / mu + mu / 2)
    delta -= np.exp(epsilon) * stats.norm.cdf(-epsilon / mu - mu / 2)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    scores = next(iter(result["clients"].values()))
    assert "experts" not in scores
    assert result["evaluations"][-1].get("choices") is None


# What is refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["method.choice=server"], r"privacy: ddome has a server that sees scores, .*choice: dev"),
        (["method.aggregation.weighting=samples"], r"privacy: ddome has a server that sees"),
        (["method.warmup=2"], r"method.warmup: needs a server that sees who has which expert"),
        (["method.load=1.0"], r"method.load: needs a server that sees who has which expert"),
    ],
)
def test_what_cannot_be_private_is_refused_by_name(settings: list[str], message: str) -> None:
    pytest.importorskip("opacus")
    privacy = "privacy={where: central, clip: 1.0, noise: 4.0, delta: 1.0e-5}"
    with pytest.raises(RecipeError, match=message):
        prepare(load("ddome-digits", [*SMALL, privacy, *settings]))


def test_sums_under_masks_are_possible_with_noise_and_without() -> None:
    noise = "privacy={where: local, clip: 1.0, noise: 4.0, delta: 1.0e-5}"
    for settings in ([], [noise]):
        recipe = load("ddome-digits", [*SMALL, "engine=flower", "secure=true", *settings])
        assert prepare(recipe).method.needs_only_mean


def test_a_choice_on_the_device_needs_the_uniform_mean() -> None:
    with pytest.raises(RecipeError, match=r"method.choice: device needs the uniform mean"):
        prepare(load("ddome-digits", [*SMALL, "method.aggregation={rule: median}"]))


def test_a_client_of_cobo_learns_the_models_that_it_is_compared_with(
    tiny_pictures: Federation,
) -> None:
    """From the midpoint that it is sent and its own model: no protocol for the inner product of
    gradients would hide them.
    """
    run = Pairs(CoBo(rounds=3, pairs="all", local_steps=3), pictures_of(tiny_pictures)).rounds(2)
    before = dict(run.server)
    run.asks.clear()
    run.rounds(1)
    compared = next(ask for ask in run.asks if ask.name == "midpoint_gradients")
    ann = before["ann/generalist"]
    for other in ("ben", "cleo"):
        guess = 2 * compared.to["ann"][other] - ann
        assert not torch.allclose(before[f"{other}/generalist"], ann, atol=1e-3)
        torch.testing.assert_close(guess, before[f"{other}/generalist"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("field", ["secure=true", "privacy={where: central, clip: 1, noise: 1}"])
def test_cobo_is_refused_with_the_reason(field: str) -> None:
    with pytest.raises(RecipeError, match=r"cobo sends each client sums of single clients' mod"):
        prepare(load("cobo-digits", [field]))


def test_fedmix_sends_all_of_everything_and_needs_only_the_mean() -> None:
    assert FedMix(aggregation=UNIFORM).needs_only_mean
    assert not FedMix().needs_only_mean
    assert not DDOME(aggregation=UNIFORM).needs_only_mean
