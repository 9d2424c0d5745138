"""Secure aggregation: what a server gets to see of a client, what it makes of it, who leaves, and
who does not keep to the protocol.

Everything is Flower's own but the grid: it is in this process, takes every message through Flower's
wire form, and keeps what it carried.
"""

import json
import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.common import bytes_to_ndarray, ndarray_to_bytes
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st

from coterie.aggregation import secure
from coterie.core.errors import TensorError
from coterie.core.protocol import Ask, Sends, task
from coterie.core.tensors import from_bytes, to_bytes
from coterie.engines.engine import Listener
from coterie.engines.flower.apps import QUERY, client_app, packed, unpacked
from coterie.engines.flower.engine import Flower
from coterie.engines.flower.secagg_common import EXCHANGE, TRAIN
from coterie.engines.messages import Member, Reply, Request, parsed

SENT = {
    "w": torch.randn(30, 20, generator=torch.Generator().manual_seed(1)),
    "b": torch.randn(7, generator=torch.Generator().manual_seed(2)),
}
SIZE = 607


@pytest.fixture(autouse=True)
def as_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages take their sender from here; Flower sets it where it runs a program."""
    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Pair:
    """A method of two tasks: one trains, the other does not."""

    @task(Sends.UPDATE)
    def train(self, client: Any, tensors: Any) -> Any: ...

    @task()
    def score(self, client: Any, tensors: Any) -> Any: ...


def delta(place: int) -> dict[str, torch.Tensor]:
    """The update of a client."""
    generator = torch.Generator().manual_seed(100 + place)
    return {
        name: 0.1 * torch.randn(tensor.shape, generator=generator) for name, tensor in SENT.items()
    }


def device(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
    """What a device does: a hello, a score, or training, whose update is to be masked or not."""
    request: Request = parsed(Request, text)
    name = f"c{node['partition-id']}"
    if request.action == "hello":
        return Reply(
            client=name,
            member=Member(client=name, position=node["partition-id"], windows=(1, 1, 1)),
        ).model_dump_json(), b""
    sent = from_bytes(body)
    reply = {key: sent[key] + value for key, value in delta(node["partition-id"]).items()}
    found = {secure.UPDATE: secure.update(sent, reply)} if request.masked else reply
    said = Reply(
        client=name,
        task=request.task,
        round=request.round,
        number=request.number,
        metrics={"tokens": 3},
        state_bytes=5,
    )
    return said.model_dump_json(), to_bytes(found)


class InProcess(Grid):
    """A grid whose nodes are in this process.

    Args:
        clients: Nodes; their numbers are 1000, 1001, ...
        lost: Whether the reply of a node to a message of a stage never comes: the node dies before
            it does anything.
        tamper: What becomes of a reply on its way; None: it stays.
    """

    def __init__(
        self,
        clients: int,
        lost: Callable[[int, str], bool] = lambda node, stage: False,
        tamper: Callable[[int, str, Message], Message] = lambda node, stage, reply: reply,
        handle: Any = device,
    ) -> None:
        self.app, self.lost, self.tamper = client_app(handle), lost, tamper
        self.contexts = {
            1000 + k: Context(1, 1000 + k, {"partition-id": k}, RecordDict(), {})
            for k in range(clients)
        }
        self.replies: dict[str, Message] = {}
        self.carried: list[
            tuple[int, str, Message]
        ] = []  # what came back to the server: node, stage, message

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        return Message(*args, **kwargs)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            id, node = f"m{len(self.replies)}-{len(self.carried)}", message.metadata.dst_node_id
            message.metadata.__dict__["_message_id"] = id
            ids.append(id)
            found = through_the_wire(message)
            stage = stage_of(found)
            if self.lost(node, stage):
                self.replies[id] = Message(Error(5, "node lost"), reply_to=found)
                continue
            reply = self.tamper(node, stage, through_the_wire(self.app(found, self.contexts[node])))
            self.carried.append((node, stage, reply))
            self.replies[id] = reply
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(id) for id in list(message_ids) if id in self.replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        raise AssertionError("the engine has its own deadline")


def stage_of(message: Message) -> str:
    return str(message.content.config_records.get(RECORD_KEY_CONFIGS, {}).get(Key.STAGE, ""))


def through_the_wire(message: Message) -> Message:
    return message_from_proto(
        type(message_to_proto(message)).FromString(message_to_proto(message).SerializeToString())
    )


class Ear(Listener):
    """Keeps why clients were lost, and what they measured."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self.heard: dict[str, Any] = {}

    def lost(self, client: str, task: str, reason: str) -> None:
        self.reasons[client] = reason

    def measured(self, client: str, metrics: Any) -> None:
        self.heard[client] = dict(metrics)


