"""Secure aggregation through Flower's SecAgg+. It is of Flower's older interface: a file of its
own, imported only by runs that ask for it.

Device: `masked` is what `client_app` registers for messages of type "train". Server: `summed` has
one exchange done so that only the sum of the clients' updates is seen. Flower's own workflow and
modifier run; what is here decides who may say what, and refuses the rest.

Shares of keys say for which exchange and which cohort they are, and masks are made of that and of
what the clients got. A client that was shown another cohort, round or model than the others refuses
their shares, or its masks do not cancel: the sum of one exchange cannot be differenced against a
part of it, and nobody's update is alone among those of a model made to give none (Pasquini et al.,
"Eluding Secure Aggregation in Federated Learning via Model Inconsistency", CCS 2022). Clients' keys
are not signed: a server that makes up clients, or stands between them with keys of its own, is not
kept out.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Error, Message
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.common.secure_aggregation.secaggplus_utils import (
    share_keys_plaintext_concat,
    share_keys_plaintext_separate,
)
from flwr.compat.common import recorddict_compat as compat
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import SecAggPlusWorkflow

from coterie.aggregation.noise import Source
from coterie.aggregation.secure import FEWEST, MODULUS, RANGE, UPDATE, levels, threshold
from coterie.core.errors import CoterieError, Refused, TensorError
from coterie.engines.messages import Reply, Request, parsed

Handle = Callable[[Mapping[str, Any], str, bytes], tuple[str, bytes]]
TRAIN = "train"  # the only type of message that Flower's modifier does not pass through as it is
_TEXT, _FITRES = "text", "fitres"
_SAME = "Install the same version of coterie on server and devices."
_RAISED = 2  # Flower's code of an error of the program
EXCHANGE = "coterie.exchange"  # the record of which exchange it is; on a device also of its cohort
_ABOUT, _COHORT = "about", "cohort"
_DIGEST = 32  # bytes


@dataclass(frozen=True)
class _Bound:
    """The digests that an exchange is bound to.

    Args:
        cohort: Of the exchange, and of the clients in it with their public keys, see `_digest_of`.
        sent: Of the tensors that they got.
    """

    cohort: bytes = b""
    sent: bytes = b""


_NOTHING = _Bound()
_bound: ContextVar[_Bound] = ContextVar("_bound", default=_NOTHING)


@contextmanager
def _binding(bound: _Bound) -> Iterator[None]:
    """Within the block shares and masks are of this exchange."""
    token = _bound.set(bound)
    try:
        yield
    finally:
        _bound.reset(token)


def _about(request: Request) -> str:
    """Name an exchange."""
    return json.dumps([request.run, request.round, request.number, request.task])


def _digest_of(about: str, keys: Mapping[int, Sequence[bytes]]) -> bytes:
    """Digest of an exchange and of all its clients' public keys, by node."""
    cohort = [[node, *(key.hex() for key in keys[node])] for node in sorted(keys)]
    return sha256(json.dumps([about, cohort]).encode()).digest()


