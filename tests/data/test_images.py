"""Federations of images: whose images are which, what clients call them, where they come from,
and what is refused.
"""

import gzip
from io import BytesIO
from itertools import pairwise
from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet
from pydantic import ValidationError

from coterie.core.errors import DataError
from coterie.data.examples import Examples, ExampleSplit
from coterie.data.federation import CENTRALIZED, Federation
from coterie.data.images import Cifar10, Cifar100, Digits, Emnist, Images, Mnist
from coterie.data.splits import UnionSplit

NAMES = ("train", "valid", "test")


def rows_of(federation: Federation, name: str) -> dict[str, set[int]]:
    found = {id: getattr(client, name).rows.tolist() for id, client in federation.clients.items()}
    assert all(len(set(rows)) == len(rows) for rows in found.values())
    return {id: set(rows) for id, rows in found.items()}


def held(federation: Federation) -> dict[str, set[int]]:
    """Training and validation rows, which must not overlap."""
    trains, valids = rows_of(federation, "train"), rows_of(federation, "valid")
    assert all(not trains[id] & valids[id] for id in trains)
    return {id: trains[id] | valids[id] for id in trains}


def members(federation: Federation) -> list[list[str]]:
    assert federation.clusters is not None
    count = max(federation.clusters.values()) + 1
    return [
        [id for id, cluster in federation.clusters.items() if cluster == k] for k in range(count)
    ]


def calls(federation: Federation, id: str) -> list[int]:
    """What a client calls each class."""
    truth = Digits().images(Path()).train_labels
    labels = federation.clients[id].train.labels
    names = [set(labels[truth == label].tolist()) for label in range(10)]
    assert all(len(name) == 1 for name in names)
    return [name.pop() for name in names]


def refusal(section: Images) -> str:
    with pytest.raises(DataError) as error:
        section.load()
    assert error.value.remedy
    return str(error.value)


# Splits


@st.composite
def example_splits(draw: st.DrawFn, name: str = "train") -> ExampleSplit:
    count = draw(st.integers(1, 30))
    rows = draw(st.lists(st.integers(0, count - 1), min_size=1, unique=True))
    inputs = np.arange(count, dtype=np.uint8)[:, None, None, None]
    return ExampleSplit(
        name,
        inputs,
        np.arange(count) % 3,
        np.array(rows),
        draw(st.integers(0, 3)),
        (0.0,),
        (1 / 255,),
        3,
    )


@st.composite
def splits(draw: st.DrawFn) -> ExampleSplit | UnionSplit:
    if draw(st.booleans()):
        return draw(example_splits())
    return UnionSplit(
        "train", draw(st.lists(example_splits(), min_size=1, max_size=4)), draw(st.integers(0, 3))
    )


def pairs(batch: Examples) -> list[tuple[float, int]]:
    return [
        (round(x), y) for x, y in zip(batch.x.flatten().tolist(), batch.y.tolist(), strict=True)
    ]


def joined(batches: list[Examples]) -> list[tuple[float, int]]:
    return [pair for batch in batches for pair in pairs(batch)]


@settings(max_examples=60, deadline=None)
@given(splits(), st.integers(0, 3))
def test_an_epoch_visits_every_example_once(split, epoch) -> None:
    batch = split.batch(epoch * split.windows, split.windows)
    assert (batch.x.dtype, batch.x.shape) == (torch.float32, (split.windows, 1, 1, 1))
    assert (batch.y.dtype, len(batch)) == (torch.int64, split.windows)
    assert sorted(pairs(batch)) == sorted(pairs(split.take(np.arange(split.windows))))
    assert all(x % 3 == y for x, y in pairs(batch))  # a label stays with its input
    assert (split.context, len(split)) == (1, split.windows)


