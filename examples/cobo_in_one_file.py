"""CoBo in one file: Algorithm 1 of "CoBo: Collaborative Learning via Bilevel Optimization"
(NeurIPS 2024), in PyTorch alone.

    python examples/cobo_in_one_file.py

Eight clients with forty digits each, two of each kind of labels, find their partners: a pair's
weight grows while the gradients of the two agree halfway between their models, and a client is
pulled towards those whose weight is large. It is what `coterie run cobo-digits` computes: only the
clients' data are coterie's. tests/test_one_file.py compares the two.
"""

import hashlib
import math
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.data.images import Digits

ROUNDS = 600  # T
LR, MOMENTUM = 0.3, 0.9  # eta, beta
RHO, GAMMA = 0.03, 0.01  # strength of the pull, step size of the weights
SWITCH = 0.33  # share of the rounds in which n - 1 pairs are compared on average; then ever fewer
BATCH, HIDDEN = 20, 64
SEED = 0
SHAPES = {"0.weight": (HIDDEN, 64), "0.bias": (HIDDEN,), "1.weight": (10, HIDDEN), "1.bias": (10,)}


def seed_of(*parts: int | str) -> int:
    """Return a seed for one purpose, so that nothing depends on the order of computation."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initial() -> Tensor:
    """Return the model that all clients start from, (d,): a network with one hidden layer, each
    value from U(-1/sqrt(in), 1/sqrt(in)).
    """
    parts = []
    for name, shape in SHAPES.items():
        bound = 1 / math.sqrt(64)  # both layers have 64 inputs
        seed = seed_of(seed_of(SEED, "initial", "generalist", ""), "generalist", name)
        rng = torch.Generator().manual_seed(seed)
        parts.append(torch.empty(shape).uniform_(-bound, bound, generator=rng).flatten())
    return torch.cat(parts)


def logits(x: Tensor, images: Tensor) -> Tensor:
    """Return the logits, (B, 10), of a model x, (d,), on images (B, 1, 8, 8)."""
    pieces = torch.split(x, [math.prod(shape) for shape in SHAPES.values()])
    w1, b1, w2, b2 = (
        piece.view(shape) for piece, shape in zip(pieces, SHAPES.values(), strict=True)
    )
    return torch.relu(images.flatten(1) @ w1.T + b1) @ w2.T + b2


class Stream:
    """Batches of a split, one after the other."""

    def __init__(self, split) -> None:
        self.split, self.drawn = split, 0

    def gradient(self, x: Tensor) -> Tensor:
        """Return the gradient of the loss at x on the next batch, (d,)."""
        batch = self.split.batch(self.drawn, BATCH)
        self.drawn += BATCH
        x = x.clone().requires_grad_()
        return torch.autograd.grad(cross_entropy(logits(x, batch.x), batch.y), x)[0]


class Client:
    """One client: its model x_i, the momentum of its optimiser, and two streams of batches."""

    def __init__(self, data) -> None:
        self.data, self.x, self.m = data, initial(), None
        self.training = Stream(data.train)
        self.comparing = Stream(data.train.reordered("train-midpoints"))

    def descend(self, pull: Tensor) -> None:
        """x_i <- x_i - eta (m_i + rho sum_k w_ik (x_i - x_k)) (line 5)."""
        gradient = self.training.gradient(self.x)
        before = torch.zeros_like(gradient) if self.m is None else self.m
        self.m = MOMENTUM * before + (1 - MOMENTUM) * gradient
        self.x = self.x - LR * self.m - LR * RHO * pull

    @torch.no_grad()
    def accuracy(self) -> float:
        """Return the percentage of the client's test images that its model classifies rightly."""
        right = count = 0
        for batch in self.data.test.scoring(32):
            right += int((logits(self.x, batch.x).argmax(dim=1) == batch.y).sum())
            count += len(batch.y)
        return 100 * right / count


def sample(t: int, rounds: int, clients: int, rng: torch.Generator) -> list[tuple[int, int]]:
    """Draw the pairs that round t compares (line 10)."""
    pairs = list(combinations(range(clients), 2))
    often = 2 / clients  # n - 1 of all pairs, on average
    chance = often if t < SWITCH * rounds else min(1.0, often * SWITCH * rounds / (t + 1))
    drawn = torch.rand(len(pairs), generator=rng) < chance
    return [pair for pair, is_drawn in zip(pairs, drawn.tolist(), strict=True) if is_drawn]


def cobo(rounds: int = ROUNDS) -> tuple[dict[str, float], Tensor]:
    """Train all clients; return the test accuracy of each, and W, the collaboration weights."""
    section = Digits(
        partition="permuted-clusters", clusters=4, clients_per_cluster=2, per_client=40
    )
    data = section.load(order_seed=SEED)
    clients = [Client(own) for own in data.clients.values()]
    weights = torch.ones(len(clients), len(clients), dtype=torch.float64).fill_diagonal_(0)
    for t in range(rounds):
        rng = torch.Generator().manual_seed(seed_of(SEED, "round", t))
        partners: dict[int, list[int]] = {i: [] for i in range(len(clients))}
        pairs = sample(t, rounds, len(clients), rng)
        for i, j in pairs:
            partners[i].append(j)
            partners[j].append(i)
        # g_i(z_ij), each at the midpoint z_ij = (x_i + x_j) / 2 (line 12)
        gradients = {
            (i, j): clients[i].comparing.gradient((clients[i].x + clients[j].x) / 2)
            for i in partners
            for j in sorted(partners[i])
        }
        for i, j in pairs:  # w_ij <- clip(w_ij + gamma <g_i, g_j>, 0, 1) (eq. 4)
            agreement = float(gradients[i, j] @ gradients[j, i])
            weights[i, j] = weights[j, i] = (weights[i, j] + GAMMA * agreement).clamp(0, 1)
        x = torch.stack([client.x for client in clients]).double()
        pulls = (weights.sum(dim=1, keepdim=True) * x - weights @ x).float()
        for client, pull in zip(clients, pulls, strict=True):  # sum_k w_ik (x_i - x_k)
            client.descend(pull)
    return {client.data.id: client.accuracy() for client in clients}, weights


if __name__ == "__main__":
    accuracies, weights = cobo()
    for name, accuracy in accuracies.items():
        print(f"{name}: test accuracy {accuracy:.1f} %")
    print(weights.numpy().round(2))
