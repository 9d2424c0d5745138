"""The methods by name: what `coterie methods` lists and `method.name` of a recipe may be."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.methods.centralized import Centralized
from coterie.methods.cobo import CoBo
from coterie.methods.comigs import CoMiGS
from coterie.methods.commonexpert import CommonExpert
from coterie.methods.ddome import DDOME
from coterie.methods.ditto import Ditto
from coterie.methods.ensemble import Ensemble
from coterie.methods.fc import FC
from coterie.methods.fdlora import FDLoRA
from coterie.methods.fedadg import FedADG
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedavgmoe import FedAvgMoE
from coterie.methods.fedmix import FedMix
from coterie.methods.fedprox import FedProx
from coterie.methods.fedsalora import FedSALoRA
from coterie.methods.fedsr import FedSR
from coterie.methods.ffalora import FFALoRA
from coterie.methods.finetunedfedavg import FinetunedFedAvg
from coterie.methods.flexlora import FlexLoRA
from coterie.methods.hetlora import HetLoRA
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.localmoe import LocalMoE
from coterie.methods.method import Method
from coterie.methods.oracle import Oracle
from coterie.methods.pcl import PCL
from coterie.methods.pfedmoe import PFedMoE
from coterie.methods.pretrained import Pretrained
from coterie.methods.scaffold import Scaffold


@dataclass(frozen=True)
class Entry:
    """A name on the command line: a class, the fields that the name fixes, and where it comes from."""

    method: type[Method]
    title: str
    paper: str
    fixed: Mapping[str, Any] = field(default_factory=dict)


_COMIGS = "Fan et al., On-Device Collaborative Language Modeling via a Mixture of Generalists and Specialists"

_ABLATION = "CoMiGS, Table 5, two experts and a router on the training loss"
_ALTERNATING = "CoMiGS, Table 5, routers on fresh training batches"

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
    "comigs-cobo": Entry(
        CoMiGS,
        "CoMiGS with CoBo's weights",
        "beyond the papers: CoMiGS-1G1S whose generalists are averaged with weights that gradients find",
        {"generalists": 1, "specialists": 1, "aggregate": "cobo"},
    ),
    "pcl": Entry(PCL, "PCL", "Wagner et al., Personalized Collaborative Fine-Tuning for On-Device Large Language Models"),
    "pfedmoe": Entry(PFedMoE, "pFedMoE", "Yi et al., pFedMoE: Data-Level Personalization with Mixture of Experts"),
    "fdlora": Entry(FDLoRA, "FDLoRA", "Qi et al., FDLoRA: Personalized Federated Learning of LLM via Dual LoRA Tuning"),
    "ffa-lora": Entry(FFALoRA, "FFA-LoRA", "Sun et al., Improving LoRA in Privacy-preserving Federated Learning"),
    "fedsa-lora": Entry(FedSALoRA, "FedSA-LoRA", "Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning"),
    "hetlora": Entry(HetLoRA, "HetLoRA", "Cho et al., Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models"),
    "flexlora": Entry(FlexLoRA, "FlexLoRA", "Bai et al., Federated Fine-tuning of LLMs under Heterogeneous Tasks and Client Resources"),
    "local-moe": Entry(LocalMoE, "Local-MoE", f"{_ABLATION}: every client alone", {"updates": "simultaneous"}),
    "fedavg-moe": Entry(FedAvgMoE, "FedAvg-MoE", f"{_ABLATION}: all of it averaged", {"updates": "simultaneous"}),
    "local-moe-tr": Entry(LocalMoE, "Local-MoE-tr", f"{_ALTERNATING}: every client alone", {"updates": "alternating"}),
    "fedavg-moe-tr": Entry(FedAvgMoE, "FedAvg-MoE-tr", f"{_ALTERNATING}: all of it averaged", {"updates": "alternating"}),
    "finetuned-fedavg": Entry(FinetunedFedAvg, "Fine-tuned FedAvg", "FedAvg, then every client alone; a baseline of CoBo"),
    "ditto": Entry(Ditto, "Ditto", "Li et al., Ditto: Fair and Robust Federated Learning Through Personalization"),
    "ifca": Entry(IFCA, "IFCA", "Ghosh et al., An Efficient Framework for Clustered Federated Learning"),
    "fc": Entry(FC, "FC", "Werner et al., Provably Personalized and Robust Federated Learning: Federated Clustering"),
    "oracle": Entry(Oracle, "Oracle", "FedAvg inside the true clusters: a bound for methods that must find them"),
    "cobo": Entry(CoBo, "CoBo", "Hashemi et al., CoBo: Collaborative Learning via Bilevel Optimization"),
    "common-expert": Entry(CommonExpert, "Common expert", "the frozen, pretrained expert that everybody has; a baseline of DDOME"),
    "fedmix": Entry(FedMix, "FedMix", "Reisser et al., Federated Mixture of Experts: all experts go to everybody"),
    "ensemble": Entry(Ensemble, "Average ensembles", "Lakshminarayanan et al., Simple and Scalable Predictive Uncertainty Estimation"),
    "fedprox": Entry(FedProx, "FedProx", "Li et al., Federated Optimization in Heterogeneous Networks"),
    "scaffold": Entry(Scaffold, "SCAFFOLD", "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning"),
    "fedsr": Entry(FedSR, "FedSR", "Nguyen et al., FedSR: A Simple and Effective Domain Generalization Method for Federated Learning"),
    "fedadg": Entry(FedADG, "FedADG", "Zhang et al., Federated Learning with Domain Generalization"),
    "ddome": Entry(DDOME, "DDOME", "Farhat et al., Learning to Specialize: Joint Gating-Expert Training for Adaptive MoEs"),
}

__all__ = ["METHODS", "Entry", "Method"]
