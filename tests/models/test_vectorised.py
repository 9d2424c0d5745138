"""Many networks at once: running statistics, taking turns, and where it is chosen."""

import pytest
import torch
from torch import Tensor, nn

from coterie.core.errors import ModelError
from coterie.core.roles import GENERALIST
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.network_tensors import Bounds
from coterie.models.networks import NetworkShape

DIGITS, CIFAR = (1, 8, 8), (3, 32, 32)
SHAPES = [
    NetworkShape("cnn", DIGITS, 5, width=4),
    NetworkShape("resnet9", DIGITS, 4, width=2),
    NetworkShape("resnet20", (3, 6, 5), 4, width=2),
    NetworkShape("resnet34", DIGITS, 3, width=1),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.network)


def narrow_for(shape: NetworkShape, points: int) -> Classifier:
    """A classifier on a device that has room for so many points at once, or for none, which is as
    much as for one.
    """
    model = Classifier(shape)
    one = 3 * 4 * model.trainable_parameters + 2 * 6 * sum(model._stacked._maps)
    model._stacked._bounds = Bounds(0, points * one)
    return model


def problem(model: Classifier, count: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Points, inputs and labels."""
    torch.manual_seed(count)
    start = torch.cat([tensor.flatten() for tensor in model.initial(GENERALIST, 1).values()])
    x, y = (
        torch.randn(count, size, *model.shape.example().shape[1:]),
        torch.randint(model.shape.classes, (count, size)),
    )
    return start + 0.05 * torch.randn(count, len(start)), x, y


def near(found: Tensor, expected: Tensor) -> None:
    """Normalising by the statistics of few pixels magnifies rounding: the difference, beside the
    size of the whole.
    """
    assert (
        torch.linalg.vector_norm(found - expected)
        <= 1e-3 * torch.linalg.vector_norm(expected) + 1e-6
    )


@shapes
def test_running_statistics_of_each_point_follow_its_own_batch(shape: NetworkShape) -> None:
    model = Classifier(shape)
    points, x, y = problem(model, 3, 6)
    running = torch.rand(3, sum(t.numel() for t in model.buffers.values())) + 0.5
    networks = [shape.build().train() for _ in points]  # PyTorch's own, one by one
    for network, point, values in zip(networks, points, running, strict=True):
        nn.utils.vector_to_parameters(point, network.parameters())
        nn.utils.vector_to_parameters(values.clone(), network.buffers())
    shared = {name: buffer.clone() for name, buffer in model.buffers.items()}
    for _ in range(2):
        gradients, stats = model.vectorised(points, x, y, running)
        for k, network in enumerate(networks):
            logits = network(x[k])
            loss = nn.functional.cross_entropy(logits, y[k])
            expected = torch.autograd.grad(loss, list(network.parameters()))
            near(gradients[k], torch.cat([gradient.flatten() for gradient in expected]))
            torch.testing.assert_close(stats["loss"][k], loss.detach(), rtol=1e-4, atol=1e-5)
            assert stats["accuracy"][k] == (logits.argmax(dim=1) == y[k]).float().mean()
            torch.testing.assert_close(
                running[k],
                torch.cat([b.flatten() for b in network.buffers()]),
                rtol=1e-4,
                atol=1e-5,
            )
    assert all(torch.equal(buffer, shared[name]) for name, buffer in model.buffers.items())
    assert not any(module.training for module in model.network.modules())


@shapes
@pytest.mark.parametrize("room", [0, 1, 2, 5])
def test_points_that_take_turns_are_points_at_once(shape: NetworkShape, room: int) -> None:
    model, narrow = Classifier(shape), narrow_for(shape, room)
    sizes = narrow._stacked.at_once(6), model._stacked.at_once(6)
    assert (sizes[0], sizes[1] > 5) == (max(1, room), True)
    points, x, y = problem(model, 5, 6)
    running = torch.ones(5, sum(t.numel() for t in model.buffers.values()))
    turns, at_once = running.clone(), running.clone()
    found, stats = narrow.vectorised(points, x, y, turns)
    expected, same = model.vectorised(points, x, y, at_once)
    near(found, expected)
    torch.testing.assert_close(stats, same, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(turns, at_once, rtol=1e-4, atol=1e-5)
    assert not torch.equal(turns, running)


@pytest.mark.parametrize("running", [None, 1.0])
def test_one_example_has_no_statistics_at_once_either(running: float | None) -> None:
    model = Classifier(SHAPES[1])
    points, x, y = problem(model, 2, 1)
    own = None if running is None else torch.ones(2, sum(t.numel() for t in model.buffers.values()))
    with pytest.raises(ModelError, match=r"one example has no statistics.*\n.*batch_size"):
        model.vectorised(points, x, y, own)
    assert not any(module.training for module in model.network.modules())
    before = {name: buffer.clone() for name, buffer in model.buffers.items()}
    model.gradient(
        Examples(torch.randn(4, *DIGITS), torch.zeros(4, dtype=torch.int64)),
        list(model.network.parameters()),
    )
    assert not any(
        torch.equal(buffer, before[name]) for name, buffer in model.buffers.items()
    )  # they are tracked again


def test_what_layers_put_out() -> None:
    assert Classifier(NetworkShape("mlp", DIGITS, 10, (12, 8)))._stacked._maps == [
        4 * 12,
        4 * 8,
        4 * 10,
    ]
    convolution, pooled = 4 * 3 * 64, 4 * 3 * 16
    second, last = 4 * 6 * 16, 4 * 6 * 4
    expected = [
        *[convolution] * 2,
        *[pooled] * 2,
        *[second] * 2,
        *[last] * 2,
        last,
        4 * 10,
    ]  # convolution, norm, pooling, ReLU, twice; flat; head
    assert Classifier(NetworkShape("cnn", DIGITS, 10, width=3))._stacked._maps == expected


def test_small_networks_gain_on_a_cpu_and_larger_ones_elsewhere() -> None:
    small, large = NetworkShape("cnn", DIGITS, 10, width=8), NetworkShape("resnet9", CIFAR, 100)
    perceptron = NetworkShape("mlp", CIFAR, 100, (1024, 1024))
    assert all(Classifier(shape, "meta").stacks for shape in (small, large, perceptron))
    assert [Classifier(small).gains(size) for size in (8, 20, 512)] == [True, True, False]
    assert not Classifier(large).gains(8)
    assert [Classifier(large, "meta").gains(size) for size in (8, 20, 256)] == [
        True,
        True,
        False,
    ]  # a stand-in for any other device
    assert Classifier(perceptron).gains(10**6)
