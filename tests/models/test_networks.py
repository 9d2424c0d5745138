"""Networks: their sizes, what their heads see, shortcuts, and trained weights of files."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d, cross_entropy, linear

from coterie.core.errors import CheckpointError, ModelError
from coterie.data.examples import ExampleSplit
from coterie.data.images import Cifar10
from coterie.data.store import default_cache
from coterie.models import network_tensors
from coterie.models.classifier import Classifier
from coterie.models.networks import NetworkShape, channels_last

REPOSITORY = Path(__file__).parents[2]
DIGITS, MNIST, CIFAR = (1, 8, 8), (1, 28, 28), (3, 32, 32)
SMALL = {"mlp": 4, "cnn": 2, "resnet9": 2, "resnet20": 2, "resnet56": 2, "resnet34": 2}


def images(inputs: tuple[int, ...], count: int = 3) -> Tensor:
    return torch.randn(count, *inputs, generator=torch.Generator().manual_seed(0))


def test_images_of_one_channel_are_convolved_channels_last_too() -> None:
    x = torch.rand(2, 1, 3, 4)
    y = channels_last(x)
    assert torch.equal(x, y)
    assert y.stride() == (12, 1, 4, 1)
    assert conv2d(y, torch.rand(5, 1, 1, 1)).is_contiguous(memory_format=torch.channels_last)


def learned(network: nn.Module) -> nn.Module:
    """The same network with running statistics and norms that are no identities."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in network.state_dict().items():
        if "bn" in name or "running" in name:
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return network


@pytest.fixture(scope="session")
def resnets() -> Path:
    """The folder of CIFAR-10 ResNets, or a skip."""
    folder = (
        Path(os.environ.get("COTERIE_DATA", REPOSITORY.parent / "shared/data")).parent
        / "models/cifar10_resnets"
    )
    if not folder.is_dir():
        pytest.skip(f"no trained networks at {folder}")
    return folder


@pytest.mark.parametrize(
    ("network", "parameters"),
    [("resnet20", 269_722), ("resnet56", 853_018), ("resnet34", 21_282_122)],
)
def test_sizes_are_the_published_ones(network, parameters) -> None:
    shape = NetworkShape(network, CIFAR, 10)
    assert sum(p.numel() for p in shape.build("meta").parameters()) == parameters


@pytest.mark.parametrize("network", SMALL)
def test_a_network_without_a_width_has_its_own(network) -> None:
    own = 16 if network in ("resnet20", "resnet56") else 64
    shapes = [NetworkShape(network, CIFAR, 10, width=width) for width in (None, own, own + 1)]
    default, same, other = (
        [tuple(p.shape) for p in shape.build("meta").parameters()] for shape in shapes
    )
    assert default == same
    assert (default == other) == (network == "mlp")


@pytest.mark.parametrize("inputs", [DIGITS, MNIST, (3, 9, 6), (2, 1, 1)])
@pytest.mark.parametrize("norm", ["batch", "group", "none"])
@pytest.mark.parametrize("network", SMALL)
def test_a_network_is_its_head_on_its_features(network, norm, inputs) -> None:
    model, x = (
        NetworkShape(network, inputs, 5, hidden=(6, 4), norm=norm, width=SMALL[network]).build(),
        images(inputs),
    )
    for mode in (True, False):
        model.train(mode)
        features = model.features(x)
        assert features.shape == (3, model.head.in_features)
        assert torch.equal(linear(features, model.head.weight, model.head.bias), model(x))
    gradients = torch.autograd.grad(
        cross_entropy(model(x), torch.tensor([0, 1, 2])), list(model.parameters())
    )
    assert all(gradient.isfinite().all() for gradient in gradients)
    kinds = {"batch": nn.BatchNorm2d, "group": nn.GroupNorm}
    found = {
        kind
        for kind, layer in kinds.items()
        if any(isinstance(module, layer) for module in model.modules())
    }
    assert found == ({norm} - {"none"} if network != "mlp" else set())


@pytest.mark.parametrize(
    ("shape", "width"),
    [
        (NetworkShape("mlp", DIGITS, 10), 64),
        (NetworkShape("mlp", DIGITS, 10, hidden=()), 64),
        (NetworkShape("mlp", DIGITS, 10, hidden=(7, 3)), 3),
        (NetworkShape("cnn", CIFAR, 10), 8192),
        (NetworkShape("resnet9", CIFAR, 10), 512),
        (NetworkShape("resnet20", CIFAR, 10), 64),
        (NetworkShape("resnet56", CIFAR, 10, width=8), 32),
        (NetworkShape("resnet34", CIFAR, 10), 512),
    ],
)
def test_the_number_of_features_needs_no_values(shape, width) -> None:
    assert shape.build("meta").head.in_features == width


