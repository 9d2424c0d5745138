"""Clients' states within a bound of memory: what lies where, what a file and a checkpoint of it
are, and that no result depends on it.
"""

import os
import random
import resource
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from figures import as_json

from coterie.client.blueprint import Blueprint
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.core.callback import Callback
from coterie.core.errors import CheckpointError, ClientError, SaveError
from coterie.core.files import make_folder
from coterie.core.packs import Entry
from coterie.core.protocol import Ask, ClientId, State, drive
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.engines.inprocess import InProcess
from coterie.engines.states import States, Stored, half_of_memory
from coterie.methods.base import Method
from coterie.methods.cobo import CoBo
from coterie.methods.comigs import CoMiGS
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape
from coterie.runs import execution, run
from coterie.runs.folder.checkpoints import Checkpoint, Checkpoints
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load

METHOD = CoMiGS(rounds=3, local_steps=2, router_every=2, router_steps=1)
SIZE = 40  # bytes of `state`


def state(value: float, values: int = 8) -> State:
    return {"x": torch.full((values,), float(value)), "n": torch.tensor(int(value))}


def filled(within: Path, clients: str, most: float) -> States:
    """A keeper to which each client's letter came, in order, with its place as its value."""
    keeper = States(within, most)
    for k, client in enumerate(clients):
        keeper.put(client, state(k))
    return keeper


def in_files(keeper: Stored) -> set[ClientId]:
    return {i for i in keeper if keeper.entry(i) is not None}


def packs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.pack"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The values that were read, by the client's letter: a state's place is its value."""
    seen: list[str] = []
    read = Entry.read

    def seeing(entry: Entry) -> Tensors:
        found = read(entry)
        seen.append("abcd"[int(found["n"])])
        return found

    monkeypatch.setattr(Entry, "read", seeing)
    return seen


# The keeper


def test_whoever_is_in_memory_stays_there_and_nothing_of_it_is_copied(tmp_path: Path) -> None:
    keeper = filled(tmp_path, "dabc", most=2 * SIZE + 39)
    assert list(keeper) == list("dabc")  # as they came
    assert in_files(keeper) == {"b", "c"}
    kept = {i: keeper[i] for i in "da"}
    for _ in range(3):
        for client in keeper:
            own = keeper.take(client)
            own["x"] += 1
            own["n"] += 1
            keeper.put(client, own)
        assert in_files(keeper) == {"b", "c"}
    for k, client in enumerate("dabc"):
        assert {name: t.tolist() for name, t in keeper[client].items()} == {
            "x": [k + 3.0] * 8,
            "n": k + 3,
        }
        assert keeper.nbytes(client) == SIZE
    assert all(keeper[i] is own for i, own in kept.items())


def test_without_a_bound_there_are_no_files(tmp_path: Path) -> None:
    assert in_files(filled(tmp_path, "abc", most=float("inf"))) == set()
    assert list(tmp_path.iterdir()) == []


def test_one_that_grows_leaves_and_one_that_shrinks_makes_room(tmp_path: Path) -> None:
    keeper = filled(tmp_path, "abc", most=2 * SIZE)
    keeper.put("a", state(0, values=16))
    assert in_files(keeper) == {"a", "c"}
    keeper.put("c", keeper.take("c"))
    assert in_files(keeper) == {"a"}
    assert keeper["c"]["x"].tolist() == [2.0] * 8
    assert keeper["a"]["x"].tolist() == [0.0] * 16


def test_what_is_written_is_never_changed_and_only_if_something_changed(tmp_path: Path) -> None:
    keeper = filled(tmp_path, "a", most=0)
    entry = keeper.entry("a")
    assert entry is not None
    keeper.put("a", keeper.take("a"))
    assert keeper.entry("a") == entry
    for changed in (
        state(0) | {"n": torch.tensor(1)},
        state(0) | {"more": torch.zeros(1)},
        {"x": torch.zeros(9)},
        {},
    ):
        keeper.put("a", changed)
        assert {name: t.tolist() for name, t in keeper["a"].items()} == {
            name: t.tolist() for name, t in changed.items()
        }
    assert Stored({"a": entry})["a"]["n"] == 0


