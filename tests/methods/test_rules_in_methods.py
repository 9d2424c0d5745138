"""Methods that combine what clients send do it by their rule, around what was sent. They are
sent dictionaries: no engine, no model.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from coterie.aggregation.means import SAMPLES, Combining, Mean
from coterie.aggregation.robust import ClippedMean, Krum, Median, MultiKrum, TrimmedMean
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, derive_seed, drive, trains
from coterie.core.tensors import Tensors
from coterie.methods import METHODS
from coterie.methods.base import Method
from coterie.methods.oracle import Oracle
from coterie.methods.parts import OfParts
from coterie.methods.section import build_method
from coterie.methods.templates import Aggregating

IDS = ("ann", "ben", "cleo", "dan", "eve")
CLUSTERS = {"ann": 0, "ben": 0, "cleo": 1, "dan": 1, "eve": 1}
NAMES = [
    name
    for name, entry in METHODS.items()
    if issubclass(entry.method, Aggregating)
    and "aggregation" not in entry.fixed
    # each of its parts is a method in this list, with its rule: tests/methods/test_comigs_auto.py
    and not issubclass(entry.method, OfParts)
]


def tensor(*key: object, size: int = 6) -> torch.Tensor:
    return torch.randn(
        size, generator=torch.Generator().manual_seed(derive_seed(0, *map(str, key)))
    )


def holding(k: int) -> torch.Tensor:
    """The experts that the k-th of five clients holds of 12 in two blocks: two hold each, and the
    last nobody.
    """
    return ((torch.arange(24).view(12, 2) + k) % 5 < 2) & (torch.arange(12)[:, None] < 11)


def start(name: str, **fields: Any) -> tuple[Method, Tensors]:
    """A method of 6 rounds, and a state that its server could have."""
    fields = {"rounds": 6, **({"pool": 3} if name == "ddome" else {}), **fields}
    method = build_method({"name": name, **fields})
    w = {"w/A": tensor("A"), "w/B": tensor("B", size=4)}
    ints = torch.tensor
    alone = {f"mean/{n}": t for n, t in w.items()} | {f"{i}/alone": ints(False) for i in IDS}
    alone["round"] = ints(0)
    states: Mapping[str, Tensors] = {
        "ditto": {"generalist": tensor("w")},
        "ifca": {f"centre/{k}": tensor(k) for k in range(2)}
        | {f"choice/{i}": ints(-1) for i in IDS},
        "fdlora": w
        | {f"momentum/{n}": torch.zeros_like(t) for n, t in w.items()}
        | {"round": ints(0)},
        "scaffold": w
        | {f"control/{n}": tensor("c", n, size=len(t)) for n, t in w.items()}
        | {"clients": ints(len(IDS))},
        "oracle": {f"mean-{k}/{n}": t + k for n, t in w.items() for k in (0, 1)}
        | {f"cluster/{i}": ints(k) for i, k in CLUSTERS.items()},
        "finetuned-fedavg": alone,
        "fedbabu": alone | {"head/w/C": tensor("C")},
        **dict.fromkeys(("feddpa-f", "feddpa-t"), alone),
        **{name: {"generalist": tensor("w")} for name in ("apfl", "pfedme")},
        "fedlease": {role: tensor(role) for role in ("generalist", "specialist", "router")}
        | {f"{kind}/{c}": tensor(kind, c) for kind in ("expert", "router") for c in range(4)}
        | {f"{i}/cluster": ints(k) for i, k in CLUSTERS.items()}
        | {"sizes": ints([3, 3]), "round": ints(3)},
        "fedamole": {role: tensor(role) for role in ("generalist", "router")}
        | {f"expert/{n}": tensor(n) for n in range(24)}  # of two blocks
        | {f"{i}/held": holding(k) for k, i in enumerate(IDS)}
        | {"embeddings": torch.zeros(2, 9, 3).double()},
        "ddome": {f"expert/{m}": tensor(m) for m in range(3)}
        | {"gate": tensor("gate"), "anchor/eve": ints(1)},
        "fedmix": {f"expert/{m}": tensor(m) for m in range(2)} | {"gate": tensor("gate")},
        "ensemble": {f"expert/{m}": tensor(m) for m in range(2)},
    }
    return method, dict(states.get(name, w))


class Exchange:
    """Answers as clients would: of the form asked for, near what was sent; and remembers."""

    def __init__(self, attacker: ClientId | None = None) -> None:
        self.asks: list[Ask] = []
        self.replies: list[dict[ClientId, Tensors]] = []
        self.attacker = attacker

    def __call__(self, ask: Ask, phase: int) -> Replies:
        found = {
            i: {n: self.value(n, t, i, len(self.asks)) for n, t in ask.reply_spec(sent).items()}
            for i, sent in ask.to.items()
        }
        for i, reply in found.items():
            ask.check(i, reply)
        self.asks.append(ask)
        self.replies.append(found)
        return found

    def value(self, name: str, form: torch.Tensor, client: ClientId, number: int) -> torch.Tensor:
        if name == SAMPLES:
            return torch.tensor(1 + IDS.index(client))
        if name == "choice":
            return torch.tensor(CLUSTERS[client])
        move = tensor(name, client, number, size=form.numel()).to(form.dtype).view(form.shape)
        if form.is_meta:  # a score: only its form is known
            return move.exp()
        return form + (1e6 if client == self.attacker else 0.1) * move

    @property
    def trained(self) -> tuple[Ask, dict[ClientId, Tensors]]:
        """The last exchange in which models came and went."""
        last = max(k for k, ask in enumerate(self.asks) if ask.name != "embed")
        return self.asks[last], self.replies[last]


def columns(replies: Mapping[ClientId, Tensors], name: str) -> np.ndarray[Any, Any]:
    """What all clients sent that have a tensor of that name."""
    return np.array([reply[name].numpy() for reply in replies.values() if name in reply])


def one_round(name: str, exchange: Exchange, **fields: Any) -> tuple[Tensors, Tensors]:
    """The state before and after one round; of FDLoRA, one of its second stage with an outer
    step of 1.
    """
    method, state = start(
        name,
        **({"alone": 0.2, "outer_lr": 1.0, "outer_momentum": 0.0} if name == "fdlora" else {}),
        **fields,
    )
    if name == "fdlora":
        state["round"] = torch.tensor(1)
    after = drive(
        method.round({n: t.clone() for n, t in state.items()}, IDS, torch.Generator()), exchange
    )
    assert after.keys() == state.keys()
    return state, after


def expected(
    name: str, replies: Mapping[ClientId, Tensors], before: Tensors, of: Callable[[Any], Any]
) -> dict[str, Any]:
    """What the server's state should be where it is trained, tensor by tensor."""
    if name == "ifca":
        groups = {k: {i: r for i, r in replies.items() if int(r["choice"]) == k} for k in (0, 1)}
        return {f"centre/{k}": of(columns(group, "generalist")) for k, group in groups.items()}
    if name == "oracle":
        groups = {k: {i: r for i, r in replies.items() if CLUSTERS[i] == k} for k in (0, 1)}
        return {
            f"mean-{k}/{n}": of(columns(group, n))
            for k, group in groups.items()
            for n in ("w/A", "w/B")
        }
    if name == "fedlease":
        groups = {k: {i: r for i, r in replies.items() if CLUSTERS[i] == k} for k in (0, 1)}
        return {
            f"{kind}/{k}": of(columns(group, sent))
            for k, group in groups.items()
            for kind, sent in (("expert", "specialist"), ("router", "router"))
        } | {"generalist": of(columns(replies, "generalist"))}
    if name in ("finetuned-fedavg", "fedbabu", "feddpa-f", "feddpa-t"):
        return {f"mean/{n}": of(columns(replies, n)) for n in ("w/A", "w/B")}
    if name == "scaffold":
        control = {
            f"control/{n}": before[f"control/{n}"].numpy() + of(columns(replies, f"change/{n}"))
            for n in ("w/A", "w/B")
        }
        return {n: of(columns(replies, n)) for n in ("w/A", "w/B")} | control
    names = {
        n
        for reply in replies.values()
        for n, t in reply.items()
        if n in before and t.is_floating_point()
    }
    return {n: of(columns(replies, n)) for n in names}