@settings(max_examples=60, deadline=None)
@given(splits(), st.integers(0, 100), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_the_walk_does_not_depend_on_how_it_is_cut(split, start, sizes) -> None:
    whole = split.batch(start, sum(sizes))
    starts = np.cumsum([start, *sizes])
    assert joined(
        [split.batch(int(at), size) for at, size in zip(starts, sizes, strict=False)]
    ) == pairs(whole)
    assert joined(whole.split(3)) == pairs(whole)


@settings(max_examples=60, deadline=None)
@given(splits(), st.integers(1, 9))
def test_scoring_gives_every_example_once_in_order(split, rows) -> None:
    batches = list(split.scoring(rows))
    assert all(len(batch) <= rows for batch in batches)
    assert joined(batches) == pairs(split.take(np.arange(split.windows)))


def test_one_example_is_a_split() -> None:
    split = ExampleSplit(
        "train",
        np.full((1, 1, 2, 2), 51, np.uint8),
        np.array([2]),
        np.array([0]),
        0,
        (0.1,),
        (0.5,),
        3,
    )
    batch = split.batch(0, 4)
    torch.testing.assert_close(batch.x, torch.full((4, 1, 2, 2), 0.2))
    assert batch.y.tolist() == [2] * 4


def test_inputs_are_normalised_by_channel_and_left_alone() -> None:
    inputs = np.random.default_rng(0).integers(0, 256, (5, 3, 2, 2), np.uint8)
    inputs.flags.writeable = False
    split = ExampleSplit(
        "test",
        inputs,
        np.zeros(5, np.int64),
        np.array([3, 1]),
        0,
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
        1,
    )
    mean, std = (np.array(values)[:, None, None] for values in (split.mean, split.std))
    expected = torch.from_numpy((inputs[[3, 1]] / 255 - mean) / std).float()
    torch.testing.assert_close(next(split.scoring(2)).x, expected)
    floats = ExampleSplit(
        "test",
        (inputs / 255).astype(np.float32),
        split.labels,
        split.rows,
        0,
        split.mean,
        split.std,
        1,
    )
    for _ in range(2):  # the arrays are not written to
        torch.testing.assert_close(next(floats.scoring(2)).x, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": np.array([], np.int64)}, "valid: no examples"),
        ({"rows": np.array([0, 5])}, "valid: rows 0 to 5 of 5"),
        ({"labels": np.array([0, 1, 2, 3, 0])}, "valid: label 3 of 3 classes"),
        ({"labels": np.array([0, -1, 2, 0, 0])}, "valid: label -1 of 3 classes"),
        ({"labels": np.zeros(4, np.int64)}, "4 labels"),
        ({"inputs": np.zeros((5, 1, 2, 2))}, "float64"),
        ({"inputs": np.zeros((5, 4), np.float32)}, r"float32\[5, 4\]"),
        (
            {"inputs": np.full((5, 1, 2, 2), np.nan, np.float32)},
            "input 0 has values that are not finite",
        ),
        ({"mean": (0.0, 0.0)}, "of 1 channels"),
        ({"std": (0.0,)}, "positive std"),
    ],
)
def test_splits_that_cannot_be_are_refused(change, message) -> None:
    given = {
        "inputs": np.zeros((5, 1, 2, 2), np.float32),
        "labels": np.zeros(5, np.int64),
        "rows": np.arange(5),
    }
    with pytest.raises(DataError, match=message):
        ExampleSplit(
            **(
                {"name": "valid", "seed": 0, "mean": (0.0,), "std": (1.0,), "classes": 3}
                | given
                | change
            )
        )


def test_what_another_client_holds_does_not_matter() -> None:
    inputs = np.stack([np.zeros((1, 2, 2)), np.full((1, 2, 2), np.nan)]).astype(np.float32)
    ExampleSplit("train", inputs, np.array([0, 7]), np.array([0]), 0, (0.0,), (1.0,), 3)


