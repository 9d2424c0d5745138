"""Personal models for ONNX Runtime, on phones, boards and in browsers."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from coterie.export import onnx_base
from coterie.export.format import ClientModel, Options
from coterie.export.functional import Interface
from coterie.export.graph import GraphFormat, GraphRuntime
from coterie.export.serving import Serving


class Onnx(GraphFormat):
    """A graph of ONNX with its weights beside it."""

    name = "onnx"
    about = "a base and tensors for each client, for ONNX Runtime, of every base"
    packages = ("onnx", "onnxscript", "onnxruntime")
    base_precisions = onnx_base.PRECISIONS
    base = onnx_base.BASE

    def write_graph(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        model = clients[0].model
        interface = self.interface_of(clients[0])
        onnx_base.write_base(folder, model, interface, options.base_precision)

    def loaded(
        self, base: Path, interface: Interface, client: Mapping[str, Tensor]
    ) -> GraphRuntime:
        return OnnxRuntime(base, interface, client)

    def program(self, client: str, serving: Serving) -> str:
        return serving.in_program(PROGRAM.replace("CLIENT", client))


class OnnxRuntime(GraphRuntime):
    """ONNX Runtime on the CPU, with as many threads as torch has.

    Args:
        base: The file of the graph.
        interface: The inputs and outputs of the graph.
        client: The tensors of the client.
    """

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        import onnxruntime

        super().__init__(interface, client)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # errors only
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            base, options, providers=["CPUExecutionProvider"]
        )

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        tensors = self.arguments(ids, kept, past)
        given = dict(zip(self.interface.inputs, (t.numpy() for t in tensors), strict=True))
        return [torch.from_numpy(array) for array in self.session.run(None, given)]


PROGRAM = """\
import numpy as np
import onnxruntime
from safetensors.numpy import load_file
from tokenizers import Tokenizer


def read(path):
    found = load_file(path)  # of --precision f16 or int8: the graph takes fp32
    return {
        name: value
        if value.dtype == np.int64
        else value.astype(np.float32) * found.get(f"{name}.scale", np.float32(1))
        for name, value in found.items()
        if not name.endswith(".scale")
    }


session = onnxruntime.InferenceSession("base.onnx")
client = read("CLIENT")
past = {
    i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), np.float32)
    for i in session.get_inputs()
    if i.name.startswith("past_key_values")
}
tokenizer = Tokenizer.from_file("tokenizer.json")
new = text = PROMPT
for _ in range(10):
    kept = np.array([len(new) - 1])  # logits of the last token only
    inputs = {"input_ids": np.array([new]), "logits_to_keep": kept, **past, **client}
    logits, *present = session.run(None, inputs)
    past, new = dict(zip(past, present)), [int(logits[0, -1].argmax())]
    if new[0] in STOPS:
        break
    text = text + new
print(tokenizer.decode(text))
"""