GROUPED = ("ifca", "oracle", "ddome", "fedlease", "fedamole")  # too few clients in a group
CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES if name != "comigs"]


@pytest.mark.parametrize(("name", "fields"), CASES)
@pytest.mark.parametrize(
    "rule", [Mean(), Median(), TrimmedMean(trim=0.4)], ids=["mean", "median", "trimmed mean"]
)
def test_what_clients_send_is_combined_by_the_rule(
    name: str, fields: dict[str, Any], rule: Combining
) -> None:
    exchange = Exchange()
    before, after = one_round(name, exchange, aggregation=rule.model_dump(), **fields)
    of = (
        np.mean if isinstance(rule, Mean) else np.median
    )  # of at most five clients two at each end are cut: the median is left
    few = np.array([np.nan])  # what too few have sent moves nothing
    wanted = expected(
        name,
        exchange.trained[1],
        before,
        lambda rows: of(rows, axis=0) if len(rows) >= rule.fewest else few,
    )
    assert wanted
    for key, value in wanted.items():
        right = before[key].numpy() if value is few else value
        np.testing.assert_allclose(after[key].numpy(), right, atol=1e-6, err_msg=key)
    assert not any(SAMPLES in reply for reply in exchange.trained[1].values())


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_by_samples_clients_are_asked_how_many_they_have(name: str, fields: dict[str, Any]) -> None:
    exchange = Exchange()
    before, after = one_round(
        name, exchange, aggregation={"rule": "mean", "weighting": "samples"}, **fields
    )
    ask, replies = exchange.trained
    for key in set(expected(name, replies, before, len)) - {"control/w/A", "control/w/B"}:
        groups = {"ifca": ("centre/",), "oracle": ("mean-",), "fedlease": ("expert/", "router/")}
        group = groups.get(name, ())
        held = {
            i: r
            for i, r in replies.items()
            if not key.startswith(group)
            or key.startswith(tuple(f"{g}{CLUSTERS[i]}" for g in group))
        }
        own = {
            "ifca": "generalist",
            "oracle": key.partition("/")[2],
            "finetuned-fedavg": key.partition("/")[2],
            **{of: key.partition("/")[2] for of in ("fedbabu", "feddpa-f", "feddpa-t")},
            "fedlease": key.partition("/")[0].replace("expert", "specialist"),
        }.get(name, key)
        held = {i: r for i, r in held.items() if own in r}
        wanted = np.average(columns(held, own), axis=0, weights=[1 + IDS.index(i) for i in held])
        np.testing.assert_allclose(after[key].numpy(), wanted, atol=1e-6, err_msg=key)
    assert all(int(reply[SAMPLES]) >= 1 for reply in replies.values())
    with pytest.raises(Exception, match=SAMPLES):
        ask.check("ann", {n: t for n, t in replies["ann"].items() if n != SAMPLES})


