"""The programs in `examples/` run as they are, away from the network."""

import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
SAID = {
    "own_data": ("dryton: test perplexity", "coldham: "),
    "own_method": ("own_method:MyMethod: test accuracy, %", "Best: "),
    "train_and_use": ("network: test perplexity", "report.html"),
}


def test_every_example_is_run_here() -> None:
    pages = {path.stem for path in EXAMPLES.glob("*_in_one_file.py")}  # see test_one_file.py
    assert {path.stem for path in EXAMPLES.glob("*.py")} - pages == set(SAID)


@pytest.mark.parametrize("name", sorted(SAID))
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    said = capsys.readouterr().out
    for words in SAID[name]:
        assert words in said
    assert list((tmp_path / "runs").glob("*/report.html"))
