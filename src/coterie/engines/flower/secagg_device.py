"""Secure aggregation through Flower's SecAgg+, which is of Flower's older interface, and so
imported only by runs that ask for it.

Device: `client_app` registers `masked` for messages of type "train". Server: `summed` runs one
exchange so that only the sum of the clients' updates is seen. Flower's own modifier runs; this file
decides which messages are allowed.

Before training, each client checks the shares that others dealt it (`secagg_common`), and reports
those that it cannot use. These are opened once to the server, which then sees which of the two is
wrong. So the updates sent later can be unmasked, whatever one client does.

Shares of keys name their exchange and cohort, and masks depend on these and on what clients were
sent. A client that was shown another cohort, round or model than the others refuses their shares,
or its masks do not cancel: one exchange's sum cannot be differenced against a part of it, and no
update stands alone among those of a model made to give none (Pasquini et al., "Eluding Secure
Aggregation in Federated Learning via Model Inconsistency", CCS 2022). Clients' keys are not signed:
a server that makes up clients, or stands between them with its own keys, is not kept out.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import Any, cast

import numpy as np
from cryptography.fernet import InvalidToken
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod.secure_aggregation import secaggplus_mod
from flwr.client.mod.secure_aggregation.secaggplus_mod import SecAggPlusState
from flwr.common import (
    Code,
    FitRes,
    Status,
    bytes_to_ndarray,
    ndarray_to_bytes,
    ndarrays_to_parameters,
)
from flwr.common.secure_aggregation.crypto.symmetric_encryption import decrypt, encrypt
from flwr.common.secure_aggregation.secaggplus_constants import (
    RECORD_KEY_CONFIGS,
    RECORD_KEY_STATE,
    Key,
    Stage,
)
from flwr.compat.common import recorddict_compat as compat

from coterie.aggregation.secure import FEWEST, RANGE, UPDATE, levels
from coterie.core.errors import CoterieError, TensorError
from coterie.engines.flower import secagg_common as common
from coterie.engines.messages import Reply, Request, parsed

Handle = Callable[[Mapping[str, Any], str, bytes], tuple[str, bytes]]
_RAISED = 2  # Flower's code of an error of the program
_COHORT = "cohort"


def masked(handle: Handle, message: Message, context: Context) -> Message:
    """Handle one stage of SecAgg+ on a device: keys, shares of keys, checks of others' shares, the
    masked update, shares that take masks from the sum. On any failure, answer with an error that
    tells only what went wrong, and forget the keys.
    """
    try:
        stage = _admitted(message, context)
        bound = _bound_by(message, context, stage)
        with common.binding(bound):
            if stage in _OWN_STAGES:
                return Message(_OWN_STAGES[stage](message, context), reply_to=message)
            reply = secaggplus_mod(
                message, context, lambda message, context: _trained(handle, message, context)
            )
        _complete(reply, context, stage, bound)
    except Exception as error:
        _forget(context)
        kind = "" if isinstance(error, CoterieError) else f"{type(error).__name__}: "
        return Message(Error(_RAISED, f"{kind}{error}"[:20000]), reply_to=message)
    if stage == Stage.UNMASK:
        _forget(context)
    return reply


def _forget(context: Context) -> None:
    for record in (RECORD_KEY_STATE, common.EXCHANGE):
        context.state.config_records.pop(record, None)


def _bound_by(message: Message, context: Context, stage: str) -> common.Bound:
    """Return the digests known by this stage, which are kept until the last. Raises TensorError:
    the server names no exchange, or another one than at first.
    """
    content, state = message.content, context.state.config_records
    if stage == Stage.SETUP:
        about = content.config_records.get(common.EXCHANGE, ConfigRecord()).get(common.ABOUT)
        if not isinstance(about, str):
            problem = "secure aggregation: the server does not name the exchange"
            raise TensorError(problem, common.SAME_VERSION)
        state[common.EXCHANGE] = ConfigRecord({common.ABOUT: about})
    if common.EXCHANGE not in state:
        raise TensorError(f"asked for {stage} before the first stage")
    about = str(state[common.EXCHANGE][common.ABOUT])
    if stage == Stage.SHARE_KEYS:
        configs = content.config_records[RECORD_KEY_CONFIGS]
        nodes = sorted(int(node) for node in configs if node != Key.STAGE)
        keys = {node: cast(Sequence[bytes], configs[str(node)]) for node in nodes}
        state[common.EXCHANGE][_COHORT] = common.digest_of(about, keys)
        ordered = {str(node): list(keys[node]) for node in nodes}  # a client's place is its rank
        content.config_records[RECORD_KEY_CONFIGS] = ConfigRecord({Key.STAGE: stage, **ordered})
    sent = b""
    if stage == Stage.COLLECT_MASKED_VECTORS:
        ins = compat.recorddict_to_fitins(content, keep_input=True)
        if common.exchange_name(parsed(Request, str(ins.config[common.TEXT]))) != about:
            raise TensorError("the masks are for another exchange than the update asked for")
        sent = sha256(ins.parameters.tensors[0]).digest()
        _take_opened(content, context)
    cohort = cast(bytes, state[common.EXCHANGE].get(_COHORT, b""))
    return common.Bound(cohort, sent, message.metadata.dst_node_id)


def _flower_state(context: Context) -> SecAggPlusState:
    """Return the state of Flower's modifier. Raises TensorError: no secrets were just dealt."""
    state = SecAggPlusState(**context.state.config_records.get(RECORD_KEY_STATE, ConfigRecord()))
    if state.current_stage != Stage.SHARE_KEYS:
        raise TensorError("asked about shares of keys that were not dealt, or are in use")
    return state


