"""Servers that want more of a device than its owner allows: what they ask, and that nothing
leaves.
"""

import json
import os
import re
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coterie.aggregation.accountant import ORDERS, Accountant
from coterie.aggregation.privacy import Privacy
from coterie.cli import app
from coterie.client.blueprint import Blueprint
from coterie.core.errors import RecipeError, Refused
from coterie.core.protocol import Sends, declared
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, axpy, from_bytes, norm, to_bytes
from coterie.deploy import apps, keys, supernode
from coterie.engines.messages import Reply, Request, parsed
from coterie.methods import METHODS
from coterie.runs.device import limits as limiting
from coterie.runs.device.account import ACCOUNT, Account, Cost, OutgoingReply, accepted, described
from coterie.runs.device.device import Device
from coterie.runs.device.limits import Limits, LocalPrivacy
from coterie.runs.problems import loading
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, load

CLIENT = "c0-0"
NOISY = "privacy={where: local, clip: 0.5, noise: 10.0, delta: 1e-5}"


def recipe_of(method: str = "fedavg", *more: str) -> Recipe:
    settings = [
        f"method.name={method}",
        "method.rounds=4",
        "compare_with=[]",
        "engine=flower",
        *more,
    ]
    return load("cobo-digits", settings)


def section_of(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"})


def noisy(*more: str) -> dict[str, Any]:
    return section_of(recipe_of("fedavg", NOISY, *more))


@pytest.fixture(scope="module")
def blueprint() -> Blueprint:
    return prepare(recipe_of().model_copy(update={"engine": "inprocess"})).blueprint


@pytest.fixture(scope="module")
def theta(blueprint: Blueprint) -> Tensors:
    return blueprint.read(GENERALIST)


def moved(theta: Tensors, by: float) -> Tensors:
    return {name: t + by for name, t in theta.items()}


def asked(
    device: Device, section: dict[str, Any], task: str, tensors: Tensors, **said: Any
) -> tuple[Reply, Tensors]:
    """What a device answers to a server that may say anything."""
    about: dict[str, Any] = {"action": "task", "run": "run", "client": CLIENT} | said
    text, body = device.answer(
        Request(recipe=section, task=task, **about).model_dump_json(),
        to_bytes(tensors) if tensors else b"",
    )
    return parsed(Reply, text), from_bytes(body) if body else {}


def update(device: Device, section: dict[str, Any], theta: Tensors, **said: Any) -> Tensors:
    """The update that a server gets of a device."""
    reply, found = asked(device, section, "local_round", theta, **said)
    assert reply.problem == ""
    return axpy(-1.0, theta, {name: found[name] for name in theta})


def refused(
    device: Device, section: dict[str, Any], task: str, tensors: Tensors, **said: Any
) -> str:
    """Why a device refuses; nothing left it."""
    reply, found = asked(device, section, task, tensors, **said)
    assert found == {}
    assert reply.metrics == {}
    assert reply.problem != ""
    return reply.problem


# --- local privacy
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [0, -1, -2, 7])
def test_no_number_of_a_request_takes_the_noise_away(
    phase: int, theta: Tensors, tmp_path: Path
) -> None:
    found = update(Device(tmp_path, CLIENT), noisy(), theta, phase=phase)
    assert norm(found) > 0.9 * 5.0 * sum(t.numel() for t in theta.values()) ** 0.5


def test_noise_is_not_averaged_away_by_asking_again(theta: Tensors, tmp_path: Path) -> None:
    """The same request: the same noise, whatever run or phase it is said to be of; and it is
    charged once.
    """
    device = Device(tmp_path, CLIENT)
    first = update(device, noisy(), theta)
    for said in ({}, {"run": "another"}, {"phase": -1}):
        again = update(device, noisy(), theta, **said)
        assert all(torch.equal(again[name], first[name]) for name in theta)
    assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(spent(1))


