"""Refits of a personal model to new text of its owner: of the router, then of the client's own
experts. Nothing is sent.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from coterie import personal
from coterie.adapt.new_client import TRAINED, written
from coterie.adapt.personalisation import descend, how_far, table
from coterie.client.client import Client
from coterie.core.errors import Refused
from coterie.core.files import replaced, write_json
from coterie.core.isolation import isolated
from coterie.core.metrics import perplexity
from coterie.core.names import normal
from coterie.core.protocol import ClientId
from coterie.core.roles import BACKBONE, ROUTER, Role
from coterie.core.tensors import Tensors, copy
from coterie.methods import Method
from coterie.models.interpolation import PRIOR
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.lock import check_apart
from coterie.runs.problems.language import Language
from coterie.runs.problems.loading import text_of
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import resolve

FRESH = "fresh"  # the folder of the refitted model, in the client's own
BEFORE, ROUTERS, EXPERTS = "before", "router", "specialists"  # stages
_WORDS = {
    BEFORE: "as it was",
    ROUTERS: "router refitted",
    EXPERTS: "router and own experts refitted",
}
_ROWS = 32  # windows that are scored at once


@dataclass(frozen=True)
class Refitted:
    """The effect of a refit: perplexities per token by stage."""

    folder: Path  # of the best model: a new one, or the client's if that stays as it was
    tokens: Mapping[str, int]  # of the new text by split
    valid: Mapping[str, float]  # of the new validation text
    new: Mapping[str, float]  # of the new test text
    old: Mapping[str, float]  # of the test text that the client has in the run; {} without any
    kept: str  # the best stage on validation text, if it is better on the new test text too


@isolated()
def refit(
    run: Path,
    client: ClientId,
    data: Path,
    out: Path | None = None,
    *,
    iterations: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Refitted:
    """Refit the personal model of somebody who trained in a finished run of language models to new
    text, a file or folder in the format of `data.kind: folders`. The shared part is unchanged.

    At first the router alone descends on the new validation text, and the best iteration is that
    with the lowest perplexity of the training text, from which nothing has learned yet; models that
    are mixed get new weights. Then the client's own experts train on the training text by the local
    iterations of the method, at most `iterations` (None: as many as a client of the run does), and
    the best iteration is that of the validation text. What is kept is the best stage on validation
    text, if it is better than before on test text too, in `out`: a new folder, by default `fresh`
    in the client's own, or that itself, which is overwritten then. Raises Refused: there is no such
    model or text, all of the model is shared, or `out` exists; SaveError.
    """
    client, recipe = normal(client), resolve(run)
    source = personal.folder_of(run, client)
    folder = out or source / FRESH
    if folder.exists() and folder.resolve() != source.resolve():
        remedy = f"Choose another --out; --out {source} overwrites the old model."
        raise Refused(f"{folder} exists already", remedy)
    if recipe.model.kind != "language":
        remedy = "Adapt them to new data with --data, as a new client."
        raise Refused(f"{run} holds classifiers, and --fresh is for language models", remedy)
    check_apart(folder, data)
    prepared = prepare(recipe)
    RecordedInputs(run).check_bases(Inputs.of(prepared))
    problem, method = prepared.problem, prepared.method
    assert isinstance(problem, Language)
    model = personal.load(source, backbone=problem.backbone)
    assert isinstance(model, PersonalModel)
    parts = [*model.parts.values()] if isinstance(model, PersonalMixture) else [model]
    methods = [method.methods.get(part.about.method, method) for part in parts]
    if not any(map(_own_roles, parts, methods)):
        raise Refused(
            f"{run}: with {recipe.method['name']} a client's whole model is shared; there is "
            f"nothing of its own to refit",
            f"Train a copy as a new client: coterie adapt {run} --data {data}.",
        )
    text = text_of(recipe, problem.backbone, client, data, True)
    splits, known = {"valid": text.valid, "new": text.test}, problem.federation.everyone
    splits |= {"old": known[client].test} if client in known else {}
    figures: dict[str, dict[str, float]] = {name: {} for name in ("valid", "new", "old")}
    states = {}
    for stage in _WORDS:
        changed = stage == BEFORE
        for part, of in zip(parts, methods, strict=True):
            roles = part.adapter.parameters_by_role.items()
            values = {
                f"parameters/{role}": torch.cat([t.flatten() for t in named.values()])
                for role, named in roles
                if named
            }
            # each stage has schedules and moments of its own
            owner = Client(client, part.language, text, recipe.training, values, recipe.seed, 0)
            changed |= _train(stage, owner, _own_roles(part, of), of, iterations, say)
        if isinstance(model, PersonalMixture) and stage != BEFORE:
            model.fit(text.valid.scoring(_ROWS), getattr(method, "prior", PRIOR))
            changed = True
        if changed:
            for name, split in splits.items():
                score = torch.tensor(model.score(split.scoring(_ROWS)), dtype=torch.float64)
                figures[name][stage] = perplexity(score)
            states[stage] = [copy(a.state_dict()) for a in model.adapters], model.shares
    best = min(states, key=figures["valid"].__getitem__)
    kept = best if figures["new"][best] < figures["new"][BEFORE] else BEFORE
    tokens = {split.name: len(split) for split in text.splits}
    refitted = Refitted(source if kept == BEFORE else folder, tokens, **figures, kept=kept)
    if kept != BEFORE:
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
            ends = {"before": refitted.new[BEFORE], "after": refitted.new[refitted.kept]}
            about = asdict(refitted) | {"folder": folder.name, "helped": True}
            write_json(staged / TRAINED, about | ends)


def _own_roles(model: PersonalModel, method: Method) -> frozenset[Role]:
    roles = (role for role, named in model.adapter.parameters_by_role.items() if named)
    return frozenset(roles) - {*method.shared, BACKBONE}


def _train(
    stage: str,
    owner: Client,
    own_roles: frozenset[Role],
    method: Method,
    iterations: int | None,
    say: Callable[[str], None],
) -> bool:
    """Do a stage with one model, keep it at its best; return whether it has any such role."""
    trained = {ROUTERS: own_roles & {ROUTER}, EXPERTS: own_roles - {ROUTER}}.get(stage)
    if not trained:
        return False
    owner.frozen = frozenset(Role) - own_roles
    steps = method.steps(owner)
    owner.total_iterations = owner.round_steps = iterations or method.rounds * steps
    # nothing has learned from the training text when the router is refitted
    judge = owner.train if stage == ROUTERS else None

    def step(owner: Client) -> None:
        method.iterate(owner) if judge is None else owner.step(ROUTER, on=owner.valid)

    before = owner.read(*own_roles)
    best = perplexity(owner.score(judge or owner.valid))
    kept, _, _ = descend(owner, step, steps, best, say, judge)
    owner.load(before if kept is None else kept.tensors)
    return True


def sentences(client: str, result: Refitted) -> list[str]:
    """Describe the perplexities of a client's model by stage, and which was kept."""
    texts = [result.new, result.old] if result.old else [result.new]
    rows = {_WORDS[stage]: [text[stage] for text in texts] for stage in result.new}
    kept = f"Kept: {_WORDS[result.kept]}, the best on new validation text; in {result.folder}."
    if result.kept == BEFORE:
        helped = min(result.valid, key=result.valid.__getitem__) != BEFORE
        kept = f"It {how_far(helped)}: the model in {result.folder} stays as it was."
    return [f"{client}:", *table(result.tokens, rows, ["new text", "old text"][: len(texts)]), kept]
