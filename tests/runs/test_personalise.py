"""New clients of runs of language models: what the shared part alone is, what training on their
own text gives, and what is said of it.
"""

import json
import math
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import coterie
from coterie.adapt import personalisation as personalise
from coterie.adapt.new_client import Adapted, Training, adapt
from coterie.adapt.shared_part import write_shared
from coterie.cli.base import app
from coterie.client.client import Client
from coterie.client.settings import AdamW
from coterie.core.errors import CoterieError, DataError, Refused
from coterie.core.files import load, write_all_sums
from coterie.data.folders import Folders
from coterie.models.interpolation import fit_weights
from coterie.models.predictions import joined
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture
from coterie.runs import run as runs
from coterie.runs.problems.loading import text_of
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe as recipes

WORDS = {
    "ann": "the tea is hot and the cup is blue",
    "ben": "a train goes over the old bridge",
    "you": "le chat noir dort sur la table verte du jardin",
}
METHODS = {
    "comigs-1g1s": {},
    "comigs-2g": {},
    "comigs-2s": {},
    "comigs-published": {},
    "pfedmoe": {},
    "fedalt": {},
    "fedavg-moe": {},
    "fedavg": {},
    "ffa-lora": {},
    "fedsa-lora": {},
    "finetuned-fedavg": {},
}
OWN = (
    "comigs-1g1s",
    "comigs-2s",
    "comigs-published",
    "pfedmoe",
    "fedalt",
    "fedsa-lora",
)  # with parts of a client's own
RARE = (
    "comigs-published",
    "finetuned-fedavg",
    "ffa-lora",
    "fedavg-moe",
)  # like others: tried with `make test-all` alone


def written(folder: Path, client: str, documents: int = 80) -> Path:
    draw = random.Random(client)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (
        json.dumps({"text": " ".join(draw.choices(WORDS[client].split(), k=12))})
        for _ in range(documents)
    )
    (folder / "text.jsonl").write_text("\n".join(lines))
    return folder


def trained(folder: Path, base: Path | str, name: str = "comigs-1g1s", **fields: object) -> Path:
    """A finished run of ann and ben."""
    for client in ("ann", "ben"):
        written(folder / "clients" / client, client)
    method = {"name": name, "rounds": 2, "local_steps": 4} | METHODS.get(name, {}) | fields
    if name.startswith("comigs"):
        method |= {"router_every": 2, "router_steps": 1}
    changes = [
        f"method={json.dumps(method)}",
        f"model.base={base}",
        f"data.path={folder / 'clients'}",
        "compare_with=[]",
        "samples=false",
        "words=null",
    ]
    changes += [
        "model.context=16",
        "model.rank=4",
        "training.batch_size=4",
        "training.experts.lr=3.0e-2",
    ]
    runs.run(recipes.load("folders", changes), folder / "run")
    return folder / "run"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    return trained(tmp_path_factory.mktemp("finished"), tiny_base)


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture(scope="module")
def finished_real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("real"), "embedded")


@pytest.fixture
def real(finished_real: Path, tmp_path: Path) -> Path:
    """Of a base that has learned something."""
    return Path(shutil.copytree(finished_real, tmp_path / "real"))


@pytest.fixture
def you(tmp_path: Path) -> Path:
    return written(tmp_path / "you", "you")


def server(run: Path) -> dict[str, Tensor]:
    return load(max((run / "checkpoints").rglob("server.safetensors")))[0]


def tensors(found: Adapted) -> dict[str, Tensor]:
    return load(found.folder / "adapter.safetensors")[0]


def token_ids(tokenizer: Any, texts: Sequence[str]) -> Tensor:
    """The ids of texts, each with the end token behind it."""
    encoded = tokenizer(list(texts), add_special_tokens=False)["input_ids"]
    return torch.tensor([i for ids in encoded for i in (*ids, tokenizer.eos_token_id)])


