"""Weights that follow what the owner of a mixture writes, kept beside it and never sent."""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock

from torch import Tensor

from coterie.core.errors import CheckpointError, TensorError
from coterie.core.files import load, save
from coterie.models.artifact import FOLLOWED
from coterie.models.interpolation import Follower

TEXTS = 64  # known texts, of which only what is new is observed when they go on


class Following:
    """The weights, (P,) float64, of a client's mixture, by `Follower`; `score` gives the parts'
    log-probabilities, (P, T), of ids from a place on. The file in the client's folder has the
    posterior and the number of tokens, and nothing of the text. Raises CheckpointError if it is
    damaged, or of another mixture.
    """

    def __init__(
        self, folder: Path, weights: Tensor, score: Callable[[list[int], int], Tensor]
    ) -> None:
        self.path, self.weights, self._score = folder / FOLLOWED, weights, score
        self._first, self._texts, self._lock = weights.clone(), list[list[int]](), Lock()
        self._kept()

    def _kept(self) -> Follower:
        """Return the follower that the file holds, a new one without a file; take its weights."""
        follower = Follower(len(self._first), self._first)
        if self.path.exists():
            try:
                follower.resume(load(self.path)[0])
            except (CheckpointError, TensorError) as error:
                remedy = f"Delete {self.path}, to begin again with the first weights."
                raise CheckpointError(error.problem, remedy) from None
        self.weights.copy_(follower.weights)
        return follower

    def observe(self, ids: list[int], generated: bool) -> None:
        """Follow what is new of a text, with which no known one begins, unless it was generated;
        the text is known from now on. Raises SaveError.
        """
        with self._lock:
            known = max((_common(ids, text) for text in self._texts), default=0)
            if known == len(ids):
                return
            if len(ids) > 1 and not generated:  # a first token follows nothing
                follower = self._kept()  # another program may have gone on
                follower.observe(self._score(ids, known))
                save(self.path, follower.state(), {"format": "pt"})
                self.weights.copy_(follower.weights)
            others = [text for text in self._texts if text != ids[: len(text)]]
            self._texts = [*others, ids][-TEXTS:]

    def reset(self) -> None:
        """Return to the first weights."""
        with self._lock:
            self.path.unlink(missing_ok=True)
            self._kept()


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return with how many equal tokens two texts begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
