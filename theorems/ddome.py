"""Experts before their gate, run: Theorem 1 and appendix J of "Learning to Specialize: Joint
Gating-Expert Training for Adaptive MoEs ...".

Losses are shares 2 L(theta) / E[y^2]: 1 is what the zero function gets. They do not depend on the
covariance of x, for which the text has I / sqrt(d) and the appendix I / d; here it is I.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Generator, Tensor

from theorems.ddome_model import (
    DRAWS,
    Mixture,
    Sample,
)
from theorems.ddome_training import (
    INPUTS,
    PASSES,
    Disjoint,
    Size,
    train_disjointly,
)
from theorems.experiment import Claim, Curve, Experiment, Panel, Table

PAPER = (
    "Farhat et al., Learning to Specialize: Joint Gating-Expert Training for Adaptive MoEs in "
    "Decentralized Settings"
)
SIZES = ((16, 4), (36, 6), (64, 8))  # d and m = sqrt(d), the most experts that the theorem allows
WIDE = tuple(4**k for k in range(2, 7))  # d, for m = 4


def disjoint_training(seed: int) -> Experiment:
    """Theorem 1: experts and then their gate, against both at once."""
    threads = torch.get_num_threads()
    torch.set_num_threads(
        1
        # products are small: threads would wait for each other, and their number would change the
        # sums
    )
    try:
        return _experiment(Generator().manual_seed(seed))
    finally:
        torch.set_num_threads(threads)


def _experiment(generator: Generator) -> Experiment:
    sizes = [Size.run(d, m, generator) for d, m in SIZES]
    wide = [train_disjointly(d, 4, generator) for d in WIDE]
    rows = [size.rows() for size in sizes]
    return Experiment(
        title="Experts trained before their gate do not specialise",
        source=f"{PAPER}, Theorem 1 and appendix J; losses are $2 L / E[y^2]$, mean and "
        f"deviation over {DRAWS} truths and starts",
        claims=(
            *_theorem_claims(sizes, generator),
            *_limit_claims(sizes, wide, generator),
            *_joint_claims(sizes),
            *_proof_claims(sizes, generator),
        ),
        table=Table(
            ("trained", *(f"$d = {size.d}$, $m = {size.m}$" for size in sizes)),
            tuple(
                (name, *(f"{row[name].mean():.3f} ± {row[name].std():.3f}" for row in rows))
                for name in rows[0]
            ),
        ),
        panels=(_loss_panel(rows), _match_panel(sizes[-1]), _wide_panel(wide), _pass_panel(sizes)),
    )


def _means(values: Iterable[Tensor]) -> str:
    return ", ".join(f"{value.mean():.3f}" for value in values)


def _theorem_claims(sizes: list[Size], generator: Generator) -> Iterator[Claim]:
    truth = sizes[0].disjoint.truth
    order = torch.randperm(sizes[0].m, generator=generator)
    test = Sample.draw(truth, generator, INPUTS)
    loss = max(
        float(test.loss(model).max())
        for model in (truth, Mixture(3 * truth.gate[:, order], truth.experts[:, order]))
    )
    other = float(test.loss(Mixture(truth.gate, truth.experts.roll(1, 1))).min())
    yield Claim(
        "$L(theta*) = 0$, whatever the order of the experts and the gate's scale",
        loss <= 1e-9 < other,
        f"{loss:.0e}; with the experts in another order than the gate {other:.2f}",
    )
    least = [float(size.disjoint.distances.min()) for size in sizes]
    yield Claim(
        "$||w_j - w*_j'||$ stays above a constant for every trained expert and every truth (of "
        "norm 1), here not only in the mean over the "
        "gate's start",
        min(least) >= 0.5,
        f"least of {sum(size.disjoint.distances.numel() for size in sizes)}: "
        + ", ".join(f"{value:.2f}" for value in least),
    )
    gated = [size.disjoint.gated for size in sizes]
    yield Claim(
        "So does $L / E[y^2]$ once the gate is trained, as $d$ grows with $m = sqrt(d)$",
        min(float(loss.min()) for loss in gated) >= 0.4
        and bool(torch.stack(gated).mean(1).diff().min() > 0),
        f"{_means(gated)} after {_means(size.disjoint.initial for size in sizes)} at the gate's "
        f"start; one linear model has "
        f"{_means(size.disjoint.linear for size in sizes)}",
    )
    joint = [size.joint["likelihood"] for size in sizes]
    matched = min(float(size.nearness.amax(k).min()) for size in sizes for k in (1, 2))
    yield Claim(
        "Trained jointly, every expert finds a truth of its own and the loss falls below 0.1",
        max(float(loss.max()) for loss in joint) < 0.1 and matched >= 0.95,
        f"{_means(joint)}; least cosine of an expert and its truth {matched:.4f}, where disjoint "
        f"training has "
        f"{_means(size.disjoint.cosines for size in sizes)} in the mean",
    )


def _limit_claims(sizes: list[Size], wide: list[Disjoint], generator: Generator) -> Iterator[Claim]:
    """How far the statement reaches."""
    oracle = [size.disjoint.oracle for size in sizes]
    yield Claim(
        "No gate can repair the experts, a linear one or any other: even oracle routing leaves a "
        "constant",
        min(float(loss.min()) for loss in oracle) >= 0.25
        and bool(torch.stack(oracle).mean(1).diff().min() > 0),
        _means(oracle),
        beside=True,
    )
    last = wide[-1]
    limits = [last.initial, last.gated, last.oracle, last.linear]
    yield Claim(
        "With $m = 4$ fixed and $d$ growing, experts all tend to the mean of the truths: their "
        "loss to $1 - 1/m$, "
        "that of one linear model, and "
        "their cosine to $1/sqrt(m)$",
        max(abs(float(loss.mean()) - 0.75) for loss in limits) <= 0.08
        and abs(float(last.cosines.mean()) - 0.5) <= 0.05,
        f"$d = {WIDE[-1]}$: (1) {last.initial.mean():.3f}, (2) {last.gated.mean():.3f}, oracle "
        f"{last.oracle.mean():.3f}, one linear model "
        f"{last.linear.mean():.3f}; cosines {last.cosines.mean():.2f}",
        beside=True,
    )
    printed = [
        float((run.gated * run.labels).mean()) / 2 / math.sqrt(d)
        for d, run in zip(WIDE, wide, strict=True)
    ]
    yield Claim(
        "$L$ itself does not stay above a constant: zero experts are allowed in (1), so that $L "
        "<= E[y^2] / 2$, which "
        "falls like $1 / sqrt(d)$ "
        "with the covariance of the text and like $1 / d$ with that of the appendix",
        printed == sorted(printed, reverse=True) and printed[-1] < printed[0] / 8,
        f"$m = 4$, $d$ = {WIDE[0]} to {WIDE[-1]}, covariance $I / sqrt(d)$: $L$ = "
        + ", ".join(f"{value:.2g}" for value in printed),
        beside=True,
    )
    one, two = (train_disjointly(4, m, generator) for m in (1, 2))
    yield Claim(
        "$m = 1$ is an exception that the theorem does not name: there is nothing to route, and "
        "(1) finds the truth",
        max(float(one.gated.max()), float(one.distances.max())) < 1e-3
        and float(two.gated.mean()) > 0.01,
        f"loss {one.gated.max():.0e}, distance {one.distances.max():.0e}; $m = 2$, $d = 4$: "
        f"{two.gated.mean():.2f} ± {two.gated.std():.2f}",
        beside=True,
    )


def _joint_claims(sizes: list[Size]) -> Iterator[Claim]:
    """Return what it is in joint training that helps."""
    gains = (
        [1 / float(size.disjoint.gated.mean()) for size in sizes],
        [1 / float(size.joint["likelihood"].mean()) for size in sizes],
    )
    yield Claim(
        "It is disjoint training that gains no more than a constant factor on the zero function; "
        "the remark on the theorem says joint",
        max(gains[0]) < 3 and min(gains[1]) > 10,
        *(
            "; ".join(
                f"$d = {size.d}$: {one:.1f} times, jointly {two:.0f} times"
                for size, one, two in zip(sizes, *gains, strict=True)
            ),
        ),
        beside=True,
    )
    last = [size.passes[-1] for size in sizes]
    below = [[int((losses < 0.1).sum()) for losses in size.passes[[0, -1]]] for size in sizes]
    yield Claim(
        "One pass is what fails, not training in turn: (1) and (2) over and over specialise too, "
        "if not from every start",
        all(before == 0 < after for before, after in below),
        f"after {PASSES} passes {_means(last)}, and below 0.1 from "
        + ", ".join(f"{after} of {DRAWS}" for _, after in below)
        + " starts; after one pass from none",
        beside=True,
    )
    smallest = {
        name: sum(int((size.joint[name] < 0.1).sum()) for size in sizes) for name in sizes[0].joint
    }
    yield Claim(
        "What is minimised jointly matters: blended outputs hide experts that do not specialise, "
        "and top-1 routing brings them to light",
        smallest["blended"] < smallest["expected"] <= smallest["likelihood"],
        f"loss below 0.1, of {DRAWS * len(sizes)}: annealed likelihood {smallest['likelihood']} "
        f"(best of two starts), the objective of (2) "
        f"{smallest['expected']}, blended outputs {smallest['blended']}",
        beside=True,
    )


def _proof_claims(sizes: list[Size], generator: Generator) -> Iterator[Claim]:
    """Return steps of appendix J that do not hold."""
    outside = [size.disjoint.outside for size in sizes]
    yield Claim(
        "The proof ends with a bound for the gate's start, not for the trained gate: it wants "
        "routes that are "
        "independent of $x$ across the "
        "span of all $v*_j$ and $v_{j,0}$, which training leaves. The bound by oracle routing "
        "does without",
        all(float(share.mean()) > 0.1 for share in outside),
        f"share of the trained gate's norm across that span: {_means(outside)}",
        beside=True,
    )
    shapes = (*SIZES, (WIDE[-2], 4))
    norms = [_gram_errors(d, m, generator) / math.sqrt(m / d) for d, m in shapes]
    yield Claim(
        "$||V^T V - I|| <= sqrt(m / d) / 2$, said to hold with probability $1 - exp(-Theta(d))$, "
        "hardly ever does: the norm is nearer to "
        "$2 sqrt(m / d)$",
        all(float((norm <= 0.5).float().mean()) < 0.05 for norm in norms),
        "; ".join(
            f"$d = {d}$, $m = {m}$: ${norm.median():.1f} sqrt(m / d)$, below in "
            f"{(norm <= 0.5).float().mean():.1%}"
            for (d, m), norm in zip(shapes, norms, strict=True)
        ),
        beside=True,
    )
    rates = {k: -math.log(_tail(k)) / k for k in (4, 16, 64, 256)}
    yield Claim(
        "Lemma 1 holds with probability $1 - exp(-Theta(m m'))$, without squares: sums of $m m'$ "
        "squared normal "
        "numbers have no thinner tail. "
        "For $m' = m$ that is the theorem's probability, but its expectations over the gate's "
        "start leave nothing random",
        min(rates.values()) > 0.15 and max(rates.values()) < 0.7,
        "$-ln P(chi^2_k > 2 k) / k$: "
        + ", ".join(f"$k = {k}$: {rate:.2f}" for k, rate in rates.items())
        + "; limit 0.15",
        beside=True,
    )


def _gram_errors(d: int, m: int, generator: Generator) -> Tensor:
    """||V^T V - I|| of 500 random V, [500]."""
    V = torch.randn(500, d, m, generator=generator) / math.sqrt(d)
    norms: Tensor = torch.linalg.matrix_norm(V.mT @ V - torch.eye(m), 2)
    return norms


def _tail(k: int) -> float:
    """P(chi^2_k > 2 k) for even k: fewer than k / 2 events of a Poisson process of mean k."""
    return math.fsum(math.exp(-k + i * math.log(k) - math.lgamma(i + 1)) for i in range(k // 2))


def _loss_panel(rows: list[dict[str, Tensor]]) -> Panel:
    curves = tuple(
        Curve(name, [float(row[name].mean()) for row in rows], k)
        for k, name in enumerate(list(rows[0])[:5])
    )
    names = ", ".join(str(d) for d, _ in SIZES)
    return Panel("Loss", f"$k$, with $d$ = {names} and $m = sqrt(d)$", "$2 L / E[y^2]$", curves)


def _match_panel(size: Size) -> Panel:
    """Specialisation made visible."""
    disjoint, joint = (
        torch.sort(cosines.flatten(), descending=True)[0].tolist()
        for cosines in (size.disjoint.cosines, size.nearness.amax(2))
    )
    curves = (
        Curve("jointly", joint, 3),
        Curve("experts at the gate's start", disjoint, 1),
        Curve(
            "mean of the truths, $1 / sqrt(m)$",
            [1 / math.sqrt(size.m)] * len(joint),
            1,
            dashed=True,
        ),
    )
    return Panel(
        f"Experts and truths, $d = {size.d}$, $m = {size.m}$",
        "expert, by its cosine",
        "$max_j' cos(w_j, w*_j')$",
        curves,
        log=False,
    )


def _wide_panel(wide: list[Disjoint]) -> Panel:
    losses = {
        "the best single linear model": [run.linear for run in wide],
        "(1) experts at the gate's start": [run.initial for run in wide],
        "(2) then the gate": [run.gated for run in wide],
        "experts of (1), oracle routing": [run.oracle for run in wide],
    }
    curves = (
        Curve(name, [float(loss.mean()) for loss in values], colour)
        for (name, values), colour in zip(losses.items(), (0, 1, 2, 4), strict=True)
    )
    limit = Curve("$1 - 1 / m$", [0.75] * len(wide), 0, dashed=True)
    return Panel(
        "Four experts",
        f"$k$, with $d = {WIDE[0]} · 4^k$",
        "$2 L / E[y^2]$",
        (*curves, limit),
        log=False,
    )


def _pass_panel(sizes: list[Size]) -> Panel:
    curves = tuple(
        Curve(
            f"$d = {size.d}$, $m = {size.m}$",
            [float(size.disjoint.initial.mean()), *size.passes.mean(1).tolist()],
            k,
        )
        for k, size in enumerate(sizes)
    )
    return Panel("Experts and gate in turn", "times (1) and (2)", "$2 L / E[y^2]$", curves)
