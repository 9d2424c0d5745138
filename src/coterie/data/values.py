"""Values in tables: missing values, client names, and texts."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from coterie.core import names
from coterie.core.errors import DataError

_EXACT = 2**53  # up to which floats hold every integer


def plain(value: Any) -> Any:
    """Return a value of NumPy, pandas or pyarrow as a Python value; missing ones as None."""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    for convert in ("as_py", "tolist"):  # of pyarrow, of NumPy
        if hasattr(value, convert):
            value = getattr(value, convert)()
            break
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if is_missing(value) else value


def uncolumned(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a columnar table's row without the nulls that give its objects the same keys."""
    return {name: _without_nulls(value) for name, value in row.items()}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def is_missing(value: Any) -> bool:
    """Whether a value is missing: None, NaN, or pandas' NaT and NA."""
    try:
        return value is None or not bool(value == value)  # noqa: PLR0124 - as NaN and NaT are
    except TypeError:  # of pandas' NA, which is neither equal nor unequal to itself
        return True


def client_name(value: Any, where: str, column: str) -> str | None:
    """Return the client's name in a field, stripped of space and marks, in normal form C; None if
    it is missing. Raises DataError for other values and for inexact numbers.
    """
    if isinstance(value, list | Mapping | bytes):
        kind = type(value).__name__
        raise DataError(f"{where}: column {column!r} is {kind}, no client", "Name another.")
    if is_missing(value):
        return None
    if isinstance(value, float) and value.is_integer():  # as integers become beside missing values
        if abs(value) >= _EXACT:
            problem = f"{where}: client {value!r} is a number too large to be exact"
            raise DataError(problem, "Write the names of clients as text.")
        value = int(value)
    return names.normal(str(value).translate(names.MARKS)).strip() or None


def text_of(value: Any, where: str, column: str) -> str | None:
    """Return the text in a field; None if it is missing or blank. Raises DataError."""
    if isinstance(value, str):
        if mistake := text_mistake(value):
            raise DataError(f"{where}: column {column!r} {mistake}", "Repair it, or leave it out.")
        return value if not value.isspace() and value else None
    if is_missing(value):
        return None
    problem = f"{where}: column {column!r} is {type(value).__name__}, not text"
    raise DataError(problem, "Name another: data.text_column.")


def text_mistake(text: str) -> str:
    """Return why a string is not valid text; "" if it is."""
    if "\0" in text:
        return "is not text: it has NUL characters"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "is not valid text (half of a surrogate pair)"
    return ""


def class_names(rows: Iterable[Mapping[str, Any]], features: Any) -> Iterator[dict[str, Any]]:
    """Yield rows of `datasets` with the names of class labels; None for -1, a missing label."""
    named = {
        name: feature.int2str for name, feature in features.items() if hasattr(feature, "int2str")
    }
    for row in rows:
        labels = {
            name: None if row[name] is None or row[name] < 0 else str(name_of(row[name]))
            for name, name_of in named.items()
        }
        yield {**uncolumned(row), **labels}
