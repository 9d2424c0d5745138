"""Classifiers of texts, against transformers called directly on each text by itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.core import files, tensors
from coterie.core.errors import ModelError
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.text import TextShape

VOCABULARY, CLASSES, LENGTH = 61, 5, 12
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": VOCABULARY,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "bert": lambda **more: transformers.BertConfig(**SIZES, max_position_embeddings=32, **more),
    "distilbert": lambda **more: transformers.DistilBertConfig(
        vocab_size=VOCABULARY,
        dim=16,
        hidden_dim=24,
        n_layers=2,
        n_heads=2,
        max_position_embeddings=32,
        **more,
    ),
    "llama": lambda **more: transformers.LlamaConfig(**SIZES, max_position_embeddings=32, **more),
    "gpt2": lambda **more: transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2, n_positions=32, **more
    ),
}
families = pytest.mark.parametrize("family", CONFIGS)


def without_dropout(config: Any) -> Any:
    for name in (
        "hidden_dropout_prob",
        "attention_probs_dropout_prob",
        "dropout",
        "attention_dropout",
        "seq_classif_dropout",
    ):
        setattr(config, name, 0.0)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop"):
        setattr(config, name, 0.0)
    return config


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with the weights of a pretrained model of each family, which has no head for
    classes, and no dropout.
    """
    folders = {}
    for family, config in CONFIGS.items():
        folders[family] = tmp_path_factory.mktemp(family)
        torch.manual_seed(3)
        model = transformers.AutoModel.from_config(without_dropout(config()))
        for parameter in model.parameters():  # norms and biases as they start would hide mistakes
            nn.init.normal_(parameter, std=0.2)
        model.save_pretrained(folders[family])
    return folders


def shape_of(base: Path, classes: int = CLASSES, length: int = LENGTH) -> TextShape:
    return TextShape(str(base), classes, length)


def texts(*lengths: int, width: int = LENGTH, seed: int = 0) -> Tensor:
    """Random texts of these lengths, (texts, width)."""
    ids = torch.randint(
        1, VOCABULARY, (len(lengths), width), generator=torch.Generator().manual_seed(seed)
    )
    return ids.where(torch.arange(width) < torch.tensor(lengths)[:, None], -1)


def batch_of(*lengths: int, seed: int = 0) -> Examples:
    x = texts(*lengths, seed=seed)
    return Examples(x, x[:, 0] % CLASSES)


