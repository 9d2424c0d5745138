"""Personal models of one client whose predictions are mixed, used like one."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.core.names import encoded
from coterie.data.chats.splits import ChatBatch
from coterie.models.adapter import Adapter
from coterie.models.artifact import AboutMixture, Origin, read_mixture, save_mixture, verify
from coterie.models.interpolation import interpolate
from coterie.models.predictions import Prediction, joined, score_of
from coterie.models.slots import Attachable
from coterie.models.windows import TextBatch
from coterie.personal.following import Following
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

    @property
    def shares(self) -> dict[str, float]:
        return dict(zip(self.parts, self.weights.tolist(), strict=True))

    @cached_property
    def fast(self) -> Attachable:
        """The adapters prepared for inference, mixed."""
        return Mixed(Stacks.of(self.adapters, self.backbone), self.weights[None])

    def follow(self, folder: Path) -> None:
        """Let the weights follow what the owner writes, see `observe`, from those kept in a folder.
        Raises CheckpointError.
        """
        self.following = Following(folder, self.weights, self._log_probs)

    @torch.no_grad()
    def _log_probs(self, ids: list[int], start: int) -> Tensor:
        """Return the parts' log-probabilities, (P, T), of a text's tokens from a place on, as far
        as they fit the base's context.
        """
        last = torch.tensor(ids)[None, -self.backbone.context_limit :]
        places = torch.arange(last.shape[1])[None]
        batch = ChatBatch(last, places >= start - len(ids) + last.shape[1], places)
        return self._predictions([batch])[0][..., 0]

    def _predictions(self, batches: Iterable[TextBatch]) -> Prediction:
        """Return the log-probabilities of the right tokens in each part, (P, T, 1), and zeros."""
        batches = list(batches)
        return joined([list(part.language.predictions(batches)) for part in self.parts.values()])

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
        log_probs, right = self._predictions(batches)
        nll, tokens = score_of([(interpolate(log_probs, self.weights), right)]).tolist()
        return nll, int(tokens)

    @classmethod
    def load(
        cls, folder: Path, *args: Any, merged: bool = False, **settings: Any
    ) -> "PersonalMixture":
        """Return the mixture in a client's folder; see `personal.load`."""
        verify(folder)
        about = read_mixture(folder)
        if merged:
            raise ModelError("of models that are mixed none is merged", "Leave out merged=True.")
        parts: dict[str, PersonalModel] = {}
        for name in about.weights:
            below = folder / encoded(name)
            parts[name] = PersonalModel.load(below, *args, **settings)
            settings["backbone"] = parts[name].backbone
        return cls(parts, about)
