"""Resuming: with everything as it was it ends bit-equal; whatever was damaged, lost or exchanged
meanwhile is named, and never taken.
"""

import errno
import gc
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import reported
import torch
from figures import as_json
from filelock import FileLock
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.errors import CheckpointError, CoterieError, Refused
from coterie.core.files import load, save
from coterie.methods.comigs import CoMiGS
from coterie.runs import run as runs
from coterie.runs.folder.lock import alone
from coterie.runs.recipes import recipe as recipes

DIGITS = (
    *(
        "method.rounds=6",
        "method.local_steps=1",
        "method.switch=0.3",
        "compare_with=[]",
        "data.clusters=2",
        "data.clients_per_cluster=2",
    ),
    *("evaluate_every=2", "metrics_every=1", "checkpoint_every=1"),
)
LATE = {"wall_s", "peak_memory_bytes", "seconds"}


def clean(found: object) -> object:
    if isinstance(found, dict):
        return {key: clean(value) for key, value in found.items() if key not in LATE}
    return [clean(value) for value in found] if isinstance(found, list) else found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    reported.run(recipes.load("cobo-digits", DIGITS), out)
    return out


@pytest.fixture
def cut(whole: Path, tmp_path: Path) -> Path:
    """The same after the last but one of its rounds."""
    out = tmp_path / "cut"
    shutil.copytree(whole, out)
    for name in ("result.json", "report.html"):
        (out / name).unlink()
    shutil.rmtree(out / "checkpoints/round-00006")
    shutil.rmtree(out / "clients")
    return out


def resumed(out: Path, **options: bool) -> dict:
    return as_json(
        reported.run(recipes.load("cobo-digits", DIGITS), out, **({"resume": True} | options))
    )[-1]


def test_a_finished_run_that_is_resumed_leaves_no_folder_behind(
    whole: Path, tmp_path: Path
) -> None:
    """In a process that goes on: one that ends takes its folder of states away."""
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "report.html").unlink()  # the disk was full
    gc.disable()
    try:
        resumed(out)
        assert {path.name for path in out.iterdir()} == {path.name for path in whole.iterdir()}
    finally:
        gc.enable()


