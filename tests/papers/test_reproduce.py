"""Tables and figures of the papers: their files, a run at toy size, and the verdicts on what the
paper says.
"""

import io
import json
import re
import shutil
import threading
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from figures import as_json, typed
from reports.samples import classified, result
from rich.console import Console

from coterie.core.callback import Callback
from coterie.core.errors import Refused
from coterie.core.files import write_json
from coterie.core.metrics import ACCURACY, PERPLEXITY
from coterie.core.result import RESULT, Result
from coterie.core.result import rows as comparison
from coterie.papers import tables
from coterie.papers.checks import _verdicts
from coterie.papers.figures import seed_figures
from coterie.papers.job import Job, unlike
from coterie.papers.page import markdown, terminal, write_page
from coterie.papers.reproduce import _machines, _shown, reproduce, search
from coterie.papers.reproduced import spoken_of_row
from coterie.papers.tables import Better, Figure, Near, Picture, Reproduction, Statement
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load
from coterie.runs.tuning.search import Effort

TOY = (
    "method.rounds=2",
    "method.local_steps=1",
    "training.batch_size=2",
    "data.train_tokens=800",
    "data.valid_tokens=300",
    "data.test_tokens=300",
)


@pytest.mark.parametrize("name", tables.names())
@pytest.mark.parametrize("scale", tables.SCALES)
def test_every_cell_of_every_table_and_figure_is_a_valid_recipe(
    name: str, scale: tables.Scale, tmp_path: Path
) -> None:
    job = Job(name, scale, tmp_path)
    if not any(scale in column.recipes for column in job.reproduction.columns.values()):
        with pytest.raises(Refused, match="no scale"):
            job.cells  # noqa: B018
        return
    assert job.cells
    for row, column in job.cells:
        choices = [
            {key: value} for key, values in job.sweep(row, column).items() for value in values
        ] or [{}]
        for choice in choices:
            recipe, folder = job.run(row, column, choice, 3)
            assert isinstance(recipe, Recipe)
            assert (recipe.seed, recipe.data.seed) == (3, 3)
            assert folder.is_relative_to(tmp_path)


def test_later_seeds_have_splits_of_their_own(tmp_path: Path) -> None:
    """Those of which runs were kept with one split still have it."""

    def splits(name: str, row: str) -> list[int]:
        job = Job(name, "small", tmp_path, seeds=5, columns=("digits",))
        return [job.run(row, "digits", {}, seed)[0].data.seed for seed in job.numbers]

    assert splits("ddome/table1", "ddome") == [0, 0, 0, 3, 4]
    assert splits("ddome/table4", "ddome") == [0, 1, 2, 3, 4]
    told = [tables.load(f"ddome/table{k}").split for k in (1, 4)]
    assert told == [
        "Seeds below 3 share one split of the data, later ones have their own.",
        "Every seed has its own split of the data.",
    ]


def test_the_tables_and_figures_of_the_papers_are_all_there() -> None:
    comigs = {f"comigs/table{k}" for k in (1, 2, 4, 5, 6)} | {
        f"comigs/figure{k}" for k in range(3, 12)
    }
    ddome = {f"ddome/table{k}" for k in range(1, 9)} | {f"ddome/figure{k}" for k in range(2, 12)}
    assert comigs | ddome <= set(tables.names())


@pytest.mark.parametrize("name", [name for name in tables.names() if name.startswith("ddome/")])
def test_the_data_of_every_table_of_ddome_can_be_dealt(name: str, tmp_path: Path) -> None:
    job = Job(name, "small", tmp_path)
    dealt = set()
    for row, column in job.cells:
        recipe, _ = job.run(
            row, column, {key: values[0] for key, values in job.sweep(row, column).items()}, 0
        )
        if recipe.data.kind == "digits":  # which are on every machine
            dealt.add(column)
            federation = prepare(recipe).problem.federation
            if recipe.data.unseen:
                assert next(iter(federation.unseen)) == (
                    "random" if recipe.data.partition == "dirichlet" else "aligned"
                )
            else:  # a table of the clients that train
                assert not federation.unseen
            assert len(federation.anchors) == recipe.data.anchors > 0
    assert dealt == {column for column in job.reproduction.columns if column.startswith("digits")}


