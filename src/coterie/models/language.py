"""A client's language model: the shared backbone with the client's adapter."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from itertools import cycle
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.core.roles import EXPERT, Role
from coterie.core.tensors import Tensors
from coterie.data.chats.splits import ChatBatch
from coterie.models.adapter import Adapter, CopiedAdapter, copies
from coterie.models.backbone import Backbone
from coterie.models.layout import ABSENT, Layout
from coterie.models.mixture import LoRA
from coterie.models.network_tensors import check_trained, training
from coterie.models.predictions import Prediction, score_of
from coterie.models.routing import Routing, Totals, balance_by_row
from coterie.models.slots import Attachable
from coterie.models.windows import TextBatch, Windows, nll_by_row, nll_of, nll_sum


class LanguageModel:
    """A backbone with one client's adapter.

    The adapter's parameters are fp32 on the backbone's device, and cast to its dtype where they are
    used. They start from `Adapter.initial` with seed 0; experts of a pool are 0 until bound:
    `numbers`, (K,) int64, are then the pool's members in the places of `expert_slots`.

    Args:
        backbone: The frozen base, which other models may share.
        layout: The adapter's experts, ranks and routing.
    """

    def __init__(self, backbone: Backbone, layout: Layout) -> None:
        self.buffers: Tensors = {}  # no running statistics
        self.backbone, self.layout = backbone, layout
        self.adapter = Adapter(backbone.architecture, layout)
        for role in set(Role) - {EXPERT}:
            self.adapter.load_state_dict(self.adapter.initial(role, 0), strict=False)
        self.adapter.to(backbone.device)
        self.pools = self.adapter.pools
        self.bind_experts(torch.full((len(self.expert_slots()),), ABSENT))

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    def initial_buffers(self) -> Tensors:
        """Return {}, as `buffers`."""
        return {}

    statistics = embed = None  # nor a common expert

    def expert_slots(self) -> list[dict[str, Tensor]]:
        """See `Adapter.expert_slots`."""
        return self.adapter.expert_slots()

    def bind_experts(self, numbers: Tensor) -> None:
        """Take over the numbers of a client's experts, (K,) int64."""
        self.numbers = numbers

    @torch.no_grad()
    def embedding(self, batch: TextBatch) -> Tensor:
        """Return the mean hidden states of windows in the base, (B, e), on the CPU."""
        with self.backbone.using(None):
            if isinstance(batch, ChatBatch):
                windows = Windows.of(self.backbone, batch)
                hidden = self.backbone.hidden(windows.inputs, windows.positions)
                return windows.means(hidden.float()).cpu()
            ids = self.backbone.checked(batch)[:, : self.backbone.context_limit]
            return self.backbone.hidden(ids).float().mean(dim=1).cpu()

    def settled(self) -> tuple[Layout, Tensors]:
        """Return layout and tensors with nothing frozen or repeated: sums become ranks."""
        if self.layout.repeated:
            return self.adapter.unrepeated(*self._held)
        if self.layout.frozen_sum:
            return self.adapter.whole()
        tensors = {name: p.detach().clone() for name, p in self.adapter.named_parameters()}
        if self.layout.projected and not self.layout.held:
            most = max(*self._held, 1)
            tensors |= {n: tensors[n][:most] for n in self.parameters_by_role[EXPERT]}
            return replace(self.layout, specialists=most, held=(*self._held,)), tensors
        return replace(self.layout, frozen_generalists=False), tensors

    @property
    def _held(self) -> list[int]:
        return cast(list[int], (self.numbers.view(-1, self.pools) != ABSENT).sum(dim=0).tolist())

    @torch.no_grad()
    def embeddings(self, batches: Iterable[TextBatch]) -> Tensor:
        """Return what `ProjectedRouter` compares, the means over all tokens, (blocks, 1 + S, r)
        float64 on the CPU: first of P x, then of A_j x.
        """
        total, tokens, routers = torch.zeros((), dtype=torch.float64), 0, self.adapter.routers()
        for batch in batches:
            windows, record = Windows.of(self.backbone, batch), list[Routing]()
            with self._using(record), ExitStack() as stack:
                for router in routers:  # nothing else reads what they compare
                    router.comparing = True
                    stack.callback(setattr, router, "comparing", False)
                self.backbone.hidden(windows.inputs, windows.positions)
            each = [cast(Tensor, decision.embeddings) for decision in windows.of_tokens(record)]
            sums = torch.stack([x.cpu().sum(dim=0, dtype=torch.float64) for x in each])
            total, tokens = total + sums, tokens + windows.routed
        return total / tokens

    def _using(
        self, record: list[Routing] | None = None, adapter: Attachable | None = None
    ) -> AbstractContextManager[None]:
        """Attach the adapter, or one in its place, within the block."""
        if not self.layout.held:
            for router, held in zip(self.adapter.routers(), cycle(self._held), strict=False):
                router.held = held
        return self.backbone.using(adapter or self.adapter, record)

    @property
    def parameters_by_role(self) -> dict[Role, dict[str, nn.Parameter]]:
        return self.adapter.parameters_by_role

    def loras(self) -> dict[str, LoRA]:
        return self.adapter.loras()

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of one role, see `Adapter.initial`."""
        return self.adapter.initial(role, seed)

    def forward(self, ids: Tensor) -> Tensor:
        """Return (B, C, V) logits of (B, C) int64 token ids."""
        with self._using():
            return self.backbone.logits(self.backbone.checked(ids))

    __call__ = forward

    def predicted(self, batch: TextBatch) -> tuple[Tensor, Tensor]:
        """Return the logits of a batch's counted targets, (T, V), and these targets, (T,)."""
        windows = Windows.of(self.backbone, batch)
        with self._using():
            logits = self.backbone.logits(windows.inputs, windows.positions)
        return windows.chosen(logits.flatten(0, 1)), windows.targets

    @torch.no_grad()
    def generate(self, ids: Tensor, **settings: Any) -> Tensor:
        """Continue (B, C) token ids by transformers' `generate` with its settings."""
        with self._using():
            return cast(Tensor, self.backbone.model.generate(ids.to(self.device), **settings))

    @torch.no_grad()
    def routing(self, ids: Tensor) -> Tensor:
        """Return each token's weight for each expert, (blocks, B, C, n) fp32, of (B, C) int64 token
        ids. Raises ModelError without a router.
        """
        if not self.layout.routed:
            remedy = "Token-level routing needs at least two experts and routing 'learned'."
            raise ModelError("this model has no router", remedy)
        record: list[Routing] = []
        with self._using(record):
            self.backbone.hidden(self.backbone.checked(ids))
        return torch.stack([decision.weights.view(*ids.shape, -1) for decision in record])

    def predictions(self, batches: Iterable[TextBatch]) -> Iterator[Prediction]:
        """Yield each batch's log-probabilities of the right tokens, (T, 1), and zeros, (T,).

        Batches are (B, C + 1) int64 each, or conversations, whose counted tokens are predicted.
        """
        for batch in batches:
            with torch.no_grad(), self._using():
                nll = nll_of(self.backbone, Windows.of(self.backbone, batch))
            yield -nll[:, None], torch.zeros_like(nll, dtype=torch.int64)

    def score(self, batches: Iterable[TextBatch]) -> Tensor:
        """Return (2,) float64: the summed negative log-likelihood in nats, and its tokens."""
        return score_of(self.predictions(batches), 2)

    def gradient(
        self, batch: TextBatch, wrt: Sequence[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradient of the whole batch's objective with respect to `wrt`, parameters of
        the adapter, in its order, fp32; and detached statistics: the scalars "loss" (the
        cross-entropy) and "balance", and, if routed, "router" (blocks, n), the mean weights.

        The objective is the mean next-token cross-entropy of (B, C + 1) int64, or of the counted
        tokens of conversations, + lambda * load balancing over all tokens. It does not depend on
        the size of micro-batches, the rows of a forward pass: f, which is not linear in the batch,
        is computed for the whole batch first if its gradient needs it. No `.grad` is touched, and
        nothing waits for the device, except for group sizes when k < n. Raises ModelError if `wrt`
        is empty or has a foreign parameter, or the batch has another form.
        """
        windows = Windows.of(self.backbone, batch)
        parts = windows.split(micro_batch or len(windows))
        totals = Totals(self.layout, windows.predictions, windows.routed)
        gradients: list[Tensor] = []
        with ExitStack() as stack:
            stack.callback(self.adapter.eval)
            stack.enter_context(training(self.adapter.train(), wrt))
            # with k = n every f is 1
            varies = self.layout.balance_has_gradient and self.layout.active < self.layout.experts
            load = self._load(parts) if len(parts) > 1 and varies else None
            for part in parts:
                record: list[Routing] = []
                with self._using(record):  # the backward pass, too, may compute blocks
                    objective = self._objective(part, record, totals, load)
                    # a gate that chose a single expert: nothing is weighed
                    if not objective.requires_grad:
                        return [torch.zeros_like(p) for p in wrt], totals.statistics()
                    terms = torch.autograd.grad(objective, wrt, materialize_grads=True)
                if not gradients:
                    gradients = list(terms)
                    continue
                for total, term in zip(gradients, terms, strict=True):
                    total.add_(term)
        return gradients, totals.statistics()

    gradient_elsewhere = gradient  # there are no running statistics that would notice

    def per_example(
        self, batch: TextBatch, wrt: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return each row's gradient, exactly `gradient` of a batch of this row alone, but without
        dropout, (B, ...) fp32 each in the order of `wrt`; and its statistics, means over rows.
        Raises ModelError as `gradient`.
        """
        windows = Windows.of(self.backbone, batch)
        check_trained(self.adapter.parameters(), wrt)
        totals = Totals(self.layout, windows.predictions, windows.routed)
        copied, record = copies(wrt, len(windows)), list[Routing]()
        with self._using(record, CopiedAdapter(self.adapter, copied)):
            nll, objective = nll_by_row(self.backbone, windows)
            totals.add(nll, windows.of_tokens(record), None)
            if self.layout.balance_has_gradient:
                balance = balance_by_row(self.layout, windows.by_row(record))
                objective = objective + self.layout.balance_weight * balance
            leaves = list(copied.values())
            gradients = torch.autograd.grad(objective, leaves, materialize_grads=True)
        return list(gradients), totals.statistics()

    def _objective(
        self, windows: Windows, record: list[Routing], totals: Totals, load: Tensor | None
    ) -> Tensor:
        """Return a micro-batch's share of the objective; `load` is f of the whole batch."""
        nll = nll_sum(self.backbone, windows)
        balance = totals.add(nll, windows.of_tokens(record), load)
        objective = nll / totals.tokens
        return objective if balance is None else objective + self.layout.balance_weight * balance

    @torch.no_grad()
    def _load(self, parts: Sequence[Windows]) -> Tensor:
        """Return (blocks, n) f over all parts; the next pass draws the same dropout."""
        users: list[Tensor] = []
        with devices.forked(self.backbone.device):
            for part in parts:
                record: list[Routing] = []
                with self._using(record):
                    self.backbone.hidden(part.inputs, part.positions)
                users.append(torch.stack([decision.users() for decision in part.of_tokens(record)]))
        return torch.stack(users).sum(dim=0) / sum(part.routed for part in parts)
