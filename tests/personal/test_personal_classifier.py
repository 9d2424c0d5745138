"""Classifiers that are kept and used again, against those that were trained and against plain
matrix products of what is in the files.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import coterie
from coterie.core.errors import CheckpointError, DataError, ModelError, Refused
from coterie.core.files import load, save, write_all_sums
from coterie.data.examples import Examples, ExampleSplit
from coterie.data.images import Cifar10, Cifar100, Digits, Emnist, Images, Mnist
from coterie.data.labelled import _DOMAIN, INTENTS, Clinc150, DBpedia14, LabelledTexts, YahooAnswers
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert, Normalisation
from coterie.models.layout import PoolLayout
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.models.text import TextShape
from coterie.personal import Origin, PersonalClassifier, PersonalModel, save_classifier
from coterie.personal.samples import of_array, read

ORIGIN = Origin("ddome", "digits", 7, 0)
DIGITS, COLOURS = (1, 4, 4), (3, 8, 6)
MLP = NetworkShape("mlp", DIGITS, 3, (5,))
WIDE = NetworkShape("mlp", DIGITS, 3, (7,))
CNN = NetworkShape("cnn", COLOURS, 3, width=4)
MEAN, STD = (0.3, 0.4, 0.5), (0.2, 0.25, 0.3)
Model = Classifier | PoolClassifier


def split(inputs: np.ndarray) -> ExampleSplit:
    channels = 0 if inputs.ndim == 2 else inputs.shape[1]
    labels = np.zeros(len(inputs), np.int64)
    return ExampleSplit(
        "test", inputs, labels, np.arange(len(inputs)), 0, MEAN[:channels], STD[:channels], 3
    )


def images(count: int = 9, shape: tuple[int, int, int] = DIGITS) -> np.ndarray:
    return np.random.default_rng(1).integers(0, 256, (count, *shape)).astype(np.uint8)


def scrambled(network: nn.Module, seed: int) -> None:
    """Values that no start has, running statistics included."""
    torch.manual_seed(seed)
    for tensor in network.state_dict().values():
        tensor.copy_(
            torch.rand(tensor.shape) + 0.5 if tensor.ndim == 1 else torch.randn(tensor.shape)
        )


def pool(
    numbers: tuple[int, ...] = (1, 4),
    shape: NetworkShape | TextShape = MLP,
    wanted: tuple[Normalisation | None, Normalisation | None] = (None, None),
    **layout: object,
) -> PoolClassifier:
    common = Classifier(WIDE if isinstance(shape, NetworkShape) and shape is MLP else shape)
    scrambled(common.network, 0)
    tensors = dict(common.network.named_parameters()) | common.buffers
    expert = CommonExpert(
        common.shape,
        {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "cpu",
        *wanted,
    )
    found = PoolClassifier(
        shape, PoolLayout(pool=5, **({"chosen": 2} | layout)), expert, gate_width=6
    )
    for place, number in enumerate(numbers):
        found.numbers[place] = number
        scrambled(found.experts[place].network, 10 + number)
    if found.gate is not None:
        scrambled(found.gate.network, 22)
    return found


def single(shape: NetworkShape = MLP) -> Classifier:
    found = Classifier(shape)
    scrambled(found.network, 8)
    return found


def kept(
    folder: Path, model: Model, data: ExampleSplit | None = None, names: tuple[str, ...] = ()
) -> PersonalClassifier:
    """The model, saved as the client `ann` of a run and loaded again."""
    save_classifier(
        folder / "clients/ann",
        "ann",
        model,
        data or split(images(1, model.shape.example().shape[1:])),
        names,
        ORIGIN,
    )
    return coterie.load(folder, "ann")


def naively(folder: Path, images: np.ndarray) -> tuple[Tensor, list[int]]:
    """Log-probabilities by the chosen experts and their numbers, from the two files alone:
    networks of one hidden layer.
    """
    about, tensors = (
        json.loads((folder / "client.json").read_text()),
        load(folder / "classifier.safetensors")[0],
    )

    def hidden(x: Tensor, network: str) -> Tensor:
        return (x @ tensors[f"{network}/0.weight"].T + tensors[f"{network}/0.bias"]).relu()

    def output(x: Tensor, network: str) -> Tensor:
        return hidden(x, network) @ tensors[f"{network}/1.weight"].T + tensors[f"{network}/1.bias"]

    x = ((torch.tensor(images) / 255 - about["mean"][0]) / about["std"][0]).flatten(1)
    scores = output(hidden(x, "common"), "gate")
    experts = [max(about["pool"]["experts"], key=lambda m: float(row[m])) for row in scores]
    return torch.stack(
        [output(one, f"expert/{m}").log_softmax(0) for one, m in zip(x, experts, strict=True)]
    ), experts


# What is kept


def test_the_folder_holds_all_that_a_device_needs(tmp_path: Path) -> None:
    model = kept(tmp_path, pool(), names=("cat", "dog", "ship"))
    batch = images()
    outputs, experts = naively(tmp_path / "clients/ann", batch)
    found = model.predict(batch)
    assert [p.expert for p in found] == experts
    assert set(experts) == {1, 4}
    assert [p.label for p in found] == outputs.argmax(dim=1).tolist()
    assert [p.probability for p in found] == pytest.approx(
        outputs.exp().amax(dim=1).tolist(), rel=1e-4
    )
    assert [p.name for p in found] == [("cat", "dog", "ship")[p.label] for p in found]
    assert {path.name for path in (tmp_path / "clients/ann").iterdir()} == {
        "classifier.safetensors",
        "client.json",
        "SHA256SUMS",
    }


MODELS: dict[str, Callable[[], Model]] = {
    "a network": single,
    "with running statistics": lambda: single(CNN),
    "the best of two": pool,
    "of two with running statistics": lambda: pool(shape=CNN),
    "an embedder that wants other images": lambda: pool(
        wanted=(Normalisation((0.3,), (0.2,)), Normalisation((0.9,), (0.1,)))
    ),
    "a mixture of logits": lambda: pool(answer="mixture"),
    "a mixture of probabilities": lambda: pool(mixture="probabilities", answer="mixture"),
    "scores as printed": lambda: pool(mixture="scores", answer="mixture"),
    "an ensemble": lambda: pool(mixture="mean", answer="mixture"),
    "one of two places": lambda: pool((3,)),
    "one place": lambda: pool((3,), chosen=1),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_answers_as_the_trained_one_bit_for_bit(name: str, tmp_path: Path) -> None:
    trained = MODELS[name]()
    data = split(images(9, trained.shape.example().shape[1:]))
    model = kept(tmp_path, trained, data)
    (batch,) = data.scoring(9)
    if isinstance(trained, Classifier):
        with torch.no_grad():
            outputs, experts = trained(batch.x).log_softmax(dim=1), None
        assert model.experts == ()
    else:
        embedded = Examples(batch.x, batch.y, trained.embed(batch) if trained.embed else None)
        outputs, experts = trained.predict(embedded)
        assert model.experts == tuple(n for n in trained.numbers.tolist() if n >= 0)
    assert torch.equal(model(batch.x), outputs)
    found = model.predict(data.inputs)
    assert [p.expert for p in found] == (
        experts.tolist() if experts is not None and trained.gate else [None] * 9
    )
    assert [(p.label, p.probability) for p in found] == [
        (int(row.argmax()), float(row.exp().max())) for row in outputs
    ]
    assert [p.name for p in found] == [str(p.label) for p in found]


def test_it_says_what_it_is(tmp_path: Path) -> None:
    model = kept(tmp_path, pool())
    assert re.fullmatch(
        r"PersonalClassifier\(client='ann', method='ddome', network='a mlp for .*', experts=\(1, "
        r"4\)\)",
        repr(model),
    )
    assert "experts" not in repr(kept(tmp_path, single()))
    assert (model.about.round, model.about.recipe, model.device.type) == (7, "digits", "cpu")


def test_one_is_loaded_by_its_own_folder_and_all_by_the_runs(tmp_path: Path) -> None:
    kept(tmp_path, pool())
    save_classifier(tmp_path / "clients/ben", "ben", single(), split(images(1)), (), ORIGIN)
    assert list(coterie.load_all(tmp_path)) == ["ann", "ben"]
    assert list(coterie.load_all(tmp_path / "clients/ben")) == ["ben"]
    assert coterie.load(tmp_path / "clients/ann").experts == (1, 4)
    with pytest.raises(CheckpointError, match="folder of client 'ann', not of 'ben'"):
        coterie.load(tmp_path / "clients/ann", "ben")


KINDS = (Digits, Cifar10, Cifar100, Mnist, Emnist, Clinc150, DBpedia14, YahooAnswers)


@pytest.mark.parametrize("kind", KINDS)
def test_classes_have_names_where_everybody_means_the_same_by_them(
    kind: type[Images] | type[LabelledTexts],
) -> None:
    names = kind(partition="dirichlet").names
    assert len(names) in (0, kind().classes)
    assert len(set(names)) == len(names)
    assert kind(partition="permuted-clusters").names == ()


def test_names_are_in_the_order_of_the_labels() -> None:
    assert Cifar10(partition="iid").names[3] == "cat"
    assert Cifar100(partition="iid").names == tuple(sorted(Cifar100(partition="iid").names))
    assert "".join(Emnist(partition="iid").names[9:12]) == "9AB"
    assert Clinc150(partition="iid").names[_DOMAIN["gas"]] == "auto_and_commute"
    assert Clinc150(partition="iid", labels="intent").names == INTENTS


# What can be given


def test_paths_arrays_and_tensors_are_the_same_samples(tmp_path: Path) -> None:
    model, raw = kept(tmp_path, single(CNN), split(images(2, COLOURS))), images(5, COLOURS)
    (tmp_path / "photos/deep").mkdir(parents=True)
    paths = [
        tmp_path / "photos" / ("deep" if k == 4 else "") / f"{'z' * (k == 4)}{k}.png"
        for k in range(5)
    ]
    for path, pixels in zip(paths, raw, strict=True):
        Image.fromarray(np.moveaxis(pixels, 0, 2)).save(path)
    (tmp_path / "photos/.DS_Store").write_bytes(b"?")
    ways = [raw, torch.tensor(raw), raw.astype(np.int64), paths, list(map(str, paths))]
    expected = model.predict(raw)
    assert len({p.label for p in expected}) > 1
    assert all(model.predict(way) == expected for way in ways)
    folder = tmp_path / "photos"
    assert read([folder], CNN).names == tuple(map(str, sorted(paths)))
    assert {p.probability for p in model.predict(str(folder))} == {p.probability for p in expected}
    for floats in (raw / 255, torch.tensor(raw / 255, dtype=torch.float32)):
        assert [p.probability for p in model.predict(floats)] == pytest.approx(
            [p.probability for p in expected], rel=1e-4
        )
    assert model.predict(paths[2]) == model.predict(raw[2])


def test_grey_and_coloured_images_become_what_the_network_takes(tmp_path: Path) -> None:
    grey = Image.fromarray(images(1)[0, 0])
    for mode in ("L", "RGB", "RGBA", "P", "LA"):
        grey.convert(mode).save(tmp_path / f"{mode}.png")
    found = read([tmp_path], MLP).inputs
    assert found.shape == (5, *DIGITS)
    assert (found == np.asarray(grey)).all()
    assert (
        read([tmp_path / "L.png"], NetworkShape("mlp", (3, 4, 4), 3)).inputs == np.asarray(grey)
    ).all()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, r"photos: the folder is empty\n.*\.png, \.jpg or \.jpeg"),
        ({"a.png": "good", "b.pdf": b"?"}, r"b\.pdf does not end in \.png"),
        (
            {"a.png": "good", "b.png": b"no image"},
            r"b\.png is no image of 4 x 4 pixels: cannot identify",
        ),
        ({"a.png": "cut", "b.jpg": b""}, r"(?s)a\.png is no image.*b\.jpg is no image"),
        (
            {"a.png": "large"},
            r"a\.png is no image of 4 x 4 pixels: it is 5 x 6\n  Give images of height 4 and "
            r"width 4\.",
        ),
    ],
)
def test_images_that_will_not_do_are_named(
    files: dict[str, object], message: str, tmp_path: Path
) -> None:
    (tmp_path / "photos").mkdir()
    for name, content in files.items():
        path = tmp_path / "photos" / name
        Image.fromarray(np.zeros((5, 6) if content == "large" else (4, 4), np.uint8)).save(
            tmp_path / "image.png"
        )
        data = content if isinstance(content, bytes) else (tmp_path / "image.png").read_bytes()
        path.write_bytes(data[:45] if content == "cut" else data)
    with pytest.raises(DataError, match=message):
        read([tmp_path / "photos"], MLP)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (np.zeros((2, 1, 4, 5), np.uint8), r"uint8\[2, 1, 4, 5\]\n  Expected \[images, 1, 4, 4\]"),
        (np.zeros((0, 1, 4, 4), np.uint8), r"\[0, 1, 4, 4\]"),
        (np.full((1, 4, 4), 3.0), "from 3.0 to 3.0"),
        (np.full((1, 4, 4), np.nan), "from nan"),
        (np.full((1, 4, 4), 256), "from 256"),
        (np.full((1, 4, 4), -1), "from -1"),
        (np.full((1, 4, 4), True), "images of bool"),
        ([], "nothing to classify"),
        ("nowhere", "no such file or folder"),
    ],
)
def test_arrays_that_will_not_do_are_refused(given: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        kept(tmp_path, single()).predict(given)
    with pytest.raises(ModelError, match=r"torch\.float32\[1, 1, 5, 4\] images"):
        kept(tmp_path, pool())(torch.zeros(1, 1, 5, 4))


def test_floats_are_taken_as_they_are() -> None:
    assert of_array(np.full((1, 4, 4), 0.5, np.float16), MLP).inputs.dtype == np.float32


# Texts


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Path:
    """A tiny BERT of random weights, with a tokenizer of bytes."""
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    folder = tmp_path_factory.mktemp("bert")
    AutoTokenizer.from_pretrained(tiny_base).save_pretrained(folder)
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    BertForSequenceClassification(
        BertConfig(vocab_size=257, max_position_embeddings=32, **sizes)
    ).save_pretrained(folder)
    return folder


def test_texts_are_classified_wherever_they_stand(base: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shape = TextShape(str(base), 3, 12)
    model = kept(tmp_path, pool(shape=shape), split(np.array([[5, 6, -1]])), ("yes", "no", "maybe"))
    texts = ["abc", "a text that is far too long", "zzz\n"]
    (tmp_path / "notes/deep").mkdir(parents=True)
    (tmp_path / "notes/a.txt").write_text(texts[0])
    (tmp_path / "notes/deep/b.jsonl").write_text(
        "".join(json.dumps({"text": text, "label": 9}) + "\n" for text in texts[1:])
    )
    found = model.predict(texts)
    assert model.predict(tmp_path / "notes") == found
    assert read([tmp_path / "notes"], shape).names[1:] == tuple(
        f"{tmp_path}/notes/deep/b.jsonl, text {k}" for k in (1, 2)
    )
    (alone,) = model.predict("abc")
    ids = torch.tensor([[*AutoTokenizer.from_pretrained(base)("abc")["input_ids"], -1, -1]])
    assert (alone.label, alone.expert, alone.name) == (
        found[0].label,
        found[0].expert,
        ("yes", "no", "maybe")[alone.label],
    )
    assert [alone.probability, float(model(ids).exp().amax())] == pytest.approx(
        [found[0].probability] * 2, rel=1e-5
    )
    for nothing in ("  ", ""):
        with pytest.raises(DataError, match="text 2: the text is empty"):
            model.predict(["a", nothing])
    with pytest.raises(DataError, match="ndarray for a classifier of texts"):
        model.predict(images())


def test_a_base_that_has_moved_is_named(base: Path, tmp_path: Path) -> None:
    before = kept(tmp_path, pool(shape=TextShape(str(base), 3, 12)), split(np.array([[5]])))
    about = tmp_path / "clients/ann/client.json"
    about.write_text(about.read_text().replace(str(base), str(tmp_path / "gone")))
    write_all_sums(about.parent)
    with pytest.raises(ModelError, match="no model folder"):
        coterie.load(tmp_path, "ann")
    moved = coterie.load(tmp_path, "ann", base=str(base))
    assert moved.predict("abc") == before.predict("abc")
    with pytest.raises(Refused, match=r"has no base\n  Leave --base out"):
        PersonalClassifier.load(kept_folder(tmp_path / "images"), str(base))


def kept_folder(run: Path) -> Path:
    kept(run, single())
    return run / "clients/ann"


# What is refused


def damage(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], object]:
    def damaged(folder: Path) -> None:
        tensors, metadata = load(folder / "classifier.safetensors")
        change(tensors)
        save(folder / "classifier.safetensors", tensors, metadata)

    return damaged


def rewrite(change: Callable[[dict[str, object]], object]) -> Callable[[Path], object]:
    def rewritten(folder: Path) -> None:
        about = json.loads((folder / "client.json").read_text())
        change(about)
        (folder / "client.json").write_text(json.dumps(about))

    return rewritten


WEIGHT = "expert/4/0.weight"
DAMAGES = {
    "not a number": (
        damage(lambda t: t[WEIGHT].view(-1)[:1].fill_(float("nan"))),
        f"'{WEIGHT}' holds values that are not finite",
    ),
    "in the common expert": (
        damage(lambda t: t["common/1.bias"].fill_(float("inf"))),
        "safetensors, common: '1.bias' holds values that are not finite",
    ),
    "missing": (damage(lambda t: t.pop("gate/1.bias")), "tensor 'gate/1.bias' is missing"),
    "foreign": (
        damage(lambda t: t.update({"expert/2/0.weight": t[WEIGHT].clone()})),
        "unexpected tensor 'expert/2/0.weight'",
    ),
    "other shape": (
        damage(lambda t: t.update({WEIGHT: t[WEIGHT][:2].clone()})),
        "expected float32",
    ),
    "truncated": (
        lambda f: (f / "classifier.safetensors").write_bytes(
            (f / "classifier.safetensors").read_bytes()[:-9]
        ),
        "truncated",
    ),
    "gone": (lambda f: (f / "classifier.safetensors").unlink(), "does not exist"),
    "no json": (lambda f: (f / "client.json").write_text("{"), "is damaged"),
    "a list": (lambda f: (f / "client.json").write_text("[]"), "not of format 1"),
    "newer": (rewrite(lambda a: a.update(format=2)), "not of format 1"),
    "without a client": (rewrite(lambda a: a.pop("client")), "client: Field required"),
    "too few names": (rewrite(lambda a: a["names"].pop()), "2 names of 3 classes"),
    "no such network": (rewrite(lambda a: a["network"].update(network="rnn")), "network"),
    "no size": (rewrite(lambda a: a["network"].update(hidden=[0])), "a network of inputs"),
    "an expert beyond the pool": (
        rewrite(lambda a: a["pool"].update(experts=[1, 5])),
        r"experts \(1, 5\) of a pool of 5",
    ),
    "a gate without embeddings": (
        rewrite(lambda a: a["pool"].update(common=None)),
        "mixture logits with the common expert None",
    ),
    "other experts": (
        rewrite(lambda a: a["pool"].update(experts=[1, 3])),
        "unexpected tensor 'expert/4",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder_is_refused(name: str, tmp_path: Path) -> None:
    kept(tmp_path, pool())
    change, message = DAMAGES[name]
    change(tmp_path / "clients/ann")
    write_all_sums(tmp_path / "clients/ann")  # by whoever changed it on purpose
    with pytest.raises(Refused, match=message):
        coterie.load(tmp_path, "ann")


def test_a_classifier_is_no_language_model(tmp_path: Path) -> None:
    kept(tmp_path, pool())
    with pytest.raises(CheckpointError, match=r"holds a classifier, not a language model\n"):
        PersonalModel.load(tmp_path / "clients/ann")
    with pytest.raises(Refused, match="has no backbone"):
        coterie.load(tmp_path, "ann", backbone=object())
