"""Reading and cutting documents."""

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.fetching import cut, read_rows, read_text


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab \n\t", max_size=300), st.integers(1, 20))
def test_cutting_loses_nothing(text: str, size: int) -> None:
    chunks = cut(text, size)
    assert "".join(chunks) == text
    assert all(0 < len(chunk) <= 2 * size for chunk in chunks)


def test_cuts_are_at_blank_lines() -> None:
    text = "\n\n".join("x" * 90 + "\ny" for _ in range(20))
    assert all(
        chunk.strip().startswith("x") and chunk.strip().endswith("y") for chunk in cut(text, 200)
    )


def test_rows_of_plain_and_gzipped_files(tmp_path: Path) -> None:
    lines = '{"text": "a\u2028b", "n": 1}\r\n\r\n{"text": "c", "n": 2}'.encode()
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert read_rows(tmp_path / name, {"text": str}) == [{"text": "a\u2028b"}, {"text": "c"}]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: the file is empty"),
        ("a.txt", b" \n", "a.txt: the file is empty"),
        ("a.txt", b"fine\nna\xefve", "a.txt:2: not UTF-8 text"),
        ("a.txt.gz", b"plain", "a.txt.gz: damaged gzip file"),
        ("a.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-9], "a.txt.gz: damaged gzip file"),
    ],
)
def test_texts_that_are_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_text(tmp_path / name)


def test_missing_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing.txt: cannot be read \(No such file"):
        read_text(tmp_path / "nothing.txt")


def test_all_bad_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    lines = [
        '{"text": "fine"}',
        "oops",
        "[1]",
        '{"title": "x"}',
        '{"text": 3}',
        '{"text": "\\ud800"}',
        "oops",
        "oops",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as refusal:
        read_rows(path, {"text": str})
    message = str(refusal.value)
    for part in (
        "a.jsonl:2: not JSON",
        "a.jsonl:3: found list, expected a JSON object",
        "a.jsonl:4: no column 'text' (found: title)",
    ):
        assert part in message
    assert "a.jsonl:5: column 'text' is int, expected str" in message
    assert "a.jsonl:6: column 'text' is not valid text (half of a surrogate pair)" in message
    assert "... and 2 more lines" in message
    assert "Every line must be a JSON object with 'text' (str)." in message
