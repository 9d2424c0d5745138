"""The command that works through all tables: what it runs, what it skips, and where it stops."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coterie.papers import tables
from coterie.papers.job import Job

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def driver() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(REPOSITORY / "benchmarks"))
        yield importlib.import_module("tables")


def test_every_entry_is_a_table_with_a_small_scale(driver: ModuleType, tmp_path: Path) -> None:
    for entry in driver.PLAN:
        assert Job(entry.name, "small", tmp_path, driver.SEEDS, entry.columns, entry.rows).cells
    assert len({entry.result for entry in driver.PLAN}) == len(driver.PLAN)


def test_an_entry_is_complete_until_its_command_or_its_table_changes(
    driver: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = driver.PLAN[0]
    assert not driver.complete(entry, tmp_path, ())
    (tmp_path / "logs").mkdir()
    driver.marker(entry, tmp_path).write_text(entry.identity(tmp_path, ()))
    assert driver.complete(entry, tmp_path, ())
    assert not driver.complete(entry, tmp_path, ("model.base=other",))
    copied = tmp_path / entry.name
    copied.parent.mkdir(parents=True, exist_ok=True)
    for name in (f"{entry.name}.yaml", "regimes.yaml"):
        (tmp_path / name).write_text((tables.FOLDER / name).read_text() + "\n# changed\n")
    monkeypatch.setattr(driver, "TABLES", tmp_path)
    assert not driver.complete(entry, tmp_path, ())


def test_two_jobs_never_have_one_column_of_a_paper(driver: ModuleType) -> None:
    left = [driver.Entry("comigs/figure4"), driver.Entry("comigs/figure7")]
    first, other = driver.Part(left[0], "agnews"), driver.Part(left[1], "multilingual")
    assert [*driver.startable(left, (), (), 1)] == [first]
    assert [*driver.startable(left, (), (), 2)] == [first, other]
    assert [*driver.startable(left, (), [first], 2)] == [other]
    assert [*driver.startable(left, (), [first, other], 2)] == []


def test_a_table_comes_after_its_columns(driver: ModuleType) -> None:
    entry = driver.Entry("comigs/figure8")
    columns = [driver.Part(entry, column) for column in ("multilingual", "slimpajama")]
    assert [*driver.startable([entry], columns[:1], (), 2)] == columns[1:]
    assert [*driver.startable([entry], columns, (), 2)] == [driver.Part(entry)]


def test_it_says_what_is_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/tables.py", "--list", "--folder", str(tmp_path)]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "comigs-table2-small-tuned" in shown.stdout
    assert "complete" not in shown.stdout


def test_the_page_of_verdicts_is_that_of_the_committed_results(driver: ModuleType) -> None:
    results = REPOSITORY / "benchmarks/results"
    now = (results / "README.md").read_text(encoding="utf-8")
    assert now == driver.verdicts.page(results), "run: python benchmarks/tables.py --page"


def test_the_page_has_every_statement_of_the_three_papers(driver: ModuleType) -> None:
    text = driver.verdicts.page(REPOSITORY / "benchmarks/results")
    for name in tables.names():
        if not name.partition("/")[2].startswith("with-") and tables.load(name).statements:
            assert f"### {tables.load(name).title}" in text


def found_of(
    name: str,
    verdicts: dict[tuple[str, str], str],
    rows: list[str] | None = None,
    scale: str = "small",
) -> str:
    """A table's JSON file with some verdicts."""
    statements = [
        {
            "says": says,
            "column": column,
            "verdict": word,
            "by": f"by 1 ({word})",
            "detail": "",
            "progress": "no row still improves",
        }
        for (says, column), word in verdicts.items()
    ]
    columns = dict.fromkeys((column for _, column in verdicts), "")
    about: dict[str, Any] = {
        "hours": 1.26,
        "scale": scale,
        "seeds": [0, 1, 2],
        "part": [],
        "overrides": ["a.b=1"],
    }
    about["columns"] = columns
    about["rows"] = dict.fromkeys(tables.load(name).rows if rows is None else rows, "")
    return json.dumps({"name": name, "statements": statements, **about})


