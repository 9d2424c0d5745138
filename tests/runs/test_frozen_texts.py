"""Heads on a frozen text encoder: kept features against the encoder run at every step, and all that
a run, a personal model and a new client do with them.
"""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from figures import as_json
from torch import Tensor
from torch.nn.functional import cross_entropy

import coterie
from coterie.adapt.new_client import adapt
from coterie.core.errors import Refused
from coterie.core.files import load as load_tensors
from coterie.data.labelled import DOMAINS, INTENTS
from coterie.export import Source, export
from coterie.export.push import base_of
from coterie.models import text
from coterie.models.text import TextShape
from coterie.runs import run
from coterie.runs.problems.prepare import Prepared, prepare
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

LENGTH, LR, STEPS, BATCH = 12, 0.1, 6, 4
DATA = {"kind": "clinc150", "clients": 4, "classes_per_client": 4, "partition": "quantity"}
DATA |= {"replacement": True, "per_client": 20, "anchors": 5, "anchor_classes": 2}
DATA |= {"unseen": {"aligned": 2}, "public": 60}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CLINC150's folder with texts that name their domain."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "clinc150").mkdir()
    domain_of = {i: domain for domain, intents in DOMAINS.items() for i in intents.split()}
    for name, count in (("train", 450), ("test", 150)):
        random = np.random.default_rng(count)
        rows = [
            {"text": f"{domain_of[INTENTS[k % 150]][:5]} {random.integers(999)}", "intent": k % 150}
            for k in range(count)
        ]
        packed = gzip.compress("\n".join(map(json.dumps, rows)).encode())
        (folder / f"clinc150/{name}.jsonl.gz").write_bytes(packed)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A random encoder without a head, with the tiny base's tokenizer."""
    folder = tmp_path_factory.mktemp("bert")
    transformers.AutoTokenizer.from_pretrained(tiny_base).save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    config = transformers.BertConfig(
        vocab_size=257, max_position_embeddings=32, num_hidden_layers=2, **sizes
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(root: Path, base: Path) -> Callable[..., Recipe]:
    def of(method: str, *changes: str) -> Recipe:
        section = {
            "name": "texts",
            "data": DATA | {"root": str(root)},
            "model": {
                "kind": "text-classifier",
                "base": str(base),
                "length": LENGTH,
                "head": [6],
                "common": {"pretraining": {"epochs": 3, "lr": 0.1, "batch_size": 8}},
            },
            "method": {"name": method, "rounds": 1, "local_steps": STEPS},
            "training": {
                "batch_size": BATCH,
                "experts": {"optimiser": "sgd", "lr": LR, "momentum": 0.9, "dampening": 0},
            },
        }
        for change in changes:
            assert recipes.dotted.apply(section, change) is None
        return recipes.validate(section, "test")

    return of


def encode(base: Path, ids: Tensor) -> Tensor:
    """The mean of the last hidden states of one text after the other, by transformers alone."""
    model = transformers.AutoModel.from_pretrained(base).eval()
    with torch.no_grad():
        return torch.stack([model(x[x >= 0][None]).last_hidden_state[0].mean(dim=0) for x in ids])


def test_features_are_the_mean_of_last_hidden_states_and_are_kept(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = TextShape(str(base), 3, LENGTH)
    ids = np.random.default_rng(0).integers(1, 257, (text._ROWS + 9, LENGTH))
    ids[
        np.arange(LENGTH) >= np.random.default_rng(1).integers(1, LENGTH + 1, len(ids))[:, None]
    ] = -1
    kept = np.array(text.kept(ids, shape, cache=tmp_path))
    assert kept.shape == (len(ids), 8, 1, 1)
    expected = encode(base, torch.from_numpy(ids))
    torch.testing.assert_close(torch.tensor(kept[:, :, 0, 0]), expected)
    (file,) = tmp_path.rglob("features.npy")
    counted: list[int] = []
    compute = text.features
    monkeypatch.setattr(
        text, "features", lambda x, *more: (counted.append(len(x)), compute(x, *more))[1]
    )
    assert np.array_equal(text.kept(ids, shape, cache=tmp_path), kept)
    assert not counted
    file.write_bytes(file.read_bytes()[:-1])  # cut off: computed again
    assert np.array_equal(text.kept(ids, shape, cache=tmp_path), kept)
    assert sum(counted) == len(ids)
    text.kept(ids[:5], shape, cache=tmp_path)  # other texts
    assert sum(counted) == len(ids) + 5


def normal(prepared: Prepared, base: Path) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the public texts' text."""
    public = prepared.problem.federation.public
    values = encode(base, torch.from_numpy(public.texts[public.rows])).double()  # type: ignore[union-attr]
    return values.mean(dim=0), values.std(dim=0, correction=0)


def naive(prepared: Prepared, base: Path, start: dict[str, Tensor]) -> dict[str, Tensor]:
    """FedAvg's first round by plain torch, with the encoder run at every step."""
    (mean, std), ends = normal(prepared, base), []
    for id in prepared.clients:
        split = prepared.site.data[id].train
        tokens = replace(split, inputs=split.texts, texts=None, mean=(), std=())  # type: ignore[type-var, attr-defined]
        values = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
        momenta = {name: torch.zeros_like(tensor) for name, tensor in start.items()}
        for step in range(STEPS):
            batch = tokens.batch(step * BATCH, BATCH)
            x = ((encode(base, batch.x) - mean) / std).float()
            hidden = torch.relu(x @ values["0.weight"].T + values["0.bias"])
            loss = cross_entropy(hidden @ values["1.weight"].T + values["1.bias"], batch.y)
            gradients = torch.autograd.grad(loss, list(values.values()))
            with torch.no_grad():
                for (name, value), gradient in zip(values.items(), gradients, strict=True):
                    momenta[name].mul_(0.9).add_(gradient)
                    value.sub_(LR * momenta[name])
        ends.append({name: value.detach() for name, value in values.items()})
    return {name: torch.stack([end[name] for end in ends]).mean(dim=0) for name in start}


@pytest.mark.parametrize("engine", ["inprocess", "loopback"])
def test_kept_features_train_as_the_whole_frozen_encoder_does(
    engine: str, recipe: Callable[..., Recipe], base: Path, tmp_path: Path
) -> None:
    settings = recipe("fedavg", f"engine={engine}")
    prepared = prepare(settings)
    start = prepared.method.init(prepared.blueprint, prepared.clients)
    expected = naive(prepared, base, start)
    run.run(settings, tmp_path / "run")
    (checkpoint,) = sorted((tmp_path / "run/checkpoints").glob("*/server.safetensors"))[-1:]
    state = load_tensors(checkpoint)[0]
    for name, tensor in expected.items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=1e-6)
        assert (tensor - start[name]).abs().max() > 1e-2  # far more than the tolerance


def test_a_common_expert_is_a_head_trained_until_it_is_good_enough(
    recipe: Callable[..., Recipe],
) -> None:
    weak = "model.common.pretraining.stop_at=0.3"
    alike, weaker = (prepare(recipe("fedavg", *more)).problem for more in ((), (weak,)))
    other = ["model.common.network=mlp", "model.common.hidden=[5]"]
    assert alike.common.shape == alike.shape  # type: ignore[attr-defined]
    assert prepare(recipe("ddome", *other)).problem.common.width == 5  # type: ignore[attr-defined]
    public = alike.federation.public
    score = [p.common.classifier().score(public.scoring(64)) for p in (alike, weaker)]  # type: ignore[attr-defined, union-attr]
    assert score[1][2] < score[0][2]


@pytest.mark.parametrize("method", ["local", "fedavg", "interpolation", "ddome", "fedmix", "ifca"])
def test_what_a_run_scores_is_what_its_saved_models_predict_of_raw_texts(
    method: str, recipe: Callable[..., Recipe], root: Path, tmp_path: Path
) -> None:
    personal = method in ("local", "interpolation", "ifca")
    changes = ["data.unseen={}" if personal else "training.stateless=true"]
    changes += ["method.centres=2"] if method == "ifca" else []
    changes += ["model.common.standardise=true"] if method == "ddome" else []
    settings = recipe(method, "compare_with=[]", *changes)
    (result,) = as_json(run.run(settings, tmp_path / "run"))
    prepared = prepare(settings)
    words = transformers.AutoTokenizer.from_pretrained(settings.model.base)
    for id, scores in result["clients"].items():
        test = prepared.problem.federation.everyone[id].test
        texts = [words.decode(row[row >= 0]) for row in test.texts[test.rows]]  # type: ignore[attr-defined]
        predicted = coterie.load(tmp_path / "run", id).predict(texts)
        right = np.mean([p.label for p in predicted] == test.labels[test.rows])  # type: ignore[attr-defined]
        assert 100 * right == pytest.approx(scores["test"])
    assert predicted[0].name in DOMAINS
    files = (tmp_path / "run/clients").rglob("client.json")  # those of a mixture's parts are deeper
    about = json.loads(max(files, key=lambda path: len(path.parts)).read_text())
    assert base_of(about) == settings.model.base


def test_a_new_client_brings_raw_texts(recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    run.run(recipe("ddome", "training.stateless=true"), tmp_path / "run")
    (tmp_path / "new.jsonl").write_text('{"text": "banki 3"}\n{"text": "trave 4"}\n')
    adapted = adapt(tmp_path / "run", tmp_path / "new.jsonl")
    assert adapted.samples == 2
    assert sum(adapted.scores) == pytest.approx(1)
    (one, _) = adapted.model.predict(tmp_path / "new.jsonl")
    assert [one] == adapted.model.predict("banki 3")
    with pytest.raises(Refused, match="holds a classifier, not a language model"):
        export(Source(tmp_path / "run", "new"), "onnx", tmp_path / "onnx")


def test_a_base_that_has_moved_is_named_for_the_encoder(
    recipe: Callable[..., Recipe], base: Path, tmp_path: Path
) -> None:
    moved = Path(shutil.copytree(base, tmp_path / "base"))
    run.run(recipe("fedavg", f"model.base={moved}", "compare_with=[]"), tmp_path / "run")
    model = coterie.load(tmp_path / "run", "aligned-00")
    before = model.predict("a text")
    moved.rename(tmp_path / "elsewhere")
    text.encoder.cache_clear()
    again = coterie.load(tmp_path / "run", "aligned-00", base=str(tmp_path / "elsewhere"))
    assert again.predict("a text") == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model.common.base=embedded"], "with model.head it has the model's"),
        (["model.common.network=cnn"], "with model.head it is an mlp"),
        (["model.head=[0]"], "model.head"),
        (["model.common.pretraining=null"], "gives neither a path nor pretraining"),
    ],
)
def test_impossible_heads_are_refused(
    changes: list[str], message: str, recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(Refused, match=message):
        prepare(recipe("ddome", *changes))


def test_a_resumed_run_knows_texts_and_not_their_rounding(recipe: Any) -> None:
    split = prepare(recipe("fedavg")).problem.federation.clients["anchor-0"].train
    other = replace(split, inputs=split.inputs + np.float32(1e-3))
    assert other.digest() == split.digest()
    texts = split.texts.copy()
    texts[split.rows[0], 0] += 1
    assert replace(split, texts=texts).digest() != split.digest()
