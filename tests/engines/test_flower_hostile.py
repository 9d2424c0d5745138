"""Whatever a node sends, the server neither falls over nor believes it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import flwr.app as flower_app
import pytest
import torch
from flwr.app import Error, Message, RecordDict
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from nodes import Nodes, Notes, altered, content, devices, execution, finished

from coterie.core.errors import TensorError
from coterie.core.protocol import Ask
from coterie.core.result import RESULT
from coterie.core.tensors import Tensors, from_bytes, to_bytes
from coterie.engines.flower.engine import Flower
from coterie.engines.flower.nodes import Transport
from coterie.engines.messages import MOST_HEADER, Reply, Request, parsed
from coterie.methods import Method
from coterie.methods.section import build_method
from coterie.runs.recipes.recipe import Recipe, load

SETTINGS = [
    "method.rounds=1",
    "compare_with=[]",
    "data.clusters=2",
    "metrics_every=1",
    "checkpoint_every=1",
    "engine=flower",
]
THETA = {"a.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([5.0])}
SAMPLES = build_method({"name": "fedavg", "rounds": 1, "aggregation": {"weighting": "samples"}})
TRUE = THETA | {"samples": torch.tensor(7)}


def true_reply(request: Request, **fields: Any) -> Reply:
    own = {
        "client": request.client,
        "task": request.task,
        "round": request.round,
        "number": request.number,
    }
    return Reply(**(own | {"metrics": {"tokens": 3, "loss/generalist": 1.5}} | fields))


def hello(node: Mapping[str, Any]) -> str:
    member = {"client": node["client"], "position": 0, "windows": (5, 5, 5)}
    return Reply(client=node["client"], member=member).model_dump_json()


class Liar:
    """A grid with an honest node, and one that sends what it is told to."""

    def __init__(self) -> None:
        self.grid, self.told = Nodes(), Notes()
        self.text: Callable[[Request], str] = lambda request: true_reply(request).model_dump_json()
        self.body = to_bytes(TRUE)
        self.grid.add({"client": "ann"}, self.honest)
        self.grid.add({"client": "liar"}, self.lies)
        self.engine = Flower(self.grid, "run", {}, deadline=0.05, listener=self.told)
        assert len(self.engine.members()) == 2

    def honest(self, node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
        request = parsed(Request, text)
        return (
            (hello(node), b"")
            if request.action == "hello"
            else (true_reply(request).model_dump_json(), to_bytes(TRUE))
        )

    def lies(self, node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
        request = parsed(Request, text)
        return (hello(node), b"") if request.action == "hello" else (self.text(request), self.body)

    def believed(self) -> dict[str, Tensors]:
        """What is taken of one exchange, as `Execution` takes it; the honest one always is."""
        ask = Ask(SAMPLES.local_round, {"liar": THETA, "ann": THETA}, SAMPLES.reply_spec)  # type: ignore[attr-defined]
        found = {}
        for i, reply in self.engine.answer(ask, 0, 0).items():
            try:
                ask.check(i, reply)
                found[i] = dict(reply)
            except TensorError as error:
                self.told.lost(i, ask.name, error.problem)
        assert found.keys() >= {"ann"}
        return found


@pytest.fixture(scope="module")
def liar() -> Liar:
    return Liar()


def alike(found: Tensors) -> bool:
    """Whether tensors are such as the server asked for."""
    form = {name: (t.shape, t.dtype) for name, t in TRUE.items()}
    return {name: (t.shape, t.dtype) for name, t in found.items()} == form and all(
        bool(torch.isfinite(t).all()) for t in found.values()
    )


def checked(liar: Liar) -> None:
    """One exchange: what the liar sent is believed only if it is of the form, and otherwise it
    is said that it is lost.
    """
    before = len(liar.told.losses)
    found = liar.believed()
    if "liar" in found:
        assert alike(found["liar"])
        assert int(found["liar"]["samples"]) >= 0
    else:
        assert [loss[0] for loss in liar.told.losses[before:]] == ["liar"]
        assert len(liar.told.losses[-1][2]) < 50_000


def test_the_truth_is_believed(liar: Liar) -> None:
    liar.text, liar.body = (lambda request: true_reply(request).model_dump_json()), to_bytes(TRUE)
    assert list(liar.believed()) == ["liar", "ann"]  # in the order asked, not of arrival


@settings(max_examples=150)
@given(
    st.one_of(
        st.binary(max_size=400),
        st.binary(min_size=8, max_size=200).map(lambda tail: (8).to_bytes(8, "little") + tail),
    )
)
def test_any_bytes(body: bytes) -> None:
    shared = _shared()
    shared.text, shared.body = (lambda request: true_reply(request).model_dump_json()), body
    checked(shared)


@settings(max_examples=200)
@given(st.integers(0, len(to_bytes(TRUE)) - 1), st.integers(0, 7), st.booleans())
def test_true_bytes_cut_off_or_with_a_bit_changed(at: int, bit: int, cut: bool) -> None:
    shared, true = _shared(), to_bytes(TRUE)
    shared.text = lambda request: true_reply(request).model_dump_json()
    shared.body = true[:at] if cut else true[:at] + bytes([true[at] ^ (1 << bit)]) + true[at + 1 :]
    checked(shared)


@settings(max_examples=100)
@given(
    st.dictionaries(
        st.sampled_from(["a.weight", "b", "samples", "c", ""]),
        st.tuples(
            st.sampled_from(["F32", "F64", "BF16", "F8_E4M3", "I64", "BOOL", "U8", "C64", "X"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=4,
    )
)
def test_any_names_dtypes_and_shapes_in_a_manifest(named: dict[str, tuple[str, list[int]]]) -> None:
    """Safetensors bytes made by hand, with dtypes that PyTorch does not know among them."""
    sizes = {
        "F32": 4,
        "F64": 8,
        "BF16": 2,
        "F8_E4M3": 1,
        "I64": 8,
        "BOOL": 1,
        "U8": 1,
        "C64": 8,
        "X": 4,
    }
    manifest, end = {}, 0
    for name, (dtype, shape) in named.items():
        size = sizes[dtype] * int(torch.tensor(shape).prod()) if shape else sizes[dtype]
        manifest[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(manifest).encode()
    shared = _shared()
    shared.text = lambda request: true_reply(request).model_dump_json()
    shared.body = len(header).to_bytes(8, "little") + header + b"\0" * end
    checked(shared)


@settings(max_examples=200)
@given(st.data())
def test_texts_cut_off_changed_or_made_up(data: st.DataObject) -> None:
    shared = _shared()
    shared.body = to_bytes(TRUE)
    scraps = st.one_of(
        st.text(max_size=5),
        st.sampled_from(
            ["NaN", "Infinity", "-1", "1e999", "null", "{}", "[" * 500, '"', "9" * 5000]
        ),
    )

    def text(request: Request) -> str:
        true = true_reply(request).model_dump_json()
        start, end = sorted(
            (data.draw(st.integers(0, len(true))), data.draw(st.integers(0, len(true))))
        )
        return true[:start] + data.draw(scraps) + true[end:]

    shared.text = text
    checked(shared)


_SHARED: list[Liar] = []


def _shared() -> Liar:
    """One for all examples of a test: making one takes longer than asking it."""
    if not _SHARED:
        _SHARED.append(Liar())
    return _SHARED[0]


def changed(**tensors: torch.Tensor | None) -> bytes:
    """The true reply with some tensors changed, added or left out."""
    found = {
        name: t
        for name, t in (TRUE | {name.replace("__", "."): t for name, t in tensors.items()}).items()
        if t is not None
    }
    return to_bytes(found)


LIES = {
    "nan": (changed(b=torch.tensor([torch.nan])), "not all values of 'b' are finite"),
    "infinite": (changed(b=torch.tensor([-torch.inf])), "not all values of 'b' are finite"),
    "a foreign name": (changed(c=torch.zeros(1)), "unexpected tensor 'c'"),
    "one is missing": (changed(b=None), "tensor 'b' is missing"),
    "another shape": (changed(b=torch.zeros(1, 1)), "'b' is float32[1, 1], expected float32[1]"),
    "another dtype": (changed(b=torch.zeros(1).double()), "'b' is float64[1], expected float32[1]"),
    "fewer than no samples": (
        changed(samples=torch.tensor(-1)),
        "'samples' is -1, expected from 0 to",
    ),
    "more samples than there can be": (
        changed(samples=torch.tensor(1 << 62)),
        "'samples' is 4611686018427387904, expected from 0 to",
    ),
    "samples that are no number": (
        changed(samples=torch.tensor(7.0)),
        "'samples' is float32[], expected int64[]",
    ),
    "too much": (changed(c=torch.zeros(9000)), "bytes of tensors, expected at most"),
    "nothing": (b"", "tensor 'a.weight' is missing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_wrong_is_said(lie: str, liar: Liar) -> None:
    liar.text = lambda request: true_reply(request).model_dump_json()
    liar.body, problem = LIES[lie]
    assert list(liar.believed()) == ["ann"]
    assert problem in liar.told.losses[-1][2]


@pytest.mark.parametrize(
    "metrics",
    [
        {"client": 1.0},
        {"kind": 3},
        {"tokens": [1.0]},
        {"tokens": 1.5},
        {"tokens": -4},
        {"tokens": "many"},
        {"tokens": 10**400},
        {"loss/generalist": [1.0]},
        {"loss/generalist": float("nan")},
        {"loss/generalist": {"a": 1}},
        {"weights": [[[1.0]]]},
        {"x" * 201: 1.0},
    ],
)
def test_measurements_are_numbers(metrics: dict[str, Any], liar: Liar) -> None:
    liar.body = to_bytes(TRUE)
    liar.text = lambda request: json.dumps(
        json.loads(true_reply(request).model_dump_json()) | {"metrics": metrics}
    )
    assert list(liar.believed()) == ["ann"]
    assert liar.told.losses[-1][2].startswith("reply: metrics")


def test_a_text_that_is_too_long(liar: Liar) -> None:
    liar.text = lambda request: " " * MOST_HEADER + true_reply(request).model_dump_json()
    assert list(liar.believed()) == ["ann"]
    assert "characters, at most 1,048,576" in liar.told.losses[-1][2]


def records(**changes: Any) -> RecordDict:
    """The records of a true hello, some of them changed."""
    found = dict(content(hello({"client": "liar"}), b"")) | changes
    return RecordDict({name: record for name, record in found.items() if record is not None})


FOREIGN = {
    "no text": records(text=None),
    "no tensors": records(tensors=None),
    "one more": records(more=flower_app.ConfigRecord({"a": 1})),
    "metrics for text": records(text=flower_app.MetricRecord({"text": 1.0})),
    "a number for text": records(text=flower_app.ConfigRecord({"text": 7})),
    "two texts": records(text=flower_app.ConfigRecord({"text": "{}", "more": "{}"})),
    "bytes for text": records(text=flower_app.ConfigRecord({"text": b"{}"})),
    "text for tensors": records(tensors=flower_app.ConfigRecord({"tensors": "x"})),
    "a NumPy array": records(
        tensors=flower_app.ArrayRecord(
            {"tensors": flower_app.Array("uint8", (1,), "numpy.ndarray", b"x")}
        )
    ),
    "two arrays": records(
        tensors=flower_app.ArrayRecord(
            {n: flower_app.Array("uint8", (0,), "safetensors", b"") for n in ("tensors", "more")}
        )
    ),
    "nothing at all": RecordDict(),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_records_that_are_not_ours(name: str) -> None:
    grid, told = Nodes(), Notes()
    grid.add(
        {"client": "liar"},
        lambda node, text, body: (hello(node), b""),
        spoil=lambda request, reply: Message(FOREIGN[name], reply_to=request),
    )
    assert Flower(grid, "run", {}, deadline=1, listener=told).members() == []
    assert "It did not come from coterie." in told.losses[0][2]


def test_what_flower_cannot_decode_is_lost_alone_from_the_second_time_on() -> None:
    class Undecodable(Nodes):
        """Flower confirms a reply before it decodes it, so that all that were pulled are gone."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            pulled = list(super().pull_messages(message_ids))
            if any(message.metadata.src_node_id == liar for message in pulled):
                raise DecodeError("Error parsing message")
            return pulled

    grid = Undecodable()
    ann, liar = (grid.add({"client": id}, true_answer) for id in ("ann", "liar"))
    transport = Transport(grid, [0, 0])
    request = Request(action="hello", run="run", recipe={})
    for others in ([], [ann]):
        sent = transport.send(dict.fromkeys((liar, ann), request), {}, seconds=1)
        assert list(transport.collected(sent, 0.1)) == others
    assert transport.undecodable == ["DecodeError: Error parsing message"] * 2