def test_token_ids_are_taken_as_they_are() -> None:
    inputs = np.array([[7, 8, -1], [5, -1, -1], [9, 9, 9]])
    split = ExampleSplit("train", inputs, np.array([0, 1, 2]), np.array([2, 0]), 0, (), (), 3)
    batch = split.take(np.array([0, 1, 0]))
    assert batch.x.tolist() == [[9, 9, 9], [7, 8, -1], [9, 9, 9]]
    assert (batch.x.dtype, batch.y.tolist()) == (torch.int64, [2, 0, 2])
    batch.x.zero_()  # the arrays are not written to
    assert split.take(np.array([0])).x.tolist() == [[9, 9, 9]]
    with pytest.raises(DataError, match="input 1 has no tokens"):
        ExampleSplit(
            "train", np.array([[7], [-1]]), np.zeros(2, np.int64), np.arange(2), 0, (), (), 3
        )
    with pytest.raises(DataError, match="of 0 channels"):
        ExampleSplit("train", inputs, np.arange(3), np.arange(3), 0, (0.0,), (1.0,), 3)
    with pytest.raises(DataError, match=r"int64\[2, 1, 1, 1\]"):
        ExampleSplit(
            "train",
            np.zeros((2, 1, 1, 1), np.int64),
            np.zeros(2, np.int64),
            np.arange(2),
            0,
            (0.0,),
            (1.0,),
            3,
        )


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_embeddings_follow_their_examples(data) -> None:
    parts = data.draw(st.lists(example_splits(), min_size=1, max_size=3))
    with_own = [
        part.embedded(
            torch.stack([part.take(np.arange(part.windows)).x.flatten() + k for k in (0, 5)], dim=1)
        )
        for part in parts
    ]
    split = UnionSplit("train", with_own, 3) if data.draw(st.booleans()) else with_own[0]
    start, size, rows = (
        data.draw(st.integers(0, 40)),
        data.draw(st.integers(1, 20)),
        data.draw(st.integers(1, 7)),
    )
    whole = split.reordered("again").batch(start, size)
    for batch in [whole, *whole.split(rows), *split.scoring(rows)]:
        assert torch.equal(batch.embedding, batch.x.flatten()[:, None] + torch.tensor([0, 5]))
    assert sum(len(batch) for batch in whole.split(rows)) == size
    assert all(
        part.batch(0, 3).embedding is None for part in parts
    )  # the split that was there is left alone


@pytest.mark.parametrize(
    ("embeddings", "message"),
    [
        (torch.zeros(2, 4), r"valid: embeddings are \[2, 4\] for 3 examples"),
        (torch.zeros(3), r"embeddings are \[3\]"),
        (
            torch.tensor([[0.0], [1.0], [float("inf")]]),
            "the embedding of example 2 has values that are not finite",
        ),
    ],
)
def test_embeddings_that_do_not_belong_are_refused(embeddings, message) -> None:
    split = ExampleSplit(
        "valid",
        np.zeros((5, 1, 1, 1), np.uint8),
        np.zeros(5, np.int64),
        np.arange(3),
        0,
        (0.0,),
        (1.0,),
        1,
    )
    with pytest.raises(DataError, match=message):
        split.embedded(embeddings)


# Partitions


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(0, 3))
def test_permuted_clusters_share_all_images_out(sizes, seed) -> None:
    federation = Digits(cluster_sizes=tuple(sizes), seed=seed).load()
    images = Digits(seed=seed).images(Path())
    shares = held(federation)
    assert list(shares) == [f"c{k}-{i}" for k, size in enumerate(sizes) for i in range(size)]
    for k, cluster in enumerate(members(federation)):
        assert len(cluster) == sizes[k]
        found = [row for id in cluster for row in shares[id]]
        assert sorted(found) == list(range(len(images.train)))
    assert all(
        rows == set(range(len(images.test))) for rows in rows_of(federation, "test").values()
    )


def test_the_labels_of_a_cluster_are_permuted_alike_and_those_of_clusters_differently() -> None:
    federation = Digits(clusters=5, clients_per_cluster=2).load()
    known = [[calls(federation, id) for id in cluster] for cluster in members(federation)]
    assert known[0][0] == list(range(10))
    assert all(a == b for a, b in known)
    assert len({tuple(a) for a, _ in known}) == 5
    assert all(sorted(a) == list(range(10)) for a, _ in known)
    truth = Digits().images(Path()).test_labels
    for id, client in federation.clients.items():
        assert client.test.labels.tolist() == np.array(calls(federation, id))[truth].tolist()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=10), st.integers(0, 3))
