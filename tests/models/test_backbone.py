"""Loading bases, the architecture that adapters attach to, the adapter's tensors and their
roles.
"""

import json
import os
import subprocess
import sys
from copy import copy
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bases import FAMILIES, VOCABULARY, tiny
from torch import nn
from transformers.utils import ModelOutput

from coterie.core.errors import ModelError
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.data.text_encoding import TextEncoder
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture, locate
from coterie.models.backbone import Backbone, cache_name
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.routing import Router, balance_loss
from coterie.personal.text_inference import Words

STORIES = (
    Path(os.environ.get("COTERIE_DATA", Path(__file__).parents[3] / "shared/data")).parent
    / "models/stories260K"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("family", FAMILIES)
def test_architecture_is_the_same_before_and_after_wrapping_or_from_the_configuration(
    family, tmp_path
):
    model = tiny(family)
    model.save_pretrained(tmp_path)
    found = Architecture.of(model)
    assert Architecture.from_base(tmp_path) == found == Backbone(model).architecture
    assert (len(found.blocks), found.d_model, found.vocabulary) == (2, 16, VOCABULARY)
    first = found.blocks[0]
    if family == "gpt2":
        assert [(x.name, x.inputs, x.outputs) for x in first.attention] == [
            ("c_attn", 16, 48),
            ("c_proj", 16, 16),
        ]
        assert [(x.name, x.inputs, x.outputs) for x in first.mlp] == [
            ("up", 16, 64),
            ("down", 64, 16),
        ]
    else:
        assert [(x.name, x.outputs) for x in first.attention] == [
            ("q_proj", 16),
            ("k_proj", 8),
            ("v_proj", 8),
            ("o_proj", 16),
        ]
        assert [x.name for x in first.mlp] == ["gate", "up", "down"]


def test_names_shapes_and_roles_of_an_adapter():
    adapter = Adapter(
        Architecture.of(tiny("llama")), Layout(generalists=1, specialists=2, rank=3, mlp_rank=5)
    )
    by_role = {
        role: {name: tuple(p.shape) for name, p in named.items()}
        for role, named in adapter.parameters_by_role.items()
    }
    assert by_role[GENERALIST]["blocks.0.attention.q_proj.A"] == (1, 3, 16)
    assert by_role[GENERALIST]["blocks.0.attention.k_proj.B"] == (1, 8, 3)
    assert by_role[GENERALIST]["blocks.1.mlp.generalist.up.A"] == (1, 5, 16)
    assert by_role[SPECIALIST]["blocks.1.mlp.specialist.down.B"] == (2, 16, 5)
    assert by_role[ROUTER] == {f"blocks.{i}.mlp.router.weight": (3, 16) for i in range(2)}
    assert set(by_role[SPECIALIST]) == {
        f"blocks.{i}.mlp.specialist.{x}.{m}"
        for i in range(2)
        for x in ("gate", "up", "down")
        for m in "AB"
    }
    assert sum(map(len, by_role.values())) == len(list(adapter.parameters()))


@pytest.mark.parametrize("layout", [Layout(specialists=0), Layout(routing="equal")])
def test_no_router_where_nothing_is_routed(layout):
    assert not Adapter(Architecture.of(tiny("gpt2")), layout).parameters_by_role[ROUTER]


def test_specialists_only_has_attention_as_its_only_generalists():
    adapter = Adapter(Architecture.of(tiny("gpt2")), Layout(generalists=0, specialists=2))
    assert all(".attention." in name for name in adapter.parameters_by_role[GENERALIST])


def test_initial_values():
    architecture = Architecture.of(tiny("llama"))
    one, two = (
        Adapter(architecture, Layout(specialists=1)),
        Adapter(architecture, Layout(specialists=3)),
    )
    for role in (GENERALIST, SPECIALIST, ROUTER):
        first, again, other = one.initial(role, 5), one.initial(role, 5), one.initial(role, 6)
        assert list(first) == list(one.parameters_by_role[role])
        for name, values in first.items():
            assert values.dtype == torch.float32
            assert torch.equal(values, again[name])
            if name.endswith(".B"):
                assert not values.any()
            else:
                assert values.abs().max() <= values.shape[-1] ** -0.5
                assert values.std() > 0.4 * values.shape[-1] ** -0.5
                assert not torch.equal(values, other[name])
    assert all(
        torch.equal(values, two.initial(GENERALIST, 5)[name])
        for name, values in one.initial(GENERALIST, 5).items()
    )
    names = [name for name in one.initial(SPECIALIST, 5) if name.endswith(".A")]
    assert all(
        torch.equal(one.initial(SPECIALIST, 5)[name][0], two.initial(SPECIALIST, 5)[name][0])
        for name in names
    )


def test_clients_share_one_backbone(folder):
    backbone = Backbone.load(folder)
    before = {id(p) for p in backbone.model.parameters()}
    models = [LanguageModel(backbone, Layout(specialists=s)) for s in (0, 1, 3)]
    assert {id(p) for p in backbone.model.parameters()} == before
    assert not any(p.requires_grad for p in backbone.model.parameters())
    assert not any(id(p) in before for model in models for p in model.adapter.parameters())


def test_using_nests_and_survives_exceptions(folder):
    backbone = Backbone.load(folder)
    outer, inner = (Adapter(backbone.architecture, Layout()) for _ in range(2))
    with backbone.using(outer):
        with pytest.raises(KeyError), backbone.using(inner):
            raise KeyError
        assert backbone.attached.adapter is outer
    assert backbone.attached.adapter is None


def test_load(folder):
    backbone = Backbone.load(folder, dtype="bf16")
    assert (backbone.dtype, backbone.device.type, backbone.context_limit) == (
        torch.bfloat16,
        "cpu",
        32,
    )
    assert backbone.head is not None
    with pytest.raises(ModelError, match="no usable tokenizer"):
        _ = backbone.tokenizer


def test_a_scaled_head_is_not_taken_for_a_plain_one():
    """Where logits are more than a linear map of the hidden states, they are computed by the
    model itself.
    """
    from transformers import GraniteConfig, GraniteForCausalLM

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        logits_scaling=3.0,
    )
    model = LanguageModel(Backbone(GraniteForCausalLM(config)), Layout(rank=2))
    assert model.backbone.head is None
    batch = torch.randint(VOCABULARY, (2, 6))
    wanted = nn.functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
    _, stats = model.gradient(batch, list(model.parameters_by_role[ROUTER].values()))
    torch.testing.assert_close(stats["loss"], wanted.detach())
    assert model.score([batch])[0] == pytest.approx(10 * wanted.item(), rel=1e-5)


