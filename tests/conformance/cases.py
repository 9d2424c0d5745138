"""Every method by name, with settings under which two rounds show all that it does. A new method joins with one line."""

from coterie.methods import METHODS, Method
from coterie.recipe import build_method

CASES: dict[str, dict[str, object]] = {
    "pretrained": {},
    "centralized": {"rounds": 2, "local_steps": 2},
    "local": {"rounds": 2, "local_steps": 2},
    "fedavg": {"rounds": 2, "local_steps": 2},
    "comigs": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1, "generalists": 2, "specialists": 2},
    "comigs-1g1s": {"rounds": 2, "local_steps": 2, "router_every": 2, "router_steps": 2},
    "comigs-2g": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-2s": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
    "comigs-1gxs": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1, "specialists": [0, 1, 3]},
    "comigs-tr": {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1},
}
VARIANTS: dict[str, dict[str, object]] = {
    "simultaneous": {"name": "comigs", "rounds": 2, "local_steps": 2, "updates": "simultaneous"},
    "generalist-favoured": {"name": "comigs", "rounds": 2, "local_steps": 1, "router_every": 1, "specialists": 2, "balance": "generalist"},
    "fedavg, one adapter of twice the rank": {"name": "fedavg", "rounds": 2, "local_steps": 2, "budget": "rank"},
}
ALL = {name: {"name": name, **settings} for name, settings in CASES.items()} | VARIANTS


def method_of(case: str) -> Method:
    return build_method(ALL[case])


assert CASES.keys() == METHODS.keys(), f"methods missing from the conformance suite: {METHODS.keys() ^ CASES.keys()}"
