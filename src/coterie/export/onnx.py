"""Personal models for ONNX Runtime: the base as a graph, with weights in a second file."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.export.format import ClientModel, Options
from coterie.export.functional import Axes, Interface, traced
from coterie.export.graph import GraphFormat, GraphRuntime
from coterie.personal import PersonalModel

BASE, WEIGHTS = "base.onnx", "base.onnx.data"
BASE_PRECISIONS = ("f32", "int8", "w8", "w4")
_BITS = {"w8": 8, "w4": 4}
# adjacent weights of a row that share one scale
_BLOCK = 32


class OnnxRuntime(GraphRuntime):
    """ONNX Runtime on the CPU, with as many threads as torch has."""

    def __init__(self, base: Path, interface: Interface, client: Mapping[str, Tensor]) -> None:
        import onnxruntime

        super().__init__(base, interface, client)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        # errors only
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            base, options, providers=["CPUExecutionProvider"]
        )

    def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
        tensors = self.arguments(ids, kept, past)
        inputs = dict(zip(self.interface.inputs, (t.numpy() for t in tensors), strict=True))
        return [torch.from_numpy(array) for array in self.session.run(None, inputs)]


class Onnx(GraphFormat):
    """A graph of ONNX with its weights beside it."""

    name = "onnx"
    about = "a base and tensors for each client, for ONNX Runtime, of every base"
    packages = ("onnx", "onnxscript", "onnxruntime")
    base_precisions = BASE_PRECISIONS
    base = BASE
    program = OnnxRuntime

    def write_graph(self, clients: Sequence[ClientModel], folder: Path, options: Options) -> None:
        interface = self.interface_of(clients[0])
        write_graph(folder, clients[0].model, interface, options.base_precision)


def write_graph(folder: Path, model: PersonalModel, interface: Interface, precision: str) -> None:
    """Write BASE and WEIGHTS in a precision: "f32"; "int8": weights and activations in 8 bits,
    activations by their range in each call; "w8", "w4": weights of matrices in 8 or 4 bits,
    computed in fp32.
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
