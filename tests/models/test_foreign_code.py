"""What a base brings along is never run, unless whoever runs the process says so: neither its
modules nor a pickle.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from coterie import personal
from coterie.cli.base import app
from coterie.core.errors import ModelError
from coterie.models.architecture import Architecture, tokenizer
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.text import TextShape

CODE = """
from pathlib import Path
Path({marker!r}).write_text("ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig):
    model_type = "own"
class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that the base's code would write."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.delenv("COTERIE_TRUST_REMOTE_CODE", raising=False)
    return tmp_path / "it ran"


@pytest.fixture
def foreign(tmp_path: Path, tiny_base: Path, marker: Path) -> Path:
    """A base of a kind that transformers does not know, with the code for it."""
    base = tmp_path / "foreign"
    shutil.copytree(tiny_base, base)
    (base / "own.py").write_text(CODE.format(marker=str(marker)))
    named = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnModel",
        "AutoModelForSequenceClassification": "own.OwnModel",
    }
    _change(base / "config.json", model_type="own", auto_map=named)
    return base


def _change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


WAYS: list[Callable[[str], object]] = [
    Backbone.load,
    Backbone.outlined,
    Architecture.from_base,
    lambda base: TextShape(base, 2, 8).build(),
    lambda base: TextShape(base, 2, 8).build("meta"),
]


@pytest.mark.parametrize("load", WAYS)
def test_code_of_a_base_is_refused_by_name(
    load: Callable[[str], object], foreign: Path, marker: Path
) -> None:
    with pytest.raises(
        ModelError,
        match=r"contains its own code \(own\.OwnConfig, own\.OwnModel\).*not "
        r"run\n.*--trust-remote-code",
    ):
        load(str(foreign))
    assert not marker.exists()


def test_code_of_a_tokenizer_is_refused(foreign: Path, tiny_base: Path, marker: Path) -> None:
    base = foreign.parent / "tokens"
    shutil.copytree(tiny_base, base)
    shutil.copy(foreign / "own.py", base)
    _change(
        base / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]},
        tokenizer_class="OwnTokenizer",
    )
    with pytest.raises(ModelError, match=r"tokenizer of base .* contains its own code.*not run"):
        tokenizer(base)
    assert not marker.exists()


def test_where_transformers_knows_the_kind_its_own_code_is_taken(
    foreign: Path, marker: Path
) -> None:
    _change(foreign / "config.json", model_type="llama")
    assert Backbone.load(foreign).architecture.family == "Llama-like"
    assert not marker.exists()


def test_a_pickle_in_the_place_of_weights_is_not_run(
    tiny_base: Path, tmp_path: Path, marker: Path
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch '{marker}'",)

    base = tmp_path / "pickled"
    shutil.copytree(tiny_base, base)
    (base / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Evil()}, base / "pytorch_model.bin")
    for load in (Backbone.load, lambda base: TextShape(base, 2, 8).build()):
        with pytest.raises(ModelError, match="cannot load base"):
            load(str(base))
    assert not marker.exists()


def test_a_strangers_personal_model_runs_nothing(
    foreign: Path, tiny_base: Path, tmp_path: Path, marker: Path
) -> None:
    backbone = Backbone.load(tiny_base)
    about = personal.About("ann", str(foreign), Layout(), 16, "local", "r", 1, 0)
    personal.save(
        tmp_path / "ann", about, dict(LanguageModel(backbone, Layout()).adapter.named_parameters())
    )
    for words in (
        ["predict", "--text", "in"],
        ["generate", "--text", "in"],
        ["serve"],
        ["export", "--out", str(tmp_path / "peft")],
    ):
        done = CliRunner().invoke(app, [words[0], str(tmp_path / "ann"), *words[1:]])
        assert done.exit_code == 2, done.output
        assert "contains its own code" in done.output
    assert not marker.exists()


def test_a_recipe_cannot_allow_it(foreign: Path, marker: Path) -> None:
    from coterie.core.errors import RecipeError
    from coterie.runs.recipes import recipe as recipes

    for key in ("model.trust_remote_code", "trust_remote_code", "data.trust_remote_code"):
        with pytest.raises(RecipeError, match="unknown key"):
            recipes.load("quickstart", [f"{key}=true"])
    assert not marker.exists()


def test_who_says_so_aloud_gets_it(
    foreign: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "COTERIE_TRUST_REMOTE_CODE", "0"
    )  # put back afterwards, whatever the command does
    done = CliRunner().invoke(
        app, ["predict", str(foreign.parent / "none"), "--text", "in", "--trust-remote-code"]
    )
    assert done.exit_code == 2
    assert Backbone.load(foreign).architecture.family == "Llama-like"
    assert marker.exists()


def test_every_call_that_could_run_code_says_that_it_must_not() -> None:
    """No name of transformers that loads by a folder's word, without what says whether its code
    is trusted.
    """
    import ast

    import coterie

    loaders, said = (
        {
            "AutoConfig",
            "AutoTokenizer",
            "AutoModelForCausalLM",
            "AutoModelForSequenceClassification",
        },
        0,
    )
    for path in Path(coterie.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
            ):
                continue
            if node.func.value.id in loaders and node.func.attr in (
                "from_pretrained",
                "from_config",
            ):
                assert "trust_remote_code" in {keyword.arg for keyword in node.keywords}, (
                    f"{path}:{node.lineno}"
                )
                said += 1
            assert (node.func.value.id, node.func.attr) not in {
                ("pickle", "load"),
                ("pickle", "loads"),
                ("torch", "load"),
            }, path
    assert said >= 6
