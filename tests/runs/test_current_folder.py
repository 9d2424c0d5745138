"""A callback that changes the current folder loses nothing: paths are those of the call."""

import os
from pathlib import Path
from typing import Any

import pytest

import coterie

TEXT = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
SHORT = {"name": "fedavg", "rounds": 2, "local_steps": 1}


class Away(coterie.Callback):
    """Goes to another folder as soon as a method begins."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, *_: Any) -> None:
        os.chdir(self.folder)


@pytest.fixture
def away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("here", "away"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "away"


@pytest.mark.parametrize("out", ["mine", None])
def test_a_run_stays_in_the_folder_of_the_call(out: str | None, away: Path) -> None:
    run = coterie.run(
        "synthetic",
        out=out,
        method=SHORT,
        data=TEXT,
        compare_with=["local"],
        callbacks=[Away(away)],
    )
    assert run.folder.is_relative_to(away.parent / "here")
    assert run.result.method == "fedavg"
    assert (run.folder / "checkpoints").is_dir()
    assert run.load(run.clients[0]) is not None
    assert not list(away.iterdir())


def test_the_data_of_later_rows_are_found_where_they_were_named(away: Path) -> None:
    for client in ("ann", "ben"):
        folder = away.parent / "here" / "texts" / client
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text(
            f"What {client} writes of the sea, the hills and the road. " * 200
        )
    table = coterie.compare(
        ["local", "fedavg"],
        "folders",
        seeds=2,
        out="table",
        method={"name": "fedavg", "rounds": 1, "local_steps": 1},
        data={"path": "texts", "seed": 3},
        training={"experts": {"lr": 0.001}},
        patience=None,
        keep="last",
        evaluate_every=0,
        words=None,
        auto=[],
        callbacks=[Away(away)],
    )
    assert table.folder == away.parent / "here" / "table"
    assert not list(away.iterdir())
