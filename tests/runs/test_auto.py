"""What `coterie run folders` chooses by itself: values of `auto`, known before the run starts."""

import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.core.errors import RecipeError
from coterie.core.files import load as load_tensors
from coterie.models.layout import Layout
from coterie.models.memory import Step
from coterie.runs import recipes
from coterie.runs.problems import auto
from coterie.runs.problems.auto import Texts, resolved
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import Recipe, dump, load, validate

WORDS = "the cat sat on a warm mat and slept while a dog looked for its bone"
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
QWEN3 = {  # as of Qwen3-0.6B
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
LLAMA = QWEN3 | {"model_type": "llama", "hidden_size": 4096, "head_dim": 256}
TINY_GPT2 = GPT2 | {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300}


def write_config(folder: Path, config: dict[str, Any]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def write_texts(root: Path, characters: int, *, document: int = 50) -> Path:
    """Two clients with documents of about so many characters each, byte tokens of the tiny base."""
    for client in ("ann", "ben"):
        (root / client).mkdir(parents=True)
        rng, length, k = random.Random(client), 0, 0
        while length < characters:
            text = " ".join(rng.choices(WORDS.split(), k=document // 4))[:document]
            (root / client / f"{k:03d}.txt").write_text(text)
            length, k = length + len(text) + 1, k + 1
    return root


def of_folders(texts: Path, base: str | Path, *more: str) -> Recipe:
    return load("folders", [f"data.path={texts}", f"model.base={base}", *more])


def values(recipe: Recipe) -> tuple[Any, ...]:
    training = recipe.training
    return (
        training.experts.lr,
        recipe.model.context,
        training.batch_size,
        training.micro_batch,
        recipe.method["local_steps"],
    )


@pytest.mark.parametrize(
    ("config", "rate"),
    [
        (GPT2, 1.1e-3),
        (QWEN3, 8.4e-4),
        (LLAMA, 2.9e-4),
        (TINY_GPT2, 8e-3),
        (QWEN3 | {"hidden_size": 64}, 7.4e-3),
        (QWEN3 | {"hidden_size": 32}, 8e-3),
    ],
)
def test_learning_rates_of_pretrained_bases_fall_with_the_width(
    config: dict[str, Any], rate: float, tmp_path: Path
) -> None:
    base = write_config(tmp_path / "base", config)
    found, _ = auto.learning_rate(base)
    assert found == rate
    width = config.get("n_embd", config.get("hidden_size"))
    assert found == pytest.approx(min(max(5e-4 * (2000 / width) ** 0.781, 2e-4), 8e-3), rel=0.06)


def test_the_embedded_base_is_one_of_width_256() -> None:
    assert auto.learning_rate("embedded")[0] == 2.5e-3


@pytest.mark.parametrize(
    ("characters", "expected"),
    [
        # 800 tokens of training text: two windows in a batch, and 50 iterations at least
        (1000, (8e-3, 64, 2, None, 5)),
        # 3 * 8,000 tokens: 100 iterations of 3.75 windows, so 2 of them in a batch; 188 iterations
        (10_000, (8e-3, 64, 2, None, 19)),
        # 3 * 80,000: 8 windows, 469 iterations
        (100_000, (8e-3, 64, 8, None, 47)),
    ],
)
def test_epochs_and_batches_follow_the_text(
    characters: int, expected: tuple[Any, ...], tiny_base: Path, tmp_path: Path
) -> None:
    recipe, said = resolved(of_folders(write_texts(tmp_path / "texts", characters), tiny_base))
    rate, context, batch, micro, steps = values(recipe)
    assert (rate, context, batch, micro) == expected[:4]
    assert steps == pytest.approx(expected[4], abs=1)
    assert recipe.auto == ()
    assert (recipe.keep, recipe.evaluate_every) == ("best", 1)
    assert said.count("\n") == 0
    chosen = (*values(recipe), recipe.evaluate_rows)
    assert recipe.evaluate_rows == max(math.ceil(0.3 * steps * batch), 4)
    for key, value in zip(auto.dotted.AUTOMATIC, chosen, strict=True):
        assert (f"{key} {value:g} (" in said) if value is not None else (key not in said)


@pytest.mark.parametrize(("characters", "batch", "steps"), [(10_000, 2, 5), (100_000, 4, 12)])
def test_the_embedded_base_with_few_tokens_and_ten_times_as_many(
    characters: int, batch: int, steps: int, tmp_path: Path
) -> None:
    """About 2,000 and 20,000 tokens; naive: three epochs in 10 rounds, 50 iterations at least."""
    recipe, _ = resolved(
        of_folders(write_texts(tmp_path / "texts", characters, document=250), "embedded")
    )
    rate, context, found, micro, each = values(recipe)
    assert (rate, found, micro) == (2.5e-3, batch, None)
    assert context == 128  # documents of about 80 tokens
    train = [len(data.train) for data in prepare(recipe).problem.federation.clients.values()]
    needed = 3 * sum(train) / 2 / (context * found)
    assert each == -(-max(needed, 50) // 10) == pytest.approx(steps, abs=6)


@pytest.mark.parametrize(
    ("texts", "limit", "context"),
    [
        (Texts([5000], 500, 90), 1024, 128),
        (Texts([5000], 500, 10), 1024, 64),
        (Texts([5000], 500, 5000), 1024, 256),  # no more than every split has room for
        (Texts([5000], 5000, 5000), 512, 512),  # no more than the base takes
        (Texts([50_000], 5000, 5000), 40_960, 1024),
        (Texts([300], 30, 90), 1024, 16),
    ],
)
def test_windows_are_as_long_as_documents_within_bounds(
    texts: Texts, limit: int, context: int
) -> None:
    assert auto.context_of(texts, limit)[0] == context


def test_unlike_clients_do_alike_many_iterations_within_bounds() -> None:
    """Three epochs of the mean client."""
    unlike = Texts([1000, 19_000], 500, 90)
    assert auto.steps_of(unlike, 100, 4, 10)[0] == 8  # 30,000 / 400 / 10
    assert auto.steps_of(Texts([10], 10, 5), 100, 4, 10)[0] == 5
    assert auto.steps_of(Texts([10**9], 10, 5), 100, 4, 10)[0] == 100


def test_the_epochs_of_little_text_are_said_as_they_are() -> None:
    """Five iterations a round of 2 x 512 tokens: 6.4 times 8,000 tokens in ten, 16.0 in 25."""
    steps, why = auto.steps_of(Texts([8000, 8000], 700, 400), 512, 2, 25, "at most ")
    assert steps == 5
    assert why.startswith("the fewest, as there is little text: 6.4 epochs of 8,000 tokens")
    assert why.endswith("in 10 rounds, at most 16.0 in 25")
    assert "fewest" not in auto.steps_of(Texts([80_000], 700, 400), 512, 2, 25)[1]


def test_large_bases_take_a_batch_in_parts_by_memory(
    tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_config(tmp_path / "base", QWEN3)
    step = Step(str(base), 512, Layout(), "fp32")
    rows = [auto.rows_that_fit(step, gib * 2**30, False) for gib in (3, 8, 64)]
    assert rows == sorted(rows)
    assert rows[0] == 1
    assert rows[-1] > 8
    assert auto.rows_that_fit(step, 8 * 2**30) >= rows[1]
    assert auto.rows_that_fit(step, 8 * 2**30, True) > 2 * rows[1]
    texts = write_texts(tmp_path / "texts", 100_000)
    monkeypatch.setattr(auto, "rows_that_fit", lambda *step: 3)
    assert resolved(of_folders(texts, tiny_base))[0].training.micro_batch == 2
    given = of_folders(texts, tiny_base, "training.micro_batch=null")
    assert resolved(given)[0].training.micro_batch is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("training.experts.lr", 3e-3),
        ("model.context", 32),
        ("training.batch_size", 5),
        ("method.local_steps", 7),
    ],
)
def test_what_is_given_wins(key: str, value: float, tiny_base: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 1000)
    by_option = of_folders(texts, tiny_base, f"{key}={value}")
    by_name = Recipe.load("folders", data={"path": texts}, model={"base": tiny_base}).with_changes(
        **{key: value}
    )
    assert by_option == by_name
    assert key not in by_option.auto
    found, said = resolved(by_option)
    assert key not in said
    assert auto.dotted.value_at(found.model_dump(), key) == value


def test_local_epochs_and_whole_sections_win_too(tiny_base: Path, tmp_path: Path) -> None:
    texts = write_texts(tmp_path / "texts", 1000)
    epochs, said = resolved(of_folders(texts, tiny_base, "method.local_epochs=1"))
    assert "local_steps" not in said
    assert prepare(epochs).method.local_epochs == 1
    section = of_folders(texts, tiny_base, "training.experts={lr: 0.5}")
    assert resolved(section)[0].training.experts.lr == 0.5


def test_what_a_stopped_run_had_not_chosen_yet_is_chosen(tiny_base: Path, tmp_path: Path) -> None:
    recipe = of_folders(write_texts(tmp_path / "texts", 900), tiny_base)
    chosen, _ = resolved(recipe)
    row = yaml.safe_load(dump(chosen.with_method("pretrained")))
    del row["method"]["local_steps"]
    row["training"]["batch_size"] = 3
    first = tmp_path / "run" / "baselines" / "pretrained"
    first.mkdir(parents=True)
    (first / "recipe.yaml").write_text(yaml.safe_dump(row))
    again, line = resolved(recipe, tmp_path / "run")
    assert again.training.batch_size == 3
    assert again.method["local_steps"] == chosen.method["local_steps"]
    assert "method.local_steps" in line
    assert "training.batch_size" not in line
    assert not again.auto


def test_it_can_be_written_read_and_asked_of_other_recipes() -> None:
    recipe = load("folders", ["data.path=/nowhere"])
    assert len(recipe.auto) == 6
    assert validate(yaml.safe_load(dump(recipe)), "again") == recipe
    assert recipe.with_method("local").auto == recipe.auto
    assert load("agnews-ood", ["training.experts.lr=auto"]).auto == ("training.experts.lr",)
    with pytest.raises(RecipeError, match=r"training\.experts\.lr: auto is for language models"):
        prepare(load("cobo-digits", ["training.experts.lr=auto"]))
    with pytest.raises(RecipeError, match="auto"):
        load("folders", ["auto=[method.rounds]"])


def test_no_other_shipped_recipe_leaves_anything_to_the_run() -> None:
    assert [name for name in recipes.names() if load(name).auto] == ["folders", "table"]


def test_a_server_without_text_knows_the_base_alone(tiny_base: Path) -> None:
    recipe, said = resolved(of_folders(Path("/nowhere"), tiny_base), devices=True)
    assert values(recipe) == (8e-3, 128, 8, None, 10)
    assert "the text is on devices" in said


def coterie(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "coterie", *words],
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_from_the_command_line_twice_the_same_and_what_was_chosen_stays(
    tiny_base: Path, tmp_path: Path
) -> None:
    texts = write_texts(tmp_path / "texts", 2000)
    settings = [f"data.path={texts}", f"model.base={tiny_base}", "method.rounds=2"]
    options = [word for each in [*settings, "compare_with=[local]"] for word in ("--set", each)]
    said = [coterie("run", "folders", *options, "--out", str(tmp_path / k)) for k in "ab"]
    expected, line = resolved(load("folders", settings))
    assert all(line in " ".join(text.split()) for text in said)
    for folder in ("a", "b", "a/baselines/local"):
        kept = yaml.safe_load((tmp_path / folder / "recipe.yaml").read_text())
        assert kept["auto"] == []
        assert kept["training"]["experts"]["lr"] == expected.training.experts.lr == 8e-3
        assert kept["method"]["local_steps"] == expected.method["local_steps"]
    ours, theirs = (json.loads((tmp_path / k / "result.json").read_text())["clients"] for k in "ab")
    assert ours == theirs
    for path in (tmp_path / "a/clients").rglob("*.safetensors"):
        other = load_tensors(tmp_path / "b" / path.relative_to(tmp_path / "a"))[0]
        assert all(t.equal(other[name]) for name, t in load_tensors(path)[0].items())
    recipe = load("folders", settings)
    kept = yaml.safe_load((tmp_path / "a/recipe.yaml").read_text())
    kept["training"]["batch_size"] = 3  # as another machine might have chosen
    (tmp_path / "a/recipe.yaml").write_text(yaml.safe_dump(kept))
    assert resolved(recipe, tmp_path / "a")[0].training.batch_size == 3