@pytest.mark.parametrize(
    ("fixed", "tuned", "verdict"),
    [
        ("holds", "holds", "holds"),
        ("holds", "does not hold", "holds only with one fixed learning rate for all rows"),
        ("does not hold", "holds", "holds only with every row tuned"),
        ("undecided", "holds", "undecided"),
        ("undecided", "unfinished", "unfinished"),
        ("unfinished", "does not hold", "unfinished"),
        ("holds only with a leak", "does not hold", "holds only with a leak"),
        ("does not hold", None, "does not hold"),
        (None, None, "not run"),
    ],
)
def test_a_verdict_is_that_of_fixed_and_tuned_rows(
    fixed: str | None, tuned: str | None, verdict: str, driver: ModuleType, tmp_path: Path
) -> None:
    says = next(iter(tables.load("comigs/figure4").statements)).says
    for ending, word in (("", fixed), ("-tuned", tuned)):
        if word is not None:
            text = found_of("comigs/figure4", {(says, "agnews"): word})
            (tmp_path / f"comigs-figure4-small{ending}.json").write_text(text)
    section = driver.verdicts.page(tmp_path).split("### CoMiGS, Figure 4")[1].split("###")[0]
    if verdict == "not run":
        assert "not run yet" in section
        return
    assert f"| {verdict} | {says} (Section 3.1.2) | AG News |" in section
    assert "--seeds 3 --set a.b=1`, 1.3 hours" in section
    for word in (fixed, tuned):
        told = f"{word}: by 1 ({word}); no row still improves"
        assert word is None or told in section


def test_what_came_of_a_larger_base_has_a_column_of_its_own(
    driver: ModuleType, tmp_path: Path
) -> None:
    says = next(iter(tables.load("comigs/table2").statements)).says
    for scale, word in (("small", "undecided"), ("smollm2", "holds")):
        text = found_of("comigs/table2", {(says, "multilingual"): word}, scale=scale)
        (tmp_path / f"comigs-table2-{scale}.json").write_text(text)
    section = driver.verdicts.page(tmp_path).split("### CoMiGS, Table 2")[1].split("###")[0]
    assert "| fixed | tuned | SmolLM2-135M |\n" in section
    assert "SmolLM2-135M: `coterie reproduce comigs/table2 --scale smollm2 --seeds 3" in section
    (line,) = (line for line in section.splitlines() if says in line)
    assert line.startswith("| undecided |")  # which is that of the small scale
    assert line.endswith("|  | holds: by 1 (holds); no row still improves |")


@pytest.mark.parametrize("name", tables.names())
def test_what_a_table_sets_itself_holds_at_every_scale(name: str) -> None:
    """Whatever its regime, which many tables share, sets."""
    table = tables.load(name)
    for scale in {scale for column in table.columns.values() for scale in column.recipes}:
        own = {**table.set, **table.scales.get(scale, {})}
        common = table.common(scale, tuned=False)
        assert {key: common[key] for key in own} == own


def test_rows_that_were_not_run_are_named(driver: ModuleType, tmp_path: Path) -> None:
    says = next(iter(tables.load("comigs/figure9").statements)).says
    verdicts = {(says, "slimpajama"): "does not hold"}
    for rows, missing in (
        (
            ["n2222", "n2244", "n2288", "n2222-published", "n2244-published"],
            "n = (2, 2, 8, 8), with",
        ),
        (None, None),
    ):
        text = found_of("comigs/figure9", verdicts, rows)
        (tmp_path / "comigs-figure9-small.json").write_text(text)
        section = driver.verdicts.page(tmp_path).split("### CoMiGS, Figure 9")[1].split("###")[0]
        line = f"Rows not run yet: {missing} the published leak.  \n"
        assert (line in section) == (missing is not None)
        assert "not run yet" not in section.replace(line, "")


def test_runs_that_are_done_keep_no_models(driver: ModuleType, tmp_path: Path) -> None:
    done, begun = (tmp_path / f"topics/local-{k}/seed-0" for k in range(2))
    for folder in (done, begun):
        for name in ("checkpoints", "clients"):
            (folder / name).mkdir(parents=True)
        (folder / "metrics.jsonl").touch()
    (done / "result.json").touch()
    driver.without_models(tmp_path)
    assert {path.name for path in done.iterdir()} == {"metrics.jsonl", "result.json"}
    assert {path.name for path in begun.iterdir()} == {"checkpoints", "clients", "metrics.jsonl"}
