"""Models of FedSR and FedADG: their objectives against naive formulations, what follows which
loss, and where they start.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal, kl_divergence
from torch.nn.functional import cross_entropy, leaky_relu
from transformers import BertConfig

from coterie.core.errors import ModelError
from coterie.core.roles import BACKBONE, GENERALIST, SPECIALIST, Role
from coterie.core.tensors import Tensors
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.generalising import (
    AdversarialClassifier,
    AdversarialLayout,
    ExtendedClassifier,
    StochasticClassifier,
    StochasticLayout,
    normal_divergence,
)
from coterie.models.networks import NetworkShape
from coterie.models.text import TextShape

DIGITS = (1, 8, 8)
MLP = NetworkShape("mlp", DIGITS, 4, hidden=(6, 5))
CNN = NetworkShape("cnn", DIGITS, 4, width=2)
SHAPES = [
    MLP,
    CNN,
    NetworkShape("resnet9", DIGITS, 3, width=2),
    NetworkShape("resnet20", DIGITS, 3, width=2),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.network)


def stochastic(shape: NetworkShape, *args: object, **layout: float) -> StochasticClassifier:
    return StochasticClassifier(shape, StochasticLayout(**layout), *args)  # type: ignore[arg-type]


def adversarial(shape: NetworkShape, *args: object, **layout: float) -> AdversarialClassifier:
    return AdversarialClassifier(shape, AdversarialLayout(**({"hidden": 7} | layout)), *args)  # type: ignore[arg-type]


kinds = pytest.mark.parametrize("kind", [stochastic, adversarial])


def batch_of(shape: NetworkShape, size: int = 9) -> Examples:
    generator = torch.Generator().manual_seed(1)
    return Examples(
        torch.randn(size, *shape.inputs, generator=generator),
        torch.randint(0, shape.classes, (size,), generator=generator),
    )


def own(model: Classifier, *roles: Role) -> dict[str, nn.Parameter]:
    return {
        name: p
        for role in roles or (GENERALIST, SPECIALIST)
        for name, p in model.parameters_by_role[role].items()
    }


def gradients(model: Classifier, batch: Examples, *roles: Role) -> Tensors:
    named = own(model, *roles)
    torch.manual_seed(5)
    found, _ = model.gradient(batch, list(named.values()))
    return dict(zip(named, found, strict=True))


def scattered(model: ExtendedClassifier) -> ExtendedClassifier:
    """At values where nothing is zero or the identity by accident."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in own(model, *Role).values():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def test_the_divergence_of_normal_distributions() -> None:
    g = torch.Generator().manual_seed(0)
    mean, other = torch.randn(2, 5, 3, generator=g)
    spread, other_spread = torch.rand(2, 5, 3, generator=g) + 0.1
    expected = kl_divergence(Normal(mean, spread), Normal(other, other_spread)).sum(dim=1)
    torch.testing.assert_close(normal_divergence(mean, spread, other, other_spread), expected)
    assert not normal_divergence(mean, spread, mean, spread).any()


def test_fedsr_minimises_what_its_paper_says() -> None:
    model, batch = scattered(stochastic(MLP, l2=0.2, cmi=0.3)), batch_of(MLP)
    found = gradients(model, batch)
    p = {name: tensor.detach().clone().requires_grad_() for name, tensor in own(model).items()}
    h = batch.x.flatten(1)
    for layer in "01":
        h = torch.relu(h @ p[f"base.{layer}.weight"].T + p[f"base.{layer}.bias"])
    mu = h @ p["mean.weight"].T + p["mean.bias"]
    sigma = torch.log1p(torch.exp(h @ p["spread.weight"].T + p["spread.bias"]))
    torch.manual_seed(5)
    z = mu + sigma * torch.randn(9, 5)
    reference = Normal(
        p["reference.mean"][batch.y], torch.log1p(p["reference.spread"][batch.y].exp())
    )
    loss = cross_entropy(z @ p["base.2.weight"].T + p["base.2.bias"], batch.y)
    objective = (
        loss + 0.2 * (z**2).sum() / 9 + 0.3 * kl_divergence(Normal(mu, sigma), reference).sum() / 9
    )
    expected = torch.autograd.grad(objective, list(p.values()))
    for name, gradient in zip(p, expected, strict=True):
        assert gradient.any()
        torch.testing.assert_close(
            found[name], gradient, msg=lambda text, name=name: f"{name}: {text}"
        )
    torch.manual_seed(5)
    _, stats = model.gradient(batch, list(own(model).values()))
    torch.testing.assert_close(stats["loss"], loss.detach())


def naive_discriminator(p: Tensors, h: Tensor, code: Tensor) -> Tensor:
    seen = torch.cat([h @ p["projection.weight"].T, code], dim=1)
    hidden = leaky_relu(seen @ p["discriminator.0.weight"].T + p["discriminator.0.bias"])
    return torch.sigmoid(hidden @ p["discriminator.2.weight"].T + p["discriminator.2.bias"])


