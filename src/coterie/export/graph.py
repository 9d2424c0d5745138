"""The common part of formats that write the base as one graph with a client's tensors as inputs:
another client does not need to load the base again.

A client's tensors are a safetensors file: a length of 8 bytes, a JSON of names, shapes and offsets,
and the values, which any language reads in a few lines.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.errors import ExportError
from coterie.core.files import load, read_json, save, write_atomically
from coterie.core.foreign import read_text
from coterie.core.tensors import all_finite
from coterie.export.format import ClientModel, Format, Options, Runtime, Written, filled_readme
from coterie.export.functional import Interface, client_tensors
from coterie.export.serving import GENERATION, ids_of

README = "README.md"
PRECISIONS = ("f32", "f16", "int8")
ENDING, SCALE = ".safetensors", ".scale"


def own_file(client: ClientModel) -> str:
    """Return the name of a client's file."""
    return names.encoded(client.client) + ENDING


class GraphRuntime(Runtime):
    """A graph of the base with cache, run by some program."""

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        self.base, self.interface = base, interface
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
    """A base that takes what an `Interface` lists, its tokenizer, and a file for each client."""

    base: ClassVar[str]  # the name of the base's file
    program: ClassVar[type[GraphRuntime]]  # runs the base
    routing: ClassVar[bool] = False  # whether the graph returns the experts' weights
    precisions = PRECISIONS
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
        write_tensors(folder / file, client_tensors(client.model), options.precision)
        others = [path for path in folder.rglob("*") if path.suffix != ENDING]
        shared = [path.relative_to(folder).as_posix() for path in others if path.is_file()]
        shared.sort(key=lambda name: (name != self.base, name))
        return Written(folder, (file,), client.logits, shared=tuple(shared))

    def runtime(
        self, client: ClientModel, written: Written
    ) -> AbstractContextManager[GraphRuntime]:
        tensors = read_tensors(written.folder / written.files[0])
        runtime = self.program(written.folder / self.base, self.interface_of(client), tensors)
        runtime.stops = ids_of(read_json(written.folder / GENERATION).get("eos_token_id"))
        return nullcontext(runtime)

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return self.interface_of(client).described()

    def interface_of(self, client: ClientModel) -> Interface:
        """Return the inputs and outputs of the graph."""
        return Interface.of(client.model, self.routing)

    def readme(self, clients: Sequence[ClientModel]) -> str:
        """Return the text of README.md."""
        serving = clients[0].serving
        program = read_text(Path(__file__).parent / f"programs/{self.name}.py.txt")
        example = serving.in_program(program.replace("CLIENT", own_file(clients[0])))
        files = "\n".join(f"| {client.client} | `{own_file(client)}` |" for client in clients)
        return filled_readme(
            "graph", format=self, usage=serving.usage, files=files, example=example
        )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], precision: str) -> None:
    """Write tensors in a precision. Raises SaveError, and ExportError for values beyond its range.

    `int8` rounds every matrix to 8 bits: NAME (..., width) has a scale NAME.scale (..., 1), and the
    value is their product. Integers, and vectors with `int8`, are unchanged.
    """
    stored: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and precision == "f16":
            stored[name] = tensor.half()
        elif tensor.is_floating_point() and precision == "int8" and tensor.ndim > 1:
            stored[name], stored[name + SCALE] = _rounded(tensor)
        else:
            stored[name] = tensor
    if broken := [name for name, tensor in stored.items() if not all_finite({name: tensor})]:
        raise ExportError(
            f"{path}: {broken[0]} has values that {precision} cannot hold",
            "Export it in f32, or train it again.",
        )
    save(path, stored, {"format": "pt", "precision": precision})


def _rounded(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix in 8 bits and the scale of each row."""
    # the smallest scale keeps rows of zeros from a division by 0
    scale = tensor.abs().amax(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / 127
    return (tensor / scale).round().to(torch.int8), scale


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a client's tensors by the graph's inputs, fp32 or integers. Raises CheckpointError."""
    stored, _ = load(path)
    values: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        if name + SCALE in stored:
            values[name] = tensor.float() * stored[name + SCALE]
        elif not name.endswith(SCALE):
            values[name] = tensor.float() if tensor.is_floating_point() else tensor
    return values