def test_disjoint_classes_are_shared_out_within_their_cluster(sizes, seed) -> None:
    federation = Digits(partition="disjoint-classes", cluster_sizes=tuple(sizes), seed=seed).load()
    images, shares, tests = (
        Digits(seed=seed).images(Path()),
        held(federation),
        rows_of(federation, "test"),
    )
    assert sorted(row for rows in shares.values() for row in rows) == list(range(len(images.train)))
    classes = [
        {images.train_labels[row] for id in cluster for row in shares[id]}
        for cluster in members(federation)
    ]
    assert sum(map(len, classes)) == len(set().union(*classes)) == 10
    assert max(map(len, classes)) - min(map(len, classes)) <= 1
    for cluster, own in zip(members(federation), classes, strict=True):
        counts = [len(shares[id]) for id in cluster]
        assert max(counts) - min(counts) <= 1
        assert all(
            tests[id] == set(np.flatnonzero(np.isin(images.test_labels, list(own))))
            for id in cluster
        )
    assert all(
        np.array_equal(client.train.labels, images.train_labels)
        for client in federation.clients.values()
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["iid", "dirichlet", "quantity"]),
    st.integers(1, 12),
    st.integers(1, 4),
    st.floats(0.3, 10),
    st.integers(0, 3),
)
def test_the_other_partitions_share_out_disjointly(
    partition, clients, classes, alpha, seed
) -> None:
    section = Digits(
        partition=partition, clients=clients, classes_per_client=classes, alpha=alpha, seed=seed
    )
    images = section.images(Path())
    federation = section.load()
    shares, tests = held(federation), rows_of(federation, "test")
    rows = [row for own in shares.values() for row in own]
    assert federation.clusters is None
    assert list(shares) == [f"client-{i:02}" for i in range(clients)]
    assert len(set(rows)) == len(rows)
    if partition == "iid":
        assert len(rows) == len(images.train)
        assert all(own == set(range(len(images.test))) for own in tests.values())
    if partition == "dirichlet":
        assert len(rows) == len(images.train)
        assert sorted(row for own in tests.values() for row in own) == list(range(len(images.test)))
    if partition == "quantity":
        own = {id: set(images.train_labels[list(share)]) for id, share in shares.items()}
        assert all(len(names) == classes for names in own.values())
        assert all(set(images.test_labels[list(tests[id])]) == own[id] for id in own)
        held_by = np.bincount([label for names in own.values() for label in names], minlength=10)
        assert held_by.max() - held_by.min() <= 1
        assert len(rows) == np.isin(images.train_labels, np.flatnonzero(held_by)).sum()


def test_a_small_alpha_makes_clients_unlike() -> None:
    def skew(alpha: float) -> float:
        federation = Digits(partition="dirichlet", clients=5, alpha=alpha).load()
        counts = [
            np.bincount(c.train.labels[c.train.rows], minlength=10)
            for c in federation.clients.values()
        ]
        return float(np.mean([count.max() / count.sum() for count in counts]))

    assert skew(0.3) > 1.5 * skew(100)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 6), st.floats(0.02, 1), st.floats(0.01, 0.9))
def test_fractions_and_validation(clusters, clients, fraction, valid_fraction) -> None:
    assume(fraction * clients <= 1)
    section = Digits(
        clusters=clusters,
        clients_per_cluster=clients,
        fraction=fraction,
        valid_fraction=valid_fraction,
    )
    federation = section.load()
    total, shares = len(section.images(Path()).train), held(federation)
    for cluster in members(federation):
        assert len(set().union(*(shares[id] for id in cluster))) == sum(
            len(shares[id]) for id in cluster
        )
    for id, client in federation.clients.items():
        assert len(shares[id]) == int(fraction * total + 1e-9)
        assert len(client.valid) == max(1, round(valid_fraction * len(shares[id])))


def test_images_per_client_are_those_it_trains_on() -> None:
    federation = Digits(per_client=40, test_examples=100).load()
    sizes = {tuple(len(split) for split in client.splits) for client in federation.clients.values()}
    assert sizes == {(40, 4, 100)}
    shares, tests = held(federation), rows_of(federation, "test")
    assert all(
        not shares[a] & shares[b] for cluster in members(federation) for a, b in pairwise(cluster)
    )
    assert (
        len({frozenset(rows) for rows in tests.values()}) == 1
    )  # the same images, under each cluster's names
    assert {
        tuple(len(split) for split in c.splits)
        for c in Digits(per_client=1).load().clients.values()
    } == {(1, 1, 599)}


@pytest.mark.parametrize(
    "partition", ["permuted-clusters", "disjoint-classes", "iid", "dirichlet", "quantity"]
)
def test_the_seed_decides_whose_images_are_which_and_the_runs_seed_their_order(partition) -> None:
    def told(seed: int, order: int) -> list:
        federation = Digits(
            partition=partition, seed=seed, clients=4, test_examples=50, alpha=1.0
        ).load(order_seed=order)
        splits = [split for client in federation.clients.values() for split in client.splits]
        return [[split.rows.tolist(), split.labels.tolist()] for split in splits]

    assert told(0, 0) == told(0, 1) != told(1, 0)
    first, again, other = (
        Digits(partition=partition).load(order_seed=order).clients for order in (0, 0, 1)
    )
    for id in first:
        assert torch.equal(first[id].train.batch(0, 9).x, again[id].train.batch(0, 9).x)
        assert not torch.equal(first[id].train.batch(0, 9).x, other[id].train.batch(0, 9).x)
    ids = list(first)
    assert not torch.equal(first[ids[0]].train.batch(0, 9).x, first[ids[1]].train.batch(0, 9).x)