def true_answer(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    return hello(node), b""


def test_errors_of_flower_are_told_with_their_reason() -> None:
    grid, told = Nodes(), Notes()
    for code, reason in ((2, "it failed"), (5, None)):
        grid.add(
            {},
            lambda node, text, body: ("", b""),
            spoil=lambda q, r, e=(code, reason): Message(Error(*e), reply_to=q),
        )  # type: ignore[misc]
    assert Flower(grid, "run", {}, deadline=1, listener=told).members() == []
    assert [reason.split("\n")[0] for *_, reason in told.losses] == [
        "Flower reports: it failed (code 2)",
        "Flower reports: no reason (code 5)",
    ]


@pytest.mark.parametrize(
    "failure", [RuntimeError("broken"), KeyboardInterrupt("no"), ValueError("\ud800")]
)
def test_a_device_answers_whatever_happens(failure: BaseException) -> None:
    def breaks(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
        raise failure

    grid, told = Nodes(), Notes()
    grid.add({}, breaks)
    engine = Flower(grid, "run", {}, deadline=1, listener=told)
    if isinstance(failure, KeyboardInterrupt):  # that one is for whoever started the process
        with pytest.raises(KeyboardInterrupt):
            engine.members()
        return
    assert engine.members() == []
    assert type(failure).__name__ in told.losses[0][2]


# Whole runs.


@pytest.fixture
def grid(tmp_path: Path) -> Nodes:
    found = Nodes()
    for client in ("c0-0", "c0-1", "c1-0"):
        found.add({"client": client, "home": str(tmp_path / client)})
    return found


def recipe_of(*more: str) -> Recipe:
    return load("cobo-digits", [*SETTINGS, "method.name=fedavg", *more])


def spoiled(change: Callable[[Tensors], Tensors]) -> Any:
    return altered(lambda said, body: (said, to_bytes(change(from_bytes(body)))), "local_round")


@pytest.mark.parametrize(
    "change",
    [
        lambda reply: {
            name: torch.full_like(t, torch.nan) if t.is_floating_point() else t
            for name, t in reply.items()
        },
        lambda reply: dict(list(reply.items())[1:]),
        lambda reply: reply | {"samples": torch.tensor(-5)},
    ],
    ids=["nan", "missing", "negative"],
)
def test_the_average_is_that_of_the_others(
    change: Callable[[Tensors], Tensors], grid: Nodes, tmp_path: Path
) -> None:
    recipe = recipe_of("method.aggregation={weighting: samples}")
    backend = devices(grid, recipe, 3)
    grid.nodes[1007].spoil = spoiled(change)
    started = execution(backend, recipe, tmp_path / "out")
    taken: list[dict[str, Tensors]] = []
    answer = started.requests.answer

    def watched(ask: Ask, phase: int) -> Any:
        found = answer(ask, phase)
        taken.append({i: dict(reply) for i, reply in found.items()})
        return found

    started.requests.answer = watched  # type: ignore[method-assign]
    started.execute()
    others = taken[0]
    assert list(others) == ["c0-0", "c1-0"]
    total = sum(int(reply["samples"]) for reply in others.values())
    for name, found in started.state.server.items():
        mean = (
            sum(reply[name].double() * int(reply["samples"]) for reply in others.values()) / total
        )
        torch.testing.assert_close(found.double(), mean, rtol=1e-5, atol=1e-6)
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert result["lost"] == {"c0-1": 1}
    lost = [
        line
        for text in (tmp_path / "out/metrics.jsonl").read_text().splitlines()
        if (line := json.loads(text))["kind"] == "lost"
    ]
    assert [(line["client"], line["task"], line["round"]) for line in lost] == [
        ("c0-1", "local_round", 1)
    ]
    assert set(result["clients"]) == {"c0-0", "c0-1", "c1-0"}  # it is scored all the same
    assert json.loads((tmp_path / "out/checkpoints/round-00001/checkpoint.json").read_text())[
        "progress"
    ]["lost"] == {"c0-1": 1}


def test_scores_are_checked_too(grid: Nodes, tmp_path: Path) -> None:
    recipe = recipe_of()
    backend = devices(grid, recipe, 3)
    grid.nodes[1007].spoil = altered(
        lambda said, body: (said, to_bytes(from_bytes(body) | {"test": torch.tensor([1.0])})),
        "score",
    )
    result = finished(recipe, tmp_path / "out", backend)
    assert set(result["clients"]) == {"c0-0", "c1-0"}
    assert result["lost"] == {"c0-1": 1}
    assert isinstance(recipe.build_method(), Method)
    assert RESULT in {path.name for path in (tmp_path / "out").iterdir()}