def engine(grid: InProcess, **kwargs: Any) -> tuple[Flower, Ear]:
    ear = Ear()
    found = Flower(grid, "run", {}, deadline=20.0, secure=True, listener=ear, **kwargs)
    found.members()
    return found, ear


def answered(grid: InProcess, clients: int, round: int = 0) -> tuple[dict[str, Any], Ear]:
    flower, ear = engine(grid)
    return dict(
        flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(clients)}), round, 0)
    ), ear


def naive_mean(places: Iterable[int]) -> dict[str, torch.Tensor]:
    replies = [
        {name: (SENT[name] + value).double() for name, value in delta(k).items()} for k in places
    ]
    return {name: sum(reply[name] for reply in replies) / len(replies) for name in SENT}


def masked_values(grid: InProcess) -> dict[int, np.ndarray]:
    """The masked update of each node, as the server received it."""
    found = {
        node: m.content.config_records[RECORD_KEY_CONFIGS]
        for node, stage, m in grid.carried
        if stage == Stage.COLLECT_MASKED_VECTORS
    }
    return {
        node: bytes_to_ndarray(configs[Key.MASKED_PARAMETERS][1]) for node, configs in found.items()
    }


def assert_is_mean(replies: dict[str, Any], places: Iterable[int], asked: int) -> None:
    places = list(places)
    assert list(replies) == [f"c{k}" for k in places]
    expected = naive_mean(places)
    for reply in replies.values():
        assert {name: (t.shape, t.dtype) for name, t in reply.items()} == {
            name: (t.shape, t.dtype) for name, t in SENT.items()
        }
        # half a unit of float32 in the last place of values below 4, and the step of the
        # quantisation
        for name in SENT:
            assert (reply[name].double() - expected[name]).abs().max() <= secure.step(
                asked
            ) + 2**-22


@pytest.mark.parametrize("clients", [3, 4, 7])
def test_the_replies_are_the_mean_and_what_was_measured_arrives(clients: int) -> None:
    replies, ear = answered(InProcess(clients), clients)
    assert_is_mean(replies, range(clients), clients)
    assert ear.reasons == {}
    assert ear.heard == {f"c{k}": {"tokens": 3} for k in range(clients)}


def test_what_a_server_receives_is_not_the_update() -> None:
    grids = [InProcess(3), InProcess(3)]
    for grid in grids:
        answered(grid, 3)
    first, second = map(masked_values, grids)
    for k in range(3):
        update = secure.update(
            SENT, {name: SENT[name] + value for name, value in delta(k).items()}
        ).numpy()
        for values in (first[1000 + k], second[1000 + k]):
            assert abs(np.corrcoef(values, update)[0, 1]) < 5 / np.sqrt(SIZE)
            low, high = values.min() / 2**32, values.max() / 2**32
            assert low < 0.02
            assert (
                high > 0.98
            )  # over all integers modulo 2^32; a quantised update is within a quarter of them
            assert abs(values.mean() / 2**32 - 0.5) < 5 / np.sqrt(12 * SIZE)
        assert (first[1000 + k] != second[1000 + k]).mean() > 0.99
        for grid in grids:
            for node, _, message in grid.carried:
                if node == 1000 + k:
                    raw = message_to_proto(message).SerializeToString()
                    pairs = update.astype("<f4")[:606].view(
                        "<f8"
                    )  # of two values each: four bytes are there by chance now and then
                    assert not any(
                        value.tobytes() in raw for values in (update, pairs) for value in values
                    )