def naive(base: Path, network: nn.Module) -> Any:
    """What transformers itself makes of a base, with the values of our network."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=CLASSES
    )
    model.load_state_dict(
        {name.removeprefix("model."): value for name, value in network.state_dict().items()}
    )
    return model.eval()


def own(model: Classifier) -> list[nn.Parameter]:
    return list(model.parameters_by_role[GENERALIST].values())


# Outputs


@families
def test_logits_and_features_are_those_of_each_text_by_itself(bases, family) -> None:
    model = Classifier(shape_of(bases[family]))
    oracle, x = naive(bases[family], model.network), texts(5, 12, 1, 7)
    with torch.no_grad():
        logits, features = model(x), model.network.features(x)
        for row, ids in enumerate(text[text >= 0][None] for text in x):
            torch.testing.assert_close(logits[row], oracle(ids).logits[0])
            torch.testing.assert_close(
                features[row], oracle.base_model(ids).last_hidden_state[0].mean(dim=0)
            )
    assert features.shape == (4, 16)


@families
@settings(max_examples=15)
@given(
    ids=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=LENGTH),
    padding=st.integers(0, LENGTH),
)
def test_padding_changes_nothing_whatever_a_text_ends_with(bases, family, ids, padding) -> None:
    network = shape_of(bases[family], length=2 * LENGTH).build().eval()
    long = texts(2 * LENGTH, width=2 * LENGTH)
    text = torch.tensor(ids)
    padded = torch.cat([text, torch.full((2 * LENGTH - len(ids),), -1)])
    with torch.no_grad():
        alone = network(text[None])[0]
        torch.testing.assert_close(network(padded[None, : len(ids) + padding])[0], alone)
        torch.testing.assert_close(network(torch.stack([padded, long[0]]))[0], alone)


@pytest.mark.parametrize(
    ("tokens", "padding"),
    [({"pad_token_id": 7}, 7), ({"eos_token_id": [9, 4]}, 9), ({"pad_token_id": -1}, 2), ({}, 2)],
)
def test_the_padding_is_the_bases_own_or_its_end_token_and_is_trained_like_any_other(
    tmp_path, tokens, padding
) -> None:
    CONFIGS["llama"](**tokens).save_pretrained(tmp_path)
    model = Classifier(shape_of(tmp_path))
    assert model.network.padding == padding  # 2 is Llama's end token where nothing is said
    if "pad_token_id" not in tokens:
        x = torch.tensor([[padding, 3, 5]])
        embedding = model.network.model.get_input_embeddings().weight
        (gradient,), _ = model.gradient(Examples(x, torch.tensor([1])), [embedding])
        assert gradient[padding].any()


def test_a_base_without_padding_and_end_is_padded_with_0(tmp_path) -> None:
    CONFIGS["llama"](eos_token_id=None).save_pretrained(tmp_path)
    assert shape_of(tmp_path).build("meta").padding == 0


def test_flops_are_those_of_a_text_as_long_as_can_be(bases) -> None:
    short, long = (Classifier(shape_of(bases["bert"], length=length)).flops() for length in (6, 12))
    assert 1.9 < long / short < 2.2


# Values


@families
def test_a_network_starts_from_its_base_and_its_head_from_the_seed(bases, family) -> None:
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    model = Classifier(shape_of(bases[family]))
    initial, other = model.initial(GENERALIST, 5), model.initial(GENERALIST, 6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert list(initial) == list(model.parameters_by_role[GENERALIST])
    base = {
        id(parameter): name for name, parameter in model.network.model.base_model.named_parameters()
    }
    pretrained = transformers.AutoModel.from_pretrained(bases[family]).state_dict()
    heads = []
    for name, parameter in model.network.named_parameters():
        if id(parameter) in base:
            assert torch.equal(initial[name], pretrained[base[id(parameter)]])
            assert torch.equal(initial[name], other[name])
        else:
            heads.append(name)
            assert torch.equal(initial[name], other[name]) == (parameter.ndim == 1)
    assert heads
    assert all(
        torch.equal(value, model.initial(GENERALIST, 5)[name]) for name, value in initial.items()
    )
    initial[heads[0]].zero_()
    initial[next(iter(initial))].zero_()
    assert all(
        value.any()
        for name, value in model.initial(GENERALIST, 5).items()
        if name in (heads[0], next(iter(initial)))
    )
    assert model.initial(SPECIALIST, 5) == {}


@families
def test_a_folder_without_weights_starts_at_random_from_the_seed(tmp_path, family) -> None:
    CONFIGS[family](initializer_range=0.5).save_pretrained(tmp_path)
    model = Classifier(shape_of(tmp_path))
    initial, other = model.initial(GENERALIST, 0), model.initial(GENERALIST, 1)
    weights = [name for name, value in initial.items() if value.ndim > 1]
    assert 0.45 < torch.cat([initial[name].flatten() for name in weights]).std() < 0.55
    assert not any(torch.equal(initial[name], other[name]) for name in weights)
    for name, value in initial.items():
        if value.ndim == 1:
            assert torch.equal(value, torch.full_like(value, float(name.endswith("weight"))))
    assert all(
        torch.equal(initial[name], value) for name, value in model.network.named_parameters()
    )


def test_the_embedded_base_can_classify_quietly(capfd) -> None:
    model = Classifier(TextShape("embedded", 3, 8))
    assert model(torch.tensor([[1, 2, -1], [5, 6, 7]])).shape == (2, 3)
    assert capfd.readouterr() == ("", "")
    assert transformers.utils.logging.get_verbosity() == transformers.utils.logging.WARNING


@families
def test_shapes_are_known_without_weights(bases, family, tmp_path) -> None:
    transformers.AutoConfig.from_pretrained(bases[family]).save_pretrained(tmp_path)
    server, client = Classifier(shape_of(tmp_path), "meta"), Classifier(shape_of(bases[family]))
    assert server.trainable_parameters == client.trainable_parameters
    found = {name: p.shape for name, p in server.parameters_by_role[GENERALIST].items()}
    assert found == {name: p.shape for name, p in client.parameters_by_role[GENERALIST].items()}
    assert (server.buffers, client.buffers, client.initial_buffers()) == (
        {},
        {},
        {},
    )  # positions are no statistics
    assert not client.stacks


def test_a_head_of_as_many_classes_is_the_bases_own_and_another_is_not(tmp_path) -> None:
    CONFIGS["bert"](num_labels=CLASSES).save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_config(
        CONFIGS["bert"](num_labels=CLASSES)
    )
    model.save_pretrained(tmp_path)
    name = "model.classifier.weight"
    assert torch.equal(shape_of(tmp_path).initial(0)[name], model.classifier.weight)
    assert shape_of(tmp_path, 3).initial(0)[name].shape == (3, 16)


def test_a_base_that_never_saw_whole_texts_gets_a_pooler(tmp_path) -> None:
    model = transformers.AutoModelForMaskedLM.from_config(CONFIGS["bert"]())
    model.save_pretrained(tmp_path)
    one, other = shape_of(tmp_path).initial(0), shape_of(tmp_path).initial(1)
    differ = [name for name in one if not torch.equal(one[name], other[name])]
    assert differ == ["model.bert.pooler.dense.weight", "model.classifier.weight"]
    assert torch.equal(
        one["model.bert.embeddings.LayerNorm.weight"], model.bert.embeddings.LayerNorm.weight
    )


def test_shared_parameters_are_there_once(tmp_path) -> None:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 16,
        "max_position_embeddings": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
    }
    heads = {
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
    }
    # A Bart that says it is no encoder-decoder, which would be refused, has such parameters.
    ends = {"eos_token_id": 2, "pad_token_id": 1, "is_encoder_decoder": False}
    transformers.BartConfig(**sizes, **heads, **ends).save_pretrained(tmp_path)
    model = Classifier(shape_of(tmp_path))
    assert len(list(model.network.named_parameters())) < len(
        list(model.network.named_parameters(remove_duplicate=False))
    )
    initial = model.initial(GENERALIST, 0)
    assert list(initial) == list(model.parameters_by_role[GENERALIST])
    sent = tensors.from_bytes(tensors.to_bytes(dict(model.network.named_parameters())))
    assert all(torch.equal(sent[name], initial[name]) for name in initial)
    x = torch.tensor([[5, 6, 2, -1], [5, 6, 7, 2]])
    torch.testing.assert_close(model(x)[0], model(x[:1, :3])[0])
    again = Classifier(
        shape_of(tmp_path),
        start=sent | {"model.classification_head.out_proj.bias": torch.ones(CLASSES)},
    )
    torch.testing.assert_close(again(x), model(x) + 1)


# Training


@families
def test_the_gradient_is_that_of_the_naive_loss_in_parts_too(bases, family) -> None:
    model, batch = Classifier(shape_of(bases[family])), batch_of(5, 12, 1, 7, 3)
    oracle = naive(bases[family], model.network).train()
    logits = torch.cat([oracle(text[text >= 0][None]).logits for text in batch.x])
    loss = cross_entropy(logits, batch.y)
    expected = torch.autograd.grad(loss, list(oracle.parameters()), materialize_grads=True)
    for micro_batch in (None, 2):
        gradients, stats = model.gradient(batch, own(model), micro_batch)
        torch.testing.assert_close(gradients, list(expected), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stats["loss"], loss.detach())
        assert float(stats["accuracy"]) == pytest.approx(
            float((logits.argmax(dim=1) == batch.y).float().mean())
        )


def test_dropout_acts_in_training_only_and_follows_the_global_seed(tmp_path) -> None:
    CONFIGS["bert"](initializer_range=0.5).save_pretrained(tmp_path)
    model, batch = Classifier(shape_of(tmp_path)), batch_of(5, 12, 7)

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return float(model.gradient(batch, own(model))[1]["loss"])

    assert loss(0) == loss(0) != loss(1)
    assert torch.equal(model(batch.x), model(batch.x))


@families
def test_a_few_steps_lower_the_loss(bases, family) -> None:
    model, batch = Classifier(shape_of(bases[family])), batch_of(5, 12, 3, 7, 9, 2)
    losses = []
    for _ in range(4):
        gradients, stats = model.gradient(batch, own(model))
        losses.append(float(stats["loss"]))
        for parameter, gradient in zip(own(model), gradients, strict=True):
            parameter.data.sub_(0.05 * gradient)
    assert losses[0] > losses[1] > losses[2] > losses[3]
    assert float(model.score([batch])[0]) / 6 < losses[0]


# Refusals


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(2, 3), "float32"),
        (torch.zeros(2, dtype=torch.int64), "int64"),
        (texts(3, 13, width=13), "at most 12"),
        (torch.tensor([[1, VOCABULARY], [1, 2]]), "token 61 of a vocabulary of 61"),
        (torch.tensor([[-1, -1], [1, 2]]), "without tokens"),
        (torch.tensor([[1, -1, 2], [1, 2, 3]]), "gaps"),
        (torch.tensor([[1, -2], [1, 2]]), "gaps"),
    ],
)
def test_batches_of_another_form_are_refused(bases, x, message) -> None:
    model, y = Classifier(shape_of(bases["bert"])), torch.tensor([0, 1])
    for use in (
        lambda batch: model.gradient(batch, own(model)),
        lambda batch: model.score([batch]),
    ):
        with pytest.raises(ModelError, match=message):
            use(Examples(x, y))


def test_bases_that_will_not_do_are_refused(bases, tmp_path) -> None:
    with pytest.raises(ModelError, match="Every size is at least 1"):
        TextShape("embedded", 0, 8)
    with pytest.raises(ModelError, match=r"texts of 33 tokens, but .* allows 32"):
        shape_of(bases["bert"], length=33).build("meta")
    with pytest.raises(ModelError, match="no model folder"):
        TextShape(str(tmp_path / "nowhere"), 3, 8).build()
    transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    ).save_pretrained(tmp_path / "vit")
    with pytest.raises(ModelError, match=r"is a vit model.*\n.*encoder such as BERT"):
        TextShape(str(tmp_path / "vit"), 3, 8).build()


def test_incomplete_and_damaged_weights_are_refused(bases, tmp_path) -> None:
    for name in ("part", "broken"):
        transformers.AutoConfig.from_pretrained(bases["bert"]).save_pretrained(tmp_path / name)
    named, _ = files.load(bases["bert"] / "model.safetensors")
    del named["encoder.layer.1.output.dense.weight"]
    files.save(tmp_path / "part/model.safetensors", named, {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"lack 'bert.encoder.layer.1.output.dense.weight' \(1 tensors"
    ):
        shape_of(tmp_path / "part").build()
    (tmp_path / "broken/model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="cannot load base"):
        shape_of(tmp_path / "broken").build()
