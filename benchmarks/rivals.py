"""What mixtures of predictions are compared with: MAPPER, kNN-Per, and mixtures of parameters."""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.client.client import Client
from coterie.core.protocol import Sends, task
from coterie.core.roles import GENERALIST, Role
from coterie.core.tensors import Tensors
from coterie.export.format import ClientModel
from coterie.export.layers import single
from coterie.methods.templates import Averaged, OneAdapter
from coterie.models.artifact import About, AboutMixture
from coterie.models.interpolation import fit_weights, settled
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.network_tensors import training
from coterie.models.windows import TextBatch, Windows, nll_of
from coterie.personal import PersonalModel
from coterie.personal.mixture import PersonalMixture

Array = npt.NDArray[np.float64]
Of = Mapping[str, Tensor]  # the flat values of a client's model by their keys in its state
OWNED = f"parameters/{GENERALIST}"  # of the client's model
SHARED, WEIGHT = "mapper/shared", "mapper/weight"
OPTIMISER = "mapper/optimiser"
PARTS = (SHARED, WEIGHT)  # of a client's state, beside its model
ROWS = 16  # windows at a time without training
WINDOWS = 12  # of validation text, for MAPPER's weight
NEIGHBOURS = (4, 16, 64)
TEMPERATURES = (0.03, 0.1, 0.3, 1.0, 3.0)  # in median squared distances to the nearest neighbour
SHARES = np.linspace(0, 1, 6)
OFF = 1000.0


def em(parts: Array, start: Array | None = None, steps: int = 100) -> Array:
    """Return the weights of greatest likelihood, (P,), of (P, T) probabilities; a part may have
    some that are 0, where another has not.
    """
    weights = np.full(len(parts), 1 / len(parts)) if start is None else start
    for _ in range(steps):
        joint = weights[:, None] * parts
        weights = (joint / joint.sum(0)).mean(1)
    return weights


@contextmanager
def lent(client: Client, of: Of) -> Iterator[None]:
    """Give a client another model within the block."""
    with ExitStack() as stack:
        for name, values in of.items():
            stack.enter_context(client.at(values, Role(name.removeprefix("parameters/"))))
        yield


def losses(model: LanguageModel, batch: TextBatch) -> Tensor:
    """Return the negative log-likelihood of each token, (T,)."""
    with model._using():
        return nll_of(model.backbone, Windows.of(model.backbone, batch))


@torch.no_grad()
def likelihoods(client: Client, split: Any, of: Of) -> Array:
    """Return the log-likelihood of each token of a split by a client's model, (T,)."""
    model = cast(LanguageModel, client.model)
    with lent(client, of):
        found = [-losses(model, batch) for batch in split.scoring(ROWS)]
    return torch.cat(found).double().numpy()


def text_losses(client: Client, split: Any, of: Of, more: Of) -> Array:
    """Return `likelihoods`, of MAPPER's mixture where there are its `PARTS`."""
    alone = likelihoods(client, split, of)
    if SHARED not in more:
        return alone
    shared, weight = likelihoods(client, split, {OWNED: more[SHARED]}), float(more[WEIGHT])
    mixture: Array = np.log(weight * np.exp(alone) + (1 - weight) * np.exp(shared))
    return mixture


@dataclass(frozen=True)
class Mapper(Averaged, OneAdapter):
    """MAPPER: h = l h_local + (1 - l) h_shared with the predictions of two models, trained jointly
    (Mansour, Mohri, Ro, Suresh, "Three Approaches for Personalization with Applications to
    Federated Learning", 2020, model interpolation).

    Simpler than there: in each round l is that of greatest likelihood on validation windows, by EM,
    where they train a local model for each l of a grid and choose by loss; then both models take
    each step together, along the gradient of the mixture's loss, where they first fit the local
    model and then the shared one. The local model is kept between rounds.
    """

    stateful: ClassVar[bool] = True

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        with client.borrowing(theta):
            w = client.flat()
        kept = client.state
        weight = kept.setdefault(WEIGHT, torch.tensor(0.5, dtype=torch.float64))
        if client.round:
            weight.fill_(self.weight(client, w))
        share = float(weight)
        for _ in range(self.steps(client)):
            batch, lr = client.draw(client.train), client.lr
            gradient, to_shared = joint_gradients(client, w, share, batch)
            client.descend(GENERALIST, gradient, client.advance())
            client.training.experts.step(w, to_shared, lr, kept, OPTIMISER)
        kept[SHARED] = w
        with client.borrowing({GENERALIST: w}):
            return client.read(GENERALIST) | self.sample_count(client)

    def weight(self, client: Client, w: Tensor) -> float:
        """Return l of greatest likelihood on a few windows of validation text."""
        batch = client.valid.batch(client.round * WINDOWS, WINDOWS)
        model = cast(LanguageModel, client.model)
        with torch.no_grad():
            local = losses(model, batch)
            with client.at(w, GENERALIST):
                shared = losses(model, batch)
        parts = torch.stack([local, shared]).neg().exp().double().cpu().numpy()
        return float(em(parts, np.array([0.5, 0.5]))[0])


