"""Refits of somebody's model to new text: what is trained, on which text, what is kept and where,
and what is refused.
"""

import json
import math
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import coterie
from coterie.adapt.fresh import refit
from coterie.adapt.new_client import Training, adapt
from coterie.cli.base import app
from coterie.client.client import Client
from coterie.core.errors import CheckpointError, DataError, Refused
from coterie.core.files import load
from coterie.data.folders import Folders
from coterie.data.splits import Split
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture
from coterie.runs import run as runs
from coterie.runs.recipes import recipe as recipes

WORDS = {
    "ann": "the tea is hot and the cup is blue",
    "ben": "a train goes over the old bridge",
    "new": "le chat noir dort sur la table verte du jardin",
}


def write_text(folder: Path, words: str, documents: int = 80) -> Path:
    draw = random.Random(words)
    folder.mkdir(parents=True, exist_ok=True)
    texts = (" ".join(draw.choices(WORDS[words].split(), k=12)) for _ in range(documents))
    (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    return folder


def train(folder: Path, base: Path | str, **method: object) -> Path:
    """A finished run of ann and ben."""
    for client in ("ann", "ben"):
        write_text(folder / "clients" / client, client)
    about = {"name": "comigs-1g1s", "rounds": 3, "local_steps": 4} | method
    if str(about["name"]).startswith("comigs"):
        about |= {"router_every": 2, "router_steps": 1}
    changes = [
        f"method={json.dumps(about)}",
        f"model.base={base}",
        f"data.path={folder / 'clients'}",
        "compare_with=[]",
        "samples=false",
        "words=null",
        "model.context=16",
        "model.rank=4",
        "training.batch_size=4",
        "training.experts.lr=3.0e-2",
    ]
    runs.run(recipes.load("folders", changes), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    return train(tmp_path_factory.mktemp("finished"), tiny_base)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    return write_text(tmp_path / "fresh", "new")


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(folder: Path) -> dict[str, Tensor]:
    return load(folder / "adapter.safetensors")[0]


def naive(model: PersonalModel, texts: list[str], context: int = 16) -> float:
    """The perplexity of all tokens but the first, window after window, by the model's own forward
    pass.
    """
    encoded = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([i for ids in encoded for i in (*ids, model.tokenizer.eos_token_id)])
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        piece = ids[start : start + context + 1]
        logits = model(piece[None, :-1]).logits[0].double().log_softmax(dim=-1)
        total -= float(logits[torch.arange(len(piece) - 1), piece[1:]].sum())
    return math.exp(total / (len(ids) - 1))


def test_its_own_parts_learn_the_new_text_and_the_shared_part_stays(run: Path, fresh: Path) -> None:
    before, old = files(run), tensors(run / "clients/ann")
    lines: list[str] = []
    result = refit(run, "ann", fresh, iterations=20, say=lines.append)
    assert result.folder == run / "clients/ann/fresh"
    assert list(result.new) == list(result.old) == ["before", "router", "specialists"]
    assert result.kept == min(result.valid, key=lambda stage: result.valid[stage]) == "specialists"
    assert result.new["specialists"] < result.new["router"] <= result.new["before"]
    new = tensors(result.folder)
    changed = {name for name in old if not torch.equal(old[name], new[name])}
    assert changed == {name for name in old if ".specialist." in name or ".router." in name}
    assert {path: b for path, b in files(run).items() if "fresh" not in path.parts} == before
    assert coterie.load(run, "ann").about == coterie.load(result.folder).about
    written = json.loads((result.folder / "training.json").read_text())
    assert written["new"] == result.new
    assert written["helped"]
    assert lines


def test_the_router_alone_changes_at_first(run: Path, fresh: Path, tmp_path: Path) -> None:
    """By steps on validation text, from where it was, and as long as the training text gains."""
    drawn: list[tuple[str, str]] = []
    step = Client.step

    def noted(client: Client, *roles: str, on: Split, **more: object) -> None:
        drawn.append((on.name, "+".join(roles)))
        step(client, *roles, on=on, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "step", noted)
        refit(run, "ann", fresh, iterations=4)
    expert, router = ("train", "generalist+specialist"), ("valid", "router")
    assert drawn == [router] * 4 + [expert, expert, router] * 2


def test_the_perplexities_are_those_of_the_folders_by_themselves(run: Path, fresh: Path) -> None:
    result = refit(run, "ann", fresh, iterations=12)
    before, after = coterie.load(run, "ann"), coterie.load(result.folder)
    assert isinstance(before, PersonalModel)
    assert isinstance(after, PersonalModel)
    new = Folders().read_one(fresh)
    old = Folders().read_one(Path(recipes.resolve(run).data.path) / "ann")[2]
    assert result.new["before"] == pytest.approx(naive(before, new[2]), rel=1e-5)
    assert result.old["before"] == pytest.approx(naive(before, old), rel=1e-5)
    assert result.new[result.kept] == pytest.approx(naive(after, new[2]), rel=1e-5)
    assert result.old[result.kept] == pytest.approx(naive(after, old), rel=1e-5)
    assert result.valid[result.kept] == pytest.approx(naive(after, new[1]), rel=1e-5)


def test_whoever_joined_later_can_be_refitted_too(run: Path, fresh: Path, tmp_path: Path) -> None:
    """Its old text is not in the run."""
    adapt(run, write_text(tmp_path / "you", "ben"), "you", training=Training(20))
    result = refit(run, "you", fresh, iterations=12)
    assert result.old == {}
    assert result.kept != "before"


def test_the_models_own_folder_is_overwritten_only_if_it_is_named(run: Path, fresh: Path) -> None:
    own = run / "clients/ann"
    first = refit(run, "ann", fresh, iterations=12)
    for out in (None, run / "clients/ben", run):
        with pytest.raises(Refused, match=rf"exists already\n.*--out {own} overwrites"):
            refit(run, "ann", fresh, out, iterations=12)
    again = refit(run, "ann", fresh, own, iterations=12)
    assert again.folder == own
    assert tensors(own).keys() == tensors(first.folder).keys()
    assert all(torch.equal(t, tensors(first.folder)[name]) for name, t in tensors(own).items())
    assert coterie.load(run, "ann").experts == ("G", "S")


def test_what_does_not_help_is_not_kept(run: Path, fresh: Path) -> None:
    """Test text that has nothing to do with the training text."""
    before = files(run)
    split = fresh.parent / "split"
    for name, words in {"train": "new", "valid": "new", "test": "ann"}.items():
        (write_text(split, words) / "text.jsonl").rename(split / f"{name}.jsonl")
    done = CliRunner().invoke(app, ["adapt", str(run), "--client", "ann", "--fresh", str(split)])
    assert done.exit_code == 0, done.output
    assert "It helped on validation text only, maybe by chance: the model in" in done.stdout
    assert "stays as it was" in done.stdout
    assert files(run) == before


def test_it_is_said_what_it_came_to(run: Path, fresh: Path) -> None:
    words = ["adapt", str(run), "--client", "ann", "--fresh", str(fresh), "--iterations", "12"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    written = json.loads((run / "clients/ann/fresh/training.json").read_text())
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    rows = {"before": "as it was", "router": "router refitted"}
    for stage, title in rows.items():
        figures = [f"{written[text][stage]:,.2f}" for text in ("new", "old")]
        assert [*title.split(), *figures] in table
    assert "Kept: router and own experts refitted" in done.stdout
    assert f"in {run}/clients/ann/fresh" in done.stdout
    used = ["predict", str(run / "clients/ann/fresh"), "--text", "le chat"]
    assert CliRunner().invoke(app, used).exit_code == 0


def test_a_mixture_gets_new_weights_and_its_own_part_trains_on(
    tmp_path: Path, tiny_base: Path, fresh: Path
) -> None:
    run = train(tmp_path, tiny_base, name="interpolation")
    before = coterie.load(run, "ann")
    if not isinstance(before, PersonalMixture):
        pytest.fail(f"one part alone: {before}")
    result = refit(run, "ann", fresh, iterations=20)
    after = coterie.load(result.folder)
    assert isinstance(after, PersonalMixture)
    assert result.kept == "specialists"
    assert result.new["specialists"] < result.new["before"]
    assert result.new["specialists"] == pytest.approx(math.exp(score(after, fresh, 2)), rel=1e-5)
    old, new = (dict(model.parts["fedavg"].adapter.named_parameters()) for model in (before, after))
    assert all(torch.equal(t, new[name]) for name, t in old.items())
    # no other weights would fit the validation text better, but for the prior's little pull
    shares = torch.tensor([*after.shares.values()])
    best = score(after, fresh, 1)
    for weight in torch.linspace(0.02, 0.98, 25):
        after.weights = torch.tensor([weight, 1 - weight], dtype=torch.float64)
        assert score(after, fresh, 1) > best - 0.01
    assert shares.sum() == pytest.approx(1)


def score(model: PersonalModel, data: Path, split: int) -> float:
    """The mean loss of a text by mixed probabilities of the parts, window after window."""
    assert isinstance(model, PersonalMixture)
    texts = Folders().read_one(data)[split]
    encoded = model.tokenizer(texts, add_special_tokens=False)["input_ids"]
    ids = torch.tensor([i for ids in encoded for i in (*ids, model.tokenizer.eos_token_id)])
    losses = []
    for start in range(0, len(ids) - 1, 16):
        piece = ids[start : start + 17]
        mixed = sum(
            weight * part(piece[None, :-1]).logits[0].double().softmax(dim=-1)
            for weight, part in zip(model.weights, model.parts.values(), strict=True)
        )
        assert isinstance(mixed, Tensor)
        losses += mixed[torch.arange(len(piece) - 1), piece[1:]].log().neg().tolist()
    return sum(losses) / len(losses)


def test_what_cannot_be_refitted_is_refused(
    run: Path, fresh: Path, tmp_path: Path, tiny_base: Path
) -> None:
    shared = train(tmp_path / "shared", tiny_base, name="fedavg")
    (tmp_path / "little").mkdir()
    (tmp_path / "little/a.txt").write_text("le chat")
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: refit(run, "you", fresh), CheckpointError, "has no client 'you'"),
        (lambda: refit(tmp_path, "ann", fresh), CheckpointError, "holds no run"),
        (lambda: refit(run, "ann", tmp_path / "little"), DataError, "too little text"),
        (lambda: refit(shared, "ann", fresh), Refused, "with fedavg a client's whole model is sha"),
    ]
    for call, error, message in refused:
        with pytest.raises(error, match=message):
            call()
    for words in (["--client", "ann", "--no-train"], [], ["--client", "ann", "--data", str(fresh)]):
        done = CliRunner().invoke(app, ["adapt", str(run), "--fresh", str(fresh), *words])
        assert done.exit_code == 2
        assert "--fresh refits the model of a client" in done.output
    done = CliRunner().invoke(app, ["adapt", str(run)])
    assert done.exit_code == 2
    assert "Give --data, or --fresh" in done.output
