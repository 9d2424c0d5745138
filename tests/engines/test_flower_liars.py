"""One registered device says what cannot be: it is left out by name, and the run goes on with
the others to its end.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from nodes import Nodes, Notes, altered, content, devices, finished, parts

from coterie.core.errors import Refused, TensorError
from coterie.core.metrics import check_scores
from coterie.core.tensors import from_bytes, to_bytes
from coterie.data.federation import CENTRALIZED
from coterie.data.partition import Partitioner
from coterie.engines.messages import MOST_MEASURED, Member, Reply, parsed
from coterie.runs.device.device import _member
from coterie.runs.problems.members import check_member
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load

HONEST = ("c0-0", "c0-1", "c1-0")
LIAR = "c1-1"
B = 1 << 53
SETTINGS = [
    "method.local_steps=1",
    "compare_with=[]",
    "data.clusters=2",
    "data.clients_per_cluster=2",
    "engine=flower",
    "metrics_every=1",
]
# What it says of itself, and the field that is named.
CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "a huge cluster": ({"cluster": B}, "cluster 9007199254740992, expected 1"),
    "another cluster": ({"cluster": 0}, "cluster 0, expected 1"),
    "no cluster": ({"cluster": None}, "cluster None, expected 1"),
    "a huge anchor": ({"anchor": B}, "anchor 9007199254740992, expected None"),
    "an anchor": ({"anchor": 0}, "anchor 0, expected None"),
    "a huge label": ({"labels": (B,)}, "labels: 1 of them"),
    "many labels": ({"labels": tuple(range(100_000))}, "labels: 100000 of them"),
    "one label often": ({"labels": (1, 1, 1)}, "labels: 3 of them"),
    "labels in another order": ({"labels": (2, 1)}, "labels: 2 of them"),
    "no labels": ({"labels": ()}, "labels: 0 of them"),
    "labels that are not said": ({"labels": None}, "labels: none"),
    "a group": ({"group": "x"}, "group 'x', expected ''"),
    "a group with markup": ({"group": "evil<script>"}, "group 'evil<script>'"),
    "a long group": ({"group": "g" * 200}, "group 'ggg"),
    "a group with escapes": ({"group": "a\n\x1b[2J"}, r"group 'a\n\x1b[2J'"),
    "no windows": ({"windows": (0, 0, 0)}, "windows 0 of train"),
    "no test windows": ({"windows": (5, 5, 0)}, "windows 0 of test"),
    "huge windows": ({"windows": (B, B, B)}, f"windows {B} of train"),
    "a huge position": ({"position": B}, f"position {B}"),
    "another position": ({"position": 0}, "position 0, expected 3"),
    "the pool": ({"client": CENTRALIZED}, "is reserved"),
    "no client of the data": ({"client": "zoe"}, "have no client 'zoe'"),
    "an id like an option": ({"client": "-rf"}, "have no client '-rf'"),
}


def recipe_of(method: str, *more: str) -> Recipe:
    return load("cobo-digits", [*SETTINGS, f"method.name={method}", *more])


def grid_of(folder: Path, spoil: Any) -> Nodes:
    found = Nodes()
    for client in (*HONEST, LIAR):
        found.add(
            {"client": client, "home": str(folder / client)},
            spoil=spoil if client == LIAR else None,
        )
    return found


def claiming(claims: Mapping[str, Any]) -> Any:
    """It says this of itself, wherever it says anything."""

    def spoil(request: Message, reply: Message) -> Message:
        said, body = parts(reply)
        member = None if said.member is None else said.member.model_copy(update=dict(claims))
        named = {"client": claims["client"]} if "client" in claims else {}
        return Message(
            content(said.model_copy(update={"member": member, **named}).model_dump_json(), body),
            reply_to=request,
        )

    return spoil


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_device_that_says_of_itself_what_cannot_be_is_not_let_in(
    claim: str, tmp_path: Path
) -> None:
    claims, named = CLAIMS[claim]
    grid, told = grid_of(tmp_path, claiming(claims)), Notes()
    backend = devices(grid, recipe_of("fedavg"), 3, told)
    assert sorted(member.client for member in backend.members) == list(HONEST)
    ((node, task, reason),) = told.losses
    assert (node, task) == ("node 1021", "hello")
    assert named in reason
    assert len(reason) < 1500
    assert "\x1b" not in reason


RUNS = [("fedavg", "a group"), ("cobo", "the pool")]
MORE = [
    (method, claim)
    for method in ("fedavg", "cobo")
    for claim in CLAIMS
    if (method, claim) not in RUNS
]


@pytest.mark.parametrize(
    ("method", "claim"), [*RUNS, *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)]
)
def test_the_run_goes_on_with_the_others(method: str, claim: str, tmp_path: Path) -> None:
    more = ["method.rounds=1", "evaluate_every=1"] + ["method.switch=0"] * (method == "cobo")
    recipe = recipe_of(method, *more)
    backend = devices(grid_of(tmp_path, claiming(CLAIMS[claim][0])), recipe, 3)
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == set(HONEST)
    assert result["groups"] is None
    assert result["clusters"] == {"c0-0": 0, "c0-1": 0, "c1-0": 1}


def test_a_liar_that_comes_later_is_not_let_in_either(tmp_path: Path) -> None:
    recipe, grid, folder = recipe_of("fedavg", "method.rounds=2"), Nodes(), tmp_path / "out"
    for client in HONEST:
        grid.add({"client": client, "home": str(tmp_path / client)})
    backend, came = devices(grid, recipe, 3), list[int]()

    def before(nodes: Nodes, request: Any, node: int) -> None:
        if request.action == "task" and request.round == 1 and not came:
            came.append(
                grid.add(
                    {"client": LIAR, "home": str(tmp_path / LIAR)}, spoil=claiming({"group": "x"})
                )
            )

    grid.before = before
    result = finished(recipe, folder, backend)
    assert set(result["clients"]) == set(HONEST)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [
        (line["client"], "group 'x'" in line["reason"]) for line in lines if line["kind"] == "lost"
    ] == [(f"node {came[0]}", True)]


# What it answers.


def spoiled(task: str, **tensors: list[float]) -> Any:
    def change(said: Reply, body: bytes) -> tuple[Reply, bytes]:
        found = from_bytes(body)
        wrong = {
            name: torch.tensor(value, dtype=found[name].dtype) for name, value in tensors.items()
        }
        return said, to_bytes(dict(found) | wrong)

    return altered(change, task)


SCORES = {
    "no predictions": {"test": [1.0, 0.0, 0.0]},
    "fewer than none": {"test": [1.0, -5.0, 0.0]},
    "more right than there are": {"test": [1.0, 10.0, 11.0]},
    "fewer right than none": {"valid": [1.0, 10.0, -1.0]},
    "a loss below zero": {"valid": [-10.0, 10.0, 5.0]},
    "half a prediction": {"test": [1.0, 10.5, 5.0]},
    "more than can be counted": {"test": [1.0, 1e300, 5.0]},
    "a part of no predictions": {"parts": [[[1.0, 9.0, 3.0]], [[0.0, 0.0, 0.0]]]},
    "a weight of a part above all": {"weights": [1e30, 0.0]},
}


@pytest.mark.parametrize("lie", SCORES)
def test_scores_that_cannot_be_are_refused(lie: str) -> None:
    true = {"valid": torch.tensor([5.0, 10.0, 10.0]), "test": torch.tensor([0.0, 1.0, 0.0])}
    check_scores(true)
    check_scores({"test": torch.tensor([5.0, 10.0])})
    with pytest.raises(TensorError, match=r"cannot be sums|weights must be"):
        check_scores(true | {name: torch.tensor(value) for name, value in SCORES[lie].items()})


@pytest.mark.parametrize("lie", ["no predictions"])
def test_scores_that_cannot_be_are_dropped_and_named(lie: str, tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "method.rounds=1")
    backend = devices(grid_of(tmp_path, spoiled("score", **SCORES[lie])), recipe, 4)
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == set(HONEST)
    assert result["lost"] == {LIAR: 1}
    assert "cannot be sums" in (tmp_path / "out/metrics.jsonl").read_text()


def test_what_a_gate_cannot_have_chosen_is_refused() -> None:
    true = torch.tensor([[[3.0, 1.0]], [[2.0, 0.0]]], dtype=torch.float64)
    check_scores({"choices": true})
    for wrong in (true * 0, -true, true + 0.5, true.flip(0), true * 1e300):
        with pytest.raises(TensorError, match="choices"):
            check_scores({"choices": wrong})


METRICS: list[dict[str, Any]] = [
    {"router/generalist": 1.0},
    {"router/generalist": [1.0, 2.0]},
    {"router/generalist": [[1.0], [1.0, 2.0]]},
    {"router/generalist": [[]]},
    {"router/generalist": []},
    {"a\x1b[2J": 1.0},
    {"<script>": 1.0},
    {"": 1.0},
    {f"loss/{k}": 1.0 for k in range(MOST_MEASURED + 1)},
]


@pytest.mark.parametrize("metrics", METRICS)
def test_measurements_that_no_report_could_show_are_refused(metrics: dict[str, Any]) -> None:
    with pytest.raises(TensorError, match=r"reply: metrics") as refused:
        parsed(Reply, json.dumps({"metrics": metrics}))
    assert "\x1b" not in str(refused.value)
    assert parsed(
        Reply, json.dumps({"metrics": {"router/generalist+specialist": [[0.5, 0.5], [1.0, 0.0]]}})
    ).metrics


def test_such_measurements_are_dropped_and_named(tmp_path: Path) -> None:
    recipe = recipe_of("fedavg", "method.rounds=1")

    def change(said: Reply, body: bytes) -> tuple[str, bytes]:
        return json.dumps(
            json.loads(said.model_dump_json()) | {"metrics": {"tokens": 3, "router/\x1b[2J": 1.0}}
        ), body

    result = finished(
        recipe,
        tmp_path / "out",
        devices(grid_of(tmp_path, altered(change, "local_round")), recipe, 4),
    )
    assert result["lost"] == {LIAR: 1}
    assert "\x1b" not in (tmp_path / "out/metrics.jsonl").read_text()


def test_weights_of_routers_that_a_client_does_not_have_are_in_no_picture(tmp_path: Path) -> None:
    from coterie.core.result import Mixture
    from coterie.reports.curves import router_panels

    lines = [(1, [[0.5, 0.5]]), (2, [[1.0]]), (3, [[0.5, 0.5], [0.5, 0.5]]), (4, [[0.25, 0.75]])]
    written = [
        json.dumps({"kind": "train", "client": "ann", "iteration": at, "router/experts": weights})
        for at, weights in lines
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(written))
    assert router_panels(tmp_path / "metrics.jsonl", {"ann": Mixture(generalists=1, specialists=1)})
    assert (
        router_panels(tmp_path / "metrics.jsonl", {"ann": Mixture(generalists=2, specialists=1)})
        == ()
    )


# What is known of clients without their data is what devices find in the data.


PARTITIONS = {
    "permuted-clusters": {},
    "unequal clusters": {"cluster_sizes": (2, 1, 3)},
    "disjoint-classes": {
        "clusters": 2,
        "anchors": 4,
        "anchor_classes": 2,
        "unseen": {"aligned": 3, "random": 2},
        "classes_per_client": 3,
    },
    "iid": {"clients": 3},
    "dirichlet": {"clients": 12, "anchors": 2, "unseen": {"random": 2}},
    "quantity": {"clients": 5, "anchors": 5, "unseen": {"aligned": 2}, "classes_per_client": 3},
}


@pytest.mark.parametrize("name", PARTITIONS)
def test_who_a_recipe_says_that_there_is(name: str) -> None:
    partition = "permuted-clusters" if name == "unequal clusters" else name
    section = type(load("cobo-digits").data).model_validate(
        {"kind": "digits", "partition": partition, **PARTITIONS[name]}
    )
    assert isinstance(section, Partitioner)
    labels = np.random.default_rng(0).integers(0, section.classes, 5000)
    partition = section.partitioned(labels, labels[:2000])
    groups = {part.id: group for group, parts in partition.unseen.items() for part in parts}
    for position, part in enumerate(partition.everyone):
        known = section.client_info(part.id)
        assert known is not None
        anchor = position if position < section.anchors else None
        assert (known.position, known.group, known.cluster, known.anchor) == (
            position,
            groups.get(part.id, ""),
            part.cluster,
            anchor,
        )
        assert set(part.labels) <= set(range(known.classes or 0))
    assert section.client_info("somebody") is None


@pytest.mark.parametrize("recipe", ["cobo-digits", "quickstart", "ddome-digits"])
def test_what_honest_devices_say_is_believed(recipe: str) -> None:
    prepared = prepare(load(recipe, ["compare_with=[]"]))
    for client in prepared.problem.federation.everyone:
        check_member(prepared.recipe, _member(prepared, client))


def test_clients_with_texts_say_little_and_that_is_checked() -> None:
    recipe = load("quickstart", [])
    true = Member(client="anybody", position=0, windows=(1, 1, 1))
    check_member(recipe, true)
    for wrong, named in (
        ({"group": "new"}, "group"),
        ({"cluster": 0}, "cluster"),
        ({"anchor": 0}, "anchor"),
        ({"labels": (0,)}, "labels"),
        ({"position": 1 << 20}, "position"),
        ({"windows": (1, 0, 1)}, "windows 0 of valid"),
        ({"client": CENTRALIZED}, "is reserved"),
    ):
        with pytest.raises(Refused, match=named):
            check_member(recipe, true.model_copy(update=wrong))
