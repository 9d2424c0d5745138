"""What falls to anchors, to other clients, to clients that are never trained with, and to the
public.
"""

from fractions import Fraction
from itertools import combinations
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.core.errors import DataError
from coterie.data.federation import ClientData, Federation
from coterie.data.images import Digits
from coterie.data.partition import Labelled, Partitioner


class Toy(Partitioner):
    """As many training examples of each class as asked for, and test examples; an input is its
    own number.
    """

    counts: tuple[int, ...] = (60,) * 10
    tests: tuple[int, ...] | None = None
    wrong: int | None = None  # a label of the first example

    name: ClassVar[str] = "toy"
    things: ClassVar[str] = "toys"
    mean: ClassVar[tuple[float, ...]] = (0.0,)
    std: ClassVar[tuple[float, ...]] = (1.0,)

    @property
    def classes(self) -> int:
        return len(self.counts)

    def read(self) -> Labelled:
        train, test = (
            np.repeat(np.arange(self.classes), of)
            for of in (self.counts, self.tests or (5,) * self.classes)
        )
        if self.wrong is not None:
            train[0] = self.wrong
        inputs = np.arange(len(train) + len(test), dtype=np.float32)[:, None, None, None]
        shuffled = np.random.default_rng(0).permutation(len(train))
        return Labelled(inputs[: len(train)][shuffled], train[shuffled], inputs[len(train) :], test)

    def load(self, order_seed: int = 0) -> Federation:
        return self.federated(self.read, order_seed)


def held(client: ClientData) -> list[int]:
    """Rows for training and validation, none of which is there twice."""
    rows = [*client.train.rows.tolist(), *client.valid.rows.tolist()]
    assert len(set(rows)) == len(rows)
    return rows


def told(federation: Federation) -> dict[str, list]:
    """Everything about everybody but the order of their walks."""
    return {
        id: [
            federation.labels[id],
            *((split.rows.tolist(), split.labels.tolist()) for split in client.splits),
        ]
        for id, client in federation.everyone.items()
    }


def check(section: Toy) -> Federation:
    """What must hold whatever the section is, in words of the data set alone."""
    federation, source = section.load(), section.read()
    public = set(federation.public.rows.tolist()) if federation.public else set()
    assert len(public) == section.public
    assert (
        federation.anchors
        == tuple(federation.clients)[: section.anchors]
        == tuple(f"anchor-{q}" for q in range(section.anchors))
    )
    assert list(federation.labels) == list(federation.everyone)
    assert {group: len(members) for group, members in federation.unseen.items()} == section.unseen
    for id, client in federation.everyone.items():
        rows, labels = held(client), federation.labels[id]
        assert labels == tuple(sorted(set(labels)))
        assert not public & set(rows)
        assert np.array_equal(client.train.rows, np.sort(client.train.rows))
        if section.partition in ("quantity", "disjoint-classes"):
            assert set(source.train_labels[rows]) <= set(labels)
            assert client.test.rows.tolist() == [
                row for row, label in enumerate(source.test_labels) if label in labels
            ]
    by_themselves = section.partition == "dirichlet"  # its anchors
    for members in (federation.anchors, [*federation.clients][section.anchors :]):
        chosen = members if by_themselves else federation.clients
        everything = [row for id in chosen for row in held(federation.clients[id])]
        assert section.replacement or len(set(everything)) == len(everything)
    sets = {federation.labels[id] for id in federation.clients}
    for members in federation.unseen.values():
        new = [federation.labels[id] for id in members]
        assert len(set(new)) == len(new)
        assert not sets & set(new)
    return federation


def refusal(section: Partitioner) -> str:
    with pytest.raises(DataError) as error:
        section.load()
    assert error.value.remedy
    return str(error.value)


