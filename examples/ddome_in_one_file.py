"""DDOME in one file: Algorithm 1 of "Learning to Specialize: Joint Gating-Expert Training for
Adaptive MoEs in Decentralized Settings" (Farhat et al.), in PyTorch alone.

    python examples/ddome_in_one_file.py

A server holds five experts and a gate. Five anchors with two labels each tie an expert to these;
thirty other clients with four labels get the two experts that the gate prefers for their data.
Twenty clients that never train, and need no labels, get theirs in the same way. It is what
`coterie run ddome-digits` computes: only the clients' data are coterie's. tests/test_one_file.py
compares the two.
"""

import hashlib
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, nll_loss

from coterie.data.images import Digits

ROUNDS, ACTIVE = 120, 5  # T, and normal clients in a round
EXPERTS, CHOSEN = 5, 2  # M, K
LR, MOMENTUM, BATCH = 0.05, 0.9, 16
EPOCHS = 60  # of the common expert, on public digits
PIXELS, HIDDEN, GATE_HIDDEN, CLASSES = 64, 8, 64, 10
SEED = 0
Network = list[Tensor]  # weights and biases of two linear layers


def seed_of(*parts: int | str) -> int:
    """Return a seed for one purpose, so that nothing depends on the order of computation."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def network(inputs: int, hidden: int, outputs: int, seed: int) -> Network:
    """Return a network with one hidden layer, each value from U(-1/sqrt(in), 1/sqrt(in))."""
    tensors = []
    for layer, (wide, out) in enumerate(((inputs, hidden), (hidden, outputs))):
        for name, shape in (("weight", (out, wide)), ("bias", (out,))):
            rng = torch.Generator().manual_seed(seed_of(seed, "generalist", f"{layer}.{name}"))
            bound = 1 / math.sqrt(wide)
            tensors.append(torch.empty(shape).uniform_(-bound, bound, generator=rng))
    return tensors


def hidden(net: Network, x: Tensor) -> Tensor:
    """Return what the last layer sees, (B, hidden)."""
    return torch.relu(x.flatten(1) @ net[0].T + net[1])


def outputs(net: Network, x: Tensor) -> Tensor:
    """Return the logits, (B, outputs)."""
    return hidden(net, x) @ net[2].T + net[3]


class SGD:
    """Gradient descent with momentum on some tensors: m <- beta m + g, x <- x - eta m."""

    def __init__(self, tensors: Network) -> None:
        self.tensors = [t.requires_grad_() for t in tensors]
        self.moments = [torch.zeros_like(t) for t in tensors]

    def step(self, loss: Tensor) -> None:
        self.apply(torch.autograd.grad(loss, self.tensors))

    @torch.no_grad()
    def apply(self, gradients: tuple[Tensor, ...]) -> None:
        for t, m, gradient in zip(self.tensors, self.moments, gradients, strict=True):
            t.sub_(LR * m.mul_(MOMENTUM).add_(gradient))


def common_expert(public) -> Network:
    """Train the network whose hidden layer embeds digits for the gate; then it is frozen."""
    rows = np.random.default_rng(seed_of(0, "held out")).permutation(public.rows)
    held_out = len(rows) // 10
    train = replace(public, name="train", rows=rows[held_out:], seed=0)
    net = network(PIXELS, HIDDEN, CLASSES, seed_of(0, "common expert"))
    optimiser = SGD(net)
    for step in range(math.ceil(EPOCHS * train.windows / BATCH)):
        batch = train.batch(step * BATCH, BATCH)
        optimiser.step(cross_entropy(outputs(net, batch.x), batch.y))
    return [t.detach() for t in net]


class Client:
    """One client: its data, and how many examples it has drawn."""

    def __init__(self, data, common: Network) -> None:
        self.data, self.common, self.drawn = data, common, 0

    @torch.no_grad()
    def scores(self, gate: Network, split) -> Tensor:
        """Return sum_i softmax g(x_i), (M,): how much the client's data want each expert."""
        batches = [outputs(gate, hidden(self.common, b.x)) for b in split.scoring(256)]
        return torch.cat(batches).softmax(dim=1).double().sum(dim=0)

    def train(self, gate: Network, experts: dict[int, Network], anchor: int | None) -> None:
        """Do one epoch, on the copies that the client was sent (Algorithm 1, lines 8 to 18)."""
        gate_sgd = SGD(gate)
        sgd = SGD([t for net in experts.values() for t in net])
        for _ in range(math.ceil(self.data.train.windows / BATCH)):
            batch = self.data.train.batch(self.drawn, BATCH)
            self.drawn += BATCH
            scores = outputs(gate, hidden(self.common, batch.x))
            if anchor is not None:  # two independent losses
                gate_sgd.step(cross_entropy(scores, torch.full_like(batch.y, anchor)))
                sgd.step(cross_entropy(outputs(experts[anchor], batch.x), batch.y))
                continue
            weights = scores[:, list(experts)].softmax(dim=1)  # over the K experts of the client
            logits = torch.stack([outputs(net, batch.x) for net in experts.values()], dim=1)
            mixture = (weights.unsqueeze(2) * logits).sum(dim=1)
            loss = nll_loss(mixture.log_softmax(dim=1), batch.y)  # one joint loss
            gradients = torch.autograd.grad(loss, gate_sgd.tensors + sgd.tensors)
            gate_sgd.apply(gradients[: len(gate)])
            sgd.apply(gradients[len(gate) :])

    @torch.no_grad()
    def accuracy(self, gate: Network, experts: dict[int, Network]) -> float:
        """Return the percentage of test digits that the best expert for each classifies rightly."""
        right = count = 0
        for batch in self.data.test.scoring(256):
            scores = outputs(gate, hidden(self.common, batch.x))[:, list(experts)]
            answers = torch.stack([outputs(net, batch.x) for net in experts.values()], dim=1)
            best = answers[torch.arange(len(batch.y)), scores.argmax(dim=1)]
            right += int((best.argmax(dim=1) == batch.y).sum())
            count += len(batch.y)
        return 100 * right / count


