"""Classifiers whose predictions are mixed, against naive mixtures of their parts loaded alone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_personal_classifier import base, images, pool, single, split  # noqa: F401
from torch import Tensor

import coterie
from coterie.adapt.new_client import adapt
from coterie.core.errors import CheckpointError, RecipeError
from coterie.export import Source, export
from coterie.models.artifact import Origin, save_mixture
from coterie.models.text import TextShape
from coterie.personal import PersonalClassifier, save_classifier
from coterie.personal.classifier import ClassifierMixture
from coterie.personal.ui.page import _answer
from coterie.runs.problems.prepare import prepare

DDOME = {"name": "ddome", "pool": 3, "top_k": 2}
PARTS = ("local", "fedavg", DDOME)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DDOME's known clients, with a part that leaves no model with them between rounds."""
    folder = tmp_path_factory.mktemp("mixed") / "run"
    coterie.run(
        "ddome-digits",
        out=folder,
        data={"clients": 5, "anchors": 3, "unseen": {}, "public": 100},
        method={"name": "interpolation", "parts": [*PARTS], "rounds": 3, "local_epochs": 1},
        training={"stateless": False},
        participation={"anchors": 3, "clients": 5},
        compare_with=[],
    )
    return folder


def naive(model: PersonalClassifier, folder: Path, x: Tensor) -> Tensor:
    """Probabilities of the mixture of the parts in a client's folder, each loaded by itself."""
    weights = json.loads((folder / "client.json").read_text())["weights"]
    assert isinstance(model, ClassifierMixture)
    assert list(weights) == list(model.parts)
    p: Tensor = sum(  # type: ignore[assignment]
        w * coterie.load(folder / name)(x).exp().double() for name, w in weights.items()
    )
    return p


def test_predictions_and_scores_are_those_of_a_naive_mixture(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())["clients"]
    data = prepare(coterie.Recipe.load(run / "recipe.yaml")).problem.federation.clients
    mixtures = 0
    for client, model in coterie.load_all(run).items():
        assert isinstance(model, PersonalClassifier)
        (batch,) = data[client].test.scoring(10_000)
        if not isinstance(model, ClassifierMixture):  # one part does as well alone
            continue
        mixtures += 1
        p = naive(model, run / "clients" / client, batch.x)
        torch.testing.assert_close(model(batch.x).exp().double(), p, rtol=0, atol=1e-6)
        correct = (p.argmax(dim=1) == batch.y).double().mean()
        assert abs(100 * float(correct) - result[client]["test"]) < 1e-6
        assert (model.experts, model.about.method) == ((), "interpolation")
    assert mixtures


def test_a_mixture_is_used_like_one_classifier(run: Path, tmp_path: Path) -> None:
    client = next(i for i, m in coterie.load_all(run).items() if isinstance(m, ClassifierMixture))
    model = coterie.load(run, client)
    Image.fromarray(images(1, (1, 8, 8))[0, 0]).save(tmp_path / "photo.png")
    (batch,) = model.batches(tmp_path)
    p = naive(model, run / "clients" / client, batch.x)[0]
    (prediction,) = model.predict(tmp_path)
    assert (prediction.label, prediction.expert) == (int(p.argmax()), None)
    assert abs(prediction.probability - float(p.max())) < 1e-6
    shown, parts, _ = _answer(model, str(tmp_path / "photo.png"))
    assert list(shown.values()) == pytest.approx(p.tolist(), abs=1e-6)
    assert re.fullmatch(r"\d+ % [^,]+(, \d+ % [^,]+)+|[^,]+ alone", parts)
    command = ["predict", str(run), "--client", client, "--data", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *command], capture_output=True, text=True, check=True
    )
    assert f"{prediction.probability:.1%}" in done.stdout
    with pytest.raises(CheckpointError, match="a classifier, not a language model"):
        export(Source(run, client), "onnx", tmp_path / "exported")


def test_classifiers_of_texts_are_mixed(base: Path, tmp_path: Path) -> None:  # noqa: F811
    shape = TextShape(str(base), 3, 12)
    shutil.copytree(base, tmp_path / "elsewhere")
    weights = {"local": 0.3, "fedavg": 0.7}
    for experts, name in zip(((1, 4), (0, 2)), weights, strict=True):
        model, origin = pool(experts, shape), Origin(name, "texts", 7, 0)
        save_classifier(
            tmp_path / "ann" / name, "ann", model, split(np.array([[5]])), ("a", "b", "c"), origin
        )
    save_mixture(tmp_path / "ann", "ann", weights, Origin("interpolation", "texts", 7, 0))
    mixture = coterie.load(tmp_path / "ann", base=str(tmp_path / "elsewhere"))
    (batch,) = mixture.batches(["abc", "quite another text"])
    p = naive(mixture, tmp_path / "ann", batch.x)
    torch.testing.assert_close(mixture(batch.x).exp().double(), p, rtol=0, atol=1e-6)
    assert [one.label for one in mixture.predict(["abc", "quite another text"])] == p.argmax(
        dim=1
    ).tolist()


def test_parts_that_are_not_of_one_kind_are_refused(tmp_path: Path) -> None:
    origin = Origin("interpolation", "digits", 7, 0)
    for name, names in (("local", ("a", "b", "c")), ("fedavg", ("a", "b", "d"))):
        save_classifier(tmp_path / name, "ann", single(), split(images(1)), names, origin)
    save_mixture(tmp_path, "ann", {"local": 0.5, "fedavg": 0.5}, origin)
    with pytest.raises(CheckpointError, match="its parts differ in the names of classes"):
        coterie.load(tmp_path)
    shutil.rmtree(tmp_path / "fedavg")
    with pytest.raises(CheckpointError, match="fedavg"):
        coterie.load(tmp_path)


def test_newcomers_without_labels_have_no_weights(run: Path, tmp_path: Path) -> None:
    """They are refused in a run; afterwards they get the part that serves them, and no mixture."""
    recipe = {"method": {"name": "interpolation", "parts": ["fedavg", DDOME], "rounds": 1}}
    with pytest.raises(RecipeError, match=r"data\.unseen: interpolation has no model for clients"):
        prepare(coterie.Recipe.load("ddome-digits", **recipe))
    Image.fromarray(images(1, (1, 8, 8))[0, 0]).save(tmp_path / "photo.png")
    adapted = adapt(run, tmp_path / "photo.png", "new", tmp_path / "new")
    assert not isinstance(adapted.model, ClassifierMixture)
    assert adapted.model.about.method == "fedavg"
