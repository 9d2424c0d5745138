"""What the fuzzer found in readers of data (`make fuzz`), each once a traceback."""

import gzip
from pathlib import Path

import pytest

from coterie.core.errors import DataError
from coterie.data.rows import rows_of


@pytest.mark.parametrize("end", [-1, -4, -12])
def test_a_gzip_file_that_is_damaged_behind_text_that_is_not_utf8(end: int, tmp_path: Path) -> None:
    """The second look, for what the text may be, met the damage."""
    content = gzip.compress("client,text\nann,café\n".encode("latin-1") * 5000)
    (tmp_path / "t.csv.gz").write_bytes(content[:end] + b"\0" * (end == -4))
    with pytest.raises(DataError, match=r"damaged gzip file|not UTF-8"):
        list(rows_of([tmp_path / "t.csv.gz"]))


@pytest.mark.parametrize("where", ["name", "value"])
def test_text_in_parquet_that_is_not_utf8(where: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "t.parquet"
    parquet.write_table(pa.table({"columnname": ["valuevalue"]}), path, compression="none")
    text = {"name": b"columnname", "value": b"valuevalue"}[where]
    path.write_bytes(path.read_bytes().replace(text, b"\xe9" * len(text)))
    with pytest.raises(DataError, match=r"t.parquet: cannot be read"):
        list(rows_of([path]))


def test_a_column_of_parquet_hides_no_other(tmp_path: Path) -> None:
    """Of two with the same name the last one won."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="several columns are called 'text'"):
        list(rows_of([tmp_path / "t.parquet"]))
    struct = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    parquet.write_table(pa.table({"text": struct}), tmp_path / "s.parquet")
    with pytest.raises(DataError, match="duplicate field names"):
        list(rows_of([tmp_path / "s.parquet"]))
