"""Text in other encodings, and files that are no text: read by their mark, or refused with the
advice that is right for them.
"""

import gzip
import shutil
import sqlite3
import subprocess
import zipfile
from pathlib import Path

import pytest

from coterie.core.errors import DataError
from coterie.data.plain_text import read_text
from coterie.data.rows import rows_of

TEXTS = {
    "ru": "Дорогой дневник, сегодня мы ходили в лес и собирали грибы. Было холодно, но весело.\n",
    "fr": "Cher journal, aujourd'hui nous sommes allés à la forêt où il faisait très froid.\n",
    "fr-quotes": "Le garçon a dit : « C\u2019est là que ça s\u2019arrête… » — et l\u2019été "
    "fut passé.\n",
    "de": "Liebes Tagebuch, heute waren wir im Wald und haben schöne Pilze gefunden, großartig.\n",
    "pl": "Drogi pamiętniku, dziś byliśmy w lesie i zbieraliśmy grzyby. Żółć gęślą jaźń.\n",
    "el": "Αγαπημένο ημερολόγιο, σήμερα πήγαμε στο δάσος και μαζέψαμε μανιτάρια.\n",
    "he": "יומן יקר, היום הלכנו ליער ואספנו פטריות. היה קר אבל שמח.\n",
    "ja": "親愛なる日記、今日は森に行ってきのこを採りました。寒かったけど楽しかったです。\n",
    "zh": "亲爱的日记,今天我们去森林里采蘑菇。天气很冷,但是很开心。\n",
    "tw": "親愛的日記,今天我們去森林裡採蘑菇。天氣很冷,但是很開心。\n",
    "ko": "사랑하는 일기장에게, 오늘 우리는 숲에 가서 버섯을 땄습니다. 추웠지만 즐거웠어요.\n",
}


def refused(path: Path, content: bytes) -> DataError:
    path.write_bytes(content)
    with pytest.raises(DataError) as told:
        read_text(path)
    return told.value


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize(
    ("language", "encoding"),
    [
        ("ru", "cp1251"),
        ("ru", "koi8-r"),
        ("ru", "cp866"),
        ("ru", "mac-cyrillic"),
        ("fr", "latin1"),
        ("fr", "mac-roman"),
        ("fr-quotes", "cp1252"),
        ("de", "latin1"),
        ("de", "cp850"),
        ("pl", "cp1250"),
        ("pl", "iso8859-2"),
        ("el", "cp1253"),
        ("he", "cp1255"),
        ("ja", "shift-jis"),
        ("ja", "euc-jp"),
        ("zh", "gb18030"),
        ("tw", "big5"),
        ("ko", "euc-kr"),
        ("ru", "utf-16-le"),
        ("fr", "utf-16-be"),
        ("zh", "utf-16-le"),
    ],
)
@pytest.mark.parametrize("zipped", [False, True])
def test_the_advice_converts_exactly(
    tmp_path: Path, language: str, encoding: str, zipped: bool
) -> None:
    text = f"2024-05-01\n{TEXTS[language]}" if encoding[:3] != "utf" else TEXTS[language]
    path = tmp_path / ("it's a diary.txt" + ".gz" * zipped)
    content = text.encode(encoding)
    refusal = refused(path, gzip.compress(content) if zipped else content)
    command = refusal.remedy.removeprefix("Convert it: ").removesuffix(".")
    assert command.startswith(("iconv -f ", "gunzip -c "))
    subprocess.run(["bash", "-c", command], check=True, cwd=tmp_path)
    assert read_text(path) == text


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"fine\nna\xefve\n", 2),
        (b"one\rtwo\rna\xefve\r", 3),
        (bytes(range(0x80, 0x100)) * 3, 1),
        ("It\u2019s been \u201cfun\u201d for us at the café.\n".encode("mac-roman") * 3, 1),
    ],
)
def test_no_encoding_is_named_where_it_is_unsure(tmp_path: Path, content: bytes, line: int) -> None:
    refusal = refused(tmp_path / "a.txt", content)
    assert f"a.txt:{line}: not UTF-8 text, and its encoding cannot be told" in refusal.problem
    assert "iconv" not in str(refusal)


@pytest.mark.parametrize("before", [True, False])
def test_utf8_with_a_damaged_line_must_not_be_converted(tmp_path: Path, before: bool) -> None:
    good, damaged = TEXTS["fr"].encode(), TEXTS["de"].encode("latin1")
    content = good + damaged if before else good[:-3] + b"\xe9\n" + good * 3
    refusal = refused(tmp_path / "a.txt", content)
    assert f"a.txt:{1 + before}: damaged UTF-8 text" in refusal.problem
    assert "iconv" not in str(refusal)


@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "utf-16-le", "utf-16-be", "utf-32-be"]
)
def test_marks_tell_the_encoding(tmp_path: Path, encoding: str) -> None:
    marked = encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32")
    text = f'client,text\r\nann,"{TEXTS["ru"].strip()}"\r\n'
    content = (text if marked else "\ufeff" + text).encode(encoding)
    (tmp_path / "a.csv").write_bytes(content)
    assert read_text(tmp_path / "a.csv") == text.replace("\r\n", "\n")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(content))
    for name in ("a.csv", "a.csv.gz"):
        ((_, row),) = rows_of([tmp_path / name])
        assert row == {"client": "ann", "text": TEXTS["ru"].strip()}
    (tmp_path / "a.csv").write_bytes(content + b"\xff")
    with pytest.raises(DataError):
        read_text(tmp_path / "a.csv")


def test_line_ends_of_every_kind_are_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\rtwo\r\nthree\nfour\r\r\n")
    assert read_text(tmp_path / "a.txt") == "one\ntwo\nthree\nfour\n\n"


def word_document(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("word/document.xml", "<w:t>text</w:t>")
    return path.read_bytes()


def database(path: Path) -> bytes:
    with sqlite3.connect(path) as connection:
        connection.execute("create table t (x)")
    return path.read_bytes()


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (word_document, "a zip archive, as Word"),
        (database, "a SQLite database"),
        (lambda _: b"%PDF-1.7\n%\xe2\xe3\n1 0 obj", "a PDF document"),
        (lambda _: gzip.compress(b"text"), "a gzip file, whose name must end in .gz"),
        (lambda _: b"\x89PNG\r\n\x1a\n" + bytes(20), "a PNG picture"),
        (lambda _: b"\xff\xd8\xff\xe0\x00\x10JFIF", "a JPEG picture"),
        (lambda _: b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(99), "an old Word"),
        (lambda _: b"some text\0 and more", "it has NUL characters"),
        (lambda _: b"plain " * 100_000 + b"\0", "it has NUL characters"),
        (lambda _: bytes(range(1, 9)) * 50, "mostly control characters"),
    ],
)
def test_what_is_no_text_is_refused_by_file_and_kind(tmp_path: Path, content, kind: str) -> None:
    refusal = refused(tmp_path / "diary.txt", content(tmp_path / "made"))
    assert f"{tmp_path}/diary.txt" in refusal.problem
    assert "not text" in refusal.problem
    assert kind in refusal.problem
    assert "iconv" not in str(refusal)


def test_a_gzip_file_that_expands_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "' + b" " * (70 << 20)))
    for read in (read_text, lambda path: list(rows_of([path]))):
        with pytest.raises(DataError, match="would expand to more than 67,108,864"):
            read(path)
