"""Requests and replies as Flower's messages."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from coterie.core.errors import TensorError

if TYPE_CHECKING:
    from coterie.core.protocol import Ask, ClientId


_TEXT, _TENSORS, _STYPE = "text", "tensors", "safetensors"


def _packed(text: str, body: bytes) -> RecordDict:
    """Return the content of a message."""
    array = Array(dtype="uint8", shape=(len(body),), stype=_STYPE, data=body)
    return RecordDict(
        {_TEXT: ConfigRecord({_TEXT: text}), _TENSORS: ArrayRecord({_TENSORS: array})}
    )


def _unpacked(content: RecordDict, most: int | None = None) -> tuple[str, bytes]:
    """Return the inverse of `_packed`.

    Raises:
        TensorError: It has other records, or more than `most` bytes of tensors.
    """
    text, arrays = content.get(_TEXT), content.get(_TENSORS)
    if (
        set(content) != {_TEXT, _TENSORS}
        or not isinstance(text, ConfigRecord)
        or not isinstance(arrays, ArrayRecord)
    ):
        raise TensorError(
            f"a message with records {sorted(content)[:5]}, expected {_TEXT} and {_TENSORS}",
            "It did not come from coterie.",
        )
    if (
        set(text) != {_TEXT}
        or not isinstance(text[_TEXT], str)
        or set(arrays) != {_TENSORS}
        or arrays[_TENSORS].stype != _STYPE
    ):
        raise TensorError(
            "a message whose records hold something else than one text and one array of "
            "safetensors",
            "It did not come from coterie.",
        )
    body = arrays[_TENSORS].data
    if most is not None and len(body) > most:
        raise TensorError(
            f"a message with {len(body):,} bytes of tensors, expected at most {most:,}", ""
        )
    return str(text[_TEXT]), body


def _size(content: RecordDict) -> int:
    """Return the bytes of the values of a message."""
    arrays = sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
    values = [value for record in content.config_records.values() for value in record.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return arrays + sum(len(part) if isinstance(part, str | bytes) else 8 for part in parts)


def _bodies(
    ask: "Ask", clients: "Iterable[ClientId]", nodes: "Mapping[ClientId, int]"
) -> dict[int, bytes]:
    """Return the tensors of an Ask as bytes, by node; shared tensors are encoded once."""
    from coterie.core.tensors import to_bytes

    encoded: dict[int, bytes] = {}
    for i in clients:
        if id(ask.to[i]) not in encoded:
            encoded[id(ask.to[i])] = to_bytes(ask.to[i]) if ask.to[i] else b""
    return {nodes[i]: encoded[id(ask.to[i])] for i in clients}