def _expanded(seed: bytes, modulus: int, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Return a mask: AES-256 in counter mode, keyed with SHA-256 of the seed and of the exchange.
    Of a seed one mask is made.

    Flower's own function folds the seed to 32 bits (28 for a pair of clients) for a Mersenne
    Twister: with three clients a server finds both of a client's masks in minutes.
    """
    if modulus != MODULUS:
        raise TensorError(f"masks modulo {modulus}, expected {MODULUS}", _SAME)
    sizes, bound = [math.prod(shape) for shape in shapes], _bound.get()
    key = sha256(bound.cohort + bound.sent + seed).digest()
    stream = Source(key).read(4 * sum(sizes))
    parts = np.split(np.frombuffer(stream, "<u4").astype(np.int64), np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _share(source: int, target: int, b_share: bytes, key_share: bytes) -> bytes:
    """Return what a client tells another under encryption: for which exchange and cohort, and
    Flower's own part.
    """
    return _bound.get().cohort + share_keys_plaintext_concat(source, target, b_share, key_share)


def _share_read(share: bytes) -> tuple[int, int, bytes, bytes]:
    """Return the inverse of `_share`. Raises TensorError: the other client takes part in another
    exchange, or was shown another cohort.
    """
    if share[:_DIGEST] != _bound.get().cohort:
        problem = (
            "secure aggregation: another client was sent a different cohort or exchange from this"
        )
        raise TensorError(
            problem,
            "A server that tells clients different things could see a single client's update; "
            "nothing was sent.",
        )
    return share_keys_plaintext_separate(share[_DIGEST:])


_REPLACED = {
    "pseudo_rand_gen": (_expanded, (secaggplus_mod, SecAggPlusWorkflow.unmask_stage)),
    "share_keys_plaintext_concat": (_share, (secaggplus_mod,)),
    "share_keys_plaintext_separate": (_share_read, (secaggplus_mod,)),
}


for _name, (_ours, _users) in _REPLACED.items():
    for _user in _users:
        if _name not in _user.__globals__:  # pragma: no cover - another release of Flower
            raise Refused(
                f"this release of Flower makes masks differently ({_user.__module__})",
                "Install flwr 1.41.",
            )
        _user.__globals__[_name] = _ours


def _terms(clients: int) -> dict[str, int | float]:
    """Return Flower's terms for so many clients in the first stage, without the stage's name."""
    return {
        Key.SAMPLE_NUMBER: clients,
        Key.SHARE_NUMBER: clients,
        Key.THRESHOLD: threshold(clients),
        Key.CLIPPING_RANGE: RANGE,
        Key.TARGET_RANGE: levels(clients),
        Key.MOD_RANGE: MODULUS,
        Key.MAX_WEIGHT: 1.0,
    }


def masked(handle: Handle, message: Message, context: Context) -> Message:
    """One stage of SecAgg+ on a device: keys, shares of keys, the masked update, shares that take
    masks from the sum.

    Whatever goes wrong it answers with an error, which says no more than what went wrong, and
    forgets its keys.
    """
    try:
        stage = _admitted(message, context)
        with _binding(_bound_by(message, context, stage)):
            reply = secaggplus_mod(
                message, context, lambda message, context: _trained(handle, message, context)
            )
        _refuse_open(reply, stage)
    except Exception as error:
        _forget(context)
        said = (
            f"{error.problem}\n  {error.remedy}"
            if isinstance(error, CoterieError)
            else f"{type(error).__name__}: {error}"
        )
        return Message(Error(_RAISED, said[:20000]), reply_to=message)
    if stage == Stage.UNMASK:
        _forget(context)
    return reply


def _forget(context: Context) -> None:
    """Delete the keys of an exchange."""
    for record in (RECORD_KEY_STATE, EXCHANGE):
        context.state.config_records.pop(record, None)


def _bound_by(message: Message, context: Context, stage: str) -> _Bound:
    """Return what a device binds the exchange to, as far as it knows by this stage, and remembers
    until the last.

    Raises:
        TensorError: The server does not say which exchange it is, or another one than at first.
    """
    content, state = message.content, context.state.config_records
    if stage == Stage.SETUP:
        about = content.config_records.get(EXCHANGE, ConfigRecord()).get(_ABOUT)
        if not isinstance(about, str):
            raise TensorError("secure aggregation: the server does not name the exchange", _SAME)
        state[EXCHANGE] = ConfigRecord({_ABOUT: about})
    if EXCHANGE not in state:
        raise TensorError(f"asked for {stage} before the first stage", "")
    about = str(state[EXCHANGE][_ABOUT])
    if stage == Stage.SHARE_KEYS:
        keys = {
            int(node): pair
            for node, pair in content.config_records[RECORD_KEY_CONFIGS].items()
            if node != Key.STAGE
        }
        state[EXCHANGE][_COHORT] = _digest_of(about, cast(Mapping[int, Sequence[bytes]], keys))
    sent = b""
    if stage == Stage.COLLECT_MASKED_VECTORS:
        ins = compat.recorddict_to_fitins(content, keep_input=True)
        if _about(parsed(Request, str(ins.config[_TEXT]))) != about:
            raise TensorError("the masks are for another exchange than the update asked for", "")
        sent = sha256(ins.parameters.tensors[0]).digest()
    return _Bound(cast(bytes, state[EXCHANGE].get(_COHORT, b"")), sent)


def _admitted(message: Message, context: Context) -> str:
    """Return the stage of a message that a device accepts.

    Raises:
        TensorError: Flower would not mask the reply, the server uses other settings, or it asks for
            both masks of a client.
    """
    if message.metadata.message_type != TRAIN:
        raise TensorError(
            f"a message of type {message.metadata.message_type!r}, whose reply would not be masked",
            "It did not come from coterie.",
        )
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    stage = str(configs.get(Key.STAGE))
    if stage not in Stage.all():
        raise TensorError(
            "a training message that names no stage of secure aggregation",
            "It did not come from coterie.",
        )
    said = {key: value for key, value in configs.items() if key != Key.STAGE}
    if stage == Stage.SETUP:
        clients = said.get(Key.SAMPLE_NUMBER)
        if not isinstance(clients, int) or clients < FEWEST or said != _terms(clients):
            expected = (
                f"at least {FEWEST} clients"
                if not isinstance(clients, int) or clients < FEWEST
                else f"{_terms(clients)}"
            )
            raise TensorError(f"secure aggregation with settings {said}, expected {expected}", "")
    if stage == Stage.COLLECT_MASKED_VECTORS:
        _refuse_twice(said.get(Key.SOURCE_LIST), "sources")
    if stage == Stage.UNMASK:
        active, dead = said.get(Key.ACTIVE_NODE_ID_LIST), said.get(Key.DEAD_NODE_ID_LIST)
        _refuse_twice(
            [*cast(list[int], active), *cast(list[int], dead)],
            "clients that sent and clients that did not",
        )
        if message.metadata.dst_node_id not in cast(list[int], active):
            raise TensorError("asked to unmask a sum that does not include this client", "")
    return stage


def _refuse_twice(nodes: Any, what: str) -> None:
    if not isinstance(nodes, list) or len(set(nodes)) != len(nodes):
        raise TensorError(
            f"secure aggregation: {what}, some of them listed twice",
            "A server that asks for this could see a single client's update.",
        )


def _trained(handle: Handle, message: Message, context: Context) -> Message:
    """Return the update, still open: for Flower's modifier in this process, and nobody else. Raises
    TensorError with the task's problem.
    """
    from safetensors.numpy import load

    ins = compat.recorddict_to_fitins(message.content, keep_input=True)
    text = str(ins.config[_TEXT])
    if not parsed(Request, text).masked:
        raise TensorError("secure aggregation asked for a reply that is not to be masked", "")
    text, body = handle(dict(context.node_config), text, ins.parameters.tensors[0])
    reply = parsed(Reply, text)
    if reply.problem:
        raise TensorError(reply.problem, reply.remedy)
    update = load(body)[UPDATE]
    if update.dtype != np.float64 or update.ndim != 1 or not (np.abs(update) <= RANGE).all():
        raise TensorError(
            f"an update of {update.dtype}{list(update.shape)} that cannot be masked", ""
        )
    done = FitRes(
        Status(Code.OK, ""), ndarrays_to_parameters([update]), num_examples=1, metrics={_TEXT: text}
    )
    return Message(compat.fitres_to_recorddict(done, keep_input=True), reply_to=message)


def _refuse_open(reply: Message, stage: str) -> None:
    """Refuse, with a TensorError, a message that would carry tensors which are not masked."""
    content = reply.content
    if any(record for record in content.array_records.values()):
        raise TensorError(
            "Flower left the update unmasked", "This release of Flower cannot be used."
        )
    if (Key.MASKED_PARAMETERS in content.config_records[RECORD_KEY_CONFIGS]) != (
        stage == Stage.COLLECT_MASKED_VECTORS
    ):
        raise TensorError(
            "Flower did not mask the update", "This release of Flower cannot be used."
        )
