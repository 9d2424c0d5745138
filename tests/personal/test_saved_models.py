"""Personal models that earlier code wrote still load and predict the same.

`saved/` was written by commit d325dad: a base of one block and twelve tokens, three clients with
random adapters, and a classifier of the recipe ddome-digits; with what that code predicted.

Those that are saved today have checksums: any change of any of their files is refused.
"""

import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.core.errors import CheckpointError, SaveError
from coterie.core.files import SUMS, write_all_sums
from coterie.models import artifact
from coterie.personal import PersonalModel

SAVED = Path(__file__).parent / "saved"
BASE = str(SAVED / "base")
CLIENTS = ("ann", "ben", "fay")
EXPECTED = load_file(SAVED / "expected.safetensors")
SAID = json.loads((SAVED / "expected.json").read_text())


@pytest.mark.parametrize("client", CLIENTS)
def test_a_language_model_of_before_predicts_the_same(client):
    model = coterie.load(SAVED, client, base=BASE)
    logits = model(EXPECTED["ids"]).logits
    torch.testing.assert_close(logits, EXPECTED[f"logits.{client}"], rtol=1e-4, atol=1e-5)
    first = model(EXPECTED["ids"][:, :1]).logits  # one token has a path of its own
    torch.testing.assert_close(first, logits[:, :1], rtol=1e-4, atol=1e-5)
    assert model.generate("cab a", max_new_tokens=8, do_sample=False) == (SAID["texts"][client])


def test_many_models_of_before_predict_the_same():
    together = coterie.load_many(SAVED, base=BASE)
    logits = together(EXPECTED["ids"].expand(3, -1), CLIENTS).logits
    wanted = torch.cat([EXPECTED[f"logits.{client}"] for client in CLIENTS])
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-5)
    for client, words in together.next_words("cab a").items():
        for word, (shown, insert, probability) in zip(words, SAID["words"][client], strict=True):
            assert (word.word, word.insert) == (shown, insert)
            assert word.probability == pytest.approx(probability, rel=1e-4)


def test_a_classifier_of_before_predicts_the_same():
    model = coterie.load(SAVED / "classifiers" / "aligned-00")
    log_probabilities, experts = model.answer(EXPECTED["images"])
    torch.testing.assert_close(log_probabilities, EXPECTED["log_probabilities"])
    assert torch.equal(experts, EXPECTED["experts"])


# --- checksums


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A language model as it is saved today, and a classifier with checksums."""
    root = tmp_path_factory.mktemp("sums")
    model = coterie.load(SAVED, "ann", base=BASE)
    assert isinstance(model, PersonalModel)
    model.about = artifact.About(**{**vars(model.about), "base": BASE})
    model.save_pretrained(root / "ann")
    write_all_sums(shutil.copytree(SAVED / "classifiers/aligned-00", root / "aligned-00"))
    return {"ann": root / "ann", "aligned-00": root / "aligned-00"}


FILES = {
    "ann": ("adapter.safetensors", "client.json", SUMS),
    "aligned-00": ("classifier.safetensors", "client.json", SUMS),
}
EVERY = [(client, name) for client, names in FILES.items() for name in names]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        coterie.load(folder)
    return str(error.value)


@pytest.mark.parametrize("client", FILES)
def test_what_is_saved_is_what_its_checksums_are_of(folders: dict[str, Path], client: str) -> None:
    folder = folders[client]
    assert {path.name for path in folder.iterdir()} == {*FILES[client]}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", SUMS], cwd=folder, check=True)
    coterie.load(folder)


@pytest.mark.parametrize(("client", "name"), EVERY)
def test_one_flipped_bit_is_refused_by_its_file(
    folders: dict[str, Path], client: str, name: str
) -> None:
    file, chosen = folders[client] / name, random.Random(5)
    whole = file.read_bytes()
    try:
        for _ in range(24):
            flipped = bytearray(whole)
            flipped[chosen.randrange(len(whole))] ^= 1 << chosen.randrange(8)
            file.write_bytes(flipped)
            message = refusal(folders[client])
            assert str(folders[client]) in message
            assert name == SUMS or name in message
    finally:
        file.write_bytes(whole)
    coterie.load(folders[client])


@given(st.sampled_from(EVERY), st.floats(0, 1, exclude_max=True), st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_no_changed_byte_of_any_file_is_loaded(
    folders: dict[str, Path], which: tuple[str, str], place: float, by: int
) -> None:
    file = folders[which[0]] / which[1]
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[int(place * len(whole))] ^= by
    try:
        file.write_bytes(changed)
        assert str(file.parent) in refusal(file.parent)
    finally:
        file.write_bytes(whole)


HARM = {
    "one more": (lambda f: (f / "evil.safetensors").write_bytes(b"x"), "evil.safetensors"),
    "one less": (lambda f: (f / "adapter.safetensors").unlink(), "adapter.safetensors"),
    "no checksums": (lambda f: (f / SUMS).unlink(), SUMS),
    "no lines": (lambda f: (f / SUMS).write_bytes(b""), "does not list it"),
    "half a line": (lambda f: (f / SUMS).write_bytes(b"0" * 64), "not in the format"),
    "a path outside": (
        lambda f: (f / SUMS).write_text(f"{'0' * 64}  ../../../../dev/zero\n"),
        "dev/zero",
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_file_that_is_missing_or_one_more_is_refused(
    folders: dict[str, Path], harm: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["ann"], tmp_path / "ann")
    change, message = HARM[harm]
    change(folder)
    assert message in refusal(folder)


def test_what_is_changed_on_purpose_is_loaded_after_the_remedy(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["ann"], tmp_path / "it's ann")
    about = folder / "client.json"
    about.write_text(about.read_text().replace('"ann"', '"cleo"'))
    (folder / ".DS_Store").write_bytes(b"not looked at")
    command = refusal(folder).rpartition("checksums: ")[2]
    subprocess.run(command, shell=True, check=True)
    assert coterie.load(folder).about.client == "cleo"


WORDS = {
    "predict": ["--text", "cab"],
    "generate": ["--text", "cab"],
    "serve": [],
    "serve --api": ["--api"],
    "export": ["--out", "never"],
    "push": ["--repo", "me/never", "--publish-personal"],
}


@pytest.mark.parametrize("command", WORDS)
def test_every_command_refuses_a_flipped_bit(
    folders: dict[str, Path], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(folders["ann"], tmp_path / "ann")
    weights = bytearray((folder / "adapter.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "adapter.safetensors").write_bytes(weights)
    done = CliRunner().invoke(app, [command.split(maxsplit=1)[0], str(folder), *WORDS[command]])
    assert done.exit_code == 2, done.output
    assert "adapter.safetensors is damaged: it has changed since it was written" in done.output
    assert not Path("never").exists()


def test_a_model_that_cannot_be_written_leaves_the_one_before_whole(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders["ann"], tmp_path / "ann")
    model = coterie.load(folder)
    assert isinstance(model, PersonalModel)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    next(iter(model.adapter.parameters())).data += 1
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(SaveError, match="No space left"):
            model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    replace = os.replace

    def dies(new: Path, path: Path) -> None:
        if path == folder / SUMS:
            raise KeyboardInterrupt
        replace(new, path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dies)
        with pytest.raises(KeyboardInterrupt):
            model.save_pretrained(folder)
    assert "adapter.safetensors is damaged" in refusal(folder)  # half of it is another model's
    model.save_pretrained(folder)
    again = coterie.load(folder)
    assert isinstance(again, PersonalModel)
    for one, other in zip(model.adapter.parameters(), again.adapter.parameters(), strict=True):
        assert torch.equal(one, other)