def test_cells_that_are_the_same_run_share_a_folder_and_others_do_not(tmp_path: Path) -> None:
    two, five = Job("comigs/table2", "small", tmp_path), Job("comigs/table5", "small", tmp_path)
    choice = {"training.experts.lr": 5e-3}
    assert two.run("local", "agnews", choice, 0)[1] == five.run("local", "agnews", choice, 0)[1]
    different = [
        two.run("local", "agnews", {"training.experts.lr": lr}, seed)[1]
        for lr in (5e-3, 1e-2)
        for seed in (0, 1)
    ]
    assert len(set(different)) == 4


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> tuple[Job, dict]:
    overrides = (*TOY, f"data.root={data_root}")
    job = Job(
        "comigs/table2",
        "small",
        tmp_path_factory.mktemp("rep"),
        2,
        ("agnews",),
        ("pretrained", "local", "comigs-1g1s"),
        overrides,
    )
    return job, as_json(reproduce(job))


def test_a_table_holds_measured_beside_published(toy: tuple[Job, dict]) -> None:
    job, found = toy
    cells = {cell["row"]: cell for cell in found["cells"]}
    assert cells.keys() == {"pretrained", "local", "comigs-1g1s"}
    assert (cells["local"]["published"], cells["local"]["published_std"]) == (41.46, 0.06)
    for cell in cells.values():
        results = [json.loads((job.folder / path / RESULT).read_text()) for path in cell["folders"]]
        assert [r["seed"] for r in results] == [0, 1]
        assert cell["mean"] == pytest.approx(sum(r["mean"] for r in results) / 2)
    stem = job.folder / "comigs-table2"
    assert json.loads(Path(f"{stem}.json").read_text())["columns"] == {"agnews": "AG News"}
    text = Path(f"{stem}.md").read_text()
    assert f"{cells['local']['mean']:.2f} ± {cells['local']['std']:.2f} | 41.46 ± 0.06" in text
    page = Path(f"{stem}.html").read_text()
    assert "41.46 ± 0.06" in page
    assert "http" not in page.replace("http://www.w3.org", "")


def test_a_row_may_stand_in_some_columns_only(tmp_path: Path) -> None:
    rows: dict[str, set[str]] = {}
    for row, column in Job("cobo/table2", "small", tmp_path).cells:
        rows.setdefault(column, set()).add(row)
    assert rows["digits"] - rows["language"] == {"cobo", "ditto", "ifca", "fc", "oracle"}
    assert rows["language"] - rows["digits"] == {"cobo-language", "ditto-language", "pcl"}
    assert "fc" not in rows["device"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Job, dict]:
    """Four rounds of a table with a row whose settings are chosen among some."""
    job = Job(
        "cobo/table2",
        "small",
        tmp_path_factory.mktemp("swept"),
        2,
        ("digits",),
        ("local", "ditto"),
        ("method.rounds=4",),
    )
    return job, as_json(reproduce(job))


def test_what_is_chosen_is_the_best_on_validation_at_the_first_seed(
    swept: tuple[Job, dict],
) -> None:
    job, found = swept
    cells = {cell["row"]: cell for cell in found["cells"]}
    assert cells["local"]["choice"].keys() == {"training.experts.lr"}
    sweep, chosen = job.sweep("ditto", "digits"), cells["ditto"]["choice"]
    assert chosen.keys() == sweep.keys() == {"training.experts.lr", "method.prox"}

    def valid(prox: float) -> float:
        folder = job.run("ditto", "digits", chosen | {"method.prox": prox}, 0)[1]
        return json.loads((folder / RESULT).read_text())["evaluations"][-1]["valid"]

    accuracies = {prox: valid(prox) for prox in sweep["method.prox"]}  # the last one that is chosen
    assert list(accuracies) == [1.0, 0.1, 0.01]
    best = max(accuracies, key=lambda prox: accuracies[prox])
    while best in (min(accuracies), max(accuracies)) and len(accuracies) < 3 + 4:
        beyond = float(f"{best * 10 if best == max(accuracies) else best / 10:.4g}")
        accuracies[beyond] = valid(beyond)
        best = max(accuracies, key=lambda prox: accuracies[prox])
    assert chosen["method.prox"] == best


def test_the_page_says_how_many_settings_each_row_tried(swept: tuple[Job, dict]) -> None:
    job, _ = swept
    for ending in ("md", "html"):
        page = Path(f"{job.folder / 'cobo-table2'}.{ending}").read_text()
        assert "Settings that a row tried on validation at the first seed" in page
        assert "every row 5." in page
        assert "Beyond the edges of these grids, where the best lay there: " in page
    assert "| Ditto (lr" in Path(f"{job.folder / 'cobo-table2'}.md").read_text()


