"""Clients on separate devices: checks of their reports, preparation of a server without data."""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace

from coterie.core.errors import RecipeError, Refused
from coterie.data.federation import ClientData, Federation, check_id
from coterie.data.splits import SPLITS, RemoteSplit
from coterie.engines.messages import Member
from coterie.runs.problems import loading
from coterie.runs.problems.prepare import Prepared, assembled
from coterie.runs.recipes.recipe import Recipe

_MOST_CLIENTS, _MOST_WINDOWS = 1 << 20, 1 << 40  # upper bounds on a device's claim
_MOST_SAID = 1000  # characters of what is wrong with what a device says


def check_member(recipe: Recipe, member: Member) -> None:
    """Refuse impossible values in a device's report of its client. Raises Refused by field."""
    check_id(member.client)
    known = recipe.data.client_info(member.client)
    if known is None:
        remedy = "Check that it is the same recipe and that --client names one of its clients."
        raise Refused(f"client: the recipe's data have no client {member.client!r}", remedy)
    exact = {"group": known.group, "cluster": known.cluster, "anchor": known.anchor}
    if known.position is not None:
        exact["position"] = known.position
    given = {field: getattr(member, field) for field in exact}
    wrong = [f"{f} {given[f]!r}, expected {v!r}" for f, v in exact.items() if given[f] != v]
    if member.position >= _MOST_CLIENTS:
        wrong.append(f"position {member.position}, expected below {_MOST_CLIENTS:,}")
    wrong += [
        f"windows {windows} of {split}, expected 1 to {_MOST_WINDOWS:,}"
        for split, windows in zip(SPLITS, member.windows, strict=True)
        if not 1 <= windows <= _MOST_WINDOWS
    ]
    if problem := _labels_problem(member.labels, known.classes):
        wrong.append(f"labels: {problem}")
    if wrong:
        raise Refused(
            f"reports impossible values for {member.client}: {'; '.join(wrong)}"[:_MOST_SAID], ""
        )


def _labels_problem(labels: tuple[int, ...] | None, classes: int | None) -> str:
    """Return the problem of a client's declared classes; "" if there is none."""
    if classes is None:
        return "" if labels is None else "some, but the data have none"
    if labels is None:
        return "none, but the data have them"
    if not labels or list(labels) != sorted(set(labels)) or labels[-1] >= classes:
        return f"{len(labels)} of them, expected numbers from 0 to {classes - 1} in ascending order"
    return ""


def prepare_remote(recipe: Recipe, members: Sequence[Member]) -> Prepared:
    """Return what a server has: the recipe, the clients, and the shapes of their models. Raises
    Refused if they do not fit, or the method needs all data in one place.
    """
    federation = federated(members)
    if recipe.audit is not None:
        problem = "audit: clients are on separate devices, where the server cannot plant canaries"
        raise RecipeError(
            f"recipe {recipe.name}",
            [f"{problem}; run it where all data are on one machine, or leave audit out"],
        )
    if recipe.build_method().centralized:
        problem = f"method.name: {recipe.method['name']} needs the data of all clients in one place"
        raise RecipeError(f"recipe {recipe.name}", [f"{problem}; use engine: inprocess"])
    return assembled(recipe, loading.distant(recipe, federation))


def federated(members: Sequence[Member]) -> Federation:
    """Return the federation of clients with data elsewhere, ordered by position and id. Raises
    Refused if none of them trains, or one has a reserved name.
    """
    for member in members:
        check_id(member.client)
    ordered = sorted(members, key=lambda m: (m.position, m.client))
    data = {m.client: ClientData(m.client, *map(RemoteSplit, SPLITS, m.windows)) for m in ordered}
    training = [m for m in ordered if not m.group]
    if not training:
        remedy = "Start devices of clients that are not held out by the recipe's data."
        raise Refused(f"none of {len(members)} clients trains", remedy)
    clusters = {m.client: m.cluster for m in training if m.cluster is not None}
    anchors = sorted((m for m in ordered if m.anchor is not None), key=lambda m: m.anchor or 0)
    groups = dict.fromkeys(m.group for m in ordered if m.group)
    return Federation(
        {m.client: data[m.client] for m in training},
        f"{len(ordered)} clients on separate devices",
        clusters=clusters if len(clusters) == len(training) else None,
        anchors=tuple(m.client for m in anchors),
        labels={m.client: m.labels for m in ordered if m.labels is not None},
        unseen={g: {m.client: data[m.client] for m in ordered if m.group == g} for g in groups},
        open=True,
    )


def joined(prepared: Prepared, member: Member) -> Prepared:
    """Return the same with a last client. Raises Refused if it is held out, or comes too late."""
    name, problem = prepared.recipe.method["name"], copy(prepared.problem)
    if not prepared.method.dynamic_membership:
        raise Refused(
            f"joined after the run began, but {name} needs all clients from the start", ""
        )
    if member.group:
        raise Refused(
            f"joined after the run began, but is held out (group {member.group}): such clients are "
            f"scored from the start or not at all",
            "",
        )
    more, federation, clusters = federated([member]), problem.federation, None
    if federation.clusters is not None and more.clusters is not None:
        clusters = {**federation.clusters, **more.clusters}
    clients = {**federation.clients, **more.clients}
    problem.federation = replace(
        federation, clients=clients, clusters=clusters, labels={**federation.labels, **more.labels}
    )
    return assembled(prepared.recipe, problem)
