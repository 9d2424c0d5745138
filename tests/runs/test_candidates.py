"""What is left on the disk of the runs of a search: results of all, models of the chosen alone."""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import coterie
from coterie.core.errors import RecipeError
from coterie.core.result import RESULT, Result, Tuning
from coterie.papers.job import Job
from coterie.papers.reproduce import reproduce
from coterie.runs.folder.candidates import _as_before, confirm, digest, lighten, mark
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import execute_all
from coterie.runs.tuning.search import Effort
from coterie.runs.tuning.tune import chosen_run

SHORT = {"rounds": 4}
LEFT = {"result.json", "recipe.yaml", "inputs.json", "metrics.jsonl", "SHA256SUMS"}


def told(out: Path, *methods: str, **more: Any) -> Tuning:
    return coterie.tune(methods, "cobo-digits", out=out, method=SHORT, trials=4, **more)


def with_models(root: Path) -> set[Path]:
    """The folders of runs with personal models or checkpoints."""
    found = {path.parent for path in root.rglob("checkpoints")}
    return found | {
        path.parent for path in root.rglob("clients") if path.parent.name[:5] != "round"
    }


class Looks(coterie.Callback):
    """Counts the runs that have models whenever one ends; stops at one of them."""

    def __init__(self, root: Path, stop: int | None = None) -> None:
        self.root, self.stop = root, stop
        self.counts: list[int] = []

    def end(self, result: Result) -> None:
        self.counts.append(len(with_models(self.root)))
        if len(self.counts) == self.stop:
            raise KeyboardInterrupt


def chosen_folders(found: Tuning, seeds: int = 1) -> set[Path]:
    first = [chosen_run(found, row.method) for row in found.rows if row.chosen]
    return {run.parent / f"seed-{seed}" for run in first for seed in range(seeds)}


@pytest.mark.parametrize(
    ("methods", "seeds", "stop"), [(("local",), 2, None), (("cobo", "fedavg"), 1, 6)]
)
def test_only_what_was_chosen_keeps_its_models(
    methods: tuple[str, ...], seeds: int, stop: int | None, tmp_path: Path
) -> None:
    """Also after an interruption; at any time no more have models than may still be chosen."""
    root = tmp_path / "out" / "runs"
    looks = Looks(root, stop)
    if stop:
        with pytest.raises(KeyboardInterrupt):
            told(tmp_path / "out", *methods, seeds=seeds, callbacks=[looks])
    looks.stop = None
    resume = stop is not None
    found = told(tmp_path / "out", *methods, seeds=seeds, callbacks=[looks], resume=resume)
    runs = {path.parent for path in root.rglob(RESULT)}
    chosen = chosen_folders(found, seeds)
    assert len(runs) == sum(row.runs for row in found.rows)
    assert with_models(root) == chosen < runs
    leading = 2 * len(methods) * seeds  # the best of all rounds, and of fewer
    assert max(looks.counts) <= leading + seeds  # and one that ends now
    for run in runs - chosen:
        assert {path.name for path in run.iterdir()} - {"lock", "candidate.json"} == LEFT
    for run in chosen:
        assert not (run / "candidate.json").exists()
        assert len(coterie.Run(run).clients) == 8
        assert coterie.Run(run).load("c0-0") is not None


def test_runs_of_others_and_unfinished_ones_keep_all(tmp_path: Path) -> None:
    recipe = coterie.Recipe.load("cobo-digits", method={"rounds": 2}, compare_with=[])
    ordinary = coterie.run(recipe, out=tmp_path / "ordinary").folder
    mark(ordinary)  # too late: it was begun for itself
    lighten(ordinary)
    assert with_models(ordinary) == {ordinary}
    searched = tmp_path / "searched"
    mark(searched)
    coterie.run(recipe, out=searched)
    (searched / "SHA256SUMS").rename(tmp_path / "SHA256SUMS")  # as if killed before its end
    lighten(searched)
    assert with_models(searched) == {searched}
    (tmp_path / "SHA256SUMS").rename(searched / "SHA256SUMS")
    lighten(searched)
    assert with_models(searched) == set()
    confirm(ordinary)
    again = coterie.run(recipe, out=searched, resume=True)
    assert again.result.mean == coterie.Run(ordinary).result.mean


def test_a_table_keeps_the_models_of_its_cells(tmp_path: Path) -> None:
    """And those that an ordinary run has made before."""
    job = Job(
        "cobo/table2",
        "small",
        tmp_path,
        seeds=1,
        columns=("digits",),
        rows=("local", "cobo"),
        overrides=("method.rounds=2",),
        effort=Effort(trials=2, extensions=1),
    )
    found = reproduce(job)
    cells = {tmp_path / folder for cell in found.cells for folder in cell.folders}
    runs = {path.parent for path in tmp_path.rglob(RESULT)}
    assert with_models(tmp_path) == cells < runs
    assert not any((cell / "candidate.json").exists() for cell in cells)


class Begun(coterie.Callback):
    """Counts the runs that begin, and the seconds that they took."""

    count = 0

    def begin(self, *run: Any) -> None:
        self.count += 1


