"""What a device remembers of a run, and what it lets a server do with it."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import as_json
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import Nodes, devices, execution, simulated_nodes

from coterie.core.errors import SaveError, TensorError
from coterie.core.tensors import from_bytes, to_bytes
from coterie.engines.messages import Reply, Request
from coterie.runs import run
from coterie.runs.backends import LocalBackend, kept
from coterie.runs.device.account import Turn
from coterie.runs.device.device import Device
from coterie.runs.device.states import Memory
from coterie.runs.folder.checkpoints import KEPT
from coterie.runs.folder.metrics import MetricsFile
from coterie.runs.problems.loading import load as load_problem
from coterie.runs.recipes.recipe import Recipe, load

SETTINGS = [
    "method.rounds=6",
    "compare_with=[]",
    "data.clusters=2",
    "checkpoint_every=2",
    "evaluate_every=2",
]


def state(value: int) -> dict[str, torch.Tensor]:
    return {"at": torch.tensor(value)}


def remembered(folder: Path, *turns: Turn, kept: int = 0) -> Memory:
    """A memory of these turns; the state after (r, n) is 10 r + n."""
    memory = Memory(folder)
    for round, number in turns:
        memory.commit((round, number), state(10 * round + number), kept)
    return memory


def found(memory: Memory, turn: Turn, expects: Turn | None) -> tuple[int | None, str]:
    """The value of the state before a turn, and the note."""
    before, note = memory.before(turn, expects)
    return (int(before["at"]) if before else None), note


def test_a_turn_goes_on_from_the_one_before_it_and_a_repeated_one_from_the_same(
    tmp_path: Path,
) -> None:
    memory = remembered(tmp_path, (0, 0), (0, 1), (1, 0))
    assert found(memory, (1, 1), (1, 0)) == (10, "")
    assert found(memory, (1, 0), (0, 1)) == (1, "")
    assert found(memory, (0, 1), (0, 0)) == (0, "")


def test_the_first_turn_can_be_repeated(tmp_path: Path) -> None:
    """Its reply was lost, or the server went back to before it: there is nothing that the client
    should remember.
    """
    memory = remembered(tmp_path, (3, 0))
    assert found(memory, (3, 0), None) == (None, "")
    assert found(memory, (2, 0), None) == (None, "")


def test_a_server_that_goes_back_finds_what_was(tmp_path: Path) -> None:
    memory = remembered(tmp_path, (0, 0), (1, 0), (2, 0), (3, 0))
    assert found(memory, (2, 0), (1, 0)) == (10, "")
    memory.commit((2, 0), state(99), 0)
    assert list(memory.turns()) == [(0, 0), (1, 0), (2, 0)]  # what came after it never was
    assert found(memory, (3, 0), (2, 0)) == (99, "")


def test_a_client_that_missed_rounds_goes_on_where_it_was(tmp_path: Path) -> None:
    memory = remembered(tmp_path, (0, 0), (1, 0))
    assert found(memory, (7, 0), (1, 0)) == (10, "")


def test_who_has_no_state_starts_afresh_and_says_so_if_it_should_have_one(tmp_path: Path) -> None:
    assert found(Memory(tmp_path), (4, 0), None) == (None, "")
    assert found(Memory(tmp_path), (4, 0), (3, 0)) == (
        None,
        "starts from the beginning: it has no state of this run",
    )


def test_a_server_that_went_back_further_than_states_are_kept_is_refused(tmp_path: Path) -> None:
    memory = remembered(tmp_path, (5, 0), (6, 0))
    with pytest.raises(
        TensorError,
        match="the server is in round 3, this device only has states from round 6 on\n  Resume the "
        "run from its newest",
    ):
        memory.before((2, 0), (1, 0))


@pytest.mark.parametrize("damage", [b"", b"\0" * 50, None])
def test_a_damaged_state_is_left_out_and_said(damage: bytes | None, tmp_path: Path) -> None:
    memory = remembered(tmp_path, (0, 0), (1, 0))
    path = memory.turns()[1, 0]
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    value, note = found(memory, (2, 0), (1, 0))
    assert value == 0
    assert note.startswith("skipped a damaged state (")
    assert note.endswith("continues from its state of round 1")


def test_any_number_of_damaged_states_fits_into_a_reply(tmp_path: Path) -> None:
    memory = remembered(tmp_path, *((r, 0) for r in range(60)))
    for path in memory.turns().values():
        path.write_bytes(b"")
    value, note = found(memory, (60, 0), (59, 0))
    assert value is None
    assert note.endswith("starts from the beginning: it has no state of this run")
    assert Reply(note=note).note == note


def test_a_device_that_is_killed_while_it_saves_has_its_former_state(tmp_path: Path) -> None:
    remembered(tmp_path, (0, 0))
    program = (
        "import os, signal, sys, torch; from pathlib import Path; "
        "from coterie.runs.device.states import Memory; "
        "os.replace = lambda *paths: os.kill(os.getpid(), signal.SIGKILL); "
        "Memory(Path(sys.argv[1])).commit((1, 0), {'at': torch.tensor(10)}, 0)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.glob("*.new")] == ["round-00001-000.safetensors.new"]
    memory = Memory(tmp_path)
    assert found(memory, (1, 0), (0, 0)) == (0, "")
    memory.commit((1, 1), state(11), 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "round-00000-000.safetensors",
        "round-00001-001.safetensors",
    ]


def test_a_full_disk_leaves_the_former_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = remembered(tmp_path, (0, 0))

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(SaveError, match="No space left"):
            memory.commit((1, 0), state(10), 0)
    assert found(memory, (1, 0), (0, 0)) == (0, "")


def test_two_requests_at_once_take_turns(tmp_path: Path) -> None:
    memory, order = Memory(tmp_path), []

    def late() -> None:
        with memory.alone():
            order.append("late")

    with memory.alone():
        thread = threading.Thread(target=late)
        thread.start()
        thread.join(timeout=0.3)
        order.append("first")
    thread.join()
    assert order == ["first", "late"]


@given(st.integers(0, 60), st.integers(1, 7))
def test_as_much_is_kept_as_the_oldest_checkpoint_needs(round: int, every: int) -> None:
    """Checkpoints are written at multiples of `every`, after the evaluation of that round; the
    newest two stay.
    """
    before_this_round = list(range(0, round, every))[-KEPT:] or [0]
    assert kept(round, every) <= before_this_round[0]
    assert round - kept(round, every) <= (KEPT + 1) * every


@settings(max_examples=8)
@given(st.integers(1, 5), st.lists(st.integers(0, 3), min_size=30, max_size=30))
def test_old_states_are_let_go_of_but_none_that_a_checkpoint_needs(
    every: int, exchanges: list[int]
) -> None:
    """Exchanges of 30 rounds, none in some of them; at any time the server may go back to any of
    its checkpoints.
    """
    with tempfile.TemporaryDirectory() as folder:
        memory, done = Memory(Path(folder)), list[Turn]()
        for round, number in ((r, n) for r, most in enumerate(exchanges) for n in range(most)):
            memory.commit((round, number), state(100 * round + number), kept(round, every))
            done.append((round, number))
            for checkpoint in list(range(0, round + 1, every))[-KEPT:]:
                before = [turn for turn in done if turn < (checkpoint, 0)]
                if before:
                    assert found(memory, (checkpoint, 0), before[-1]) == (
                        100 * before[-1][0] + before[-1][1],
                        "",
                    )
            assert len(list(Path(folder).iterdir())) <= 1 + 3 * (KEPT + 1) * every


# Devices.


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return load("cobo-digits", [*SETTINGS, "engine=flower"])


def request(recipe: Recipe, **fields: Any) -> Request:
    section = recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"})
    return Request(
        action="task", run="run", recipe=section, client="c0-0", task="descend"
    ).model_copy(update=fields)


def asked(device: Device, request: Request, body: bytes = b"") -> tuple[Reply, bytes]:
    text, found = device.answer(request.model_dump_json(), body)
    return Reply.model_validate_json(text), found


@pytest.fixture(scope="module")
def pull(recipe: Recipe) -> bytes:
    return to_bytes({"pull": torch.zeros(64 * 64 + 64 + 64 * 10 + 10)})


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return Device(tmp_path / "home", "c0-0")


def test_a_request_that_is_repeated_is_answered_alike(
    recipe: Recipe, device: Device, pull: bytes
) -> None:
    first = asked(device, request(recipe), pull)
    assert first[0].problem == ""
    assert asked(device, request(recipe), pull) == first
    later = request(recipe, number=1, expects=(0, 0))
    second = asked(device, later, pull)
    assert second[1] != first[1]
    assert asked(replace(device), later, pull) == second
    assert asked(device, request(recipe), pull) == first  # the server went back


def test_with_noise_of_its_own_too(device: Device, tmp_path: Path) -> None:
    """Otherwise a server that asks again and again could average the noise away; another device
    draws other noise.
    """
    settings = [
        *SETTINGS,
        "engine=flower",
        "method.name=fedavg",
        "privacy={clip: 1.0, noise: 1.0, where: local}",
    ]
    recipe = load("cobo-digits", [s for s in settings if "rho" not in s])
    theta = recipe.build_method().init(_Blueprint(recipe), ())
    ask = request(recipe, task="local_round")
    first = asked(device, ask, to_bytes(theta))
    assert first[0].problem == ""
    assert asked(device, ask, to_bytes(theta)) == first
    assert stat.S_IMODE((device.home / "secret").stat().st_mode) == 0o600
    other = asked(Device(tmp_path / "other", "c0-0"), ask, to_bytes(theta))
    moved = {name: t + 1e-3 for name, t in theta.items()}
    elsewhere = asked(device, ask, to_bytes(moved))
    reply = from_bytes(first[1])
    for found, sent in ((from_bytes(other[1]), theta), (from_bytes(elsewhere[1]), moved)):
        difference = torch.cat(
            [(found[n] - sent[n] - reply[n] + theta[n]).flatten() for n in theta]
        )
        assert float(difference.std()) == pytest.approx(2**0.5, rel=0.1)  # two independent N(0, 1)


class _Blueprint:
    """As much of a server's model as FedAvg wants."""

    def __init__(self, recipe: Recipe) -> None:
        self.problem = load_problem(recipe)

    def read(self, *roles: Any) -> dict[str, torch.Tensor]:
        model = self.problem.trainable(self.problem.base)
        return {name: t for role in roles for name, t in model.initial(role, 3).items()}


