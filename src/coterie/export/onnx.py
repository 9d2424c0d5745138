"""Personal models for ONNX Runtime, on phones, boards and in browsers: one base for all clients,
and for each a small file of tensors that are inputs of the base's graph.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.files import write_atomically
from coterie.export import client_files, onnx_base
from coterie.export.format import ClientModel, Format, Options, Runtime, Written
from coterie.export.functional import Interface, client_tensors

README = "README.md"


class Onnx(Format):
    """A graph of the base with cache, whose inputs are a client's tensors too."""

    name = "onnx"
    about = "a base and tensors for each client, for ONNX Runtime, of every base"
    packages = ("onnx", "onnxscript", "onnxruntime")
    precisions = client_files.PRECISIONS
    base_precisions = onnx_base.PRECISIONS
    shares_base = True
    routing: ClassVar[bool] = False  # whether the graph returns the experts' weights

    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse nothing: every base and every layout can be traced."""

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        model = clients[0].model
        interface = self._interface_of(clients[0])
        onnx_base.write_base(folder, model, interface, options.base_precision)
        model.tokenizer.save_pretrained(folder)
        write_atomically(folder / README, self.readme(clients).encode())

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        own = own_file(client)
        client_files.write(folder / own, client_tensors(client.model), options.precision)
        others = [path for path in folder.rglob("*") if path.suffix != client_files.ENDING]
        shared = [path.relative_to(folder).as_posix() for path in others if path.is_file()]
        shared.sort(key=lambda name: (name != onnx_base.BASE, name))
        return Written(folder, (own,), client.logits, shared=tuple(shared))

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[Runtime]:
        tensors = client_files.read(written.folder / written.files[0])
        interface = self._interface_of(client)
        yield OnnxRuntime(written.folder / onnx_base.BASE, interface, tensors)

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return self._interface_of(client).described()

    def _interface_of(self, client: ClientModel) -> Interface:
        return Interface.of(client.model, self.routing)

    def readme(self, clients: Sequence[ClientModel]) -> str:
        """Return how the files are used."""
        return _readme(clients)


def own_file(client: ClientModel) -> str:
    """Return the name of a client's file."""
    return names.encoded(client.client) + client_files.ENDING


class GraphRuntime(Runtime):
    """A graph of the base with cache, run by some program.

    Args:
        interface: What it takes and returns.
        client: The tensors of the client.
    """

    def __init__(self, interface: Interface, client: Mapping[str, Tensor]) -> None:
        self.interface = interface
        self.client = {name: client[name] for name in interface.client}

    @abstractmethod
    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        """Return the graph's outputs in their order, for (B, C) tokens behind the cached ones."""

    def _past(self, rows: int) -> list[Tensor]:
        return [part for shape in self.interface.caches for part in shape.zeros(rows, 0)]

    def logits(self, ids: Tensor) -> Tensor:
        return self.step(ids, torch.arange(ids.shape[1]), self._past(len(ids)))[0]

    def logits_by_token(self, ids: Tensor) -> Tensor:
        found, past, kept = [], self._past(len(ids)), torch.tensor([0])
        for token in torch.split(ids, 1, dim=1):
            logits, *past = self.step(token, kept, past)[: 1 + len(past)]
            found.append(logits)
        return torch.cat(found, dim=1)


class OnnxRuntime(GraphRuntime):
    """ONNX Runtime on the CPU, with as many threads as torch has.

    Args:
        base: The base's file.
        interface: What it takes and returns.
        client: The tensors of the client.
    """

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        import onnxruntime

        super().__init__(interface, client)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors
        self.session = onnxruntime.InferenceSession(
            base, options, providers=["CPUExecutionProvider"]
        )

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        tensors = [ids, kept, *past, *self.client.values()]
        given = dict(zip(self.interface.inputs, (t.numpy() for t in tensors), strict=True))
        return [torch.from_numpy(array) for array in self.session.run(None, given)]


def _readme(clients: Sequence[ClientModel]) -> str:
    files = "\n".join(f"| {client.client} | `{own_file(client)}` |" for client in clients)
    return f"""# Personal models for ONNX Runtime, exported from coterie

`{onnx_base.BASE}` (with `{onnx_base.WEIGHTS}`) is the base, which all clients share. The file of a
client holds tensors that are inputs of the base's graph: to change the client is to give others.
`export.json` lists inputs and outputs, and says how far each client is from the personal model.

| client | file |
| --- | --- |
{files}

```python
import numpy as np
import onnxruntime
from safetensors.numpy import load_file
from tokenizers import Tokenizer


def read(path):
    found = load_file(path)  # of --precision f16 or int8: the graph takes fp32
    return {{
        name: value if value.dtype == np.int64
        else value.astype(np.float32) * found.get(f"{{name}}.scale", np.float32(1))
        for name, value in found.items() if not name.endswith(".scale")
    }}


session = onnxruntime.InferenceSession("{onnx_base.BASE}")
client = read("{own_file(clients[0])}")
past = {{
    i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32)
    for i in session.get_inputs() if i.name.startswith("past_key_values")
}}
tokenizer = Tokenizer.from_file("tokenizer.json")
ids = tokenizer.encode("In my free time, I like to").ids
for _ in range(10):
    kept = np.array([len(ids) - 1])  # logits of the last token only
    inputs = {{"input_ids": np.array([ids]), "logits_to_keep": kept, **past, **client}}
    logits, *present = session.run(None, inputs)
    past, ids = dict(zip(past, present)), [int(logits[0, -1].argmax())]
    print(tokenizer.decode(ids), end="")
```
"""
