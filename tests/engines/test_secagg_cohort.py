"""Secure aggregation and a server that asks again, differently: of which sums the difference
would tell, and that there is one sum only.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from figures import as_json
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Stage
from test_secagg import SENT, Ear, InProcess, Pair, as_in_a_run, assert_is_mean, engine, stage_of  # noqa: F401 - the fixture

from coterie.core.callback import Callback
from coterie.core.protocol import Ask
from coterie.core.tensors import Tensors, axpy, norm
from coterie.engines.flower.engine import Flower
from coterie.engines.flower.secagg_common import EXCHANGE
from coterie.engines.messages import Request
from coterie.runs import run
from coterie.runs.backends import DeviceBackend
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load

IDS = ("c0-0", "c0-1", "c1-0", "c1-1")
SETTINGS = [
    "method.name=fedavg",
    "method.local_steps=2",
    "compare_with=[]",
    "data.clusters=2",
    "data.clients_per_cluster=2",
]


def recipe_of(*more: str) -> Recipe:
    return load(
        "cobo-digits",
        [*SETTINGS, "method.rounds=3", "engine=flower", "secure=true", "checkpoint_every=1", *more],
    )


class Devices(InProcess):
    """Real devices, whose requests under masks are written down; what is on its way to them may
    be changed, or the server die before.
    """

    def __init__(
        self,
        home: Path,
        change: Callable[[int, str, Message], None] = lambda node, stage, message: None,
        **limits: Any,
    ) -> None:
        self.change, self.masked = change, Counter[tuple[str, int, int]]()

        def handle(node: Any, text: str, body: bytes) -> tuple[str, bytes]:
            client = IDS[node["partition-id"]]
            reply, body = Device(
                home / client, client, limits=Limits(secure=True, **limits)
            ).answer(text, body)
            asked = json.loads(text)
            if asked["masked"] and body:
                self.masked[client, asked["round"], asked["number"]] += 1
            return reply, body

        super().__init__(len(IDS), handle=handle)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        found = list(messages)
        for message in found:
            self.change(message.metadata.dst_node_id, stage_of(message), message)
        return super().push_messages(found)


class Server:
    """A server that may forget what it has asked, and say that it is another one."""

    def __init__(self, home: Path) -> None:
        self.recipe, self.devices, self.ear = recipe_of(), Devices(home), Ear()
        prepared = prepare(self.recipe)
        self.method, self.theta = (
            prepared.method,
            prepared.method.init(prepared.blueprint, prepared.clients),
        )

    def sum_of(
        self,
        clients: Iterable[str],
        name: str = "run",
        round: int = 0,
        theta: Tensors | None = None,
    ) -> Tensors | None:
        """The sum of the updates of some clients, as a server gets it that remembers nothing;
        None where it gets none.
        """
        section = self.recipe.model_dump(
            mode="json", exclude={"compare_with", "description", "paper"}
        )
        engine = Flower(self.devices, name, section, deadline=60.0, secure=True, listener=self.ear)
        engine.members()
        sent = theta or self.theta
        found = engine.answer(Ask(self.method.local_round, dict.fromkeys(clients, sent)), round, 0)  # type: ignore[attr-defined]
        mean = next(iter(found.values()), None)
        return (
            None
            if mean is None
            else {n: len(found) * (mean[n].double() - sent[n].double()) for n in sent}
        )

    def update_of(self, client: str) -> Tensors:
        """What nobody is to learn."""
        plain = prepare(self.recipe.model_copy(update={"secure": False, "engine": "inprocess"}))
        reply, _ = plain.site.answer(
            plain.method, "local_round", client, dict(self.theta), {}, 0, 0
        )
        return {n: (reply[n] - self.theta[n]).double() for n in self.theta}


@pytest.mark.parametrize("name", ["run", "another"])
def test_the_same_round_is_not_summed_again_with_a_client_less(name: str, tmp_path: Path) -> None:
    """Of the difference of the two sums the update of the fourth client was known to 10^-6."""
    server = Server(tmp_path)
    whole = server.sum_of(IDS)
    assert whole is not None
    truth = server.update_of("c1-1")
    assert norm(axpy(-1.0, sum_up([server.update_of(i) for i in IDS]), whole)) < 1e-3 * norm(truth)
    assert server.sum_of(IDS[:3], name) is None
    said = "answers each exchange once" if name == "run" else "was already sent under masks"
    assert all(said in server.ear.reasons[i] for i in IDS[:3])


def sum_up(terms: list[Tensors]) -> Tensors:
    return {name: torch.stack([term[name] for term in terms]).sum(dim=0) for name in terms[0]}


def test_a_round_is_answered_once_also_with_another_model_and_an_earlier_one_never(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path)
    assert server.sum_of(IDS, round=1) is not None
    other = {name: t + 0.01 for name, t in server.theta.items()}
    assert server.sum_of(IDS, round=1, theta=other) is None
    assert server.sum_of(IDS, round=0, theta=other) is None
    assert server.sum_of(IDS, round=2, theta=other) is not None


def test_it_is_on_the_disk_before_the_update_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices that die right after they have written it down do not answer when they are there
    again.
    """
    server = Server(tmp_path)

    def dies(*arguments: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.device.device.Memory.commit", dies)
        assert server.sum_of(IDS) is None
    assert server.sum_of(IDS) is None
    assert "answers each exchange once" in server.ear.reasons["c0-0"]


# --- unlike things told to clients of one exchange
# ----------------------------------------------------------------------------------------


class Told(InProcess):
    """Nodes that are told something else than the others."""

    def __init__(self, clients: int, change: Callable[[int, str, Message], None]) -> None:
        super().__init__(clients)
        self.change = change

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        found = list(messages)
        for message in found:
            self.change(message.metadata.dst_node_id, stage_of(message), message)
        return super().push_messages(found)


def smaller_cohort(node: int, stage: str, message: Message) -> None:
    """One client is not told of the fourth."""
    if (node, stage) == (1000, Stage.SHARE_KEYS):
        del message.content.config_records[RECORD_KEY_CONFIGS]["1003"]


def other_keys(node: int, stage: str, message: Message) -> None:
    """One client is told other keys of the fourth, which are good ones."""
    if (node, stage) == (1000, Stage.SHARE_KEYS):
        configs = message.content.config_records[RECORD_KEY_CONFIGS]
        first, second = configs["1003"]
        configs["1003"] = [second, first]


def another_exchange(node: int, stage: str, message: Message) -> None:
    """One client is told that it is another round."""
    if (node, stage) == (1000, Stage.SETUP):
        about = json.loads(str(message.content.config_records[EXCHANGE]["about"]))
        message.content.config_records[EXCHANGE] = ConfigRecord(
            {"about": json.dumps([about[0], 5, *about[2:]])}
        )


@pytest.mark.parametrize("change", [smaller_cohort, other_keys, another_exchange])
def test_a_client_that_was_told_something_else_has_no_part_in_a_sum(
    change: Callable[[int, str, Message], None],
) -> None:
    """The others refuse its shares and it theirs, before anybody sends anything."""
    grid = Told(4, lambda node, stage, message: change(node, stage, own_copy(message)))
    flower, ear = engine(grid)
    replies = flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(4)}), 0, 0)
    assert_is_mean(dict(replies), (1, 2, 3), 4)
    assert list(ear.reasons) == ["c0"]
    asked = {node for node, stage, _ in grid.carried if stage == Stage.COLLECT_MASKED_VECTORS}
    assert asked == {1001, 1002, 1003}