def test_many_at_once_only_where_all_of_them_fit(tmp_path: Path) -> None:
    keeper = filled(tmp_path, "ab", most=4 * SIZE)
    found = keeper.together(["b", "c"], lambda i: SIZE)
    assert found is not None
    assert found["b"] is keeper["b"]
    assert list(found) == ["b", "c"]
    assert found["c"] == {}
    assert keeper.together(["a", "b", "c", "d"], lambda i: SIZE) is not None
    assert keeper.together(["c", "d", "e"], lambda i: SIZE) is None
    assert keeper.together(["a", "b"], lambda i: 3 * SIZE) is None
    for client in "cde":
        keeper.put(client, state(0))
    assert in_files(keeper) == {"e"}
    assert keeper.together(["e"], lambda i: 0) is None


def test_a_full_disk_is_an_error_and_the_former_file_is_whole(tmp_path: Path) -> None:
    keeper = filled(tmp_path, "a", most=0)
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(SaveError, match=r"cannot write .*\.pack"):
            keeper.put("a", state(1, values=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert keeper["a"]["x"].tolist() == [0.0] * 8
    keeper.put("a", state(2))  # as soon as there is room again
    assert keeper["a"]["x"].tolist() == [2.0] * 8


def test_a_folder_that_cannot_be_had_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SaveError, match=r"cannot make a folder for states in .*taken"):
        filled(tmp_path / "taken", "a", most=0)


@pytest.mark.parametrize("spoil", [Path.unlink, lambda path: os.truncate(path, 50)])
def test_a_pack_that_is_gone_or_damaged_is_named(spoil: object, tmp_path: Path) -> None:
    keeper = filled(tmp_path, "a", most=0)
    (pack,) = packs(tmp_path)
    spoil(pack)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"(?s)state of client 'a'.*\.pack.*--resume"):
        keeper.take("a")