def test_a_comparison_does_not_run_again_what_its_search_has_run(tmp_path: Path) -> None:
    """Its first seed of each method, which keeps its models and ends as a run of its own would."""
    out, begun = tmp_path / "out", Begun()
    methods = ["cobo", "local", "pretrained"]
    more: dict[str, Any] = {"seeds": 2, "tune": True, "trials": 2, "method": SHORT}
    found = coterie.compare(methods, "cobo-digits", out=out, callbacks=[begun], **more)
    searched = Tuning.read(out / "tune")
    in_search = sum(row.runs for row in searched.rows)
    assert len(list((out / "tune").rglob(RESULT))) == in_search
    assert begun.count == in_search + 2 * len(methods) - 2
    rows = {out / method / f"seed-{seed}" for method in methods for seed in range(2)}
    assert with_models(out) == rows
    for row in searched.rows:
        recipe = coterie.Recipe.load(searched.path(row.method))
        alone, first = coterie.run(recipe, out=tmp_path / row.method), out / row.method / "seed-0"
        theirs, ours = (whole(Result.read(folder)) for folder in (alone.folder, first))
        assert ours == theirs
        assert (first / "recipe.yaml").read_text() == (alone.folder / "recipe.yaml").read_text()
        for path in alone.folder.rglob("*.safetensors"):
            assert (first / path.relative_to(alone.folder)).read_bytes() == path.read_bytes()

    def again() -> int:
        begun.count = 0
        more_ = more | {"resume": True, "callbacks": [begun]}
        second = coterie.compare(methods, "cobo-digits", out=out, **more_)
        assert [row.mean for row in second.rows] == [row.mean for row in found.rows]
        return begun.count

    assert again() == 0
    (out / "cobo/seed-0" / RESULT).unlink()  # as if killed while it was taken over
    assert again() == 1


def whole(result: Result) -> dict[str, Any]:
    found = result.to_json()
    return {k: v for k, v in found.items() if k not in ("wall_s", "peak_memory_bytes")}


class LaterRecipe(Recipe):
    """The recipe of a later release, with a field more."""

    extra: int | None = None


def test_a_batch_whose_every_run_is_refused_ends_without_results(tmp_path: Path) -> None:
    far = recipes.load("cobo-digits", ["method.rho=1000"])
    rows = [(far, tmp_path / name) for name in ("one", "other")]
    unfit: list[str] = []
    assert not execute_all(
        rows, coterie.Callback(), unfit=lambda folder, error: unfit.append(folder.name)
    )
    assert unfit == ["one", "other"]
    with pytest.raises(RecipeError, match="rho"):
        execute_all(rows, coterie.Callback())


def test_runs_are_found_again_once_a_recipe_has_a_field_more() -> None:
    """Unless that is set."""
    today = recipes.load("quickstart")
    later = LaterRecipe.model_validate(today.model_dump(mode="json"))
    assert digest(later) == digest(today)
    assert digest(later.model_copy(update={"extra": 1})) != digest(today)


def test_parts_with_settings_of_their_own_have_a_digest() -> None:
    plain, own = (
        recipes.load("cobo-digits", ["method.name=interpolation", f"method.parts=[local, {part}]"])
        for part in ("cobo", "{name: cobo, rho: 0.3}")
    )
    assert digest(plain) != digest(own)


FIRST_DRAW = 22  # archives up to this one have Dirichlet anchors as they once were drawn
KEPT = Path(__file__).parents[2] / "benchmarks/results/runs"


def test_runs_kept_in_the_repository_are_found_again() -> None:
    """One run of each recipe and method, without the fields that recipes no longer have."""
    seen = set[tuple[str, str]]()
    for path in sorted(KEPT.glob("*.tar.xz"), reverse=True):
        if len(seen) > 30:
            break
        with tarfile.open(path) as archive:
            for member in archive:
                *_, problem, folder, _, name = Path(member.name).parts
                method, _, expected = folder.rpartition("-")
                if name != "recipe.yaml" or (problem, method) in seen:
                    continue
                seen.add((problem, method))
                file = archive.extractfile(member)
                assert file is not None
                kept = yaml.safe_load(file.read())
                kept.pop("curve_windows", None)
                kept["data"].pop("unseen_anchors", None)
                if kept["data"]["kind"].startswith("agnews"):
                    kept["data"].pop("exclude_pretraining", None)
                data = kept["data"]
                changed = data.get("partition") == "dirichlet" and data["anchors"] > 0
                changed = changed and int(path.name[:3]) <= FIRST_DRAW
                found = digest(recipes.validate(kept, "kept")) == expected
                assert found is not changed, member.name
    assert len(seen) > 30


def test_runs_of_the_first_draw_of_dirichlet_anchors_are_not_found_again() -> None:
    """Their anchors were drawn with the other clients. All other partitions are as before."""
    job = Job("ddome/table4", "small", Path(), columns=("digits",))
    recipe, _ = job.run("ddome", "digits", {}, 0)
    section = recipe.model_dump(mode="json")["data"]
    assert _as_before(section)["dirichlet_anchors"] == "by themselves"
    for other in ({"anchors": 0}, {"partition": "quantity"}):
        assert "dirichlet_anchors" not in _as_before(section | other)
