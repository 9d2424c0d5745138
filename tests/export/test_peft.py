"""The exported adapter, loaded by PEFT on the base, is the fold of the personal model, or the model
with one expert at weight 1.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.core.files import write_all_sums
from coterie.core.roles import BACKBONE, GENERALIST, SPECIALIST
from coterie.export import Source, export, peft
from coterie.export.layers import mean_weights
from coterie.models.families import FAMILIES
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import About


def with_one_expert(model: coterie.personal.PersonalModel, role: str, index: int) -> LanguageModel:
    """The same model with that expert alone; a single expert has the weight 1."""
    counts = {"generalists": int(role == "generalist"), "specialists": int(role == "specialist")}
    alone = LanguageModel(model.backbone, replace(model.layout, **counts))
    theirs = dict(model.adapter.named_parameters())
    for name, parameter in alone.adapter.named_parameters():
        found = theirs[name]
        parameter.data.copy_(found[index : index + 1] if name.split(".")[2] == "mlp" else found)
    return alone


def loaded(base: Path, folder: Path) -> nn.Module:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(model, str(folder)).eval()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize(
    ("layout", "expert", "where"),
    [
        (Layout(rank=2), None, (GENERALIST, 0)),
        (
            Layout(generalists=2, specialists=1, rank=2, mlp_rank=5, alpha=3.0),
            "G2",
            (GENERALIST, 1),
        ),
        (Layout(specialists=2, rank=3), "S2", (SPECIALIST, 1)),
        (Layout(rank=2, routing="equal"), "G", (GENERALIST, 0)),
    ],
)
def test_one_expert_gives_the_same_logits(
    family, layout, expert, where, make_run, base_of, tmp_path
):
    run, out = make_run(family, ann=layout), tmp_path / "adapter"
    (found,) = export(Source(run, "ann"), "peft", out, part="generalist", expert=expert)
    readme = (out / "README.md").read_text()
    assert found.notes
    assert all(sentence in readme for sentence in found.notes)
    theirs = loaded(base_of(family), out)
    ids = torch.randint(257, (2, 9))
    ours = with_one_expert(coterie.load(run, "ann"), *where)
    with torch.no_grad():
        given, wanted = theirs(ids).logits, ours.forward(ids)
        torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(ids).logits, wanted, atol=0.1)
    stored = set(load_file(out / "adapter_model.safetensors"))
    assert stored == {
        name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize("part", ["fold", "generalist"])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(specialists=0, rank=2),
        Layout(generalists=0, rank=2),
        Layout(specialists=0, rank=2, frozen_a=True),
    ],
)
def test_a_model_of_one_expert_is_exported_whole(part, layout, make_run, base_of, tmp_path):
    run = make_run("llama", ann=layout)
    (found,) = export(Source(run), "peft", tmp_path / "adapter", part=part)
    assert found.notes == ()
    assert "Nothing" in (tmp_path / "adapter/README.md").read_text()
    model = coterie.load(run)
    assert bool(model.adapter.parameters_by_role[BACKBONE]) == layout.frozen_a
    theirs = loaded(base_of("llama"), tmp_path / "adapter")
    ids = torch.randint(257, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def mixed_naively(model: coterie.personal.PersonalModel, weights: torch.Tensor) -> nn.Module:
    """The base with W + sum_j w_j gamma B_j A_j in the place of each W, layer by layer."""
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.about.base, dtype=torch.float32)
    family = next(f for f in FAMILIES if f.name == model.backbone.architecture.family)
    roles = [role for role in ("generalist", "specialist") if hasattr(_mlp(model, 0), role)]
    for i, block in enumerate(base.get_submodule(family.blocks)):
        layers = {f"{family.attention}.{name}": name for name in family.linears}
        updates = {
            path: lora.gamma * lora.B[0] @ lora.A[0]
            for path, name in layers.items()
            for lora in [model.adapter.blocks[i].attention[name]]
        }
        for ours, theirs in family.mlp.items():
            loras = [getattr(_mlp(model, i), role)[ours] for role in roles]
            each = torch.cat([lora.gamma * lora.B @ lora.A for lora in loras])
            updates[f"mlp.{theirs}"] = (weights[i][:, None, None] * each).sum(dim=0)
        for path, update in updates.items():
            weight = block.get_submodule(path).weight.data
            weight += update.T if family.name == "GPT-2" else update
    return base.eval()


def _mlp(model, i):
    return model.adapter.blocks[i].mlp


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", Layout(rank=3, mlp_rank=2, alpha=5.0)),
        ("gpt2", Layout(generalists=1, specialists=3, top_k=2, rank=2)),
        ("qwen3", Layout(generalists=2, rank=2, biased=True)),
        ("mistral", Layout(rank=2, routing="equal")),
    ],
)
def test_the_fold_is_the_base_with_the_mean_of_the_updates(
    family, layout, make_run, base_of, own_text, tmp_path
):
    run, out = make_run(family, ann=layout), tmp_path / "adapter"
    source = Source(run, "ann", data=own_text)
    (found,) = export(source, "peft", out)
    (client,) = source.load()
    weights = mean_weights(client)
    if layout.routed:
        record = [client.model.routing(rows[:, :-1]) for rows in client.valid.scoring(1)]
        tokens = torch.cat([routed.flatten(1, 2) for routed in record], dim=1)
        torch.testing.assert_close(weights, tokens.mean(dim=1), rtol=1e-4, atol=1e-5)
        assert (weights - 1 / layout.experts).abs().max() > 0.01
    else:
        assert set(weights.flatten().tolist()) == {0.5}
    ids = torch.randint(257, (2, 9))
    with torch.no_grad():
        theirs, wanted = (
            loaded(base_of(family), out)(ids),
            mixed_naively(client.model, weights)(ids),
        )
    torch.testing.assert_close(theirs.logits, wanted.logits, rtol=1e-4, atol=1e-3)
    given = json.loads((out / "adapter_config.json").read_text())
    rank = max(layout.rank, layout.experts * layout.expert_rank)
    assert (given["r"], given["lora_alpha"]) == (rank, rank)
    assert (given["use_rslora"], given["rank_pattern"]) == (False, {})
    shapes = {name: tensor.shape for name, tensor in load_file(out / peft.WEIGHTS).items()}
    assert all(shape["lora_B" in name] == rank for name, shape in shapes.items())
    assert found.check.perplexity != found.check.original


def test_half_precision_is_half_as_large(make_run, own_text, tmp_path):
    run = make_run("llama", ann=Layout(rank=2))
    source = Source(run, "ann", data=own_text)
    whole, half = (
        export(source, "peft", tmp_path / precision, precision=precision)[0]
        for precision in ("f32", "f16")
    )
    sizes = [(one.folder / peft.WEIGHTS).stat().st_size for one in (whole, half)]
    assert sizes[1] < 0.7 * sizes[0]
    assert whole.check.difference < half.check.difference
    assert half.check.perplexity == pytest.approx(whole.check.perplexity, rel=0.01)


def test_what_cannot_be_exported_is_refused(make_run, tmp_path: Path):
    run = make_run("llama", ann=Layout(generalists=0, specialists=2, rank=2), ben=Layout(rank=2))
    with pytest.raises(Refused, match=r"ann has specialists only\n.*--expert: S1, S2"):
        export(Source(run, "ann"), "peft", tmp_path / "a", part="generalist")
    with pytest.raises(Refused, match=r"ben has no expert 'S2'\n.*--expert: G, S"):
        export(Source(run, "ben"), "peft", tmp_path / "b", expert="S2")
    with pytest.raises(Refused, match="not an empty folder"):
        export(Source(run, "ben"), "peft", run)
    with pytest.raises(Refused, match=r"validation text.*\n.*--data.*--part generalist"):
        export(Source(run, "ben"), "peft", tmp_path / "b")
    assert not (tmp_path / "a").exists()
    equal = make_run("llama", cleo=Layout(rank=2, routing="equal"))
    (found,) = export(Source(equal, "cleo"), "peft", tmp_path / "c", part="generalist")
    assert any("mean of their outputs" in sentence for sentence in found.notes)


def test_a_base_that_has_moved_is_found_where_it_is_said_to_be(
    make_run, base_of, tmp_path: Path
) -> None:
    run = make_run("llama", ann=Layout(rank=2, routing="equal"))
    about = run / "clients/ann/client.json"
    about.write_text(about.read_text().replace(str(base_of("llama")), str(tmp_path / "gone")))
    write_all_sums(about.parent)
    refused = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out")])
    assert (refused.exit_code, (tmp_path / "out").exists()) == (2, False)
    done = CliRunner().invoke(
        app, ["export", str(run), "--out", str(tmp_path / "out"), "--base", str(base_of("llama"))]
    )
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base_of("llama").name


@pytest.mark.parametrize("base", ["folder", "embedded", "somebody/model"])
def test_the_base_is_named_as_on_every_machine(base, base_of):
    name = str(base_of("llama")) if base == "folder" else base
    about = About("ann", name, Layout(rank=2), 8, "comigs-1g1s", "folders", 3, 0)
    layer = SimpleNamespace(base=nn.Linear(2, 2))
    attention = SimpleNamespace(**{FAMILIES[0].linears[0]: layer})
    backbone = SimpleNamespace(attentions=[attention])
    model = SimpleNamespace(about=about, backbone=backbone, layout=about.layout)
    serving = SimpleNamespace(transformers_program="", usage="")
    client = SimpleNamespace(model=model, serving=serving, chats=False)
    named = peft.config(model, FAMILIES[0], 2).base_model_name_or_path
    assert named == (base_of("llama").name if base == "folder" else base)
    assert str(base_of("llama").parent) not in (readme := peft._readme(client, "G", []))
    assert str(Path(coterie.__file__).parent) not in readme
    assert {
        "folder": f"path/to/{named}",
        "embedded": 'locate("embedded")',
        "somebody/model": "'somebody/model'",
    }[base] in readme
