"""The command that works through all tables: what it runs, what it skips, and where it stops."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from coterie.papers import tables
from coterie.papers.job import Job

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    path = REPOSITORY / "benchmarks/tables.py"
    spec = importlib.util.spec_from_file_location("benchmark_tables", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as dataclasses ask for it
    spec.loader.exec_module(module)
    return module


def test_every_entry_is_a_table_with_a_small_scale(driver: ModuleType, tmp_path: Path) -> None:
    for entry in driver.PLAN:
        assert Job(entry.name, "small", tmp_path, driver.SEEDS, entry.columns).cells
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


def test_two_jobs_never_share_the_runs_of_a_paper(driver: ModuleType) -> None:
    names = ("comigs/table2", "comigs/table1", "cobo/table2", "ddome/table1")
    left = [driver.Entry(name) for name in names]
    assert [e.name for e in driver.startable(left, (), 1)] == ["comigs/table2"]
    assert [e.name for e in driver.startable(left, (), 2)] == ["comigs/table2", "cobo/table2"]


def test_it_says_what_is_to_do(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/tables.py", "--list", "--folder", str(tmp_path)]
    shown = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "comigs-table2-small-tuned" in shown.stdout
    assert "complete" not in shown.stdout
