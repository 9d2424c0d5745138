"""Programs of ExecuTorch compute what personal models do; without its package they are refused with
the remedy.
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.export import FORMATS, Source, export, graph
from coterie.export.executorch import limits
from coterie.export.functional import Interface, client_tensors, traced
from coterie.models.layout import Layout

ROUTED = Layout(rank=3, mlp_rank=2, alpha=5.0)
FOUR = Layout(generalists=1, specialists=3, top_k=2, rank=1, biased=True)


def program_of(folder) -> str:
    """Run the program that an export's README gives, and return what it writes."""
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_program_of_executorch_serves_clients_of_one_layout(make_run, own_text, tmp_path):
    pytest.importorskip("executorch", reason="no executorch (pip install -e '.[executorch]')")
    run = make_run("llama", ann=ROUTED, ben=ROUTED)
    found = export(Source(run, everyone=True), "executorch", tmp_path / "out")
    for one in found:
        assert one.check.difference < 1e-2
        assert one.check.by_token < 1e-2
    summary = json.loads((tmp_path / "out/export.json").read_text())
    assert summary["limits"] == {
        "batch": 1,
        "experts": 2,
        "rank": 3,
        "expert_rank": 2,
        "tokens": 32,
        "kept": 32,
        "past": 32,
    }
    assert program_of(tmp_path / "out")


@pytest.mark.slow
def test_sizes_of_a_trace_are_fixed_where_asked(make_run):
    """As ExecuTorch needs, whose memory is planned."""
    (client,) = Source(make_run("llama", ann=ROUTED)).load()
    interface, most = Interface.of(client.model), limits(client.model)
    assert most["tokens"] + most["past"] <= client.model.backbone.context_limit
    fixed = {"batch": 1, "experts": 2, "rank": 3, "expert_rank": 2}
    program = traced(client.model, interface, fixed, {"tokens": 7, "kept": 7, "past": 9})
    shapes = [
        node.meta["val"].shape
        for node in program.graph.find_nodes(op="placeholder")
        if node.name in program.graph_signature.user_inputs
    ]
    assert len(shapes) == len(interface.inputs)
    own = [tuple(tensor.shape) for tensor in client_tensors(client.model).values()]
    assert [tuple(shape) for shape in shapes[-len(own) :]] == own
    bounds = {str(size): limit.upper for size, limit in program.range_constraints.items()}
    assert sorted({int(upper) for upper in bounds.values()}) == [7, 9]


@pytest.mark.skipif(find_spec("executorch") is not None, reason="executorch is here")
def test_without_executorch_its_format_is_refused(make_run, tmp_path):
    words = ["export", str(make_run("llama", ann=ROUTED)), "--out", str(tmp_path / "out")]
    refused = CliRunner().invoke(app, [*words, "--format", "executorch"])
    assert refused.exit_code == 2
    assert re.search(
        r"needs executorch, which is not installed\n.*pip install -e '\.\[executorch\]'",
        refused.stderr,
    )


def test_executorch_refuses_clients_of_several_layouts(make_run, tmp_path, monkeypatch):
    monkeypatch.setattr(type(FORMATS["executorch"]), "packages", ())
    source = Source(make_run("llama", ann=ROUTED, ben=FOUR), everyone=True)
    with pytest.raises(Refused, match=r"ben has other numbers.*than ann.*\n.*--format onnx"):
        export(source, "executorch", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("precision", graph.PRECISIONS)
def test_a_client_is_read_as_it_was_written(precision, make_run, tmp_path):
    (client,) = Source(make_run("llama", ann=FOUR)).load()
    tensors, path = client_tensors(client.model), tmp_path / "ann.safetensors"
    graph.write_tensors(path, tensors, precision)
    found = graph.read_tensors(path)
    assert found.keys() == tensors.keys()
    allowed = {"f32": 0.0, "f16": 2e-3, "int8": 1 / 127}[precision]
    for name, tensor in tensors.items():
        largest = float(tensor.abs().max())
        assert found[name].dtype == tensor.dtype
        assert float((found[name] - tensor).abs().max()) <= allowed * largest
