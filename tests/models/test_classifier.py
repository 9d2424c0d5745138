"""Image classifiers: gradients at the client's model and elsewhere, one point or many, and what
is refused.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.core.errors import ModelError
from coterie.core.protocol import derive_seed
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.networks import NetworkShape, ResNet9

DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SHAPES = [
    NetworkShape("mlp", DIGITS, 10, hidden=(12, 8)),
    NetworkShape("mlp", DIGITS, 3, hidden=()),
    NetworkShape("cnn", DIGITS, 5, width=4),
    NetworkShape("cnn", DIGITS, 5, width=4, norm="group"),
    NetworkShape("cnn", DIGITS, 5, width=4, norm="none"),
    NetworkShape("resnet9", DIGITS, 4, width=2),
    NetworkShape("resnet9", DIGITS, 4, width=2, norm="none"),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.network}-{s.norm}-{s.classes}")
normed = NetworkShape("cnn", DIGITS, 5, width=4)


def batch_of(shape: NetworkShape, size: int, seed: int = 0) -> Examples:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, shape.classes, (size,), generator=generator)
    return Examples(
        torch.randn(size, *shape.inputs, generator=generator) + 0.1 * y.view(-1, 1, 1, 1), y
    )


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def own(model: Classifier) -> list[nn.Parameter]:
    return list(model.parameters_by_role[GENERALIST].values())


def put(model: Classifier, point: Tensor) -> None:
    nn.utils.vector_to_parameters(point, own(model))


def points_near(model: Classifier, count: int, seed: int) -> Tensor:
    start = flat(list(model.initial(GENERALIST, seed).values()))
    return start + 0.05 * torch.randn(
        count, len(start), generator=torch.Generator().manual_seed(seed)
    )


def snapshot(model: Classifier) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in model.buffers.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# Networks


@pytest.mark.parametrize("inputs", [DIGITS, MNIST, CIFAR, (1, 1, 1), (2, 5, 3)])
@pytest.mark.parametrize("network", ["mlp", "cnn", "resnet9"])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
def test_every_network_takes_every_size_of_image(network, inputs, norm) -> None:
    shape = NetworkShape(network, inputs, 7, width=4, norm=norm)
    model, batch = Classifier(shape), batch_of(shape, 3)
    assert model(batch.x).shape == (3, 7)
    gradients, stats = model.gradient(batch, own(model))
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert stats["loss"].shape == stats["accuracy"].shape == ()
    assert not model.network.training


def test_resnet9_has_as_many_parameters_as_the_published_one() -> None:
    model = Classifier(NetworkShape("resnet9", CIFAR, 10), "meta")
    assert model.trainable_parameters == model.active_parameters == 6_573_130
    assert isinstance(model.network, ResNet9)


def test_flops_of_an_mlp() -> None:
    assert Classifier(NetworkShape("mlp", DIGITS, 10, hidden=(64,))).flops() == 2 * (
        64 * 64 + 64 * 10
    )


@pytest.mark.parametrize(
    "mistake",
    [
        {"network": "vgg"},
        {"norm": "layer"},
        {"inputs": (8, 8)},
        {"classes": 0},
        {"hidden": (4, 0)},
        {"width": 0},
    ],
)
def test_shapes_that_cannot_be_are_refused(mistake) -> None:
    with pytest.raises(ModelError):
        NetworkShape(**({"network": "cnn", "inputs": DIGITS, "classes": 3} | mistake))


# Tensors


@shapes
def test_every_parameter_is_a_generalist_and_statistics_are_not_parameters(shape) -> None:
    model = Classifier(shape)
    roles = model.parameters_by_role
    assert {role for role, named in roles.items() if named} == {GENERALIST}
    assert list(roles[GENERALIST]) == [name for name, _ in model.network.named_parameters()]
    assert bool(model.buffers) == (shape.norm == "batch" and shape.network != "mlp")
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers.values())
    assert_same(model.initial_buffers(), model.buffers)
    assert (model.loras(), model.initial(SPECIALIST, 0)) == ({}, {})


def test_initial_values_have_pytorchs_distribution_and_streams_of_their_own() -> None:
    model = Classifier(NetworkShape("resnet9", CIFAR, 10, width=16))
    initial = model.initial(GENERALIST, 5)
    assert {name: tensor.shape for name, tensor in initial.items()} == {
        name: p.shape for name, p in model.parameters_by_role[GENERALIST].items()
    }
    torch.manual_seed(0)
    for name, module in model.network.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            default = type(module)(*_arguments(module)).weight.detach()
            assert initial[f"{name}.weight"].std() == pytest.approx(float(default.std()), rel=0.1)
            assert initial[f"{name}.weight"].abs().max() == pytest.approx(
                float(default.abs().max()), rel=0.05
            )
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.equal(initial[f"{name}.weight"], torch.ones_like(module.weight))
            assert torch.equal(initial[f"{name}.bias"], torch.zeros_like(module.bias))
    drawn = torch.empty(10).uniform_(
        -(128**-0.5),
        128**-0.5,
        generator=torch.Generator().manual_seed(derive_seed(5, GENERALIST, "head.bias")),
    )
    assert torch.equal(initial["head.bias"], drawn)
    assert_same(model.initial(GENERALIST, 5), initial)
    assert not torch.equal(model.initial(GENERALIST, 6)["head.bias"], initial["head.bias"])


def _arguments(module: nn.Module) -> tuple:
    return (
        (module.in_features, module.out_features)
        if isinstance(module, nn.Linear)
        else (module.in_channels, module.out_channels, module.kernel_size)
    )


def test_building_leaves_pytorchs_generator_as_it_was() -> None:
    before = torch.random.get_rng_state()
    Classifier(SHAPES[-1])
    assert torch.equal(torch.random.get_rng_state(), before)


# Gradients


@shapes
def test_a_gradient_is_that_of_the_mean_cross_entropy(shape) -> None:
    model, batch = Classifier(shape), batch_of(shape, 6)
    gradients, stats = model.gradient(batch, own(model))
    reference = Classifier(shape).network.train()
    logits = reference(batch.x)
    loss = nn.functional.cross_entropy(logits, batch.y)
    loss.backward()
    for gradient, parameter in zip(gradients, reference.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    torch.testing.assert_close(stats["loss"], loss.detach())
    assert stats["accuracy"] == (logits.argmax(1) == batch.y).float().mean()
    torch.testing.assert_close(snapshot(model), dict(reference.named_buffers()))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in own(model))


def test_only_the_parameters_that_are_asked_for_are_differentiated_by() -> None:
    model, batch = Classifier(normed), batch_of(normed, 4)
    everything = dict(
        zip(
            model.parameters_by_role[GENERALIST],
            model.gradient_elsewhere(batch, own(model))[0],
            strict=True,
        )
    )
    some = model.parameters_by_role[GENERALIST]["head.bias"]
    (gradient,), _ = model.gradient_elsewhere(batch, [some])
    torch.testing.assert_close(gradient, everything["head.bias"])


@shapes
def test_running_statistics_follow_a_gradient_but_not_one_elsewhere(shape) -> None:
    model, batch = Classifier(shape), batch_of(shape, 6)
    model.gradient(batch_of(shape, 6, seed=1), own(model))
    before = snapshot(model)
    elsewhere, stats = model.gradient_elsewhere(batch, own(model))
    assert_same(snapshot(model), before)
    here, same = model.gradient(batch, own(model))
    assert all(
        torch.equal(a, b) for a, b in zip(elsewhere, here, strict=True)
    )  # statistics of the batch in both
    assert_same(stats, same)
    after = snapshot(model)
    assert all(not torch.equal(before[name], after[name]) for name in before)


def test_statistics_are_tracked_again_after_a_failure_elsewhere() -> None:
    model = Classifier(normed)
    with pytest.raises(ModelError):
        model.gradient_elsewhere(batch_of(normed, 4), [])
    before = snapshot(model)
    model.gradient(batch_of(normed, 4), own(model))
    assert not torch.equal(snapshot(model)[next(iter(before))], next(iter(before.values())))


@pytest.mark.parametrize("micro_batch", [1, 3, 7, 20])
def test_micro_batches_make_no_difference_where_examples_are_independent(micro_batch) -> None:
    shape = NetworkShape("cnn", DIGITS, 5, width=4, norm="group")
    model, batch = Classifier(shape), batch_of(shape, 7)
    whole, stats = model.gradient(batch, own(model))
    parts, same = model.gradient(batch, own(model), micro_batch)
    for part, expected in zip(parts, whole, strict=True):
        torch.testing.assert_close(part, expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(same, stats)


def test_micro_batches_are_refused_where_they_would_change_the_statistics() -> None:
    model, batch = Classifier(normed), batch_of(normed, 7)
    with pytest.raises(
        ModelError, match=r"micro_batch 3 would split a batch of 7.*\n.*norm 'group'"
    ):
        model.gradient(batch, own(model), 3)
    model.gradient(batch, own(model), 7)


def test_one_example_has_no_statistics_where_a_map_is_one_pixel() -> None:
    shape = NetworkShape("resnet9", DIGITS, 4, width=2)
    model = Classifier(shape)
    with pytest.raises(ModelError, match=r"one example has no statistics.*\n.*batch_size"):
        model.gradient(batch_of(shape, 1), own(model))
    assert not model.network.training
    assert float(model.score([batch_of(shape, 1)])[1]) == 1


# Many points


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(1, 5), st.integers(2, 6), st.integers(0, 5))
def test_many_points_at_once_are_the_points_one_by_one(shape, count, size, seed) -> None:
    model = Classifier(shape)
    points, batches = (
        points_near(model, count, seed),
        [batch_of(shape, size, seed + i) for i in range(count)],
    )
    before, parameters = snapshot(model), flat(own(model)).detach().clone()
    gradients, stats = model.vectorised(
        points, torch.stack([b.x for b in batches]), torch.stack([b.y for b in batches])
    )
    losses = stats["loss"]
    assert gradients.shape == points.shape
    assert losses.shape == (count,)
    assert not gradients.requires_grad
    assert not losses.requires_grad
    assert_same(snapshot(model), before)
    assert torch.equal(flat(own(model)), parameters)
    for point, batch, gradient, loss in zip(points, batches, gradients, losses, strict=True):
        put(model, point)
        expected, stats = model.gradient_elsewhere(batch, own(model))
        torch.testing.assert_close(loss, stats["loss"], atol=1e-5, rtol=1e-4)
        # Normalising the statistics of few pixels magnifies rounding: compare with the size of the
        # whole gradient.
        assert (
            torch.linalg.vector_norm(gradient - flat(expected))
            <= 1e-3 * torch.linalg.vector_norm(flat(expected)) + 1e-6
        )


def test_points_of_another_form_are_refused() -> None:
    model = Classifier(SHAPES[0])
    points, batch = points_near(model, 2, 0), batch_of(SHAPES[0], 6)
    x, y = batch.x.view(2, 3, *DIGITS), batch.y.view(2, 3)
    for wrong in (
        (points[:, 1:], x, y),
        (points[0], x, y),
        (points[:1], x, y),
        (points, batch.x, y),
        (points, x[:, :2], y),
    ):
        with pytest.raises(ModelError):
            model.vectorised(*wrong)


# Scores


@shapes
def test_a_score_counts_every_example_in_evaluation_mode(shape) -> None:
    model, batches = Classifier(shape), [batch_of(shape, size, size) for size in (4, 1, 3)]
    model.gradient(batch_of(shape, 8), own(model))
    before = snapshot(model)
    score = model.score(iter(batches))
    assert_same(snapshot(model), before)
    assert (score.dtype, score.shape, score.device.type) == (torch.float64, (3,), "cpu")
    logits = torch.cat([model(batch.x) for batch in batches]).detach().double()
    y = torch.cat([batch.y for batch in batches])
    expected = [
        float(nn.functional.cross_entropy(logits, y, reduction="sum")),
        8,
        int((logits.argmax(1) == y).sum()),
    ]
    assert score.tolist() == pytest.approx(expected, rel=1e-5)
    assert model.score([]).tolist() == [0, 0, 0]


def test_training_fits_a_batch_and_its_score_shows_it() -> None:
    model, batch = Classifier(SHAPES[0]), batch_of(SHAPES[0], 20)
    for _ in range(200):
        gradients, _ = model.gradient(batch, own(model))
        for parameter, gradient in zip(own(model), gradients, strict=True):
            parameter.data.sub_(gradient, alpha=0.3)
    nll, examples, right = model.score([batch]).tolist()
    assert (examples, right) == (20, 20)
    assert nll < 2


# Refusals


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.zeros(2, 1, 8, 8), torch.tensor([0, 5]), "label 5 of a network with 5 classes"),
        (torch.zeros(2, 1, 8, 8), torch.tensor([-1, 0]), "label -1 of"),
        (torch.full((2, 1, 8, 8), np.nan), torch.tensor([0, 1]), "not finite"),
        (torch.zeros(2, 1, 8, 8, dtype=torch.float64), torch.tensor([0, 1]), "float64"),
        (torch.zeros(2, 1, 8, 8), torch.tensor([0, 1], dtype=torch.int32), "int32"),
        (torch.zeros(2, 1, 8, 9), torch.tensor([0, 1]), "Expected float32 .examples, 1, 8, 8."),
        (torch.zeros(3, 1, 8, 8), torch.tensor([0, 1]), "inputs and"),
        (torch.zeros(2, 1, 8, 8), torch.tensor([[0, 1]]), "labels"),
        (torch.zeros(0, 1, 8, 8), torch.tensor([], dtype=torch.int64), "at least one"),
    ],
)
def test_batches_of_another_form_are_refused(x, y, message) -> None:
    model = Classifier(normed)
    for use in (
        lambda batch: model.gradient(batch, own(model)),
        lambda batch: model.score([batch]),
    ):
        with pytest.raises(ModelError, match=message):
            use(Examples(x, y))


def test_foreign_parameters_are_refused() -> None:
    model, other = Classifier(normed), Classifier(normed)
    for wrt in ([], own(other)):
        with pytest.raises(ModelError, match="is empty or holds a parameter of another model"):
            model.gradient(batch_of(normed, 4), wrt)