def naive(model: PersonalModel, ids: Tensor, context: int) -> float:
    """The perplexity of all tokens but the first, in windows that do not overlap, by the model's
    own forward pass, a window at a time.
    """
    total = 0.0
    for start in range(0, len(ids) - 1, context):
        piece = ids[start : start + context + 1]
        logits = model(piece[None, :-1]).logits[0].double().log_softmax(dim=-1)
        total -= float(logits[torch.arange(len(piece) - 1), piece[1:]].sum())
    return math.exp(total / (len(ids) - 1))


def test_without_training_it_has_the_shared_part_alone_and_is_told(run: Path, you: Path) -> None:
    done = CliRunner().invoke(app, ["adapt", str(run), "--data", str(you), "--no-train"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("you: nothing was personalised.")
    assert "leave out --no-train" in done.stdout
    assert "labels" not in done.stdout
    model = coterie.load(run, "you")
    assert model.experts == ("G",)
    assert model.about.layout.specialists == 0
    assert not model.about.layout.routed
    assert {word.experts for word in model.next_words("le chat", 3)} <= {None, ()}
    kept = load(run / "clients/you/adapter.safetensors")[0]
    assert set(kept) == set(server(run))
    assert all(torch.equal(kept[name], t) for name, t in server(run).items())
    assert not (run / "clients/you/training.json").exists()


def test_training_lowers_perplexity_and_leaves_the_generalist_as_it_was(
    run: Path, you: Path
) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    said: list[str] = []
    found = adapt(run, you, training=Training(20, said.append))
    about = found.personalised
    assert about is not None
    assert about.own
    assert about.helped
    assert about.after < about.before
    assert about.valid_after < about.valid_before
    assert found.model.experts == ("G", "S")
    kept = tensors(found)
    assert all(torch.equal(kept[name], t) for name, t in server(run).items())
    own = [name for name in kept if ".specialist." in name]
    assert any(bool((kept[name] != 0).all()) for name in own if name.endswith(".B"))
    assert before == {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and "clients/you" not in str(path)
    }
    assert (found.up, len(said)) == (0, 1 + math.ceil(about.iterations / 4))
    assert json.loads((found.folder / "training.json").read_text())["after"] == about.after


def test_both_perplexities_are_those_of_the_folders_by_themselves(
    run: Path, you: Path, tmp_path: Path
) -> None:
    about = adapt(run, you, training=Training(40)).personalised
    shared = adapt(run, you, "shared").model
    assert about is not None
    assert isinstance(shared, PersonalModel)
    copied = Path(shutil.copytree(run / "clients/you", tmp_path / "elsewhere"))
    personal = coterie.load(copied)
    assert isinstance(personal, PersonalModel)
    test = Folders().read_one(you)[2]
    ids = token_ids(shared.tokenizer, test)
    assert about.tokens["test"] == len(ids)
    assert about.before == pytest.approx(naive(shared, ids, 16), rel=1e-5)
    assert about.after == pytest.approx(naive(personal, ids, 16), rel=1e-5)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in RARE else name for name in METHODS],
)
def test_every_method_that_shares_something_can_be_trained_from(
    name: str, tiny_base: Path, tmp_path: Path
) -> None:
    run, you = trained(tmp_path, tiny_base, name), written(tmp_path / "you", "you")
    found = adapt(run, you, training=Training(12))
    about = found.personalised
    assert about is not None
    assert about.own == (name in OWN)
    assert about.after <= about.before
    assert about.helped, about
    kept = tensors(found)
    if about.own:
        shared = {n: t for n, t in server(run).items() if t.is_floating_point()}
        assert all(torch.equal(kept[n], t) for n, t in shared.items())
    model = coterie.load(found.folder)
    assert isinstance(model, PersonalModel)
    assert model.next_words("le", 3)
    assert model.about.method == name