def _checked(message: Message, context: Context) -> RecordDict:
    """Return whose shares this device cannot use."""
    configs, state = message.content.config_records[RECORD_KEY_CONFIGS], _flower_state(context)
    lists = (configs[key] for key in (Key.SOURCE_LIST, Key.CIPHERTEXT_LIST, common.CHECKS))
    dealt = zip(*(cast(list[Any], values) for values in lists), strict=True)
    complaints = [source for source, *shares in dealt if not _usable(state, source, *shares)]
    return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({common.COMPLAINTS: complaints})})


def _usable(state: SecAggPlusState, source: int, ciphertext: bytes, checks: bytes) -> bool:
    try:
        plain = decrypt(state.ss2_dict[source], ciphertext)
        return common.shares_hold(plain, source, state.nid, checks)
    except (InvalidToken, TensorError, ValueError):
        return False


def _opened(message: Message, context: Context) -> RecordDict:
    """Return the shares that this device dealt to a client which cannot use them, to the server: of
    one client per exchange, since fewer clients than `threshold` could otherwise collude with a
    server to remove masks. Raises TensorError: of another client, or other shares.
    """
    configs, state = message.content.config_records[RECORD_KEY_CONFIGS], _flower_state(context)
    complainer = cast(int, configs[common.COMPLAINER])
    record = context.state.config_records[common.EXCHANGE]
    if record.get(common.OPENED, complainer) != complainer:
        raise TensorError("asked to open the shares of a second client")
    record[common.OPENED] = complainer
    plain = decrypt(state.ss2_dict[complainer], cast(bytes, configs[Key.CIPHERTEXT_LIST]))
    if common.share_read(plain)[:2] != (state.nid, complainer):
        raise TensorError("asked to open shares that this device did not deal")
    return RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({common.SHARE_OPENED: plain})})


_OWN_STAGES = {common.CHECK_SHARES: _checked, common.OPEN_SHARE: _opened}


def _take_opened(content: RecordDict, context: Context) -> None:
    """Replace the shares that this device could not use by those that their dealer opened."""
    opened = content.config_records.get(common.EXCHANGE)
    if opened is None:
        return
    configs, state = content.config_records[RECORD_KEY_CONFIGS], _flower_state(context)
    place = cast(list[int], configs[Key.SOURCE_LIST]).index(
        source := cast(int, opened[common.OPENED])
    )
    plain = cast(bytes, opened[common.SHARE_OPENED])
    cast(list[bytes], configs[Key.CIPHERTEXT_LIST])[place] = encrypt(state.ss2_dict[source], plain)


