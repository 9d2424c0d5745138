"""Who is on a grid: clients that come, go, come back, say nothing, or say that they are somebody
else.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from figures import as_json
from flwr.app import Message
from nodes import (
    Nodes,
    Notes,
    altered,
    content,
    devices,
    execution,
    finished,
    on_device,
    parts,
    silent,
)

from coterie.core.callback import Callback
from coterie.core.errors import ClientError, RecipeError, Refused
from coterie.engines.flower import apps as simulation
from coterie.engines.flower import engine as flower
from coterie.engines.flower import nodes as flower_nodes
from coterie.engines.flower.apps import simulated
from coterie.engines.flower.engine import gathered
from coterie.engines.messages import Member, Reply
from coterie.runs import run
from coterie.runs.backends import DeviceBackend, flower_engine
from coterie.runs.folder.metrics import MetricsFile
from coterie.runs.problems.members import federated, joined, prepare_remote
from coterie.runs.recipes.recipe import Recipe, load

SETTINGS = [
    "method.rounds=4",
    "compare_with=[]",
    "data.clusters=2",
    "checkpoint_every=1",
    "evaluate_every=1",
    "metrics_every=1",
]
CLIENTS = ("c0-0", "c0-1", "c1-0", "c1-1")


@pytest.fixture
def grid(tmp_path: Path) -> Nodes:
    found = Nodes()
    for client in CLIENTS[:3]:
        found.add({"client": client, "home": str(tmp_path / client)})
    return found


def recipe_of(method: str, *more: str) -> Recipe:
    return load("cobo-digits", [*SETTINGS, "engine=flower", f"method.name={method}", *more])


def at(grid: Nodes, round: int, do: Any) -> None:
    """Do something once, before the first task of a round is sent; scores of the round before
    have negative phases.
    """
    done: list[bool] = []

    def before(nodes: Nodes, request: Any, node: int) -> None:
        if request.phase >= 0 and request.action == "task" and request.round == round and not done:
            done.append(True)
            do()

    grid.before = before


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [
        line
        for text in (folder / "metrics.jsonl").read_text().splitlines()
        if (line := json.loads(text))["kind"] == kind
    ]


def test_an_anchor_that_joins_late_is_a_client_like_any_other(tmp_path: Path) -> None:
    """DDOME, whose anchors are tied to their experts when the run begins."""
    settings = ["method.rounds=3", "compare_with=[]", "data.clients=2", "data.anchors=2"]
    settings += ["method.pool=2", "participation={}", "data.unseen={}"]
    settings += ["model.common.pretraining.epochs=1", "evaluate_every=0"]
    recipe, grid = load("ddome-digits", [*settings, "engine=flower"]), Nodes()
    for client in ("anchor-0", "client-00", "client-01"):
        grid.add({"client": client, "home": str(tmp_path / client)})
    late = {"client": "anchor-1", "home": str(tmp_path / "anchor-1")}
    at(grid, 1, lambda: grid.add(late))
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert len(result["clients"]) == 4
    tasks = [r.task for r in grid.of("anchor-1").requests if r.action == "task" and r.round == 2]
    assert tasks[:2] == ["score_experts", "train"]
    assert "score_experts" not in [r.task for r in grid.of("anchor-0").requests]


@pytest.mark.parametrize("method", ["fedavg", "cobo"])
def test_a_client_joins_between_rounds_and_another_leaves(
    method: str, grid: Nodes, tmp_path: Path
) -> None:
    recipe = recipe_of(method)
    backend = devices(grid, recipe, 3)

    def change() -> None:
        grid.add({"client": "c1-1", "home": str(tmp_path / "c1-1")})
        grid.nodes[1000].alive = False  # c0-0, after its exchange of this round was sent to others

    at(grid, 1, change)
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == {"c0-1", "c1-0", "c1-1"}
    trained = {(line["round"], line["client"]) for line in lines(tmp_path / "out", "train")}
    assert {client for round, client in trained if round == 1} == set(CLIENTS[:3])
    assert {client for round, client in trained if round == 4} == set(CLIENTS[1:])
    assert {line["client"] for line in lines(tmp_path / "out", "lost")} == {"c0-0"}
    assert result["training"] is None
    assert [len(row) for row in result["evaluations"][-1].get("weights", [])] == (
        [4] * 4 if method == "cobo" else []
    )
    assert result["evaluations"][0]["clients"].keys() == set(CLIENTS[:3])


def test_a_client_that_comes_back_goes_on_from_its_state(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "method.rounds=5")
    backend = devices(grid, recipe, 3)
    one = grid.nodes[1000]

    def before(nodes: Nodes, request: Any, node: int) -> None:
        one.alive = request.round not in (1, 2) if request.action == "task" else one.alive

    grid.before = before
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == set(CLIENTS[:3])
    rounds = [
        line["round"] for line in lines(tmp_path / "out", "train") if line["client"] == "c0-0"
    ]
    assert rounds[0] == 1
    assert rounds[-1] == 5
    assert len(rounds) < 5
    assert lines(tmp_path / "out", "note") == []


def test_a_latecomer_is_noted_where_all_are_needed_from_the_start(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe = recipe_of("pcl")
    assert not recipe.build_method().dynamic_membership
    backend = devices(grid, recipe, 3)
    at(grid, 1, lambda: grid.add({"client": "c1-1", "home": str(tmp_path / "c1-1")}))
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == set(CLIENTS[:3])
    assert [(line["client"], line["note"]) for line in lines(tmp_path / "out", "note")] == [
        ("c1-1", "joined after the run began, but pcl needs all clients from the start")
    ]
    assert [r.action for r in grid.of("c1-1").requests] == ["hello"]


def test_with_other_clients_it_is_not_resumed_where_all_are_needed(
    grid: Nodes, tmp_path: Path
) -> None:
    recipe = recipe_of("pcl", "method.rounds=2")
    finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    (tmp_path / "out/result.json").unlink()
    grid.nodes[1000].alive = False
    grid.add({"client": "c1-1", "home": str(tmp_path / "c1-1")})
    with pytest.raises(
        Refused, match="pcl needs the clients that it started with: c0-0 missing; c1-1 new"
    ):
        finished(recipe, tmp_path / "out", devices(grid, recipe, 3))


def test_with_other_clients_it_is_resumed_where_that_can_be(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg")
    started = execution(devices(grid, recipe, 3), recipe, tmp_path / "out")
    started.started, started.requests.metrics = 0.0, MetricsFile(tmp_path / "out")
    started.one_round()
    started.requests.metrics.close()
    (tmp_path / "out/recipe.yaml").write_text(run.recipes.dump(recipe))
    grid.nodes[1000].alive = False
    grid.add({"client": "c1-1", "home": str(tmp_path / "c1-1")})
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert set(result["clients"]) == set(CLIENTS[1:])
    assert (
        result["clients"]["c1-1"]["bytes_down"]
        == 3 / 4 * result["clients"]["c0-1"]["bytes_down"]
        > 0
    )


def test_who_comes_while_a_run_starts_is_not_overlooked(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg")
    backend = devices(grid, recipe, 3)
    grid.add({"client": "c1-1", "home": str(tmp_path / "c1-1")})
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == set(CLIENTS)


def member(client: str, **fields: Any) -> Member:
    return Member(client=client, position=0, windows=(9, 9, 9), **fields)


def test_a_newcomer_that_does_not_fit_changes_nothing() -> None:
    recipe = recipe_of("fedavg")
    prepared = prepare_remote(recipe, [member("a"), member("b")])
    before = prepared.problem.federation
    for late, problem in (
        (member("c", group="random"), "held out"),
        (member("centralized"), "is reserved"),
    ):
        with pytest.raises(Refused, match=problem):
            joined(prepared, late)
        assert prepared.problem.federation is before
    assert list(joined(prepared, member("c")).clients) == ["a", "b", "c"]
    assert list(prepared.clients) == ["a", "b"]


def test_presence_may_name_who_has_not_connected_yet_and_nobody_else() -> None:
    """Of labelled data the recipe tells who there is, and who never trains."""
    named = "presence={client-02: [2, null], random-00: [1, null], typo: [1, null]}"
    recipe = load("ddome-digits", ["data.unseen={random: 1}", "engine=flower", named])
    with pytest.raises(RecipeError) as refused:
        prepare_remote(recipe, [member("anchor-0", labels=(0, 1), anchor=0)])
    assert "presence.typo: unknown client" in str(refused.value)
    assert "presence.random-00: unknown client" in str(refused.value)
    assert "presence.client-02" not in str(refused.value)


def test_the_order_is_that_of_the_data_where_one_machine_has_all_else_that_of_the_ids() -> None:
    assert list(federated([member("b"), member("a"), member("c")]).clients) == ["a", "b", "c"]
    placed = [Member(client=i, position=k, windows=(1, 1, 1)) for k, i in enumerate("cab")]
    assert list(federated(placed[::-1]).clients) == ["c", "a", "b"]
    with pytest.raises(Refused, match="none of 1 clients trains"):
        federated([member("a", group="random")])


# Strangers.


def engine(grid: Nodes, told: Notes) -> flower.Flower:
    return flower_engine(recipe_of("fedavg"), grid, told)


def test_of_two_nodes_with_one_name_the_first_is_believed_until_it_goes(
    grid: Nodes, tmp_path: Path
) -> None:
    second = grid.add({"client": "c0-0", "home": str(tmp_path / "second")})
    told = Notes()
    found = engine(grid, told)
    assert sorted(m.client for m in found.members()) == list(CLIENTS[:3])
    assert told.losses == [
        (
            f"node {second}",
            "hello",
            "claims the name c0-0, which node 1000 has, and that node is connected\n"
            "  Two devices have the same name: rename one.",
        )
    ]
    assert found.members() == []
    assert len(grid.nodes[second].requests) == 1  # it is left alone as long as that is so
    grid.nodes[1000].alive = False
    assert [m.client for m in found.members()] == ["c0-0"]
    assert found.present() == set(CLIENTS[:3])
    grid.nodes[1000].alive = True  # and now the first one is the second
    assert found.members() == []
    assert len(told.losses) == 2


def test_a_device_that_was_started_again_is_known_again_at_once(grid: Nodes) -> None:
    told = Notes()
    found = engine(grid, told)
    found.members()
    grid.restart(1000)
    assert found.present() == set(CLIENTS[:3])
    assert [m.client for m in found.members()] == ["c0-0"]
    assert told.losses == []


def test_nobody_waits_twice_for_a_node_that_does_not_say_who_it_is(
    grid: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(flower.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        flower.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds)
    )
    mute = grid.add({"client": "c1-1", "home": "/nowhere"}, spoil=lambda request, reply: None)
    told = Notes()
    found = engine(grid, told)
    assert len(found.members()) == 3
    assert flower_nodes.WELCOME_S <= clock[0] < flower_nodes.WELCOME_S + 1
    before = clock[0]
    assert found.members() == []
    assert clock[0] == before
    clock[0] += flower_nodes.HELLO_S
    found.members()
    assert told.losses == [(f"node {mute}", "hello", "did not say within 120 s which client it is")]
    before = clock[0] = clock[0] + flower_nodes.HELLO_S
    assert found.members() == []  # it is asked again, and not waited for
    assert clock[0] == before
    assert len(grid.nodes[mute].requests) == 2
    clock[0] += flower_nodes.HELLO_S
    grid.nodes[mute].spoil = None
    found.members()
    assert len(told.losses) == 1  # said once


def test_a_late_hello_is_heard_the_next_time(
    grid: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flower_nodes, "WELCOME_S", 0.05)
    held: list[tuple[str, Message]] = []
    late = grid.add({"client": "c1-1", "home": str(tmp_path / "late")})
    found = engine(grid, Notes())
    pull = grid.pull_messages

    def without_it(ids: Any) -> list[Message]:
        arrived = list(pull(ids))
        held.extend(
            (m.metadata.reply_to_message_id, m) for m in arrived if m.metadata.src_node_id == late
        )
        return [m for m in arrived if m.metadata.src_node_id != late]

    grid.pull_messages = without_it  # type: ignore[method-assign]
    assert len(found.members()) == 3
    grid.pull_messages = pull  # type: ignore[method-assign]
    grid.waiting.update(held)
    assert [m.client for m in found.members()] == ["c1-1"]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(), "did not say which client it is"),
        (Reply(client="c1-1"), "did not say which client it is"),
        (Reply(problem="no data", remedy="Give --data."), "no data\n  Give --data."),
        ('{"version": "0.1.0", "member": {"client": "../../etc"}}', "reply: member."),
        ('{"version": "0.0.1"}', "reply from coterie 0.0.1, but this is"),
        ("", "reply: Expecting value"),
        ("[" * 100000, "reply: nested more than 50 deep"),
        ("x" * (1 << 21), "reply of 2,097,152 characters, at most"),
    ],
)
def test_who_does_not_say_who_it_is_is_not_let_in(
    reply: Reply | str, problem: str, grid: Nodes
) -> None:
    def spoil(request: Message, answered: Message) -> Message:
        return Message(
            content(reply if isinstance(reply, str) else reply.model_dump_json(), b""),
            reply_to=request,
        )

    stranger = grid.add({"client": "c1-1"}, spoil=spoil)
    told = Notes()
    assert len(engine(grid, told).members()) == 3
    assert told.losses[0][:2] == (f"node {stranger}", "hello")
    assert told.losses[0][2].startswith(problem)
    assert len(told.losses[0][2]) < 5000


def test_a_device_that_cannot_say_which_client_it_is_says_so(grid: Nodes, tmp_path: Path) -> None:
    grid.add({"home": str(tmp_path / "other")})
    grid.add({"client": "zoe", "home": str(tmp_path / "other")})
    told = Notes()
    assert len(engine(grid, told).members()) == 3
    assert [reason.partition(";")[0] for _, _, reason in told.losses] == [
        "this device does not know which client it is",
        "the data of this device have no client 'zoe'",
    ]


def test_a_device_that_starts_again_while_clients_gather_counts_once(grid: Nodes) -> None:
    found = engine(grid, Notes())

    def enough(members: Any) -> bool:
        if len(grid.nodes) == 3:
            grid.restart(1000)
        return len(members) >= 4

    with pytest.raises(
        ClientError,
        match=r"3 clients connected within 3 s: c0-0, c0-1, c1-0\n  Check that the SuperNodes run",
    ):
        gathered(found, enough, patience=3)
    assert len(grid.nodes) == 4


def test_a_server_says_at_once_how_many_of_its_clients_are_there(grid: Nodes) -> None:
    said: list[str] = []

    class Said(Callback):
        def noted(self, notes: Any) -> None:
            said.extend(notes)

    with pytest.raises(ClientError, match="3 clients connected within 1 s"):
        DeviceBackend.connect(grid, recipe_of("fedavg"), 5, 1, run.JoinWarnings(Said()))
    assert said[-1].startswith("3 of 5 clients are connected (c0-0, c0-1, c1-0)")
    assert len(set(said)) == len(said)  # and not again and again


# Replies of others.


@pytest.mark.parametrize(
    "changed",
    [
        {"client": "c0-1"},
        {"client": None},
        {"round": 7},
        {"number": 3},
        {"task": "score"},
        {"task": ""},
    ],
)
def test_a_reply_to_something_else_is_not_taken(
    changed: dict[str, Any], grid: Nodes, tmp_path: Path
) -> None:
    recipe = recipe_of("fedavg", "method.rounds=1")
    grid.nodes[1000].spoil = altered(
        lambda said, body: (said.model_copy(update=changed), body), "local_round"
    )
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert result["lost"] == {"c0-0": 1}
    assert lines(tmp_path / "out", "lost")[0]["reason"].endswith("that was not requested")


def test_a_reply_of_an_earlier_exchange_is_not_taken_for_a_later_one(
    grid: Nodes, tmp_path: Path
) -> None:
    """A node that answers everything with what it answered first."""
    recipe = recipe_of("fedavg")
    first: list[tuple[str, bytes]] = []

    def again(said: Reply, body: bytes) -> tuple[Reply | str, bytes]:
        first.append((said.model_dump_json(), body))
        return first[0]

    grid.nodes[1000].spoil = altered(again)
    result = finished(recipe, tmp_path / "out", devices(grid, recipe, 3))
    assert result["lost"] == {
        "c0-0": len(grid.nodes[1000].requests) - 3
    }  # all but two hellos, and the first
    assert len(first) == len(grid.nodes[1000].requests) - 2
    assert "c0-0" not in result["clients"]


# One simulation, several runs.


def test_the_same_simulation_is_used_again_and_another_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[Any, ...]] = []
    ended: list[tuple[Any, ...]] = []

    def start(*about: Any) -> tuple[Nodes, Any]:
        made.append(about)
        return Nodes(), lambda: ended.append(about)

    monkeypatch.setattr(simulation, "_simulation", start)
    monkeypatch.setattr(simulation, "_going_on", {})
    one = simulated(3, 1, on_device)
    assert simulated(3, 1, on_device) is one
    assert ended == []
    assert simulated(4, 1, on_device) is not one
    assert simulated(4, 1, on_device, accelerators=1) is not one
    first, second, third = (3, 1, on_device, 0), (4, 1, on_device, 0), (4, 1, on_device, 1)
    assert (made, ended) == ([first, second, third], [first, second])


def test_runs_on_one_grid_know_nothing_of_each_other(grid: Nodes, tmp_path: Path) -> None:
    """Rows of a comparison, two of the same method: each has states of its own."""
    recipe = recipe_of("fedavg")
    rows = [(recipe, tmp_path / "a"), (recipe_of("cobo"), tmp_path / "b"), (recipe, tmp_path / "c")]
    for _, folder in rows:
        folder.mkdir()
    a, _, c = as_json(run.execute_all(rows, Callback(), backend=devices(grid, recipe, 3)))
    assert a["evaluations"] == c["evaluations"]
    runs = {request.run for request in grid.of("c0-0").requests if request.action == "task"}
    assert len(runs) == 3
    assert {
        path.name for path in (tmp_path / "c0-0").iterdir() if not path.name.startswith(".account")
    } == runs


def test_a_silent_run_before_does_not_answer_for_the_one_after(grid: Nodes, tmp_path: Path) -> None:
    """Replies that come too late belong to messages that nobody waits for any more."""
    recipe = recipe_of("fedavg", "quorum.deadline=0.05")
    backend = devices(grid, recipe, 3)
    held: list[Message] = []
    grid.nodes[1000].spoil = lambda request, reply: (
        held.append(reply) if parts(reply)[0].task else reply
    )  # type: ignore[func-returns-value]
    first = finished(recipe, tmp_path / "first", backend)
    assert first["lost"]["c0-0"] == len(held)
    assert "c0-0" not in first["clients"]
    grid.nodes[1000].spoil = silent("nothing")
    grid.waiting |= {message.metadata.reply_to_message_id: message for message in held}
    second = finished(recipe, tmp_path / "second", backend)
    assert second["lost"] == {}
    assert set(second["clients"]) == set(CLIENTS[:3])
    assert isinstance(backend, DeviceBackend)
