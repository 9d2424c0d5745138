"""New clients of a run: what they get, what they send, and what is refused."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import Result
from PIL import Image, ImageOps
from typer.testing import CliRunner

import coterie
from coterie.adapt.new_client import Adapted, adapt
from coterie.cli.base import app
from coterie.core.errors import DataError, Refused
from coterie.core.files import load
from coterie.core.protocol import Ask, Replies
from coterie.core.tensors import nbytes
from coterie.data.examples import ExampleSplit
from coterie.engines.inprocess import ENGINES, InProcess
from coterie.personal.samples import Samples
from coterie.runs import run as runs
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe as recipes

SHORT = (
    "method.rounds=3",
    "compare_with=[]",
    "checkpoint_every=1",
    "evaluate_every=0",
    "data.clients=6",
    "data.unseen={aligned: 2}",
)


def finished(folder: Path, *changes: str, recipe: str = "ddome-digits") -> Path:
    runs.run(recipes.load(recipe, [*SHORT, *changes]), folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished(tmp_path_factory.mktemp("run") / "ddome")


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """(36, 8, 8) bytes of zeros to threes, and which they are."""
    from sklearn.datasets import load_digits

    found = load_digits()
    rows = np.flatnonzero(found.target < 4)[::20]
    return (found.images[rows] / 16 * 255).round().astype(np.uint8), found.target[rows]


@pytest.fixture
def photos(digits: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> Path:
    return written(tmp_path / "photos", digits[0])


def written(folder: Path, images: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for k, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{k:03d}.png")
    return folder


def server(run: Path) -> dict[str, torch.Tensor]:
    return load(sorted((run / "checkpoints").iterdir())[-1] / "server.safetensors")[0]


def weights(found: Adapted) -> bytes:
    return (found.folder / "classifier.safetensors").read_bytes()


# What a new client gets


def test_it_gets_the_experts_that_its_data_want_most(
    run: Path, photos: Path, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    found = adapt(run, photos)
    kept, state = load(run / "clients/photos/classifier.safetensors")[0], server(run)
    x = ((torch.tensor(digits[0]) / 255 - 0.3053) / 0.3760).flatten(1)
    hidden = (x @ kept["common/0.weight"].T + kept["common/0.bias"]).relu()
    gate = torch.split(state["gate"], [64 * 8, 64, 5 * 64, 5])
    scores = (
        ((hidden @ gate[0].view(64, 8).T + gate[1]).relu() @ gate[2].view(5, 64).T + gate[3])
        .softmax(dim=1)
        .mean(dim=0)
    )
    assert found.scores == pytest.approx(scores.tolist(), rel=1e-4)
    assert found.model.experts == tuple(sorted(scores.topk(2).indices.tolist()))
    for number in found.model.experts:
        flat = torch.cat(
            [
                kept[f"expert/{number}/{name}"].flatten()
                for name in ("0.weight", "0.bias", "1.weight", "1.bias")
            ]
        )
        assert torch.equal(flat, state[f"expert/{number}"])
    assert (found.samples, found.model.about.client, found.model.about.round, found.rounds) == (
        36,
        "photos",
        3,
        3,
    )
    assert found.folder == run / "clients/photos"
    assert coterie.load(run, "photos").predict(photos) == found.model.predict(photos)


def test_the_run_gives_its_own_unseen_clients_the_same(run: Path, tmp_path: Path) -> None:
    """Of digits in 256 shades instead of 17, so that scores are not quite equal, but choices
    are.
    """
    result = json.loads((run / "result.json").read_text())
    unseen = prepare(recipes.resolve(run)).problem.federation.unseen["aligned"]
    for id, data in unseen.items():
        test = data.test
        assert isinstance(test, ExampleSplit)
        images = written(
            tmp_path / f"again-{id}", (test.inputs[test.rows, 0] * 255).round().astype(np.uint8)
        )
        found = adapt(run, images)
        assert list(found.model.experts) == result["clients"][id]["experts"]
        assert (found.up, found.down) == (
            result["clients"][id]["bytes_up"],
            result["clients"][id]["bytes_down"],
        )
        assert found.once == result["once_bytes"]
        own, again = (
            (run / f"clients/{i}/classifier.safetensors").read_bytes() for i in (id, f"again-{id}")
        )
        assert own == again
        right = np.mean(
            [
                p.label == y
                for p, y in zip(found.model.predict(images), test.labels[test.rows], strict=True)
            ]
        )
        assert 100 * right == pytest.approx(result["clients"][id]["test"], abs=3)


def test_of_fedavg_it_gets_the_model_that_everybody_gets(tmp_path: Path, photos: Path) -> None:
    run = finished(tmp_path / "fedavg", "method.name=fedavg", "method.local_epochs=1")
    found = adapt(run, photos)
    assert found.model.experts == found.scores == ()
    assert {
        name: t.tolist() for name, t in load(found.folder / "classifier.safetensors")[0].items()
    } == {name: t.tolist() for name, t in server(run).items()}
    assert (found.up, found.down, found.once) == (0, nbytes(server(run)), 0)


def test_the_common_expert_needs_no_rounds(tmp_path: Path, photos: Path) -> None:
    run = finished(tmp_path / "common", "method.name=common-expert", "method.rounds=0")
    found = adapt(run, photos)
    assert (found.up, found.down, found.once) == (
        0,
        0,
        sum(t.numel() * 4 for t in load(found.folder / "classifier.safetensors")[0].values()),
    )
    assert len(found.model.predict(photos)) == 36


def test_a_single_sample_is_enough(run: Path, photos: Path) -> None:
    found = adapt(run, photos / "007.png", "one")
    assert (found.samples, len(found.model.experts), sum(found.scores)) == (1, 2, pytest.approx(1))


# What it sends


class Recorded(InProcess):
    """The engine, whose messages are kept."""

    seen: list[tuple[str, str, dict[str, torch.Size], dict[str, torch.Size]]] = []  # noqa: RUF012 - one for all, as the engine is made by the run

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        replies = super().answer(ask, round, phase)
        for i in ask.to:
            sizes = [
                {name: t.shape for name, t in tensors.items()}
                for tensors in (ask.to[i], replies[i])
            ]
            self.seen.append((ask.name, i, *sizes))
        return replies


def test_scores_are_all_that_leaves_it(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, "inprocess", Recorded)
    monkeypatch.setattr(Recorded, "seen", [])
    found = adapt(run, photos)
    gate = server(run)["gate"]
    assert Recorded.seen == [
        ("score_experts_unlabelled", "photos", {"gate": gate.shape}, {"scores": torch.Size([5])})
    ]
    assert found.up == 5 * 8
    assert found.down == nbytes({"again": gate, "gate": gate}) + 2 * nbytes(
        {"expert": server(run)["expert/0"]}
    )


def test_labels_count_for_nothing(run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = adapt(run, photos)
    honest = Samples.split

    def lying(self: Samples, *about: object) -> ExampleSplit:
        split = honest(self, *about)
        return replace(split, labels=np.random.default_rng(0).integers(0, 10, len(split.labels)))

    monkeypatch.setattr(Samples, "split", lying)
    found = adapt(run, photos, "lied-to")
    assert weights(found) == weights(expected)
    assert found.scores == expected.scores
    assert found.model.predict(photos) == expected.model.predict(photos)


def test_names_of_folders_count_for_nothing(
    run: Path, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    right, wrong = (tmp_path / name for name in ("right", "wrong"))
    for label in range(4):
        for folder, called in ((right, label), (wrong, 3 - label)):
            for k, image in zip(
                np.flatnonzero(digits[1] == label), digits[0][digits[1] == label], strict=True
            ):
                written(folder / str(called), image[None]).joinpath("000.png").rename(
                    folder / str(called) / f"{k}.png"
                )
    found = [adapt(run, folder) for folder in (right, wrong)]
    assert weights(found[0]) == weights(found[1])
    assert found[0].scores == pytest.approx(found[1].scores, rel=1e-6)


def test_the_engine_changes_nothing(run: Path, photos: Path, tmp_path: Path) -> None:
    loopback = finished(tmp_path / "loopback", "engine=loopback")
    found = [adapt(folder, photos) for folder in (run, loopback)]
    assert weights(found[0]) == weights(found[1])
    assert (found[0].scores, found[0].up, found[0].down) == (
        found[1].scores,
        found[1].up,
        found[1].down,
    )


# Runs that are not finished, and what is refused


def test_of_an_unfinished_run_the_newest_checkpoint_counts(run: Path, photos: Path) -> None:
    shutil.rmtree(run / "clients")
    shutil.rmtree(run / "checkpoints/round-00003")
    (run / "result.json").unlink()
    found = adapt(run, photos)
    assert (found.model.about.round, found.rounds) == (2, 3)
    done = command("adapt", run, "--data", photos, "--client", "again")
    assert done.stdout.startswith("The run has done 2 of 3 rounds. The model is from that round.\n")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(Refused, match=r"has no checkpoint yet\n.*--resume"):
        adapt(run, photos, "more")
    assert not (run / "clients/more").exists()


def test_whoever_is_there_already_is_not_new(run: Path, photos: Path, tmp_path: Path) -> None:
    adapt(run, photos)
    for id, message in (
        ("photos", "clients/photos exists already"),
        ("aligned-00", "exists already"),
        ("client-00", "is a client of the run"),
    ):
        with pytest.raises(Refused, match=message):
            adapt(run, photos, id)
    with pytest.raises(DataError, match=r"client id '\.\./x' is not valid"):
        adapt(run, photos, "../x")
    elsewhere = adapt(run, photos, "more", tmp_path / "device")
    assert coterie.load(tmp_path / "device").about.client == "more"
    assert elsewhere.folder == tmp_path / "device"
    assert not (run / "clients/more").exists()


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            "cobo-digits",
            r"cobo has no model for clients that bring none of their own\n  Methods that have: "
            r".*fedavg.*ddome",
        ),
        (("quickstart", "method.name=local"), "local has no model"),
    ],
)
def test_runs_that_have_nothing_for_it_are_refused(
    recipe: object, message: str, photos: Path, tmp_path: Path
) -> None:
    name, *changes = [recipe] if isinstance(recipe, str) else recipe
    (tmp_path / "recipe.yaml").write_text(recipes.dump(recipes.load(name, changes)))
    with pytest.raises(Refused, match=message):
        adapt(tmp_path, photos)


@pytest.mark.parametrize("name", ["fedsr", "fedadg", "scaffold", "ensemble"])
def test_a_kept_model_is_as_good_as_the_result_says(name: str, tmp_path: Path) -> None:
    run = finished(tmp_path / "run", f"method.name={name}")
    test = prepare(recipes.resolve(run)).site.data["aligned-00"].test
    assert isinstance(test, ExampleSplit)
    right = [
        p.label for p in coterie.load(run, "aligned-00").predict(test.inputs[test.rows])
    ] == test.labels[test.rows]
    result = json.loads((run / "result.json").read_text())["clients"]["aligned-00"]["test"]
    assert 100 * right.mean() == pytest.approx(result)


def test_another_common_expert_than_the_runs_is_refused(photos: Path, tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    recipe = (run / "recipe.yaml").read_text()
    checkpoint = max((run / "checkpoints").rglob("checkpoint.json"))
    checkpoint.write_text(
        re.sub(r'"common_expert": "\w+"', '"common_expert": "0"', checkpoint.read_text())
    )
    assert "pretraining" in recipe
    with pytest.raises(Refused, match="common_expert"):
        adapt(run, photos)


def test_a_new_writer_gets_generalists_for_a_folder_of_text(
    tiny_base: Path, tmp_path: Path
) -> None:
    for writer, letters in (("ann", "abc"), ("ben", "xyz"), ("you", "abd")):
        (tmp_path / writer).mkdir()
        for k in range(12):
            (tmp_path / writer / f"{k}.txt").write_text(
                " ".join(letters[(k + n) % 3] * (n % 4 + 1) for n in range(20))
            )
    clients = tmp_path / "clients"
    clients.mkdir()
    for writer in ("ann", "ben"):
        (tmp_path / writer).rename(clients / writer)
    method = {"name": "comigs", "rounds": 2, "local_steps": 1, "router_every": 1, "router_steps": 1}
    changes = [f"method={json.dumps(method)}"]
    model = [
        f"model.base={tiny_base}",
        "model.context=16",
        "training.batch_size=4",
        "compare_with=[]",
    ]
    runs.run(recipes.load("folders", [*changes, *model, f"data.path={clients}"]), tmp_path / "run")
    found = adapt(tmp_path / "run", tmp_path / "you")
    model_ = coterie.load(tmp_path / "run", "you")
    assert model_.about.client == "you"
    assert model_.next_words("a b")
    assert found.samples > 12
    server = load(max((tmp_path / "run/checkpoints").rglob("server.safetensors")))[0]
    assert (found.experts, found.scores, found.up, found.down) == ((), (), 0, nbytes(server))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="no text in it"):
        adapt(tmp_path / "run", tmp_path / "none")
    (tmp_path / "none/a.txt").write_text("a")
    with pytest.raises(DataError, match="window"):
        adapt(tmp_path / "run", tmp_path / "none")


def test_data_that_will_not_do_are_refused_and_nothing_is_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    large = written(tmp_path / "large", np.zeros((1, 9, 8), np.uint8))
    deep = tmp_path / "deep"
    written(deep, np.full((1, 8, 8), 40_000, np.uint16))
    bomb = tmp_path / "bomb"
    bomb.mkdir()
    Image.new("1", (12_000, 12_000)).save(bomb / "a.png")
    monkeypatch.setattr(ImageOps, "exif_transpose", pytest.fail)  # which would decode it
    with pytest.raises(DataError, match="it is 12000 x 12000"):
        adapt(run, bomb)
    monkeypatch.undo()
    drawn = tmp_path / "drawn"
    drawn.mkdir()
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(drawn / "a.png")
    for data, message in (
        (tmp_path / "empty", "is empty"),
        (large, "no image of 8 x 8 pixels: it is 9 x 8"),
        (deep, "it has 16 bits a channel"),
        (drawn, "it is transparent in parts"),
        (tmp_path / "none", "no such file"),
    ):
        with pytest.raises(DataError, match=message):
            adapt(run, data)
        assert not (run / "clients" / data.name).exists()
    with pytest.raises(Refused, match=r"holds no run: there is no recipe\.yaml"):
        adapt(tmp_path / "empty", large)


# As it is used in a terminal


def command(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": "120"})


def lines(text: str) -> Iterator[list[str]]:
    return (line.split() for line in text.splitlines())


def test_a_newcomer_is_told_what_it_got_and_how_to_use_it(run: Path, photos: Path) -> None:
    done = command("adapt", run, "--data", photos)
    assert done.exit_code == 0, done.stderr
    model = coterie.load(run, "photos")
    assert done.stdout.startswith("photos: 36 samples, labels not needed and not read.\n")
    assert set(re.findall(r"expert (\d): \d+\.\d% of the scores", done.stdout)) == set(
        map(str, model.experts)
    )
    assert re.search(r"not sent: 3 others, \d+\.\d% of the scores\n", done.stdout)
    assert re.search(
        r"It sent 40 bytes \(its scores\) and received [\d,]+ bytes, and before that [\d,]+ bytes "
        r"of the "
        r"common expert, .*\.\n",
        done.stdout,
    )
    words = done.stdout.splitlines()[-1].split()
    assert words[:2] == ["coterie", "predict"]
    said = command(*words[1:])
    assert said.exit_code == 0, said.stderr
    rows = [[p.name, f"{p.probability:.1%}", str(p.expert)] for p in model.predict(photos)]
    assert [line[-3:] for line in lines(said.stdout) if line and line[0].endswith(".png")] == rows


def test_predict_shows_clients_side_by_side_and_says_what_it_needs(
    run: Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(photos.parent)  # paths are short enough for a line
    done = command("predict", run, "--data", "photos/000.png")
    shown = [line for line in lines(done.stdout) if line and line[0].endswith("000.png")]
    assert [line[1] for line in shown] == ["aligned-00", "aligned-01"]
    assert [line[2] for line in shown] == [
        coterie.load(run, i).predict(photos / "000.png")[0].name
        for i in ("aligned-00", "aligned-01")
    ]
    mistakes = {
        ("predict", run): "holds classifiers of images",
        ("predict", run, "--text", "a", "--data", photos): "either a text or --data",
        ("predict", run, "--text", "a"): "holds classifiers of images",
        (
            "generate",
            run,
            "--client",
            "aligned-00",
            "--text",
            "a",
        ): "holds a classifier, not a language model",
        (
            "export",
            run,
            "--client",
            "aligned-00",
            "--out",
            run / "out",
        ): "other programs read classifier.safetensors and client.json",
    }
    for words, message in mistakes.items():
        refused = command(*words)
        assert refused.exit_code == 2
        assert message in refused.stderr
        assert refused.stderr.startswith("coterie: ")