# Quantity


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_quantity_deals_anchors_others_unseen_and_public(data) -> None:
    classes = data.draw(st.integers(5, 12))
    anchors = data.draw(st.integers(2, classes // 2))
    replacement = data.draw(st.booleans())
    section = Toy(
        partition="quantity",
        counts=tuple(data.draw(st.lists(st.integers(60, 90), min_size=classes, max_size=classes))),
        clients=data.draw(st.integers(1, 15)),
        classes_per_client=data.draw(st.integers(2, 4)),
        replacement=replacement,
        per_client=data.draw(st.integers(1, 30)) if replacement else None,
        anchors=anchors,
        anchor_classes=data.draw(st.none() | st.integers(1, classes // anchors)),
        unseen={"aligned": 1},
        public=data.draw(st.integers(0, 60)),
        seed=data.draw(st.integers(0, 3)),
    )
    federation = check(section)
    groups = [federation.labels[id] for id in federation.anchors]
    assert {len(group) for group in groups} == {section.anchor_classes or classes // anchors}
    assert len({label for group in groups for label in group}) == sum(map(len, groups))
    others = [federation.labels[id] for id in federation.clients if id not in federation.anchors]
    assert {len(labels) for labels in others} == {section.classes_per_client}
    (new,) = (federation.labels[id] for id in federation.unseen["aligned"])
    assert new in {tuple(sorted(a + b)) for a, b in combinations(groups, 2)}
    if replacement:
        valid = max(1, round(0.1 * section.per_client))
        assert {(len(c.train), len(c.valid)) for c in federation.everyone.values()} == {
            (section.per_client, valid)
        }


def test_with_replacement_many_have_the_same_example() -> None:
    federation = check(
        Toy(partition="quantity", clients=40, replacement=True, per_client=60, counts=(50,) * 10)
    )
    rows = [row for client in federation.clients.values() for row in held(client)]
    assert len(rows) == 40 * 66
    assert len(set(rows)) > 450
    same = next(
        (a, b)
        for a, b in combinations(federation.clients, 2)
        if federation.labels[a] == federation.labels[b]
    )
    assert held(federation.clients[same[0]]) != held(federation.clients[same[1]])


@pytest.mark.parametrize("seed", range(3))
def test_the_papers_aligned_clients_all_find_a_label_set(seed) -> None:
    section = Toy(
        partition="quantity",
        clients=100,
        classes_per_client=4,
        replacement=True,
        per_client=20,
        anchors=5,
        seed=seed,
    )
    federation = check(section.model_copy(update={"unseen": {"aligned": 10, "random": 20}}))
    groups = [federation.labels[id] for id in federation.anchors]
    aligned = {federation.labels[id] for id in federation.unseen["aligned"]}
    assert aligned == {tuple(sorted(a + b)) for a, b in combinations(groups, 2)}
    assert list(federation.unseen["random"])[:2] == ["random-00", "random-01"]
    assert {len(federation.labels[id]) for id in federation.unseen["random"]} == {4}
    had = np.bincount(
        [label for i in federation.clients for label in federation.labels[i]], minlength=10
    )
    assert had.max() - had.min() <= 2  # 40 or so of each, though some sets were kept free
    assert federation.description == "toy, quantity: 105 clients, unseen: 10 aligned, 20 random"


@settings(max_examples=30, deadline=None)
@given(wanted=st.integers(1, 80), per_client=st.integers(1, 40), seed=st.integers(0, 3))
def test_unseen_clients_are_validated_on_what_nobody_trains_on(wanted, per_client, seed) -> None:
    fields = {"clients": 9, "classes_per_client": 4, "anchors": 5, "public": 30, "seed": seed}
    plain = Toy(
        partition="quantity",
        replacement=True,
        per_client=per_client,
        unseen={"aligned": 2, "random": 2},
        **fields,
    )
    section = plain.model_copy(update={"unseen_valid": wanted})
    before, federation, labels = plain.load(), check(section), section.read().train_labels
    trained = {row for c in federation.clients.values() for row in c.train.rows}
    public = set(federation.public.rows)
    for group in federation.unseen.values():
        for id, client in group.items():
            own = set(client.train.rows)
            free = [
                row
                for row, label in enumerate(labels)
                if label in federation.labels[id] and row not in trained | public | own
            ]
            assert set(client.valid.rows) <= set(free)
            assert len(set(client.valid.rows)) == len(client.valid.rows) == min(wanted, len(free))
    for id, client in before.everyone.items():
        assert (client.train.rows == federation.everyone[id].train.rows).all()
        assert (client.test.rows == federation.everyone[id].test.rows).all()


def test_where_others_train_on_everything_nothing_is_left_for_validation() -> None:
    said = refusal(
        Toy(
            partition="quantity",
            counts=(20,) * 10,
            clients=60,
            classes_per_client=4,
            replacement=True,
            per_client=60,
            unseen={"random": 1},
            unseen_valid=5,
        )
    )
    assert "client 'random-00': data.unseen_valid: others train on all" in said


def test_one_example_for_training_is_enough() -> None:
    section = Toy(
        partition="quantity",
        clients=6,
        replacement=True,
        per_client=1,
        anchors=5,
        test_examples=1,
        unseen={"aligned": 2},
    )
    sizes = {
        tuple(len(split) for split in client.splits) for client in section.load().everyone.values()
    }
    assert sizes == {(1, 1, 1)}


def test_unseen_clients_hold_as_much_as_the_smallest_one() -> None:
    federation = check(
        Toy(partition="quantity", clients=9, classes_per_client=3, anchors=3, unseen={"random": 4})
    )
    smallest = min(len(held(client)) for client in federation.clients.values())
    assert {len(held(client)) for client in federation.unseen["random"].values()} == {smallest}


# Disjoint classes


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 2),
    st.integers(1, 4),
    st.sampled_from([{}, {"per_client": 4}, {"fraction": 0.1}]),
    st.data(),
)
def test_anchors_of_disjoint_classes_are_members_of_their_cluster(
    clusters, each, clients, amount, data
) -> None:
    classes = data.draw(st.integers(2 * clusters, 12))
    section = Toy(
        partition="disjoint-classes",
        counts=(60,) * classes,
        clusters=clusters,
        clients_per_cluster=clients,
        anchors=clusters * each,
        **amount,
    )
    federation = check(section)
    own = {
        k: {i for i, cluster in federation.clusters.items() if cluster == k}
        for k in range(clusters)
    }
    for members in own.values():
        anchors = [i for i in federation.anchors if i in members]
        assert len(anchors) == each
        (labels,) = {federation.labels[i] for i in members if i not in anchors}
        groups = [label for i in anchors for label in federation.labels[i]]
        assert set(groups) <= set(labels)
        assert len(set(groups)) == len(groups) == each * (classes // max(clusters * each, 1))
        sizes = {len(held(federation.clients[i])) for i in members}
        if section.fraction:
            assert sizes == {int(0.1 * 60 * len(labels))}
    if not amount and not each:
        assert sum(len(held(client)) for client in federation.clients.values()) == 60 * classes


def test_aligned_clients_of_disjoint_classes_do_without_whole_clusters() -> None:
    section = Toy(
        partition="disjoint-classes",
        clusters=5,
        anchors=10,
        clients_per_cluster=3,
        unseen={"aligned": 40},
    )
    federation = check(section)  # of 45 pairs of anchors, 5 have all classes of a cluster
    assert "41 clients, but only 40 label sets of 2 anchors" in refusal(
        section.model_copy(update={"unseen": {"aligned": 41}})
    )
    assert [federation.clusters[id] for id in federation.anchors] == [q // 2 for q in range(10)]


# Dirichlet


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(1, 6), st.floats(0.3, 3), st.integers(0, 3))
def test_anchors_of_dirichlet_are_drawn_by_themselves(anchors, clients, alpha, seed) -> None:
    section = Toy(
        partition="dirichlet",
        clients=clients,
        anchors=anchors,
        alpha=alpha,
        seed=seed,
        counts=(200,) * 5,
        public=50,
    )
    federation, source = check(section), section.read()
    for members in (federation.anchors, [*federation.clients][anchors:]):
        rows = [row for id in members for row in held(federation.clients[id])]
        assert len(set(rows)) == len(rows) == (950 if members else 0)
    others = [held(federation.clients[id]) for id in [*federation.clients][anchors:]]
    alone = check(section.model_copy(update={"anchors": 0})).clients.values()
    assert all(np.array_equal(a, held(b)) for a, b in zip(others, alone, strict=True))
    for id, client in federation.clients.items():
        own = source.train_labels[held(client)].tolist()
        assert federation.labels[id] == tuple(
            label for label in range(5) if own.count(label) >= 0.1 * len(own)
        )


def test_with_many_classes_and_none_of_a_tenth_the_largest_counts() -> None:
    federation = check(
        Toy(partition="dirichlet", clients=2, alpha=1000.0, counts=(40,) * 19 + (60,))
    )
    assert [federation.labels[id] for id in federation.clients] == [(19,), (19,)]


def test_random_unseen_clients_of_dirichlet_have_whole_classes() -> None:
    federation = check(
        Toy(partition="dirichlet", clients=8, classes_per_client=3, unseen={"random": 5})
    )
    for id, client in federation.unseen["random"].items():
        assert sorted(set(client.test.labels[client.test.rows])) == list(federation.labels[id])
        assert len(client.test) == 15


# The public, and what does not depend on what


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.floats(0, 0.9), st.integers(0, 2))
def test_the_public_examples_are_of_every_class_its_share(counts, share, seed) -> None:
    public = int(share * sum(counts))
    section = Toy(partition="iid", clients=1, counts=(60, *counts), public=public, seed=seed)
    federation, source = check(section), section.read()
    found = (
        np.bincount(source.train_labels[federation.public.rows], minlength=len(section.counts))
        if public
        else [0] * len(section.counts)
    )
    seats = [0] * len(section.counts)
    for _ in range(public):  # Webster's method, seat by seat
        claims = [
            Fraction(count, 2 * had + 1) for count, had in zip(section.counts, seats, strict=True)
        ]
        seats[claims.index(max(claims))] += 1
    assert list(found) == seats
    rest = set(range(len(source.train))) - set(federation.public.rows.tolist() if public else [])
    assert set(held(federation.clients["client-00"])) == rest
    if public:
        assert federation.public.name == "public"


SECTIONS = {
    "quantity": {
        "partition": "quantity",
        "replacement": True,
        "per_client": 9,
        "unseen": {"aligned": 2, "random": 2},
    },
    "shared": {"partition": "quantity", "unseen": {"aligned": 2}},
    "disjoint": {"partition": "disjoint-classes", "clusters": 5, "unseen": {"random": 3}},
    "dirichlet": {"partition": "dirichlet", "clients": 4, "unseen": {"random": 3}},
}


@pytest.mark.parametrize("given", SECTIONS.values(), ids=SECTIONS)
def test_the_seed_decides_everything_but_the_order(given) -> None:
    given = {"anchors": 5, "public": 30, "test_examples": 6, **given}
    first, again, ordered, other = (
        Toy(**given, seed=seed).load(order) for seed, order in ((1, 0), (1, 0), (1, 7), (2, 0))
    )
    assert told(first) == told(again) == told(ordered) != told(other)
    assert first.public.rows.tolist() == ordered.public.rows.tolist() != other.public.rows.tolist()
    assert torch.equal(first.public.batch(0, 9).x, again.public.batch(0, 9).x)
    assert not torch.equal(first.public.batch(0, 9).x, ordered.public.batch(0, 9).x)


def test_the_seed_decides_who_has_which_classes() -> None:
    section = {
        "partition": "quantity",
        "clients": 1,
        "anchors": 5,
        "unseen": {"aligned": 3, "random": 3},
        "classes_per_client": 4,
    }
    first, other = (Toy(**section, seed=seed).load() for seed in range(2))
    for ids in (first.anchors, *first.unseen.values()):
        assert {first.labels[id] for id in ids} != {other.labels[id] for id in ids}
    anchors = [{frozenset(made.labels[id]) for id in made.anchors} for made in (first, other)]
    pairs = [{tuple(sorted(a | b)) for a, b in combinations(groups, 2)} for groups in anchors]
    chosen = [{made.labels[id] for id in made.unseen["aligned"]} for made in (first, other)]
    assert all(own <= of for own, of in zip(chosen, pairs, strict=True))


def test_unseen_clients_change_nothing_for_the_others() -> None:
    section = {"partition": "quantity", "anchors": 5, "classes_per_client": 3, "test_examples": 6}
    alone, joined, more = (
        told(Toy(**section, unseen=unseen).load())
        for unseen in ({}, {"random": 2}, {"random": 5, "aligned": 3})
    )
    assert alone == {id: found for id, found in joined.items() if not id.startswith("random")}
    assert (
        joined.items() <= more.items()
    )  # no label set of three classes is kept free for aligned ones of four


def test_unseen_clients_draw_test_examples_of_their_own() -> None:
    section = Toy(
        partition="disjoint-classes",
        clusters=1,
        anchors=5,
        test_examples=4,
        unseen={"random": 6},
        classes_per_client=9,
    )
    new, labels = section.load(), section.read().test_labels
    own = {id: np.flatnonzero(np.isin(labels, new.labels[id])) for id in new.unseen["random"]}
    places = {
        tuple(np.searchsorted(own[id], client.test.rows))
        for id, client in new.unseen["random"].items()
    }
    assert len(places) == len(own) == 6


def test_digits_are_dealt_so_too() -> None:
    federation = Digits(
        partition="quantity",
        clients=35,
        classes_per_client=4,
        replacement=True,
        per_client=60,
        anchors=5,
        unseen={"aligned": 10, "random": 10},
        public=200,
    ).load()
    assert len(federation.clients) == 40
    assert len(federation.everyone) == 60
    assert len(federation.public) == 200
    assert federation.public.take(np.arange(3)).x.shape == (3, 1, 8, 8)


# Refusals


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"partition": "iid", "replacement": True, "per_client": 3},
            "data.replacement: iid divides toys without replacement",
        ),
        ({"partition": "quantity", "replacement": True}, "Give data.per_client"),
        ({"partition": "quantity", "per_client": 3}, "data.per_client: quantity decides"),
        (
            {"partition": "quantity", "replacement": True, "per_client": 3, "fraction": 0.1},
            "data.fraction: quantity decides",
        ),
        ({"partition": "iid", "anchors": 2}, "data.anchors: iid gives all clients all classes"),
        ({"partition": "permuted-clusters", "anchors": 4}, "data.anchors: permuted-clusters"),
        (
            {"partition": "quantity", "anchors": 5, "anchor_classes": 3},
            "5 anchors with 3 of 10 classes each",
        ),
        ({"partition": "quantity", "anchors": 11}, "11 anchors with 1 of 10 classes each"),
        (
            {"partition": "quantity", "anchor_classes": 3},
            "data.anchor_classes: there are no anchors",
        ),
        (
            {"partition": "dirichlet", "anchors": 2, "anchor_classes": 3},
            "data.anchor_classes: mixtures are drawn",
        ),
        (
            {"partition": "disjoint-classes", "clusters": 4, "anchors": 6},
            "data.anchors: 6 anchors for 4 clusters\n  Use a multiple of 4.",
        ),
        (
            {"partition": "disjoint-classes", "clusters": 5, "anchors": 5, "anchor_classes": 3},
            "with 3 of the 2 classes of a cluster",
        ),
        (
            {"partition": "disjoint-classes", "clusters": 2, "anchors": 2, "fraction": 0.4},
            "3 clients with 0.4 of the toys each",
        ),
        ({"partition": "iid", "unseen": {"random": 1}}, "data.unseen: iid leaves no other classes"),
        (
            {"partition": "dirichlet", "anchors": 3, "unseen": {"aligned": 1}},
            "anchors of dirichlet have no groups",
        ),
        (
            {"partition": "quantity", "anchors": 1, "unseen": {"aligned": 1}},
            "of 2 anchors each, but there are 1",
        ),
        (
            {"partition": "dirichlet", "unseen": {"random": 1}, "classes_per_client": 11},
            "11 of 10 classes",
        ),
        (
            {"partition": "quantity", "anchors": 5, "unseen": {"aligned": 11}},
            "11 clients, but only 10 label sets of 2 anchors' classes",
        ),
        (
            {"partition": "quantity", "classes_per_client": 1, "unseen": {"random": 2}},
            "2 clients, but only 0 label sets of 1 of 10 classes",
        ),
        (
            {
                "partition": "quantity",
                "anchors": 2,
                "classes_per_client": 10,
                "unseen": {"aligned": 1},
            },
            "all label sets of 10 of 10 classes",
        ),
        ({"partition": "iid", "public": 600}, "data.public: 600 of 600 training toys"),
        ({"partition": "quantity", "counts": (30, 0, 30)}, "no training toys of class 1"),
        (
            {"partition": "disjoint-classes", "clusters": 1, "counts": (1, 1, 99), "public": 99},
            "class 0, 1 after 99 are set aside as public",
        ),
        (
            {"partition": "quantity", "counts": (60, 3, 60), "clients": 9},
            "3 training toys of class 1 for 6 clients",
        ),
        (
            {
                "partition": "quantity",
                "counts": (9, 9),
                "clients": 2,
                "replacement": True,
                "per_client": 30,
            },
            "client 'client-00': 18 training",
        ),
        (
            {
                "partition": "quantity",
                "tests": (5, 0, 0, *[5] * 7),
                "clients": 9,
                "classes_per_client": 1,
            },
            "test: no examples",
        ),
        ({"partition": "iid", "wrong": 10}, "toy, train: row "),
        ({"partition": "permuted-clusters", "wrong": -1}, "has label -1 of 10 classes"),
    ],
)
def test_what_cannot_be_is_refused(given, message) -> None:
    assert message in refusal(Toy(**given))