@pytest.mark.parametrize(("name", "scale"), [(n, s) for n in tables.names() for s in tables.SCALES])
def test_no_baseline_tries_fewer_settings_than_our_rows(
    name: str, scale: str, tmp_path: Path
) -> None:
    job = Job(name, scale, tmp_path)
    if not any(scale in column.recipes for column in job.reproduction.columns.values()):
        return  # which `test_every_cell` is about
    for column in {column for _, column in job.cells}:
        rows = [row for row, own in job.cells if own == column]
        ours = {
            row
            for row in rows
            if job.reproduction.rows[row].method.startswith(("comigs", "cobo", "ddome"))
        }
        tried = {row: count for row in rows if (count := job.tried(row, column))}
        most = max((tried[row] for row in ours & tried.keys()), default=0)
        assert not {
            row: count for row, count in tried.items() if row not in ours and count < most
        }, column


def test_ditto_is_swept_alike_wherever_it_stands_beside_cobo(tmp_path: Path) -> None:
    table = Job("cobo/table2", "small", tmp_path)
    for name, column in (("cobo/figure2b", "digits"), ("cobo/figure6", "device")):
        assert Job(name, "small", tmp_path).sweep("ditto", column) == table.sweep("ditto", column)
    for name, column in (("cobo/figure2b", "silo"), ("cobo/figure6", "device")):
        assert Job(name, "paper", tmp_path).sweep("ditto", column) == Job(
            "cobo/table2", "paper", tmp_path
        ).sweep("ditto", column)


def test_what_only_a_search_tries_is_not_tried_without_one(tmp_path: Path) -> None:
    fixed, tuned = (
        Job("cobo/table2", "small", tmp_path, effort=effort) for effort in (None, Effort())
    )
    cell = "cobo-language", "language"
    assert tuned.sweep(*cell).keys() - fixed.sweep(*cell).keys() == {"method.rho"}
    assert tuned.sweep("local", "silo") == fixed.sweep("local", "silo")


def test_the_pull_between_languages_is_as_long_as_the_papers() -> None:
    """After all rounds 1/e^0.5 of a disagreement is left where gradients are nought."""
    for name in ("cobo-languages", "gpt2-languages"):
        method = load(name).build_method()
        assert method.rho * method.rounds == pytest.approx(0.5, rel=0.01)


def test_what_was_run_is_not_run_again(toy: tuple[Job, dict]) -> None:
    job, found = toy
    stamps = {path: path.stat().st_mtime_ns for path in job.folder.rglob(RESULT)}
    again = as_json(
        reproduce(Job(job.name, job.scale, job.folder, 2, job.columns, job.rows, job.overrides))
    )
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob(RESULT)} == stamps
    assert again == found


