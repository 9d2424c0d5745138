"""What a server of secure aggregation accepts from a client: the requested kinds, numbers and
lengths of values, checked before they are read.
"""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key

from coterie.aggregation.secure import MODULUS
from coterie.core.errors import TensorError
from coterie.engines.flower.secagg_common import (
    COMPLAINTS,
    EXCHANGE,
    FITRES,
    SAME_VERSION,
    TEXT,
)
from coterie.engines.messages import Reply, Request, check_answers, parsed

FOREIGN = "It did not come from coterie, or was changed on its way."
_REPLY = {f"{FITRES}.metrics", f"{FITRES}.status", RECORD_KEY_CONFIGS}


class NoAnswer(TensorError):
    """A node does not answer."""


def content_of(node: int, stage: str, answered: Message | None) -> RecordDict:
    """Return a node's answer. Raises TensorError: it is missing, an error, or another node's."""
    if answered is None:
        raise NoAnswer(f"no reply in time ({stage})")
    if answered.has_error():
        raise NoAnswer(answered.error.reason or f"no reason (code {answered.error.code})")
    if answered.metadata.src_node_id != node:
        raise TensorError(f"node {answered.metadata.src_node_id} answered in its place")
    return answered.content


def configs_of(stage: str, **values: Any) -> ConfigRecord:
    return ConfigRecord({Key.STAGE: stage, **values})


def content_with(configs: ConfigRecord, exchange: ConfigRecord | None = None) -> RecordDict:
    records = {RECORD_KEY_CONFIGS: configs} | ({} if exchange is None else {EXCHANGE: exchange})
    return RecordDict(cast(Any, records))


_INTEGERS = {Key.DESTINATION_LIST, Key.NODE_ID_LIST, COMPLAINTS}  # other lists hold bytes


def values_of(
    content: RecordDict, kinds: Mapping[str, type], lists: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a reply without other records. Raises TensorError, see `listed`."""
    if set(content) != {RECORD_KEY_CONFIGS}:
        raise TensorError(
            f"records {sorted(content)[:5]} where only keys were asked for",
            "It did not come from coterie.",
        )
    return listed(content.config_records[RECORD_KEY_CONFIGS], kinds, lists)


def listed(
    configs: ConfigRecord, kinds: Mapping[str, type], lists: Sequence[str]
) -> dict[str, Any]:
    """Return a record's values. Raises TensorError unless it has exactly these kinds and lists."""
    if (
        set(configs) != {*kinds, *lists}
        or not all(isinstance(configs[key], kind) for key, kind in kinds.items())
        or not all(_is_list(configs[key], int if key in _INTEGERS else bytes) for key in lists)
    ):
        raise TensorError(
            f"a reply with {sorted(configs)[:5]}, expected {[*kinds, *lists]}",
            "It did not come from coterie.",
        )
    return dict(configs)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def check_lengths(values: Sequence[bytes], expected: Sequence[int]) -> None:
    """Raise TensorError unless the values have the expected lengths."""
    if [len(value) for value in values] != list(expected):
        raise TensorError(
            f"values of {[len(value) for value in values[:5]]} bytes, expected "
            f"{list(expected[:5])}",
            FOREIGN,
        )


def integers_of(data: bytes, size: int, expected: str) -> np.ndarray:
    """Return integers modulo 2^32, (size,) int64. Raises TensorError if anything else is in the
    bytes, which cannot decide how much is read.
    """
    whole = ndarray_to_bytes(np.zeros(size, np.int64))
    head = len(whole) - 8 * size
    if len(data) != len(whole) or data[:head] != whole[:head]:
        raise TensorError(f"a masked update of {len(data)} bytes, {expected}")
    values = np.frombuffer(data, np.int64, offset=head)
    if ((values < 0) | (values >= MODULUS)).any():
        raise TensorError("a masked update with values that are not integers modulo 2^32")
    return values


def described(request: Request, content: RecordDict) -> Reply:
    """Return a client's reply without its masked update. Raises TensorError if not requested."""
    arrays = content.array_records
    if set(arrays) != {f"{FITRES}.parameters"} or any(record for record in arrays.values()):
        raise TensorError("tensors that are not masked", SAME_VERSION)
    if set(content.config_records) != _REPLY or dict(
        content.metric_records[f"{FITRES}.num_examples"]
    ) != {"num_examples": 1}:
        raise TensorError(
            f"records {sorted(content.config_records)[:5]}, or another weight than 1",
            "It did not come from coterie.",
        )
    reply: Reply = parsed(Reply, str(content.config_records[f"{FITRES}.metrics"][TEXT]))
    check_answers(reply, request)
    return reply
