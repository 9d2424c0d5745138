"""Personal models of one client whose predictions are mixed, used like one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.core.names import encoded
from coterie.models.adapter import Adapter
from coterie.models.artifact import AboutMixture, Origin, read_mixture, save_mixture, verify
from coterie.models.backbone import Backbone
from coterie.models.interpolation import interpolate
from coterie.models.predictions import joined, score_of
from coterie.models.slots import Attachable
from coterie.personal.inference.mixed import Mixed
from coterie.personal.inference.stacks import Stacks
from coterie.personal.model import PersonalModel


class PersonalMixture(PersonalModel):
    """A client's language models on one base, whose predictions are mixed: p = sum_k w_k p_k.

    Args:
        parts: The models, by the method that trained them.
        about: The origin, and the weight of each part.
    """

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

    @cached_property
    def fast(self) -> Attachable:
        """The adapters prepared for inference, mixed."""
        return Mixed(Stacks.of(self.adapters, self.backbone), self.weights[None])

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

    @torch.no_grad()
    def score(self, batches: Iterable[Tensor]) -> tuple[float, int]:
        batches = list(batches)
        by_part = [list(model.language.predictions(batches)) for model in self.parts.values()]
        log_probs, right = joined(by_part)
        nll, tokens = score_of([(interpolate(log_probs, self.weights), right)]).tolist()
        return nll, int(tokens)

    @classmethod
    def load(
        cls,
        folder: Path,
        base: str | None = None,
        backbone: Backbone | None = None,
        dtype: Literal["fp32", "bf16"] = "fp32",
        device: str = "cpu",
        merged: bool = False,
    ) -> "PersonalMixture":
        """Return the mixture in a client's folder; see `personal.load`."""
        verify(folder)
        about = read_mixture(folder)
        if merged:
            raise ModelError("of models that are mixed none is merged", "Leave out merged=True.")
        parts: dict[str, PersonalModel] = {}
        for name in about.weights:
            below = folder / encoded(name)
            parts[name] = PersonalModel.load(below, base, backbone, dtype, device)
            backbone = parts[name].backbone
        return cls(parts, about)