def joint_gradients(
    client: Client, w: Tensor, share: float, batch: TextBatch
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean of -log(l p(v) + (1 - l) p(w)) by v, the client's model, and
    by w, (d,) each. By the chain rule they are those of the models' own losses with each token
    weighted by the posterior of the model.
    """
    model = cast(LanguageModel, client.model)
    v = client.flat()
    with torch.no_grad():
        with client.at(w, GENERALIST):
            shared = losses(model, batch)
        odds = losses(model, batch) - shared
    posterior = torch.sigmoid(math.log(max(share, 1e-12)) - math.log(max(1 - share, 1e-12)) - odds)
    gradients = []
    for values, weights in ((v, posterior), (w, 1 - posterior)):
        with client.at(values, GENERALIST):
            wrt = list(model.parameters_by_role[GENERALIST].values())
            with training(model.adapter.train(), wrt):
                nll = losses(model, batch)
                parts = torch.autograd.grad((weights * nll).sum() / len(nll), wrt)
            model.adapter.eval()
        gradients.append(torch.cat([part.flatten() for part in parts]).float())
    return gradients[0], gradients[1]


@torch.no_grad()
def represented(client: Client, split: Any, of: Of) -> tuple[Tensor, Tensor]:
    """Return the last hidden state before each token of a split, (T, d), and the tokens, (T,)."""
    model, states, targets = cast(LanguageModel, client.model), [], []
    with lent(client, of), model._using():
        for batch in split.scoring(ROWS):
            windows = Windows.of(model.backbone, batch)
            hidden = model.backbone.hidden(windows.inputs, windows.positions)
            states.append(hidden.flatten(0, 1).float())
            targets.append(windows.targets)
    return torch.cat(states), torch.cat(targets)


def nearest(queries: Tensor, keys: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return squared distances to, and numbers of, the k nearest keys of each query, (T, k)."""
    found = [torch.cdist(part, keys).square().topk(k, largest=False) for part in queries.split(512)]
    return torch.cat([d for d, _ in found]), torch.cat([n for _, n in found])


def neighbours_say(distances: Tensor, hits: Tensor, k: int, temperature: float) -> Array:
    """Return the probability, (T,), of each token by its k nearest neighbours, weighted by
    exp(-d^2 / temperature); `hits`, (T, K), are neighbours that were followed by this token.
    """
    weights = (-distances[:, :k].double() / temperature).softmax(1)
    return (weights * hits[:, :k]).sum(1).numpy()


def knn_mixture(client: Client, fedavg: Of) -> dict[str, Array]:
    """Return the log-likelihoods of kNN-Per by split: l p_knn + (1 - l) p_shared, with a client's
    training tokens as datastore (Marfoq et al., "Personalized Federated Learning through Local
    Memorization", ICML 2022; for text as in Khandelwal et al., "Generalization through
    Memorization", ICLR 2020). k, the temperature and l are those of greatest likelihood on
    validation text.
    """
    keys, values = represented(client, client.train, fedavg)
    splits = {"valid": client.valid, "test": client.test}
    k = min(NEIGHBOURS[-1], len(keys))
    found: dict[str, tuple[Array, Tensor, Tensor]] = {}
    for name, split in splits.items():
        queries, targets = represented(client, split, fedavg)
        distances, numbers = nearest(queries, keys, k)
        shared = np.exp(likelihoods(client, split, fedavg))
        found[name] = shared, distances, values[numbers] == targets[:, None]
    unit = float(found["valid"][1][:, 0].median())
    best, choice = -math.inf, (k, unit, np.array([0.0, 1.0]))
    for neighbours in NEIGHBOURS:
        for temperature in TEMPERATURES:
            shared, distances, hits = found["valid"]
            memory = neighbours_say(distances, hits, neighbours, temperature * unit)
            parts = np.stack([memory, shared])
            weights = em(parts)
            if (likelihood := float(np.log(weights @ parts).mean())) > best:
                best, choice = likelihood, (neighbours, temperature * unit, weights)
    neighbours, temperature, weights = choice
    return {
        name: np.log(
            weights @ np.stack([neighbours_say(distances, hits, neighbours, temperature), shared])
        )
        for name, (shared, distances, hits) in found.items()
    }


def mixed_parameters(client: Client, local: Of, fedavg: Of) -> dict[str, Array]:
    """Return the log-likelihoods by split of one model with the updates of both, those of the
    attention and the outputs of MLPs weighted by l and 1 - l, of greatest likelihood on validation.
    """
    both = []
    for of in (local, fedavg):
        with lent(client, of):
            both.append(client.read(GENERALIST))
    model = cast(LanguageModel, client.model)

    def read(share: float, split: Any) -> Array:
        one = stacked(model, both[0], both[1], share)
        with torch.no_grad():
            return torch.cat([-losses(one, b) for b in split.scoring(ROWS)]).double().numpy()

    valid = {float(share): read(float(share), client.valid) for share in SHARES}
    best = max(valid, key=lambda share: float(valid[share].mean()))
    return {"valid": valid[best], "test": read(best, client.test)}


def distilled(client: Client, local: Of, fedavg: Of) -> dict[str, Array]:
    """Return the log-likelihoods by split of one adapter distilled from both models' mixture on the
    client's training text, as an export does; of the one part where that has all the weight.
    """
    language = cast(LanguageModel, client.model)
    pair = {"local": local, "fedavg": fedavg}
    valid = torch.from_numpy(
        np.stack([likelihoods(client, client.valid, of) for of in pair.values()])
    )
    weights = dict(zip(pair, settled(valid, fit_weights(valid)).tolist(), strict=True))
    splits = {"valid": client.valid, "test": client.test}
    if max(weights.values()) == 1:
        of = pair[max(weights, key=lambda name: weights[name])]
        return {name: likelihoods(client, split, of) for name, split in splits.items()}
    origin = {"method": "interpolation", "recipe": "", "round": client.round, "seed": 0}
    parts = {}
    for name, of in pair.items():
        model = LanguageModel(language.backbone, language.layout)
        with lent(client, of):
            values = client.read(GENERALIST)
        model.adapter.load_state_dict({k: v.detach().clone() for k, v in values.items()})
        about = About(client.id, "", language.layout, client.train.context, **origin)
        parts[name] = PersonalModel(model, about)
    mixture = PersonalMixture(parts, AboutMixture(client.id, weights, **origin))
    whole = ClientModel(mixture, client.valid, train=client.train)
    student = single(whole, print).model.language
    with torch.no_grad():
        return {
            name: torch.cat([-losses(student, batch) for batch in split.scoring(ROWS)])
            .double()
            .numpy()
            for name, split in splits.items()
        }


def stacked(model: LanguageModel, one: Tensors, other: Tensors, share: float) -> LanguageModel:
    """Return a model with both adapters of a layout with equal weights: their MLPs' experts side by
    side, and their attention's updates as one of twice the rank.
    """
    layout = model.layout
    g = layout.generalists
    both = Layout(
        generalists=2 * g,
        specialists=0,
        rank=2 * layout.rank,
        mlp_rank=layout.expert_rank,
        alpha=layout.alpha,
        top_k=2 * g,
        biased=True,
        balance="none",
    )
    mixed = LanguageModel(model.backbone, both)
    named = dict(mixed.adapter.named_parameters())
    for name, values in named.items():
        if name.endswith("router.bias"):
            logits = [math.log(s) if s else -OFF for s in (share, 1 - share)]
            values.data = torch.tensor(logits).repeat_interleave(g)
        elif ".mlp.router" in name:
            values.data.zero_()
        elif ".mlp." in name:
            values.data = torch.cat([one[name], other[name]])
        elif name.endswith(".A"):
            values.data = torch.cat([one[name], other[name]], dim=1)
        else:  # twice the rank has a scale smaller by the root of 2
            parts = [share * one[name], (1 - share) * other[name]]
            values.data = math.sqrt(2) * torch.cat(parts, dim=2)
    return mixed