def test_its_own_data_are_used_whatever_the_recipe_says(tmp_path: Path, tiny_base: Path) -> None:
    for name, words in (
        ("own", "one two three four "),
        ("secret", "nothing that a server may choose "),
    ):
        (tmp_path / name / "ann").mkdir(parents=True)
        for k in range(20):
            (tmp_path / name / "ann" / f"{k}.txt").write_text(
                f"{words}{k} " * (6 if name == "own" else 9)
            )
    settings = [
        f"data.path={tmp_path / 'secret'}",
        f"model.base={tiny_base}",
        "model.context=16",
        "compare_with=[]",
    ]
    recipe = load("folders", [*settings, "engine=flower"])
    hello = Request(action="hello", run="run", recipe=recipe.model_dump(mode="json"))
    own = Device(tmp_path / "home", data=tmp_path / "own")
    member = asked(own, hello)[0].member
    assert member is not None
    for name in ("own", "secret"):
        train, valid, test = (
            load_problem(
                load("folders", [*settings, f"data.path={tmp_path / name}"])
            ).federation.clients["ann"]
        ).splits
        assert ((train.windows, valid.windows, test.windows) == member.windows) == (name == "own")
    reply, _ = asked(
        Device(tmp_path / "home"), hello
    )  # one that was given no data has none, though the server named some
    assert reply.member is None
    assert reply.problem


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"task": "no_such_task"}, "no task 'no_such_task'"),
        ({"task": "round"}, "no task 'round'"),  # a method of the method, but no @task
        ({"task": "__init__"}, "no task '__init__'"),
        ({"task": ""}, "no task ''"),
        ({"client": "c0-1"}, "asked for client 'c0-1', this device is 'c0-0'"),
        ({"client": None}, "asked for client None"),
        ({"client": "centralized"}, "asked for client 'centralized'"),
        ({"version": "0.0.0"}, "request from coterie 0.0.0"),
    ],
)
def test_what_it_refuses(
    changed: dict[str, Any], problem: str, recipe: Recipe, device: Device, pull: bytes
) -> None:
    reply, body = asked(device, request(recipe, **changed), pull)
    assert problem in reply.problem
    assert body == b""
    assert not list(device.home.rglob("*.safetensors"))


