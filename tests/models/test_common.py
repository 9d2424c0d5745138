"""The common expert: embeddings, from a file or trained on public examples, and what starts from
it.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.core.errors import CheckpointError, CoterieError, DataError, ModelError, SaveError
from coterie.core.roles import GENERALIST
from coterie.data.examples import ExampleSplit
from coterie.data.images import Cifar10, Digits
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert, Normalisation, Pretraining, trained
from coterie.models.network_tensors import load
from coterie.models.networks import NetworkShape

DIGITS, CIFAR = (1, 8, 8), (3, 32, 32)
SHAPE, CONVOLUTIONS = (
    NetworkShape("mlp", DIGITS, 10, hidden=(16,)),
    NetworkShape("cnn", CIFAR, 10, width=2),
)
DATA, IMAGENET = (
    Normalisation(Cifar10.mean, Cifar10.std),
    Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
)


def images(inputs: tuple[int, ...]) -> Tensor:
    return torch.randn(3, *inputs, generator=torch.Generator().manual_seed(0))


def learned(network: nn.Module) -> nn.Module:
    """The same network with running statistics that are not those of a new one."""
    for name, statistic in network.named_buffers():
        statistic.copy_(
            torch.rand(statistic.shape, generator=torch.Generator().manual_seed(len(name))) + 0.5
        )
    return network


def digits(rows: slice, name: str = "public") -> ExampleSplit:
    found = Digits().images(None)  # they need no cache
    return ExampleSplit(
        name,
        found.train,
        found.train_labels,
        np.arange(len(found.train))[rows],
        0,
        Digits.mean,
        Digits.std,
        10,
    )


def accuracy(expert: CommonExpert, split: ExampleSplit) -> float:
    _, count, right = expert.classifier().score(split.scoring(1000)).tolist()
    return right / count


PUBLIC, REST = digits(slice(400)), digits(slice(400, None))


# As an embedder


def test_standardised_embeddings_have_mean_0_and_deviation_1_on_public_examples() -> None:
    shape = NetworkShape("mlp", DIGITS, 10, hidden=(16,))
    tensors = dict(learned(shape.build()).named_parameters())
    with torch.no_grad():  # a unit that is always 0, and keeps its scale
        tensors["0.weight"][3], tensors["0.bias"][3] = 0, -1
    plain = CommonExpert(shape, tensors)
    expert = plain.standardised(PUBLIC)
    raw, embeddings = (
        torch.cat([one.embed(batch.x) for batch in PUBLIC.scoring(64)]) for one in (plain, expert)
    )
    varies = raw.std(dim=0) > 0
    assert 4 < int(varies.sum()) < 16
    torch.testing.assert_close(embeddings.mean(dim=0), torch.zeros(16), atol=1e-4, rtol=0)
    deviation = embeddings.std(dim=0, correction=0)
    torch.testing.assert_close(deviation, varies.float(), atol=1e-4, rtol=0)
    torch.testing.assert_close(  # the same values, shifted and scaled
        embeddings[:, varies] * raw[:, varies].std(dim=0, correction=0)
        + raw[:, varies].mean(dim=0),
        raw[:, varies],
        atol=1e-3,
        rtol=1e-3,
    )
    x = images(DIGITS)
    assert torch.equal(expert.classifier()(x), plain.classifier()(x))


def test_it_embeds_by_what_its_head_sees_with_running_statistics_and_without_gradients() -> None:
    shape = NetworkShape("resnet20", CIFAR, 10, width=2)
    network, x = learned(shape.build()).eval(), images(CIFAR)
    expert = CommonExpert(shape, dict(network.state_dict()))
    before = {name: tensor.clone() for name, tensor in expert.tensors.items()}
    assert expert.width == 8
    assert torch.equal(expert.embed(x), network.features(x))
    assert torch.equal(expert.embed(x)[:1], expert.embed(x[:1]))
    assert torch.equal(expert.classifier()(x), network(x))
    assert not expert.embed(x).requires_grad
    assert all(torch.equal(expert.tensors[name], before[name]) for name in before)
    assert expert.flops() == Classifier(shape).flops()


def test_batches_normalised_otherwise_embed_as_if_they_were_normalised_its_way() -> None:
    shape, raw = CONVOLUTIONS, images(CIFAR).sigmoid()
    tensors = dict(shape.build().state_dict())
    theirs, its = (
        (raw - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(-1, 1, 1)
        for mean, std in (DATA, IMAGENET)
    )
    plain, changed = (
        CommonExpert(shape, tensors),
        CommonExpert(shape, tensors, data=DATA, expected=IMAGENET),
    )
    torch.testing.assert_close(changed.embed(theirs), plain.embed(its))
    torch.testing.assert_close(changed.classifier()(theirs), plain.classifier()(its))
    torch.testing.assert_close(
        CommonExpert(shape, tensors, expected=IMAGENET).embed(raw), plain.embed(its)
    )
    assert torch.equal(CommonExpert(shape, tensors, data=DATA).embed(theirs), plain.embed(theirs))
    assert not torch.allclose(plain.embed(theirs), plain.embed(its))


def test_what_does_not_fit_is_refused() -> None:
    tensors = dict(CONVOLUTIONS.build().state_dict())
    with pytest.raises(ModelError, match="unexpected tensor"):
        CommonExpert(CONVOLUTIONS, tensors | {"more": torch.zeros(1)})
    for own in (
        Normalisation((0.5,), (0.2,)),
        Normalisation((0.5,) * 3, (0.2, 0.2, 0.0)),
        Normalisation((0.5,) * 3, (0.2,) * 2),
    ):
        with pytest.raises(ModelError, match="3 channels"):
            CommonExpert(CONVOLUTIONS, tensors, expected=own)


# From a file


def test_a_file_gives_its_network_and_another_one_is_refused(tmp_path) -> None:
    network, path = learned(CONVOLUTIONS.build()), tmp_path / "expert.safetensors"
    save_file(network.state_dict(), path)
    assert_same(
        CommonExpert(CONVOLUTIONS, load(path, CONVOLUTIONS), data=DATA, expected=IMAGENET),
        CommonExpert(CONVOLUTIONS, dict(network.state_dict())),
    )
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        load(tmp_path / "none.safetensors", SHAPE)
    save_file(
        dict(NetworkShape("mlp", DIGITS, 10, hidden=(8,)).build().state_dict()),
        tmp_path / "other.safetensors",
    )
    with pytest.raises(ModelError, match=r"'0\.weight' is"):
        load(tmp_path / "other.safetensors", SHAPE)


# Trained


def test_it_learns_from_public_examples_and_is_then_read_from_the_cache(tmp_path) -> None:
    settings = Pretraining(epochs=10, batch_size=32)
    state = torch.get_rng_state()
    expert = trained(SHAPE, PUBLIC, settings, cache=tmp_path)
    assert torch.equal(torch.get_rng_state(), state)
    assert accuracy(expert, REST) > 0.85
    (folder,) = tmp_path.iterdir()
    (entry,) = folder.iterdir()
    written = entry.stat().st_mtime_ns
    again = trained(SHAPE, PUBLIC, settings, cache=tmp_path)
    assert entry.stat().st_mtime_ns == written
    assert_same(again, expert)
    marked = {name: torch.zeros_like(tensor) for name, tensor in expert.tensors.items()}
    save_file(marked, entry)
    assert not trained(SHAPE, PUBLIC, settings, cache=tmp_path).tensors["1.bias"].any()
    for damaged in (b"", entry.read_bytes()[:-1]):
        entry.write_bytes(damaged)
        assert_same(trained(SHAPE, PUBLIC, settings, cache=tmp_path), expert)
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == [entry]


def assert_same(found: CommonExpert, expected: CommonExpert) -> None:
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(
        torch.equal(found.tensors[name], expected.tensors[name]) for name in expected.tensors
    )


def test_everything_that_it_depends_on_makes_another_one(tmp_path) -> None:
    settings = Pretraining(epochs=1)
    other = digits(slice(1, 401))
    relabelled = ExampleSplit(
        "public", PUBLIC.inputs, 9 - PUBLIC.labels, PUBLIC.rows, 0, PUBLIC.mean, PUBLIC.std, 10
    )
    rescaled = ExampleSplit(
        "public", PUBLIC.inputs, PUBLIC.labels, PUBLIC.rows, 0, (0.0,), PUBLIC.std, 10
    )
    variants = [
        (SHAPE, PUBLIC, settings),
        (NetworkShape("mlp", DIGITS, 10, hidden=(17,)), PUBLIC, settings),
        *((SHAPE, split, settings) for split in (other, relabelled, rescaled)),
        *((SHAPE, PUBLIC, settings.model_copy(update=change)) for change in CHANGES),
    ]
    for number, variant in enumerate(variants):
        trained(*variant, cache=tmp_path)
        assert len(list(tmp_path.iterdir())) == number + 1
    reordered = ExampleSplit(
        "another", PUBLIC.inputs, PUBLIC.labels, PUBLIC.rows, 5, PUBLIC.mean, PUBLIC.std, 10
    )
    trained(SHAPE, reordered, settings, cache=tmp_path)  # its own order and name do not matter
    assert len(list(tmp_path.iterdir())) == len(variants)


CHANGES = [
    {"epochs": 2},
    {"lr": 0.01},
    {"momentum": 0.5},
    {"batch_size": 63},
    {"stop_at": 0.01},
    {"seed": 1},
]


def test_it_stops_as_soon_as_it_is_good_enough(tmp_path) -> None:
    settings = Pretraining(epochs=10, batch_size=16)
    fair, good = (
        trained(SHAPE, PUBLIC, settings.model_copy(update={"stop_at": at}), cache=tmp_path)
        for at in (0.5, 0.9)
    )
    assert 0.35 < accuracy(fair, REST) < accuracy(good, REST) - 0.1
    with pytest.raises(CoterieError, match=r"after 1 epochs, not 100.0%") as refusal:
        trained(SHAPE, PUBLIC, Pretraining(epochs=1, lr=1e-4, stop_at=1.0), cache=tmp_path)
    assert "more epochs" in str(refusal.value)
    assert len(list(tmp_path.iterdir())) == 2


def test_a_network_with_statistics_learns_them_and_has_a_batch_of_every_size(tmp_path) -> None:
    shape = NetworkShape("cnn", DIGITS, 10, width=4)
    few = digits(slice(30))  # 27 for training: a last batch of one would have no statistics
    expert = trained(shape, few, Pretraining(epochs=2, batch_size=26), cache=tmp_path)
    assert expert.tensors.keys() == shape.build().state_dict().keys()
    assert expert.tensors["features.0.1.running_mean"].any()


def test_it_is_refused_what_cannot_be_trained(tmp_path) -> None:
    with pytest.raises(DataError, match="no examples"):
        trained(SHAPE, digits(slice(1)), Pretraining(), cache=tmp_path)
    with pytest.raises(ModelError, match="label"):
        trained(NetworkShape("mlp", DIGITS, 3), PUBLIC, Pretraining(), cache=tmp_path)
    with pytest.raises(CoterieError, match="diverged"):
        trained(SHAPE, PUBLIC, Pretraining(epochs=2, lr=1e30), cache=tmp_path)
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match="COTERIE_CACHE"):
        trained(SHAPE, PUBLIC, Pretraining(epochs=1), cache=tmp_path / "file")


# What starts from it


@pytest.mark.parametrize("statistics", [False, True])
def test_a_classifier_that_starts_from_it_has_its_values_whatever_the_seed(statistics) -> None:
    shape = NetworkShape("resnet20", DIGITS, 10, width=2)
    start = {
        name: tensor.clone()
        for name, tensor in reversed(learned(shape.build()).state_dict().items())
    }
    model, fresh = Classifier(shape, start=start, statistics=statistics), Classifier(shape)
    parameters, buffers = (
        {name: start[name] for name in named}
        for named in (fresh.initial(GENERALIST, 0), fresh.buffers)
    )
    for seed in (0, 1):
        initial = model.initial(GENERALIST, seed)
        assert list(initial) == [
            *parameters,
            *(buffers if statistics else ()),
        ]  # in the network's order, not the file's
        assert all(torch.equal(tensor, start[name]) for name, tensor in initial.items())
        initial["linear.bias"].zero_()  # a copy
    assert list(model.initial_buffers()) == list(buffers)
    assert all(torch.equal(tensor, start[name]) for name, tensor in model.initial_buffers().items())
    assert torch.equal(
        model(images(DIGITS)), CommonExpert(shape, start).classifier()(images(DIGITS))
    )
    assert model.statistics == (GENERALIST if statistics else None)
    assert model.initial(GENERALIST, 2)["linear.bias"].any()


def test_shared_statistics_are_initial_values_of_the_generalist() -> None:
    shape = NetworkShape("cnn", DIGITS, 10, width=2)
    model = Classifier(shape, statistics=True)
    assert model.initial(GENERALIST, 3).keys() == model.network.state_dict().keys()
    assert (
        Classifier(shape).initial(GENERALIST, 3).keys()
        == dict(model.network.named_parameters()).keys()
    )
    assert model.initial_buffers().keys() == model.buffers.keys()


def test_a_classifier_starts_from_nothing_foreign() -> None:
    with pytest.raises(ModelError, match=r"to start from: tensor '0\.bias' is missing"):
        Classifier(SHAPE, start={})
