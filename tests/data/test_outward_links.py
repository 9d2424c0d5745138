"""Links that lead out of a folder of data are said before training, and nothing that is no file is
read through them.
"""

import json
import os
from pathlib import Path

import pytest

from coterie.core.errors import DataError
from coterie.data.by_client import Table
from coterie.data.federation import Federation
from coterie.data.folders import Folders
from coterie.data.refusals import outward_links
from coterie.models.architecture import tokenizer

TEXT = "Somebody wrote lines of text about gardens and the sea. " * 5


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name in ("ann", "ben"):
        (root / name).mkdir(parents=True)
        for k in range(12):
            (root / name / f"{k}.txt").write_text(f"{name} {k} {TEXT}")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/secret.txt").write_text(TEXT)
    return root


def load(section: Folders | Table, base: Path, cache: Path) -> Federation:
    return section.load(tokenizer(base), 8, cache)


def test_links_out_of_a_folder_are_said_and_others_are_not(
    folders: Path, tiny_base: Path, tmp_path: Path
) -> None:
    (folders / "ann/inner.txt").symlink_to(folders / "ben/1.txt")
    assert "links" not in str(load(Folders(path=folders), tiny_base, tmp_path / "cache").notes)
    (folders / "ann/x.txt").symlink_to(tmp_path / "elsewhere/secret.txt")
    (folders / "ben/more").symlink_to(tmp_path / "elsewhere")
    expected = (
        f"2 files outside {folders}, by links: ann/x.txt is {tmp_path}/elsewhere/secret.txt, "
        f"ben/more/secret.txt is {tmp_path}/elsewhere/secret.txt"
    )
    for _ in range(2):  # the second time from the cache
        assert load(Folders(path=folders), tiny_base, tmp_path / "cache").notes[0] == expected


def test_a_folder_that_is_a_link_itself_is_no_way_out(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folders)
    assert outward_links(tmp_path / "link", [tmp_path / "link/ann/1.txt"]) == []


def test_many_links_are_counted(folders: Path, tmp_path: Path) -> None:
    paths = [folders / f"{k}.txt" for k in range(9)]
    for path in paths:
        path.symlink_to(tmp_path / "elsewhere/secret.txt")
    (sentence,) = outward_links(folders, paths)
    assert sentence.startswith("9 files outside ")
    assert sentence.count(" is ") == 5
    assert sentence.endswith(", ...")


def test_a_table_that_is_a_link_is_said(folders: Path, tiny_base: Path, tmp_path: Path) -> None:
    rows = [{"client": c, "text": f"{c} {k} {TEXT}"} for c in ("a", "b") for k in range(12)]
    (tmp_path / "elsewhere/t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folders / "t.jsonl").symlink_to(tmp_path / "elsewhere/t.jsonl")
    plain = load(Table(path=tmp_path / "elsewhere/t.jsonl"), tiny_base, tmp_path / "cache")
    assert not plain.notes
    found = load(Table(path=folders / "t.jsonl"), tiny_base, tmp_path / "cache")
    assert found.notes[0].startswith(f"1 file outside {folders}, by links: t.jsonl is ")


def test_a_link_to_a_pipe_or_a_device_is_no_text(
    folders: Path, tiny_base: Path, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "elsewhere/pipe")
    for target in (tmp_path / "elsewhere/pipe", Path("/dev/zero")):
        (folders / "ann/x.txt").symlink_to(target)
        with pytest.raises(DataError, match=r"x.txt: not a regular file"):
            load(Folders(path=folders), tiny_base, tmp_path / "cache")
        (folders / "ann/x.txt").unlink()
