"""Every method by name, with settings under which two rounds show all that it does. A new method
joins with one line.
"""

import pytest

from coterie.methods import METHODS, Method
from coterie.methods.section import build_method

CASES: dict[str, dict[str, object]] = {
    "pretrained": {},
    "centralized": {"rounds": 2, "local_steps": 2},
    "local": {"rounds": 2, "local_steps": 2},
    "fedavg": {"rounds": 2, "local_steps": 2},
    "comigs": {
        "rounds": 2,
        "local_steps": 2,
        "router_every": 1,
        "router_steps": 1,
        "generalists": 2,
        "specialists": 2,
    },
    "comigs-1g1s": {"rounds": 2, "local_steps": 2, "router_every": 2, "router_steps": 2},
    "comigs-2g": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-2s": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-2s-alone": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-published": {"rounds": 2, "local_steps": 2, "router_every": 2, "router_steps": 2},
    "comigs-1gxs": {
        "rounds": 2,
        "local_steps": 2,
        "router_every": 1,
        "router_steps": 1,
        "specialists": [0, 1, 3],
    },
    "comigs-tr": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-auto": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "interpolation": {"rounds": 2, "local_steps": 2, "parts": ["local", "fedavg"]},
    "pcl": {"rounds": 2, "local_steps": 2},
    "pfedmoe": {"rounds": 2, "local_steps": 2},
    "fdlora": {
        "rounds": 2,
        "local_steps": 2,
        "alone": 0.5,
        "sync_every": 1,
        "fusion_samples": 4,
        "fusion_steps": 6,
        "fusion_l1": 0,
    },
    "ffa-lora": {"rounds": 2, "local_steps": 2},
    "fedsa-lora": {"rounds": 2, "local_steps": 2},
    "hetlora": {"rounds": 2, "local_steps": 2, "ranks": [4, 2, 3], "prune": 0.6},
    "flexlora": {"rounds": 2, "local_steps": 2, "ranks": [4, 2, 3]},
    "flora": {"rounds": 2, "local_steps": 2, "ranks": [4, 2, 3]},
    "sdflora": {"rounds": 2, "local_steps": 2, "ranks": [4, 2, 3], "local_rank": 2},
    "fedex-lora": {"rounds": 2, "local_steps": 2},
    "fedalt": {"rounds": 2, "local_steps": 2},
    "feddpa-f": {"rounds": 2, "local_steps": 2, "start": 0.5},
    "feddpa-t": {"rounds": 2, "local_steps": 2},
    "fedlease": {"rounds": 2, "local_steps": 2, "experts": 3, "alone": 0.5},
    "fedamole": {"rounds": 2, "local_steps": 2, "experts": 4, "most_experts": 4},
    "local-moe": {"rounds": 2, "local_steps": 2},
    "fedavg-moe": {"rounds": 2, "local_steps": 2},
    "local-moe-tr": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "fedavg-moe-tr": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "finetuned-fedavg": {"rounds": 2, "local_steps": 2},
    "ditto": {"rounds": 2, "local_steps": 2},
    "fedper": {"rounds": 2, "local_steps": 2},
    "fedrep": {"rounds": 2, "local_steps": 2},
    "lg-fedavg": {"rounds": 2, "local_steps": 2},
    "fedbn": {"rounds": 2, "local_steps": 2},
    "fedbabu": {"rounds": 2, "local_steps": 2, "start": 0.5},
    "apfl": {"rounds": 2, "local_steps": 2},
    "pfedme": {"rounds": 2, "local_steps": 2, "inner_steps": 1, "prox": 1.0},
    "per-fedavg": {"rounds": 2, "local_steps": 2},
    "fedala": {"rounds": 2, "local_steps": 2},
    "fedfomo": {"rounds": 2, "local_steps": 2},
    "fedproto": {"rounds": 2, "local_steps": 2},
    "ifca": {"rounds": 2, "local_steps": 2},
    "fc": {"rounds": 2, "local_steps": 2},
    "oracle": {"rounds": 2, "local_steps": 2},
    "cobo": {"rounds": 2, "local_steps": 2, "pairs": "all", "gamma": 10},
    "common-expert": {},
    "fedmix": {"rounds": 2, "local_steps": 2},
    "ensemble": {"rounds": 2, "local_steps": 2, "initial": "random"},
    "fedprox": {"rounds": 2, "local_steps": 2, "mu": 0.5},
    "scaffold": {"rounds": 2, "local_steps": 2},
    "fedsr": {"rounds": 2, "local_steps": 2},
    "fedadg": {"rounds": 2, "local_steps": 2, "alone": 0.5, "hidden": 6},
    "ddome": {"rounds": 2, "local_steps": 2, "pool": 3},
    "ddome-shared": {
        "rounds": 2,
        "local_steps": 2,
        "parts": [{"name": "ddome", "pool": 3, "coverage": 0.8}, "fedavg"],
    },
}
VARIANTS: dict[str, dict[str, object]] = {
    "three parts": {
        "name": "interpolation",
        "rounds": 2,
        "local_steps": 2,
        "parts": ["local", "fedavg", {"name": "comigs-1g1s", "router_every": 1}],
    },
    "generalist-favoured": {
        "name": "comigs",
        "rounds": 2,
        "local_steps": 1,
        "router_every": 1,
        "specialists": 2,
        "balance": "generalist",
    },
    "cobo on the simplex": {
        "name": "cobo",
        "rounds": 2,
        "pairs": "all",
        "gamma": 1,
        "projection": "simplex",
        "pull": "decoupled",
    },
    "cobo, its output drawn": {
        "name": "cobo",
        "rounds": 2,
        "pairs": "constant",
        "output": "uniform",
    },
    "fc, one model an exchange": {
        "name": "fc",
        "rounds": 2,
        "cluster_size": 2,
        "exchange_mb": 1e-6,
    },
    "fedavg, one adapter of twice the rank": {
        "name": "fedavg",
        "rounds": 2,
        "local_steps": 2,
        "budget": "rank",
    },
    "fedavg, by samples": {
        "name": "fedavg",
        "rounds": 2,
        "local_epochs": 1,
        "aggregation": {"weighting": "samples"},
    },
    "fedavg, geometric median": {
        "name": "fedavg",
        "rounds": 2,
        "local_steps": 2,
        "aggregation": {"rule": "geometric-median"},
    },
    "ddome, by medians": {
        "name": "ddome",
        "rounds": 2,
        "local_steps": 2,
        "pool": 3,
        "aggregation": {"rule": "median"},
    },
    "ddome, as printed": {
        "name": "ddome",
        "rounds": 2,
        "local_steps": 2,
        "pool": 3,
        "mixture": "scores",
        "answer": "mixture",
    },
    "ddome, warmed up": {
        "name": "ddome",
        "rounds": 2,
        "local_steps": 2,
        "pool": 3,
        "warmup": 1,
        "load": 1.0,
    },
    "ddome, chosen on devices": {
        "name": "ddome",
        "rounds": 2,
        "local_steps": 2,
        "pool": 3,
        "choice": "device",
        "aggregation": {"weighting": "uniform"},
    },
    "ddome without anchors": {
        "name": "ddome",
        "rounds": 2,
        "local_steps": 2,
        "pool": 3,
        "anchors": False,
        "mixture": "probabilities",
    },
}
# Of all of them, those that are made of whole networks.
NETWORKS = (
    *("fedbn", "fedproto"),
    *("fedsr", "fedadg", "common-expert", "fedmix", "ensemble"),
    *("ddome", "ddome, as printed", "ddome without anchors", "ddome, by medians"),
    "ddome, warmed up",
    "ddome, chosen on devices",
    "ddome-shared",
)
# Those that can train LoRAs or a whole network.
PICTURES = (
    *(
        "pretrained",
        "centralized",
        "local",
        "fedavg",
        "pcl",
        "finetuned-fedavg",
        "ditto",
        "ifca",
        "fc",
        "oracle",
        "cobo",
    ),
    *(
        "fedper",
        "fedrep",
        "lg-fedavg",
        "fedbabu",
        "apfl",
        "pfedme",
        "per-fedavg",
        "fedala",
        "fedfomo",
    ),
    *("fedprox", "scaffold", "fedavg, by samples", "fedavg, geometric median"),
    *("cobo on the simplex", "cobo, its output drawn", "fc, one model an exchange"),
)
# Cases whose checks on texts take long: in the default run another form stands for them.
SLOW_TEXTS = (
    *("three parts", "generalist-favoured"),
    # these train whole networks by default, and adapters in the slow tests
    *("fedrep", "lg-fedavg", "fedbabu", "pfedme", "per-fedavg", "fedala", "fedfomo"),
    *("fedavg, by samples", "cobo on the simplex", "cobo, its output drawn"),
)
ALL = {name: {"name": name, **settings} for name, settings in CASES.items()} | VARIANTS


EVERYWHERE = [
    *(
        pytest.param("language", name, marks=pytest.mark.slow if name in SLOW_TEXTS else ())
        for name in ALL
        if name not in NETWORKS
    ),
    *(pytest.param("pictures", name) for name in PICTURES + NETWORKS),
]


def method_of(case: str) -> Method:
    return build_method(ALL[case])


assert CASES.keys() == METHODS.keys(), (
    f"methods missing from the conformance suite: {METHODS.keys() ^ CASES.keys()}"
)
