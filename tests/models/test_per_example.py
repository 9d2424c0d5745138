"""Gradients of each example by one backward pass: those of a batch of that example alone,
whatever the model is made of.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_language_model import LAYOUTS, filled, ids, parameters
from tiny_bases import FAMILIES
from torch import nn

from coterie.core.errors import ModelError
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

MORE = {
    "one factor frozen": Layout(rank=2, frozen_a=True),
    "ranks of their own": Layout(rank=2, mlp_rank=3),
}
CASES = {(family, name): layout for family in FAMILIES for name, layout in (LAYOUTS | MORE).items()}


def assert_rows_are_alone(model, batch, rows, wrt) -> None:
    """Compare each row's gradients with those of a batch of it alone."""
    found, stats = model.per_example(batch, wrt)
    losses = []
    for row, alone in enumerate(rows):
        wanted, own = model.gradient(alone, wrt)
        losses.append(own["loss"])
        for gradients, expected in zip(found, wanted, strict=True):
            assert (gradients[row] - expected).norm() <= 1e-4 * expected.norm() + 1e-7
    torch.testing.assert_close(stats["loss"], torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_each_row_has_the_gradients_of_a_batch_of_it_alone(case) -> None:
    model, batch = filled(case[0], CASES[case]), ids()
    assert_rows_are_alone(model, batch, batch.split(1), parameters(model))


@pytest.mark.parametrize("roles", [(GENERALIST,), (SPECIALIST, ROUTER)])
def test_roles_are_as_they_are_with_all_the_others(roles) -> None:
    model, batch = filled("llama", LAYOUTS["1G3S"]), ids()
    assert_rows_are_alone(model, batch, batch.split(1), parameters(model, *roles))


def test_dropout_stays_off_since_masks_are_no_secret() -> None:
    layout = Layout(rank=2)
    model, dry = filled("llama", replace(layout, dropout=0.5)), filled("llama", layout)
    for found, wanted in zip(
        model.per_example(ids(), parameters(model))[0],
        dry.per_example(ids(), parameters(dry))[0],
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)


def test_nothing_of_the_model_is_changed() -> None:
    model = filled("gpt2", Layout(rank=2))
    before = {
        name: (p.detach().clone(), p.requires_grad) for name, p in model.adapter.named_parameters()
    }
    model.per_example(ids(), parameters(model, GENERALIST))
    for name, p in model.adapter.named_parameters():
        assert torch.equal(p, before[name][0])
        assert p.requires_grad == before[name][1]
        assert p.grad is None


def test_what_is_not_of_the_model_is_refused() -> None:
    model = filled("gpt2", Layout(rank=2))
    for wrt in ([], [nn.Parameter(torch.zeros(2))]):
        with pytest.raises(ModelError, match="parameter of another model"):
            model.per_example(ids(), wrt)


@pytest.mark.parametrize(
    "shape",
    [
        NetworkShape("mlp", (1, 4, 4), 5, hidden=(7,)),
        NetworkShape("cnn", (2, 8, 8), 5, norm="group", width=4),
        NetworkShape("cnn", (2, 8, 8), 5, norm="none", width=4),
        NetworkShape("resnet9", (2, 16, 16), 5, norm="group", width=4),
        NetworkShape("resnet20", (2, 8, 8), 5, norm="group", width=4),
    ],
    ids=lambda shape: f"{shape.network}-{shape.norm}",
)
def test_each_image_has_the_gradients_of_a_batch_of_it_alone(shape) -> None:
    random = torch.Generator().manual_seed(0)
    model = Classifier(shape)
    batch = Examples(
        torch.randn(6, *shape.inputs, generator=random), torch.from_numpy(np.arange(6) % 5)
    )
    wrt = list(model.parameters_by_role[GENERALIST].values())
    assert_rows_are_alone(model, batch, batch.split(1), wrt)


def test_where_examples_count_for_each_other_there_are_none() -> None:
    assert not Classifier(NetworkShape("cnn", (1, 8, 8), 3, norm="batch")).separable
