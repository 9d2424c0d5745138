"""Models to the Hub and back, by the real client and a stand-in of the Hub on this machine."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from chat_bases import CHATML
from hub_stand_in import TOKEN, Hub, Repository, served
from huggingface_hub import ModelCard
from random_models import write_mixture

import coterie
from coterie.adapt.new_client import Training, adapt
from coterie.core.errors import CheckpointError, CoterieError, Refused
from coterie.core.files import load, write_sums
from coterie.data.examples import ExampleSplit
from coterie.export.pull import pull
from coterie.export.push import push
from coterie.models.artifact import FOLLOWED, Origin, save_mixture
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape
from coterie.personal import PersonalModel, read_about, save, save_classifier
from coterie.personal.mixture import PersonalMixture

SECRETS = ("quibblefrost", "zephyrine")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clients' run whose first client is called by a name that must not leave."""
    folder = tmp_path_factory.mktemp("hub")
    for client in ("marguerite", "bob"):
        own = folder / "texts" / client
        own.mkdir(parents=True)
        for k in range(12):
            (own / f"{k}.txt").write_text(f"{SECRETS[k % 2]} walks by river {k}. " * 30)
    coterie.run(
        "folders",
        out=folder / "run",
        data={"path": str(folder / "texts")},
        model={"context": 32},
        method={"name": "comigs-1g1s", "rounds": 1, "local_steps": 2},
        compare_with=["pretrained"],
        samples=False,
        threads=1,
    )
    return folder / "run"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants

    with served() as found:
        files = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def test_the_shared_part_goes_there_and_back_and_is_used_and_trained_from(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    pushed = push(run, "river", shared=True)
    there = hub.repositories["ann/river"]
    assert pushed.private
    assert there.private
    assert there.large == {"adapter.safetensors", "shared.safetensors"}
    every = b"".join(there.files.values())
    for word in (*SECRETS, "marguerite", str(run.parent)):
        assert word.encode() not in every
    assert not any("S" in name.split(".") or "specialist" in name for name in _tensors(there))
    pulled = pull("ann/river", tmp_path / "river")
    assert pulled.shared
    assert pulled.base == "embedded"
    model = coterie.load(tmp_path / "river")
    assert isinstance(model, PersonalModel)
    assert model.experts == ("G",)
    assert model.generate("The", max_new_tokens=2)
    (notes := tmp_path / "notes").mkdir()
    for k in range(12):
        (notes / f"{k}.txt").write_text(f"a cat sleeps on the green table {k}. " * 20)
    own = adapt(tmp_path / "river", notes, out=tmp_path / "mine", training=Training(4))
    here = adapt(run, notes, out=tmp_path / "here", training=Training(4))
    assert own.personalised
    assert here.personalised
    assert own.personalised.before == here.personalised.before  # of the same shared part
    assert own.personalised.valid_after == here.personalised.valid_after
    assert coterie.load(tmp_path / "mine").generate("The", max_new_tokens=2)
    shared = tmp_path / "river/shared.safetensors"
    shared.write_bytes(shared.read_bytes()[:-1] + b"\1")
    with pytest.raises(CheckpointError, match=r"shared\.safetensors is damaged: it has changed"):
        adapt(tmp_path / "river", notes, out=tmp_path / "never", training=Training(4))


def _tensors(repository: Repository) -> list[str]:
    header = repository.files["adapter.safetensors"]
    return list(json.loads(header[8 : 8 + int.from_bytes(header[:8], "little")]))


def test_a_personal_model_leaves_only_by_its_owners_word(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=r"'bob'.*never left(.|\n)*--publish-personal"):
        push(run, "ann/bob", client="bob")
    assert not hub.requests  # nothing was even asked
    push(run, "ann/bob", client="bob", publish_personal=True)
    card = hub.repositories["ann/bob"].files["README.md"].decode()
    result = coterie.Run(run).result
    before = coterie.Run(run).baselines["pretrained"].clients["bob"].test
    for fact in (f"{before:.2f}", f"{result.clients['bob'].test:.2f}", "`embedded`", "no noise"):
        assert fact in card
    assert re.search(r"training data \| [\d,]+ tokens", card)
    assert "chat" not in card
    pull("ann/bob", tmp_path / "bob")
    ours, theirs = (
        load(folder / "adapter.safetensors")[0]
        for folder in (run / "clients/bob", tmp_path / "bob")
    )
    assert {name: t.tolist() for name, t in ours.items()} == {
        name: t.tolist() for name, t in theirs.items()
    }
    assert coterie.load(tmp_path / "bob").generate("The", max_new_tokens=2)


def test_what_was_trained_on_chats_says_how_it_is_asked(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    chatting = tmp_path / "run"
    shutil.copytree(run, chatting)
    about = replace(read_about(chatting / "clients/bob"), content="chats", chat_template=CHATML)
    model = coterie.load(run, "bob")
    save(chatting / "clients/bob", about, dict(model.adapter.named_parameters()))
    push(chatting, "ann/chat", client="bob", publish_personal=True)
    card = hub.repositories["ann/chat"].files["README.md"].decode()
    assert 'coterie generate chat --chat --text "' in card
    assert "chat template" in card
    pull("ann/chat", tmp_path / "chat")
    pulled = coterie.load(tmp_path / "chat")
    assert (pulled.about.content, pulled.chats.template) == ("chats", CHATML)


def test_a_mixture_goes_there_and_back_with_all_parts_and_weights(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    layouts = {"local": (0.25, Layout(rank=2)), "fedavg": (0.75, Layout(2, 0, routing="equal"))}
    mixed = write_mixture(tmp_path / "run", "embedded", "eve", layouts)
    pushed = push(mixed, "ann/eve", client="eve", publish_personal=True)
    there = hub.repositories["ann/eve"]
    own = {"client.json", "SHA256SUMS", "adapter.safetensors"}
    parts = {f"{part}/{name}" for part in layouts for name in own}
    assert set(pushed.files) == {"README.md", "client.json", "SHA256SUMS"} | parts
    assert "| base | `embedded` |" in there.files["README.md"].decode()
    pulled = pull("ann/eve", tmp_path / "eve")
    assert (pulled.client, pulled.base, pulled.method) == ("eve", "embedded", "interpolation")
    back, ours = coterie.load(tmp_path / "eve"), coterie.load(mixed, "eve")
    assert isinstance(back, PersonalMixture)
    assert isinstance(ours, PersonalMixture)
    assert back.mixture == ours.mixture
    for name, model in ours.parts.items():
        theirs = dict(back.parts[name].adapter.named_parameters())
        for key, tensor in model.adapter.named_parameters():
            assert torch.equal(tensor, theirs[key])
    good = dict(there.files)
    for name, message in (
        ("local/adapter.safetensors", r"local/adapter\.safetensors is damaged"),
        ("local/client.json", r"local/client\.json is damaged"),
        ("fedavg/SHA256SUMS", r"fedavg/SHA256SUMS"),
    ):
        there.files = good | {name: good[name][:-2] + b"xx"}
        with pytest.raises(CheckpointError, match=message):
            pull("ann/eve", tmp_path / "never")
        there.files = {path: file for path, file in good.items() if path != name}
        with pytest.raises(CheckpointError):
            pull("ann/eve", tmp_path / "never")
        assert not (tmp_path / "never").exists()


def test_a_mixture_of_classifiers_goes_there_and_back(hub: Hub, tmp_path: Path) -> None:
    ours, origin = tmp_path / "ours", Origin("fedavg", "digits", 7, 0)
    weights = {"local": 0.25, "fedavg": 0.75}
    labels, pixels = np.zeros(1, np.int64), np.zeros((1, 1, 4, 4), np.uint8)
    data = ExampleSplit("test", pixels, labels, np.arange(1), 0, (0.5,), (1.0,), 3)
    for seed, name in enumerate(weights):
        torch.manual_seed(seed)
        model = Classifier(NetworkShape("mlp", (1, 4, 4), 3, (5,)))
        for tensor in model.network.parameters():
            tensor.data = torch.randn(tensor.shape)
        save_classifier(ours / name, "eve", model, data, (), origin)
    save_mixture(ours, "eve", weights, Origin("interpolation", "digits", 7, 0))
    push(ours, "ann/eve", publish_personal=True)
    card = hub.repositories["ann/eve"].files["README.md"].decode()
    assert "coterie predict eve --data FILES" in card
    assert "text-generation" not in card
    pulled = pull("ann/eve", tmp_path / "eve")
    assert (pulled.client, pulled.base, pulled.method) == ("eve", None, "interpolation")
    x = torch.rand(6, 1, 4, 4)
    assert torch.equal(coterie.load(tmp_path / "eve")(x), coterie.load(ours)(x))


def test_a_public_repository_is_not_written_to_by_chance(run: Path, hub: Hub) -> None:
    hub.repositories["ann/open"] = Repository(private=False)
    with pytest.raises(Refused, match=r"everybody can read ann/open\n.*--public"):
        push(run, "ann/open", client="bob", publish_personal=True)
    assert not hub.repositories["ann/open"].files
    assert not push(run, "ann/open", shared=True, public=True).private


@pytest.fixture
def pushed(run: Path, hub: Hub) -> Repository:
    push(run, "ann/m", client="bob", publish_personal=True)
    return hub.repositories["ann/m"]


class Harm:
    """Runs a command where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch harmed",)


def test_hostile_repositories_are_refused_and_leave_nothing(
    pushed: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    good = dict(pushed.files)
    out = tmp_path / "out" / "model"
    harm = pickle.dumps(Harm())

    def refused(message: str, most: int = 2**31, **files: bytes) -> None:
        pushed.files = good | {name.replace("__", "/"): own for name, own in files.items()}
        with pytest.raises(CoterieError, match=message) as found:
            pull("ann/m", out, most_bytes=most)
        assert found.value.exit_code == 2, found.value
        assert not out.exists()
        assert not (tmp_path / "harmed").exists()
        assert not list(tmp_path.rglob("*.pkl"))

    refused("could run code", **{"pytorch_model.bin": harm})
    refused("could run code", **{"modeling.py": b"import os"})
    refused("could run code", **{"deep__x.PKL": harm})
    refused("leads outside", **{"../../evil.txt": b"x"})
    refused("leads outside", **{"..\\evil.txt": b"x"})
    refused("leads outside", **{"/etc/evil": b"x"})
    refused("SHA-256 does not match", **{"adapter.safetensors": harm})
    refused("SHA-256 does not match", **{"client.json": good["client.json"] + b" "})
    refused("at most 100 are taken", most=100)
    refused("README.md has 1048577 bytes", **{"README.md": b"x" * (2**20 + 1)})
    refused("SHA256SUMS is damaged", **{"SHA256SUMS": b"no sums"})
    pushed.files, pushed.hashes = good, {"adapter.safetensors": "0" * 64}
    with pytest.raises(CheckpointError, match="SHA-256 does not match"):
        pull("ann/m", out)
    pushed.hashes = {}
    for name in ("client.json", "adapter.safetensors"):  # with fitting checksums
        changed = harm if name.endswith("safetensors") else b'{"format": 1, "client": "../x"}'
        (made := tmp_path / f"made-{name}").mkdir()
        files = good | {name: changed}
        write_sums(made, {n: sha256(f).hexdigest() for n, f in files.items() if n != "SHA256SUMS"})
        sums = (made / "SHA256SUMS").read_bytes()
        refused(
            "not a safetensors file" if changed is harm else "client.json",
            **{name: changed, "SHA256SUMS": sums},
        )
    pushed.files = good
    assert pull("ann/m", out).client == "bob"


def test_what_nothing_reads_is_not_kept_and_the_rest_is_loaded(
    pushed: Repository, tmp_path: Path
) -> None:
    pushed.files["recipe.yaml"] = b"name: odd"
    line = f"{sha256(pushed.files['recipe.yaml']).hexdigest()}  recipe.yaml\n"
    pushed.files["SHA256SUMS"] += line.encode()
    pulled = pull("ann/m", tmp_path / "m")
    assert not (pulled.folder / "recipe.yaml").exists()
    assert coterie.load(pulled.folder).about.client == "bob"


def test_a_recipe_that_names_a_program_is_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    push(run, "ann/s", shared=True)
    there = hub.repositories["ann/s"]
    recipe = there.files["recipe.yaml"].replace(b"comigs-1g1s", b"antigravity:Fly")
    assert recipe != there.files["recipe.yaml"]
    there.files["recipe.yaml"] = recipe
    there.files["SHA256SUMS"] = "".join(
        f"{sha256(own).hexdigest()}  {name}\n"
        for name, own in there.files.items()
        if name != "SHA256SUMS"
    ).encode()
    with pytest.raises(Refused, match="antigravity:Fly' is no method of coterie"):
        pull("ann/s", tmp_path / "s")
    assert "antigravity" not in sys.modules
    assert not (tmp_path / "s").exists()


def test_the_command_line_pushes_and_pulls(run: Path, hub: Hub, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": TOKEN,
        "HF_HOME": str(tmp_path / "home"),
    }

    def command(*words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "coterie", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    assert "--publish-personal" in command(
        "push", str(run), "--client", "bob", "--repo", "ann/cli", code=2
    )
    words = ("push", str(run), "--client", "bob", "--repo", "ann/cli", "--publish-personal")
    assert "(private)" in command(*words)
    assert "the model of bob" in command("pull", "ann/cli", "--out", "bob")
    assert "Check the name" in command("pull", "ann/absent", "--out", "none", code=1)


def test_weights_that_follow_a_text_are_never_sent(run: Path, hub: Hub, tmp_path: Path) -> None:
    """Neither with a mixture nor with a part of it, wherever they lie."""
    mixture = tmp_path / "bob"
    for part in ("local", "fedavg"):
        shutil.copytree(run / "clients" / "bob", mixture / part)
    save_mixture(mixture, "bob", {"local": 0.5, "fedavg": 0.5}, Origin("interpolation", "x", 1, 0))
    coterie.load(mixture, follow=True).observe(f"{SECRETS[0]} walks by river 1.")
    followed = (mixture / FOLLOWED).read_bytes()
    shutil.copy(mixture / FOLLOWED, mixture / "local")
    push(mixture, "all", publish_personal=True)
    push(mixture / "local", "river", publish_personal=True)
    assert "adapter.safetensors" in hub.repositories["ann/river"].files
    assert "local/adapter.safetensors" in hub.repositories["ann/all"].files
    for repository in hub.repositories.values():
        files = repository.files.items()
        assert not any(FOLLOWED in name or followed in data for name, data in files)


def test_the_card_has_what_the_hub_reads(run: Path, hub: Hub) -> None:
    push(run, "ann/card", client="bob", publish_personal=True, license="cc-by-4.0")
    text = hub.repositories["ann/card"].files["README.md"].decode()
    data = ModelCard(text).data
    assert data.license == "cc-by-4.0"
    assert data.library_name == "coterie"
    (result,) = data.eval_results
    assert (data.model_name, result.metric_type) == ("card", "perplexity")
    assert result.metric_value == coterie.Run(run).result.clients["bob"].test
    assert data.base_model is None  # what comes with coterie is no repository


def test_a_model_of_one_expert_is_opened_by_peft_alone(
    hub: Hub, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its repository, as a folder beside the base that it names."""
    from peft import AutoPeftModelForCausalLM

    (texts := tmp_path / "texts" / "ann").mkdir(parents=True)
    (texts / "notes.txt").write_text("a cat sleeps on the green table. " * 200)
    run = coterie.run(
        "folders",
        out=tmp_path / "run",
        data={"path": str(texts.parent)},
        model={"base": str(tiny_base), "context": 16},
        method={"name": "fedavg", "budget": "rank", "rounds": 1, "local_steps": 2},
        compare_with=[],
        threads=1,
        words=None,
    )
    push(run.folder, "ann/one", shared=True)
    for name, content in hub.repositories["ann/one"].files.items():
        (tmp_path / "one").mkdir(exist_ok=True)
        (tmp_path / "one" / name).write_bytes(content)
    assert "AutoPeftModelForCausalLM" in (tmp_path / "one" / "README.md").read_text()
    monkeypatch.chdir(tiny_base.parent)
    theirs = AutoPeftModelForCausalLM.from_pretrained(str(tmp_path / "one"))
    ours = pull("ann/one", tmp_path / "pulled").folder
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        wanted = coterie.load(ours, base=str(tiny_base))(ids).logits
        torch.testing.assert_close(theirs(ids).logits, wanted, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(ids).logits, wanted, atol=1e-3)
    assert not list(ours.glob("adapter_model*"))  # of no use to coterie


def test_the_card_of_a_model_on_the_embedded_base_says_what_opens_it(run: Path, hub: Hub) -> None:
    push(run, "ann/ours", shared=True)
    text = hub.repositories["ann/ours"].files["README.md"].decode()
    assert "PEFT cannot open this one" in text
    assert "coterie export --format gguf" in text
    assert "AutoPeft" not in text


def test_a_model_goes_there_and_back_by_its_own_methods(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "assets"))
    model = coterie.load(run, "bob")
    assert isinstance(model, PersonalModel)
    with pytest.raises(Refused, match="the personal model of 'bob' holds what was trained"):
        model.push_to_hub("mine")
    assert model.push_to_hub("mine", publish_personal=True).endswith("ann/mine")
    assert hub.repositories["ann/mine"].private
    back = coterie.PersonalModel.from_pretrained("ann/mine")
    ids = torch.arange(8)[None]
    assert torch.equal(back(ids).logits, model(ids).logits)
    with pytest.raises(Refused, match="Names are like"):
        coterie.PersonalModel.from_pretrained("not a name")


def test_the_same_pull_again_replaces_what_it_wrote_and_nothing_else(
    run: Path, hub: Hub, tmp_path: Path
) -> None:
    coterie.push(run, "river", shared=True)
    for _ in range(2):
        assert coterie.pull("ann/river", tmp_path / "there").shared
    (tmp_path / "there" / "README.md").write_text("notes of my own")
    with pytest.raises(Refused, match="exists already"):
        coterie.pull("ann/river", tmp_path / "there")
    assert (tmp_path / "there" / "README.md").read_text() == "notes of my own"
