"""Membership inference: whether an observer can tell what a client trained on from other texts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from coterie.audit.statistics import Values, auc, auc_of_pairs, bootstrapped, tpr_at
from coterie.core.protocol import ClientId
from coterie.core.result.audit import MembershipResult, TruePositiveRate
from coterie.data.chats import ChatBatch
from coterie.data.splits import Numbers, Split

RATE = 0.01  # of false alarms


@dataclass(frozen=True)
class MembershipScores:
    """Scores of one client's rows, the higher the likelier trained on."""

    members: Values  # (n,) of rows that it was trained on
    others: Values  # (m,) of its test split

    @property
    def centred(self) -> "MembershipScores":
        """The scores less the median of both, to compare clients without knowing the members."""
        middle = float(np.median(np.concatenate([self.members, self.others])))
        return MembershipScores(self.members - middle, self.others - middle)


def drawn(
    train: Split, cursor: int, without: Numbers, most: int, rng: np.random.Generator
) -> Numbers:
    """Return in rising order the numbers of at most `most` training rows among the first `cursor`
    that a client has drawn. Rows in `without` are left out: they hold canaries.
    """
    seen = np.setdiff1d(train.numbers(0, min(cursor, train.windows)), without)
    return np.sort(rng.permutation(seen)[:most])


def without_ends(rows: Tensor | ChatBatch, end: int) -> Tensor | ChatBatch:
    """Return rows without the end tokens of documents that are read one by one: these count in
    training alone, and would tell its rows from others.
    """
    if not isinstance(rows, ChatBatch):
        return rows
    counted = rows.counted & (rows.ids != end)
    return replace(rows, counted=counted).at(counted.any(dim=1))


def measured(clients: Mapping[ClientId, MembershipScores], seed: int) -> MembershipResult:
    """Return the AUC, and the share of members found at 1 % of false alarms by one threshold."""
    centred = [scores.centred for scores in clients.values()]
    groups = [part for scores in centred for part in (scores.members, scores.others)]

    def detected(groups: Sequence[Values]) -> float:
        return tpr_at(RATE, np.concatenate(groups[::2]), np.concatenate(groups[1::2]))

    return MembershipResult(
        auc=bootstrapped(groups, auc_of_pairs, seed, "rows"),
        tpr=TruePositiveRate(**vars(bootstrapped(groups, detected, seed, "rows")), fpr=RATE),
        clients={i: auc(scores.members, scores.others) for i, scores in clients.items()},
        members=sum(len(scores.members) for scores in clients.values()),
        others=sum(len(scores.others) for scores in clients.values()),
    )
