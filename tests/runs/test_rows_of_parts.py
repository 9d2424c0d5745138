"""Rows that are parts of another row are trained once, by it, and are what they are alone."""

import json
from pathlib import Path
from typing import Any

import pytest

import coterie
from coterie.core.callback import Callback
from coterie.runs.recipes.recipe import Recipe

ROUTED = {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1}
SMALL: dict[str, Any] = {
    "data": {"clients": 3, "train_tokens": 2000, "valid_tokens": 1000, "test_tokens": 1000},
    "method": {"name": "interpolation", "rounds": 3, "local_steps": 2},
    "training": {"batch_size": 4},
    "checkpoint_every": 1,
}
ROWS = ["pretrained", "local", "fedavg"]
# what depends on the moment, and not on the models
UNLIKE = ("wall_s", "peak_memory_bytes", "part_of")


class Trained(Callback):
    """Counts the rounds that each row trains here."""

    def __init__(self) -> None:
        self.rounds: dict[str, int] = {}

    def begin(self, title: str, *_: Any) -> None:
        self.title = title

    def round(self, done: int) -> None:
        self.rounds[self.title] = self.rounds.get(self.title, 0) + 1


def figures(folder: Path) -> dict[str, Any]:
    result = json.loads((folder / "result.json").read_text())
    return {name: value for name, value in result.items() if name not in UNLIKE}


@pytest.mark.parametrize(
    "scored",
    [
        {"keep": "best", "evaluate_every": 1},
        {"curve_every": 1, "participation": {"clients": 2}},
    ],
    ids=["best", "last"],
)
def test_a_row_of_a_part_is_that_method_alone(
    tmp_path: Path, tiny_base: Path, scored: dict[str, Any]
) -> None:
    """Scores of every round, curves, bytes and personal models, in the rows' order."""
    trained, settings = Trained(), SMALL | scored | {"model": {"base": str(tiny_base)}}
    run = coterie.run(
        "synthetic", out=tmp_path / "run", compare_with=ROWS, callbacks=[trained], **settings
    )
    assert [row.method for row in run.rows] == [*ROWS, "interpolation"]
    assert trained.rounds == {"Interpolation": 3}
    for name in ("local", "fedavg"):
        method = {**SMALL["method"], "name": name}
        alone = coterie.run(
            "synthetic", out=tmp_path / name, compare_with=[], **settings | {"method": method}
        )
        beside = run.folder / "baselines" / name
        assert figures(beside) == figures(alone.folder)
        assert run.baselines[name].part_of == "interpolation"
        assert run.baselines[name].wall_s < run.result.wall_s
        models = [path for path in (alone.folder / "clients").rglob("*") if path.is_file()]
        assert models
        for path in models:
            copy = beside / path.relative_to(alone.folder)
            assert copy.read_bytes() == path.read_bytes(), path
    text = run.report.read_text()
    assert "local, fedavg: trained as a part of interpolation, once" in text


class Stop(Trained):
    """Stops a run in the second round of the first row."""

    def round(self, done: int) -> None:
        super().round(done)
        if done == 2:
            raise KeyboardInterrupt


@pytest.mark.slow
def test_an_interrupted_run_and_seeds(tmp_path: Path, tiny_base: Path) -> None:
    settings: dict[str, Any] = {**SMALL, "keep": "best", "evaluate_every": 1}
    settings["model"] = {"base": str(tiny_base)}
    whole = coterie.run("synthetic", out=tmp_path / "whole", compare_with=ROWS[1:], **settings)
    stopped = tmp_path / "stopped"
    with pytest.raises(KeyboardInterrupt):
        coterie.run("synthetic", out=stopped, compare_with=ROWS[1:], callbacks=[Stop()], **settings)
    trained = Trained()
    coterie.run(
        "synthetic",
        out=stopped,
        resume=True,
        compare_with=ROWS[1:],
        callbacks=[trained],
        **settings,
    )
    assert trained.rounds == {"Interpolation": 1}
    for place in ("baselines/local", "baselines/fedavg", "."):
        assert figures(stopped / place) == figures(whole.folder / place)
    # by seeds, each from the run of its own seed
    trained = Trained()
    table = coterie.compare(
        ["fedavg", "interpolation"],
        "synthetic",
        seeds=2,
        out=tmp_path / "table",
        callbacks=[trained],
        **settings,
    )
    assert trained.rounds == {"Interpolation, seed 0": 3, "Interpolation, seed 1": 3}
    assert table["fedavg"].part_of == "interpolation"
    assert figures(tmp_path / "table/fedavg/seed-0") == figures(whole.folder / "baselines/fedavg")


def test_what_is_no_part_is_trained_itself() -> None:
    """Another setting, or one that is of a method as a whole."""
    recipe = Recipe.load("synthetic", **SMALL)
    rows = [recipe.with_method(name) for name in (*ROWS, "comigs-1g1s")]
    assert [recipe.trains(row) for row in rows] == [False, True, True, False]
    assert not any(recipe.with_method("local").trains(row) for row in rows)
    routed = recipe.with_changes(method={"parts": ["fedavg", ROUTED]})
    assert [routed.trains(row) for row in rows] == [False, False, True, False]
    for changes in (
        {"audit": {}},
        {"seed": 1},
        {"training": {"batch_size": 2}},
        {"method": {"local_steps": 3}},
    ):
        assert not any(map(recipe.with_changes(**changes).trains, rows)), changes


def test_with_patience_parts_end_together(tmp_path: Path, tiny_base: Path) -> None:
    """A part that has something to do at the end does it once."""
    settings: dict[str, Any] = {**SMALL, "keep": "best", "evaluate_every": 1, "patience": 1}
    settings["method"] = {**SMALL["method"], "rounds": 9, "parts": ["local", "finetuned-fedavg"]}
    settings["training"] = {"batch_size": 4, "experts": {"lr": 1e-12}}  # nothing gets better
    settings["model"] = {"base": str(tiny_base)}
    trained, rows = Trained(), ["local", "finetuned-fedavg"]
    run = coterie.run(
        "synthetic", out=tmp_path / "run", compare_with=rows, callbacks=[trained], **settings
    )
    assert list(trained.rounds) == ["Interpolation"]
    assert trained.rounds["Interpolation"] < 9
    for name, result in run.baselines.items():
        assert result.rounds == run.result.rounds
        for i, client in result.clients.items():
            part = (run.result.clients[i].parts or {})[name]
            assert (client.valid, client.test) == (part.valid, part.test)
