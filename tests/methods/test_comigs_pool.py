"""CoMiGS with a pool of generalists, against its formulas written out naively; what travels, who
gets what, and users never seen before.
"""

import gzip
import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import mixture as oracle
from torch import Tensor, nn

from coterie.aggregation.assignment import assign_experts
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import AdamW, Training
from coterie.client.site import Site
from coterie.core.errors import ModelError
from coterie.core.protocol import Ask, Replies, State, drive
from coterie.core.roles import EXPERT, GATE, GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.data.corpora import Multilingual
from coterie.data.federation import Federation
from coterie.engines import InProcess
from coterie.methods.comigs import CoMiGS
from coterie.methods.comigs_pool import CHOSEN, CoMiGSPool
from coterie.methods.pools import SCORES
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import PersonalModel

TRAINING = Training(batch_size=4, experts=AdamW(lr=5e-3, schedule="cosine"), routers=AdamW(lr=3e-3))
METHOD = CoMiGSPool(
    rounds=2,
    local_steps=2,
    router_every=1,
    router_steps=1,
    pool=4,
    generalists=2,
    specialists=1,
    top_k=2,
)
RANK = 2


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


class World:
    """A method on some clients, round by round; `said` has every message of it."""

    def __init__(self, method: CoMiGS, backbone: Backbone, federation: Federation) -> None:
        self.method, self.clients = method, tuple(federation.clients)
        layouts = {i: method.layout(0, Layout(rank=RANK)) for i in federation.everyone}
        self.site = Site(
            partial(LanguageModel, backbone),
            layouts,
            federation.everyone,
            TRAINING,
            5,
            method.total_iterations,
        )
        self.blueprint = Blueprint(partial(Adapter, backbone.architecture), layouts, 5)
        self.server: State = method.init(self.blueprint, self.clients)
        self.engine, self.t = InProcess(self.site, method), 0
        self.said: list[tuple[str, str, str, Tensors]] = []

    def answer(self, ask: Ask, phase: int) -> Replies:
        replies = self.engine.answer(ask, self.t, phase)
        for way, messages in (("down", ask.to), ("up", replies)):
            self.said += [(ask.name, way, i, dict(message)) for i, message in messages.items()]
        return replies

    def round(self, clients: tuple[str, ...] = ()) -> "World":
        self.server = drive(
            self.method.round(self.server, clients or self.clients, torch.Generator()), self.answer
        )
        self.t += 1
        return self

    def client(self, id: str) -> Client:
        return self.site.client(id, dict(self.engine.states()[id]))


@pytest.fixture
def world(backbone: Backbone, tiny_federation: Federation) -> World:
    return World(METHOD, backbone, tiny_federation)


def members(message: Tensors) -> list[int]:
    return sorted(int(name.split("/")[1]) for name in message if name.startswith("expert/"))


def trained(world: World) -> tuple[Client, LanguageModel]:
    """A client whose tensors are zero nowhere."""
    client = world.round().client("ann")
    torch.manual_seed(1)
    for key, values in client.state.items():
        if key.startswith("parameters/"):
            values.normal_(std=0.3)
    assert isinstance(client.model, LanguageModel)
    return client, client.model


