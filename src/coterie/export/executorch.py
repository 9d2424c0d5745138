"""Personal models for ExecuTorch, on phones: the base lowered to XNNPACK."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import Refused
from coterie.core.files import write_atomically
from coterie.export.format import ClientModel, Options, Written
from coterie.export.functional import Interface, client_tensors, sizes_of, traced
from coterie.export.graph import GraphFormat, GraphRuntime
from coterie.personal import PersonalModel

# tokens in the cache, unless the base takes fewer or the clients were trained with more
LONGEST = 512
# new tokens in one step, unless the clients were trained with more
AT_ONCE = 64


class ExecuTorchRuntime(GraphRuntime):
    """ExecuTorch in this process."""

    probe = (1, 48)

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        from executorch.runtime import Runtime

        super().__init__(base, interface, client)
        self.method: Any = Runtime.get().load_program(str(base)).load_method("forward")

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        outputs = self.method.execute(self.arguments(ids, kept, past))
        # the next step overwrites them
        return [tensor.clone() for tensor in outputs]

    def logits(self, ids: Tensor) -> Tensor:
        return torch.cat([GraphRuntime.logits(self, row) for row in torch.split(ids, 1)])


class ExecuTorch(GraphFormat):
    """A program of ExecuTorch. Its memory is planned ahead: batches have one row, lengths are
    limited, and all models have one layout.
    """

    name = "executorch"
    about = "a base and tensors for each client, for ExecuTorch, of every base"
    packages = ("executorch",)
    extra = "executorch"
    base = "base.pte"
    program = ExecuTorchRuntime

    def write_graph(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        model = clients[0].model
        interface, sizes = Interface.of(model), _sizes(model)
        for client in clients:
            if _sizes(client.model) != sizes:
                raise Refused(
                    f"{client.client} has other numbers of experts or ranks than "
                    f"{clients[0].client}, and a program of ExecuTorch has one of each",
                    "Export them one by one, with --client, or use --format onnx.",
                )
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        program = traced(model, interface, {"batch": 1} | sizes, limits(model))
        with torch.no_grad():
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        write_atomically(folder / self.base, lowered.to_executorch().buffer)

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[GraphRuntime]:
        with super().runtime(client, written) as runtime:
            most = limits(client.model)
            runtime.longest, runtime.window = most["tokens"], most["past"]
            yield runtime

    def interface(self, client: ClientModel) -> dict[str, Any]:
        most = {"batch": 1} | _sizes(client.model) | limits(client.model)
        return super().interface(client) | {"limits": most}


def _sizes(model: PersonalModel) -> dict[str, int]:
    return sizes_of(Interface.of(model), client_tensors(model))


def limits(model: PersonalModel) -> dict[str, int]:
    """Return how many new tokens, logits and cached tokens one step takes."""
    most = model.backbone.context_limit
    tokens = min(most // 2, max(AT_ONCE, model.about.context))
    past = min(most, max(LONGEST, 2 * tokens)) - tokens
    return {"tokens": tokens, "kept": tokens, "past": past}