def test_features_of_an_mlp_without_hidden_layers_are_the_pixels() -> None:
    x = images(DIGITS)
    assert torch.equal(NetworkShape("mlp", DIGITS, 10, hidden=()).build().features(x), x.flatten(1))


@pytest.mark.parametrize(
    ("network", "stages"), [("resnet20", [3, 3, 3]), ("resnet34", [3, 4, 6, 3])]
)
@pytest.mark.parametrize("inputs", [DIGITS, (3, 9, 6)])
def test_a_resnet_is_that_of_he_et_al(network, stages, inputs) -> None:
    """A naive formulation on the named tensors: option A where there is no shortcut in them,
    option B where there is.
    """
    model = learned(NetworkShape(network, inputs, 5, width=4).build()).eval()
    tensors, x = model.state_dict(), images(inputs)

    def convolved(x: Tensor, conv: str, norm: str, stride: int = 1) -> Tensor:
        weight = tensors[f"{conv}.weight"]
        x = conv2d(x, weight, stride=stride, padding=weight.shape[2] // 2)
        return batch_norm(
            x,
            *(
                tensors[f"{norm}.{name}"]
                for name in ("running_mean", "running_var", "weight", "bias")
            ),
            eps=1e-5,
        )

    expected = convolved(x, "conv1", "bn1").relu()
    for stage, depth in enumerate(stages, 1):
        for number in range(depth):
            block, stride = f"layer{stage}.{number}", 2 if stage > 1 and number == 0 else 1
            inner = convolved(expected, f"{block}.conv1", f"{block}.bn1", stride).relu()
            inner = convolved(inner, f"{block}.conv2", f"{block}.bn2")
            if f"{block}.shortcut.0.weight" in tensors:
                expected = convolved(expected, f"{block}.shortcut.0", f"{block}.shortcut.1", stride)
            elif stride == 2:
                padded = torch.zeros_like(inner)
                quarter = inner.shape[1] // 4
                padded[:, quarter:-quarter] = expected[:, :, ::2, ::2]
                expected = padded
            expected = (expected + inner).relu()
    expected = expected.flatten(2).mean(dim=2)
    torch.testing.assert_close(model.features(x), expected)
    assert ("layer2.0.shortcut.0.weight" in tensors) == (network == "resnet34")


# Files


@pytest.mark.parametrize("network", ["resnet20", "resnet56"])
def test_published_weights_load_under_their_own_names(resnets, network) -> None:
    path = resnets / f"{network}.safetensors"
    found = network_tensors.load(path, NetworkShape(network, CIFAR, 10))
    expected = load_file(path)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_published_resnet20_is_as_accurate_as_it_is_said_to_be(resnets, data_root) -> None:
    shape = NetworkShape("resnet20", CIFAR, 10)
    found = Cifar10(root=data_root).images(default_cache())
    imagenet = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    split = ExampleSplit("test", found.test, found.test_labels, np.arange(2000), 0, *imagenet, 10)
    _, count, right = (
        Classifier(shape, start=network_tensors.load(resnets / "resnet20.safetensors", shape))
        .score(split.scoring(250))
        .tolist()
    )
    assert right / count == pytest.approx(0.9175, abs=0.001)


def test_a_file_of_another_network_is_refused_by_its_first_tensor(tmp_path) -> None:
    shape, path = NetworkShape("resnet20", DIGITS, 10, width=2), tmp_path / "weights.safetensors"
    own = dict(shape.build().state_dict())

    def loaded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        save_file(tensors, path)
        return network_tensors.load(path, shape)

    counted = loaded(own | {"bn1.num_batches_tracked": torch.tensor(7)})
    assert counted.keys() == own.keys()
    for wrong, message in (
        (
            own | {"fc.weight": torch.zeros(1), "zz": torch.zeros(1)},
            "weights.safetensors: unexpected tensor 'fc.weight' .2 in all",
        ),
        (
            {name: tensor for name, tensor in own.items() if "bn2" not in name},
            "tensor 'layer1.0.bn2.bias' is missing",
        ),
        (
            own | {"linear.weight": torch.zeros(100, 8)},
            r"'linear.weight' is float32\[100, 8\], expected float32\[10, 8\]",
        ),
        (own | {"conv1.weight": own["conv1.weight"].half()}, "'conv1.weight' is float16"),
        (
            own | {"linear.bias": torch.full((10,), torch.nan)},
            "'linear.bias' holds values that are not finite",
        ),
    ):
        with pytest.raises(ModelError, match=message):
            loaded(wrong)
    path.write_bytes(path.read_bytes()[:100])
    for missing in (path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=missing.name):
            network_tensors.load(missing, shape)