def is_whole(out: Path, whole: Path, ours: dict) -> None:
    assert clean(ours) == clean(json.loads((whole / "result.json").read_text()))
    assert (out / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    for path in whole.glob("clients/*/*"):
        assert (out / path.relative_to(whole)).read_bytes() == path.read_bytes()


def truncate(path: Path, share: float = 0.5) -> None:
    os.truncate(path, int(path.stat().st_size * share))


def flip(path: Path, at: int) -> None:
    """One bit."""
    found = bytearray(path.read_bytes())
    found[at] ^= 0x40
    path.write_bytes(bytes(found))


def change(path: Path, by: Callable[[dict], object]) -> None:
    found = json.loads(path.read_text())
    by(found)
    path.write_text(json.dumps(found))


def pack(checkpoint: Path) -> Path:
    """The first pack of clients' states of a checkpoint."""
    return min((checkpoint / "clients").iterdir())


def by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def exchange(index: dict) -> None:
    """The states of two clients."""
    clients = index["clients"]
    clients["c0-0"], clients["c0-1"] = clients["c0-1"], clients["c0-0"]


def tensors(path: Path, by: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save(path, by(load(path)[0]))


def floats(
    by: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda found: {name: by(t) if t.is_floating_point() else t for name, t in found.items()}


OLD = "checkpoints/round-00005"
SERVER, INDEX, ABOUT, SUMS = (
    f"{OLD}/server.safetensors",
    f"{OLD}/clients.json",
    f"{OLD}/checkpoint.json",
    f"{OLD}/SHA256SUMS",
)
SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "server truncated": (lambda f: truncate(f / SERVER), "server.safetensors is damaged"),
    "server empty": (lambda f: (f / SERVER).write_bytes(b""), "server.safetensors is damaged"),
    "server, one bit": (lambda f: flip(f / SERVER, -40), "server.safetensors is damaged"),
    "server not finite": (
        lambda f: tensors(f / SERVER, floats(lambda t: t * torch.nan)),
        "server.safetensors is damaged",
    ),
    "server of other shapes": (
        lambda f: tensors(f / SERVER, floats(lambda t: t.flatten()[:1])),
        "server.safetensors is damaged",
    ),
    "server of other names": (
        lambda f: tensors(f / SERVER, lambda t: {f"{k}x": v for k, v in t.items()}),
        "server.safetensors is damaged",
    ),
    "server with nothing": (
        lambda f: tensors(f / SERVER, lambda t: {"z": torch.zeros(1)}),
        "server.safetensors is damaged",
    ),
    "client truncated": (lambda f: truncate(pack(f / OLD)), r"\d+\.pack is damaged"),
    "client gone": (lambda f: pack(f / OLD).unlink(), r"\d+\.pack does not exist"),
    "client a folder": (
        lambda f: by_a_folder(pack(f / OLD)),
        r"\d+\.pack cannot be read",
    ),
    "client's header, one bit": (lambda f: flip(pack(f / OLD), 20), r"\d+\.pack is damaged"),
    "client's values, one bit": (lambda f: flip(pack(f / OLD), -400), r"\d+\.pack is damaged"),
    "client of other values": (
        lambda f: save(pack(f / OLD), {"x": torch.zeros(1)}),
        r"\d+\.pack is damaged",
    ),
    "two clients exchanged": (lambda f: change(f / INDEX, exchange), "clients.json is damaged"),
    "index gone": (lambda f: (f / INDEX).unlink(), "clients.json does not exist"),
    "index without a client": (
        lambda f: change(f / INDEX, lambda j: j["clients"].popitem()),
        "clients.json is damaged",
    ),
    "index, another folder": (
        lambda f: change(f / INDEX, lambda j: j["packs"].append("../../../x")),
        "clients.json is damaged",
    ),
    "json truncated": (lambda f: truncate(f / ABOUT), "checkpoint.json is damaged"),
    "json {}": (lambda f: (f / ABOUT).write_text("{}"), "checkpoint.json is damaged"),
    "json []": (lambda f: (f / ABOUT).write_text("[]"), "checkpoint.json is damaged"),
    "json without progress": (
        lambda f: change(f / ABOUT, lambda j: j.pop("progress")),
        "checkpoint.json is damaged",
    ),
    "json, progress {}": (
        lambda f: change(f / ABOUT, lambda j: j.update(progress={})),
        "checkpoint.json is damaged",
    ),
    "json, round -1": (
        lambda f: change(f / ABOUT, lambda j: j.update(round=-1)),
        "checkpoint.json is damaged",
    ),
    "json, round 25": (
        lambda f: change(f / ABOUT, lambda j: j.update(round=25)),
        "checkpoint.json is damaged",
    ),
    "json, round x": (
        lambda f: change(f / ABOUT, lambda j: j.update(round="x")),
        "checkpoint.json is damaged",
    ),
    "json, another folder": (
        lambda f: change(f / ABOUT, lambda j: j.update(clients=["../../../x"])),
        "checkpoint.json is damaged",
    ),
    "json, a client less": (
        lambda f: change(f / ABOUT, lambda j: j.update(states=0)),
        "checkpoint.json is damaged",
    ),
    "json, a digit": (
        lambda f: change(f / ABOUT, lambda j: j["progress"]["up"].update({"c0-0": 1})),
        "checkpoint.json is damaged",
    ),
    "json, position": (
        lambda f: change(f / ABOUT, lambda j: j["progress"].update(position=10**7)),
        "checkpoint.json is damaged",
    ),
    "json deep": (lambda f: (f / ABOUT).write_text("[" * 100_000), "checkpoint.json is damaged"),
    "json gone": (lambda f: (f / ABOUT).unlink(), "checkpoint.json does not exist"),
    "sums gone": (lambda f: (f / SUMS).unlink(), "SHA256SUMS does not exist"),
    "sums, one bit": (
        lambda f: flip(f / SUMS, 3),
        r"SHA256SUMS is damaged|is damaged: it has changed since it was written",
    ),
    "sums without a client": (
        lambda f: (f / SUMS).write_text(
            "".join(line for line in (f / SUMS).read_text().splitlines(True) if "pack" not in line)
        ),
        r"\d+\.pack is damaged: SHA256SUMS does not list it",
    ),
    "an empty checkpoint": (
        lambda f: (f / "checkpoints/round-00006").mkdir(),
        "round-00006.*SHA256SUMS does not exist",
    ),
    "a later empty checkpoint": (
        lambda f: (f / "checkpoints/round-99999").mkdir(),
        "round-99999.*SHA256SUMS does not exist",
    ),
    "a checkpoint renamed": (
        lambda f: (f / OLD).rename(f / "checkpoints/round-00007"),
        "is of round 5",
    ),
    "metrics gone": (
        lambda f: (f / "metrics.jsonl").unlink(),
        r"metrics\.jsonl has 0 bytes, but had [\d,]+ .*lost",
    ),
    "metrics truncated": (
        lambda f: truncate(f / "metrics.jsonl", 0.3),
        r"metrics\.jsonl has [\d,]+ bytes, but had [\d,]+ .*lost",
    ),
    "metrics, one bit": (lambda f: flip(f / "metrics.jsonl", 100), r"metrics\.jsonl is damaged"),
    "metrics a folder": (
        lambda f: ((f / "metrics.jsonl").unlink(), (f / "metrics.jsonl").mkdir()),
        r"metrics\.jsonl cannot be read",
    ),
    "inputs gone": (lambda f: (f / "inputs.json").unlink(), r"inputs\.json does not exist"),
    "inputs, one bit": (lambda f: flip(f / "inputs.json", 60), r"inputs\.json is damaged"),
    "inputs without sums": (lambda f: (f / "SHA256SUMS").unlink(), "SHA256SUMS does not exist"),
}
FINE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda f: None,
    "a checkpoint half written": lambda f: shutil.copytree(
        f / OLD, f / "checkpoints/round-00006.new"
    ),
    "a file of a checkpoint's name": lambda f: (f / "checkpoints/round-00006").write_text("x"),
    "the lock of a killed process": lambda f: (f / "lock").write_text("process 1 on elsewhere"),
    "all checkpoints gone": lambda f: shutil.rmtree(f / "checkpoints"),
    "killed before the first": lambda f: [
        shutil.rmtree(f / "checkpoints"),
        (f / "SHA256SUMS").unlink(),
        truncate(f / "inputs.json"),
    ],
}


@pytest.mark.parametrize("name", SPOILT)
def test_what_is_damaged_is_named_and_not_taken(name: str, cut: Path) -> None:
    spoil, message = SPOILT[name]
    spoil(cut)
    with pytest.raises(CheckpointError, match=f"(?s){message}") as caught:
        resumed(cut)
    assert caught.value.exit_code == 2
    assert (
        "checkpoint round" not in str(caught.value)
        or "Delete" in caught.value.remedy
        or "Start a new run" in caught.value.remedy
    )
    assert not (cut / "result.json").exists()


@pytest.mark.parametrize("name", FINE)
def test_what_is_whole_ends_bit_equal(name: str, cut: Path, whole: Path) -> None:
    FINE[name](cut)
    is_whole(cut, whole, resumed(cut))


def test_a_checkpoint_that_was_about_to_be_dropped_is(whole: Path, tmp_path: Path) -> None:
    """Killed between the last one and the removal of the first: no later one removes it."""
    out = tmp_path / "three"
    shutil.copytree(whole, out)
    (out / "result.json").unlink()
    shutil.copytree(out / OLD, out / "checkpoints/round-00004")
    shutil.copytree(out / OLD, out / "checkpoints/round-00007.new")
    is_whole(out, whole, resumed(out))
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == [
        "round-00005",
        "round-00006",
    ]


def test_without_the_damaged_checkpoint_the_one_before_it_goes_on(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "two"
    shutil.copytree(whole, out)
    (out / "result.json").unlink()
    flip(pack(out / "checkpoints/round-00006"), -9)
    with pytest.raises(CheckpointError, match=r"Delete .*round-00006 to resume from round-00005"):
        resumed(out)
    shutil.rmtree(out / "checkpoints/round-00006")  # what the message says
    is_whole(out, whole, resumed(out))


@pytest.mark.parametrize("text", ["{}", "[]", "[" * 100_000, None, "one bit"])
def test_a_spoilt_result_is_not_shown(text: str | None, whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "done"
    shutil.copytree(whole, out)
    if text == "one bit":
        flip(out / "result.json", 300)
    else:
        (out / "result.json").write_text(
            (whole / "result.json").read_text()[:500] if text is None else text
        )
    with pytest.raises(CheckpointError, match=r"(?s)result\.json is damaged.*Delete it"):
        resumed(out)
    (out / "result.json").unlink()  # what the message says
    is_whole(out, whole, resumed(out))


def test_a_result_without_its_checksum_is_made_again(whole: Path, tmp_path: Path) -> None:
    """Killed between the two, that is."""
    out = tmp_path / "done"
    shutil.copytree(whole, out)
    sums = out / "SHA256SUMS"
    sums.write_text(
        "".join(line for line in sums.read_text().splitlines(True) if "result" not in line)
    )
    (out / "result.json").write_text("{}")
    is_whole(out, whole, resumed(out))


def test_a_tool_of_everybody_checks_what_is_kept(whole: Path) -> None:
    for folder in (whole, whole / "checkpoints/round-00006"):
        subprocess.run(
            ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=folder, check=True
        )


@pytest.mark.parametrize(
    "setting",
    [
        "training.experts.lr=0.1",
        "method.rounds=22",
        "data.seed=5",
        "data.clients_per_cluster=3",
        "data.per_client=20",
    ],
)
def test_another_recipe_is_another_run(setting: str, cut: Path) -> None:
    with pytest.raises(CheckpointError, match=setting.partition("=")[0]):
        runs.run(recipes.load("cobo-digits", (*DIGITS, setting)), cut, resume=True)


# What lies outside of the run's folder


WORDS = (
    "the",
    "cat",
    "sat",
    "on",
    "a",
    "warm",
    "mat",
    "and",
    "slept",
    "while",
    "its",
    "dog",
    "looked",
    "for",
    "that",
    "bone",
)


def write_texts(root: Path, clients: str = "abc") -> Path:
    for place, name in enumerate(clients):
        (root / name).mkdir(parents=True)
        for k in range(30):
            (root / name / f"{k:02d}.txt").write_text(
                " ".join(WORDS[(place + k * j) % len(WORDS)] for j in range(12)) + ".\n"
            )
    return root


def language(texts: Path, base: Path, method: str = "local", *more: str) -> recipes.Recipe:
    settings = (
        "model.context=16",
        "training.batch_size=4",
        "method.rounds=3",
        "method.local_steps=1",
        "compare_with=[pretrained]",
    )
    return recipes.load(
        "folders",
        [f"method.name={method}", *settings, f"data.path={texts}", f"model.base={base}", *more],
    )


@pytest.fixture
def stopped(tiny_base: Path, tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run of three folders of text on a base of its own, without its last round; the texts,
    and the base.
    """
    texts, base, out = write_texts(tmp_path / "texts"), tmp_path / "base", tmp_path / "run"
    shutil.copytree(tiny_base, base)
    runs.run(language(texts, base), out)
    (out / "result.json").unlink()
    shutil.rmtree(out / "checkpoints/round-00003")
    return out, texts, base


def reweigh(base: Path) -> None:
    flip(base / "model.safetensors", -3000)


OUTSIDE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "weights": (lambda texts, base: reweigh(base), "model.safetensors has changed content"),
    "a tokenizer's file": (
        lambda texts, base: (base / "tokenizer_config.json").write_text(
            (base / "tokenizer_config.json").read_text() + " "
        ),
        "tokenizer_config.json has changed content",
    ),
    "a file more": (
        lambda texts, base: (base / "generation_config.json").unlink(),
        "generation_config.json no longer exists",
    ),
    "a text": (
        lambda texts, base: (texts / "b/07.txt").write_text(
            "entirely other words here than were there before\n"
        ),
        "client 'b' has other data",
    ),
    "a client more": (lambda texts, base: write_texts(texts, "d"), "client 'd' is new"),
    "a client less": (
        lambda texts, base: shutil.rmtree(texts / "b"),
        "client 'b' no longer exists",
    ),
    "a client renamed": (
        lambda texts, base: (texts / "b").rename(texts / "z"),
        "(?s)client 'b' no longer exists.*client 'z' is new",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_changed_outside_is_named(name: str, stopped: tuple[Path, Path, Path]) -> None:
    out, texts, base = stopped
    spoil, message = OUTSIDE[name]
    spoil(texts, base)
    with pytest.raises(CheckpointError, match=message) as caught:
        runs.run(language(texts, base), out, resume=True)
    assert "--resume-changed" in caught.value.remedy
    assert not (out / "result.json").exists()


@pytest.mark.parametrize("name", OUTSIDE)
def test_who_means_it_goes_on(name: str, stopped: tuple[Path, Path, Path]) -> None:
    out, texts, base = stopped
    OUTSIDE[name][0](texts, base)
    found = as_json(runs.run(language(texts, base), out, changed=True))[-1]
    assert found["rounds"] == 3
    assert set(found["clients"]) == {path.name for path in texts.iterdir()}
    told = json.loads((out / "inputs.json").read_text())["changed"]
    assert re.search(OUTSIDE[name][1], "\n".join(told))
    (out / "result.json").unlink()
    again = as_json(runs.run(language(texts, base), out, resume=True))[
        -1
    ]  # which compares with what it went on with
    assert clean(again) == clean(found)


def test_a_method_that_needs_all_its_clients_does_not_lose_one(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, out = write_texts(tmp_path / "texts"), tmp_path / "run"
    recipe = language(texts, tiny_base, "comigs-1g1s", "compare_with=[]")
    monkeypatch.setattr(CoMiGS, "dynamic_membership", False)
    runs.run(recipe, out)
    (out / "result.json").unlink()
    shutil.rmtree(texts / "b")
    with pytest.raises(
        Refused, match=r"(?s)needs the clients that it started with: b missing.*Restore the data"
    ):
        runs.run(recipe, out, changed=True)


def test_a_result_of_other_texts_is_not_taken_for_one_of_these(
    stopped: tuple[Path, Path, Path],
) -> None:
    """A baseline was done; its method has no rounds and so no checkpoint."""
    out, texts, base = stopped
    assert (out / "baselines/pretrained/result.json").exists()
    shutil.rmtree(out / "checkpoints")
    (texts / "a/03.txt").write_text("entirely other words here than were there before\n")
    with pytest.raises(CheckpointError, match=r"(?s)pretrained.*client 'a' has other data"):
        runs.run(language(texts, base), out, resume=True)


@pytest.mark.parametrize("spoil", ["gone", "truncated"])
def test_lost_metrics_are_not_made_up(spoil: str, cut: Path, whole: Path) -> None:
    if spoil == "gone":
        (cut / "metrics.jsonl").unlink()
    else:
        truncate(cut / "metrics.jsonl", 0.3)
    found = resumed(cut, changed=True)
    assert clean(found) == clean(json.loads((whole / "result.json").read_text()))
    written = (cut / "metrics.jsonl").read_bytes()
    assert b"\0" not in written
    assert all(isinstance(json.loads(line), dict) for line in written.splitlines())
    assert resumed(cut) == found


# Two at once


HOLD = """
import sys
from pathlib import Path
from coterie.runs.folder.lock import alone
with alone(Path(sys.argv[1])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_folder_belongs_to_one_process(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "busy"
    shutil.copytree(whole, out)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    try:
        with pytest.raises(Refused, match=rf"is in use by process {other.pid} on \S+\n"):
            resumed(out)
        with pytest.raises(
            Refused, match=rf"is in use by process {other.pid}"
        ):  # the first one's name was not wiped out
            resumed(out)
    finally:
        other.kill()
        other.wait()
    assert "process" in (out / "lock").read_text()  # of one that was killed
    resumed(out)
    assert (out / "lock").read_text() == ""


def test_a_folder_that_could_not_be_locked_is_not_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(lock: FileLock) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileLock, "_acquire", full)
    with pytest.raises(Refused, match="cannot write in"), alone(tmp_path / "run"):
        pass
    assert not (tmp_path / "run").exists()  # an empty one would count as a run to resume
    with pytest.raises(Refused, match="cannot write in"), alone(tmp_path):
        pass
    assert tmp_path.exists()  # it was there before


def test_within_a_process_it_may_be_asked_for_twice(tmp_path: Path) -> None:
    with alone(tmp_path / "x"), alone(tmp_path / "x"):
        pass
    with alone(tmp_path / "x"):
        pass


def test_a_row_of_a_comparison_that_somebody_is_at_is_refused_before_any_work(cut: Path) -> None:
    recipe = recipes.load("cobo-digits", DIGITS)
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(cut / "baselines/local")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert other.stdout is not None
    other.stdout.readline()
    try:
        with pytest.raises(Refused, match="in use"):
            runs.run(recipe.model_copy(update={"compare_with": ("local",)}), cut, resume=True)
    finally:
        other.kill()
        other.wait()
    assert not (cut / "baselines/local/metrics.jsonl").exists()


def test_the_command_line_says_it_with_exit_code_2(
    cut: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(cut / SERVER, -8)
    words = [word for setting in DIGITS for word in ("--set", setting)]
    done = CliRunner().invoke(app, ["run", "cobo-digits", *words, "--out", str(cut), "--resume"])
    assert done.exit_code == 2
    assert "server.safetensors is damaged" in done.output
    assert "Traceback" not in done.output
    truncate(cut / "inputs.json")
    done = CliRunner().invoke(
        app, ["run", "cobo-digits", *words, "--out", str(cut), "--resume-changed"]
    )
    assert done.exit_code == 2  # a damaged checkpoint stays one
    assert "server.safetensors is damaged" in done.output


def test_no_way_out_is_other_than_an_error_of_ours() -> None:
    assert issubclass(CheckpointError, CoterieError)