def own_copy(message: Message) -> Message:
    """A message whose records are its own: those of the first stage are the same for all."""
    from flwr.common.serde import message_from_proto, message_to_proto

    content = message_from_proto(message_to_proto(message)).content
    message.content.config_records.clear()
    for name, record in content.config_records.items():
        message.content.config_records[name] = record
    return message


def test_an_update_of_a_model_of_its_own_is_not_alone_in_the_sum() -> None:
    """Model inconsistency: the others get a model that gives no update, so that the sum would be
    the update of the one.
    """

    def change(node: int, stage: str, message: Message) -> None:
        if stage == Stage.COLLECT_MASKED_VECTORS and node != 1000:
            from flwr.common import Parameters
            from flwr.compat.common import recorddict_compat as compat

            from coterie.core.tensors import to_bytes

            ins = compat.recorddict_to_fitins(message.content, keep_input=True)
            ins.parameters = Parameters(
                [to_bytes({name: t + 1 for name, t in SENT.items()})], "safetensors"
            )
            changed = compat.fitins_to_recorddict(ins, keep_input=True)
            message.content.array_records.clear()
            for name, record in changed.array_records.items():
                message.content.array_records[name] = record

    flower, ear = engine(Told(4, change))
    assert flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(4)}), 0, 0) == {}
    assert "did not follow the protocol" in ear.reasons["c1"]


