"""Flower's own ways around coterie's messages: its mods, and numbers where they look for them."""

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, fixedclipping_mod, message_size_mod
from flwr.clientapp.typing import Mod
from nodes import Nodes

from coterie.core.errors import TensorError
from coterie.core.tensors import from_bytes, to_bytes
from coterie.engines.flower.apps import QUERY, client_app, delivered, packed, unpacked
from coterie.engines.messages import Reply, Request
from coterie.methods.section import build_method

SENT = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)}
MEASURED = {"tokens": 7, "loss/generalist": 1.5, "share": [0.25, 0.75], "router/0": [[0.5, 0.5]]}
ASK = build_method({"name": "fedavg", "rounds": 1}).local_round  # type: ignore[attr-defined]


def trained(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """A device that doubles what it is sent."""
    request = json.loads(text)
    same = {key: request[key] for key in ("client", "task", "round", "number")}
    doubled = {name: 2 * tensor for name, tensor in from_bytes(body, "what was sent").items()}
    return Reply(**same, metrics=MEASURED).model_dump_json(), to_bytes(doubled)


def replied(*mods: Mod) -> Message:
    """What arrives of the reply to a task, through Flower's encoding."""
    request = Request(action="task", run="r", recipe={}, client="ann", task="t")
    content = packed(request.model_dump_json(), to_bytes(SENT))
    Nodes()  # gives messages a sender
    message = Message(content, 1, QUERY)
    message.metadata.__dict__["_message_id"] = "1"
    context = Context(1, 1, {}, RecordDict(), {})
    return delivered(client_app(trained, mods)(delivered(message), context))


def test_what_a_task_measured_is_a_metric_record_as_well() -> None:
    reply = replied()
    (record,) = reply.content.metric_records.values()
    assert dict(record) == {name: MEASURED[name] for name in ("tokens", "loss/generalist", "share")}
    text, body = unpacked(reply.content)
    assert json.loads(text)["metrics"] == MEASURED
    assert torch.equal(from_bytes(body, "the reply")["a.weight"], 2 * SENT["a.weight"])


def test_mods_see_sizes_and_measurements_and_change_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("flwr"), "propagate", True)
    seen = []

    def losses(message: Message, context: Context, call: Callable[..., Message]) -> Message:
        reply = call(message, context)
        seen.extend(r["loss/generalist"] for r in reply.content.metric_records.values())
        return reply

    with caplog.at_level("INFO", logger="flwr"):
        reply = replied(message_size_mod, arrays_size_mod, losses)
    assert seen == [1.5]
    assert unpacked(reply.content) == unpacked(replied().content)
    size = sum(record.count_bytes() for record in reply.content.values())
    assert f"Outgoing message size: {size} bytes" in caplog.text
    (arrays,) = reply.content.array_records.values()
    assert f"Total array elements sent: {arrays.count_bytes()} bytes" in caplog.text


@pytest.mark.parametrize("mod", [fixedclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)])
def test_a_mod_that_changes_arrays_stops_the_task_and_changes_none(mod: Mod) -> None:
    """It would change the bytes of a file: values are clipped by coterie's own privacy."""

    def asked_to_clip(message: Message, context: Context, call: Any) -> Message:
        message.content["text"]["clipping_norm"] = 1.0
        return call(message, context)  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match="safetensors"):
        replied(asked_to_clip, mod)


@pytest.mark.parametrize(
    ("metrics", "believed"),
    [
        (MetricRecord({"tokens": -1, "loss/generalist": float("nan"), "x" * 999: [1.0]}), True),
        (ConfigRecord({"text": "no metrics"}), False),
        (ArrayRecord(), False),
    ],
)
def test_the_record_of_a_hostile_device_is_not_read(metrics: Any, believed: bool) -> None:
    content = packed(Reply(client="ann").model_dump_json(), b"abc")
    content["metrics"] = metrics
    if believed:
        assert unpacked(content) == (Reply(client="ann").model_dump_json(), b"abc")
        return
    with pytest.raises(TensorError, match="records"):
        unpacked(content)