def test_no_secret_is_of_a_generator_that_others_can_set() -> None:
    # A task runs with PyTorch's generator seeded from the recipe; here all ordinary ones are,
    # before whatever a device does.
    def seeded(node: int, stage: str) -> bool:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return False

    kept: list[dict[tuple[int, str, str], object]] = []
    for _ in range(2):
        grid = InProcess(3, lost=seeded)
        answered(grid, 3)
        records = [
            (node, stage, dict(m.content.config_records.get(RECORD_KEY_CONFIGS, {})))
            for node, stage, m in grid.carried
        ]
        kept.append(
            {
                (node, stage, key): value
                for node, stage, record in records
                for key, value in record.items()
            }
        )
    secret = (
        Key.PUBLIC_KEY_1,
        Key.PUBLIC_KEY_2,
        Key.CIPHERTEXT_LIST,
        Key.MASKED_PARAMETERS,
        Key.SHARE_LIST,
    )
    compared = [key for key in kept[0] if key[2] in secret]
    assert len(compared) == 3 * len(secret)
    assert all(kept[0][key] != kept[1][key] for key in compared)


def test_the_sum_of_what_a_server_receives_still_has_the_own_masks_of_clients() -> None:
    grid = InProcess(3)
    answered(grid, 3)
    total = (
        np.sum(list(masked_values(grid).values()), axis=0) % 2**32
    )  # masks of pairs are gone, those of single clients are not
    assert total.max() > 3.5 * secure.levels(3)


def fold(seed: bytes) -> int:
    """What Flower makes its masks of: 32 bits."""
    return int(np.bitwise_xor.reduce(np.frombuffer(seed, "<u4")))


def test_masks_are_of_all_bits_of_their_seed() -> None:
    one, other = bytes(32), bytes([1, 0, 0, 0] * 2) + bytes(24)
    assert fold(one) == fold(other)
    for used_by in (secaggplus_mod, SecAggPlusWorkflow.unmask_stage):
        expand = used_by.__globals__["pseudo_rand_gen"]
        a, b = (expand(seed, 2**32, [(1,), (40, 50)]) for seed in (one, other))
        again = expand(one, 2**32, [(1,), (40, 50)])
        assert [part.shape for part in a] == [(1,), (40, 50)]
        assert all((x == y).all() for x, y in zip(a, again, strict=True))
        assert (a[1] != b[1]).mean() > 0.99
        assert (
            a[1] != np.random.RandomState(fold(one)).randint(0, 2**32 - 1, (40, 50), dtype=np.int64)
        ).mean() > 0.99
        assert a[1].min() >= 0
        assert a[1].max() < 2**32


@pytest.mark.parametrize("stage", Stage.all())
def test_who_leaves_before_it_sent_is_not_in_the_mean_and_who_leaves_after_is(stage: str) -> None:
    grid = InProcess(5, lost=lambda node, now: (node, now) == (1003, stage))
    replies, ear = answered(grid, 5)
    assert_is_mean(replies, range(5) if stage == Stage.UNMASK else (0, 1, 2, 4), 5)
    assert ear.reasons == ({} if stage == Stage.UNMASK else {"c3": "node lost"})


def test_clients_leave_at_different_stages() -> None:
    gone = {
        (1001, Stage.SETUP),
        (1004, Stage.SHARE_KEYS),
        (1006, Stage.COLLECT_MASKED_VECTORS),
        (1000, Stage.UNMASK),
    }
    replies, ear = answered(InProcess(14, lost=lambda node, now: (node, now) in gone), 14)
    assert_is_mean(replies, (0, 2, 3, 5, 7, 8, 9, 10, 11, 12, 13), 14)
    assert set(ear.reasons) == {"c1", "c4", "c6"}


@pytest.mark.parametrize("stage", Stage.all())
def test_with_too_few_there_is_no_sum_and_everybody_hears_why(stage: str) -> None:
    replies, ear = answered(InProcess(3, lost=lambda node, now: (node, now) == (1001, stage)), 3)
    assert replies == {}
    assert set(ear.reasons) == {"c0", "c1", "c2"}
    assert "fewer than 3 of 3 clients stayed to the end" in ear.reasons["c0"]
    assert "node lost" in ear.reasons["c0"]
    assert ear.reasons["c1"] == "node lost"


def test_of_two_clients_nothing_is_asked() -> None:
    grid = InProcess(2)
    replies, ear = answered(grid, 2)
    assert replies == {}
    assert "at least 3" in ear.reasons["c0"]
    assert all(stage == "" for _, stage, _ in grid.carried)  # the hellos