def test_noise_of_two_sizes_is_not_the_same_noise(theta: Tensors, tmp_path: Path) -> None:
    """Of the same noise in two sizes the reply could be told, exactly: (10 u_5 - 5 u_10) / 5."""
    device = Device(tmp_path, CLIENT)
    large, small = (
        update(device, noisy(), theta, run="a"),
        update(device, noisy("privacy.noise=5.0"), theta, run="b"),
    )
    truth = update(Device(tmp_path / "other", CLIENT), section_of(recipe_of()), theta)
    told = {name: (10 * small[name] - 5 * large[name]) / 5 for name in theta}
    assert norm(axpy(-1.0, truth, told)) > 100 * norm(truth)


CHANGES = (
    "privacy=null",
    "privacy.noise=0.1",
    "privacy.clip=50",
    "privacy.where=central",
    "method.local_steps=2",
    "seed=9",
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_keeps_to_the_recipe_that_it_began_with(
    change: str, theta: Tensors, tmp_path: Path
) -> None:
    device = Device(tmp_path, CLIENT)
    update(device, noisy(), theta)
    problem = refused(
        device, section_of(recipe_of("fedavg", NOISY, change)), "local_round", theta, round=1
    )
    assert "not the one that the run began with" in problem
    update(
        Device(tmp_path, CLIENT), noisy("samples=0", "memory=1"), theta, round=1
    )  # what says nothing of the device may change


def test_with_noise_losses_leave_and_lists_of_figures_do_not(
    theta: Tensors, tmp_path: Path
) -> None:
    reply, _ = asked(Device(tmp_path, CLIENT), noisy(), "local_round", theta)
    assert reply.metrics.keys() == {"tokens", "loss/generalist", "accuracy/generalist"}
    assert all(isinstance(value, int | float) for value in reply.metrics.values())


# --- tasks in the clear
# --------------------------------------------------------------------------------------------------


def private_tasks() -> list[tuple[str, str]]:
    """Every task of every method that digits can be classified with, but those that send nothing
    or scores.
    """
    found = []
    for name in (
        "fedavg",
        "cobo",
        "fc",
        "ifca",
        "pcl",
        "ditto",
        "scaffold",
        "fedprox",
        "finetuned-fedavg",
        "local",
        "ddome",
        "fedadg",
    ):
        method = METHODS[name].method
        tasks = [t for t in dir(method) if hasattr(getattr(method, t), "__coterie_sends__")]
        found += [
            (name, t)
            for t in tasks
            if declared(getattr(method, t)) in (Sends.PRIVATE, Sends.UPDATE)
        ]
    return found


@pytest.mark.parametrize(("method", "task"), private_tasks())
@pytest.mark.parametrize(
    "device",
    [{"secure": True}, {"limits": Limits(secure=True)}, {"limits": Limits(epsilon=3.0)}],
    ids=["--secure", "secure", "epsilon"],
)
def test_a_device_that_protects_its_owner_sends_no_model_in_the_clear(
    method: str,
    task: str,
    device: dict[str, Any],
    theta: Tensors,
    blueprint: Blueprint,
    tmp_path: Path,
) -> None:
    """A gradient at a point of the server's choice, a model after one step: what CoBo, FC, IFCA
    and others send.
    """
    flat = blueprint.flat()
    tensors = {
        "midpoint_gradients": {"z": flat},
        "gradients": {CLIENT: flat},
        "descend": {"pull": 0 * flat, "direction": 0 * flat},
    }
    section = section_of(recipe_of(method, *(["method.cluster_size=2"] if method == "fc" else [])))
    for phase in (0, -1):
        problem = refused(
            Device(tmp_path, CLIENT, **device), section, task, tensors.get(task, theta), phase=phase
        )
        assert problem.startswith(f"{task}: ")
        told = ("without masks", "leave", "declare", "this device sends")
        assert any(part in problem for part in told)
    assert not list(tmp_path.glob("run/states/*/round-*"))  # it was refused before it was done


def test_a_device_without_limits_takes_part_in_any_run(theta: Tensors, tmp_path: Path) -> None:
    assert norm(update(Device(tmp_path, CLIENT), section_of(recipe_of()), theta)) > 0


def test_a_secure_device_is_scored_and_keeps_its_model(theta: Tensors, tmp_path: Path) -> None:
    device = Device(tmp_path, CLIENT, secure=True)
    reply, found = asked(device, section_of(recipe_of("local")), "local_round", {})
    assert (reply.problem, found) == ("", {})
    reply, found = asked(device, section_of(recipe_of("local")), "score", {}, number=1)
    assert found.keys() == {"valid", "test"}
    assert asked(device, section_of(recipe_of("local")), "keep", {}, number=2)[0].problem == ""


# --- scores
# --------------------------------------------------------------------------------------------------


def test_a_flood_of_scores_at_points_of_the_servers_choice_ends(
    theta: Tensors, tmp_path: Path
) -> None:
    device = Device(tmp_path, CLIENT, limits=Limits(secure=True, rounds=4, runs=2))
    section = section_of(recipe_of("fedavg", "secure=true"))
    for k in range(8):
        assert asked(device, section, "score", moved(theta, 0.01 * k), number=k)[0].problem == ""
    for task in ("score", "score_test"):
        assert "limits.exchanges" in refused(device, section, task, moved(theta, 0.5), number=9)
    assert (
        asked(device, section, "score", moved(theta, 0.0), number=10)[0].problem == ""
    )  # nothing new is told
    assert asked(device, section, "score", moved(theta, 0.5), round=4)[0].problem == ""
    assert "round 6 of a run of 4" in refused(device, section, "score", moved(theta, 0.6), round=5)
    assert (
        "limits.exchanges"
        not in asked(device, section, "score", moved(theta, 0.7), run="second")[0].problem
    )
    assert "limits.runs" in refused(device, section, "score", moved(theta, 0.8), run="third")


def test_an_owner_may_have_no_figure_leave_at_all(theta: Tensors, tmp_path: Path) -> None:
    """A loss is exact, and of one example if a server wants batches of one: no epsilon covers
    it.
    """
    device = Device(tmp_path, CLIENT, limits=Limits(epsilon=5, scores=False))
    reply, found = asked(device, noisy(), "local_round", theta)
    assert (reply.metrics, found.keys()) == ({}, theta.keys())
    for task in ("score", "score_test"):
        assert f"{task}: this device sends no scores" in refused(
            device, noisy(), task, theta, number=1
        )
    assert asked(device, noisy(), "keep", theta, number=2)[0].problem == ""


# --- what the owner allows
# --------------------------------------------------------------------------------------------------


def test_a_list_of_tasks_without_those_of_keep_best_refuses_such_a_run_before_it_starts(
    theta: Tensors, tmp_path: Path
) -> None:
    """And not at its end, when models are recalled: then all would be lost."""
    section = section_of(recipe_of("fedavg", "keep=best", "evaluate_every=1"))
    known = ["local_round", "score", "keep"]
    for tasks, lacking in (
        (known, "score_and_keep and recall"),
        ([*known, "score_and_keep"], "recall"),
    ):
        device = Device(tmp_path / lacking, CLIENT, limits=Limits(tasks=tasks))
        for task in ("score_and_keep", "local_round"):
            said = refused(device, section, task, theta)
            assert f"a run with keep: best also needs {lacking}" in said
        last = section_of(recipe_of("fedavg", "keep=last"))
        assert asked(device, last, "local_round", theta)[0].problem == ""
    every = Limits(tasks=[*known, "score_and_keep", "recall"])
    device = Device(tmp_path / "every", CLIENT, limits=every)
    for number, task in enumerate(("score_and_keep", "local_round", "score_and_keep", "recall")):
        sent = theta if task != "recall" else {}
        assert asked(device, section, task, sent, number=number)[0].problem == ""


@pytest.mark.parametrize(
    ("allowed", "change", "said"),
    [
        (
            {"methods": ["comigs-1g1s", "ditto"]},
            [],
            "limits.methods: this device takes part in comigs-1g1s, ditto, not in fedavg",
        ),
        (
            {"rounds": 3},
            [],
            "limits.rounds: this device takes part in at most 3 rounds of a run, this one has 4",
        ),
        ({"tasks": ["score"]}, [], "limits.tasks: this device does score, not local_round"),
        (
            {"local_privacy": {"noise_at_least": 12}},
            [],
            "limits.local_privacy: this device wants z of at least 12, the run has 10",
        ),
        (
            {"local_privacy": {"noise_at_least": 1, "clip_at_most": 0.1}},
            [],
            "C of at most 0.1, the run has 0.5",
        ),
        (
            {"local_privacy": {"noise_at_least": 1}},
            ["privacy=null"],
            "sends its updates with noise only",
        ),
        (
            {"local_privacy": {"noise_at_least": 1}},
            ["privacy.where=central"],
            "sends its updates with noise only",
        ),
        ({"epsilon": 5}, ["privacy=null"], "sends its updates with noise only"),
        ({"epsilon": 5}, ["privacy.noise=0"], "sends its updates with noise only"),
        ({"epsilon": 5}, ["privacy.noise=1e-300"], "no privacy at all"),
        ({"epsilon": 0.5}, [], "limits.epsilon: with this reply 0.726"),
        ({"secure": True}, [], "secure aggregation only"),
    ],
)
def test_no_run_lifts_the_owners_limits(
    allowed: dict[str, Any], change: list[str], said: str, theta: Tensors, tmp_path: Path
) -> None:
    device = Device(tmp_path, CLIENT, limits=Limits.model_validate(allowed))
    assert said in refused(
        device, section_of(recipe_of("fedavg", NOISY, *change)), "local_round", theta
    )


def test_a_server_hears_at_once_that_a_device_does_not_take_part(tmp_path: Path) -> None:
    device = Device(tmp_path, CLIENT, limits=Limits(methods=("ditto",)))
    text, _ = device.answer(
        Request(action="hello", run="run", recipe=section_of(recipe_of())).model_dump_json(), b""
    )
    assert "limits.methods" in parsed(Reply, text).problem


def test_bases_are_those_of_the_owner() -> None:
    Limits(bases=("mini",)).check_run("fedavg", "mini", 3)
    with pytest.raises(
        Refused, match=r"limits\.bases: this device loads mini, not /home/ann/secrets"
    ):
        Limits(bases=("mini",)).check_run("fedavg", "/home/ann/secrets", 3)


def spent(replies: int, z: float = 10.0) -> float:
    """What the accountant of a run says of a client with so many local replies."""
    accountant = Accountant(Privacy(where="local", clip=0.5, noise=z, delta=1e-5), 2)
    for _ in range(replies):
        accountant.spend(2, 2)
    return accountant.epsilon(1e-5)


def test_epsilon_is_counted_over_all_runs_and_no_run_exceeds_it(
    theta: Tensors, tmp_path: Path
) -> None:
    allowed = (spent(3) + spent(4)) / 2
    for k in range(
        3
    ):  # each from a point of its own, in a run of its own, on a device that was started anew
        update(
            Device(tmp_path, CLIENT, limits=Limits(epsilon=allowed)),
            noisy(),
            moved(theta, 0.01 * k),
            run=f"run-{k}",
        )
        assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(spent(k + 1))
    device = Device(tmp_path, CLIENT, limits=Limits(epsilon=allowed))
    for run in ("run-2", "fresh"):
        assert f"the owner allows {allowed:g}" in refused(
            device, noisy(), "local_round", moved(theta, 0.5), run=run, round=1
        )
    update(
        device, noisy(), moved(theta, 0.02), run="run-2"
    )  # what left already may leave again: it spends nothing
    assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(spent(3))


def leaving(contents: str, cost: Cost, run: str = "run") -> OutgoingReply:
    return OutgoingReply(run, "recipe", (0, 0), contents, cost)


def test_unlike_mechanisms_add_up(tmp_path: Path) -> None:
    account = Account(tmp_path / ACCOUNT)
    gaussian = Cost(squared=0.04)
    for k in range(2):
        account.record(leaving(f"a{k}", gaussian), Limits(), None)
    exact = account.epsilon(1e-5)
    account.record(leaving("b", Cost(renyi=tuple(0.04 * ORDERS / 2))), Limits(), None)
    third = account.epsilon(1e-5)
    other = Account(tmp_path / "other")
    for k in range(3):
        other.record(leaving(f"a{k}", gaussian), Limits(), None)
    assert (
        exact < other.epsilon(1e-5) < third < 1.15 * other.epsilon(1e-5)
    )  # divergences bound what is exact for Gaussian noise


# --- the account on the disk
# --------------------------------------------------------------------------------------------------


DAMAGE = {
    "cut off": lambda content: content[:-3],
    "empty": lambda content: b"",
    "less spent": lambda content: content.replace(b"0.04", b"0.00"),
    "a bit": lambda content: bytes([content[0] ^ 1]) + content[1:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_account_lets_nothing_out_and_is_not_begun_afresh(
    damage: Any, theta: Tensors, tmp_path: Path
) -> None:
    update(Device(tmp_path, CLIENT), noisy(), theta)
    path = tmp_path / ACCOUNT
    path.write_bytes(damage(path.read_bytes()))
    before = path.read_bytes()
    for run in ("run", "fresh"):
        assert "is damaged" in refused(
            Device(tmp_path, CLIENT), noisy(), "local_round", theta, run=run
        )
    assert path.read_bytes() == before


def test_the_account_is_the_owners_alone(theta: Tensors, tmp_path: Path) -> None:
    update(Device(tmp_path, CLIENT), noisy(), theta)
    assert (tmp_path / ACCOUNT).stat().st_mode & 0o777 == 0o600


def test_a_reply_is_on_the_account_before_it_leaves(
    theta: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device dies right after: the reply is charged, and when it leaves at last it is not
    charged again.
    """

    def dies(*arguments: Any) -> None:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("coterie.runs.device.device.Memory.commit", dies)
        assert "killed" in refused(Device(tmp_path, CLIENT), noisy(), "local_round", theta)
    assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(spent(1))
    update(Device(tmp_path, CLIENT), noisy(), theta)
    assert Account(tmp_path / ACCOUNT).epsilon(1e-5) == pytest.approx(spent(1))


def test_what_cannot_be_written_down_does_not_leave(
    theta: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    update(Device(tmp_path, CLIENT), noisy(), theta)
    monkeypatch.setattr(os, "fsync", full)
    assert "nothing is sent" in refused(
        Device(tmp_path, CLIENT), noisy(), "local_round", moved(theta, 0.1)
    )


# --- anchors of the account
# --------------------------------------------------------------------------------------------------


def spend(account: Account, *contents: str, run: str = "run") -> None:
    for reply in contents:
        account.record(leaving(reply, Cost(squared=0.04), run), Limits(), None)


def two_entries(home: Path) -> bytes:
    """Write an account of two entries, with a folder of their run; returns the account at one."""
    (home / "run/states").mkdir(parents=True)
    spend(Account(home / ACCOUNT), "a")
    older = (home / ACCOUNT).read_bytes()
    spend(Account(home / ACCOUNT), "b")
    return older


LOSSES = {
    "an older copy": (
        lambda path, older: path.write_bytes(older),
        r"is an older copy: it has 1 entries, and .*\.anchor counts 2",
    ),
    "deleted": (lambda path, _: path.unlink(), r"is missing: .*\.anchor counts 2 entries"),
    "cut off": (lambda path, older: path.write_bytes(older[:-5]), r"is damaged"),
    "a pipe": (lambda path, _: (path.unlink(), os.mkfifo(path)), r"is damaged"),
}
WHERE = {"beside the secret": "run/.account.anchor", "in the run's folder": ".account.anchor"}


@pytest.mark.parametrize("gone", [*WHERE.values(), None], ids=[*WHERE, "both"])
@pytest.mark.parametrize("loss", LOSSES)
def test_an_account_that_is_behind_an_anchor_is_refused(
    loss: str, gone: str | None, tmp_path: Path
) -> None:
    older, path = two_entries(tmp_path), tmp_path / ACCOUNT
    if gone:
        (tmp_path / gone).unlink()
    change, message = LOSSES[loss]
    change(path, older)
    account = Account(path)
    refusals = (
        account.verify,
        lambda: account.epsilon(1e-5),
        lambda: account.check(leaving("c", Cost()), Limits()),
        lambda: spend(account, "c"),
        lambda: spend(account, "c", run="fresh"),
    )
    for refusal in refusals:
        with pytest.raises(Refused, match=rf"{re.escape(str(path))}, {message}") as error:
            refusal()
        assert "coterie client --accept-account" in error.value.remedy
        assert "no longer a bound" in error.value.remedy


@pytest.mark.parametrize("loss", LOSSES)
def test_an_account_that_its_owner_accepts_has_spent_what_is_known_to_be_spent(
    loss: str, tmp_path: Path
) -> None:
    older, path = two_entries(tmp_path), tmp_path / ACCOUNT
    account = Account(path)
    masked = OutgoingReply("run", "recipe", (3, 1), "m", masked=True)
    account.record(masked, Limits(), None)
    epsilon = account.epsilon(1e-5)
    LOSSES[loss][0](path, older)
    assert "no longer a bound" in accepted(tmp_path)
    assert account.epsilon(1e-5) == epsilon
    again = OutgoingReply("run", "recipe", (3, 1), "n", masked=True)
    for refused in (again, OutgoingReply("run", "another", (4, 0))):
        with pytest.raises(Refused, match=r"answers each exchange once|the run began with"):
            account.check(refused, Limits())
    noisy = Limits(local_privacy=LocalPrivacy(noise_at_least=1))
    assert "at least, as entries" in described(tmp_path, noisy)
    spend(account, "c")
    assert account.epsilon(1e-5) > epsilon
    with pytest.raises(Refused, match="nothing is to be accepted"):
        account.accept()


def test_an_account_that_was_accepted_is_not_put_back_either(tmp_path: Path) -> None:
    older, account = two_entries(tmp_path), Account(tmp_path / ACCOUNT)
    newest = account.path.read_bytes()
    account.path.write_bytes(older)
    account.accept()
    for copy, count in ((older, 1), (newest, 2)):
        account.path.write_bytes(copy)
        with pytest.raises(Refused, match=f"it has {count} entries, and .* counts 3"):
            account.verify()


def test_the_anchor_in_the_folder_of_any_run_will_do(tmp_path: Path) -> None:
    older, account = two_entries(tmp_path), Account(tmp_path / ACCOUNT)
    (tmp_path / "later/states").mkdir(parents=True)
    spend(account, "c", run="later")
    account.path.write_bytes(older)
    (tmp_path / f"{ACCOUNT}.anchor").unlink()
    shutil.rmtree(tmp_path / "later")
    with pytest.raises(Refused, match=r"it has 1 entries, and .*/run/.* counts 3"):
        account.verify()
    account.accept()
    assert account.epsilon(1e-5) == pytest.approx(spent(3))


def test_a_damaged_anchor_is_named_and_mended_where_its_owner_accepts(tmp_path: Path) -> None:
    two_entries(tmp_path)
    account, anchor = Account(tmp_path / ACCOUNT), tmp_path / "run/.account.anchor"
    epsilon = account.epsilon(1e-5)
    anchor.write_bytes(anchor.read_bytes().replace(b'"count": 2', b'"count": 1'))
    with pytest.raises(Refused, match=f"{re.escape(str(anchor))}, is damaged"):
        account.verify()
    account.accept()
    assert account.epsilon(1e-5) == epsilon


def test_a_device_that_dies_between_account_and_anchors_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_entries(tmp_path)
    account, replace = Account(tmp_path / ACCOUNT), os.replace

    def dies(new: Path, path: Path) -> None:
        if path.suffix == ".anchor":
            raise KeyboardInterrupt
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            spend(account, "c")
    epsilon = account.epsilon(1e-5)
    spend(account, "c")  # which was charged
    assert account.epsilon(1e-5) == epsilon
    spend(account, "d")
    assert account.epsilon(1e-5) > epsilon


def test_an_account_without_a_counter_is_taken_up_once(tmp_path: Path) -> None:
    """As an earlier coterie wrote it."""
    text = json.dumps({"squared": 0.04, "noised": ["a"], "runs": {"run": {"recipe": "recipe"}}})
    path = tmp_path / ACCOUNT
    old = f"{sha256(text.encode()).hexdigest()}\n{text}"
    path.write_text(old)
    account = Account(path)
    before = account.epsilon(1e-5)
    spend(account, "a")
    assert account.epsilon(1e-5) == before > 0
    spend(account, "b")
    path.write_text(old)
    with pytest.raises(Refused, match="it has 0 entries"):
        account.verify()


def test_a_device_whose_account_went_back_sends_nothing(theta: Tensors, tmp_path: Path) -> None:
    device = Device(tmp_path, CLIENT)
    update(device, noisy(), theta)
    older = (tmp_path / ACCOUNT).read_bytes()
    update(device, noisy(), moved(theta, 0.1), round=1)
    assert (tmp_path / "run" / f"{ACCOUNT}.anchor").is_file()
    (tmp_path / ACCOUNT).write_bytes(older)
    (tmp_path / f"{ACCOUNT}.anchor").unlink()
    problem = refused(device, noisy(), "local_round", moved(theta, 0.2), round=2)
    assert "is an older copy" in problem


def test_the_command_refuses_an_older_account_until_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = two_entries(tmp_path)
    (tmp_path / ACCOUNT).write_bytes(older)
    words = ["client", "--server", "localhost:9", "--insecure", "--home", str(tmp_path)]
    plain = CliRunner().invoke(app, words)
    assert (plain.exit_code, "is an older copy" in plain.output) == (2, True)

    def starts(node: supernode.Node) -> None:
        raise Refused("it would start now", "")

    monkeypatch.setattr(supernode, "device", starts)
    done = CliRunner().invoke(app, [*words, "--accept-account"])
    assert "no longer a bound" in done.output
    assert "it would start now" in done.output
    again = CliRunner().invoke(app, [*words, "--accept-account"])
    assert (again.exit_code, "Leave out --accept-account" in again.output) == (2, True)


# --- names and paths
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["secret", "data", "flwr", "resident.key", "texts"])
def test_a_run_has_no_name_of_anything_else_in_the_devices_folder(
    run: str, theta: Tensors, tmp_path: Path
) -> None:
    (tmp_path / "texts").mkdir()
    assert "cannot be used for a run" in refused(
        Device(tmp_path, CLIENT), section_of(recipe_of()), "local_round", theta, run=run
    )
    assert not (tmp_path / run / "states").exists()


@pytest.mark.parametrize(
    "said",
    [
        {"run": ACCOUNT},
        {"run": "../x"},
        {"run": "a/b"},
        {"run": "a\n"},
        {"run": ""},
        {"client": "../x"},
    ],
)
def test_names_that_are_paths_are_not_understood(
    said: dict[str, str], theta: Tensors, tmp_path: Path
) -> None:
    request = json.loads(
        Request(
            action="task", run="run", recipe=section_of(recipe_of()), client=CLIENT, task="score"
        ).model_dump_json()
    )
    text, body = Device(tmp_path / "home", CLIENT).answer(
        json.dumps(request | said), to_bytes(theta)
    )
    assert parsed(Reply, text).problem != ""
    assert body == b""
    assert not (tmp_path / "home").exists()


def test_a_device_is_not_told_where_to_write_nor_who_it_is(theta: Tensors, tmp_path: Path) -> None:
    device = Device(tmp_path / "home", CLIENT)
    reply, _ = asked(
        device, section_of(recipe_of()), "local_round", theta, folder=str(tmp_path / "elsewhere")
    )
    assert reply.problem == ""
    assert not (tmp_path / "elsewhere").exists()
    assert "this device is 'c0-0'" in refused(
        device, section_of(recipe_of()), "local_round", theta, client="c0-1"
    )


@pytest.mark.parametrize("data", [None, "texts"])
def test_no_file_is_read_that_the_owner_did_not_name(data: str | None, tmp_path: Path) -> None:
    private = tmp_path / "private.jsonl"
    private.write_text('{"text": "Ben has diabetes."}\n' * 9)
    device = Device(tmp_path, CLIENT, data=None if data is None else tmp_path / data)
    section = section_of(recipe_of())
    of = {"dataset": str(private), "split": "train"}
    for named in (
        {"kind": "hub-clients", "clients": {CLIENT: of}},
        {"kind": "hub", "client_column": "text"} | of,
        {"kind": "hub", "client_column": "text"} | of | {"dataset": "text"},  # the current folder
        {"kind": "hub", "client_column": "text"} | of | {"dataset": "hf://a::file:///etc/hosts"},
    ):
        assert "no data set of the Hub" in refused(device, section | {"data": named}, "score", {})
    for path in (private, "../a.safetensors", "~/a.safetensors", "/a.safetensors", "notes.txt"):
        model = section["model"] | {"common": {"path": str(path)}}
        assert "model.common.path" in refused(device, section | {"model": model}, "score", {})
    # of the owner's own folder of data sets
    model = section["model"] | {"common": {"path": "experts/cifar.safetensors"}}
    assert "outside" not in refused(device, section | {"model": model}, "score", {})


def test_nothing_is_loaded_of_a_run_that_the_owner_does_not_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "load", lambda recipe: pytest.fail("it was loaded"))
    section = section_of(load("quickstart", ["compare_with=[]", "engine=flower"]))
    owners = {"bases": ("mini",), "methods": ("fedavg",), "rounds": 1}
    for name, value in owners.items():
        device = Device(tmp_path, "reference", limits=Limits.model_validate({name: value}))
        assert f"limits.{name}" in refused(device, section, "score", {})
    common = ["model.common={base: of-the-server}", "compare_with=[]", "engine=flower"]
    section = section_of(load("ddome-clinc150", common))
    device = Device(tmp_path, "client-0", base="mini", limits=Limits(bases=("mini",)))
    assert "loads mini, not of-the-server" in refused(device, section, "score", {})


# --- the file of limits
# --------------------------------------------------------------------------------------------------

FILE = """
methods: [fedavg, comigs-1g1s]
rounds: 200
epsilon: 8
delta: 1.0e-6
secure: true
local_privacy: {noise_at_least: 1, clip_at_most: 2}
"""


def test_limits_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(FILE)
    found = limiting.read(path)
    assert found.methods == ("fedavg", "comigs-1g1s")
    assert (found.rounds, found.epsilon, found.delta, found.secure) == (200, 8.0, 1e-6, True)
    assert found.local_privacy == LocalPrivacy(noise_at_least=1, clip_at_most=2)
    assert found.noisy


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("epsilon: -1", "epsilon: input should be greater than 0"),
        ("epsilon: .inf", "epsilon: input should be a finite number"),
        ("delta: 1", "delta: input should be less than 1"),
        ("epsilom: 3", "epsilom: unknown key; there are methods, tasks, bases"),
        ("methods: []", "methods: tuple should have at least 1 item"),
        ("local_privacy: {clip_at_most: 1}", "local_privacy.noise_at_least: field required"),
        ("rounds: 2.5", "rounds: input should be a valid integer"),
    ],
)
def test_mistakes_in_limits_are_named(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "device.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="1 mistake") as error:
        limiting.read(path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"), [("", "the file is empty"), ("{", "not valid YAML"), (None, "No such file")]
)
def test_a_file_of_limits_that_is_not_there_or_says_nothing_is_refused(
    text: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "device.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(Refused, match=said):
        limiting.read(path)


def test_a_device_has_the_limits_of_its_nodes_configuration(theta: Tensors, tmp_path: Path) -> None:
    (tmp_path / "device.yaml").write_text("methods: [ditto]")
    node = supernode.Node(
        keys.Link("localhost:9", None),
        tmp_path / "home",
        CLIENT,
        resident=False,
        limits=tmp_path / "device.yaml",
    ).configuration
    request = Request(
        action="task", run="run", recipe=section_of(recipe_of()), client=CLIENT, task="local_round"
    )
    text, body = apps.answer(node, request.model_dump_json(), to_bytes(theta))
    assert "limits.methods" in parsed(Reply, text).problem
    assert body == b""


def test_the_guide_has_every_limit_and_its_example_is_one(tmp_path: Path) -> None:
    guide = (
        (Path(__file__).parents[2] / "docs/deploy.md")
        .read_text(encoding="utf-8")
        .partition("## Limits of a device's owner")[2]
    )
    assert [
        name
        for name in (*Limits.model_fields, *LocalPrivacy.model_fields)
        if f"{name}` |" not in guide
    ] == []
    path = tmp_path / "device.yaml"
    path.write_text(guide.partition("```yaml\n")[2].partition("```")[0])
    assert limiting.read(path).epsilon == 8.0