def test_it_refuses_methods_that_want_all_data_in_one_place(device: Device) -> None:
    recipe = load("cobo-digits", ["method.name=centralized", "compare_with=[]", "data.clusters=2"])
    for fields in ({"action": "hello"}, {"task": "local_round"}):
        reply, _ = asked(device, request(recipe, **fields))
        assert reply.problem == "centralized needs the data of all clients in one place"
        assert reply.member is None


@pytest.mark.parametrize("run_name", ["../elsewhere", "a/b", "", ".hidden", "a\n", "a" * 201])
def test_a_run_names_one_folder_of_its_own(
    run_name: str, recipe: Recipe, device: Device, pull: bytes
) -> None:
    reply, _ = asked(device, request(recipe).model_copy(update={"run": run_name}), pull)
    assert reply.problem.startswith("request: run: ")
    assert not list(device.home.parent.rglob("*.safetensors"))


def test_where_it_keeps_everything_is_its_own_business(
    recipe: Recipe, device: Device, pull: bytes, tmp_path: Path
) -> None:
    reply, _ = asked(device, request(recipe, folder=str(tmp_path / "elsewhere")), pull)
    assert reply.problem == ""
    assert not (tmp_path / "elsewhere").exists()
    assert (device.home / "run/states/c0-0/round-00000-000.safetensors").exists()


