"""The clients of an exchange of secure aggregation, until all can be unmasked: what the server
accepts of them, checked before it is read, their keys, and shares of these that every holder has
checked. See `secagg_device`.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common import ndarray_to_bytes
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from coterie.aggregation.secure import MODULUS, threshold
from coterie.core.errors import CoterieError, TensorError
from coterie.engines.flower import secagg_common as common
from coterie.engines.flower.secagg_common import COMPLAINTS, EXCHANGE, FITRES, SAME_VERSION, TEXT
from coterie.engines.messages import Reply, Request, check_answers, parsed

FOREIGN = "It did not come from coterie, or was changed on its way."
_REPLY = {f"{FITRES}.metrics", f"{FITRES}.status", RECORD_KEY_CONFIGS}


class NoAnswer(TensorError):
    """A node does not answer."""


def content_of(node: int, stage: str, answered: Message | None) -> RecordDict:
    """Return a node's answer. Raises TensorError: it is missing, an error, or another node's."""
    if answered is None:
        raise NoAnswer(f"no reply in time ({stage})")
    if answered.has_error():
        raise NoAnswer(answered.error.reason or f"no reason (code {answered.error.code})")
    if answered.metadata.src_node_id != node:
        raise TensorError(f"node {answered.metadata.src_node_id} answered in its place")
    return answered.content


def configs_of(stage: str, **values: Any) -> ConfigRecord:
    return ConfigRecord({Key.STAGE: stage, **values})


def content_with(configs: ConfigRecord, exchange: ConfigRecord | None = None) -> RecordDict:
    records = {RECORD_KEY_CONFIGS: configs} | ({} if exchange is None else {EXCHANGE: exchange})
    return RecordDict(cast(Any, records))


_INTEGERS = {Key.DESTINATION_LIST, Key.NODE_ID_LIST, COMPLAINTS}  # other lists hold bytes


def values_of(
    content: RecordDict, kinds: Mapping[str, type], lists: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of a reply without other records. Raises TensorError, see `listed`."""
    if set(content) != {RECORD_KEY_CONFIGS}:
        problem = f"records {sorted(content)[:5]} where only keys were asked for"
        raise TensorError(problem, "It did not come from coterie.")
    return listed(content.config_records[RECORD_KEY_CONFIGS], kinds, lists)


def listed(
    configs: ConfigRecord, kinds: Mapping[str, type], lists: Sequence[str]
) -> dict[str, Any]:
    """Return a record's values. Raises TensorError unless it has exactly these kinds and lists."""
    if (
        set(configs) != {*kinds, *lists}
        or not all(isinstance(configs[key], kind) for key, kind in kinds.items())
        or not all(_is_list(configs[key], int if key in _INTEGERS else bytes) for key in lists)
    ):
        problem = f"a reply with {sorted(configs)[:5]}, expected {[*kinds, *lists]}"
        raise TensorError(problem, "It did not come from coterie.")
    return dict(configs)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def check_lengths(values: Sequence[bytes], expected: Sequence[int]) -> None:
    """Raise TensorError unless the values have the expected lengths."""
    if (lengths := list(map(len, values))) != list(expected):
        problem = f"values of {lengths[:5]} bytes, expected {list(expected[:5])}"
        raise TensorError(problem, FOREIGN)


def integers_of(data: bytes, size: int, expected: str) -> np.ndarray:
    """Return integers modulo 2^32, (size,) int64. Raises TensorError if anything else is in the
    bytes, which cannot decide how much is read.
    """
    whole = ndarray_to_bytes(np.zeros(size, np.int64))
    head = len(whole) - 8 * size
    if len(data) != len(whole) or data[:head] != whole[:head]:
        raise TensorError(f"a masked update of {len(data)} bytes, {expected}")
    values = np.frombuffer(data, np.int64, offset=head)
    if ((values < 0) | (values >= MODULUS)).any():
        raise TensorError("a masked update with values that are not integers modulo 2^32")
    return values


def described(request: Request, content: RecordDict) -> Reply:
    """Return a client's reply without its masked update. Raises TensorError if not requested."""
    arrays = content.array_records
    if set(arrays) != {f"{FITRES}.parameters"} or any(record for record in arrays.values()):
        raise TensorError("tensors that are not masked", SAME_VERSION)
    if set(content.config_records) != _REPLY or dict(
        content.metric_records[f"{FITRES}.num_examples"]
    ) != {"num_examples": 1}:
        problem = f"records {sorted(content.config_records)[:5]}, or another weight than 1"
        raise TensorError(problem, "It did not come from coterie.")
    reply: Reply = parsed(Reply, str(content.config_records[f"{FITRES}.metrics"][TEXT]))
    check_answers(reply, request)
    return reply