def test_versions_are_those_of_the_runs_which_another_machine_may_have_made(
    toy: tuple[Job, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, found = toy
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert as_json(reproduce(job)) == found


def test_cells_that_another_machine_computed_are_named(
    toy: tuple[Job, dict], tmp_path: Path
) -> None:
    job, found = toy
    shutil.copytree(job.folder, tmp_path / "copy")
    *others, last = typed(found).cells
    path = tmp_path / "copy" / last.folders[-1] / RESULT  # of its last seed alone
    made = json.loads(path.read_text())
    write_json(path, made | {"machine": made["machine"] | {"device": "cuda"}})
    (note,) = _machines(replace(job, folder=tmp_path / "copy"), [*others, last])
    assert note.startswith("Computed with cuda, float32, ")
    assert note.endswith(f": {last.title} ({last.column}).")
    assert not _machines(job, [*others, last])


def test_one_process_at_a_time_writes_a_table(
    toy: tuple[Job, dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns of a table may be run at the same time; the files of the table are the same."""
    job, _ = toy
    writing = threading.Lock()

    def alone(path: Path, value: object) -> None:
        assert writing.acquire(blocking=False)
        time.sleep(0.05)
        write_json(path, value)
        writing.release()

    monkeypatch.setattr("coterie.papers.reproduce.write_json", alone)
    with ThreadPoolExecutor(3) as threads:
        assert len(list(threads.map(reproduce, [replace(job) for _ in range(3)]))) == 3


def test_statements_about_rows_that_were_not_run_have_no_verdict(toy: tuple[Job, dict]) -> None:
    _, found = toy
    assert all("pfedmoe" not in s["detail"] for s in found["statements"])
    assert not any("PCL" in s["says"] for s in found["statements"])
    assert found["unjudged"] > 0


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory, data_root: Path) -> tuple[Job, dict]:
    job = Job(
        "comigs/table2",
        "small",
        tmp_path_factory.mktemp("tuned"),
        2,
        ("agnews",),
        ("pretrained", "local", "comigs-1g1s"),
        (*TOY, f"data.root={data_root}"),
        effort=Effort(trials=2, extensions=1),
    )
    return job, as_json(reproduce(job))


@pytest.mark.slow
def test_with_tune_every_row_has_the_same_effort_and_keeps_the_tables_rounds(
    tuned: tuple[Job, dict],
) -> None:
    job, found = tuned
    cells = {cell["row"]: cell for cell in found["cells"]}
    assert cells["pretrained"]["choice"] == {}
    for row in ("local", "comigs-1g1s"):
        assert "training.experts.lr" in cells[row]["choice"]
        for folder in cells[row]["folders"]:
            run = json.loads((job.folder / folder / RESULT).read_text())
            assert run["rounds"] == 2
    _, searched = search(job, Callback())
    for own in searched.values():
        first = [judged for judged in own.judged if judged.rung == 0]
        assert len(first) in (0, 2)
        assert len([judged for judged in own.judged if judged.rung is None]) <= 1
    assert (
        sum(
            "Every row that trains had the same effort: it tried 2 settings" in note
            for note in found["notes"]
        )
        == 1
    )


def test_a_tuned_table_stands_beside_the_fixed_one(tuned: tuple[Job, dict]) -> None:
    job, found = tuned
    assert found["part"][-1] == "--tune --trials 2"
    assert (job.folder / "comigs-table2-tuned.json").exists()
    assert not (job.folder / "comigs-table2.json").exists()
    fixed = Job(job.name, job.scale, job.folder)
    for row, column in job.cells:  # which has curves, and a learning rate that all rows share
        recipe, _ = fixed.run(row, column, {}, 0)
        assert recipe.evaluate_every == 2
        assert recipe.training.experts.lr == 5e-3
        assert job.run(row, column, {}, 0)[0].evaluate_every == 0


@pytest.mark.parametrize("table", ["ddome/table1", "ddome/table4"])
def test_ddome_is_tuned_on_more_validation_data_and_trains_and_is_tested_as_without(
    table: str, tmp_path: Path
) -> None:
    fixed, tuned = (
        Job(table, "small", tmp_path, effort=effort).run("ddome", "digits", {}, 0)[0].data.load()
        for effort in (None, Effort())
    )
    assert fixed.everyone.keys() == tuned.everyone.keys()
    trained = {row for own in tuned.clients.values() for row in own.train.rows}
    for id, own in fixed.everyone.items():
        more = tuned.everyone[id]
        assert (own.train.rows == more.train.rows).all()
        assert (own.test.rows == more.test.rows).all()
        assert own.train.seed == more.train.seed
        if id in tuned.clients:
            assert (own.valid.rows == more.valid.rows).all()
        else:
            assert len(own.valid.rows) <= 5
            # of Table 4, where anchors and others each train on nearly all images, few are left
            assert len(more.valid.rows) >= (20 if table == "ddome/table1" else 3)
            assert not set(more.valid.rows) & trained


def test_a_tuned_table_runs_nothing_twice(tuned: tuple[Job, dict]) -> None:
    job, found = tuned
    stamps = {path: path.stat().st_mtime_ns for path in job.folder.rglob(RESULT)}
    assert as_json(reproduce(replace(job))) == found
    assert {path: path.stat().st_mtime_ns for path in job.folder.rglob(RESULT)} == stamps


def test_texts_are_read_as_often_as_in_the_paper(tmp_path: Path) -> None:
    """Every row that trains: 3.4 epochs of training text; 1G1S: 2.3 of validation text, with the
    paper's 0.3 router steps in a local iteration.
    """
    job = Job("comigs/table2", "small", tmp_path)
    for row, column in job.cells:
        recipe, _ = job.run(row, column, {}, 0)
        method, tokens = recipe.build_method(), recipe.training.batch_size * recipe.model.context
        if method.total_iterations:
            assert method.total_iterations == 40
            assert 40 * tokens / recipe.data.train_tokens == pytest.approx(3.4, rel=0.01)
        if row == "comigs-1g1s":
            steps = 40 // method.router_every * method.router_steps
            assert steps == 0.3 * 40
            assert steps * tokens / recipe.data.valid_tokens == pytest.approx(2.3, rel=0.02)


@pytest.mark.parametrize(
    ("table", "figures"),
    [
        ("comigs/table2", ("comigs/figure4", "comigs/figure7", "comigs/figure8")),
        ("cobo/table2", ("cobo/figure4", "cobo/figure5", "cobo/figure6")),
    ],
)
def test_figures_of_a_table_are_drawn_from_its_runs(
    table: str, figures: tuple[str, ...], tmp_path: Path
) -> None:
    of = Job(table, "small", tmp_path)
    known = {of.run(*cell, {}, 0)[1]: of.sweep(*cell) for cell in of.cells}
    for name in figures:
        job = Job(name, "small", tmp_path)
        for cell in job.cells:
            assert known[job.run(*cell, {}, 0)[1]] == job.sweep(*cell)


def cell(row: str, mean: float, std: float = 0.0, **clients: float) -> dict:
    return {"row": row, "title": row, "column": "c", "mean": mean, "std": std, "clients": clients}


def verdict(statement: Statement, *cells: dict) -> tuple[bool, str] | None:
    found = list(_verdicts(statement, typed(cells)))
    return (found[0].holds, found[0].detail) if found else None


def test_better_means_every_row_before_every_other() -> None:
    s = Better(says="", source="", columns=("c",), better=("a", "b"), than=("x", "y"))
    assert verdict(s, cell("a", 1), cell("b", 2), cell("x", 3), cell("y", 4))[0]  # type: ignore[index]
    assert not verdict(s, cell("a", 1), cell("b", 3.5), cell("x", 3), cell("y", 4))[0]  # type: ignore[index]
    assert verdict(s, cell("a", 1), cell("x", 3), cell("y", 4)) is None


def test_statements_about_some_clients_look_at_those() -> None:
    s = Better(says="", source="", columns=("c",), better=("a",), than=("x",), clients=("fr",))
    assert verdict(s, cell("a", 9, fr=1.0, de=17.0), cell("x", 3, fr=2.0, de=4.0))[0]  # type: ignore[index]


@pytest.mark.parametrize(("own", "holds"), [(10.4, True), (10.6, False), (9.4, False), (9.6, True)])
def test_near_is_a_share_on_both_sides_of_the_best(own: float, holds: bool) -> None:
    s = Near(
        kind="near",
        says="",
        source="",
        columns=("c",),
        rows=("a",),
        best_of=("x", "y"),
        within=0.05,
    )
    assert verdict(s, cell("a", own), cell("x", 10), cell("y", 20))[0] is holds  # type: ignore[index]


def accurate(row: str, mean: float, std: float = 0.0, **figures: object) -> dict:
    return cell(row, mean, std) | {"metric": ACCURACY.about, **figures}


def test_better_follows_the_direction_of_the_metric() -> None:
    s = Better(
        kind="better", says="", source="", columns=("c",), better=("a", "b"), than=("x",), by=4
    )
    assert verdict(s, accurate("a", 80), accurate("b", 76), accurate("x", 72))[0]  # type: ignore[index]
    assert not verdict(s, accurate("a", 80), accurate("b", 75.9), accurate("x", 72))[0]  # type: ignore[index]
    assert verdict(s, cell("a", 30), cell("b", 36), cell("x", 40))[0]  # type: ignore[index]
    assert not verdict(s, cell("a", 80), cell("b", 76), cell("x", 72))[0]  # type: ignore[index]
    assert not verdict(
        s.model_copy(update={"by": 0.0}), accurate("a", 72), accurate("b", 73), accurate("x", 72)
    )[0]  # type: ignore[index]
    assert verdict(s, accurate("a", 80), accurate("x", 72)) is None
    told = verdict(s, accurate("a", 80), accurate("b", 77), accurate("x", 72))
    assert told == (True, "a 80.00, b 77.00 against x 72.00 (by at least 4)")


@pytest.mark.parametrize(
    ("own", "share", "points"),
    [(70.1, True, True), (69.0, True, False), (67.0, False, False), (80.0, False, False)],
)
def test_near_is_about_the_best_in_the_direction_of_the_metric(
    own: float, share: bool, points: bool
) -> None:
    s = Near(
        kind="near",
        says="",
        source="",
        columns=("c",),
        rows=("a",),
        best_of=("x", "y"),
        within=0.06,
    )
    rows = accurate("a", own), accurate("x", 72), accurate("y", 10)
    assert verdict(s, *rows)[0] is share  # type: ignore[index]
    assert verdict(s.model_copy(update={"within": 2.0, "points": True}), *rows)[0] is points  # type: ignore[index]


def figure(name: str, row: str = "a", **bounds: object) -> Figure:
    about = {"says": "", "source": "", "columns": ("c",), "row": row, "figure": name}
    return Figure(kind="figure", **about | bounds)  # type: ignore[arg-type]


def test_weights_and_improved_are_judged_where_they_are_known() -> None:
    w, i = figure("weights_error", at_most=0.1), figure("improved", at_least=90)
    assert verdict(w, accurate("a", 80, weights_error=0.1)) == (
        True,
        "W error of a 0.1 (at most 0.1)",
    )
    assert not verdict(w, accurate("a", 80, weights_error=0.11))[0]  # type: ignore[index]
    assert verdict(w, accurate("a", 80, weights_error=None)) is None
    assert verdict(i, accurate("a", 80, improved=90.0)) == (True, "Imp.% of a 90 (at least 90)")
    assert not verdict(i, accurate("a", 80, improved=87.5))[0]  # type: ignore[index]
    assert verdict(i, accurate("a", 80, improved=None)) is None
    exact = figure("weights_error", at_most=0.1, strict=True)
    assert not verdict(exact, accurate("a", 80, weights_error=0.1))[0]  # type: ignore[index]


def test_router_scores_are_read_of_rows_that_stand_for_others_too() -> None:
    table = tables.load("comigs/figure4")
    assert spoken_of_row(table, "comigs-1g1s") == {"generalist_change"}
    assert spoken_of_row(table, "comigs-1g1s-published") == {"generalist_change"}
    assert spoken_of_row(tables.load("comigs/table2"), "pfedmoe") == set()


def test_statements_about_a_group_or_a_gate() -> None:
    rows = [
        accurate(r, 90, groups={"aligned": 90.0, "random": x}, gate_accuracy=g)
        for r, x, g in (("a", 70.0, 94.0), ("x", 80.0, None))
    ]
    s = Better(kind="better", says="", source="", columns=("c",), better=("x",), than=("a",))
    assert not verdict(s, *rows)[0]  # type: ignore[index]
    assert verdict(s.model_copy(update={"group": "random"}), *rows) == (
        True,
        "x 80.00 against a 70.00",
    )
    gate = figure("gate_accuracy", at_least=94)
    assert verdict(gate, *rows) == (True, "gate accuracy of a 94 (at least 94)")
    assert not verdict(gate.model_copy(update={"at_least": 95}), *rows)[0]  # type: ignore[index]
    assert verdict(gate.model_copy(update={"row": "x"}), *rows) is None


@pytest.mark.parametrize(
    ("weights", "falls", "below"),
    [((0.6, 0.55), True, False), ((0.6, 0.4), True, True), ((0.3, 0.45), False, True)],
)
def test_router_statements_read_the_metrics(
    weights: tuple[float, float], falls: bool, below: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / RESULT).write_text(json.dumps(result("comigs-1g1s", 2, 0.0)))
    lines = [
        {
            "kind": "train",
            "client": "ann",
            "iteration": k,
            "router/generalist+specialist": [[w, 1 - w], [w, 1 - w]],
        }
        for k, w in enumerate(weights)
    ]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    names = {"generalist", "generalist_change"}
    figures = seed_figures(lambda r: r.mean, [Result.read(run)], (), [run], names)
    own = [{"row": "a", "title": "a", "column": "c", "seeds": [asdict(seed) for seed in figures]}]
    for name, bound, expected in (("generalist_change", 0, falls), ("generalist", 0.5, below)):
        s = figure(name, at_most=bound, strict=True)
        assert next(_verdicts(s, typed(own))).holds is expected
        leak = s.model_copy(update={"row": "other", "only_with": {"the leak": {"other": "a"}}})
        other = own[0] | {
            "row": "other",
            "seeds": [{"mean": 1.0, "clients": {}, "figures": dict.fromkeys(names, 0.9)}],
        }
        found = next(_verdicts(leak, typed([*own, other])))
        assert (found.holds, found.only_with) == (False, "the leak" if expected else None)


def test_mistakes_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="comigs/table1"):
        Job("comigs/table9", "small", tmp_path).cells  # noqa: B018
    with pytest.raises(Refused, match="no row 'fedsgd'"):
        Job("comigs/table2", "small", tmp_path, rows=("fedsgd",)).cells  # noqa: B018
    with pytest.raises(Refused, match="no column 'agnews-llama'"):
        Job("comigs/table2", "small", tmp_path, columns=("agnews-llama",)).cells  # noqa: B018
    with pytest.raises(Refused, match="no row fc in these columns") as refused:
        Job("cobo/table2", "small", tmp_path, columns=("language",), rows=("fc",)).cells  # noqa: B018
    assert "cobo-language" in str(refused.value)
    assert "oracle" not in str(refused.value)
    with pytest.raises(ValueError, match="no such row or column: ghost"):
        Reproduction.model_validate(
            {"title": "", "columns": {}, "rows": {}, "published": {"ghost": {}}}
        )
    with pytest.raises(ValueError, match="no such row or column: ghost"):
        Reproduction.model_validate(
            {
                "title": "",
                "columns": {},
                "rows": {},
                "pictures": [{"kind": "weights", "rows": ["ghost"]}],
            }
        )
    assert not any(tmp_path.iterdir())


@pytest.fixture
def mixed(tmp_path: Path) -> dict:
    """A table with accuracy in its first column and perplexity in its second, and the runs of
    it.
    """
    kinds = {"digits": ACCURACY.about.to_json(), "language": PERPLEXITY.about.to_json()}
    cells = []
    for column, metric in kinds.items():
        for k, method in enumerate(("local", "cobo")):
            found = classified(method, shift=10.0 * k, metric=metric)
            folder = f"{column}-{method}"
            (tmp_path / folder).mkdir()
            (tmp_path / folder / RESULT).write_text(json.dumps(found))
            about = {
                "row": method,
                "title": method.upper(),
                "column": column,
                "choice": {},
                "folders": [folder],
                "settings": {},
            }
            about |= {
                "published": 64.9 + k,
                "published_std": None,
                "published_improved": 100.0 if k else None,
            }
            about["evaluations"] = found["evaluations"]
            cells.append(
                as_json(
                    comparison.row(
                        method, typed([found]), typed([classified("local", metric=metric)])
                    )
                )
                | about
            )
    return {
        "title": "T",
        "name": "cobo/t",
        "scale": "small",
        "seeds": [0],
        "overrides": [],
        "part": [],
        "shows": "mean",
        "scored": "s",
        "columns": {c: c.capitalize() for c in kinds},
        "rows": {"local": "LOCAL", "cobo": "COBO"},
        "cells": cells,
        "statements": [],
        "order": {},
        "notes": [],
        "unjudged": 1,
        "hours": 0.0,
        "versions": {"coterie": "0", "torch": "2"},
        "machine": {"device": "cpu", "dtype": "float32", "threads": 1},
    }


def test_notes_on_budgets_name_columns_where_not_all_are_alike(mixed: dict) -> None:
    def notes(larger: Collection[str]) -> list[str]:
        cells = typed(mixed).cells
        return unlike(
            [
                replace(cell, trainable_parameters=2 * cell.trainable_parameters)
                if cell.row == "cobo" and cell.column in larger
                else cell
                for cell in cells
            ]
        )

    columns = {cell.column for cell in typed(mixed).cells}
    (every,) = notes(columns)
    assert every.endswith("the budgets differ.")
    (one,) = notes({"digits"})
    assert one == every[:-1] + " (digits)."


def test_each_column_has_its_own_metric(mixed: dict, tmp_path: Path) -> None:
    text = markdown(typed(mixed))
    digits, language = text.split("## Language")
    assert "Mean test accuracy, % over clients; higher is better." in digits
    assert "MFLOPs/example" in digits
    assert "Mean test perplexity over clients; lower is better." in language
    assert "MFLOPs/token" in language
    assert "| COBO | 81.50 | 65.90 | 81.50 | 100 | 100 | 0.500 |" in digits
    assert "| COBO | 81.50 | 65.90 | 81.50 | 0 | 100 | 0.500 |" in language
    assert "- Statements that are not judged, as not all they are about was run: 1." in text
    write_page(tmp_path / "t.html", typed(mixed), (), tmp_path)
    page = (tmp_path / "t.html").read_text()
    assert re.findall(r"<tr class=best><th[^>]*>(\w+)", page) == ["COBO", "LOCAL"]
    console = Console(file=io.StringIO(), width=80)
    for table in terminal(typed(mixed)):
        console.print(table)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "Digits: test accuracy, %, higher is better" in shown
    assert "Imp.%, paper" in shown
    assert "…" not in shown


def test_every_kind_of_picture_is_drawn(mixed: dict, tmp_path: Path) -> None:
    pictures = (
        Picture(kind="curves", columns=("digits",)),
        Picture(kind="weights", rows=("cobo",), columns=("digits",), iterations=(10, 30)),
        Picture(kind="domains", rows=("cobo",), columns=("language",), clients=("dan",)),
        Picture(kind="bars", title="By column", rows=("local", "cobo")),
        Picture(kind="bars", title="RemoteSplit", columns=("digits",), rows=()),
    )
    write_page(tmp_path / "t.html", typed(mixed), pictures, tmp_path)
    page = (tmp_path / "t.html").read_text()
    curves, weights, domains, bars = (
        page[page.index(f'id="picture-{k}"') : page.index(f'id="picture-{k + 1}"')]
        for k in range(4)
    )
    assert "COBO: 81.50 at 30 local iterations" in curves
    assert "Language" not in curves
    assert re.findall(r"<figcaption>([^<]*)<", weights) == [
        "10 iterations",
        "30 iterations",
        "True clusters",
    ]
    assert "for &lt;b&gt;ben&lt;/b&gt;: 1.00 at 30 local iterations" in domains
    assert domains.count("<figure>") == 1
    assert "Digits, COBO: 81.50" in bars
    assert "Language, LOCAL: 71.50" in bars
    across = [float(x) for x in re.findall(r'<circle cx="([\d.]+)%" cy', bars)]
    assert across[1] / across[0] == pytest.approx(81.5 / 71.5, abs=1e-3)


def test_a_figure_is_drawn(tmp_path: Path, data_root: Path) -> None:
    """Figure 4 at toy size: router scores of two methods, and a verdict read off the metrics."""
    found = as_json(
        reproduce(
            Job("comigs/figure4", "small", tmp_path, overrides=(*TOY, f"data.root={data_root}"))
        )
    )
    page = (tmp_path / "comigs-figure4.html").read_text()
    assert page.count("generalist, block 1") >= 8  # two methods, four clients
    assert [s["column"] for s in found["statements"]] == ["agnews", "agnews"]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    """Four rounds of a table of DDOME with a figure's pictures, which holds it against the
    common expert.
    """
    folder = tmp_path_factory.mktemp("pooled")
    overrides = ("method.rounds=4", "evaluate_every=2", "model.common.pretraining.epochs=5")
    return folder, as_json(
        reproduce(
            Job(
                "ddome/table6",
                "small",
                folder,
                1,
                ("digits",),
                ("common-expert", "ddome"),
                overrides,
            )
        )
    )


def test_unseen_clients_are_shown_by_group(pooled: tuple[Path, dict]) -> None:
    folder, found = pooled
    for cell in found["cells"]:
        result = json.loads((folder / cell["folders"][0] / RESULT).read_text())
        assert cell["mean"] == result["groups"]["aligned"] == cell["groups"]["aligned"]
        assert all("choices" not in e for e in cell["evaluations"])
    assert "never trained with" in found["scored"]
    text = (folder / "ddome-table6.md").read_text()
    assert "| aligned | random |" in text
    assert "synced" not in text
    page = (folder / "ddome-table6.html").read_text()
    for group in ("aligned", "random"):
        assert f"<figcaption>Digits, {group} (unseen)" in page
    common = next(cell for cell in found["cells"] if cell["row"] == "common-expert")
    assert f"Common expert: {common['mean']:.2f} at 4 rounds" in page  # a level line to the end


@pytest.mark.parametrize("figure", ["best", "best_of_last_ten", "gate_error"])
def test_a_table_may_show_another_figure_than_the_last(
    figure: str, pooled: tuple[Path, dict]
) -> None:
    folder, found = pooled
    results = [
        json.loads((folder / cell["folders"][0] / RESULT).read_text())
        for cell in found["cells"]
        if cell["row"] == "ddome"
    ]
    shown = _shown(typed(results), figure)  # type: ignore[arg-type]
    tests = [e["groups"]["aligned"] for e in results[0]["evaluations"]]
    right = results[0]["evaluations"][-1]["choices"]["aligned"]["gate_accuracy"]
    assert shown["mean"] == pytest.approx(100 - right if figure == "gate_error" else max(tests))
    assert shown["metric"].lower_is_better is (figure == "gate_error")


def test_no_client_is_counted_by_another_figure_than_the_tables(tmp_path: Path) -> None:
    """By its accuracy, where the table shows the gate's error."""
    overrides = ("method.rounds=2", "evaluate_every=2", "model.common.pretraining.epochs=5")
    job = Job("ddome/table5", "small", tmp_path, 1, ("digits",), (), overrides)
    assert all(seed.clients == {} for cell in reproduce(job).cells for seed in cell.seeds)


def test_every_kind_of_picture_of_a_pool_is_drawn(
    pooled: tuple[Path, dict], tmp_path: Path
) -> None:
    folder, found = pooled
    kinds = ("labels", "k-means", "experts", "gate")
    write_page(tmp_path / "t.html", typed(found), [Picture(kind=kind) for kind in kinds], folder)  # type: ignore[arg-type]
    page = (tmp_path / "t.html").read_text()
    labels, means, experts, gate = (
        page[page.index(f'id="picture-{k}"') :].partition("</section>")[0] for k in range(4)
    )
    assert labels.count("anchor-0") >= 2  # of both rows
    assert "silhouette" in means
    assert "Common expert" not in experts  # which has no pool
    assert "rounds" in experts
    assert "error rate" in gate
