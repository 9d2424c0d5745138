"""Refits of a personal model to new text of its owner: of the router, then of the client's own
experts. Nothing is sent.
"""

import shlex
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from coterie import personal
from coterie.adapt.new_client import TRAINED, recipe_of, written
from coterie.adapt.personalisation import Snapshot, descend, perplexity_of, untrained
from coterie.client.client import Client
from coterie.client.site import Site
from coterie.core.checksums import replaced
from coterie.core.errors import Refused
from coterie.core.files import write_json
from coterie.core.metrics import perplexity
from coterie.core.names import normal
from coterie.core.protocol import ClientId
from coterie.core.roles import BACKBONE, ROUTER, Role
from coterie.core.tensors import Tensors, copy
from coterie.data.federation import ClientData
from coterie.methods import Method
from coterie.models.interpolation import PRIOR
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture
from coterie.reports.parts import figure
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.lock import check_apart
from coterie.runs.problems.language import Language
from coterie.runs.problems.own_text import text_of
from coterie.runs.problems.prepare import prepare

FRESH = "fresh"  # the folder of the refitted model, in the client's own
STAGES = ("before", "router", "specialists")
_WORDS = {
    "before": "as it was",
    "router": "router refitted",
    "specialists": "router and own experts refitted",
}
_ROWS = 32  # windows that are scored at once


@dataclass(frozen=True)
class Refitted:
    """The effect of a refit: perplexities per token by stage, one of `STAGES`."""

    client: ClientId
    folder: Path  # of the best model: a new one, or the client's if that stays as it was
    tokens: Mapping[str, int]  # of the new text by split
    base: float  # of the new test text, by the base alone
    valid: Mapping[str, float]  # of the new validation text
    new: Mapping[str, float]  # of the new test text
    old: Mapping[str, float]  # of the test text that the client has in the run; {} without any
    best: str  # the stage with the least perplexity of validation text
    kept: str  # `best` if it is better on the new test text too, or else "before"