def test_the_folder_goes_with_its_keeper_and_what_a_killed_process_left_with_the_next(
    tmp_path: Path,
) -> None:
    code = f"""
import os, signal, torch
from pathlib import Path
from coterie.engines.states import States
keeper = States(Path({str(tmp_path)!r}), 0)
keeper.put("a", {{"x": torch.zeros(8)}})
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    (left,) = tmp_path.glob("states-*")
    assert {path.name for path in left.iterdir()} == {"000001.pack", "lock"}
    first = filled(tmp_path, "b", most=0)
    (own,) = tmp_path.glob("states-*")
    assert own != left
    second = filled(
        tmp_path, "b", most=0
    )  # another process that looks at the same run leaves the living alone
    assert first["b"]["n"] == second["b"]["n"] == 0
    assert first.entry("b") != second.entry("b")
    del first, second
    assert list(tmp_path.iterdir()) == []


def test_the_bound_that_is_there_without_one_is_half_of_the_memory() -> None:
    total = next(
        int(line.split()[1])
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert half_of_memory(torch.device("cpu")) == total * 1024 / 2


# Checkpoints


def test_a_checkpoint_links_to_packs_that_later_tasks_leave_alone(tmp_path: Path) -> None:
    keeper, checkpoints = (
        filled(tmp_path, "abc", most=SIZE),
        Checkpoints(tmp_path / "checkpoints", {}),
    )
    checkpoints.save(Checkpoint(1, {}, keeper, {}))
    (linked,) = packs(tmp_path / "checkpoints/round-00001")
    for client in "bc":
        entry = keeper.entry(client)
        assert entry is not None
        assert os.path.samefile(entry.pack, linked)
    for client in "abc":
        own = keeper.take(client)
        own["x"] += 10
        keeper.put(client, own)
    found = checkpoints.latest()
    assert found is not None
    assert {i: own["x"].tolist() for i, own in found.clients.items()} == {
        i: [float(k)] * 8 for k, i in enumerate("abc")
    }
    assert [float(own["x"][0]) for own in keeper.values()] == [10, 11, 12]
    del keeper
    assert found.clients["c"]["x"].tolist() == [2.0] * 8


def test_where_there_are_no_links_a_checkpoint_is_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    keeper, checkpoints = filled(tmp_path, "ab", most=0), Checkpoints(tmp_path / "checkpoints", {})
    checkpoints.save(Checkpoint(1, {}, keeper, {}))
    entry = keeper.entry("b")
    assert entry is not None
    (copied,) = packs(tmp_path / "checkpoints")
    assert copied.read_bytes() == entry.pack.read_bytes()
    assert not os.path.samefile(entry.pack, copied)


@pytest.mark.parametrize("most", [0, 20 * SIZE, float("inf")])
def test_a_checkpoint_writes_what_changed_and_has_few_files(most: float, tmp_path: Path) -> None:
    """Of 50 clients 5 are drawn a round: written are their states, and now and then what is left of
    packs of which most is old; packs are at most those of the rounds in which half of a pack grows
    old, and all together at most two times the states.
    """
    names, drawn, rng = [f"c{k}" for k in range(50)], 5, random.Random(0)
    keeper, checkpoints = States(tmp_path, most), Checkpoints(tmp_path / "checkpoints", {})
    for k, name in enumerate(names):
        keeper.put(name, state(k))
    values = {name: k for k, name in enumerate(names)}
    checkpoints.save(Checkpoint(0, {}, keeper, {}))
    size = packs(tmp_path / "checkpoints")[0].stat().st_size / len(names)
    written, known = 0, set[int]()
    for t in range(1, 41):
        for name in rng.sample(names, drawn):
            own = keeper.take(name)
            own["x"] += 1
            keeper.put(name, own)
            values[name] += 1
        for name in names:  # scoring changes nothing
            keeper.put(name, keeper.take(name))
        folder = checkpoints.save(Checkpoint(t, {}, keeper, {}))
        found = {path.stat().st_ino: path.stat().st_size for path in packs(folder)}
        written += sum(bytes for inode, bytes in found.items() if inode not in known)
        known |= found.keys()
        assert len(found) <= 12
        assert sum(found.values()) <= 2.2 * len(names) * size
    assert written <= len(names) * size + 3 * 40 * drawn * size
    assert {i: float(own["x"][0]) for i, own in keeper.items()} == values
    again = States(tmp_path, most)
    latest = checkpoints.latest()
    assert latest is not None
    again.restore(latest.clients)
    assert {i: float(again.take(i)["x"][0]) for i in again} == values


def test_a_pack_ends_where_it_is_large_and_what_is_left_of_old_ones_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a checkpoint in between: 2,000 states written in turns take little more room than
    those that are needed.
    """
    monkeypatch.setattr("coterie.core.packs.LARGEST", 2000)
    keeper = filled(tmp_path, "abcdefghij", most=0)
    for k in range(2000):
        keeper.put("abcdefghij"[k * k % 7], state(k))
    assert sum(path.stat().st_size for path in packs(tmp_path)) < 10_000
    last = {"abcdefghij"[k * k % 7]: k for k in range(2000)}
    kept = {i: float(own["n"]) for i, own in keeper.items()}
    assert kept == {i: last.get(i, k) for k, i in enumerate("abcdefghij")}


def test_what_was_kept_is_taken_over_unread(tmp_path: Path, reads: list[str]) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", {})
    checkpoints.save(Checkpoint(1, {}, {i: state(k) for k, i in enumerate("abcd")}, {}))
    found = checkpoints.latest()
    assert found is not None
    keeper = States(tmp_path, 2 * SIZE)
    keeper.restore(found.clients)
    keeper.restore(found.clients)  # again: nothing is in the way
    assert [keeper.nbytes(i) for i in keeper] == [SIZE] * 4
    checkpoints.save(Checkpoint(2, {}, keeper, {}))
    checkpoints.save(Checkpoint(3, {}, keeper, {}))  # the one that was taken over is no more
    assert reads == []
    for i in "abcd":
        keeper.put(i, keeper.take(i))
    assert reads == list("abcd")
    assert in_files(keeper) == {"c", "d"}  # as before: those that came first have the room
    assert [float(own["x"][0]) for own in keeper.values()] == [0, 1, 2, 3]


