"""The methods by name: what `coterie methods` lists and `method.name` of a recipe may be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.methods.centralized import Centralized
from coterie.methods.comigs import CoMiGS
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.methods.method import Method
from coterie.methods.pretrained import Pretrained


@dataclass(frozen=True)
class Entry:
    """A name on the command line: a class, the fields that the name fixes, and where it comes from."""

    method: type[Method]
    title: str
    paper: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


_COMIGS = "Fan et al., On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists"

METHODS: Mapping[str, Entry] = {
    "pretrained": Entry(Pretrained, "Pretrained", "the base model without training"),
    "centralized": Entry(Centralized, "Centralized", "one model on the union of all data: a bound, not private"),
    "local": Entry(Local, "Local", "every client alone"),
    "fedavg": Entry(FedAvg, "FedAvg", "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data"),
    "comigs": Entry(CoMiGS, "CoMiGS", f"{_COMIGS}: any number of generalists and specialists"),
    "comigs-1g1s": Entry(CoMiGS, "CoMiGS-1G1S", f"{_COMIGS}: one of each", {"generalists": 1, "specialists": 1}),
    "comigs-2g": Entry(CoMiGS, "CoMiGS-2G", f"{_COMIGS}: two generalists", {"generalists": 2, "specialists": 0}),
    "comigs-2s": Entry(CoMiGS, "CoMiGS-2S", f"{_COMIGS}: two specialists", {"generalists": 0, "specialists": 2}),
    "comigs-1gxs": Entry(CoMiGS, "CoMiGS-1GXS", f"{_COMIGS}: one generalist, a list of specialists", {"generalists": 1}),
    "comigs-tr": Entry(
        CoMiGS, "CoMiGS-tr", f"{_COMIGS}: routers on fresh training batches", {"generalists": 1, "specialists": 1, "router_data": "train"}
    ),
}

__all__ = ["METHODS", "Entry", "Method"]
