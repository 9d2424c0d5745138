"""The contract of a method (`base`), families (`templates`), one file for each method, their names.

The names are what `coterie methods` lists and `method.name` of a recipe may be. Each is imported
when it is asked for: a list of their names needs no torch. Your own method has the name of its
module and class, `my_package.my_file:MyMethod`; a method of an installed package is an entry point
of the group `coterie.methods`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import TYPE_CHECKING, Any

from coterie.core.own import imported, installed, is_own, own_name, package_of

if TYPE_CHECKING:
    from coterie.methods.base import Method


@dataclass(frozen=True)
class Entry:
    """A name on the command line."""

    home: str  # the class, `file.Class` in this room, or `module:Class` anywhere
    title: str  # in tables and figures
    paper: str  # its source
    fixed: Mapping[str, Any] = field(default_factory=dict)  # fields that the name fixes

    @cached_property
    def method(self) -> "type[Method]":
        """The class."""
        home = self.home if ":" in self.home else f"{__name__}.{self.home.replace('.', ':')}"
        module, _, name = home.partition(":")
        method_class: type[Method] = getattr(import_module(module), name)
        return method_class


_COMIGS = (
    "Fan et al., On-Device Collaborative Language Modeling via a Mixture of Generalists and "
    "Specialists"
)
_ABLATION = "CoMiGS, Table 5, two experts and a router on the training loss"
_ALTERNATING = "CoMiGS, Table 5, routers on fresh training batches"


def _comigs(
    title: str, paper: str, fixed: Mapping[str, Any] = {}, home: str = "comigs.CoMiGS"
) -> Entry:
    """Return an entry of a form of CoMiGS."""
    return Entry(home, title, paper, fixed)


_SHIPPED: Mapping[str, Entry] = {
    "pretrained": Entry("pretrained.Pretrained", "Pretrained", "the base model without training"),
    "centralized": Entry(
        "centralized.Centralized",
        "Centralized",
        "one model on the union of all data: a bound, not private",
    ),
    "local": Entry("local.Local", "Local", "every client trains alone"),
    "fedavg": Entry(
        "fedavg.FedAvg",
        "FedAvg",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data",
    ),
    "comigs": _comigs("CoMiGS", f"{_COMIGS}: any number of generalists and specialists"),
    "comigs-1g1s": _comigs(
        "CoMiGS-1G1S", f"{_COMIGS}: one of each", {"generalists": 1, "specialists": 1}
    ),
    "comigs-2g": _comigs(
        "CoMiGS-2G", f"{_COMIGS}: two generalists", {"generalists": 2, "specialists": 0}
    ),
    "comigs-2s": _comigs(
        "CoMiGS-2S", f"{_COMIGS}: two specialists", {"generalists": 0, "specialists": 2}
    ),
    "comigs-2s-alone": _comigs(
        "CoMiGS-2S, alone",
        f"{_COMIGS}: two specialists, nothing shared, as in the authors' code",
        {"generalists": 0, "specialists": 2, "aggregation": {"rule": "mean"}},
        "comigs_alone.CoMiGSAlone",
    ),
    "comigs-published": _comigs(
        "CoMiGS with its published code's gradient leak",
        f"{_COMIGS}: as its published code runs it, for reproductions",
        home="comigs_published.CoMiGSPublished",
    ),
    "comigs-1gxs": _comigs(
        "CoMiGS-1GXS", f"{_COMIGS}: one generalist, a list of specialists", {"generalists": 1}
    ),
    "comigs-tr": _comigs(
        "CoMiGS-tr",
        f"{_COMIGS}: routers on fresh training batches",
        {"generalists": 1, "specialists": 1, "router_data": "train"},
    ),
    "comigs-cobo": _comigs(
        "CoMiGS with CoBo's weights",
        "beyond the papers: CoMiGS whose generalists are averaged with weights that gradients find",
        home="comigs_cobo.CoMiGSCoBo",
    ),
    "interpolation": Entry(
        "interpolation.Interpolation",
        "Interpolation",
        "Mansour et al., Three Approaches for Personalization with Applications to Federated "
        "Learning: the predictions of several methods' models, mixed",
    ),
    "comigs-pool": _comigs(
        "CoMiGS with a pool",
        "beyond the papers: CoMiGS with M generalists at the server, of which a gate picks K for "
        "each client",
        home="comigs_pool.CoMiGSPool",
    ),
    "pcl": Entry(
        "pcl.PCL",
        "PCL",
        "Wagner et al., Personalized Collaborative Fine-Tuning for On-Device Large Language Models",
    ),
    "pfedmoe": Entry(
        "pfedmoe.PFedMoE",
        "pFedMoE",
        "Yi et al., pFedMoE: Data-Level Personalization with Mixture of Experts",
    ),
    "fdlora": Entry(
        "fdlora.FDLoRA",
        "FDLoRA",
        "Qi et al., FDLoRA: Personalized Federated Learning of LLM via Dual LoRA Tuning",
    ),
    "ffa-lora": Entry(
        "ffalora.FFALoRA",
        "FFA-LoRA",
        "Sun et al., Improving LoRA in Privacy-preserving Federated Learning",
    ),
    "fedsa-lora": Entry(
        "fedsalora.FedSALoRA",
        "FedSA-LoRA",
        "Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning",
    ),
    "hetlora": Entry(
        "hetlora.HetLoRA",
        "HetLoRA",
        "Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models",
    ),
    "flexlora": Entry(
        "flexlora.FlexLoRA",
        "FlexLoRA",
        "Bai et al., Federated Fine-tuning of LLMs under Heterogeneous Tasks and Client Resources",
    ),
    "local-moe": Entry(
        "localmoe.LocalMoE",
        "Local-MoE",
        f"{_ABLATION}: every client trains alone",
        {"updates": "simultaneous"},
    ),
    "fedavg-moe": Entry(
        "fedavgmoe.FedAvgMoE",
        "FedAvg-MoE",
        f"{_ABLATION}: everything averaged",
        {"updates": "simultaneous"},
    ),
    "local-moe-tr": Entry(
        "localmoe.LocalMoE",
        "Local-MoE-tr",
        f"{_ALTERNATING}: every client trains alone",
        {"updates": "alternating"},
    ),
    "fedavg-moe-tr": Entry(
        "fedavgmoe.FedAvgMoE",
        "FedAvg-MoE-tr",
        f"{_ALTERNATING}: everything averaged",
        {"updates": "alternating"},
    ),
    "finetuned-fedavg": Entry(
        "finetunedfedavg.FinetunedFedAvg",
        "Fine-tuned FedAvg",
        "FedAvg, then every client trains alone; a baseline of CoBo",
    ),
    "ditto": Entry(
        "ditto.Ditto",
        "Ditto",
        "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization",
    ),
    "ifca": Entry(
        "ifca.IFCA", "IFCA", "Ghosh et al., An Efficient Framework for Clustered Federated Learning"
    ),
    "fc": Entry(
        "fc.FC",
        "FC",
        "Werner et al., Provably Personalized and Robust Federated Learning: Federated Clustering",
    ),
    "oracle": Entry(
        "oracle.Oracle",
        "Oracle",
        "FedAvg inside the true clusters: a bound for methods that must find them",
    ),
    "cobo": Entry(
        "cobo.CoBo", "CoBo", "Hashemi et al., CoBo: Collaborative Learning via Bilevel Optimization"
    ),
    "common-expert": Entry(
        "commonexpert.CommonExpert",
        "Common expert",
        "the frozen, pretrained expert that every client has; a baseline of DDOME",
    ),
    "fedmix": Entry(
        "fedmix.FedMix",
        "FedMix",
        "Reisser et al., Federated Mixture of Experts: all experts are sent to every client",
    ),
    "ensemble": Entry(
        "ensemble.Ensemble",
        "Average ensembles",
        "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation",
    ),
    "fedprox": Entry(
        "fedprox.FedProx", "FedProx", "Li et al., Federated Optimization in Heterogeneous Networks"
    ),
    "scaffold": Entry(
        "scaffold.Scaffold",
        "SCAFFOLD",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    ),
    "fedsr": Entry(
        "fedsr.FedSR",
        "FedSR",
        "Nguyen et al., FedSR: A Simple and Effective Domain Generalization Method for Federated "
        "Learning",
    ),
    "fedadg": Entry(
        "fedadg.FedADG", "FedADG", "Zhang et al., Federated Learning with Domain Generalization"
    ),
    "ddome": Entry(
        "ddome.DDOME",
        "DDOME",
        "Farhat et al., Learning to Specialize: Joint Gating-Expert Training for Adaptive MoEs",
    ),
}

GROUP = "coterie.methods"  # of the entry points


class _Methods(Mapping[str, Entry]):
    """The shipped methods, those of installed packages, and any other by its module and class."""

    def __iter__(self) -> Iterator[str]:
        yield from _SHIPPED
        yield from (name for name in installed(GROUP) if name not in _SHIPPED)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, name: str) -> Entry:
        if name in _SHIPPED:
            return _SHIPPED[name]
        if name in installed(GROUP):
            point = installed(GROUP)[name]
            return _entry(point.value, package_of(point))
        if is_own(name) and import_problem(name) is None:
            return _entry(name, f"{name.partition(':')[0]}, a method of one's own")
        raise KeyError(name)


METHODS: Mapping[str, Entry] = _Methods()


@cache
def import_problem(name: str) -> str | None:
    """Import `module:Class`, also from the current folder; return why it is no method, or None."""
    from coterie.methods.base import Method

    try:
        candidate = imported(name)
    except ImportError as error:
        return str(error)
    return (
        None
        if isinstance(candidate, type) and issubclass(candidate, Method)
        else f"{name.partition(':')[2]} is not a subclass of coterie.methods.Method"
    )


def name_of(method: "str | type[Method]") -> str:
    """Return the name of a method, given by its class or name."""
    return method if isinstance(method, str) else own_name(method)


@cache
def _entry(home: str, paper: str) -> Entry:
    return Entry(home, home.partition(":")[2], paper)


__all__ = ["GROUP", "METHODS", "Entry", "Method", "import_problem", "is_own", "name_of"]


def __getattr__(name: str) -> Any:
    """Return `Method`, imported when asked for."""
    if name == "Method":
        return import_module("coterie.methods.base").Method
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
