"""Where a run writes: never among the data, and never from the start where it was told to go on."""

import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.errors import DataError
from coterie.data import Folders

SMALL = (
    "method.rounds=1",
    "method.local_steps=1",
    "compare_with=[]",
    "training.batch_size=2",
    "model.context=16",
    "samples=false",
)
DIGITS = (
    "method.rounds=1",
    "method.local_steps=1",
    "compare_with=[]",
    "data.clusters=2",
    "data.clients_per_cluster=2",
)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Two clients' texts."""
    for name in ("ann", "ben"):
        folder = tmp_path / "mine" / name
        folder.mkdir(parents=True)
        draw = random.Random(name)
        for k in range(20):
            (folder / f"{k}.txt").write_text(
                " ".join(draw.choices(["the", "cat", "sat", "on", "a", "warm", "mat"], k=30))
            )
    return tmp_path / "mine"


def coterie(*words: str, exit_code: int = 0) -> str:
    done = CliRunner().invoke(app, list(words))
    assert done.exit_code == exit_code, done.output
    return done.output


def settings(*given: str) -> list[str]:
    return [word for setting in given for word in ("--set", setting)]


def folders(data: Path, base: Path) -> list[str]:
    return ["folders", *settings(*SMALL, f"data.path={data}", f"model.base={base}")]


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("place", ["mine", "mine/out", "mine/ann/out", ".", "mine/../mine/out"])
@pytest.mark.parametrize("command", ["run", "compare"])
def test_an_output_folder_among_the_data_is_refused(
    mine: Path, tiny_base: Path, command: str, place: str
) -> None:
    before = everything(mine.parent)
    words = folders(mine, tiny_base)
    out = str(mine.parent / place)
    words = ["run", *words] if command == "run" else ["compare", "local", "--recipe", *words]
    said = coterie(*words, "--out", out, exit_code=2)
    assert "the folder of the data" in said
    assert "--out" in said
    assert everything(mine.parent) == before


def test_what_a_link_leads_to_counts(mine: Path, tiny_base: Path) -> None:
    link = mine.parent / "link"
    link.symlink_to(mine, target_is_directory=True)
    assert "lies in the folder of the data" in coterie(
        "run", *folders(mine, tiny_base), "--out", str(link / "out"), exit_code=2
    )


def test_data_below_the_folder_of_the_environment_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "data"))
    assert "lies in the folder of the data" in coterie(
        "run", "agnews-ood", "--out", str(tmp_path / "data/out"), exit_code=2
    )


def test_a_folder_beside_the_data_will_do(mine: Path, tiny_base: Path) -> None:
    coterie("run", *folders(mine, tiny_base), "--out", str(mine.parent / "mine-run"))


def test_what_a_run_has_written_is_no_client(mine: Path, tiny_base: Path) -> None:
    before = Folders(path=mine).source().fingerprint[0]
    out = mine.parent / "out"
    coterie("run", *folders(mine, tiny_base), *settings("compare_with=[local]"), "--out", str(out))
    coterie(
        "compare",
        "local",
        "--seeds",
        "1",
        "--recipe",
        *folders(mine, tiny_base),
        "--out",
        str(mine.parent / "table"),
    )
    for path in out.iterdir():  # as an earlier version did with --out mine
        path.rename(mine / path.name)
    (mine.parent / "table").rename(mine / "table")
    (mine / "runs").mkdir()
    coterie("run", *folders(mine, tiny_base), "--out", str(mine.parent / "again"))
    (mine.parent / "again").rename(mine / "runs/folders-20260101-000000")
    assert Folders(path=mine).source().fingerprint[0] == before


def test_a_client_without_text_is_still_refused(mine: Path) -> None:
    (mine / "clients").mkdir()
    (mine / "clients/picture.png").write_bytes(b"")
    with pytest.raises(DataError, match="no text in"):
        Folders(path=mine).source()


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("option", ["--resume", "--resume-changed"])
def test_nothing_is_gone_on_with_where_nothing_is(tmp_path: Path, option: str, there: bool) -> None:
    out = tmp_path / "typo"
    if there:
        out.mkdir()
    said = coterie("run", "cobo-digits", *settings(*DIGITS), "--out", str(out), option, exit_code=2)
    assert "no run to resume" in said
    assert "without --resume" in said
    said = coterie(
        "compare",
        "local",
        "--recipe",
        "cobo-digits",
        *settings(*DIGITS),
        "--out",
        str(out),
        option,
        exit_code=2,
    )
    assert "no run to resume" in said
    assert not everything(out)


@pytest.mark.parametrize("place", ["mine", "mine/ann/home", "."])
def test_the_home_of_a_device_is_apart_from_its_data(mine: Path, place: str) -> None:
    before = everything(mine.parent)
    known = (
        "--server",
        "localhost:9",
        "--insecure",
        "--data",
        str(mine / "ann" if place == "." else mine),
    )
    said = coterie("client", *known, "--home", str(mine.parent / place), exit_code=2)
    assert "the folder of the data" in said
    assert "--home" in said
    assert everything(mine.parent) == before


def test_the_home_that_a_device_has_by_itself_is_apart_from_its_data(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COTERIE_HOME", str(mine / "home"))
    said = coterie(
        "client", "--server", "localhost:9", "--insecure", "--data", str(mine), exit_code=2
    )
    assert "lies in the folder of the data" in said


@pytest.mark.parametrize("place", ["mine", "mine/ann", "mine/ann/new", "."])
def test_a_new_clients_model_is_apart_from_its_data(
    mine: Path, tiny_base: Path, place: str
) -> None:
    run = mine.parent / "run"
    coterie("run", *folders(mine, tiny_base), "--out", str(run))
    before = everything(mine.parent)
    said = coterie(
        "adapt",
        str(run),
        "--data",
        str(mine / "ann"),
        "--client",
        "you",
        "--out",
        str(mine.parent / place),
        exit_code=2,
    )
    assert "the folder of the data" in said
    assert "--out" in said
    assert everything(mine.parent) == before


def test_a_new_clients_model_is_not_written_into_a_run_among_its_data(
    mine: Path, tiny_base: Path
) -> None:
    run = mine.parent / "run"
    coterie("run", *folders(mine, tiny_base), "--out", str(run))
    run.rename(mine / "ann/run")
    before = everything(mine.parent)
    assert "lies in the folder of the data" in coterie(
        "adapt", str(mine / "ann/run"), "--data", str(mine / "ann"), "--client", "you", exit_code=2
    )
    assert everything(mine.parent) == before