def test_where_attention_alone_is_shared_no_specialist_is_shown_before_it_is_trained(
    tiny_base: Path, tmp_path: Path
) -> None:
    run, you = trained(tmp_path, tiny_base, "comigs-2s"), written(tmp_path / "you", "you")
    found = adapt(run, you)
    assert found.model.experts == ("G",)
    kept = tensors(found)
    assert all(not t.any() for name, t in kept.items() if ".mlp." in name)
    assert all(torch.equal(kept[name], t) for name, t in server(run).items())
    assert adapt(run, you, "trained", training=Training(24)).model.experts == ("S1", "S2")


def test_it_is_the_methods_own_algorithm(run: Path, you: Path) -> None:
    """Experts on training text in every iteration, the router on validation text in every second
    one, and nothing else.
    """
    drawn: list[tuple[str, str]] = []
    step = Client.step_on

    def noted(client: Client, batch: Tensor, *roles: str, **more: object) -> None:
        own = client.data.train.tokens, client.data.valid.tokens  # type: ignore[attr-defined]
        row = batch[0].numpy().astype(own[0].dtype).tobytes()
        drawn.append(
            (
                "train" if row in own[0].tobytes() else "valid" if row in own[1].tobytes() else "?",
                "+".join(roles),
            )
        )
        step(client, batch, *roles, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "step_on", noted)
        adapt(run, you, training=Training(4))
    expert, router = ("train", "generalist+specialist"), ("valid", "router")
    assert drawn == [expert, expert, router, expert, expert, router]