def test_a_task_that_fails_is_named_and_its_client_counts_as_gone() -> None:
    def failing(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
        if node["partition-id"] == 2 and parsed(Request, text).action == "task":
            return Reply(client="c2", problem="diverged", remedy="Lower it.").model_dump_json(), b""
        return device(node, text, body)

    replies, ear = answered(InProcess(4, handle=failing), 4)
    assert_is_mean(replies, (0, 1, 3), 4)
    assert ear.reasons == {"c2": "diverged\n  Lower it."}


def in_the_clear(node: int, stage: str, reply: Message) -> Message:
    """What an honest Flower without its modifier would send: the update itself."""
    if (node, stage) != (1000, Stage.COLLECT_MASKED_VECTORS):
        return reply
    reply.content.array_records["fitres.parameters"] = ArrayRecord([np.ones(SIZE)])
    return reply


def with_masked(
    values: Callable[[list[np.ndarray]], list[np.ndarray]],
) -> Callable[[int, str, Message], Message]:
    def change(node: int, stage: str, reply: Message) -> Message:
        if (node, stage) == (1000, Stage.COLLECT_MASKED_VECTORS):
            configs = reply.content.config_records[RECORD_KEY_CONFIGS]
            found = values([bytes_to_ndarray(value) for value in configs[Key.MASKED_PARAMETERS]])
            configs[Key.MASKED_PARAMETERS] = [ndarray_to_bytes(value) for value in found]
        return reply

    return change


def quantised(values: list[np.ndarray]) -> list[np.ndarray]:
    """Quantised as Flower does, without masks."""
    return [
        np.array([secure.levels(4)]),
        quantize([np.zeros(SIZE)], secure.RANGE, secure.levels(4))[0].astype(np.int64),
    ]


def without_configs(node: int, stage: str, reply: Message) -> Message:
    if (node, stage) == (1000, Stage.COLLECT_MASKED_VECTORS):
        del reply.content.config_records[RECORD_KEY_CONFIGS]
    return reply


def of_another_round(node: int, stage: str, reply: Message) -> Message:
    if (node, stage) == (1000, Stage.COLLECT_MASKED_VECTORS):
        said = json.loads(str(reply.content.config_records["fitres.metrics"]["text"])) | {
            "round": 7
        }
        reply.content.config_records["fitres.metrics"] = ConfigRecord({"text": json.dumps(said)})
    return reply


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (in_the_clear, "not masked"),
        (with_masked(quantised), "not masked"),
        (
            with_masked(lambda values: [values[0], values[1][:-1]]),
            "expected int64[1] and int64[607]",
        ),
        (
            with_masked(lambda values: [values[0], values[1].astype(np.float64)]),
            "expected int64[1] and int64[607]",
        ),
        (with_masked(lambda values: [values[0], values[1] + 2**40]), "modulo 2^32"),
        (without_configs, "KeyError"),
        (of_another_round, "was not requested"),
    ],
)
def test_a_server_does_not_take_a_reply_that_is_not_masked_or_not_whole(
    tamper: Any, reason: str
) -> None:
    replies, ear = answered(InProcess(4, tamper=tamper), 4)
    assert reason in ear.reasons["c0"]
    assert_is_mean(replies, (1, 2, 3), 4)


def test_wrong_shares_of_keys_are_named_and_the_others_are_enough() -> None:
    def wrong(node: int, stage: str, reply: Message) -> Message:
        if (node, stage) == (1000, Stage.UNMASK):
            configs = reply.content.config_records[RECORD_KEY_CONFIGS]
            configs[Key.SHARE_LIST] = [
                share[:4] + bytes(len(share) - 4) for share in configs[Key.SHARE_LIST]
            ]
        return reply

    replies, ear = answered(InProcess(4, tamper=wrong), 4)
    assert_is_mean(replies, range(4), 4)
    assert list(ear.reasons) == ["c0"]
    assert "not the one it got" in ear.reasons["c0"]


def test_masks_that_do_not_cancel_do_not_become_a_mean() -> None:
    other = np.random.default_rng(0).integers(0, 2**32, SIZE)
    replies, ear = answered(
        InProcess(4, tamper=with_masked(lambda values: [values[0], (values[1] + other) % 2**32])), 4
    )
    assert replies == {}
    assert "did not follow the protocol" in ear.reasons["c1"]


# --- what a device refuses
# --------------------------------------------------------------------------------------------------