def test_clients_share_their_memory() -> None:
    federation = Digits(clusters=3, clients_per_cluster=3).load()
    clients = list(federation.clients.values())
    assert (
        len({id(split.inputs) for client in clients for split in (client.train, client.valid)}) == 1
    )
    assert len({id(client.test.inputs) for client in clients}) == 1
    assert len({id(client.train.labels) for client in clients}) == 3


def test_digits_are_a_third_for_testing_and_normalised() -> None:
    images = Digits().images(Path())
    assert (len(images.train), len(images.test)) == (1198, 599)
    shares = np.bincount(images.test_labels) / (
        np.bincount(images.train_labels) + np.bincount(images.test_labels)
    )
    assert np.allclose(shares, 1 / 3, atol=0.003)
    everything = np.concatenate([images.train, images.test])
    assert everything.shape == (1797, *Digits.shape)
    assert np.allclose(
        [everything.mean(), everything.std()], [*Digits.mean, *Digits.std], atol=1e-4
    )
    assert Digits().load().description == "digits, permuted-clusters: 8 clients"


def test_the_pool_is_the_union_under_each_clients_names() -> None:
    federation = Digits(clusters=2, per_client=5, test_examples=7).load()
    pool = federation.centralized()
    assert (pool.id, len(pool.train), len(pool.valid), len(pool.test)) == (CENTRALIZED, 20, 4, 28)
    found = [
        (x.numpy().tobytes(), int(y))
        for batch in pool.train.scoring(3)
        for x, y in zip(batch.x, batch.y, strict=True)
    ]
    walked = pool.train.batch(0, 20)
    assert sorted(found) == sorted(
        (x.numpy().tobytes(), int(y)) for x, y in zip(walked.x, walked.y, strict=True)
    )
    assert federation.clients["c0-0"].train.windows == 5


# Refusals


def test_all_that_cannot_be_is_refused_at_once() -> None:
    message = refusal(Digits(clients_per_cluster=3, fraction=0.5, per_client=40))
    assert "3 clients with 0.5 of the images each" in message
    assert "at most 0.3333" in message
    assert "both fix how much" in message


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Digits(partition="disjoint-classes", clusters=11), "11 clusters for 10 classes"),
        (Digits(partition="quantity", classes_per_client=11), "11 of 10 classes"),
        (Digits(partition="quantity", fraction=0.1), "data.fraction: quantity decides"),
        (Digits(partition="dirichlet", per_client=3), "data.per_client: dirichlet decides"),
        (Digits(partition="dirichlet", clients=60, alpha=0.01), "Use a larger data.alpha"),
        (
            Digits(partition="iid", clients=1000),
            "client 'client-999': 1 training images in its share, 2 needed",
        ),
        (
            Digits(per_client=595),
            "client 'c3-1': 599 training images in its share, 655 needed with 60 for validation",
        ),
        (Digits(fraction=0.0001), "client 'c0-0': 0 training images in its share"),
    ],
)
def test_partitions_that_cannot_be_are_refused(section, message) -> None:
    assert message in refusal(section)


@pytest.mark.parametrize(
    "given",
    [
        {"clusters": 0},
        {"cluster_sizes": []},
        {"cluster_sizes": [1, 0]},
        {"alpha": float("inf")},
        {"alpha": 0},
        {"fraction": 1.5},
        {"valid_fraction": 0},
        {"partition": "random"},
        {"root": "here"},
        {"test_examples": 0},
    ],
)
def test_sections_that_are_refused(given) -> None:
    with pytest.raises(ValidationError):
        Digits.model_validate(given)


@pytest.mark.parametrize("section", [Digits, Cifar10, Cifar100, Mnist, Emnist])
def test_a_section_is_what_its_own_values_say(section) -> None:
    assert section.model_validate(section().model_dump(mode="json")) == section()


# Parquet


def encoded(pixels: np.ndarray) -> dict:
    data = BytesIO()
    Image.fromarray(pixels).save(data, "png")
    return {"bytes": data.getvalue(), "path": None}


