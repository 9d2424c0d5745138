"""Secure aggregation through Flower's SecAgg+, the server's side: one exchange of which only the
sum is seen. See `secagg_device`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, Parameters, bytes_to_ndarray, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common import recorddict_compat as compat
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.strategy import FedAvg
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.server.workflow.secure_aggregation.secaggplus_workflow import (
    SecAggPlusWorkflow,
    WorkflowState,
)
from flwr.serverapp import Grid

from coterie.aggregation.secure import FEWEST, MODULUS, RANGE, levels, step, threshold
from coterie.core.errors import CoterieError, TensorError
from coterie.engines.flower.secagg_device import (
    _ABOUT,
    _FITRES,
    _SAME,
    _TEXT,
    EXCHANGE,
    _about,
    _binding,
    _Bound,
    _digest_of,
)
from coterie.engines.messages import Reply, Request, parsed

Carry = Callable[
    [Mapping[int, Message]], Mapping[int, Message]
]  # messages by node -> what nodes answered in time
_REPLY = {f"{_FITRES}.metrics", f"{_FITRES}.status", RECORD_KEY_CONFIGS}


@dataclass
class Sum:
    """The result of one exchange under masks.

    Args:
        mean: Of the updates, (d,) float64; None where there is none.
        replies: What those said beside it that are in the sum, by node.
        problems: Why the others are not, by node.
    """

    mean: np.ndarray | None = None
    replies: dict[int, Reply] = field(default_factory=dict)
    problems: dict[int, str] = field(default_factory=dict)


def summed(
    carry: Carry, requests: Mapping[int, Request], bodies: Mapping[int, bytes], size: int
) -> Sum:
    """One exchange by SecAgg+.

    Args:
        carry: Brings the messages of one of the four stages to nodes, and back what they answered
            in time.
        requests: By node; their replies are to be masked.
        bodies: The tensors that go with them, by node.
        size: d, values of an update.

    Returns:
        The mean of those that answered the third stage; without a mean, `problems` has everybody.

    Raises:
        TensorError: They would be asked for unlike exchanges, or sent unlike tensors. Nobody was
            asked.
    """
    found = Sum()
    if (
        len({_about(request) for request in requests.values()}) > 1
        or len({bodies.get(node, b"") for node in requests}) > 1
    ):
        raise TensorError(
            "secure aggregation: clients would be sent different tensors, so their masks would "
            "not cancel",
            "",
        )
    if len(requests) < FEWEST:
        few = (
            f"{len(requests)} clients are connected, and secure aggregation needs at least "
            f"{FEWEST}: the sum of fewer would reveal too much about each"
        )
        found.problems = dict.fromkeys(requests, few)
        return found
    plan = _Plan(requests, bodies)
    grid = _Checked(carry, requests, size, found.problems)
    workflow = _Workflow(
        1.0,
        threshold(len(requests)),
        max_weight=1.0,
        clipping_range=RANGE,
        quantization_range=levels(len(requests)),
    )
    try:
        workflow(cast(Grid, grid), _context(plan))
        problem = _mean_problem(plan.mean, len(requests))
    except ValueError as error:  # shares that are not of one key
        problem = f"the sum could not be computed: {error}"
    if problem is None:
        found.mean = plan.mean
        found.replies = {node: grid.replies[node] for node in plan.summed}
    else:
        found.problems |= {
            node: f"{problem}; {_why(found.problems)}"
            for node in requests
            if node not in found.problems
        }
    return found


def _mean_problem(mean: np.ndarray | None, clients: int) -> str | None:
    """Return what is wrong with a mean, if something is: with a share or a mask that is not right,
    values come out anywhere modulo 2^32.
    """
    if mean is None:
        return (
            f"the sum could not be computed: fewer than {threshold(clients)} of {clients} clients "
            f"stayed to the end"
        )
    if not (np.abs(mean) <= RANGE + step(clients)).all():
        return "the sum is out of range: a client did not follow the protocol"
    return None


def _why(problems: Mapping[int, str]) -> str:
    return (
        "the others: "
        + "; ".join(dict.fromkeys(problem.splitlines()[0] for problem in problems.values()))
        if problems
        else "no reason"
    )


class _Workflow(SecAggPlusWorkflow):
    """Flower's, mended: who leaves before it sent shares is no longer asked about, and masks are
    taken off as devices put them on.

    Otherwise the last stage asks everybody for shares of keys that were never shared, and nobody
    answers.
    """

    def share_keys_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        enough: bool = super().share_keys_stage(grid, context, state)
        state.sampled_node_ids = set(state.active_node_ids)
        state.nid_to_neighbours = {
            node: state.nid_to_neighbours[node] & state.active_node_ids
            for node in state.active_node_ids
        }
        return enough

    def unmask_stage(self, grid: Grid, context: LegacyContext, state: WorkflowState) -> bool:
        plan = cast(_Plan, context.strategy)
        with _binding(
            _Bound(_digest_of(plan.about, state.nid_to_publickeys), sha256(plan.body).digest())
        ):
            done: bool = super().unmask_stage(grid, context, state)
            return done


class _Plan(FedAvg):
    """The instructions of the workflow for each device, and its result."""

    def __init__(self, requests: Mapping[int, Request], bodies: Mapping[int, bytes]) -> None:
        super().__init__()
        self.requests, self.bodies = requests, bodies
        self.about = _about(next(iter(requests.values())))
        self.body = self.bodies.get(next(iter(requests)), b"")  # the same for all
        self.mean: np.ndarray | None = None
        self.summed: list[int] = []

    def configure_fit(
        self, server_round: int, parameters: Parameters, client_manager: Any
    ) -> list[Any]:
        return [(SimpleNamespace(node_id=node), self._instructions(node)) for node in self.requests]

    def _instructions(self, node: int) -> FitIns:
        return FitIns(
            Parameters([self.bodies.get(node, b"")], "safetensors"),
            {_TEXT: self.requests[node].model_dump_json()},
        )

    def aggregate_fit(
        self, server_round: int, results: Any, failures: Any
    ) -> tuple[None, dict[str, Any]]:
        self.summed = sorted(proxy.node_id for proxy, _ in results)
        (self.mean,) = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def _context(plan: _Plan) -> LegacyContext:
    """Return what the workflow wants to have of a run."""
    context = LegacyContext(Context(0, 0, {}, RecordDict(), {}), strategy=plan)
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 0})
    context.state.array_records[MAIN_PARAMS_RECORD] = compat.parameters_to_arrayrecord(
        Parameters([], ""), keep_input=True
    )
    return context


@dataclass
class _Checked:
    """The grid that the workflow sees: a reply that does not fit the stage is kept from it, and its
    node counts as disconnected.

    Args:
        carry: As in `summed`.
        requests: As in `summed`.
        size: As in `summed`.
        problems: Receives, by node, why a reply was kept from the workflow.
    """

    carry: Carry
    requests: Mapping[int, Request]
    size: int
    problems: dict[int, str]
    replies: dict[int, Reply] = field(default_factory=dict)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """One stage."""
        sent = {message.metadata.dst_node_id: message for message in messages}
        stages = {
            node: str(message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE])
            for node, message in sent.items()
        }
        for node, message in sent.items():
            if stages[node] == Stage.SETUP:
                message.content.config_records[EXCHANGE] = ConfigRecord(
                    {_ABOUT: _about(self.requests[node])}
                )
        answered = self.carry(sent)
        believed = []
        for node in sent:
            try:
                believed.append(self._believed(node, stages[node], answered.get(node)))
            except CoterieError as error:
                said = f"{error.problem}\n  {error.remedy}" if error.remedy else error.problem
            except Exception as error:  # whatever a foreign node managed to send
                said = f"unreadable: {type(error).__name__}: {error}"[:2000]
            else:
                continue
            self.problems[node] = said
        return believed

    def _believed(self, node: int, stage: str, answered: Message | None) -> Message:
        """Return a reply that fits the stage. Raises TensorError, and whatever an impossible
        message leads to.
        """
        if answered is None:
            raise TensorError(f"no reply in time ({stage})", "")
        if answered.has_error():
            raise TensorError(
                answered.error.reason or f"no reason (code {answered.error.code})", ""
            )
        if answered.metadata.src_node_id != node:
            raise TensorError(f"node {answered.metadata.src_node_id} answered in its place", "")
        configs = answered.content.config_records[RECORD_KEY_CONFIGS]
        if stage == Stage.COLLECT_MASKED_VECTORS:
            self.replies[node] = self._described(node, answered.content)
            _check_masked(configs, self.size, levels(len(self.requests)))
        elif set(answered.content) != {RECORD_KEY_CONFIGS}:
            raise TensorError(
                f"records {sorted(answered.content)[:5]} where only keys were asked for ({stage})",
                "It did not come from coterie.",
            )
        elif stage == Stage.SETUP:
            _check_lists(configs, {}, (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2))
        elif stage == Stage.SHARE_KEYS:
            _check_lists(configs, {Key.DESTINATION_LIST: int, Key.CIPHERTEXT_LIST: bytes})
        else:
            _check_lists(configs, {Key.NODE_ID_LIST: int, Key.SHARE_LIST: bytes})
            if not set(cast(list[int], configs[Key.NODE_ID_LIST])) <= set(self.requests):
                raise TensorError(
                    "key shares of clients that are not in the exchange",
                    "It did not come from coterie.",
                )
        return answered

    def _described(self, node: int, content: RecordDict) -> Reply:
        """Return what a client says beside its masked update. Raises TensorError for anything that
        is not masked.
        """
        arrays = content.array_records
        if set(arrays) != {f"{_FITRES}.parameters"} or any(record for record in arrays.values()):
            raise TensorError("tensors that are not masked", _SAME)
        if set(content.config_records) != _REPLY or dict(
            content.metric_records[f"{_FITRES}.num_examples"]
        ) != {"num_examples": 1}:
            raise TensorError(
                f"records {sorted(content.config_records)[:5]}, or another weight than 1",
                "It did not come from coterie.",
            )
        reply: Reply = parsed(Reply, str(content.config_records[f"{_FITRES}.metrics"][_TEXT]))
        request = self.requests[node]
        if (reply.client, reply.task, reply.round, reply.number) != (
            request.client,
            request.task,
            request.round,
            request.number,
        ):
            raise TensorError(
                f"a reply of {reply.client!r} to {reply.task}, round {reply.round + 1}, that "
                f"was not requested",
                "",
            )
        return reply


def _check_lists(
    configs: ConfigRecord, kinds: Mapping[str, type], texts: Sequence[str] = ()
) -> None:
    """Check, with a TensorError otherwise, that there are exactly these lists, all of one length,
    and these bytes.
    """
    lists = [cast(list[Any], configs.get(key)) for key in kinds]
    alike = all(isinstance(found, list) and len(found) == len(lists[0]) for found in lists)
    typed = alike and all(
        isinstance(value, kind)
        for found, kind in zip(lists, kinds.values(), strict=True)
        for value in found
    )
    if (
        set(configs) != {*kinds, *texts}
        or not typed
        or not all(isinstance(configs[key], bytes) for key in texts)
    ):
        raise TensorError(
            f"a reply with {sorted(configs)[:5]}, expected {[*kinds, *texts]}",
            "It did not come from coterie.",
        )


def _check_masked(configs: ConfigRecord, size: int, weight: int) -> None:
    """Check, with a TensorError otherwise, that it is a weight and an update of this size, integers
    modulo 2^32, and the weight is not in the clear.
    """
    _check_lists(configs, {Key.MASKED_PARAMETERS: bytes})
    values = [
        bytes_to_ndarray(value) for value in cast(list[bytes], configs[Key.MASKED_PARAMETERS])
    ]
    if [(value.dtype, value.shape) for value in values] != [
        (np.dtype(np.int64), (1,)),
        (np.dtype(np.int64), (size,)),
    ]:
        raise TensorError(
            f"a masked update of {[f'{v.dtype}{list(v.shape)}' for v in values]}, expected "
            f"int64[1] and int64[{size}]",
            "",
        )
    if any(((value < 0) | (value >= MODULUS)).any() for value in values):
        raise TensorError("a masked update with values that are not integers modulo 2^32", "")
    if int(values[0][0]) == weight:  # under a mask: with a chance of 2^-32
        raise TensorError("an update that is quantised, but not masked", _SAME)