def test_what_is_no_better_is_not_kept_and_that_is_said(
    real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that the shared part knows well already, and learning rates so high that training
    diverges.
    """
    monkeypatch.setattr(AdamW, "lr_at", lambda optimiser, iteration, total: 50.0)
    done = CliRunner().invoke(
        app,
        [
            "adapt",
            str(real),
            "--data",
            str(written(tmp_path / "ann", "ann")),
            "--client",
            "you",
        ],
    )
    assert done.exit_code == 0, done.output
    assert "It did not help: the shared part alone is kept." in done.stdout
    found = coterie.load(real, "you")
    assert found.experts == ("G",)
    kept = load(real / "clients/you/adapter.safetensors")[0]
    assert all(torch.equal(kept[name], t) for name, t in server(real).items())
    assert json.loads((real / "clients/you/training.json").read_text())["helped"] is False


def test_what_is_better_on_validation_text_alone_is_not_kept_either(
    real: Path, you: Path, tmp_path: Path
) -> None:
    """Validation text as the training text, test text as that of ann."""
    for split, client in {"train": "you", "valid": "you", "test": "ann"}.items():
        (tmp_path / "split").mkdir(exist_ok=True)
        (tmp_path / "split" / f"{split}.jsonl").write_text(
            (written(tmp_path / client, client) / "text.jsonl").read_text()
        )
    done = CliRunner().invoke(
        app,
        ["adapt", str(real), "--data", str(tmp_path / "split"), "--iterations", "12"],
    )
    assert done.exit_code == 0, done.output
    about = json.loads((real / "clients/split/training.json").read_text())
    assert about["valid_after"] < about["valid_before"]
    assert about["after"] > about["before"]
    assert "It helped on validation text only, maybe by chance: the shared part alone is kept" in (
        done.stdout
    )
    table = [line.split() for line in done.stdout.splitlines()]
    assert ["the", "base", f"{about['base']:,.2f}"] in table
    assert ["the", "shared", "part", "alone", f"{about['before']:,.2f}"] in table
    after = f"trained, after iteration {about['iteration']} {about['after']:,.2f}"
    assert after.split() in table
    assert coterie.load(real, "split").experts == ("G",)


def test_with_a_real_base_the_best_iteration_is_kept_and_not_the_last(
    real: Path, tmp_path: Path
) -> None:
    """Of little text, which is learned by heart after a while; then training stops."""
    data = written(tmp_path / "you", "you", 12)
    found = adapt(real, data, training=Training(400))
    about = found.personalised
    assert about is not None
    assert about.helped
    assert about.after < 0.5 * min(about.before, about.base)
    assert about.iterations < 400
    assert about.iterations == about.iteration + 4 * personalise.PATIENCE
    assert isinstance(found.model, PersonalModel)
    ids = token_ids(found.model.tokenizer, Folders().read_one(data)[1])
    assert about.valid_after == pytest.approx(naive(found.model, ids, 16), rel=1e-5)
    assert set(WORDS["you"].split()) & {word.word for word in found.model.next_words("chat ", 5)}


def test_the_same_text_gives_the_same_model(run: Path, you: Path, tmp_path: Path) -> None:
    first = adapt(run, you, "you", tmp_path / "first", training=Training(12))
    second = adapt(run, you, "you", tmp_path / "second", training=Training(12))
    assert (tmp_path / "first/adapter.safetensors").read_bytes() == (
        tmp_path / "second/adapter.safetensors"
    ).read_bytes()
    assert first.personalised == second.personalised


def test_its_folder_is_used_like_any_other(run: Path, you: Path, tmp_path: Path) -> None:
    adapt(run, you, training=Training(24))
    for words in (
        ["predict", str(run), "--text", "le chat"],
        ["generate", str(run / "clients/you"), "--text", "le chat", "--tokens", "3"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0, done.output
    done = CliRunner().invoke(
        app,
        ["export", str(run), "--client", "you", "--out", str(tmp_path / "peft"), "--expert", "S"],
    )
    assert done.exit_code == 0, done.output
    assert set(coterie.load_all(run)) == {"ann", "ben", "you"}
    assert coterie.load_many(run).next_words("le chat", 2).keys() == {"ann", "ben", "you"}


def test_nothing_is_left_of_what_was_stopped(run: Path, you: Path) -> None:
    before = sorted(run.rglob("*"))

    def stop(line: str) -> None:
        if line.startswith("iteration 8"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adapt(run, you, training=Training(100, stop))
    assert sorted(run.rglob("*")) == before
    assert adapt(run, you, training=Training(12)).folder == run / "clients/you"


def test_too_little_text_is_refused_before_anything_starts(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        DataError,
        match=r"too little text to train on and to judge by: tokens [\d,]+ for train, \d+ for "
        r"valid, \d+ for test",
    ):
        adapt(run, written(tmp_path / "you", "you", 1), training=Training(say=said.append))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no text in it"):
        adapt(run, tmp_path / "none", training=Training(say=said.append))
    assert not said
    assert not (run / "clients/you").exists()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            ("quickstart", "method.name=local"),
            r"local has no shared part that a new client could start "
            r"from\n.*folders.*method.name=local",
        ),
        (("quickstart", "method.name=comigs-2s-alone"), "comigs-2s-alone has no shared part"),
        (("quickstart", "method.name=cobo"), "cobo has no shared part"),
        (("quickstart", "method={name: pretrained}"), "pretrained trains nothing"),
        (("ddome-digits",), "training is for language models"),
    ],
)
def test_where_there_is_nothing_to_train_from_that_is_refused(
    recipe: tuple[str, ...], message: str, you: Path, tmp_path: Path
) -> None:
    name, *changes = recipe
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipes.load(name, changes)))
    with pytest.raises(Refused, match=message):
        adapt(tmp_path, you, training=Training())


def test_iterations_without_training_are_refused(run: Path, you: Path) -> None:
    done = CliRunner().invoke(
        app, ["adapt", str(run), "--data", str(you), "--no-train", "--iterations", "3"]
    )
    assert done.exit_code == 2
    assert "--no-train does no --iterations" in done.output


def test_without_training_those_who_need_it_are_told_so(tiny_base: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(
        recipes.dump(recipes.load("quickstart", ["method.name=pfedmoe"]))
    )
    with pytest.raises(CoterieError, match=r"Without --no-train it trains further"):
        adapt(tmp_path, tmp_path)


def test_a_newcomer_mixes_a_model_of_its_own_with_the_one_that_everybody_has(
    tmp_path: Path, tiny_base: Path, you: Path
) -> None:
    """Of a run of Local and FedAvg. What is its own begins from the base, as Local's does."""
    run = trained(tmp_path, tiny_base, "interpolation", prior=4.0)
    mean = {n.removeprefix("fedavg/"): t for n, t in server(run).items() if "fedavg/" in n}
    alone = adapt(run, you, "alone")
    assert (alone.model.about.method, alone.up) == ("fedavg", 0)
    assert all(torch.equal(tensors(alone)[name], t) for name, t in mean.items())
    said: list[str] = []
    found = adapt(run, you, training=Training(40, said.append))
    model, about = found.model, found.personalised
    assert isinstance(model, PersonalMixture)
    assert about is not None
    assert about.helped
    assert about.weights == model.mixture.weights == pytest.approx(model.shares)
    assert list(model.parts) == ["local", "fedavg"]
    assert said[0].startswith("the base alone")
    kept = dict(model.parts["fedavg"].adapter.named_parameters())
    assert all(torch.equal(kept[name], t) for name, t in mean.items())
    own = local_as_it_begins(run, you)
    method = recipes.resolve(run).build_method().methods["local"]
    by_itself, _ = personalise.train(own, method, 40, lambda line: None)
    local = dict(model.parts["local"].adapter.named_parameters())
    assert all(torch.equal(local[name], t) for name, t in by_itself.tensors.items())
    nll, count = model.score(own.data.test.scoring(8))
    assert math.exp(nll / count) == pytest.approx(about.after, rel=1e-5)
    nll, count = model.score(own.data.valid.scoring(8))
    assert math.exp(nll / count) == pytest.approx(about.valid_after, rel=1e-5)
    parts = [list(m.language.predictions(own.data.valid.scoring(8))) for m in model.parts.values()]
    assert model.weights.tolist() == fit_weights(joined(parts)[0][..., 0], 4.0).tolist()
    sentences = " ".join(personalise.sentences("you", about))
    assert "a model of its own from the base; mixed: " in sentences
    assert "everybody's" in sentences
    follows = coterie.load(run, "you", follow=True)
    follows.observe("le chat noir dort sur la table")
    assert coterie.load(run, "you", follow=True).shares == follows.shares != model.shares


def local_as_it_begins(run: Path, you: Path) -> Client:
    """A client of the run's recipe with Local alone, without any training."""
    recipe = recipes.resolve(run)
    section = {"name": "local", "rounds": 2, "local_steps": 4}
    recipe = recipe.model_copy(update={"method": section})
    prepared = prepare(recipe)
    data = text_of(recipe, prepared.problem.backbone, "you", you, True)
    site = replace(prepared.site, data={"you": data}, layouts={"you": prepared.site.layouts["ann"]})
    return site.client("you", {})


def test_a_run_none_of_whose_parts_serves_newcomers_is_refused(
    tmp_path: Path, tiny_base: Path, you: Path
) -> None:
    run = trained(tmp_path, tiny_base, "interpolation", parts=["local", "finetuned-fedavg"])
    for training in (None, Training(4)):
        with pytest.raises(Refused, match=r"interpolation has no .*\n.*ethods that have: .*fedavg"):
            adapt(run, you, training=training)


def test_a_shared_part_of_several_goes_on_elsewhere(
    tmp_path: Path, tiny_base: Path, you: Path
) -> None:
    run = trained(tmp_path, tiny_base, "interpolation")
    part = write_shared(run, tmp_path / "shared", str(tiny_base))
    assert part.clients == 2
    write_all_sums(tmp_path / "shared")
    assert coterie.load(tmp_path / "shared").about.method == "fedavg"
    here = adapt(run, you, training=Training(12))
    there = adapt(tmp_path / "shared", you, out=tmp_path / "there", training=Training(12))
    assert isinstance(there.model, PersonalMixture) == isinstance(here.model, PersonalMixture)
    ids = torch.arange(8)[None]
    assert torch.equal(there.model(ids).logits, here.model(ids).logits)