@pytest.mark.parametrize(("name", "fields"), CASES)
def test_updates_are_of_what_was_sent(name: str, fields: dict[str, Any]) -> None:
    """With updates clipped to nothing, nothing moves, whatever the clients sent: the rule knows
    what they were sent.
    """
    exchange = Exchange(attacker="cleo")
    before, after = one_round(
        name, exchange, aggregation={"rule": "clipped-mean", "norm": 1e-9}, **fields
    )
    for key in expected(name, exchange.trained[1], before, len):
        np.testing.assert_allclose(after[key].numpy(), before[key].numpy(), atol=1e-5, err_msg=key)


@pytest.mark.parametrize(
    ("name", "fields"),
    [case for case in CASES if case[0] not in GROUPED],
)
@pytest.mark.parametrize(
    "rule",
    [Median(), Krum(attackers=1), MultiKrum(attackers=1), ClippedMean()],
    ids=lambda rule: rule.rule,
)
def test_one_attacker_of_five_does_little(
    name: str, fields: dict[str, Any], rule: Combining
) -> None:
    moved = []
    for aggregation in (rule, Mean()):
        exchange = Exchange(attacker="cleo")
        before, after = one_round(name, exchange, aggregation=aggregation.model_dump(), **fields)
        moved.append(
            max(
                float((after[key] - before[key]).abs().max())
                for key in expected(name, exchange.trained[1], before, len)
            )
        )
    assert moved[0] < 5
    assert moved[1] > 1e4