def test_all_mistakes_are_named_at_once() -> None:
    message = refusal(Toy(partition="iid", anchors=3, replacement=True, unseen={"random": 1}))
    assert all(f"data.{field}: " in message for field in ("anchors", "replacement", "unseen"))


@pytest.mark.parametrize(
    "given",
    [
        {"unseen": {"other": 1}},
        {"unseen": {"random": 0}},
        {"public": -1},
        {"anchors": -1},
    ],
)
def test_fields_that_are_refused(given) -> None:
    with pytest.raises(ValidationError):
        Toy.model_validate(given)


def test_an_empty_class_does_not_matter_where_no_classes_are_dealt() -> None:
    federation = check(Toy(partition="iid", clients=2, counts=(30, 0, 30)))
    assert set(federation.labels.values()) == {(0, 1, 2)}


# Federations


def test_a_federation_names_its_anchors_and_knows_everyone() -> None:
    made = Digits(partition="iid", clients=4).load().clients
    ids = list(made)
    new = {"aligned": {ids[2]: made[ids[2]]}, "random": {ids[3]: made[ids[3]]}}
    federation = Federation({id: made[id] for id in ids[:2]}, "four", anchors=(ids[1],), unseen=new)
    assert list(federation.everyone) == ids
    assert federation.centralized().train.windows == sum(len(made[id].train) for id in ids[:2])
    with pytest.raises(DataError) as error:
        Federation(
            {id: made[id] for id in ids[:2]},
            "four",
            anchors=("x", ids[0], ids[0]),
            unseen={**new, "more": {ids[0]: made[ids[0]], "../x": made[ids[3]]}},
        )
    message = str(error.value)
    assert all(
        part in message
        for part in (
            "'client-00' occurs 2 times",
            "'../x' is not valid",
            "anchor 'x' is not a client of the federation",
            "'client-00' is named 2 times",
        )
    )
