"""The trace of a round: what is in it, how it is bounded, and that it changes nothing."""

import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from figures import as_json
from rich.console import Console

from coterie.core import profiling
from coterie.core.profiling import STEPS, TASKS, Cost, Profile, costs, span
from coterie.reports.tables import profiled
from coterie.runs.recipes.recipe import Recipe, validate
from coterie.runs.run import run


def events(path: Path) -> list[dict]:
    with gzip.open(path, "rt") as file:
        return json.load(file)["traceEvents"]


def ranges(path: Path) -> list[str]:
    """The named ranges of a trace but those of torch itself, in the order of their beginnings."""
    own = [e for e in events(path) if e.get("cat") == "user_annotation" and "#" not in e["name"]]
    return [e["name"] for e in sorted(own, key=lambda e: e["ts"])]


@pytest.fixture
def recipe(tmp_path: Path, tiny_base: Path) -> Recipe:
    for name, word in (("ann", "cat "), ("ben", "wind "), ("cleo", "sum ")):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for k in range(12):
            (tmp_path / "texts" / name / f"{k}.txt").write_text(f"{k}: {word * 20}")
    return validate(
        {
            "name": "traced",
            "data": {
                "kind": "folders",
                "path": str(tmp_path / "texts"),
                "valid_tokens": 60,
                "test_tokens": 60,
            },
            "model": {"base": str(tiny_base), "context": 16},
            "method": {
                "name": "comigs-1g1s",
                "rounds": 3,
                "local_steps": 2,
                "router_every": 2,
                "router_steps": 1,
            },
            "training": {"batch_size": 2},
            "evaluate_every": 1,
        },
        "of a test",
    )


def test_a_trace_has_the_second_round_by_name_and_changes_nothing(
    recipe: Recipe, tmp_path: Path
) -> None:
    profile = Profile(tmp_path / "a" / "profile" / "trace.json.gz")
    (with_trace,) = as_json(run(recipe, tmp_path / "a", profile=profile))
    (without,) = as_json(run(recipe, tmp_path / "b"))
    assert profile.written
    step, router = "step generalist+specialist", "step router"
    training = [name for i in ("ann", "ben") for name in (f"local_round {i}", step, step, router)]
    scoring = ["evaluation", "score ann", "score ben"]
    assert ranges(tmp_path / "a/profile/trace.json.gz") == [
        "local_round",
        *training,
        "aggregation",
        *scoring,
        "checkpoint",
    ]
    assert with_trace["clients"] == without["clients"]
    assert with_trace["evaluations"] == without["evaluations"]
    for i in without["clients"]:
        assert (tmp_path / f"a/clients/{i}/adapter.safetensors").read_bytes() == (
            tmp_path / f"b/clients/{i}/adapter.safetensors"
        ).read_bytes()
    assert any(
        e.get("args", {}).get("Input Dims") for e in events(tmp_path / "a/profile/trace.json.gz")
    )
    assert "aten::mm" in profile.costs
    assert not (tmp_path / "b/profile").exists()


@pytest.mark.parametrize(
    ("name", "rounds", "first"),
    [("comigs-1g1s", 1, "local_round"), ("pretrained", 0, "evaluation")],
)
def test_without_a_second_round_there_is_a_trace_too(
    recipe: Recipe, name: str, rounds: int, first: str, tmp_path: Path
) -> None:
    method = {"name": name, "rounds": rounds} if rounds else {"name": name}
    changed = validate(recipe.model_dump(mode="json") | {"method": method}, "of a test")
    profile = Profile(tmp_path / "trace.json.gz")
    run(changed, tmp_path / "run", profile=profile)
    assert ranges(tmp_path / "trace.json.gz")[0] == first


def test_a_resumed_run_is_traced_and_a_finished_one_is_not(recipe: Recipe, tmp_path: Path) -> None:
    run(recipe, tmp_path / "run")
    finished = Profile(tmp_path / "none.json.gz")
    run(recipe, tmp_path / "run", resume=True, profile=finished)
    assert not finished.written
    (tmp_path / "run/result.json").unlink()
    for newest in sorted((tmp_path / "run/checkpoints").glob("round-*"))[1:]:
        for path in sorted(newest.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        newest.rmdir()
    profile = Profile(tmp_path / "trace.json.gz")
    run(recipe, tmp_path / "run", resume=True, profile=profile)
    assert ranges(tmp_path / "trace.json.gz")[:2] == ["local_round", "local_round ann"]


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Profile]:
    profile = Profile(tmp_path / "trace.json.gz")
    profile.begin(True)
    yield profile
    profile.leave()


def test_of_a_part_no_more_than_so_many_steps_are_recorded(recorded: Profile) -> None:
    x = torch.ones(3, 3)
    for part in ("first", "second"):
        recorded.enter(part)
        for client in range(TASKS + 2):
            with span(f"task {client}"):
                for _ in range(STEPS):
                    with span("step experts"):
                        x.exp()
    recorded.end()
    assert recorded.path is not None
    names = ranges(recorded.path)
    assert names.count("step experts") == 2 * STEPS
    assert [name for name in names if not name.startswith("step")] == [
        "first",
        "task 0",
        "second",
        "task 0",
    ]
    assert recorded.costs["aten::exp"].calls == 2 * STEPS


def test_of_a_part_no_more_than_so_many_tasks_are_recorded(recorded: Profile) -> None:
    recorded.enter("scoring")
    for client in range(TASKS + 2):
        with span(f"score {client}"):
            torch.ones(3).sum()
    recorded.end()
    assert recorded.path is not None
    assert ranges(recorded.path) == ["scoring", *(f"score {client}" for client in range(TASKS))]


def test_outside_of_the_recorded_round_nothing_is(tmp_path: Path) -> None:
    profile = Profile(tmp_path / "trace.json.gz")
    profile.begin(False)
    profile.enter("local_round")
    profile.end()
    assert not profile.written
    assert not list(tmp_path.iterdir())
    assert not profiling._recording


def test_an_operator_costs_what_those_that_it_called_do_not() -> None:
    def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict:
        return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "cat": cat}

    trace = [
        event("inner", 2, 3),
        event("outer", 0, 10),
        event("inner", 6, 4),
        event("inmost", 6, 1),
        event("outer", 10, 5),
        event("inner", 0, 100, tid=2),
        event("a span", 0, 100, cat="user_annotation"),
        {"ph": "i", "name": "no time"},
    ]
    found = costs(trace, {"cpu_op"})
    assert list(found) == ["inner", "outer", "inmost"]
    assert found["outer"] == Cost(2, pytest.approx(0.008))
    assert found["inner"] == Cost(3, pytest.approx(0.106))
    assert found["inmost"] == Cost(1, pytest.approx(0.001))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_terminal_shows_the_dearest_operators_and_how_a_trace_is_opened(
    recorded: Profile, elsewhere: bool
) -> None:
    recorded.enter("part")
    x = torch.ones(200, 200)
    for operation in (torch.exp, torch.sin, torch.cos):
        operation(x)
    x @ x
    recorded.end()
    console = Console(file=io.StringIO(), width=100)
    profiled(console, recorded, elsewhere=elsewhere, most=2)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert [name for name in recorded.costs if name in text] == list(recorded.costs)[:2]
    assert str(recorded.path) in text
    assert "ui.perfetto.dev" in text
    assert ("the server only" in text) == elsewhere


def test_where_nothing_ran_there_is_no_trace(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    profiled(console, Profile(tmp_path / "trace.json.gz"), elsewhere=False)
    assert "no round was left to run" in console.file.getvalue()  # type: ignore[attr-defined]