def _admitted(message: Message, context: Context) -> str:
    """Return a message's stage if a device accepts it. Raises TensorError: Flower would not mask
    the reply, the settings differ, or both masks of a client are asked for.
    """
    if message.metadata.message_type != common.TRAIN:
        raise TensorError(
            f"a message of type {message.metadata.message_type!r}, whose reply would not be masked",
            "It did not come from coterie.",
        )
    configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
    stage = str(configs.get(Key.STAGE))
    if stage not in (*Stage.all(), *_OWN_STAGES):
        problem = "a training message that names no stage of secure aggregation"
        raise TensorError(problem, "It did not come from coterie.")
    settings = {key: value for key, value in configs.items() if key != Key.STAGE}
    if stage == Stage.SETUP:
        clients, expected = settings.get(Key.SAMPLE_NUMBER), f"at least {FEWEST} clients"
        if isinstance(clients, int) and clients >= FEWEST:
            expected = f"{common.terms(clients)}"
        if not isinstance(clients, int) or clients < FEWEST or settings != common.terms(clients):
            raise TensorError(f"secure aggregation with settings {settings}, expected {expected}")
    if stage == Stage.COLLECT_MASKED_VECTORS:
        _refuse_twice(settings.get(Key.SOURCE_LIST), "sources")
    if stage == Stage.UNMASK:
        lists = (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)
        active, dead = (cast(list[int], settings.get(key)) for key in lists)
        _refuse_twice([*active, *dead], "clients that sent and clients that did not")
        if message.metadata.dst_node_id not in active:
            raise TensorError("asked to unmask a sum that does not include this client")
    return stage


def _refuse_twice(nodes: Any, what: str) -> None:
    if not isinstance(nodes, list) or len(set(nodes)) != len(nodes):
        remedy = "A server that asks for this could see a single client's update."
        raise TensorError(f"secure aggregation: {what}, some of them listed twice", remedy)


def _trained(handle: Handle, message: Message, context: Context) -> Message:
    """Return the unmasked update, in this process only. Raises TensorError with the problem."""
    from safetensors.numpy import load

    ins = compat.recorddict_to_fitins(message.content, keep_input=True)
    text = str(ins.config[common.TEXT])
    if not parsed(Request, text).masked:
        raise TensorError("secure aggregation asked for a reply that is not to be masked")
    text, body = handle(dict(context.node_config), text, ins.parameters.tensors[0])
    reply = parsed(Reply, text)
    if reply.problem:
        raise TensorError(reply.problem, reply.remedy)
    update = load(body)[UPDATE]
    if update.dtype != np.float64 or update.ndim != 1 or not (np.abs(update) <= RANGE).all():
        raise TensorError(f"an update of {update.dtype}{list(update.shape)} that cannot be masked")
    parameters = ndarrays_to_parameters([update])
    done = FitRes(Status(Code.OK, ""), parameters, num_examples=1, metrics={common.TEXT: text})
    return Message(compat.fitres_to_recorddict(done, keep_input=True), reply_to=message)


def _complete(reply: Message, context: Context, stage: str, bound: common.Bound) -> None:
    """Add the proofs for other clients to a reply. Raises TensorError: it has unmasked tensors."""
    content = reply.content
    configs = content.config_records[RECORD_KEY_CONFIGS]
    if any(record for record in content.array_records.values()):
        problem = "Flower left the update unmasked"
        raise TensorError(problem, "This release of Flower cannot be used.")
    state = context.state.config_records[RECORD_KEY_STATE]
    if stage == Stage.SETUP:
        keys = [cast(bytes, state[name]) for name in ("sk1", "sk2")]
        about = str(context.state.config_records[common.EXCHANGE][common.ABOUT])
        configs[common.SIGNATURES] = common.signatures(keys, about, bound.node)
    if stage == Stage.SHARE_KEYS:
        configs[common.PROOFS] = bound.published
    if (Key.MASKED_PARAMETERS in configs) != (stage == Stage.COLLECT_MASKED_VECTORS):
        problem = "Flower did not mask the update"
        raise TensorError(problem, "This release of Flower cannot be used.")
    if stage == Stage.COLLECT_MASKED_VECTORS:
        _show_weight(configs, bound, cast(int, state["sample_num"]))


def _show_weight(configs: ConfigRecord, bound: common.Bound, clients: int) -> None:
    """Replace the masked weight by one that everybody can check. Raises TensorError: it was not
    masked, as it is but with a chance of 2^-32.
    """
    values = cast(list[bytes], configs[Key.MASKED_PARAMETERS])
    if int(bytes_to_ndarray(values[0])[0]) == levels(clients):
        problem = "Flower did not mask the update"
        raise TensorError(problem, "This release of Flower cannot be used.")
    shown = ndarray_to_bytes(np.array([common.weight_sent(bound, clients)]))
    configs[Key.MASKED_PARAMETERS] = [shown, *values[1:]]
