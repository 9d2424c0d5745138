"""A client's classifier: a network that is trained and shared as a whole."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core.errors import ModelError
from coterie.core.roles import BACKBONE, GENERALIST, SPECIALIST, Role, by_role
from coterie.core.tensors import Tensors
from coterie.data.examples import Examples
from coterie.models import network_tensors
from coterie.models.layout import LocalPart
from coterie.models.mixture import LoRA
from coterie.models.networks import Network, Shape, channels_last
from coterie.models.predictions import Prediction, flops_of, score_of


class Classifier:
    """A network on a device ("meta": shapes without values), all of it a GENERALIST's but for a
    local part, a SPECIALIST's, see `Layout`. Batch normalisation uses the batch's statistics in
    training, the running ones in scoring, which with `statistics` are shared as the GENERALIST's.

    It begins with the parameters and running statistics of `start`, for any seed, or drawn ones.
    Raises ModelError if they are of another network, or the network has no such part.
    """

    def __init__(
        self,
        shape: Shape,
        device: torch.device | str = "cpu",
        start: Tensors | None = None,
        statistics: bool = False,
        local_part: LocalPart = "none",
    ) -> None:
        self.shape, self.device, self._start = shape, torch.device(device), start
        self.statistics: Role | None = GENERALIST if statistics else None
        self.network = shape.build(self.device).eval()
        network_tensors.make_local(self.network, local_part)
        if start is not None:
            network_tensors.check(shape, start, "the values to start from")
            # PyTorch misses counts that nothing reads
            self.network.load_state_dict(start, strict=False)
        modules = [*self.network.modules()]
        self._batch_norms = [module for module in modules if isinstance(module, nn.BatchNorm2d)]
        kinds, on_cpu = {type(module) for module in modules}, self.device.type == "cpu"
        # group normalisation is slower so
        self._channels_last = on_cpu and nn.Conv2d in kinds and nn.GroupNorm not in kinds

    @cached_property
    def parameters_by_role(self) -> dict[Role, dict[str, nn.Parameter]]:
        """The parameters by role, in the order of `named_parameters`."""
        return by_role(self.network)

    @cached_property
    def buffers(self) -> dict[str, Tensor]:
        """The running statistics of batch normalisation, fp32."""
        return network_tensors.statistics(self.network)

    def initial_buffers(self) -> Tensors:
        """Return the initial running statistics on the CPU; by default means 0 and variances 1."""
        fresh = {
            name: torch.full(buffer.shape, float(name.endswith("running_var")))
            for name, buffer in self.buffers.items()
        }
        return self._started(fresh)

    embed, pools = None, 1

    def expert_slots(self) -> list[dict[str, Tensor]]:
        """Return []: a single network has no experts of a pool."""
        return []

    def bind_experts(self, numbers: Tensor) -> None:
        """Do nothing: there are no places for experts."""

    def loras(self) -> dict[str, LoRA]:
        """Return {}: the network itself is trained."""
        return {}

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of one role, with running statistics if these are shared."""
        local = self.parameters_by_role[SPECIALIST]
        if role is not GENERALIST and not (role is SPECIALIST and local):
            return {}
        fresh = self.shape.initial(seed).items()
        named = {name: t for name, t in fresh if (name in local) == (role is SPECIALIST)}
        return self._started(named) | (self.initial_buffers() if role is self.statistics else {})

    def _started(self, fresh: Tensors) -> Tensors:
        if self._start is None:
            return fresh
        return {name: self._start[name].detach().cpu().clone() for name in fresh}

    @property
    def trainable_parameters(self) -> int:
        """The number of values that are not frozen."""
        by_role = self.parameters_by_role.items()
        trained = (named.values() for role, named in by_role if role is not BACKBONE)
        return sum(parameter.numel() for parameter in chain.from_iterable(trained))

    @property
    def active_parameters(self) -> int:
        """The number of values that one example uses: all."""
        return self.trainable_parameters

    @property
    def output_bias(self) -> Tensor | None:
        """The constants of the logits, (classes,), if the network ends with any."""
        last = [*self.network.parameters()][-1]
        return last.data if last.shape == (self.shape.classes,) else None

    def forward(self, x: Tensor) -> Tensor:
        """Return (B, classes) logits of (B, C, H, W) images or (B, T) texts."""
        return cast(Tensor, self.network(channels_last(x) if self._channels_last else x))

    __call__ = forward

    def gradient(
        self, batch: Examples, wrt: Sequence[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradient of the batch's mean cross-entropy with respect to `wrt`, in its
        order, fp32, and the detached scalars "loss" and "accuracy" of the batch, in forward passes
        of `micro_batch` examples.

        Batch normalisation uses the statistics of the batch, and updates the running ones. No
        `.grad` is touched. Raises ModelError if `wrt` is empty or has a foreign parameter, the
        batch does not fit the network, or micro-batches would change its batch statistics.
        """
        x, y = self.checked(batch)
        size = micro_batch or len(y)
        self.check_whole(size, len(y))
        with network_tensors.training(self.network, wrt), self.batch_statistics():
            gradients, losses, correct = self._accumulate(
                torch.split(x, size), torch.split(y, size), wrt
            )
        return gradients, {"loss": losses / len(y), "accuracy": correct / len(y)}

    def gradient_elsewhere(
        self, batch: Examples, wrt: Sequence[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return `gradient` at another client's model; running statistics stay unchanged."""
        with self._untracked():
            return self.gradient(batch, wrt, micro_batch)

    @property
    def separable(self) -> bool:
        """Whether `per_example` works: not with batch normalisation, nor on texts."""
        return type(self) is Classifier and self.stacks and not self._batch_norms

    def per_example(
        self, batch: Examples, wrt: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradients of each example, (B, ...) for all parameters, and statistics."""
        points = torch.cat([p.detach().flatten() for p in wrt]).expand(len(batch), -1)
        gradients, stats = self.vectorised(points, batch.x[:, None], batch.y[:, None])
        by_name = network_tensors.unflatten(gradients, self.parameters_by_role[GENERALIST])
        return list(by_name.values()), {name: values.mean() for name, values in stats.items()}

    @property
    def stacks(self) -> bool:
        """Whether many clients' networks can be computed at once with the same result."""
        return isinstance(self.network, Network) and not self.parameters_by_role[SPECIALIST]

    def gains(self, examples: int) -> bool:
        """See `Stacked.gains`."""
        return self._stacked.gains(examples)

    @cached_property
    def _stacked(self) -> network_tensors.Stacked:
        return network_tensors.Stacked(self.shape, self.network, self.device)

    def vectorised(
        self, points: Tensor, x: Tensor, y: Tensor, running: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return `gradient` at many points at once, (m, d) fp32, flat in the order of
        `parameters_by_role[GENERALIST]`, each with its own batch, (m, B, C, H, W) fp32 and (m, B)
        int64, and its own running statistics, (m, s) fp32 in the order of `buffers`, which are
        updated in place; or without these `gradient_elsewhere`. That is gradients (m, d), and the
        detached "loss" (m,) and "accuracy" (m,). Raises ModelError if the points or the batches do
        not fit the network.
        """
        if x.shape[:2] != y.shape or points.shape != (len(y), self.trainable_parameters):
            raise ModelError(
                f"{list(points.shape)} values of points, {list(x.shape)} inputs and "
                f"{list(y.shape)} labels",
                f"Expected [m, {self.trainable_parameters}], [m, examples, ...] and [m, examples].",
            )
        inputs, labels = self.checked(Examples(x.flatten(0, 1), y.flatten()))
        with nullcontext() if running is not None else self._untracked(), self.batch_statistics():
            return self._stacked.gradients(
                points, inputs.view(x.shape), labels.view(y.shape), running
            )

    def predictions(self, batches: Iterable[Examples]) -> Iterator[Prediction]:
        """Yield each batch's log-probabilities, (B, classes), and labels, (B,)."""
        for batch in batches:
            x, y = self.checked(batch)
            with torch.no_grad():
                yield self(x).log_softmax(dim=1), y

    def score(self, batches: Iterable[Examples]) -> Tensor:
        """Return (3,) float64 on the CPU: the summed negative log-likelihood of labels in nats, the
        number of examples, and the number classified correctly.
        """
        return score_of(self.predictions(batches), 3)

    def flops(self) -> int:
        """Return the floating-point operations of one example's forward pass."""
        return flops_of(lambda: self.network(self.shape.example().to(self.device)))

    def _accumulate(
        self, xs: Sequence[Tensor], ys: Sequence[Tensor], wrt: Sequence[nn.Parameter]
    ) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the gradients of the mean loss, the summed loss, and the number of hits."""
        gradients: list[Tensor] = []
        losses = correct = torch.zeros((), device=self.device)
        count = sum(map(len, ys))
        for x, y in zip(xs, ys, strict=True):
            logits = self(x)
            loss = cross_entropy(logits, y, reduction="sum")
            terms = torch.autograd.grad(loss / count, wrt, materialize_grads=True)
            pairs = zip(gradients, terms, strict=True)
            gradients = [total + term for total, term in pairs] if gradients else list(terms)
            losses, correct = losses + loss.detach(), correct + (logits.argmax(dim=1) == y).sum()
        return gradients, losses, correct

    def checked(self, batch: Examples) -> tuple[Tensor, Tensor]:
        """Return the batch on the network's device. Raises ModelError if labels are not (B,) int64,
        B >= 1, or out of range, or inputs do not fit the network.
        """
        x, y = batch.x, batch.y
        if y.dtype != torch.int64 or y.ndim != 1 or len(y) == 0 or len(x) != len(y):
            raise ModelError(
                f"a batch of {x.dtype}{list(x.shape)} inputs and {y.dtype}{list(y.shape)} labels",
                "Expected int64 [examples], at least one, and an input for each.",
            )
        self.shape.check_inputs(x)
        least, most = map(int, y.aminmax())
        if least < 0 or most >= self.shape.classes:
            raise ModelError(
                f"label {least if least < 0 else most} of a network with {self.shape.classes} "
                f"classes",
                f"Labels are 0 to {self.shape.classes - 1}: build the network for more classes, "
                f"or relabel the data.",
            )
        return x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)

    def check_whole(self, micro_batch: int, examples: int) -> None:
        """Refuse micro-batches if batch statistics normalise the batch. Raises ModelError."""
        if micro_batch < examples and self._batch_norms:
            raise ModelError(
                f"micro_batch {micro_batch} would split a batch of {examples}, but batch "
                f"normalisation needs all of it at once",
                "Leave training.micro_batch out, or choose a network with norm 'group' or 'none'.",
            )

    @contextmanager
    def batch_statistics(self) -> Iterator[None]:
        """Normalise batches by their own statistics. Raises ModelError for too small ones."""
        modal: Sequence[nn.Module] = (
            self._batch_norms if isinstance(self.network, Network) else [self.network]
        )
        for module in modal:
            module.train()
        try:
            yield
        # of PyTorch's batch normalisation, the only one here that looks at values per channel
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            problem = "a batch of one example has no statistics to normalise it by"
            remedy = "Use a larger training.batch_size, or a network with norm 'group' or 'none'."
            raise ModelError(problem, remedy) from error
        finally:
            for module in modal:
                module.eval()

    @contextmanager
    def comparing(self) -> Iterator[None]:
        """Normalise batches by their own statistics without updating the running ones."""
        with self._untracked(), self.batch_statistics() if self._batch_norms else nullcontext():
            yield

    @contextmanager
    def _untracked(self) -> Iterator[None]:
        """Neither use running statistics in training nor update them within the block."""
        for norm in self._batch_norms:
            norm.track_running_stats = False
        try:
            yield
        finally:
            for norm in self._batch_norms:
                norm.track_running_stats = True