def pictures(section: type[Images], count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *section.shape), np.uint8)


def write(
    section: type[Images], folder: Path, labels: list | None = None, change=lambda rows: rows
) -> dict[str, np.ndarray]:
    """Parquet files as the Hub has them."""
    column, label = section.columns
    features = datasets.Features({column: datasets.Image(), label: datasets.Value("int64")})
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for seed, (name, count) in enumerate({"train": 20, "test": 6}.items()):
        made[name] = pictures(section, count, seed)
        rows = change([encoded(np.squeeze(np.moveaxis(image, 0, 2))) for image in made[name]])
        table = pa.table(
            {column: rows, label: labels or [i % section.classes for i in range(count)]}
        )
        schema = features.arrow_schema
        parquet.write_table(
            table.cast(pa.schema(schema)).replace_schema_metadata(schema.metadata),
            folder / f"{name}.parquet",
        )
    return made


@pytest.mark.parametrize("section", [Cifar10, Cifar100, Mnist])
def test_local_parquet_files_are_decoded_once(section, tmp_path) -> None:
    made = write(section, tmp_path / section.folder)
    data = section(root=tmp_path, clusters=2)
    federation = data.load(tmp_path / "cache")
    train = federation.clients["c1-0"].train
    assert np.array_equal(train.inputs, made["train"])
    assert np.array_equal(federation.clients["c1-0"].test.inputs, made["test"])
    assert isinstance(train.inputs, np.memmap)
    assert not train.inputs.flags.writeable
    assert train.batch(0, 3).x.shape == (3, *section.shape)
    (entry,) = (tmp_path / "cache").iterdir()
    stamp = (entry / "train.npy").stat().st_mtime_ns
    section(root=tmp_path, partition="iid", clients=3).load(
        tmp_path / "cache"
    )  # other clients, the same images
    assert (entry / "train.npy").stat().st_mtime_ns == stamp
    (entry / "train.npy").write_bytes((entry / "train.npy").read_bytes()[:-5])
    assert np.array_equal(data.load(tmp_path / "cache").clients["c0-0"].train.inputs, made["train"])
    write(section, tmp_path / section.folder, labels=None, change=lambda rows: rows[::-1])
    assert np.array_equal(
        data.load(tmp_path / "cache").clients["c0-0"].train.inputs, made["train"][::-1]
    )


def test_the_environment_names_the_root(tmp_path, monkeypatch) -> None:
    write(Mnist, tmp_path / "mnist")
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert len(Mnist(partition="iid", clients=2).load().clients) == 2


def test_a_data_set_of_the_hub_is_the_same(tmp_path, monkeypatch) -> None:
    made = write(Cifar100, tmp_path / Cifar100.dataset)
    monkeypatch.chdir(tmp_path)  # a folder of that name stands for the data set on the Hub
    for _ in range(2):
        client = Cifar100(clusters=2).load().clients["c0-1"]
        assert np.array_equal(client.train.inputs, made["train"])
        assert np.array_equal(client.test.inputs, made["test"])