def test_fedadg_trains_every_part_on_its_own_loss() -> None:
    model, batch = scattered(adversarial(MLP, align=0.4)), batch_of(MLP)
    found = gradients(model, batch)
    p = {
        name: tensor.detach().clone().requires_grad_() for name, tensor in own(model, *Role).items()
    }
    code = torch.eye(4)[batch.y]
    h = batch.x.flatten(1)
    for layer in "01":
        h = torch.relu(h @ p[f"base.{layer}.weight"].T + p[f"base.{layer}.bias"])
    torch.manual_seed(5)
    hidden = leaky_relu(
        torch.cat([torch.rand(9, 7), code], dim=1) @ p["generator.0.weight"].T
        + p["generator.0.bias"]
    )
    drawn = torch.relu(hidden @ p["generator.2.weight"].T + p["generator.2.bias"])
    fixed = {name: tensor.detach() for name, tensor in p.items()}
    error = cross_entropy(h @ p["base.2.weight"].T + p["base.2.bias"], batch.y)
    losses = {
        "base": 0.6 * error + 0.4 * ((1 - naive_discriminator(fixed, h, code)) ** 2).mean(),
        "generator": (naive_discriminator(fixed, drawn, code) ** 2).mean(),
        "discriminator": (
            (1 - naive_discriminator(p, drawn.detach(), code)) ** 2
            + naive_discriminator(p, h.detach(), code) ** 2
        ).mean(),
    }
    for part, loss in losses.items():
        names = [name for name in p if name.startswith(part)]
        for name, gradient in zip(
            names, torch.autograd.grad(loss, [p[name] for name in names]), strict=True
        ):
            assert gradient.any()
            torch.testing.assert_close(
                found.pop(name), gradient, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert not found


def test_each_part_of_fedadg_descends_its_own_loss() -> None:
    """Left to itself the discriminator tells features from drawn ones; against a fixed one,
    features come to look drawn.
    """
    model, batch = scattered(adversarial(MLP, align=1.0)), batch_of(MLP, 30)

    def seen() -> Tensor:
        return model.network.judge(model.network.features(batch.x), batch.y).mean().detach()

    def descend(*prefixes: str) -> None:
        for _ in range(100):
            found = gradients(model, batch)
            with torch.no_grad():
                for name, parameter in own(model).items():
                    parameter.sub_(found[name], alpha=0.3 if name.startswith(prefixes) else 0.0)

    descend("discriminator")
    told = seen()
    assert told < 0.1
    with torch.no_grad():
        assert model.network.judge(model.network.generate(batch.y), batch.y).mean() > 0.8
    descend("base")
    assert seen() > 0.5


def test_what_the_generator_of_fedadg_draws_comes_to_look_like_features() -> None:
    model, batch = scattered(adversarial(MLP)), batch_of(MLP, 30)

    def judged() -> Tensor:
        return model.network.judge(model.network.generate(batch.y), batch.y).mean().detach()

    before = judged()
    for _ in range(100):
        found = gradients(model, batch)
        with torch.no_grad():
            for name, parameter in own(model, GENERALIST).items():
                parameter.sub_(found[name], alpha=0.3 if name.startswith("generator") else 0.0)
    assert judged() < 0.5 * before


@shapes
def test_without_its_discriminator_fedadg_is_classification(shape: NetworkShape) -> None:
    model, batch = adversarial(shape), batch_of(shape)
    plain = Classifier(shape)
    found = gradients(model, batch, GENERALIST)
    for name, gradient in gradients(plain, batch, GENERALIST).items():
        torch.testing.assert_close(found.pop(f"base.{name}"), gradient)
    assert found
    assert not any(gradient.any() for gradient in found.values())
    for name, buffer in plain.buffers.items():
        torch.testing.assert_close(model.buffers[f"base.{name}"], buffer)


@shapes
@kinds
def test_it_starts_as_the_network_that_it_starts_from(
    shape: NetworkShape, kind: type[ExtendedClassifier]
) -> None:
    before = torch.get_rng_state()
    start = Classifier(shape)
    for tensor in [*start.network.parameters(), *start.buffers.values()]:
        tensor.data.uniform_(0.1, 0.5, generator=torch.Generator().manual_seed(tensor.numel()))
    values = {
        name: t.detach().clone()
        for name, t in [*start.network.named_parameters(), *start.buffers.items()]
    }
    model, batch = kind(shape, "cpu", values, True), batch_of(shape)  # type: ignore[arg-type, call-arg]
    assert torch.equal(torch.get_rng_state(), before)
    with torch.no_grad():
        torch.testing.assert_close(model(batch.x), start(batch.x))
    torch.testing.assert_close(model.score([batch]), start.score([batch]))
    one, other = model.initial(GENERALIST, 1), model.initial(GENERALIST, 2)
    for name, tensor in values.items():
        assert torch.equal(one[f"base.{name}"], tensor)
    assert list(one) == [*own(model, GENERALIST), *model.buffers]
    assert any(not torch.equal(one[name], other[name]) for name in one)


@shapes
@kinds
def test_it_predicts_as_some_plain_network(
    shape: NetworkShape, kind: type[ExtendedClassifier]
) -> None:
    model, batch = scattered(kind(shape)), batch_of(shape)  # type: ignore[arg-type, call-arg]
    gradients(model, batch)  # moves running statistics
    plain = model.plain()
    assert type(plain) is Classifier
    torch.testing.assert_close(plain.score([batch]), model.score([batch]), rtol=1e-4, atol=1e-4)


@shapes
@kinds
def test_at_random_the_plain_network_is_the_one_of_that_seed(
    shape: NetworkShape, kind: type[ExtendedClassifier]
) -> None:
    model = kind(shape)  # type: ignore[arg-type, call-arg]
    for role in Role:
        found = model.initial(role, 4)
        assert {name: t.shape for name, t in found.items()} == {
            name: p.shape for name, p in own(model, role).items()
        }
        for name, tensor in model.initial(role, 0).items():
            assert torch.equal(own(model, role)[name], tensor)
    plain = Classifier(shape).initial(GENERALIST, 4)
    found = model.initial(GENERALIST, 4)
    assert all(torch.equal(found[f"base.{name}"], tensor) for name, tensor in plain.items())


def test_what_is_shared_and_what_is_not() -> None:
    model = adversarial(MLP)
    assert {name.split(".")[0] for name in own(model, GENERALIST)} == {"base", "generator"}
    assert {name.split(".")[0] for name in own(model, SPECIALIST)} == {"discriminator"}
    assert list(own(model, BACKBONE)) == ["projection.weight"]
    plain = Classifier(MLP).trainable_parameters
    assert model.active_parameters == plain
    assert model.trainable_parameters == plain + (11 * 7 + 7) + (7 * 5 + 5) + (11 * 7 + 7) + (7 + 1)
    assert stochastic(MLP).active_parameters == plain + 5 * 5 + 5
    assert stochastic(MLP).trainable_parameters == plain + 2 * (5 * 5 + 5) + 2 * 4 * 5
    assert not model.stacks


@pytest.mark.parametrize("micro_batch", [1, 4])
def test_micro_batches_add_up(micro_batch: int) -> None:
    model, batch = scattered(stochastic(MLP, l2=0.2, cmi=0)), batch_of(MLP)
    with torch.no_grad():
        model.network.spread.bias.fill_(-20.0)  # no noise, which would be drawn in another order
    wrt = list(own(model).values())
    (whole, stats), (parts, found) = (
        model.gradient(batch, wrt, size) for size in (None, micro_batch)
    )
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(found, stats)


@kinds
def test_batch_normalisation_is_not_cut(kind: type[ExtendedClassifier]) -> None:
    model = kind(CNN)  # type: ignore[arg-type, call-arg]
    with pytest.raises(ModelError, match="micro_batch 4"):
        model.gradient(batch_of(CNN), list(own(model).values()), 4)


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration of an encoder of one block."""
    folder = tmp_path_factory.mktemp("bert")
    sizes = {
        "vocab_size": 13,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    BertConfig(**sizes, max_position_embeddings=8).save_pretrained(folder)
    return folder


@kinds
def test_a_network_for_texts_gets_a_head_on_its_features(
    kind: type[ExtendedClassifier], tiny_bert: Path
) -> None:
    shape = TextShape(str(tiny_bert), 3, 8)
    model = kind(shape)  # type: ignore[arg-type, call-arg]
    batch = Examples(
        torch.tensor([[1, 2, 3, -1], [4, 5, -1, -1], [6, 7, 8, 9]]), torch.tensor([0, 2, 1])
    )
    found = gradients(model, batch)
    assert found["outer.weight"].any()
    assert any(gradient.any() for name, gradient in found.items() if "embeddings" in name)
    with torch.no_grad():
        expected = (
            model.network.base.features(batch.x) @ model.network.head.weight.T
            + model.network.head.bias
        )
        torch.testing.assert_close(model(batch.x), expected)
    assert model.plain() is None
    for role in Role:
        assert list(model.initial(role, 1)) == list(own(model, role))


@kinds
def test_on_meta_it_has_shapes_alone(kind: type[ExtendedClassifier]) -> None:
    model = kind(MLP, "meta")  # type: ignore[arg-type, call-arg]
    assert all(parameter.is_meta for parameter in own(model).values())
    assert model.trainable_parameters == kind(MLP).trainable_parameters  # type: ignore[arg-type, call-arg]
