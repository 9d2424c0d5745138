"""Personal models for ONNX Runtime: the base as one graph, with weights in a second file, whose
inputs are a client's tensors too. Another client does not need to load the base again.

A client's tensors are a safetensors file: a length of 8 bytes, a JSON of names, shapes and offsets,
and the values, which any language reads in a few lines.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from coterie.core import names
from coterie.core.errors import ExportError
from coterie.core.files import load, read_json, save, write_atomically
from coterie.core.foreign import read_text
from coterie.core.tensors import all_finite
from coterie.export.format import (
    GENERATION,
    ClientModel,
    Format,
    Options,
    Runtime,
    Written,
    filled_readme,
    ids_of,
)
from coterie.export.functional import Axes, Interface, client_tensors, traced
from coterie.personal import PersonalModel

README, BASE, WEIGHTS = "README.md", "base.onnx", "base.onnx.data"
PRECISIONS = ("f32", "f16", "int8")
BASE_PRECISIONS = ("f32", "int8", "w8", "w4")
ENDING, SCALE = ".safetensors", ".scale"
_BITS = {"w8": 8, "w4": 4}
_BLOCK = 32  # adjacent weights of a row that share one scale


def own_file(client: ClientModel) -> str:
    """Return the name of a client's file."""
    return names.encoded(client.client) + ENDING


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU, with as many threads as torch has, and the tensors of one client."""

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        self.base, self.interface = base, interface
        self.stops: tuple[int, ...] = ()  # tokens at which the program's users end a text
        self.client = {name: client[name] for name in interface.client}

    @cached_property
    def session(self) -> Any:
        """The loaded graph."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3  # errors only
        return onnxruntime.InferenceSession(self.base, options, providers=["CPUExecutionProvider"])

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        """Return the graph's outputs in order, for (B, C) tokens after the cached tokens."""
        tensors = [ids.contiguous(), kept, *past, *self.client.values()]
        inputs = dict(zip(self.interface.inputs, (t.numpy() for t in tensors), strict=True))
        return [torch.from_numpy(array) for array in self.session.run(None, inputs)]

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
        while len(answer) < most:
            logits, *past = self.step(ids, torch.tensor([ids.shape[1] - 1]), past)[: 1 + len(past)]
            answer.append(int(logits[0, -1].argmax()))
            if answer[-1] in self.stops:
                return answer, True
            ids = torch.tensor([answer[-1:]])
        return answer, False

    def logits_by_token(self, ids: Tensor) -> Tensor:
        outputs, past, kept = [], self.empty(len(ids)), torch.tensor([0])
        for token in torch.split(ids, 1, dim=1):
            logits, *past = self.step(token, kept, past)[: 1 + len(past)]
            outputs.append(logits)
        return torch.cat(outputs, dim=1)


class Onnx(Format):
    """A base that takes what an `Interface` lists, its tokenizer, and a file for each client."""

    name = "onnx"
    about = "a base and tensors for each client, for ONNX Runtime, of every base"
    packages = ("onnx", "onnxscript", "onnxruntime")
    precisions = PRECISIONS
    base_precisions = BASE_PRECISIONS
    shares_base = True
    routing: ClassVar[bool] = False  # whether the graph returns the experts' weights

    def check(self, client: ClientModel, options: Options) -> None:
        """Refuse nothing: every base and every layout can be traced."""

    def write_base(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        interface = self.interface_of(clients[0])
        write_graph(folder, clients[0].model, interface, options.base_precision)
        clients[0].serving.save(folder)
        write_atomically(folder / README, self.readme(clients).encode())

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        file = own_file(client)
        write_tensors(folder / file, client_tensors(client.model), options.precision)
        others = [path for path in folder.rglob("*") if path.suffix != ENDING]
        shared = [path.relative_to(folder).as_posix() for path in others if path.is_file()]
        shared.sort(key=lambda name: (name != BASE, name))
        return Written(folder, (file,), client.logits, shared=tuple(shared))

    def runtime(self, client: ClientModel, written: Written) -> AbstractContextManager[OnnxRuntime]:
        tensors = read_tensors(written.folder / written.files[0])
        runtime = OnnxRuntime(written.folder / BASE, self.interface_of(client), tensors)
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
        program = read_text(Path(__file__).parent / "programs/onnx.py.txt")
        example = serving.in_program(program.replace("CLIENT", own_file(clients[0])))
        files = "\n".join(f"| {client.client} | `{own_file(client)}` |" for client in clients)
        return filled_readme("onnx", usage=serving.usage, files=files, example=example)


def write_graph(folder: Path, model: PersonalModel, interface: Interface, precision: str) -> None:
    """Write BASE and WEIGHTS in a precision: "f32"; "int8": weights and activations in 8 bits,
    activations by their range in each call; "w8", "w4": matrices in 8 or 4 bits, computed in fp32.
    """
    with _silence():
        graph: Any = torch.onnx.export(
            traced(model, interface),
            dynamo=True,
            input_names=[*interface.inputs],
            output_names=[*interface.outputs],
            verbose=False,
        )
        _slim(graph.model)
        _name_axes(graph.model.graph.inputs, interface.inputs)
        _name_axes(graph.model.graph.outputs, interface.outputs)
        if precision == "f32":
            graph.save(str(folder / BASE), external_data=True)
            return
        whole = folder / "whole.onnx"
        graph.save(str(whole), external_data=True)
        quantise(whole, folder / BASE, precision)
    for path in (whole, whole.with_name(f"{whole.name}.data")):
        path.unlink()


def _slim(model: Any) -> None:
    """Remove the source of each operation: it is twenty times as large as the graph."""
    model.metadata_props.clear()
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()


def _name_axes(values: Iterable[Any], axes: Mapping[str, Axes]) -> None:
    import onnx_ir

    for value in values:
        value.shape = onnx_ir.Shape(axes[value.name])


def quantise(whole: Path, out: Path, precision: str) -> None:
    """Write a base in fewer bits; for the precisions see `write_graph`."""
    with _silence():
        if precision in _BITS:
            import onnx
            from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

            quantizer = MatMulNBitsQuantizer(
                onnx.load(whole), bits=_BITS[precision], block_size=_BLOCK, is_symmetric=False
            )
            quantizer.process()
            quantizer.model.save_model_to_file(str(out), use_external_data_format=True)
        else:
            from onnxruntime.quantization import QuantType, quantize_dynamic

            quantize_dynamic(
                whole,
                out,
                weight_type=QuantType.QInt8,
                per_channel=True,
                op_types_to_quantize=["MatMul", "Gemm", "Gather"],
                use_external_data_format=True,
            )


@contextmanager
def _silence() -> Iterator[None]:
    """Silence exporter and quantisers, which report each operation."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


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
            # the smallest scale keeps rows of zeros from a division by 0
            tiny = torch.finfo(torch.float32).tiny
            scale = tensor.abs().amax(dim=-1, keepdim=True).clamp_min(tiny) / 127
            stored[name] = (tensor / scale).round().to(torch.int8)
            stored[name + SCALE] = scale
        else:
            stored[name] = tensor
    if broken := [name for name, tensor in stored.items() if not all_finite({name: tensor})]:
        problem = f"{path}: {broken[0]} has values that {precision} cannot hold"
        raise ExportError(problem, "Export it in f32, or train it again.")
    save(path, stored, {"format": "pt", "precision": precision})


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