def terms(**changes: Any) -> dict[str, Any]:
    said = {
        "sample_num": 4,
        "share_num": 4,
        "threshold": 3,
        "clipping_range": 8.0,
        "target_range": 2**29,
        "mod_range": 2**32,
    }
    return {"stage": Stage.SETUP} | said | {"max_weight": 1.0} | changes


def said_by(grid: InProcess, content: RecordDict, kind: str = TRAIN, node: int = 1000) -> Message:
    message = Message(content, node, kind)
    message.metadata.__dict__["_message_id"] = "m"
    return grid.app(message, grid.contexts[node])


def configured(**configs: Any) -> RecordDict:
    return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(configs)})


def test_a_device_goes_along_with_its_own_terms() -> None:
    asked = configured(**terms())
    asked.config_records[EXCHANGE] = ConfigRecord({"about": "one"})
    assert not said_by(InProcess(1), asked).has_error()
    assert "does not name" in str(said_by(InProcess(1), configured(**terms())).error.reason)


@pytest.mark.parametrize(
    "changes",
    [
        {"sample_num": 2, "share_num": 2, "threshold": 2, "target_range": 2**30},
        {"threshold": 2},
        {"share_num": 3},
        {"mod_range": 2**16},
        {"target_range": 2**31},
        {"clipping_range": 1.0},
        {"max_weight": 1000.0},
        {"more": 1},
    ],
)
def test_a_device_takes_no_terms_from_a_server(changes: dict[str, Any]) -> None:
    grid = InProcess(1)
    reply = said_by(grid, configured(**terms(**changes)))
    assert "expected" in str(reply.error.reason)
    assert RECORD_KEY_STATE not in grid.contexts[1000].state.config_records


@pytest.mark.parametrize("kind", [TRAIN, "train.default"])
def test_a_device_does_not_answer_what_flower_would_not_mask(kind: str) -> None:
    """Of "train.default" the modifier is registered and passes the reply through as it is."""
    content = packed(
        Request(action="task", run="run", recipe={}, client="c0", task="train").model_dump_json(),
        to_bytes(SENT),
    )
    content[RECORD_KEY_CONFIGS] = ConfigRecord({"stage": Stage.SETUP} if kind != TRAIN else {})
    reply = said_by(InProcess(1), content, kind)
    assert reply.has_error()
    assert "masked" in str(reply.error.reason) or "no stage" in str(reply.error.reason)


def test_a_device_does_not_answer_in_the_clear_what_is_to_be_masked() -> None:
    request = Request(action="task", run="run", recipe={}, client="c0", task="train", masked=True)
    reply = said_by(InProcess(1), packed(request.model_dump_json(), to_bytes(SENT)), QUERY)
    text, body = unpacked(reply.content)
    assert "asked without masks" in parsed(Reply, text).problem
    assert body == b""


def test_a_device_does_not_mask_what_it_was_not_told_to() -> None:
    """The request says it itself: a score is no update."""

    class Asking(Flower):
        def _request(self, *args: Any, **kwargs: Any) -> Request:
            return super()._request(*args, **kwargs).model_copy(update={"masked": False})

    ear = Ear()
    flower = Asking(InProcess(3), "run", {}, deadline=20.0, secure=True, listener=ear)
    flower.members()
    assert flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(3)}), 0, 0) == {}
    assert "not to be masked" in ear.reasons["c0"]


def unmask(active: list[int], dead: list[int]) -> RecordDict:
    return configured(stage=Stage.UNMASK, active_nids=active, dead_nids=dead)


@pytest.mark.parametrize(
    ("active", "dead"),
    [([1000, 1001, 1002], [1002]), ([1000, 1000, 1001], [1002]), ([1001, 1002, 1003], [1000])],
)
def test_a_device_does_not_give_away_both_masks_of_a_client(
    active: list[int], dead: list[int]
) -> None:
    grid = InProcess(4, lost=lambda node, stage: stage == Stage.UNMASK)
    answered(grid, 4)
    assert RECORD_KEY_STATE in grid.contexts[1000].state.config_records
    reply = said_by(grid, unmask(active, dead))
    assert "twice" in str(reply.error.reason) or "not in" in str(reply.error.reason)
    assert said_by(
        grid, unmask([1000, 1001, 1002, 1003], [])
    ).has_error()  # nor does it after such a question