def test_fdlora_combines_the_personal_loras_of_its_first_stage_too() -> None:
    method, state = start("fdlora", aggregation={"rule": "median"}, rounds=5, alone=0.2)
    exchange = Exchange(attacker="ben")
    after = drive(method.round(state, IDS, torch.Generator()), exchange)
    for name in ("w/A", "w/B"):
        np.testing.assert_allclose(
            after[name].numpy(), np.median(columns(exchange.replies[0], name), axis=0), atol=1e-6
        )


@pytest.mark.parametrize("name", NAMES)
def test_where_nobody_answers_the_state_stays(name: str) -> None:
    method, state = start(name)
    after = drive(method.round(state, IDS, torch.Generator()), lambda ask, phase: {})
    assert {n: t for n, t in after.items() if n != "round"}.keys() == {
        n for n in state if n != "round"
    }
    for key in state.keys() - {"round"}:
        assert torch.equal(after[key], state[key])


def test_of_whom_the_server_needs_only_the_sum() -> None:
    """Everything of which secure aggregation can be asked, by name."""
    sums = {name for name, entry in METHODS.items() if build_method({"name": name}).needs_only_mean}
    assert sums == {
        *(
            "fedavg",
            "fedprox",
            "pfedmoe",
            "fedavg-moe",
            "fedavg-moe-tr",
            "fedsa-lora",
            "ffa-lora",
            "fedsr",
            "fedadg",
        ),
        *(
            "finetuned-fedavg",
            "ditto",
            *("fedper", "fedrep", "lg-fedavg", "fedbn", "fedbabu", "apfl", "pfedme"),
            *("per-fedavg", "fedala", "fedproto", "fedalt", "feddpa-f", "feddpa-t"),
            "comigs",
            "comigs-1g1s",
            "comigs-2g",
            "comigs-2s",
            "comigs-1gxs",
            "comigs-tr",
            "comigs-published",
            "comigs-auto",
            "interpolation",
        ),
    }
    for name in sums - {"interpolation", "fedalt"}:  # parts have their own rules; a fixed mean
        for rule in ({"rule": "median"}, {"weighting": "samples"}):
            assert not build_method({"name": name, "aggregation": rule}).needs_only_mean


@pytest.mark.parametrize(
    "name", sorted(name for name in NAMES if build_method({"name": name}).needs_only_mean)
)
def test_where_only_the_sum_is_needed_everybodys_mean_does(name: str) -> None:
    """If every client is said to have sent the mean of all, the server comes to the same state."""
    states = []
    for secret in (False, True):
        exchange = Exchange()

        def answer(
            ask: Ask, phase: int, exchange: Exchange = exchange, secret: bool = secret
        ) -> Replies:
            replies = exchange(ask, phase)
            if not (secret and trains(ask.task)):
                return replies
            mean = {
                n: torch.stack([reply[n] for reply in replies.values()]).mean(dim=0)
                for n in replies["ann"]
            }
            return dict.fromkeys(replies, mean)

        method, state = start(name)
        states.append(drive(method.round(state, IDS, torch.Generator()), answer))
    for key, value in states[0].items():
        torch.testing.assert_close(value, states[1][key], rtol=1e-5, atol=1e-6)


class Known:
    """What a server knows of the data."""

    fewest = None

    def __init__(self, ids: Sequence[ClientId]) -> None:
        self.clusters, self.anchors = {i: CLUSTERS[i] for i in ids}, ()


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("scaffold", "oracle")])
def test_too_few_clients_for_krum_are_refused(name: str) -> None:
    method = build_method({"name": name, "aggregation": {"rule": "krum", "attackers": 1}})
    method.check(Known(IDS), IDS, None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"method\.aggregation\.attackers: 1 among 4"):
        method.check(Known(IDS[:4]), IDS[:4], None)  # type: ignore[arg-type]


def test_of_the_oracle_every_cluster_must_be_large_enough() -> None:
    method = Oracle(aggregation=Krum(attackers=0))
    method.check(Known(IDS[2:]), IDS[2:], None)  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match=r"method\.aggregation\.attackers: 0 among 2"):
        method.check(Known(IDS), IDS, None)  # type: ignore[arg-type]