def naive_loss(model: LanguageModel, base: Path, text: Tensor, batch: Tensor) -> Tensor:
    """The mean cross-entropy of a whole Llama whose MLPs are the paper's mixture, with log(K p_j)
    on the generalists' logits.

    text: (N, C + 1) all of the client's training windows that are whole; the tokens behind the last
    whole one come as one more.
    """
    from transformers import LlamaForCausalLM

    whole = LlamaForCausalLM.from_pretrained(base)
    parameters = dict(model.adapter.named_parameters())
    with torch.no_grad():
        windows = [whole.model(rows).last_hidden_state.mean(dim=1) for rows in text]
    hidden = (torch.cat(windows) @ parameters["gate.first"].T + parameters["gate.bias"]).clamp(
        min=0
    )
    scores = (hidden @ parameters["gate.last"].T).softmax(dim=1).sum(dim=0)
    own = torch.stack([scores[m] for m in model.numbers])
    lean = (2 * own / own.sum()).log()
    gamma = model.layout.alpha / RANK**0.5
    for i, layer in enumerate(whole.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            linear, prefix = getattr(layer.self_attn, name), f"blocks.{i}.attention.{name}"
            if f"{prefix}.A" in parameters:
                linear.weight.data += (
                    gamma * (parameters[f"{prefix}.B"][0] @ parameters[f"{prefix}.A"][0]).detach()
                )
        names = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
        layers = {name: (getattr(layer.mlp, theirs).weight, None) for name, theirs in names.items()}
        experts = [
            {
                name: (parameters[f"{prefix}.{name}.A"][j], parameters[f"{prefix}.{name}.B"][j])
                for name in names
            }
            for prefix, j in (
                (f"blocks.{i}.mlp.generalist", 0),
                (f"blocks.{i}.mlp.generalist", 1),
                (f"blocks.{i}.mlp.specialist", 0),
            )
        ]

        def forward(
            x: Tensor, i: int = i, layers: dict = layers, experts: list = experts
        ) -> Tensor:
            tokens = x.flatten(0, 1)
            logits = tokens @ parameters[f"blocks.{i}.mlp.router.weight"].T + torch.cat(
                [lean, torch.zeros(1)]
            )
            weights = oracle.topk_weights(logits, 2)
            return oracle.mixture(
                tokens, layers, experts, weights, gamma, nn.functional.silu
            ).view_as(x)

        layer.mlp.forward = forward
    logits = whole(batch[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def test_router_and_gate_learn_by_the_gradient_of_one_loss(world: World, tiny_base: Path) -> None:
    """Uniform balance is off: its gradient is that of the router alone, which tests/models has."""
    client, model = trained(world)
    model.layout = replace(model.layout, balance="none")
    batch, text = client.draw(client.valid), list(client.data.train.scoring(99))
    assert sum(map(len, text)) > 2
    wrt = [p for role in (ROUTER, GATE, EXPERT) for p in model.parameters_by_role()[role].values()]
    wanted = naive_loss(model, tiny_base, text, batch)  # type: ignore[arg-type]
    for micro_batch in (None, 1):
        found, stats = model.gradient(batch, wrt, micro_batch)
        torch.testing.assert_close(stats["loss"], wanted.detach(), rtol=1e-5, atol=1e-5)
        for a, b in zip(found, torch.autograd.grad(wanted, wrt, retain_graph=True), strict=True):
            assert (a - b).norm() < 1e-3 * b.norm()
    assert all(router.bias is None for router in model.adapter.routers())


def test_the_gate_learns_what_was_dealt(world: World) -> None:
    """The gradient of cross-entropy by hand; and after some steps the gate itself chooses what
    the client has.
    """
    client, model = trained(world)
    embeddings = client.embeddings(client.data.train)
    gate = model.parameters_by_role()[GATE]
    first, bias, last = (p.detach().clone().requires_grad_() for p in gate.values())
    p = ((embeddings @ first.T + bias).relu() @ last.T).softmax(dim=1)
    loss = -sum((row[model.numbers[0]] + row[model.numbers[1]]).log() for row in p) / len(p)
    for found, wanted in zip(
        model.towards().values(), torch.autograd.grad(loss, (first, bias, last)), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    for _ in range(20):
        METHOD.upper_step(client)
    assert (
        client.model.affinity(embeddings).topk(2).indices.sort().values.tolist()
        == model.numbers.tolist()
    )  # type: ignore[attr-defined]


def test_one_generalist_of_a_pool_of_one_is_comigs_1g1s(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    pool = World(replace(METHOD, pool=1, generalists=1, rounds=3), backbone, tiny_federation)
    plain = World(
        CoMiGS(rounds=3, local_steps=2, router_every=1, router_steps=1), backbone, tiny_federation
    )
    stacks = plain.site.model("ann").parameters_by_role()[GENERALIST]
    experts = pool.site.model("ann").parameters_by_role()[EXPERT]
    assert experts.keys() | pool.blueprint.read(GENERALIST).keys() == stacks.keys()
    values = torch.split(pool.server["expert/0"], [t.numel() for t in experts.values()])
    plain.server |= {name: t.view_as(stacks[name]) for name, t in zip(experts, values, strict=True)}
    for _ in range(3):
        pool.round()
        plain.round()
    for name in stacks:
        if name in pool.server:
            assert torch.equal(pool.server[name], plain.server[name])
    found = torch.cat([plain.server[name].flatten() for name in experts])
    assert torch.equal(pool.server["expert/0"], found)
    for i in pool.clients:
        for role in (SPECIALIST, ROUTER):
            assert torch.equal(
                pool.engine.states()[i][f"parameters/{role}"],
                plain.engine.states()[i][f"parameters/{role}"],
            )


def test_only_k_generalists_are_in_a_message_and_others_stay_bit_for_bit(world: World) -> None:
    world.round(("ann",))
    before = world.server
    world.said.clear()
    world.round(("ben",))
    own = before.keys() - {name for name in before if name.startswith((EXPERT, CHOSEN))}
    for task, way, i, message in world.said:
        assert i == "ben"
        if task == "score_generalists":
            assert message.keys() == ({GATE} if way == "down" else {SCORES})
            continue
        assert len(members(message)) == 2
        assert message.keys() == own | {f"expert/{m}" for m in members(message)}
    touched = world.server[f"{CHOSEN}/ben"].tolist()
    for m in range(4):
        assert torch.equal(before[f"expert/{m}"], world.server[f"expert/{m}"]) == (m not in touched)


def test_each_generalist_is_the_mean_of_those_who_had_it(world: World) -> None:
    world.round()
    replies = {
        i: message for task, way, i, message in world.said if (task, way) == ("local_round", "up")
    }
    assert members(world.server) == [0, 1, 2, 3]
    for name in [name for name in world.server if not name.startswith(CHOSEN)]:
        held = [reply[name].double() for reply in replies.values() if name in reply]
        if held:
            torch.testing.assert_close(
                world.server[name].double(), sum(held) / len(held), rtol=1e-6, atol=1e-7
            )


def test_scores_are_those_of_the_clients_own_training_text(world: World) -> None:
    world.round()
    scored = {
        i: message[SCORES]
        for task, way, i, message in world.said
        if (task, way) == ("score_generalists", "up")
    }
    gates = {
        name: p.detach() for name, p in world.client("ann").model.parameters_by_role()[GATE].items()
    }
    initial = torch.split(world.blueprint.flat(GATE), [p.numel() for p in gates.values()])
    first, bias, last = (v.view_as(p) for v, p in zip(initial, gates.values(), strict=True))
    for i in world.clients:
        logits = (world.engine.states()[i]["embeddings/train"] @ first.T + bias).relu() @ last.T
        torch.testing.assert_close(
            scored[i], logits.softmax(dim=1).mean(dim=0).double(), rtol=1e-5, atol=1e-6
        )


def unseen(federation: Federation) -> Federation:
    seen = {i: federation.clients[i] for i in ("ann", "cleo")}
    return Federation(seen, "", unseen={"new": {"ben": federation.clients["ben"]}})


def test_a_new_user_sends_scores_only_and_is_scored_without_any_training(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    world = World(METHOD, backbone, unseen(tiny_federation))
    world.round().round()
    world.said.clear()
    found = drive(METHOD.adapt(world.server, ("ben",)), world.answer)
    assert [(task, way, i, sorted(message)) for task, way, i, message in world.said] == [
        ("score_generalists", "down", "ben", [GATE]),
        ("score_generalists", "up", "ben", [SCORES]),
    ]
    scores = world.said[1][-1][SCORES]
    assert members(found["ben"]) == sorted(sorted(range(4), key=lambda m: -float(scores[m]))[:2])
    before = {
        name: t.clone()
        for name, t in world.engine.states()["ben"].items()
        if name.startswith("parameters/")
    }
    score = world.engine.answer(Ask(METHOD.score, found), 2, -1)["ben"]
    assert score["test"][1] == len(tiny_federation.clients["ben"].test) - 1
    assert all(torch.equal(t, world.engine.states()["ben"][name]) for name, t in before.items())
    assert "iteration" not in world.engine.states()["ben"]


def test_without_a_pool_a_new_user_gets_the_mean(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    world = World(CoMiGS(rounds=1, local_steps=2), backbone, unseen(tiny_federation)).round()
    found = drive(world.method.adapt(world.server, ("ben",)), world.answer)["ben"]
    client = world.site.client("ben", {})
    client.load(found)
    assert found == world.server


def test_a_personal_model_needs_no_gate(world: World, backbone: Backbone, tmp_path: Path) -> None:
    """What is kept scores as the client did: routers have what the gate says as a bias; so has
    the fast way of one token at a time.
    """
    from coterie.personal import About, save

    client, model = trained(world)
    layout, tensors = model.settled()
    assert not any(name.startswith(GATE) for name in tensors)
    save(tmp_path, About("ann", "", layout, 8, "comigs", "test", 1, 0), tensors)
    kept = PersonalModel.load(tmp_path, backbone=backbone)
    torch.testing.assert_close(
        kept.language.score(client.batches(client.test)), client.score(client.test)
    )
    ids = client.draw(client.test)[:, :8]
    for rows in (ids, ids[:1, :2]):
        with torch.no_grad():
            torch.testing.assert_close(kept(rows).logits, model(rows), rtol=1e-4, atol=1e-4)


def test_a_client_that_the_server_did_not_know_is_served_by_the_gate(world: World) -> None:
    known, clients = ("ann", "ben"), world.clients
    world.server = METHOD.init(world.blueprint, known)
    world.round(known)
    world.server = METHOD.members(world.server, clients)
    assert members(METHOD.download(world.server, clients)["cleo"]) == [0, 1]  # not scored yet
    world.round(known)
    world.said.clear()
    world.round()
    sent = {(task, way): message for task, way, i, message in world.said if i == "cleo"}
    assert members(sent["local_round", "down"]) == world.server["chosen/cleo"].tolist()
    assert sent["score_generalists", "up"].keys() == {SCORES}


def test_a_generalist_that_was_exchanged_has_no_old_moments(world: World) -> None:
    world.round()
    state = world.engine.states()["ann"]
    other = [m for m in range(4) if m not in world.server[f"{CHOSEN}/ann"].tolist()]
    for choice, kept in ((world.server[f"{CHOSEN}/ann"], True), (torch.tensor(other), False)):
        steps = int(state[f"optimiser/{EXPERT}/step"])
        theta = METHOD.download(world.server | {f"{CHOSEN}/ann": choice}, ["ann"])["ann"]
        world.engine.answer(Ask(METHOD.local_round, {"ann": theta}), 1, 1)
        assert int(state[f"optimiser/{EXPERT}/step"]) == (steps if kept else 0) + METHOD.local_steps


def rows(m: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(st.integers(1, 50), min_size=m, max_size=m)
    return st.lists(row, min_size=1, max_size=4).map(lambda found: torch.tensor(found).double())


@given(st.integers(1, 4).flatmap(rows), st.integers(1, 3), st.sampled_from([1.0, 1.5]))
def test_nothing_better_could_be_dealt(wishes: Tensor, count: int, load: float) -> None:
    """Against all possible choices, one by one."""
    n, m = wishes.shape
    count = min(count, m)
    limit = -(-int(load * n * count * 2) // (2 * m))
    options = list(itertools.combinations(range(m), count))
    totals = [
        sum(float(wishes[i, list(own)].sum()) for i, own in enumerate(choice))
        for choice in itertools.product(options, repeat=n)
        if all(sum(j in own for own in choice) <= limit for j in range(m))
    ]
    dealt = assign_experts(wishes, count, load).tolist()
    assert all(len(set(own)) == count for own in dealt)
    assert max(sum(j in own for own in dealt) for j in range(m)) <= limit
    assert sum(float(wishes[i, own].sum()) for i, own in enumerate(dealt)) == pytest.approx(
        max(totals)
    )


def test_like_users_get_the_same_generalists_however_small_the_differences() -> None:
    scores = 0.25 + 1e-4 * torch.tensor([[3.0, 2.0, 1.0, 0.0], [3.0, 1.0, 2.0, 0.0]]).repeat(2, 1)
    assert assign_experts(scores, 2, None).tolist() == [[0, 1], [0, 2], [0, 1], [0, 2]]
    dealt = assign_experts(scores, 2, 1).tolist()
    assert torch.bincount(torch.tensor(dealt).flatten()).tolist() == [2, 2, 2, 2]
    assert [wanted in own for wanted, own in zip((1, 2, 1, 2), dealt, strict=True)] == [True] * 4


def test_what_cannot_be_is_refused(world: World) -> None:
    with pytest.raises(ModelError, match="members must be 0, or as many as generalists"):
        replace(METHOD, generalists=5).layout(0, Layout())
    with pytest.raises(ModelError, match="lacks the generalists that the gate chose"):
        world.site.client("ann", {}).score(world.site.data["ann"].test)
    with pytest.raises(ValueError, match="2 of 2 users of each kind leaves none to train"):
        Multilingual(users=2, unseen=2)


def test_users_of_one_kind_share_its_documents_and_the_last_are_new(
    tiny_base: Path, tmp_path: Path
) -> None:
    from coterie.models.architecture import tokenizer

    texts = {
        language: [
            f"{language} on the {topic}, number {k}."
            for k in range(60)
            for topic in ("sea", "land")
        ]
        for language in ("de", "fr")
    }
    lines = [
        json.dumps({"language": language, "text": text})
        for language, own in texts.items()
        for text in own
    ]
    (tmp_path / "multilingual").mkdir()
    (tmp_path / "multilingual/train.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    topics = {topic: {"de": topic, "fr": topic} for topic in ("sea", "land")}
    section = Multilingual(root=tmp_path, languages=("de", "fr"), topics=topics, users=3, unseen=1)
    federation = section.load(tokenizer(tiny_base), 8, tmp_path)
    kinds = [f"{language}-{topic}" for language in ("de", "fr") for topic in topics]
    assert list(federation.clients) == [f"{kind}-{k}" for kind in kinds for k in (1, 2)]
    assert list(federation.unseen) == ["new"]
    assert list(federation.unseen["new"]) == [f"{kind}-3" for kind in kinds]
    documents = [text for own in section.source().read().values() for part in own for text in part]
    assert sorted(documents) == sorted(text for own in texts.values() for text in own)
    everybody = section.model_copy(update={"unseen": 0}).load(tokenizer(tiny_base), 8, tmp_path)
    for i, data in everybody.clients.items():
        assert torch.equal(data.train.batch(0, 9), federation.everyone[i].train.batch(0, 9))