def test_a_device_gives_shares_once_and_forgets_its_keys() -> None:
    grid = InProcess(4, lost=lambda node, stage: stage == Stage.UNMASK)
    answered(grid, 4)
    assert not said_by(grid, unmask([1000, 1001, 1002, 1003], [])).has_error()
    assert RECORD_KEY_STATE not in grid.contexts[1000].state.config_records
    assert said_by(grid, unmask([1000, 1001, 1002], [1003])).has_error()


def test_what_is_not_training_goes_the_ordinary_way() -> None:
    grid = InProcess(3)
    flower, _ = engine(grid)
    replies = flower.answer(Ask(Pair().score, {f"c{k}": SENT for k in range(3)}), 0, 0)
    assert all(torch.equal(replies[f"c{k}"]["w"], SENT["w"] + delta(k)["w"]) for k in range(3))
    assert {stage for _, stage, _ in grid.carried} == {""}


def test_what_has_no_sum_is_not_asked_in_the_clear_instead() -> None:
    grid = InProcess(3)
    flower, _ = engine(grid)
    odd = SENT | {"w": SENT["w"][:2]}
    unlike = Ask(Pair().train, {"c0": SENT, "c1": SENT, "c2": odd})
    more = Ask(
        Pair().train,
        {f"c{k}": SENT for k in range(3)},
        lambda sent: {**sent, "samples": torch.tensor(5)},
    )
    integers = Ask(Pair().train, {f"c{k}": {"n": torch.tensor(5)} for k in range(3)})
    before = len(grid.carried)
    for ask, said in (
        (unlike, "'w' is float32"),
        (more, "'samples'"),
        (integers, "holds integers"),
    ):
        with pytest.raises(TensorError, match=said):
            flower.answer(ask, 0, 0)
    assert len(grid.carried) == before


# --- the numbers
# --------------------------------------------------------------------------------------------------


@given(st.integers(3, 100_000))
def test_no_sum_is_beyond_the_modulus(clients: int) -> None:
    assert clients * secure.levels(clients) < 2**32
    assert secure.levels(clients) == 2**30 or clients * 2 * secure.levels(clients) >= 2**32
    assert 3 <= secure.threshold(clients) <= clients
    assert 3 * secure.threshold(clients) > 2 * clients
    assert secure.step(clients) == 16 / secure.levels(clients)


@pytest.mark.parametrize(
    ("clients", "levels", "threshold"),
    [(3, 2**30, 3), (4, 2**29, 3), (7, 2**29, 5), (8, 2**28, 6), (100, 2**25, 67)],
)
def test_the_numbers_for_some_clients(clients: int, levels: int, threshold: int) -> None:
    assert (secure.levels(clients), secure.threshold(clients)) == (levels, threshold)


@given(st.integers(0, 2**32 - 1), st.integers(1, 4))
def test_replies_are_what_was_sent_and_their_updates(seed: int, clients: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    forms = {"z": (2, 3), "a": (4,), "m": ()}

    def named(scale: float) -> dict[str, torch.Tensor]:
        return {
            name: scale * torch.randn(shape, generator=generator) for name, shape in forms.items()
        }

    sent, replies = [named(1.0) for _ in range(clients)], [named(0.5) for _ in range(clients)]
    vectors = [secure.update(s, r) for s, r in zip(sent, replies, strict=True)]
    assert torch.equal(
        vectors[0][:4], (replies[0]["a"].double() - sent[0]["a"].double())
    )  # in the order of the names
    assert vectors[0][4] == replies[0]["m"].double() - sent[0]["m"].double()
    mean = secure.moved(sent, torch.stack(vectors).mean(dim=0).numpy())
    for name in forms:
        torch.testing.assert_close(
            mean[name],
            torch.stack([reply[name] for reply in replies]).mean(dim=0),
            rtol=1e-5,
            atol=1e-6,
        )


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"x": torch.tensor([9.0, 0.0])}, "beyond 8"),
        ({"x": torch.tensor([float("nan"), 0.0])}, "not numbers"),
        ({"x": torch.tensor([1, 2])}, "int64"),
        ({"x": torch.tensor([1.0])}, "float32"),
        ({"x": torch.zeros(2), "y": torch.zeros(1)}, "'y'"),
    ],
)
def test_an_update_that_cannot_be_carried_is_refused_not_clipped(reply: Any, said: str) -> None:
    with pytest.raises(TensorError, match=said):
        secure.update({"x": torch.zeros(2)}, reply)
