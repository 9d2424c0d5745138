"""Secure aggregation by SecAgg+, the server's side: one exchange of which only the sum is seen. See
`secagg_device`.

Replies are checked when they arrive: keys and their owners; receivers of shares, and whether these
fit together (`secagg_cohort`); weights; the revealed shares of others. A client with an invalid
reply is left out, and it alone is named.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, cast

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, RecordDict
from flwr.common import FitIns, Parameters
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.supercore.primitives.asymmetric import bytes_to_public_key

from coterie.aggregation.secure import FEWEST, MODULUS, RANGE, SHARE, Share, combined, levels, step
from coterie.core.errors import TensorError
from coterie.engines.flower import secagg_common as common
from coterie.engines.flower.secagg_cohort import (
    FOREIGN,
    Carry,
    Participants,
    check_lengths,
    configs_of,
    content_with,
    described,
    integers_of,
    listed,
    values_of,
)
from coterie.engines.messages import Reply, Request


@dataclass
class Sum:
    """The result of one masked exchange."""

    mean: np.ndarray | None = None  # of the updates, (d,) float64; None if there is none
    # of the nodes in the sum, without updates
    replies: dict[int, Reply] = field(default_factory=dict)
    # why nodes are not in the sum, or what they did after
    problems: dict[int, str] = field(default_factory=dict)
    # Nodes of a sum that is out of range: an unknown one sent no valid masked update.
    spoilt: list[int] = field(default_factory=list)


def summed(
    carry: Carry, requests: Mapping[int, Request], bodies: Mapping[int, bytes], size: int
) -> Sum:
    """Do one exchange by SecAgg+ on updates of d values; without a mean, `problems` of the result
    names every node. `carry` sends the messages of one stage to nodes, and returns what came in
    time. Raises TensorError if exchanges or tensors differ between nodes; no node was asked.
    """
    if (
        len({common.exchange_name(request) for request in requests.values()}) > 1
        or len({bodies.get(node, b"") for node in requests}) > 1
    ):
        raise TensorError(
            "secure aggregation: clients would be sent different tensors, so their masks would "
            "not cancel"
        )
    if len(requests) < FEWEST:
        few = (
            f"{len(requests)} clients are connected, and secure aggregation needs at least "
            f"{FEWEST}: the sum of fewer would reveal too much about each"
        )
        return Sum(problems=dict.fromkeys(requests, few))
    first = next(iter(requests))
    cohort, result = Participants(carry, common.exchange_name(requests[first]), requests), Sum()
    result.problems = cohort.problems
    try:
        result.mean = _Exchange(cohort, requests, bodies.get(first, b""), size, result).mean()
    except TensorError as error:
        result.replies.clear()
        result.problems |= cohort.left
        why = _why(result.problems)
        result.problems |= {
            node: f"{error.problem}; {why}" for node in requests if node not in result.problems
        }
    return result


def _why(problems: Mapping[int, str]) -> str:
    reasons = dict.fromkeys(problem.splitlines()[0] for problem in problems.values())
    return f"the others: {'; '.join(reasons)}" if reasons else "no reason"


@dataclass
class _Exchange:
    """Masked updates of a cohort, and their sum; `result` receives who is in it."""

    cohort: Participants
    requests: Mapping[int, Request]
    body: bytes
    size: int
    result: Sum

    def mean(self) -> np.ndarray:
        """Return the mean of the updates, (d,) float64. Raises TensorError if there is none."""
        opened = self.cohort.agree()
        return self._unmasked(self._masked_sum(opened), set(self.cohort.proofs))

    def _masked_sum(self, opened: Mapping[int, tuple[int, bytes]]) -> np.ndarray:
        """Have clients train; return the sum of their masked updates, (d,) int64."""
        contents = {}
        for node in self.cohort.proofs:
            text = {common.TEXT: self.requests[node].model_dump_json()}
            content = compat.fitins_to_recorddict(
                FitIns(Parameters([self.body], "safetensors"), cast(Any, text)), keep_input=True
            )
            content.config_records[RECORD_KEY_CONFIGS] = configs_of(
                Stage.COLLECT_MASKED_VECTORS, **self.cohort.forwarded(node)
            )
            if node in opened:
                source, plain = opened[node]
                content.config_records[common.EXCHANGE] = ConfigRecord(
                    {common.OPENED: source, common.SHARE_OPENED: plain}
                )
            contents[node] = content
        sent = self.cohort.exchange(Stage.COLLECT_MASKED_VECTORS, contents, self._masked)
        self.result.replies = {node: reply for node, (reply, _) in sent.items()}
        self.cohort.suffice(sent)
        return cast(np.ndarray, sum(vector for _, vector in sent.values()))

    def _masked(self, node: int, content: RecordDict) -> tuple[Reply, np.ndarray]:
        """Return a client's reply and its masked update, (d,) int64."""
        configs = content.config_records[RECORD_KEY_CONFIGS]
        reply = described(self.requests[node], content)
        parts = cast(list[bytes], listed(configs, {}, (Key.MASKED_PARAMETERS,)).popitem()[1])
        expected = f"expected int64[1] and int64[{self.size}]"
        if len(parts) != 2:
            raise TensorError(f"a masked update of {len(parts)} parts, {expected}")
        weight = integers_of(parts[0], 1, expected)
        vector = integers_of(parts[1], self.size, expected)
        if int(weight[0]) != common.weight_sent(self._bound(node), self.cohort.clients):
            raise TensorError(
                "it did not follow the protocol: its update is not masked, has another weight than "
                "1, or is of another model",
                common.SAME_VERSION,
            )
        return reply, vector

    def _bound(self, node: int = 0) -> common.Bound:
        return common.Bound(self.cohort.digest, sha256(self.body).digest(), node)

    def _unmasked(self, total: np.ndarray, dealers: set[int]) -> np.ndarray:
        """Return the mean, (d,) float64, of a masked sum, (d,), with pairwise masks of the dealers:
        those shared with nodes that sent nothing do not cancel.
        """
        active = set(self.result.replies)
        shares = self._shares(active, dealers - active)
        with common.binding(self._bound()):
            # A client that sent has added its own mask, PRG(seed): take it away.
            for node in active:
                seed = combined(shares[node]) % (1 << 8 * common.SEED)
                total = total - self._mask(seed.to_bytes(common.SEED))
            # A client that did not send leaves its pairwise masks in the others' updates; the
            # sign of a pair's mask follows the order of the two nodes, as Flower adds it.
            for node in dealers - active:
                private = ec.derive_private_key(combined(shares[node]), ec.SECP384R1())
                for other in active:
                    public = bytes_to_public_key(self.cohort.keys[other][0])
                    mask = self._mask(generate_shared_key(private, public))
                    total = total - mask if other > node else total + mask
        total %= MODULUS
        if (total > len(active) * levels(self.cohort.clients)).any():
            self.result.spoilt = sorted(active)
            raise TensorError("the sum is out of range: a client did not follow the protocol")
        return cast(np.ndarray, total * (step(self.cohort.clients) / len(active)) - RANGE)

    def _mask(self, seed: bytes) -> np.ndarray:
        """Return an update's mask, (d,) int64; the stream's first value is for the weight."""
        return common.expanded(seed, MODULUS, [(1,), (self.size,)])[1]

    def _shares(self, active: Collection[int], dead: Collection[int]) -> dict[int, list[Share]]:
        """Return enough shares by client: of seeds if it sent an update, otherwise of keys."""
        lists = {Key.ACTIVE_NODE_ID_LIST: list(active), Key.DEAD_NODE_ID_LIST: list(dead)}
        contents = {node: content_with(configs_of(Stage.UNMASK, **lists)) for node in active}
        read = partial(self._given, active, dead)
        given = self.cohort.exchange(Stage.UNMASK, contents, read)
        self.cohort.suffice(given)
        enough = list(given.values())[: self.cohort.threshold]
        return {owner: [shares[owner] for shares in enough] for owner in (*active, *dead)}

    def _given(
        self, active: Collection[int], dead: Collection[int], node: int, content: RecordDict
    ) -> dict[int, Share]:
        """Return the shares that a client reveals, by owner, checked against the owners' proofs."""
        configs = values_of(content, {}, (Key.NODE_ID_LIST, Key.SHARE_LIST))
        owners = cast(list[int], configs[Key.NODE_ID_LIST])
        data = cast(list[bytes], configs[Key.SHARE_LIST])
        expected = sorted((*active, *dead))
        if len(owners) != len(expected) or sorted(owners) != expected:
            raise TensorError("shares of keys of others than those asked about", FOREIGN)
        check_lengths(data, [SHARE] * len(expected))
        shares = {owner: Share.from_bytes(one) for owner, one in zip(owners, data, strict=True)}
        for owner, share in shares.items():
            proofs = self.cohort.proofs[owner]
            proof = proofs.seed if owner in active else proofs.key
            if not proof.check(self.cohort.ranks[node]).holds(share):
                raise TensorError("a share of a key that is not the one it got", FOREIGN)
        return shares
