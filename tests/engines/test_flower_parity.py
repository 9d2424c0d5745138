"""What goes through Flower's messages, to devices that keep their own states, comes to the bit
to what one process computes.
"""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.cases import EVERYWHERE, method_of
from nodes import Nodes, devices, on_device, simulated_nodes

from coterie.core.files import load as load_tensors
from coterie.core.tensors import Tensors
from coterie.models.backbone import Backbone
from coterie.runs import run
from coterie.runs.backends import LocalBackend
from coterie.runs.device import device as devices_module
from coterie.runs.problems import loading
from coterie.runs.problems.language import load_backbone
from coterie.runs.recipes.recipe import Recipe, load
from coterie.testing.run import World, language_on, pictures_of
from coterie.testing.training import devices_are_alike

WORDS = {
    "ann": "the cat sat on a warm mat and slept while the dog looked for its bone",
    "ben": "add two numbers then divide by three to find the mean value of this list",
    "cleo": "sail north until the wind turns and drop the anchor near the stone wall",
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short documents for each of three clients, one below the other:
    `<root>/<client>/<client>/00.txt`, and `<root>/all`.
    """
    root = tmp_path_factory.mktemp("texts")
    for name, words in WORDS.items():
        rng = random.Random(name)
        for folder in (root / name / name, root / "all" / name):
            folder.mkdir(parents=True)
        for k in range(30):
            text = " ".join(rng.choices(words.split(), k=12)) + ".\n"
            (root / name / name / f"{k:02d}.txt").write_text(text)
            (root / "all" / name / f"{k:02d}.txt").write_text(text)
    return root


def text_recipe(path: Path, base: Path, *more: str) -> Recipe:
    settings = [
        "model.context=16",
        "training.batch_size=4",
        "method.name=comigs-1g1s",
        "method.rounds=3",
        "method.local_steps=2",
        "method.router_every=2",
    ]
    settings += [
        "method.router_steps=1",
        "evaluate_every=2",
        "evaluate_rows=null",  # with texts on devices `auto` is a fixed number
        "compare_with=[]",
        f"data.path={path}",
        f"model.base={base}",
        "seed=3",
    ]
    return load("folders", [*settings, *more])


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """What must be the same; curves have points only where clients are in the process of the
    server.
    """
    return {
        key: value
        for key, value in result.items()
        if key not in ("wall_s", "peak_memory_bytes", "curve")
    }


def lines(folder: Path, *kinds: str) -> list[str]:
    return [
        line
        for line in (folder / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] in kinds
    ]


def kept(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def server_state(folder: Path) -> Tensors:
    return load_tensors(max((folder / "checkpoints").iterdir()) / "server.safetensors")[0]


def assert_same(expected: Tensors, found: Tensors) -> None:
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def assert_same_run(here: Path, there: Path, differing: tuple[str, ...] = ()) -> None:
    """The same result, server, training and scores; what is `differing` aside."""
    ours, theirs = (
        figures(json.loads((folder / "result.json").read_text())) for folder in (here, there)
    )
    assert {k: v for k, v in theirs.items() if k not in differing} == {
        k: v for k, v in ours.items() if k not in differing
    }
    assert_same(server_state(here), server_state(there))
    assert lines(there, "train", "score") == lines(here, "train", "score")
    assert lines(here, "train", "score")
    assert lines(there, "lost", "note") == []


def simulated(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run under a simulation whose nodes are in this process."""
    monkeypatch.setattr(
        "coterie.engines.flower.apps.simulated",
        lambda clients, threads, handle, accelerators: simulated_nodes(clients),
    )
    run.run(recipe, folder, backend=LocalBackend("flower"))


@contextmanager
def only_devices_load(grid: Nodes, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Whoever loads a base or data outside of a device fails. Yields which of the forbidden
    things devices did.
    """
    here: list[bool] = []
    done: list[str] = []

    def guarded(name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            assert here, f"the server called {name}"
            done.append(name)
            return original(*arguments, **named)

        return call

    def on_a_device(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
        here.append(True)
        try:
            return on_device(node, text, body)
        finally:
            here.pop()

    for node in grid.nodes.values():
        node.handle = on_a_device
    devices_module._loaded.cache_clear()
    load_backbone.cache_clear()
    with monkeypatch.context() as patch:
        for owner, name in ((loading, "load"), (loading, "load_backbone"), (Backbone, "load")):
            patch.setattr(owner, name, guarded(name, getattr(owner, name)))
        yield done


def test_texts_in_a_simulation(
    texts: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    presence = "presence={ann: [1, null], ben: [0, 2]}"
    recipe = text_recipe(texts / "all", tiny_base, presence)
    run.run(recipe, tmp_path / "here")
    simulated(recipe, tmp_path / "there", monkeypatch)
    assert_same_run(tmp_path / "here", tmp_path / "there")
    assert kept(tmp_path / "there/clients") == kept(tmp_path / "here/clients") != {}


def test_texts_on_devices_of_a_server_that_has_neither_data_nor_weights(
    texts: Path, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.run(text_recipe(texts / "all", tiny_base), tmp_path / "here")
    grid = Nodes()
    for client in reversed(WORDS):  # whoever comes first, the order is that of the ids
        grid.add(
            {"home": str(tmp_path / client), "data": str(texts / client)}
            | ({} if client == "ben" else {"client": client})
        )
    recipe = text_recipe(Path("/nowhere/at/all"), tiny_base, "engine=flower")
    with only_devices_load(grid, monkeypatch) as done:
        backend = devices(grid, recipe, 3)
        run.run(recipe, tmp_path / "there", backend=backend)
    assert {"load", "load_backbone"} <= set(done)
    assert_same_run(tmp_path / "here", tmp_path / "there", differing=("machine",))
    run_name = next(iter(grid.nodes.values())).requests[-1].run
    for client in WORDS:
        assert kept(tmp_path / client / run_name / "clients") == {
            name: found
            for name, found in kept(tmp_path / "here/clients").items()
            if name.startswith(f"{client}/")
        }
    assert not (tmp_path / "there/clients").exists()


@pytest.mark.parametrize("joins", [0, 1])
def test_a_device_that_joins_late_is_as_a_client_that_the_recipe_lets_join(
    joins: int, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    """CoMiGS: the newcomer gets the generalist of then, and is averaged from there on. Who comes
    before the round that the recipe names waits for it.
    """
    late = text_recipe(texts / "all", tiny_base, "presence={cleo: [2, null]}")
    run.run(late, tmp_path / "here")
    grid = Nodes()

    def add(client: str) -> None:
        grid.add({"home": str(tmp_path / client), "data": str(texts / client), "client": client})

    def before(nodes: Nodes, request: Any, node: int) -> None:
        if request.action == "task" and request.round == joins and len(nodes.nodes) == 2:
            add("cleo")

    add("ann"), add("ben")
    grid.before = before
    named = ["presence={cleo: [2, null]}"] if joins == 0 else []
    recipe = text_recipe(Path("/nowhere/at/all"), tiny_base, "engine=flower", *named)
    run.run(recipe, tmp_path / "there", backend=devices(grid, recipe, 2))
    assert_same(server_state(tmp_path / "here"), server_state(tmp_path / "there"))
    assert lines(tmp_path / "there", "train") == lines(tmp_path / "here", "train")
    taken = [json.loads(line)["client"] for line in lines(tmp_path / "there", "train")]
    assert {i: taken.count(i) for i in WORDS} == {"ann": 3, "ben": 3, "cleo": 1}


COBO = [
    "method.rounds=4",
    "evaluate_every=2",
    "checkpoint_every=2",
    "compare_with=[]",
    "method.pairs=all",
    "data.clusters=2",
    "presence={c0-0: [1, null], c1-1: [0, 3]}",
]


@pytest.mark.parametrize("exchange", [256.0, 1e-6])
def test_cobo_with_its_exchanges(
    exchange: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices and in a simulation. One process asks many of them at once, and rounds
    otherwise: `loopback` does not.
    """
    settings = [*COBO, f"method.exchange_mb={exchange}"]
    run.run(load("cobo-digits", [*settings, "engine=loopback"]), tmp_path / "here")
    recipe = load("cobo-digits", [*settings, "engine=flower"])
    simulated(recipe, tmp_path / "there", monkeypatch)
    assert_same_run(tmp_path / "here", tmp_path / "there")
    grid = Nodes()
    for client in ("c0-0", "c0-1", "c1-0", "c1-1"):
        grid.add({"home": str(tmp_path / client), "client": client})
    run.run(recipe, tmp_path / "far", backend=devices(grid, recipe, 4))
    assert_same_run(tmp_path / "here", tmp_path / "far")
    numbers = [(r.round, r.number) for r in grid.of("c0-0").requests if r.action != "hello"]
    assert len(set(numbers)) == len(numbers)
    assert numbers == sorted(numbers)
    assert (max(number for round, number in numbers if round == 1) > 2) == (exchange < 1)


def test_ddome_with_anchors_participation_and_clients_never_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = [
        "method.rounds=3",
        "evaluate_every=2",
        "checkpoint_every=2",
        "compare_with=[]",
        "data.clients=6",
        "data.anchors=3",
    ]
    settings += [
        "data.unseen={aligned: 2, random: 2}",
        "participation={anchors: 2, clients: 3}",
        "presence={anchor-0: [1, null], client-02: [0, 2]}",
        "method.pool=3",
    ]
    run.run(load("ddome-digits", [*settings, "engine=loopback"]), tmp_path / "here")
    recipe = load("ddome-digits", [*settings, "engine=flower"])
    simulated(recipe, tmp_path / "there", monkeypatch)
    assert_same_run(tmp_path / "here", tmp_path / "there")
    grid = Nodes()
    everyone = tuple(
        json.loads((tmp_path / "here/result.json").read_text())[key]
        for key in ("clients", "training")
    )
    for client in sorted({i for found in everyone for i in found}):
        grid.add({"home": str(tmp_path / client), "client": client})
    run.run(recipe, tmp_path / "far", backend=devices(grid, recipe, len(grid.nodes)))
    assert_same_run(
        tmp_path / "here", tmp_path / "far", differing=("label_counts",)
    )  # that is in the data, which are elsewhere


@pytest.fixture(scope="module")
def language(tiny_base: Path, tiny_federation: Any) -> World:
    return language_on(tiny_base, tiny_federation)


@pytest.fixture(scope="module")
def pictures(tiny_pictures: Any) -> World:
    return pictures_of(tiny_pictures)


@pytest.mark.parametrize(("kind", "name"), EVERYWHERE)
def test_every_method_over_messages_with_half_of_the_clients_a_round(
    kind: str, name: str, request: pytest.FixtureRequest
) -> None:
    devices_are_alike(method_of(name), request.getfixturevalue(kind))
