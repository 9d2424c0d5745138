"""Figures from sums, and what makes rows of a table unlike in budget."""

import math

import pytest
import torch

from coterie.evaluation import comparability, deviation, perplexity, row


def test_perplexity_is_the_exponential_of_the_mean_nll() -> None:
    assert perplexity(torch.tensor([3 * math.log(7), 3], dtype=torch.float64)) == pytest.approx(7)
    assert perplexity(torch.tensor([1e6, 1], dtype=torch.float64)) == math.inf


def test_the_deviation_is_that_of_a_sample() -> None:
    assert deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert deviation([5.0]) == 0


def line(method: str, trainable: int, active: int | None = None, flops: int = 100) -> dict:
    return {"method": method, "trainable_parameters": trainable, "active_parameters": active or trainable, "flops_per_token": flops}


def test_rows_of_one_budget_need_no_note() -> None:
    assert comparability([line("pretrained", 0, flops=50), line("fedavg", 980), line("comigs-1g1s", 1000)], "comigs-1g1s") == []


def test_rows_of_another_budget_are_named_with_what_differs() -> None:
    rows = [line("ffa-lora", 500), line("comigs-1gxs", 2000, 1000, 125), line("comigs-1g1s", 1000)]
    first, second = comparability(rows, "comigs-1g1s")
    assert first == "ffa-lora: -50% trainable parameters, -50% active parameters against comigs-1g1s: not an equal budget."
    assert second == "comigs-1gxs: +100% trainable parameters, +25% work per token against comigs-1g1s: not an equal budget."


def test_a_bound_that_sees_all_data_is_called_one() -> None:
    (note,) = comparability([line("local", 1000), line("centralized", 1000)], "local")
    assert "centralized" in note
    assert "bound" in note


def test_without_the_recipes_method_rows_are_held_against_the_first_that_trains() -> None:
    (note,) = comparability([line("pretrained", 0), line("local", 1000), line("ffa-lora", 500)], "comigs-1g1s")
    assert "against local" in note


def test_a_row_sums_up_its_seeds() -> None:
    def result(mean: float) -> dict:
        client = {"test": mean, "trainable_parameters": 10, "active_parameters": 10, "flops_per_token": 5, "bytes_up": 40, "bytes_down": 20}
        return {"mean": mean, "mean_synced": mean + 1, "rounds": 4, "wall_s": 2.0, "clients": {"ann": client}}

    found = row("local", [result(1.0), result(3.0)])
    assert (found["mean"], found["mean_synced"], found["clients"]) == (2.0, 3.0, {"ann": 2.0})
    assert (found["bytes_up_per_round"], found["bytes_down_per_round"]) == (10, 5)
    assert found["state_bytes"] is None  # an older result does not know it
