"""Mixtures of classifiers' predictions against their parts, at the last round.

    python benchmarks/mixed_classifiers.py [--seeds 0 1 2] [--runs FOLDER]

Each run trains all parts of `interpolation` at once, each exactly as that method alone, so that the
parts' own scores come from the same run. Finished runs in the folder are not repeated. The mixtures
with even priors, in which no client hears of the others, are computed from the same models.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, machine
from torch import Tensor

import coterie
from coterie.core.names import encoded
from coterie.core.protocol import MOST_SCORES
from coterie.core.result import RESULT, Result
from coterie.models.interpolation import (
    PRIOR,
    evidence,
    fit_weights,
    grid,
    interpolate,
    settled,
)
from coterie.models.predictions import Prediction, joined, likelihoods
from coterie.personal.classifier import PersonalClassifier
from coterie.runs.problems.prepare import prepare

COBO = {"name": "cobo", "rho": 0.03, "gamma": 0.01, "pairs": "mixed", "switch": 0.33}
DDOME = {"name": "ddome", "pool": 5, "top_k": 2}
EVEN = "mixture, even prior of {:g}"
PRIORS = (0.0, 0.3, 1.0, PRIOR)  # strengths
KNOWN = {"data": {"unseen": {}}, "training": {"stateless": False}}
# recipe, parts, fields of the method, and other settings
TABLES: tuple[tuple[str, tuple[Any, ...], dict[str, Any], dict[str, Any]], ...] = (
    ("cobo-digits", ("local", "fedavg", COBO), {"rounds": 600, "local_steps": 1}, {}),
    ("ddome-digits", ("local", "fedavg"), {"rounds": 120, "local_epochs": 1}, KNOWN),
    ("ddome-digits", ("local", "fedavg", DDOME), {"rounds": 120, "local_epochs": 1}, KNOWN),
    ("ddome-mnist", ("local", "fedavg", DDOME), {"rounds": 100, "local_epochs": 1}, KNOWN),
)


def accuracy(log_probs: Tensor, right: Tensor) -> float:
    return 100 * float((log_probs.argmax(dim=1) == right).double().mean())


def predictions(run: Path, names: list[str]) -> tuple[dict[str, Prediction], ...]:
    """Each client's predictions by part, of validation and of test data, from the run's models."""
    data = prepare(coterie.Recipe.load(run / "recipe.yaml")).problem.federation.clients
    valid, test = dict[str, Prediction](), dict[str, Prediction]()
    for i, splits in data.items():
        folder = run / "clients" / encoded(i)
        parts = [PersonalClassifier.load(folder / encoded(name)) for name in names]
        for found, split in ((valid, splits.valid), (test, splits.test)):
            found[i] = joined([[(p(b.x), b.y) for b in split.scoring(64)] for p in parts])
    return valid, test


def even(valid: Prediction, test: Prediction, prior: float) -> tuple[float, float]:
    """A client's test accuracy and loss where the prior of its weights is even."""
    right = likelihoods(*valid)
    mixed = interpolate(test[0], settled(right, fit_weights(right, prior)))
    return accuracy(mixed, test[1]), -float(mixed.gather(1, test[1][:, None]).mean())


def left_out(valid: dict[str, Prediction]) -> dict[str, float]:
    """The mean loss of a validation example by weights fitted without it, for each prior. The
    centre is fitted without it too.
    """
    rights = [likelihoods(*of) for of in valid.values()]
    mixtures = grid(len(rights[0]), MOST_SCORES)
    of_all = [evidence(right, mixtures) for right in rights]
    losses: dict[str, list[float]] = {}
    for right, own in zip(rights, of_all, strict=True):
        for t in range(right.shape[1]):
            rest = torch.cat([right[:, :t], right[:, t + 1 :]], dim=1)
            total = torch.stack(of_all).sum(dim=0) - own + evidence(rest, mixtures)
            centre = total.softmax(dim=0) @ mixtures
            weights = {EVEN.format(prior): fit_weights(rest, prior) for prior in PRIORS}
            weights |= {"mixture": fit_weights(rest, centre=centre)}
            for name, of in weights.items():
                losses.setdefault(name, []).append(-float(interpolate(right[:, t], of)))
    return {name: statistics.fmean(of) for name, of in losses.items()}


