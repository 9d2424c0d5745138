"""CoMiGS in one file: Algorithm 1 of "On-Device Collaborative Language Modeling via a Mixture of
Generalists and Specialists" (Fan et al., 2024), in PyTorch and transformers alone.

    python examples/comigs_in_one_file.py

Four clients with texts of their own train LoRA experts on one frozen language model. Each MLP has
one generalist, which the server averages, and one specialist and a router, which stay with the
client. It is what `coterie run quickstart` computes, without all that makes it fast, resumable and
safe: only the clients' data are coterie's. tests/test_one_file.py compares the two.
"""

import hashlib
import math
from importlib.resources import files

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from transformers import AutoModelForCausalLM, AutoTokenizer

from coterie.data.corpora import Stdlib

BASE = str(files("coterie.models") / "mini")  # a Llama of 4 blocks, 6 M parameters
ROUNDS, LOCAL_STEPS = 10, 5  # T and L
ROUTER_EVERY, ROUTER_STEPS = 15, 5  # tau and s
BATCH, CONTEXT = 8, 64
RANK, ALPHA = 8, 16.0
EXPERTS_LR, ROUTERS_LR = 5e-3, 2e-3
SEED = 0


def seed_of(*parts: int | str) -> int:
    """Return a seed for one purpose, so that nothing depends on the order of computation."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def initial(name: str, role: str, client: str, *shape: int) -> nn.Parameter:
    """Return a trainable tensor: B = 0, so that an update is zero at first, and A and routers from
    U(-1/sqrt(in), 1/sqrt(in)). What is shared starts alike at all clients.
    """
    if name.endswith(".B"):
        return nn.Parameter(torch.zeros(shape))
    bound = 1 / math.sqrt(shape[-1])
    stream = seed_of(SEED, "initial", role, "" if role == "generalist" else client)
    rng = torch.Generator().manual_seed(seed_of(stream, role, name))
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=rng))


class LoRA(nn.Module):
    """W x + gamma B A x, with a frozen W and gamma = alpha / sqrt(r)."""

    def __init__(self, name: str, role: str, client: str, base: nn.Linear) -> None:
        super().__init__()
        self.A = initial(f"{name}.A", role, client, 1, RANK, base.in_features)
        self.B = initial(f"{name}.B", role, client, 1, base.out_features, RANK)
        self.base = [base]  # in a list: not a part of this module

    def forward(self, x: Tensor) -> Tensor:
        return self.base[0](x) + ALPHA / math.sqrt(RANK) * linear(linear(x, self.A[0]), self.B[0])


class Expert(nn.Module):
    """The MLP of a block with a low-rank update of each of its three linear layers."""

    def __init__(self, name: str, role: str, client: str, mlp: nn.Module) -> None:
        super().__init__()
        self.gate = LoRA(f"{name}.{role}.gate", role, client, mlp.gate_proj)
        self.up = LoRA(f"{name}.{role}.up", role, client, mlp.up_proj)
        self.down = LoRA(f"{name}.{role}.down", role, client, mlp.down_proj)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """sum_j G(x)_j E_j(x) over a generalist and a specialist, with the router G = softmax(W x)
    (CoMiGS, eq. 2). With both experts chosen for every token, load balancing has no gradient.
    """

    def __init__(self, name: str, client: str, mlp: nn.Module) -> None:
        super().__init__()
        self.generalist = Expert(name, "generalist", client, mlp)
        self.specialist = Expert(name, "specialist", client, mlp)
        width = mlp.gate_proj.in_features
        self.router = initial(f"{name}.router.weight", "router", client, 2, width)

    def forward(self, x: Tensor) -> Tensor:
        weights = linear(x, self.router).softmax(dim=-1)
        return weights[..., :1] * self.generalist(x) + weights[..., 1:] * self.specialist(x)


class Client:
    """One client: data, experts, router, and an optimiser for each level of the bilevel problem."""

    def __init__(self, data, base: nn.Module) -> None:
        self.data, self.base = data, base
        self.modules: list[tuple[nn.Module, str, nn.Module]] = []  # where in the base they belong
        self.theta: dict[str, list[nn.Parameter]] = {
            "generalist": [],
            "specialist": [],
            "router": [],
        }
        for k, block in enumerate(base.model.layers):
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):  # shared, like generalists
                place = f"blocks.{k}.attention.{name}"
                lora = LoRA(place, "generalist", data.id, getattr(block.self_attn, name))
                self.modules.append((block.self_attn, name, lora))
                self.theta["generalist"] += lora.parameters()
            mixture = Mixture(f"blocks.{k}.mlp", data.id, block.mlp)
            self.modules.append((block, "mlp", mixture))
            self.theta["generalist"] += mixture.generalist.parameters()
            self.theta["specialist"] += mixture.specialist.parameters()
            self.theta["router"].append(mixture.router)
        experts = self.theta["generalist"] + self.theta["specialist"]
        adamw = {"betas": (0.9, 0.95), "weight_decay": 0.01}
        self.experts = torch.optim.AdamW(experts, lr=EXPERTS_LR, **adamw)
        self.routers = torch.optim.AdamW(self.theta["router"], lr=ROUTERS_LR, **adamw)
        self.drawn = {"train": 0, "valid": 0}  # windows drawn of each split
        self.iteration = 0

    def loss(self, windows: Tensor) -> Tensor:
        """Return the mean next-token cross-entropy on (B, C + 1) token ids."""
        originals = [(parent, name, getattr(parent, name)) for parent, name, _ in self.modules]
        for parent, name, module in self.modules:
            setattr(parent, name, module)
        try:
            logits = self.base(windows[:, :-1].long()).logits
        finally:
            for parent, name, module in originals:
                setattr(parent, name, module)
        return cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].long().flatten())

    def step(self, split: str, optimiser: torch.optim.Optimizer) -> None:
        """Take one step on the next batch of a split, with gradients of this level alone."""
        batch = getattr(self.data, split).batch(self.drawn[split], BATCH)
        self.drawn[split] += BATCH
        wrt = optimiser.param_groups[0]["params"]
        for p, gradient in zip(wrt, torch.autograd.grad(self.loss(batch), wrt), strict=True):
            p.grad = gradient
        optimiser.step()

    def local_round(self, rounds: int) -> None:
        """Do L local iterations (Algorithm 1, lines 4 to 9)."""
        for _ in range(LOCAL_STEPS):
            progress = self.iteration / (rounds * LOCAL_STEPS)  # one cosine over the whole run
            share = 0.1 + 0.9 * (1 + math.cos(math.pi * progress)) / 2
            self.experts.param_groups[0]["lr"] = share * EXPERTS_LR
            self.step("train", self.experts)  # eq. 3: experts descend on training data
            self.iteration += 1
            if self.iteration % ROUTER_EVERY == 0:
                for _ in range(ROUTER_STEPS):
                    self.step("valid", self.routers)  # eq. 4: routers on validation data

    @torch.no_grad()
    def perplexity(self) -> float:
        """Return the perplexity on the client's test text."""
        nll, tokens = 0.0, 0
        for batch in self.data.test.scoring(BATCH):  # the last window may be shorter
            count = batch[:, 1:].numel()
            nll, tokens = nll + count * float(self.loss(batch)), tokens + count
        return math.exp(nll / tokens)


def comigs(rounds: int = ROUNDS) -> dict[str, float]:
    """Train all clients; return the test perplexity of each right after its last iteration."""
    base = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32).requires_grad_(False)
    section = Stdlib(train_tokens=7000, valid_tokens=4000, test_tokens=6000)
    data = section.load(AutoTokenizer.from_pretrained(BASE), CONTEXT, order_seed=SEED)
    clients = [Client(own, base) for own in data.clients.values()]
    for k in range(rounds):
        for client in clients:
            client.local_round(rounds)
        if k + 1 < rounds:  # theta^G <- 1/N sum_i theta_i^G; each client is scored before the last
            with torch.no_grad():
                for copies in zip(*(client.theta["generalist"] for client in clients), strict=True):
                    mean = torch.stack(copies).mean(dim=0)
                    for p in copies:
                        p.copy_(mean)
        print(f"round {k + 1}/{rounds}", flush=True)
    return {client.data.id: client.perplexity() for client in clients}


if __name__ == "__main__":
    for name, score in comigs().items():
        print(f"{name}: test perplexity {score:.2f}")