def test_an_interrupted_run_names_its_packs_as_one_that_was_not(tmp_path: Path) -> None:
    checkpoints, keeper = Checkpoints(tmp_path / "checkpoints", {}), filled(tmp_path, "ab", most=0)

    def rounds(keeper: States, numbers: range) -> list[str]:
        for number in numbers:
            for client in "ab":
                own = keeper.take(client)
                own["x"] += 1
                keeper.put(client, own)
            folder = checkpoints.save(Checkpoint(number, {}, keeper, {}))
        return [path.name for path in packs(folder)]

    rounds(keeper, range(1, 4))
    kept = checkpoints.latest()
    assert kept is not None
    again = States(tmp_path, 0)
    again.restore(kept.clients)
    uninterrupted = rounds(keeper, range(4, 6))
    assert rounds(again, range(4, 6)) == uninterrupted


def test_states_that_were_taken_over_are_in_memory_for_clients_at_once(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", {})
    checkpoints.save(Checkpoint(1, {}, {i: state(k) for k, i in enumerate("abc")}, {}))
    found = checkpoints.latest()
    assert found is not None
    keeper = States(tmp_path, 2 * SIZE)
    keeper.restore(found.clients)
    assert keeper.together(["b", "c"], lambda i: 0) is None
    both = keeper.together(["a", "b"], lambda i: 0)
    assert both is not None
    assert both["b"] is keeper["b"]


def test_states_are_taken_over_from_memory_too(tmp_path: Path) -> None:
    keeper = States(tmp_path, SIZE)
    keeper.restore({"a": state(1), "b": state(2)})
    assert in_files(keeper) == {"b"}
    assert [float(own["x"][0]) for own in keeper.values()] == [1, 2]


@pytest.mark.parametrize(
    "spoil",
    [
        Path.unlink,
        lambda path: os.truncate(path, 100),
        lambda path: path.write_bytes(b"\xff" * 200),
    ],
)
def test_a_damaged_state_is_refused_before_it_is_needed(
    spoil: object, tmp_path: Path, reads: list[str]
) -> None:
    checkpoints = Checkpoints(tmp_path, {})
    checkpoints.save(Checkpoint(1, {}, {"a": state(0), "b": state(1)}, {}))
    assert checkpoints.latest() is not None
    (pack,) = packs(tmp_path)
    spoil(pack)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"checkpoint round-00001: .*\.pack"):
        checkpoints.latest()
    assert reads == []


# Runs


@pytest.fixture(scope="module")
def site(tiny_base: Path, tiny_federation: Federation) -> Site:
    backbone = Backbone.load(tiny_base)
    layouts = dict.fromkeys(tiny_federation.clients, METHOD.layout(0, Layout(rank=2)))
    return Site(
        partial(LanguageModel, backbone),
        layouts,
        dict(tiny_federation.clients),
        Training(batch_size=4),
        7,
        METHOD.total_iterations,
    )


def rounds(
    site: Site, method: Method, server: State, keeper: States, last: int | None = None
) -> tuple[State, InProcess]:
    """Rounds, each followed by scoring; the server's state with the last scores, and the engine."""
    engine, clients, scores = InProcess(site, method, kept=keeper), tuple(site.data), {}
    for t in range(method.rounds if last is None else last):
        server = drive(
            method.round(server, clients, torch.Generator()),
            lambda ask, phase, t=t: engine.answer(ask, t, phase),
        )  # type: ignore[misc]
        scores = {
            f"score/{i}": found["test"]
            for i, found in engine.answer(
                Ask(method.score, {i: {} for i in clients}), t, -1
            ).items()
        }
    return server | scores, engine


