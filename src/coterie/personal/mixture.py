"""Personal models of one client whose predictions are mixed, used like one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.core.isolation import inference
from coterie.core.names import encoded
from coterie.data.chats.splits import ChatBatch
from coterie.models.adapter import Adapter
from coterie.models.artifact import AboutMixture, Origin, read_mixture, save_mixture, verify
from coterie.models.interpolation import fit_weights, interpolate
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.predictions import Prediction, joined, score_of
from coterie.models.slots import Attachable
from coterie.models.windows import TextBatch
from coterie.personal.following import Following
from coterie.personal.inference.packing import padded
from coterie.personal.inference.stacks import Mixed, Stacks
from coterie.personal.model import PersonalModel


class PersonalMixture(PersonalModel):
    """A client's language models, by method, on one base, predictions mixed: p = sum_k w_k p_k."""

    def __init__(self, parts: Mapping[str, PersonalModel], about: AboutMixture) -> None:
        self.parts, first = dict(parts), next(iter(parts.values()))
        whole = replace(first.about, method=about.method, round=about.round)
        super().__init__(first.language, whole)
        self.mixture = about
        self.weights = torch.tensor([about.weights[name] for name in parts], dtype=torch.float64)

    @property
    def adapters(self) -> list[Adapter]:
        return [model.adapter for model in self.parts.values()]

    @property
    def experts(self) -> tuple[str, ...]:
        """Return (): the experts of the parts are not those of one model."""
        return ()

    @property
    def shares(self) -> dict[str, float]:
        return dict(zip(self.parts, self.weights.tolist(), strict=True))

    @cached_property
    def fast(self) -> Attachable:
        """The adapters prepared for inference, mixed."""
        return Mixed(Stacks.of(self.adapters, self.backbone), self.weights[None])

    def follow(self, folder: Path) -> None:
        """Let weights follow the owner's text, from those in a folder. Raises CheckpointError."""
        self.following = Following(folder, self.weights, self._log_probs)

    @inference()
    def _log_probs(self, ids: list[int], start: int) -> Tensor:
        """Return the parts' log-probabilities, (P, T), from a place on, within the context."""
        last = torch.tensor(ids)[None, -self.backbone.context_limit :]
        places = torch.arange(last.shape[1])[None]
        batch = ChatBatch(last, places >= start - len(ids) + last.shape[1], places)
        return self._predictions([batch])[0][..., 0]

    def _predictions(self, batches: Iterable[TextBatch]) -> Prediction:
        """Return the log-probabilities of the right tokens in each part, (P, T, 1), and zeros."""
        batches = list(batches)
        return joined([list(part.language.predictions(batches)) for part in self.parts.values()])

    @inference()
    def fit(self, batches: Iterable[TextBatch], prior: float) -> None:
        """Fit the weights to a text, see `fit_weights`."""
        # in place, as `fast` has them too
        self.weights.copy_(fit_weights(self._predictions(batches)[0][..., 0], prior))
        self.mixture = replace(self.mixture, weights=self.shares)

    def routing(self, ids: Tensor) -> Tensor:
        """Raise ModelError: ask one of the `parts`."""
        raise ModelError("a mixture of models has no router", "Ask one of its parts.")

    def save_pretrained(self, folder: Path | str, **_: object) -> None:
        """Write all parts and their weights to a folder that `coterie.load` reads."""
        for name, model in self.parts.items():
            model.save_pretrained(Path(folder) / encoded(name))
        about = self.mixture
        origin = Origin(about.method, about.recipe, about.round, about.seed)
        save_mixture(Path(folder), about.client, about.weights, origin)

    @inference()
    def predicted(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        logits, targets = zip(
            *(part.language.predicted(batch) for part in self.parts.values()), strict=True
        )
        log_probs = torch.stack([each.float().log_softmax(dim=-1) for each in logits])
        return interpolate(log_probs, self.weights), targets[0]

    @inference()
    def score(self, batches: Iterable[TextBatch]) -> tuple[float, int]:
        log_probs, right = self._predictions(batches)
        nll, tokens = score_of([(interpolate(log_probs, self.weights), right)]).tolist()
        return nll, int(tokens)

    @classmethod
    def load(cls, folder: Path, *args: Any, **settings: Any) -> "PersonalMixture":
        """Return the mixture in a client's folder; see `personal.load`."""
        verify(folder)
        about = read_mixture(folder)
        parts: dict[str, PersonalModel] = {}
        for name in about.weights:
            below = folder / encoded(name)
            parts[name] = PersonalModel.load(below, *args, **settings)
            settings["backbone"] = parts[name].backbone
        return cls(parts, about)


@inference()
def mixed_parameters(mixture: PersonalMixture, experts: Sequence[Tensor]) -> PersonalModel:
    """Return one model that has the parameters of all parts, mixed, and takes one pass.

    Its experts are those of all parts, and each token uses all, by constants c, (blocks, n_k) of
    each part, over all parts 1 in all: an MLP is sum_j c_j MLP_j(x). A layer of the attention is W
    + sum_k w_k gamma_k B_k A_k, with the parts' weights w. A part's router is left out: give the
    means of its weights.
    """
    layouts = [model.layout for model in mixture.parts.values()]
    count, rank = sum(each.experts for each in layouts), sum(each.rank for each in layouts)
    wide, alpha = max(each.expert_rank for each in layouts), math.sqrt(rank)  # attention's gamma: 1
    layout = Layout(count, 0, True, rank, alpha, mlp_rank=wide, top_k=count, balance="none")
    model = LanguageModel(mixture.backbone, layout)
    parts = [adapter.updates() for adapter in mixture.adapters]
    for path, lora in model.adapter.loras().items():
        updates = [part[path.replace(".generalist", "")] for part in parts]
        if ".attention." in path:
            lora.A.copy_(torch.cat([A for A, _ in updates], dim=1))
            scaled = [w * B for w, (_, B) in zip(mixture.weights, updates, strict=True)]
            lora.B.copy_(torch.cat(scaled, dim=2))
        else:
            lora.A.copy_(padded([one for A, _ in updates for one in A]))
            lora.B.copy_(padded([one / lora.gamma for _, B in updates for one in B]))
    for router, c in zip(model.adapter.routers(), torch.cat([*experts], dim=1), strict=True):
        bias = c.clamp_min(torch.finfo(c.dtype).tiny).log()
        router.load_state_dict({"weight": torch.zeros_like(router.weight), "bias": bias})
    return PersonalModel(model, replace(mixture.about, layout=layout))
