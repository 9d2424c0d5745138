"""Checkpoints and metrics: whole or not there."""

import errno
import json
import resource
import signal
from pathlib import Path

import pytest
import torch

from coterie.core.errors import CheckpointError, SaveError
from coterie.runs.folder.checkpoints import Checkpoint, Checkpoints
from coterie.runs.folder.metrics import MetricsFile

RECIPE = {"name": "r", "method": {"name": "local", "rounds": 3}}


def checkpoint(round: int, size: int = 4) -> Checkpoint:
    return Checkpoint(
        round,
        {"s": torch.full((2,), float(round))},
        {"ann": {"x": torch.full((size,), float(round))}},
        {"k": round},
    )


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RECIPE)
    assert checkpoints.latest() is None
    for round in (99_998, 99_999, 100_000, 100_001):  # by number, not as text
        checkpoints.save(checkpoint(round))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["round-100000", "round-100001"]
    found = checkpoints.latest()
    assert found is not None
    assert (found.round, found.progress) == (100_001, {"k": 100_001})
    assert torch.equal(found.clients["ann"]["x"], torch.full((4,), 100_001.0))


def test_a_half_written_one_is_not_seen(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, RECIPE)
    checkpoints.save(checkpoint(1))
    (tmp_path / "round-00002.new").mkdir()
    (tmp_path / "round-00002.new" / "server.safetensors").write_bytes(b"half")
    found = checkpoints.latest()
    assert found is not None
    assert found.round == 1
    checkpoints.save(checkpoint(2))
    assert checkpoints.latest().round == 2  # type: ignore[union-attr]


def test_a_full_disk_keeps_the_former(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path, RECIPE)
    checkpoints.save(checkpoint(1))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        SaveError, match=r"(?s)round 2: .*No space left.*previous checkpoint is intact.*--resume"
    ):
        checkpoints.save(checkpoint(2))
    monkeypatch.undo()
    assert checkpoints.latest().round == 1  # type: ignore[union-attr]
    assert [path.name for path in tmp_path.iterdir()] == ["round-00001"]


def test_a_file_that_cannot_grow_keeps_the_former(tmp_path: Path) -> None:
    """The same through the system itself: a limit on file sizes, which writing hits in the
    middle of a client's state.
    """
    checkpoints = Checkpoints(tmp_path, RECIPE)
    checkpoints.save(checkpoint(1))
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        with pytest.raises(SaveError, match="round 2"):
            checkpoints.save(checkpoint(2, size=1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert checkpoints.latest().round == 1  # type: ignore[union-attr]


def test_another_recipe_is_named_by_its_field(tmp_path: Path) -> None:
    Checkpoints(tmp_path, RECIPE).save(checkpoint(1))
    with pytest.raises(CheckpointError, match=r"method.rounds was 3, now 5"):
        Checkpoints(tmp_path, {"name": "r", "method": {"name": "local", "rounds": 5}}).latest()


def test_metrics_after_the_checkpoint_are_cut_off(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.write("train", 1, 10, "ann", {"loss": 2.0, "router": [[0.5, 0.5]]})
    position, _ = metrics.flush()
    metrics.write("train", 2, 20, "ann", {"loss": 1.0})
    metrics.close()
    metrics = MetricsFile(tmp_path, position, 10)
    metrics.write("train", 2, 20, "ann", {"loss": 1.5})
    metrics.flush()
    metrics.close()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [2.0, 1.5]
    assert lines[0] == {
        "kind": "train",
        "round": 1,
        "iteration": 10,
        "client": "ann",
        "loss": 2.0,
        "router": [[0.5, 0.5]],
    }