def test_no_network_is_refused_with_what_to_do(monkeypatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    message = refusal(Cifar100())
    assert "cannot load data set uoft-cs/cifar100 from the Hub (offline?)" in message
    assert "--set data.root=DIR" in message


def test_missing_files_are_refused_all_at_once(tmp_path) -> None:
    message = refusal(Cifar10(root=tmp_path))
    assert message.count("does not exist") == 2
    assert "Name the folder that has cifar10/train.parquet, cifar10/test.parquet" in message


@pytest.mark.parametrize(
    ("labels", "change", "message"),
    [
        ([10], None, "label 10, expected 0 to 9"),
        ([None], None, "label None"),
        (
            None,
            lambda rows: [{"bytes": b"nonsense", "path": None}, *rows[1:]],
            "row 0 is not an image of 1 x 28 x 28",
        ),
        (
            None,
            lambda rows: [*rows[:-1], {"bytes": None, "path": "a.png"}],
            "is not an image of 1 x 28 x 28",
        ),
        (
            None,
            lambda rows: [encoded(np.zeros((28, 27), np.uint8)), *rows[1:]],
            "row 0 is not an image of 1 x 28 x 28",
        ),
        (
            None,
            lambda rows: [encoded(np.zeros((1, 1), np.uint8)), *rows[1:]],
            "row 0 is not an image of 1 x 28 x 28",
        ),
    ],
)
def test_rows_that_are_damaged_are_refused(labels, change, message, tmp_path) -> None:
    if labels:
        folder = tmp_path / "mnist"
        write(Mnist, folder)
        for name in NAMES[::2]:
            table = parquet.read_table(folder / f"{name}.parquet")
            found = labels + table.column("label").to_pylist()[1:]
            parquet.write_table(
                table.set_column(1, "label", pa.array(found, pa.int64())),
                folder / f"{name}.parquet",
            )
    else:
        write(Mnist, tmp_path / "mnist", change=change)
    assert message in refusal(Mnist(root=tmp_path))
    assert not list(tmp_path.glob("cache/*"))


def test_files_that_are_not_parquet_or_lack_a_column_are_refused(tmp_path) -> None:
    write(Mnist, tmp_path / "mnist")
    parquet.write_table(pa.table({"image": [1]}), tmp_path / "mnist/test.parquet")
    assert "no column 'label'" in refusal(Mnist(root=tmp_path))
    (tmp_path / "mnist/train.parquet").write_text("nonsense")
    assert "train.parquet: cannot be read" in refusal(Mnist(root=tmp_path))


def test_the_papers_federations(data_root, tmp_path) -> None:
    silo = Cifar100(root=data_root).load(tmp_path)
    assert (len(silo.clients), len(members(silo))) == (8, 4)
    assert {tuple(len(split) for split in client.splits) for client in silo.clients.values()} == {
        (6750, 750, 5000)
    }
    device = Cifar100(
        root=data_root, partition="disjoint-classes", cluster_sizes=(6, 6, 7, 7, 8, 8, 9, 9, 10, 10)
    ).load(tmp_path)
    assert [len(cluster) for cluster in members(device)] == [6, 6, 7, 7, 8, 8, 9, 9, 10, 10]
    assert all(len(client.test) == 500 for client in device.clients.values())


def write_idx(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """EMNIST's files as NIST has them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = {}
    for seed, (name, count) in enumerate({"train": 70, "test": 65}.items()):
        made[name] = (pictures(Emnist, count, seed)[:, 0], (np.arange(count) % 62).astype(np.uint8))
        for array, part in zip(made[name], ("images-idx3", "labels-idx1"), strict=True):
            head = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
            (folder / f"emnist-byclass-{name}-{part}-ubyte.gz").write_bytes(
                gzip.compress(head + array.tobytes())
            )
    return made


def test_emnist_stands_upright(tmp_path, monkeypatch) -> None:
    made = write_idx(tmp_path / "emnist")
    client = (
        Emnist(root=tmp_path, partition="iid", clients=1)
        .load(tmp_path / "cache")
        .clients["client-00"]
    )
    for split, name in zip(client.splits, ("train", "train", "test"), strict=True):
        assert np.array_equal(split.inputs, made[name][0].transpose(0, 2, 1)[:, None])
        assert np.array_equal(split.labels, made[name][1])
    assert isinstance(client.train.inputs, np.memmap)

    def local(dataset: str, file: str, repo_type: str) -> str:
        assert (dataset, repo_type) == ("Royc30ne/emnist-byclass", "dataset")
        return str(tmp_path / "emnist" / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", local)
    again = Emnist(partition="iid", clients=1).load(tmp_path / "other").clients["client-00"]
    assert np.array_equal(again.test.inputs, client.test.inputs)


def test_files_of_emnist_that_are_missing_or_damaged_are_refused(tmp_path, monkeypatch) -> None:
    assert refusal(Emnist(root=tmp_path)).count("does not exist") == 4
    write_idx(tmp_path / "emnist")
    (file,) = (tmp_path / "emnist").glob("*test-labels*")
    whole = file.read_bytes()
    for broken in (
        whole[:-9],
        b"nonsense",
        gzip.compress(b""),
        gzip.compress(gzip.decompress(whole)[:-1]),
    ):
        file.write_bytes(broken)
        assert f"{file} cannot be read" in refusal(Emnist(root=tmp_path))
    file.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 1, 5])))
    assert "EMNIST, test: images of shape [65, 28, 28] with labels of shape [1]" in refusal(
        Emnist(root=tmp_path)
    )

    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", unreachable)
    assert "of data set Royc30ne/emnist-byclass from the Hub (offline?): no route" in refusal(
        Emnist()
    )