def test_missing_and_damaged_bases_are_refused_with_a_remedy(folder, tmp_path):
    def refused(base, match: str) -> None:
        with pytest.raises(ModelError, match=match) as caught:
            Backbone.load(base)
        assert caught.value.remedy

    refused(tmp_path / "nowhere", "no model folder at")
    refused("./nowhere", "no model folder at")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json is missing")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    refused(folder, "cannot load base")
    weights.unlink()
    refused(folder, "cannot load base")
    weights.write_bytes(content)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    refused(folder, "weights lack")
    (folder / "config.json").write_text("{")
    refused(folder, "cannot load base")
    with pytest.raises(ModelError, match="dtype"):
        Backbone.load(folder, dtype="fp8")


@pytest.mark.parametrize("beside_a_base", [True, False])
def test_an_adapter_in_the_folder_of_a_base_is_refused(folder, tmp_path, beside_a_base):
    base = folder if beside_a_base else tmp_path / "adapter"
    base.mkdir(exist_ok=True)
    adapter = {"base_model_name_or_path": "elsewhere", "peft_type": "LORA"}
    (base / "adapter_config.json").write_text(json.dumps(adapter))
    for load in (Backbone.load, Architecture.from_base, locate):
        with pytest.raises(ModelError, match="PEFT adapter") as caught:
            load(base)
        assert "merge_and_unload" in caught.value.remedy


def test_unsupported_architectures_are_refused_by_what_they_lack(tmp_path):
    from transformers import BertConfig, MixtralConfig

    BertConfig(num_hidden_layers=1, is_decoder=True).save_pretrained(tmp_path / "bert")
    with pytest.raises(ModelError, match=r"neither transformer\.h"):
        Architecture.from_base(tmp_path / "bert")
    MixtralConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=8).save_pretrained(
        tmp_path / "mixtral"
    )
    with pytest.raises(ModelError, match=r"lacks the layer mlp\.gate_proj"):
        Architecture.from_base(tmp_path / "mixtral")


@pytest.mark.parametrize(
    "values",
    [
        {"generalists": 0, "specialists": 0},
        {"rank": 0},
        {"dropout": 1.0},
        {"top_k": 0},
        {"balance": "x"},
        {"balance_weight": -1.0},
    ],
)
def test_layouts_out_of_range_are_refused(values):
    with pytest.raises(ModelError, match="adapter layout"):
        Layout(**values)


def test_balance_in_closed_form():
    uniform, peaked = torch.full((2, 4), 0.25), torch.tensor([[1.0, 0, 0, 0]] * 2)
    layout = Layout(specialists=3)
    assert balance_loss(layout.balance_coefficients, 2 * uniform, uniform) == pytest.approx(
        2.0
    )  # n * sum (k/n) (1/n) = k
    assert balance_loss(layout.balance_coefficients, peaked, peaked) == pytest.approx(
        4.0
    )  # n: all tokens on one expert
    printed = Layout(specialists=3, balance="generalist-printed")
    assert printed.balance_coefficients == pytest.approx((1 / 10, *[3 / 10] * 3))  # eq. 6, n = 4
    printed = Layout(generalists=2, specialists=1, balance="generalist-printed")
    assert printed.balance_coefficients == pytest.approx((2 / 5, 2 / 5, 1 / 5))


