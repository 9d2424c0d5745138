"""Recipes: overrides, the same recipe for another method, and what is refused."""

from pathlib import Path

import pytest
import yaml

from coterie.core.errors import RecipeError, Refused
from coterie.methods.comigs import CoMiGS
from coterie.methods.fedavg import FedAvg
from coterie.runs.recipes.recipe import dump, load, resolve, validate


def test_overrides_are_yaml_with_dotted_keys() -> None:
    recipe = load(
        "quickstart",
        [
            "method.rounds=3",
            "training.experts.lr=1e-3",
            "data.train_tokens=[9, 8, 7, 6]",
            "training.micro_batch=2",
        ],
    )
    assert recipe.build_method().rounds == 3
    assert recipe.training.experts.lr == 1e-3
    assert recipe.data.train_tokens == (9, 8, 7, 6)
    assert recipe.training.micro_batch == 2


def test_choosing_another_method_drops_what_it_does_not_know() -> None:
    assert isinstance(load("quickstart", ["method.name=fedavg"]).build_method(), FedAvg)


@pytest.mark.parametrize(
    ("recipe", "setting", "mistake"),
    [
        (
            "quickstart",
            "model.rank=0",
            "model.rank: input should be greater than or equal to 1, found 0",
        ),
        (
            "quickstart",
            "training.experts.lr=x",
            "training.experts.lr: input should be a valid number",
        ),
        (
            "quickstart",
            "training.experts.optimiser=adam",
            "training.experts: optimiser should be 'adamw' or 'sgd'",
        ),
        (
            "quickstart",
            "model.kind=vision",
            "model: kind should be 'language', 'classifier' or 'text-classifier'",
        ),
        (
            "quickstart",
            "data.kind=none",
            "data.kind: unknown kind 'none'; choose one of 'stdlib', 'agnews'",
        ),
        ("quickstart", "data={}", "data.kind: missing"),
        (
            "cobo-digits",
            "data.clusters=0",
            "data.clusters: input should be greater than or equal to 1, found 0",
        ),
        (
            "cobo-digits",
            "training.experts.momentum=1",
            "training.experts.momentum: input should be less than 1, found 1",
        ),
        ("topics", "data.topics=[]", "data.topics: tuple should have at least 1 item"),
    ],
)
def test_a_mistake_names_its_field_as_it_is_written(
    recipe: str, setting: str, mistake: str
) -> None:
    with pytest.raises(RecipeError) as refused:
        load(recipe, [setting])
    assert mistake in str(refused.value)


def test_what_is_written_down_is_the_same_recipe(tmp_path: Path) -> None:
    recipe = load("quickstart", ["method.name=comigs", "method.specialists=[0, 1, 2, 3]", "seed=4"])
    (tmp_path / "recipe.yaml").write_text(dump(recipe))
    assert resolve(tmp_path) == recipe
    assert yaml.safe_load(dump(recipe))["method"]["specialists"] == [0, 1, 2, 3]


def test_another_method_keeps_data_base_training_and_common_settings() -> None:
    recipe = load(
        "quickstart", ["method.rounds=7", "method.local_steps=10", "method.router_every=4"]
    )
    fedavg, two = recipe.with_method("fedavg"), recipe.with_method("comigs-2s")
    assert fedavg.build_method() == FedAvg(rounds=7, local_steps=10)
    assert two.build_method() == CoMiGS(
        rounds=7, local_steps=10, router_every=4, router_steps=5, generalists=0, specialists=2
    )
    assert (fedavg.data, fedavg.model, fedavg.training, fedavg.seed) == (
        recipe.data,
        recipe.model,
        recipe.training,
        recipe.seed,
    )
    assert recipe.with_method("pretrained").build_method().rounds == 0
    assert not two.compare_with


@pytest.mark.parametrize(
    ("section", "mistake"),
    [
        ({}, "data: missing"),
        ({"data": {"kind": "stdlib"}}, "method: missing"),
        ({"data": {"kind": "stdlib"}, "method": {}}, "method.name: missing"),
        ({"data": {"kind": "stdlib"}, "method": {"name": ["local"]}}, "no method"),
        ({"data": {"kind": "unknown"}, "method": {"name": "local"}}, "data"),
        (
            {"data": {"kind": "stdlib", "seeds": 1}, "method": {"name": "local"}},
            "seeds: unknown key, did you mean seed?",
        ),
        (
            {"data": {"kind": "stdlib"}, "method": {"name": "local"}, "compare_with": ["lokal"]},
            "compare_with: there is no method 'lokal'",
        ),
        (
            {"data": {"kind": "stdlib"}, "method": {"name": "local", "top_k": 2}},
            "method.top_k: unknown key here: it belongs to another",
        ),
        (
            {"data": {"kind": "stdlib"}, "method": {"name": "comigs", "specialists": [1, -1]}},
            "method.specialists",
        ),
        (
            {"data": {"kind": "stdlib"}, "method": {"name": "pretrained", "rounds": 2}},
            "method.rounds",
        ),
    ],
)
def test_mistakes_name_their_field(section: dict, mistake: str) -> None:
    with pytest.raises(RecipeError) as refused:
        validate({"name": "r", **section}, "r")
    assert mistake in str(refused.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "a: [1\n", "just text"])
def test_a_file_that_is_no_recipe(text: str, tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(Refused, match="recipe"):
        load(str(path))


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("model.r=4", "model.rank=4"),
        ("lora_r=4", "model.rank=4"),
        ("lora_alpha=4", "model.alpha=4"),
        ("model.lora_dropout=0.1", "model.dropout=0.1"),
        ("training.lr=0.1", "training.experts.lr=0.1"),
        ("optimizer=sgd", "training.experts.optimiser=sgd"),
        ("quantize=int8", "model.quantise=int8"),
    ],
)
def test_names_of_other_libraries_are_those_of_the_fields(
    theirs: str, ours: str, tmp_path: Path
) -> None:
    wanted = load("quickstart", [ours])
    assert load("quickstart", [theirs]) == wanted != load("quickstart")
    key, _, value = theirs.partition("=")
    written = yaml.safe_load(dump(wanted))
    holder, ours_in = written, written
    for part in key.split(".")[:-1]:
        holder = holder[part]
    *path, last = ours.partition("=")[0].split(".")
    for part in path:
        ours_in = ours_in[part]
    holder[key.split(".")[-1]] = ours_in.pop(last)
    assert validate(written, "mine") == wanted
    ours_in[last] = yaml.safe_load(value)
    with pytest.raises(RecipeError, match=rf"{key}: the same as .*, which is given too"):
        validate(written, "mine")


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("method.epochs", "did you mean method.local_epochs"),
        ("max_new_tokens", "coterie generate RUN --max-new-tokens N"),
        ("model.load_in_4bit", "did you mean model.quantise"),
    ],
)
def test_names_that_mean_something_else_here_are_explained(field: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        load("quickstart", [f"{field}=3"])