def alike(a: State, b: State) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_where_states_lie_changes_no_bit(share: float, site: Site, tmp_path: Path) -> None:
    initial = Blueprint(
        partial(Adapter, site.model("ann").backbone.architecture), site.layouts, 7
    ).read("generalist")  # type: ignore[attr-defined,arg-type]
    server, whole = rounds(site, METHOD, initial, States())
    most = share * sum(whole.state_bytes().values())
    found, bounded = rounds(site, METHOD, initial, States(tmp_path, most))
    assert len(in_files(bounded.kept)) == (3 if share == 0 else 2)
    assert alike(server, found)
    assert list(whole.states()) == list(bounded.states())
    assert all(alike(own, bounded.states()[i]) for i, own in whole.states().items())
    assert whole.state_bytes() == bounded.state_bytes()


def test_clients_that_could_be_asked_at_once_are_asked_one_by_one_where_that_would_not_fit(
    tiny_pictures: Federation, tmp_path: Path
) -> None:
    method, shape = (
        CoBo(rounds=3, rho=0.1, gamma=0.05, pairs="all"),
        NetworkShape("mlp", (1, 4, 4), 10, (6,)),
    )
    layouts = dict.fromkeys(tiny_pictures.clients, Layout())
    site = Site(
        lambda layout: Classifier(shape),
        layouts,
        dict(tiny_pictures.clients),
        Training(batch_size=4),
        7,
        3,
    )
    initial = method.init(
        Blueprint(lambda layout: Classifier(shape), layouts, 7, tiny_pictures.clusters),
        tuple(layouts),
    )
    server, whole = rounds(site, method, initial, States())
    (most,) = {2 * size for size in whole.state_bytes().values()}
    found, bounded = rounds(site, method, initial, States(tmp_path, most))
    assert len(in_files(bounded.kept)) == 1
    torch.testing.assert_close(found, server, rtol=1e-4, atol=1e-6)
    for i, own in whole.states().items():
        torch.testing.assert_close(dict(bounded.states()[i]), own, rtol=1e-4, atol=1e-6)


def test_a_task_that_fails_leaves_the_file_as_it_was(site: Site, tmp_path: Path) -> None:
    initial = Blueprint(
        partial(Adapter, site.model("ann").backbone.architecture), site.layouts, 7
    ).read("generalist")  # type: ignore[attr-defined,arg-type]
    _, engine = rounds(site, METHOD, initial, States(tmp_path, 0), last=1)
    before = engine.states()["ann"]
    with pytest.raises(ClientError):
        engine.answer(Ask(METHOD.local_round, {"ann": {"foreign": torch.zeros(1)}}), 1, 0)
    assert alike(before, engine.states()["ann"])


# with micro-batches clients train one by one, wherever their states are: at once they would round
# otherwise
SHORT = [
    *(
        "method.name=local",
        "method.rounds=3",
        "method.local_steps=2",
        "checkpoint_every=1",
        "training.micro_batch=10",
        "compare_with=[]",
    ),
]


def test_a_run_in_files_resumed_in_memory_ends_as_one_in_memory(tmp_path: Path) -> None:
    whole = as_json(run.run(load("cobo-digits", SHORT), tmp_path / "whole"))[-1]
    part = execution.Execution(
        prepare(load("cobo-digits", [*SHORT, "memory=0"])), tmp_path / "part", Callback(), ""
    )
    make_folder(tmp_path / "part")
    RecordedInputs(tmp_path / "part").begin(Inputs.of(part.state.prepared))
    with part.running():
        part.one_round()
        part.one_round()
        kept = part.engine.states()
        assert isinstance(kept, Stored)
        assert in_files(kept) == set(part.state.clients)
    again = as_json(run.run(load("cobo-digits", SHORT), tmp_path / "part", resume=True))[-1]
    assert again["evaluations"] == whole["evaluations"]
    assert not list((tmp_path / "whole").glob("states-*"))
    for i, found in whole["clients"].items():
        assert found["state_bytes"] == again["clients"][i]["state_bytes"] > 0
        weights = [
            (tmp_path / name / "clients" / i / "classifier.safetensors").read_bytes()
            for name in ("whole", "part")
        ]
        assert weights[0] == weights[1]
