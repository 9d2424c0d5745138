"""Training of a new client from a run's shared part, on its own text. Nothing is sent."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from coterie.client.client import Client
from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.core.metrics import perplexity
from coterie.core.protocol import derive_seed
from coterie.core.roles import ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.data.splits import Split
from coterie.methods import Method
from coterie.models.adapter import Adapter
from coterie.models.interpolation import fit_weights, interpolate
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.predictions import Prediction, joined, score_of
from coterie.reports.parts import figure
from coterie.reports.scores import made_of

PATIENCE = 5  # evaluations without an improvement, after which training stops
ONE = torch.ones(1, dtype=torch.float64)  # the weight of a model that is not mixed
_ROWS = 32  # windows that are scored at once


@dataclass(frozen=True)
class Snapshot:
    """A personal model during training: layout, without a pool, and tensors by adapter's names."""

    layout: Layout
    tensors: Tensors


@dataclass(frozen=True)
class Personalised:
    """The effect of training on a new client's own text. Perplexities are per token."""

    # whether specialists and router were trained, with the shared part frozen; or else a copy of it
    own: bool
    tokens: Mapping[str, int]  # of the client's text by split
    base: float  # test perplexity of the base alone
    before: float  # test perplexity of the shared part alone
    after: float  # test perplexity at the best iteration
    valid_before: float  # `before`, on validation text
    valid_after: float  # `after`, on validation text
    iteration: int  # with the best validation perplexity; 0 if none beat the shared part alone
    iterations: int  # number done
    most: int  # number allowed
    # of a model of its own, from the base, and the shared part, if `after` mixes their predictions
    weights: Mapping[str, float] | None = None

    @property
    def summary(self) -> dict[str, object]:
        """The fields as JSON values."""
        return {"helped": self.helped} | asdict(self)

    @property
    def helped(self) -> bool:
        """Whether training helped on validation and test text; only then is the model kept."""
        return self.iteration > 0 and self.after < self.before


def shared_part(client: Client, method: Method) -> Snapshot:
    """Return the model that the run gives a client that has not trained, without any untrained
    expert or router.

    The specialists are left out, and the generalists are weighted equally; if the method shares
    only attention LoRAs, the MLPs are those of the base. A router that the method shares was
    trained, and is kept. `client` must have loaded what it received, with the rest as initialised.
    """
    assert isinstance(client.model, LanguageModel)
    layout, tensors = client.model.settled()
    if not layout.specialists and (not layout.routed or ROUTER in method.shared):
        return Snapshot(layout, tensors)
    count = max(layout.generalists, 1)
    alone = replace(layout, generalists=count, specialists=0, held=(), projected=False)
    alone = replace(alone, routing="equal", balance="none")
    named = dict(Adapter(client.model.backbone.architecture, alone).named_parameters())  # zeros
    for name, tensor in named.items():
        if name in tensors:
            tensor.data.copy_(tensors[name])
    return Snapshot(alone, {name: tensor.detach() for name, tensor in named.items()})


def train(
    client: Client,
    method: Method,
    most: int,
    say: Callable[[str], None],
    shared: tuple[str, Snapshot, float] | None = None,
) -> tuple[Snapshot, Personalised]:
    """Train a client alone, which has loaded what it received, by the local iterations of its
    method. Return the model to keep and the effect. Raises ModelError if nothing can be trained.

    If the client has specialists, the shared part is frozen, and specialists and router are trained
    from their initial values. Otherwise a copy of the shared part is trained. The best iteration is
    that with the lowest perplexity of the whole validation text, evaluated after every round's
    number of iterations; training ends after `PATIENCE` evaluations in a row without improvement.
    The learning rate is scheduled over `most` iterations. With `shared`, a shared part by the name
    of its method, the predictions of the trained model are mixed with its, with weights of a prior
    from validation text. The shared part alone is kept unless the trained model, or that mixture,
    is better.
    """
    before = shared_part(client, method)
    has_specialists = bool(client.model.parameters_by_role[SPECIALIST])
    client.frozen = frozenset(method.shared) if has_specialists else frozenset()
    client.total_iterations = client.round_steps = most
    valid_before = best = perplexity_of(client, client.data.valid, [before])
    say(f"{'the base' if shared else 'the shared part'} alone: validation perplexity {best:.2f}")
    kept, best, best_iteration = descend(client, method.iterate, method.steps(client), best, say)
    best_snapshot = kept or before
    models, weights, fitted, base = [best_snapshot], None, ONE, untrained(before)
    if shared is not None:
        name, before, prior = shared
        valid_before = perplexity_of(client, client.data.valid, [before])
        models = [best_snapshot, before]
        by_part, _ = _predictions(client, client.data.valid, models)
        fitted = fit_weights(by_part[..., 0], prior)
        best = perplexity_of(client, client.data.valid, models, fitted)
        weights = dict(zip(("local", name), fitted.tolist(), strict=True))
    test = client.data.test
    about = Personalised(
        own=has_specialists,
        tokens={split.name: len(split) for split in client.data.splits},
        base=perplexity_of(client, test, [base]),
        before=perplexity_of(client, test, [before]),
        after=perplexity_of(client, test, models, fitted),
        valid_before=valid_before,
        valid_after=best,
        iteration=best_iteration,
        iterations=client.iteration,
        most=most,
        weights=weights,
    )
    return best_snapshot if about.helped else before, about


