"""The exported adapter, loaded by PEFT on the base, is the personal model with that expert at
weight 1.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.core.roles import BACKBONE, GENERALIST, SPECIALIST
from coterie.models.adapter import Layout
from coterie.models.architecture import FAMILIES
from coterie.models.language import LanguageModel
from coterie.personal import About, peft
from coterie.personal.peft import export


def with_one_expert(model: coterie.personal.PersonalModel, role: str, index: int) -> LanguageModel:
    """The same model with that expert alone; a single expert has the weight 1."""
    counts = {"generalists": int(role == "generalist"), "specialists": int(role == "specialist")}
    alone = LanguageModel(model.backbone, replace(model.layout, **counts))
    theirs = dict(model.adapter.named_parameters())
    for name, parameter in alone.adapter.named_parameters():
        found = theirs[name]
        parameter.data.copy_(found[index : index + 1] if name.split(".")[2] == "mlp" else found)
    return alone


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
def test_peft_gives_the_same_logits(family, layout, expert, where, make_run, bases, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = make_run(family, ann=layout)
    left_out = export(run, "ann", tmp_path / "adapter", expert)
    readme = (tmp_path / "adapter/README.md").read_text()
    assert left_out
    assert all(sentence in readme for sentence in left_out)
    base = AutoModelForCausalLM.from_pretrained(bases[family], dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = torch.randint(257, (2, 9))
    ours = with_one_expert(coterie.load(run, "ann"), *where)
    with torch.no_grad():
        found, wanted = theirs(ids).logits, ours.forward(ids)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        with theirs.disable_adapter():
            assert not torch.allclose(theirs(ids).logits, wanted, atol=0.1)
    stored = set(load_file(tmp_path / "adapter/adapter_model.safetensors"))
    assert stored == {
        name.replace(".default", "") for name, _ in theirs.named_parameters() if "lora_" in name
    }


@pytest.mark.parametrize(
    "layout",
    [
        Layout(specialists=0, rank=2),
        Layout(generalists=0, rank=2),
        Layout(specialists=0, rank=2, frozen_a=True),
    ],
)
def test_a_model_of_one_expert_is_exported_whole(layout, make_run, bases, tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run = make_run("llama", ann=layout)
    assert export(run, None, tmp_path / "adapter") == []
    assert "Nothing" in (tmp_path / "adapter/README.md").read_text()
    model = coterie.load(run)
    assert bool(model.adapter.parameters_by_role()[BACKBONE]) == layout.frozen_a
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(bases["llama"], dtype=torch.float32),
        str(tmp_path / "adapter"),
    )
    ids = torch.randint(257, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_exported_is_refused(make_run, tmp_path: Path):
    run = make_run("llama", ann=Layout(generalists=0, specialists=2, rank=2), ben=Layout(rank=2))
    with pytest.raises(Refused, match=r"ann has specialists only\n.*--expert: S1, S2"):
        export(run, "ann", tmp_path / "a")
    with pytest.raises(Refused, match=r"ben has no expert 'S2'\n.*--expert: G, S"):
        export(run, "ben", tmp_path / "b", "S2")
    with pytest.raises(Refused, match="not an empty folder"):
        export(run, "ben", run)
    assert not (tmp_path / "a").exists()
    equal = make_run("llama", cleo=Layout(rank=2, routing="equal"))
    assert any(
        "mean of their outputs" in sentence for sentence in export(equal, "cleo", tmp_path / "c")
    )


def test_a_base_that_has_moved_is_found_where_it_is_said_to_be(
    make_run, bases, tmp_path: Path
) -> None:
    run = make_run("llama", ann=Layout(rank=2))
    about = run / "clients/ann/client.json"
    about.write_text(about.read_text().replace(str(bases["llama"]), str(tmp_path / "gone")))
    refused = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out")])
    assert (refused.exit_code, (tmp_path / "out").exists()) == (2, False)
    done = CliRunner().invoke(
        app, ["export", str(run), "--out", str(tmp_path / "out"), "--base", str(bases["llama"])]
    )
    assert done.exit_code == 0, done.output
    config = json.loads((tmp_path / "out/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == bases["llama"].name


@pytest.mark.parametrize("base", ["folder", "embedded", "somebody/model"])
def test_the_base_is_named_as_on_every_machine(base, bases):
    name = str(bases["llama"]) if base == "folder" else base
    about = About("ann", name, Layout(rank=2), 8, "comigs-1g1s", "folders", 3, 0)
    family = FAMILIES[0]
    named = peft._config(about, family).base_model_name_or_path
    assert named == (bases["llama"].name if base == "folder" else base)
    assert str(bases["llama"].parent) not in (readme := peft._readme(about, "G", []))
    assert str(Path(coterie.__file__).parent) not in readme
    assert {
        "folder": f"path/to/{named}",
        "embedded": 'locate("embedded")',
        "somebody/model": "'somebody/model'",
    }[base] in readme
