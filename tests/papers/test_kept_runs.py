"""Runs that are kept for other machines: what a table reads of them, and nothing twice."""

from pathlib import Path
from types import ModuleType

import pytest
from script_modules import module_at


@pytest.fixture(scope="module")
def kept_runs() -> ModuleType:
    return module_at("benchmarks/kept_runs.py")


def write_run(folder: Path, name: str, *files: str) -> Path:
    run = folder / "paper/corpus" / name / "seed-0"
    for file in files:
        path = run / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{file} of {name}")
    return run


def contents(folder: Path) -> dict[str, str]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_text() for path in files}


def test_what_has_ended_arrives_elsewhere_without_models(
    kept_runs: ModuleType, tmp_path: Path
) -> None:
    here, there, archives = tmp_path / "here", tmp_path / "there", tmp_path / "archives"
    ended = write_run(here, "local-1", "recipe.yaml", "metrics.jsonl", "result.json", "SHA256SUMS")
    write_run(here, "local-2", "recipe.yaml", "unfit.json")
    wanted = contents(here)
    (ended / "checkpoints").mkdir()
    (ended / "checkpoints/large").write_text("a model")
    write_run(here, "fedavg-1", "recipe.yaml", "metrics.jsonl")  # still at work
    assert kept_runs.pack(archives, here) == archives / "001.tar.xz"
    assert kept_runs.unpack(archives, there) == 2
    assert contents(there) == wanted


def test_nothing_is_kept_twice_and_nothing_overwritten(
    kept_runs: ModuleType, tmp_path: Path
) -> None:
    here, archives = tmp_path / "here", tmp_path / "archives"
    run = write_run(here, "local-1", "result.json")
    kept_runs.pack(archives, here)
    assert kept_runs.pack(archives, here) is None
    write_run(here, "local-2", "result.json")
    assert kept_runs.pack(archives, here) == archives / "002.tar.xz"
    (run / "result.json").write_text("found again here")
    assert kept_runs.unpack(archives, here) == 0
    assert (run / "result.json").read_text() == "found again here"
    assert kept_runs.unpack(archives, tmp_path / "there") == 2
