"""The common part of formats that write the base as one graph with a client's tensors as inputs:
another client does not need to load the base again.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.files import read_json, write_atomically
from coterie.export import client_files
from coterie.export.format import ClientModel, Format, Options, Runtime, Written
from coterie.export.functional import Interface, client_tensors
from coterie.export.serving import GENERATION, Serving, ids_of

README = "README.md"


def own_file(client: ClientModel) -> str:
    """Return the name of a client's file."""
    return names.encoded(client.client) + client_files.ENDING


class GraphRuntime(Runtime):
    """A graph of the base with cache, run by some program.

    Args:
        interface: The inputs and outputs of the graph.
        client: The tensors of the client.
    """

    def __init__(self, interface: Interface, client: Mapping[str, Tensor]) -> None:
        self.interface = interface
        # tokens at which the program's users end a text
        self.stops: tuple[int, ...] = ()
        self.client = {name: client[name] for name in interface.client}

    @abstractmethod
    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        """Return the graph's outputs in order, for (B, C) tokens after the cached tokens."""

    def arguments(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        """Return all inputs in order."""
        return [ids.contiguous(), kept, *past, *self.client.values()]

    def empty(self, rows: int) -> list[Tensor]:
        """Return an empty cache."""
        return [part for shape in self.interface.caches for part in shape.zeros(rows, 0)]

    def logits(self, ids: Tensor) -> Tensor:
        return self.step(ids, torch.arange(ids.shape[1]), self.empty(len(ids)))[0]

    def ending(self, prompt: Sequence[int], stops: Sequence[int]) -> set[int]:
        return {*stops} & {*self.stops}

    def answer(self, prompt: Sequence[int], most: int) -> tuple[list[int], bool]:
        past, answer = self.empty(1), list[int]()
        ids = torch.tensor([[*prompt]])
        parts = torch.split(ids, self.longest or len(prompt), dim=1)
        while len(answer) < most:
            for part in parts:
                kept = torch.tensor([part.shape[1] - 1])
                logits, *past = self.step(part, kept, past)[: 1 + len(past)]
            answer.append(int(logits[0, -1].argmax()))
            if answer[-1] in self.stops:
                return answer, True
            parts = (torch.tensor([answer[-1:]]),)
        return answer, False

    def logits_by_token(self, ids: Tensor) -> Tensor:
        outputs, past, kept = [], self.empty(len(ids)), torch.tensor([0])
        for token in torch.split(ids, 1, dim=1):
            logits, *past = self.step(token, kept, past)[: 1 + len(past)]
            outputs.append(logits)
        return torch.cat(outputs, dim=1)


class GraphFormat(Format):
    """A base that takes what an `Interface` lists, its tokenizer, and a file for each client.

    `base` is the name of the base's file; with `routing` the graph returns the experts' weights.
    """

    base: ClassVar[str]
    routing: ClassVar[bool] = False
    precisions = client_files.PRECISIONS
    shares_base = True

    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse nothing: every base and every layout can be traced."""

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        self.write_graph(clients, folder, options)
        clients[0].serving.save(folder)
        write_atomically(folder / README, self.readme(clients).encode())

    @abstractmethod
    def write_graph(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        """Write the base's file."""

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        file = own_file(client)
        client_files.write(folder / file, self.tensors(client), options.precision)
        others = [path for path in folder.rglob("*") if path.suffix != client_files.ENDING]
        shared = [path.relative_to(folder).as_posix() for path in others if path.is_file()]
        shared.sort(key=lambda name: (name != self.base, name))
        return Written(folder, (file,), client.logits, shared=tuple(shared))

    def tensors(self, client: ClientModel) -> dict[str, Tensor]:
        """Return the tensors of a client's file."""
        return client_tensors(client.model)

    def runtime(
        self, client: ClientModel, written: Written
    ) -> AbstractContextManager[GraphRuntime]:
        tensors = client_files.read(written.folder / written.files[0])
        interface = self.interface_of(client)
        runtime = self.loaded(written.folder / self.base, interface, tensors)
        runtime.stops = ids_of(read_json(written.folder / GENERATION).get("eos_token_id"))
        return nullcontext(runtime)

    @abstractmethod
    def loaded(
        self, base: Path, interface: Interface, client: Mapping[str, Tensor]
    ) -> GraphRuntime:
        """Load a base with a client's tensors, in the format's own program."""

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return self.interface_of(client).described()

    def interface_of(self, client: ClientModel) -> Interface:
        """Return the inputs and outputs of the graph."""
        return Interface.of(client.model, self.routing)

    @abstractmethod
    def program(self, client: str, serving: Serving) -> str:
        """Return an example program that writes a text with a client's file."""

    def readme(self, clients: Sequence[ClientModel]) -> str:
        """Return the text of README.md."""
        serving = clients[0].serving
        files = "\n".join(f"| {client.client} | `{own_file(client)}` |" for client in clients)
        return f"""# Personal models exported from coterie, as {self.name}

`{self.base}` is the base, which all clients share. The file of a client holds tensors that are
inputs of the base's graph: to change the client is to give others. `export.json` lists inputs and
outputs in their order, and says how far each client is from the personal model. {serving.usage}

| client | file |
| --- | --- |
{files}

```python
{self.program(own_file(clients[0]), serving)}```
"""
