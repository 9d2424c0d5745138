"""Personal models compiled: a package of AOTInductor, which torch runs without compiling anything
more, and C++ without Python.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.core.errors import ExportError, Refused
from coterie.export.format import ClientModel, Options
from coterie.export.functional import Interface, traced
from coterie.export.graph import GraphFormat, GraphRuntime
from coterie.export.serving import Serving

COMPILERS = ("g++", "clang++", "cl")


class Pt2(GraphFormat):
    """A package of compiled code with the base's weights in it."""

    name = "pt2"
    about = "a compiled base and tensors for each client, for torch and C++, of every base"
    base = "base.pt2"

    def check(self, client: ClientModel, options: Options) -> None:
        named = os.environ.get("CXX")
        if not any(map(shutil.which, [named] if named else COMPILERS)):
            raise Refused(
                "--format pt2 compiles the base, and there is no C++ compiler here"
                + (f" (CXX is {named})" if named else ""),
                "Install g++ or clang++, or use --format onnx, which needs none.",
            )

    def write_graph(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        from torch._inductor import aoti_compile_and_package

        model = clients[0].model
        program = traced(model, Interface.of(model))
        try:
            aoti_compile_and_package(program, package_path=str(folder / self.base))
        except Exception as error:  # whatever the compiler happens to raise
            reason = str(error).strip().split("\n")[0]
            raise ExportError(
                f"the base could not be compiled: {reason}",
                "Nothing is kept. Use --format onnx, which compiles nothing.",
            ) from error

    def loaded(
        self, base: Path, interface: Interface, client: Mapping[str, Tensor]
    ) -> GraphRuntime:
        return Pt2Runtime(base, interface, client)

    def program(self, client: str, serving: Serving) -> str:
        return serving.in_program(PROGRAM.replace("CLIENT", client))


class Pt2Runtime(GraphRuntime):
    """A compiled base in this process.

    Args:
        base: The package.
        interface: What it takes and returns.
        client: The tensors of the client.
    """

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        from torch._inductor import aoti_load_package

        super().__init__(interface, client)
        self.run: Any = aoti_load_package(str(base))

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        values = self.interface.arguments(self.arguments(ids, kept, past))
        logits, present = self.run(*values)
        return [logits, *(part for pair in present for part in pair)]


PROGRAM = """\
import json

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

run = torch._inductor.aoti_load_package("base.pt2")
inputs = json.load(open("export.json"))["inputs"]  # in the order in which they are given
client = load_file("CLIENT")  # of --precision f32
client = {name: client[name] for name in inputs if name in client}
cache = [entry["shape"] for name, entry in inputs.items() if name.endswith(".key")]
past = [(torch.zeros(1, heads, 0, width),) * 2 for _, heads, _, width in cache]
tokenizer = Tokenizer.from_file("tokenizer.json")
new = text = PROMPT
for _ in range(10):
    kept = torch.tensor([len(new) - 1])  # logits of the last token only
    logits, past = run(torch.tensor([new]), kept, past, client)
    new = [int(logits[0, -1].argmax())]
    if new[0] in STOPS:
        break
    text = text + new
print(tokenizer.decode(text))
"""