@pytest.mark.parametrize(
    ("generalists", "specialists"), [(1, 1), (1, 3), (1, 7), (2, 1), (3, 3), (0, 4), (4, 0)]
)
def test_eq_6_has_at_its_target_the_value_and_the_least_that_uniform_balance_has(
    generalists: int, specialists: int
) -> None:
    """Half of the probability for each kind of expert, shared evenly within it, and k = 2 of all
    experts for each token.
    """
    layout = Layout(generalists=generalists, specialists=specialists, balance="generalist")
    coefficients = torch.tensor(layout.balance_coefficients)
    kinds = (generalists > 0) + (specialists > 0)
    target = torch.tensor(
        [1 / (kinds * max(generalists, 1))] * generalists
        + [1 / (kinds * max(specialists, 1))] * specialists
    )
    value = balance_loss(coefficients.tolist(), 2 * target[None], target[None])
    assert float(value) == pytest.approx(2.0)
    for other in torch.softmax(
        torch.randn(50, len(target), generator=torch.Generator().manual_seed(0)), dim=1
    ):
        assert balance_loss(coefficients.tolist(), 2 * other[None], other[None]) >= value - 1e-6
    assert Layout(balance="none").balance_coefficients == ()


def test_router_weights_are_a_softmax_over_the_selected():
    router = Router(width=2, experts=3, active=2)
    nn.init.eye_(router.weight)
    decision = router(torch.tensor([[3.0, 1.0], [-1.0, 2.0]]))
    torch.testing.assert_close(
        decision.weights[0], torch.tensor([*torch.tensor([3.0, 1.0]).softmax(0), 0.0])
    )
    torch.testing.assert_close(
        decision.weights[1], torch.tensor([0.0, *torch.tensor([2.0, 0.0]).softmax(0)])
    )
    assert decision.users().tolist() == [1.0, 2.0, 1.0]


@pytest.mark.skipif(not STORIES.is_dir(), reason="stories260K is not here")
def test_stories260k_loads_scores_and_speaks():
    model = LanguageModel(Backbone.load(STORIES), Layout())
    tokenizer = model.backbone.tokenizer
    ids = tokenizer("Once upon a time, there was a little girl named Lily.", return_tensors="pt")[
        "input_ids"
    ]
    nll, tokens = model.score([ids])
    assert nll / tokens < 2.5
    told = model.generate(
        ids, max_new_tokens=5, do_sample=False, attention_mask=torch.ones_like(ids), pad_token_id=0
    )
    assert told.shape == (1, ids.shape[1] + 5)


def test_importing_the_room_does_not_load_transformers():
    code = "import sys, coterie.models.language; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_cache_is_given_by_the_name_that_the_base_has_for_it() -> None:
    """Transformers 5.24 calls it `cache`, and warns of `past_key_values`."""
    older = Backbone.load("embedded")
    model = older.model

    class Newer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.device = model.config, model.device

        def forward(self, ids: torch.Tensor, cache: object = None, **inputs: Any) -> ModelOutput:
            output = model(ids, **{older.cache_name: cache}, **inputs)
            return ModelOutput(logits=output.logits, cache=output[older.cache_name])

    texts = TextEncoder(older.tokenizer)
    layout = Layout(generalists=1, specialists=0, rank=1)
    adapter = LanguageModel(older, layout).adapter
    wanted = Words(older, texts).of(adapter, ["The connection is", "A"], 3)
    assert older.cache_name in signature(model.forward).parameters
    newer = copy(older)
    newer.model = Newer()
    newer.cache_name = cache_name(newer.model)
    assert newer.cache_name == "cache"
    assert Words(newer, texts).of(adapter, ["The connection is", "A"], 3) == wanted


def test_operations_are_those_of_products_and_counted_once_for_each_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A long forward pass of a real base takes a second, and a dry run asks for each method."""
    backbone, layouts = Backbone(tiny("llama")), [None, Layout(rank=2), Layout(rank=3)]
    plain, two, three = (backbone.flops_per_token(layout, 8) for layout in layouts)
    weights = sum(layer.inputs * layer.outputs for layer in backbone.architecture.linears)
    assert plain >= 2 * (weights + VOCABULARY * backbone.architecture.d_model)
    assert 0 < two - plain < three - plain
    monkeypatch.setattr("coterie.models.backbone.flops_of", lambda compute: 8 * 7)
    assert [backbone.flops_per_token(layout, 8) for layout in layouts] == [plain, two, three]
    assert backbone.flops_per_token(Layout(rank=2), 7) == 8