def test_a_server_cannot_make_it_lie(
    recipe: Recipe, device: Device, pull: bytes, tmp_path: Path
) -> None:
    honest = asked(device, request(recipe), pull)
    told = request(recipe)
    told = told.model_copy(
        update={"recipe": told.recipe | {"attack": {"kind": "nan", "clients": ["c0-0"]}}}
    )
    assert asked(Device(tmp_path / "other", "c0-0"), told, pull) == honest
    simulated = told.model_copy(update={"folder": str(tmp_path / "sim")})
    reply, body = asked(
        Device(Path(), index=0), simulated, pull
    )  # in a simulation it has an effect
    assert reply.problem == ""
    assert all(bool(torch.isnan(t).all()) for t in from_bytes(body).values())


@settings(max_examples=60)
@given(st.data())
def test_no_request_makes_it_fail_to_answer(data: st.DataObject) -> None:
    recipe = load("cobo-digits", SETTINGS)
    real = request(recipe).model_dump_json()
    start = data.draw(st.integers(0, len(real)))
    changed = real[:start] + data.draw(st.text(max_size=3)) + real[start + 1 :]
    text = data.draw(
        st.sampled_from([real[:start], changed, data.draw(st.text())]).filter(
            lambda text: text != real
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        answered, body = Device(Path(folder), "c0-0").answer(
            text, data.draw(st.binary(max_size=60))
        )
    reply = Reply.model_validate_json(answered)
    assert reply.problem
    assert body == b""


# Whole runs.


def stopped_after(backend: Any, recipe: Recipe, folder: Path, count: int) -> None:
    """A run whose server dies in the middle of the round after `count` rounds: when the first
    exchange of it was answered.
    """
    started = execution(backend, recipe, folder)
    started.started, started.requests.metrics = 0.0, MetricsFile(folder)
    torch.set_num_threads(1)
    for _ in range(count):
        started.one_round()
    exchange = started._exchange

    def dies(ask: Any, phase: int) -> Any:
        exchange(ask, phase)
        raise KeyboardInterrupt

    started._exchange = dies  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        started.one_round()
    started.requests.metrics.close()


@pytest.mark.parametrize("rounds", [3, 4, 5])
def test_a_server_that_comes_back_ends_as_if_nothing_had_happened(
    rounds: int, recipe: Recipe, tmp_path: Path
) -> None:
    """It goes back to the checkpoint of round 2 or 4; devices have gone further, and go back
    with it.
    """

    def grid(name: str) -> Nodes:
        found = Nodes()
        for client in ("c0-0", "c0-1", "c1-0", "c1-1"):
            found.add({"client": client, "home": str(tmp_path / name / client)})
        return found

    whole = as_json(run.run(recipe, tmp_path / "whole", backend=devices(grid("a"), recipe, 4)))[-1]
    nodes = grid("b")
    stopped_after(devices(nodes, recipe, 4), recipe, tmp_path / "part", rounds)
    (tmp_path / "part/recipe.yaml").write_text(run.recipes.dump(recipe))
    asked_before = len(nodes.of("c0-0").requests)
    resumed = as_json(
        run.run(recipe, tmp_path / "part", resume=True, backend=devices(nodes, recipe, 4))
    )[-1]
    tasks = [r for r in nodes.of("c0-0").requests[asked_before:] if r.action == "task"]
    assert tasks[0].round == rounds // 2 * 2
    assert {r.run for r in tasks} == {
        r.run for r in nodes.of("c0-0").requests[:asked_before] if r.action == "task"
    }
    for key in ("evaluations", "clients", "lost"):
        assert resumed[key] == whole[key]
    servers = [
        (tmp_path / name / "checkpoints/round-00006/server.safetensors").read_bytes()
        for name in ("whole", "part")
    ]
    assert servers[0] == servers[1]
    lines = {name: (tmp_path / name / "metrics.jsonl").read_text() for name in ("whole", "part")}
    assert lines["part"] == lines["whole"]  # no client says that it goes on from an older state
    for client in ("c0-0", "c1-1"):
        files = [sorted((tmp_path / name / client).glob("*/clients/*/*")) for name in ("a", "b")]
        assert (
            [path.read_bytes() for path in files[0]]
            == [path.read_bytes() for path in files[1]]
            != []
        )


def test_a_simulation_that_died_before_its_first_checkpoint_starts_again(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "coterie.engines.flower.apps.simulated",
        lambda clients, threads, handle, accelerators: simulated_nodes(clients),
    )
    whole = as_json(run.run(recipe, tmp_path / "whole"))[-1]
    stopped_after(LocalBackend(), recipe, tmp_path / "part", 1)
    (tmp_path / "part/recipe.yaml").write_text(run.recipes.dump(recipe))
    resumed = as_json(run.run(recipe, tmp_path / "part", resume=True))[-1]
    assert resumed["evaluations"] == whole["evaluations"]
    assert resumed["lost"] == {}


def test_thirty_rounds_leave_few_files(tmp_path: Path) -> None:
    settings = [
        "method.rounds=30",
        "compare_with=[]",
        "data.clusters=1",
        "method.pairs=all",
        "engine=flower",
        "checkpoint_every=1",
    ]
    recipe = load("cobo-digits", settings)
    grid = Nodes()
    for client in ("c0-0", "c0-1"):
        grid.add({"client": client, "home": str(tmp_path / client)})
    most = 0

    def look(*_: object) -> None:
        nonlocal most
        most = max(most, len(list(tmp_path.glob("c0-0/*/states/c0-0/round-*"))))

    grid.before = look
    run.run(recipe, tmp_path / "out", backend=devices(grid, recipe, 2))
    assert 2 < most <= 10