def descend(
    client: Client,
    step: Callable[[Client], None],
    interval: int,
    best: float,
    say: Callable[[str], None],
    judge: Split | None = None,
) -> tuple[Snapshot | None, float, int]:
    """Train a client by `step` for its total iterations at most, or until `PATIENCE` evaluations of
    the validation text, or of `judge`, after each `interval` of iterations, bring no improvement.
    Return the best model, None if no perplexity was below `best`, that perplexity, and its
    iteration. Raises ModelError if nothing is trained.
    """
    model, most = client.model, client.total_iterations
    assert isinstance(model, LanguageModel)
    split, what = (client.valid, "validation") if judge is None else (judge, "training")
    kept, reached, done, looks_in_vain = None, 0, 0, 0
    with devices.forked(model.device):
        devices.seed(derive_seed(client.seed, "personalise", client.id), model.device)
        while done < most and looks_in_vain < PATIENCE:
            for _ in range(min(interval, most - done)):
                step(client)
                done += 1
            if not client.stats:
                problem = "the run has nothing that a client could train by itself"
                raise ModelError(problem, "Adapt with --no-train.")
            client.stats.clear()
            now = perplexity(client.score(split))
            say(f"iteration {done} of at most {most}: {what} perplexity {now:.2f}")
            # training that has diverged does not recover
            if not math.isfinite(now):
                break
            looks_in_vain += 1
            if now < best:
                kept, best, reached, looks_in_vain = Snapshot(*model.settled()), now, done, 0
    return kept, best, reached


def untrained(like: Snapshot) -> Snapshot:
    """Return an adapter of the same layout with zero updates, which leaves the base unchanged."""
    return Snapshot(
        like.layout, {name: torch.zeros_like(tensor) for name, tensor in like.tensors.items()}
    )


def perplexity_of(
    client: Client, split: Split, snapshots: Sequence[Snapshot], weights: torch.Tensor = ONE
) -> float:
    """Return the perplexity of a split by a snapshot, or by several, (P,), that are mixed."""
    log_probs, right = _predictions(client, split, snapshots)
    return perplexity(score_of([(interpolate(log_probs, weights), right)]))


def _predictions(client: Client, split: Split, snapshots: Sequence[Snapshot]) -> Prediction:
    """Return the log-probabilities of a split's tokens by snapshots, (P, T, 1), and zeros."""
    assert isinstance(client.model, LanguageModel)
    rows = client.training.micro_batch or min(client.training.batch_size, _ROWS)
    by_part = []
    for snapshot in snapshots:
        model = LanguageModel(client.model.backbone, snapshot.layout)
        model.adapter.load_state_dict(snapshot.tensors)
        by_part.append(list(model.predictions(split.scoring(rows))))
    return joined(by_part)


def sentences(client: str, result: Personalised | None) -> list[str]:
    """Describe a client's model before and after training, if any, and whether it helped."""
    if result is None:
        alone = "nothing was personalised. The model is the shared part alone."
        return [f"{client}: {alone} To train on this text, leave out --no-train."]
    what = "a copy of the shared part"
    if result.own:
        what = "specialists and router; the shared part is unchanged"
    if result.weights is not None:
        what = f"a model of its own from the base; mixed: {made_of(result.weights)}"
    rows = {
        "the base": [result.base],
        "the shared part alone": [result.before],
        f"trained, after iteration {result.iteration}": [result.after],
    }
    end = "It helped: the personalised model is kept."
    if not result.helped:
        end = f"It {how_far(result.iteration > 0)}: the shared part alone is kept."
    done = f"{client}, trained for {result.iterations} of at most {result.most} iterations"
    return [f"{done}: {what}.", *table(result.tokens, rows), end]


def how_far(helped: bool) -> str:
    """Return what training did that is not kept: whether it helped on validation text at least."""
    return "helped on validation text only, maybe by chance" if helped else "did not help"


def table(
    tokens: Mapping[str, int], rows: Mapping[str, Sequence[float]], columns: Sequence[str] = ()
) -> list[str]:
    """Return a table of test perplexities by model, with the tokens of the text."""
    sizes = ", ".join(f"{count:,} for {split}" for split, count in tokens.items())
    cells = {"": columns} if columns else {}
    cells |= {title: [figure(value) for value in row] for title, row in rows.items()}
    lines = (f"  {title:<32}" + "".join(f"{c:>12}" for c in row) for title, row in cells.items())
    return [f"Tokens: {sizes}. Perplexity of the test text:", *lines]