def row(run: Path) -> dict[str, Any]:
    """What one run comes to: means over clients, and how far each is behind its best part."""
    result = Result.read(run)
    parts = {i: own.parts or {} for i, own in result.clients.items()}
    names = list(next(iter(parts.values())))
    tests = {name: {i: parts[i][name].test for i in parts} for name in names}
    losses = {
        name: statistics.fmean(parts[i][name].test_loss or 0.0 for i in parts) for name in names
    }
    valid, test = predictions(run, names)
    for prior in PRIORS:
        scores = {i: even(valid[i], test[i], prior) for i in parts}
        tests[EVEN.format(prior)] = {i: of for i, (of, _) in scores.items()}
        losses[EVEN.format(prior)] = statistics.fmean(loss for _, loss in scores.values())
    tests["mixture"] = {i: own.test for i, own in result.clients.items()}
    regret = {i: max(tests[name][i] for name in names) - tests["mixture"][i] for i in parts}
    losses["mixture"] = statistics.fmean(of.test_loss or 0.0 for of in result.clients.values())
    means = {name: statistics.fmean(of.values()) for name, of in tests.items()}
    weights = {
        name: statistics.fmean(parts[i][name].weight or 0.0 for i in parts) for name in names
    }
    losers = sum(each > 0.5 for each in regret.values())
    return {
        "accuracy": means,
        "loss": losses,
        "left out": left_out(valid),
        "weights": weights,
        "regret": {"mean": statistics.fmean(regret.values()), "largest": max(regret.values())},
        "clients": len(regret),
        "behind by over 0.5 points": losers,
        "by client": {i: {name: round(of[i], 2) for name, of in tests.items()} for i in parts},
    }


def page(rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [(__doc__ or "").partition("\n\n")[0], ""]
    lines += [
        "Test accuracy in %, mean over clients; mean and standard deviation over seeds. Left out: "
        "the loss of a validation example by weights that are fitted without it.",
        "",
    ]
    for recipe, parts in dict.fromkeys((of["recipe"], tuple(of["parts"])) for of in rows):
        seeds = [of for of in rows if (of["recipe"], tuple(of["parts"])) == (recipe, parts)]
        lines += [
            f"## {recipe}: {', '.join(parts)}",
            "",
            "| row | accuracy | loss, nats | left out, nats | weight |",
        ]
        lines += ["| --- | --- | --- | --- | --- |"]
        for name in seeds[0]["accuracy"]:
            of = [seed["accuracy"][name] for seed in seeds]
            spread = statistics.stdev(of) if len(of) > 1 else 0.0
            shares = [seed["weights"][name] for seed in seeds if name in seed["weights"]]
            share = f"{statistics.fmean(shares):.2f}" if shares else ""
            loss = f"{statistics.fmean(seed['loss'][name] for seed in seeds):.3f}"
            nats = [seed["left out"][name] for seed in seeds if name in seed["left out"]]
            loss += f" | {statistics.fmean(nats):.3f}" if nats else " | "
            lines += [f"| {name} | {statistics.fmean(of):.2f} ± {spread:.2f} | {loss} | {share} |"]
        behind = sum(seed["behind by over 0.5 points"] for seed in seeds)
        largest = max(seed["regret"]["largest"] for seed in seeds)
        mean = statistics.fmean(seed["regret"]["mean"] for seed in seeds)
        lines += [
            "",
            f"The mixture is {mean:.2f} points behind the best part of each client on average (the "
            f"best chosen on the same test data), at most {largest:.2f}, and over 0.5 for {behind} "
            f"of {sum(seed['clients'] for seed in seeds)} clients of {len(seeds)} seeds.",
            "",
        ]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("mixed-classifiers"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for recipe, parts, fields, settings in TABLES:
        names = [part if isinstance(part, str) else str(part["name"]) for part in parts]
        for seed in arguments.seeds:
            out = arguments.runs / f"{recipe}-{len(parts)}-{seed}"
            method = {"name": "interpolation", "parts": [*parts], **fields, "shared_prior": True}
            if not (out / RESULT).is_file():
                coterie.run(recipe, out=out, seed=seed, method=method, compare_with=[], **settings)
            found = row(out)
            rows.append({"recipe": recipe, "parts": names, "seed": seed} | found)
            print(recipe, *names, seed, found["accuracy"], flush=True)
    text = json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n"
    (RESULTS / "mixed-classifiers.json").write_text(text)
    (RESULTS / "mixed-classifiers.md").write_text(page(rows))


if __name__ == "__main__":
    main()