def test_masks_are_for_the_exchange_that_they_were_made_for() -> None:
    """Keys that were agreed on for one round do not carry the update of another."""

    def change(node: int, stage: str, message: Message) -> None:
        if stage == Stage.COLLECT_MASKED_VECTORS:
            record = message.content.config_records["fitins.config"]
            request = Request.model_validate_json(str(record["text"]))
            record["text"] = request.model_copy(update={"round": 3}).model_dump_json()

    flower, ear = engine(Told(4, change))
    assert flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(4)}), 0, 0) == {}
    assert "another exchange" in ear.reasons["c0"]


def test_who_is_told_the_same_has_the_sum() -> None:
    flower, ear = engine(Told(4, lambda node, stage, message: None))
    replies = flower.answer(Ask(Pair().train, {f"c{k}": SENT for k in range(4)}), 0, 0)
    assert_is_mean(dict(replies), range(4), 4)
    assert ear.reasons == {}


# --- a server that is killed
# --------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """What ends a process without a word."""


def killed_in(round: int, stage: str) -> Callable[[int, str, Message], None]:
    """The server dies when it is about to send the second message of a stage."""
    seen: Counter[int] = Counter()
    now = [-1]

    def change(node: int, found: str, message: Message) -> None:
        if found == Stage.SETUP:
            now[0] = json.loads(str(message.content.config_records[EXCHANGE]["about"]))[1]
        if (now[0], found) == (round, stage):
            seen[round] += 1
            if seen[round] == 2:
                raise Killed

    return change


def run_on(grid: Devices, recipe: Recipe, folder: Path, resume: bool = False) -> dict[str, Any]:
    backend = DeviceBackend.connect(grid, recipe, len(IDS), 5.0, Ear())
    return as_json(run.run(recipe, folder, resume=resume, reporter=Callback(), backend=backend))[-1]


def notes(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["note"] for line in lines if line["kind"] == "note"]


@pytest.mark.parametrize("stage", [Stage.SETUP, Stage.COLLECT_MASKED_VECTORS, Stage.UNMASK])
@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_run_that_was_killed_goes_on_with_a_later_round(
    round: int, stage: str, tmp_path: Path
) -> None:
    """Before any checkpoint, between two, and in the last round: no device answers any exchange
    twice, and the run comes to its end.
    """
    recipe, folder = recipe_of(), tmp_path / "run"
    first = Devices(tmp_path, killed_in(round, stage))
    with pytest.raises(Killed):
        run_on(first, recipe, folder)
    second = Devices(tmp_path)
    result = run_on(second, recipe, folder, resume=True)
    assert result["rounds"] == 3
    assert set(result["clients"]) == set(IDS)
    assert [note for note in notes(folder) if "is skipped" in note] == [
        f"round {round + 1} is skipped: clients answer an exchange of secure aggregation only "
        f"once, and this one had already begun"
    ]
    masked = first.masked + second.masked
    assert max(masked.values()) == 1
    assert {r for _, r, _ in second.masked} == set(range(round + 1, 3))


def test_what_was_lost_counts_as_spent(tmp_path: Path) -> None:
    """With local noise: devices may have answered, and the sum may have been seen."""
    recipe, folder = (
        recipe_of("privacy={where: local, clip: 0.5, noise: 1.0, delta: 1e-5}"),
        tmp_path / "run",
    )
    with pytest.raises(Killed):
        run_on(Devices(tmp_path, killed_in(1, Stage.UNMASK)), recipe, folder)
    result = run_on(Devices(tmp_path), recipe, folder, resume=True)
    assert result["privacy"]["sampling"].startswith("3 exchanges")


def test_a_run_that_is_not_killed_loses_nothing(tmp_path: Path) -> None:
    grid = Devices(tmp_path)
    result = run_on(grid, recipe_of(), tmp_path / "run")
    assert result["lost"] == {}
    assert notes(tmp_path / "run") == []
    assert grid.masked == Counter({(i, round, 0): 1 for i in IDS for round in range(3)})