# messages by node -> what nodes answered in time
Carry = Callable[[Mapping[int, Message]], Mapping[int, Message]]
Read = TypeVar("Read")


@dataclass
class Participants:
    """The clients of an exchange; each stage goes on with those whose replies were valid."""

    carry: Carry  # sends one stage's messages to nodes, returns replies in time
    about: str  # the exchange, see `secagg_common.exchange_name`
    nodes: Collection[int]  # to ask
    # Why nodes are not among them any more, or what they did wrong with their updates in the sum.
    problems: dict[int, str] = field(default_factory=dict)
    left: dict[int, str] = field(default_factory=dict)  # nodes that left by then
    keys: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)  # public ones
    digest: bytes = b""  # of the exchange and the keys, see `digest_of`
    ranks: dict[int, int] = field(default_factory=dict)  # among clients with shares
    # of the secrets of clients that can be unmasked
    proofs: dict[int, common.Proofs] = field(default_factory=dict)
    # shares by sender and receiver
    ciphertexts: dict[int, dict[int, bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clients, self.threshold = len(self.nodes), threshold(len(self.nodes))

    def agree(self) -> dict[int, tuple[int, bytes]]:
        """Have clients exchange keys, and shares that all have checked. Return, by client that
        could not use another's shares, that other and the shares as it opened them. Raises
        TensorError: too few are left.
        """
        self._agree_on_keys()
        self._share_secrets()
        return self._check_shares()

    def _agree_on_keys(self) -> None:
        contents, terms = {}, common.terms(self.clients)
        for node in self.nodes:
            exchange = ConfigRecord({common.ABOUT: self.about})
            contents[node] = content_with(configs_of(Stage.SETUP, **terms), exchange)
        keys = self.exchange(Stage.SETUP, contents, self._keys)
        often = Counter(key for pair in keys.values() for key in pair)
        for node, pair in keys.items():
            if any(often[key] > 1 for key in pair):
                self.problems[node] = "another client, or it twice, has the same private key"
            else:
                self.keys[node] = pair
        self.suffice(self.keys)
        self.digest = common.digest_of(self.about, self.keys)
        self.ranks = {node: place for place, node in enumerate(sorted(self.keys), 1)}

    def _keys(self, node: int, content: RecordDict) -> tuple[bytes, bytes]:
        names = (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)
        configs = values_of(content, dict.fromkeys(names, bytes), (common.SIGNATURES,))
        pair = cast(tuple[bytes, bytes], tuple(configs[name] for name in names))
        proofs = cast(list[bytes], configs[common.SIGNATURES])
        check_lengths(pair, [common.PUBLIC_KEY] * 2)
        check_lengths([proof[common.MOST_SIGNATURE :] for proof in proofs], [0, 0])
        if not all(
            common.proves(*proof, self.about, node) for proof in zip(pair, proofs, strict=True)
        ):
            raise TensorError("public keys that are none, or not its own", FOREIGN)
        return pair

    def _share_secrets(self) -> None:
        keys = {str(node): list(pair) for node, pair in self.keys.items()}
        contents = {node: content_with(configs_of(Stage.SHARE_KEYS, **keys)) for node in self.keys}
        dealt = self.exchange(Stage.SHARE_KEYS, contents, self._shares_of)
        self.proofs = {node: proofs for node, (proofs, _) in dealt.items()}
        self.ciphertexts = {node: ciphertexts for node, (_, ciphertexts) in dealt.items()}
        self.suffice(self.proofs)

    def _shares_of(self, node: int, content: RecordDict) -> tuple[common.Proofs, dict[int, bytes]]:
        """Return a client's proofs of its secrets, and the shares of them, by receiver."""
        configs = values_of(content, {}, (Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST, common.PROOFS))
        others = sorted(self.keys.keys() - {node})
        destinations = cast(list[int], configs[Key.DESTINATION_LIST])
        ciphertexts = cast(list[bytes], configs[Key.CIPHERTEXT_LIST])
        data = cast(list[bytes], configs[common.PROOFS])
        if len(destinations) != len(others) or sorted(destinations) != others:
            raise TensorError("shares of keys for others than the clients of the exchange")
        check_lengths(ciphertexts, [common.CIPHERTEXT] * len(others))
        check_lengths(data, common.Proofs.lengths(self.clients, self.threshold))
        proofs = common.Proofs.from_list(data, self.digest, node)
        if not proofs.is_of(self.keys[node][0]):
            raise TensorError("shares of another key than its own", FOREIGN)
        return proofs, dict(zip(destinations, ciphertexts, strict=True))

    def _check_shares(self) -> dict[int, tuple[int, bytes]]:
        """Have clients check shares; leave out wrong dealers and who accuses good ones."""
        contents = {}
        for node in self.proofs:
            lists = self.forwarded(node)
            lists[common.CHECKS] = [self._checks(other, node) for other in lists[Key.SOURCE_LIST]]
            contents[node] = content_with(configs_of(common.CHECK_SHARES, **lists))
        complaints = self.exchange(common.CHECK_SHARES, contents, self._complaints)
        self._keep(complaints)
        self._leave_out_liars(complaints)
        opened = self._opened(complaints)
        self.suffice(self.proofs)
        return {node: pair for node, pair in opened.items() if pair[0] in self.proofs}

    def forwarded(self, node: int) -> dict[str, Any]:
        """Return the shares for a client, with their dealers."""
        others = [other for other in self.proofs if other != node]
        return {
            Key.SOURCE_LIST: others,
            Key.CIPHERTEXT_LIST: [self.ciphertexts[other][node] for other in others],
        }

    def _checks(self, source: int, node: int) -> bytes:
        place, proofs = self.ranks[node], self.proofs[source]
        return b"".join(d.check(place).to_bytes() for d in (proofs.seed, proofs.key))

    def _complaints(self, node: int, content: RecordDict) -> list[int]:
        sources = cast(list[int], values_of(content, {}, (common.COMPLAINTS,))[common.COMPLAINTS])
        if len(set(sources)) != len(sources) or not set(sources) <= self.proofs.keys() - {node}:
            raise TensorError("complaints about others than the clients of the exchange")
        return sources

    def _leave_out_liars(self, complaints: Mapping[int, Sequence[int]]) -> None:
        """Leave out who disagrees with several: honest clients disagree only with liars."""
        pairs = {
            frozenset((node, other))
            for node in complaints
            for other in self.proofs.keys() & set(complaints[node])
        }
        while pairs:
            (worst, times), *_ = Counter(node for pair in pairs for node in pair).most_common(1)
            if times == 1:
                return
            problem = f"it and {times} others cannot use the shares of keys that they sent"
            self.problems[worst] = problem
            self._keep(self.proofs.keys() - {worst})
            pairs = {pair for pair in pairs if worst not in pair}

    def _opened(self, complaints: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, bytes]]:
        """Return, by client that cannot use shares of another, that other and the shares as it
        opened them; leave out who does not open good ones.
        """
        pairs = {
            source: node
            for node in self.proofs.keys() & complaints.keys()
            for source in self.proofs.keys() & set(complaints[node])
        }
        contents = {}
        for source, node in pairs.items():
            ciphertext = {Key.CIPHERTEXT_LIST: self.ciphertexts[source][node]}
            configs = configs_of(common.OPEN_SHARE, **{common.COMPLAINER: node}, **ciphertext)
            contents[source] = content_with(configs)
        read = partial(self._shown, pairs)
        shown = self.exchange(common.OPEN_SHARE, contents, read) if contents else {}
        self._keep(self.proofs.keys() - pairs.keys() | shown.keys())
        return {pairs[source]: (source, plain) for source, plain in shown.items()}

    def _shown(self, pairs: Mapping[int, int], source: int, content: RecordDict) -> bytes:
        node = pairs[source]
        plain = cast(bytes, values_of(content, {common.SHARE_OPENED: bytes})[common.SHARE_OPENED])
        with common.binding(common.Bound(self.digest)):
            if not common.shares_hold(plain, source, node, self._checks(source, node)):
                raise TensorError("shares of keys that are wrong", FOREIGN)
        return plain

    def suffice(self, nodes: Collection[int]) -> None:
        """Raise TensorError if these clients are too few for a sum."""
        if len(nodes) < self.threshold:
            raise TensorError(
                f"the sum could not be computed: fewer than {self.threshold} of {self.clients} "
                f"clients stayed to the end"
            )

    def _keep(self, nodes: Collection[int]) -> None:
        self.proofs = {node: dealt for node, dealt in self.proofs.items() if node in nodes}

    def exchange(
        self,
        stage: str,
        contents: Mapping[int, RecordDict],
        read: Callable[[int, RecordDict], Read],
    ) -> dict[int, Read]:
        """Return the valid answers of nodes in one stage; record why others failed. `read` parses a
        node's reply, and raises TensorError or whatever an impossible message leads to.
        """
        answered = self.carry(
            {node: Message(content, node, common.TRAIN) for node, content in contents.items()}
        )
        fitting = {}
        for node in contents:
            try:
                fitting[node] = read(node, content_of(node, stage, answered.get(node)))
            except NoAnswer as error:
                left = self.left if stage == Stage.UNMASK else self.problems
                left[node] = error.problem
            except CoterieError as error:
                self.problems[node] = str(error)
            except Exception as error:  # whatever a foreign node managed to send
                problem = f"unreadable: {type(error).__name__}: {error}"[:2000]
                self.problems[node] = problem
        return fitting