def refit(
    run: Path,
    client: ClientId,
    data: Path,
    out: Path | None = None,
    *,
    iterations: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Refitted:
    """Refit the personal model of somebody who trained to new text. The shared part is unchanged.

    At first the router alone descends on the new validation text, and the best iteration is that
    with the lowest perplexity of the training text, from which nothing has learned yet; models that
    are mixed get new weights. Then the client's own experts train on the training text by the local
    iterations of the method, and the best iteration is that of the validation text. What is kept is
    the best stage on validation text, if it is better than before on test text too.

    Args:
        run: The folder of a finished run of language models.
        client: The id of a client with a model in it.
        data: A file or folder of texts, in the format of `data.kind: folders`.
        out: The folder of the refitted model: a new one, or the client's own, which is overwritten
            then. Default: `fresh` in the client's own.
        iterations: The most iterations of a stage; None: as many as a client of the run does.
        say: Called with a line after every evaluation.

    Raises:
        Refused: There is no such model or text, all of the model is shared, or `out` exists.
        SaveError: The model could not be written.
    """
    client, recipe = normal(client), recipe_of(run)
    source = personal.folder_of(run, client)
    folder = out or source / FRESH
    if folder.exists() and folder.resolve() != source.resolve():
        problem = f"{folder} exists already"
        raise Refused(problem, f"Choose another --out; --out {source} overwrites the old model.")
    if recipe.model.kind != "language":
        problem = f"{run} holds classifiers, and --fresh is for language models"
        raise Refused(problem, "Adapt them to new data with --data, as a new client.")
    check_apart(folder, data)
    prepared = prepare(recipe)
    RecordedInputs(run).check_bases(Inputs.of(prepared))
    federation, method = prepared.problem.federation, prepared.method
    assert isinstance(prepared.problem, Language)
    backbone = prepared.problem.backbone
    model = personal.load(source, backbone=backbone)
    assert isinstance(model, PersonalModel)
    parts = [*model.parts.values()] if isinstance(model, PersonalMixture) else [model]
    methods = [method.methods.get(part.about.method, method) for part in parts]
    if not any(map(_own_roles, parts, methods)):
        raise Refused(
            f"{run}: with {recipe.method['name']} a client's whole model is shared; there is "
            f"nothing of its own to refit",
            f"Train a copy as a new client: coterie adapt {run} --data {data} --train.",
        )
    text = text_of(recipe, backbone, client, data, True)
    splits = {"valid": text.valid, "new": text.test}
    if client in federation.everyone:
        splits["old"] = federation.everyone[client].test
    figures: dict[str, dict[str, float]] = {name: {} for name in ("valid", "new", "old")}
    states = {}
    for stage in STAGES:
        if stage != STAGES[0]:
            owners = [_bound(part, prepared.site, text) for part in parts]
            pairs = zip(owners, map(_own_roles, parts, methods), methods, strict=True)
            trained = [_train(stage, *pair, iterations, say) for pair in pairs]
            if isinstance(model, PersonalMixture):
                model.fit(text.valid.scoring(_ROWS), getattr(method, "prior", PRIOR))
            elif not any(trained):
                continue
        for name, split in splits.items():
            nll_and_count = torch.tensor(model.score(split.scoring(_ROWS)), dtype=torch.float64)
            figures[name][stage] = perplexity(nll_and_count)
        states[stage] = [copy(adapter.state_dict()) for adapter in model.adapters], model.shares
    tokens = {split.name: len(split) for split in text.splits}
    zeros = untrained(Snapshot(parts[0].layout, copy(parts[0].adapter.state_dict())))
    base = perplexity_of(_bound(parts[0], prepared.site, text), text.test, [zeros])
    best = min(states, key=figures["valid"].__getitem__)
    kept = best if figures["new"][best] < figures["new"][STAGES[0]] else STAGES[0]
    at = source if kept == STAGES[0] else folder
    refitted = Refitted(client, at, tokens, base, **figures, best=best, kept=kept)
    if kept != STAGES[0]:
        _write(refitted, model, *states[kept])
    return refitted


def _write(
    refitted: Refitted, model: PersonalModel, tensors: list[Tensors], shares: Mapping[str, float]
) -> None:
    """Write a model with the tensors and weights of a stage, and its effect. Raises SaveError."""
    for adapter, values in zip(model.adapters, tensors, strict=True):
        adapter.load_state_dict(values)
    if isinstance(model, PersonalMixture):
        model.mixture = replace(model.mixture, weights=shares)
    folder = refitted.folder
    with nullcontext(folder) if folder.exists() else written(folder) as new:
        model.save_pretrained(new)
        with replaced(new) as staged:
            ends = {"before": refitted.new[STAGES[0]], "after": refitted.new[refitted.kept]}
            about = asdict(refitted) | {"folder": folder.name, "helped": True}
            write_json(staged / TRAINED, about | ends)


def _own_roles(model: PersonalModel, method: Method) -> frozenset[Role]:
    """Return the roles that a personal model has, and that its method shares with nobody."""
    roles = (role for role, named in model.adapter.parameters_by_role().items() if named)
    return frozenset(roles) - {*method.shared, BACKBONE}


def _bound(model: PersonalModel, site: Site, text: ClientData) -> Client:
    """Return a client with a personal model and a text, which has not trained yet."""
    values = copy(model.adapter.state_dict())
    owner = Client(text.id, model.language, text, site.training, {}, site.seed, 0)
    owner.load(values)
    return owner


def _train(
    stage: str,
    owner: Client,
    own_roles: frozenset[Role],
    method: Method,
    iterations: int | None,
    say: Callable[[str], None],
) -> bool:
    """Do a stage with one model, and leave it as it is best; return whether it has any part that
    the stage trains.
    """
    trained = own_roles & {ROUTER} if stage == "router" else own_roles - {ROUTER}
    if not trained:
        return False
    owner.frozen = frozenset(Role) - own_roles
    steps = method.steps(owner)
    owner.total_iterations = owner.round_steps = iterations or method.rounds * steps
    before = owner.read(*own_roles)
    # nothing has learned from the training text when the router is refitted
    step, judge = (_router_step, owner.train) if stage == "router" else (method.iterate, None)
    best = perplexity(owner.score(judge or owner.valid))
    kept, _, _ = descend(owner, step, steps, best, say, judge)
    owner.load(before if kept is None else kept.tensors)
    return True


def _router_step(owner: Client) -> None:
    owner.step(ROUTER, on=owner.valid)


def sentences(client: str, result: Refitted) -> list[str]:
    """Describe the perplexities of a client's model by stage, and which was kept."""
    tokens = result.tokens
    lines = [
        f"{client}: {tokens['train']:,} tokens of new training text, {tokens['valid']:,} of "
        f"validation text, {tokens['test']:,} of test text. Perplexity:",
        f"  {'':<32}{'new text':>12}" + f"{'old text':>12}" * bool(result.old),
    ]
    for stage, new in result.new.items():
        old = f"{figure(result.old[stage]):>12}" if result.old else ""
        lines.append(f"  {_WORDS[stage]:<32}{figure(new):>12}{old}")
    if result.kept == STAGES[0]:
        where = "" if result.best == STAGES[0] else " on validation text only, which may be chance"
        how = "It helped" if where else "It did not help"
        return [*lines, f"{how}{where}: the model in {result.folder} stays as it was."]
    return [
        *lines,
        f"Kept: {_WORDS[result.kept]}, the best on new validation text. To use it:",
        f'  coterie predict {shlex.quote(str(result.folder))} --text "What you would write"',
    ]
