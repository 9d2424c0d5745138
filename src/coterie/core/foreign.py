"""Strict readers of files and texts from outside: only regular files of limited size, no duplicate
keys, no endless nesting, no endless numbers. Nothing here needs torch, so that a device's files are
checked at once when it starts.
"""

import errno
import io
import json
import math
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from coterie.core.errors import CoterieError, Refused

MOST_BYTES = 256 << 20  # of a JSON file: the largest that coterie writes has some megabytes
MOST_YAML = 1_000_000  # characters
DEEPEST = 50  # objects within objects
_MOST_VALUES = 100_000  # of YAML; an alias counts as what it stands for
_MOST_DIGITS = 40  # of a whole number
_MOST_NUMBER = 10_000  # characters of a YAML number: those in base 60 cost their square
_HALF = re.compile(r"[\ud800-\udfff]")  # of a surrogate pair
_ESCAPED_HALF = re.compile(r"\\u[dD][89a-fA-F]")
_OPENING = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)


def opened(path: Path) -> io.BufferedReader:
    """Open a regular file. Raises OSError for any other: opening a pipe would wait for its writer,
    and a device file may be endless.
    """
    return open(path, "rb", opener=_open_regular)


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _OPENING)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    raise OSError(errno.EINVAL, "not a regular file", path)


def path_of(file: io.BufferedReader, path: Path) -> str:
    """Return a path to the very file that is open here, even if `path` now leads to another; where
    the system has no such path, `path`.
    """
    name = f"/dev/fd/{file.fileno()}"
    return name if os.path.exists(name) else str(path)


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file. Raises OSError, or ValueError beyond `most` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{size:,} bytes, at most {most:,} are read")
        return file.read(size)


def read_text(path: Path, most: int = MOST_YAML) -> str:
    r"""Return the UTF-8 text of a regular file, with \n line ends. Raises OSError, or ValueError:
    it has more than `most` bytes, or is not UTF-8.
    """
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), "utf-8").read()


@contextmanager
def refusing(kind: type[CoterieError], what: str, remedy: str) -> Iterator[None]:
    """Raise an OSError or ValueError of the block as a `kind` that names `what` was read."""
    try:
        yield
    except OSError as error:
        raise kind(f"{what}: cannot be read ({error.strerror or error})", remedy) from None
    except ValueError as error:
        raise kind(f"{what}: {error}", remedy) from None


def json_of(text: str | bytes, finite: bool = True) -> Any:
    """Return the value of a JSON text, as str, or as bytes in UTF-8, or UTF-16 or UTF-32 with a
    mark. Without `finite`, NaN, infinite numbers and integers of more than 40 digits are allowed,
    so that the caller can check the values and name the field. Raises ValueError: it is not JSON,
    has a duplicate key, an endless number or half of a surrogate pair, or is nested more than
    `DEEPEST` deep.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text))
    try:
        try:
            value = (_FINITE if finite else _ANY).decode(text)
        except _KeyTwice:  # once more, for its place
            duplicate = _first_duplicate(json.loads(text, object_pairs_hook=_Pairs))
            raise ValueError(duplicate) from None
        nested = text.count("[") + text.count("{") > DEEPEST
        if nested or _ESCAPED_HALF.search(text) or _HALF.search(text):
            _check(value)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} deep") from None
    return value


class _KeyTwice(ValueError):
    """An object has a key twice."""


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a duplicate key."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        raise _KeyTwice(_first_duplicate(_Pairs(pairs)))
    return entries


class _Pairs(tuple[tuple[str, Any], ...]):
    """The keys and values of an object, duplicates included."""

    __slots__ = ()


def _first_duplicate(value: Any) -> str:
    """Return a description of the first duplicate key within a value, or ""."""
    counts = Counter(name for name, _ in value) if isinstance(value, _Pairs) else {}
    if twice := next((name for name, count in counts.items() if count > 1), None):
        return f"key {twice!r} occurs twice in one object"
    inner = value if counts else enumerate(value) if isinstance(value, list) else ()
    problems = ((name, _first_duplicate(part)) for name, part in inner)
    return next((f"{name!r}: {problem}" for name, problem in problems if problem), "")


def _int(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _float(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits} is no finite number")
    return value


_ANY = json.JSONDecoder(object_pairs_hook=unique)
_FINITE = json.JSONDecoder(
    object_pairs_hook=unique, parse_int=_int, parse_float=_float, parse_constant=_float
)


def _check(value: Any, depth: int = 0) -> None:
    """Check for deep nesting and halves of surrogate pairs. Raises ValueError, RecursionError."""
    if isinstance(value, str) and _HALF.search(value):
        raise ValueError("half of a surrogate pair")
    if isinstance(value, dict | list):
        if depth == DEEPEST:
            raise RecursionError
        for part in chain(value, value.values() if isinstance(value, dict) else ()):
            _check(part, depth + 1)


def yaml_of(text: str) -> Any:
    """Return the value of a YAML text. Raises ValueError: it is not YAML, is too large or too deep,
    or has a duplicate key or an impossible value (a month 99, a number of 5,000 digits).
    """
    if len(text) > MOST_YAML:
        raise ValueError(f"{len(text):,} characters, at most {MOST_YAML:,} are read")
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _measure(loader, node, {}, 0)
        return loader.construct_document(node)
    except RecursionError:
        raise ValueError(f"sections nested more than {DEEPEST} deep") from None
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
    ) as error:  # of yaml's readers of dates and such
        raise ValueError(str(error)) from None


def yaml_file(path: Path, what: str, remedy: str) -> Any:
    """Return the value of a YAML file. Raises Refused, which names `what` it is."""
    try:
        return yaml_of(read_text(path))
    except OSError as error:
        raise Refused(f"{what} {path}: cannot be read ({error.strerror})", remedy) from None
    except ValueError as error:
        raise Refused(f"{what} {path}: not valid YAML\n  {error}", remedy) from None


def _measure(loader: yaml.SafeLoader, node: yaml.Node, known: dict[int, int], depth: int) -> int:
    """Return how many values a node stands for. Raises ValueError for too many and for duplicate
    keys, RecursionError for a node within itself.
    """
    if depth > DEEPEST:
        raise RecursionError
    if (size := known.get(id(node))) is not None:
        return size
    if node.tag.endswith((":int", ":float")) and len(node.value) > _MOST_NUMBER:
        raise ValueError(f"a number of {len(node.value):,} characters")
    inner = node.value if isinstance(node, yaml.SequenceNode) else ()
    if isinstance(node, yaml.MappingNode):
        inner = [part for pair in node.value for part in pair]
    size = 1 + sum(_measure(loader, part, known, depth + 1) for part in inner)
    if isinstance(node, yaml.MappingNode):
        _check_keys(loader, node)
    if size > _MOST_VALUES:
        raise ValueError(f"aliases that stand for more than {_MOST_VALUES:,} values")
    known[id(node)] = size
    return size


def _check_keys(loader: yaml.SafeLoader, node: yaml.MappingNode) -> None:
    """Check that a mapping has no duplicate key, however it is written. Raises ValueError."""
    seen = set[Any]()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode):
            merge = key.tag == "tag:yaml.org,2002:merge"
            name = key.value if merge else loader.construct_object(key)
            if name in seen:
                raise ValueError(f"line {key.start_mark.line + 1}: key {name!r} occurs twice")
            seen.add(name)