def top(scores: Tensor) -> list[int]:
    """Return the K experts with the largest scores, in ascending order."""
    return sorted(scores.argsort(descending=True, stable=True)[:CHOSEN].tolist())


def copied(net: Network) -> Network:
    return [t.detach().clone() for t in net]


def average(copies: list[tuple[int, Network]]) -> Network:
    """Return the mean of networks, weighted by the clients' examples."""
    total = sum(count for count, _ in copies)
    nets = [[t.detach() * (count / total) for t in net] for count, net in copies]
    return [torch.stack(parts).sum(dim=0) for parts in zip(*nets, strict=True)]


def ddome(rounds: int = ROUNDS) -> dict[str, float]:
    """Train the pool; return the test accuracy of each client that never trained."""
    section = Digits(
        partition="quantity", clients=35, classes_per_client=4, replacement=True, per_client=54,
        anchors=5, anchor_classes=2, unseen={"aligned": 10, "random": 10}, public=200,
    )  # fmt: skip
    data = section.load(order_seed=SEED)
    common = common_expert(data.public)
    clients = {i: Client(own, common) for i, own in data.clients.items()}
    starts = [seed_of(SEED, "initial", "expert", "")]
    starts += [seed_of(SEED, "start", m) for m in range(1, EXPERTS)]
    pool = [network(PIXELS, HIDDEN, CLASSES, seed) for seed in starts]
    gate = network(HIDDEN, GATE_HIDDEN, EXPERTS, seed_of(SEED, "initial", "gate", ""))
    anchors = {q: m for m, q in enumerate(data.anchors)}  # I_q
    for t in range(rounds):
        rng = np.random.default_rng(seed_of(SEED, "participation", t))
        normal = set(rng.choice(sorted(clients.keys() - anchors), ACTIVE, replace=False).tolist())
        gates, experts = [], [[] for _ in pool]
        for i in [i for i in clients if i in anchors or i in normal]:
            client, anchor = clients[i], anchors.get(i)
            chosen = [anchor] if anchor is not None else top(client.scores(gate, client.data.train))
            mine, own = copied(gate), {m: copied(pool[m]) for m in chosen}
            client.train(mine, own, anchor)
            count = client.data.train.windows
            gates.append((count, mine))
            for m, net in own.items():
                experts[m].append((count, net))
        gate = average(gates)  # line 20: experts that no client held keep their values
        pool = [
            average(copies) if copies else net for copies, net in zip(experts, pool, strict=True)
        ]
    unseen = [Client(own, common) for group in data.unseen.values() for own in group.values()]
    chosen = {c: top(c.scores(gate, c.data.test)) for c in unseen}
    return {c.data.id: c.accuracy(gate, {m: pool[m] for m in chosen[c]}) for c in unseen}


if __name__ == "__main__":
    for name, accuracy in ddome().items():
        print(f"{name}: test accuracy {accuracy:.1f} %")
