"""Figures from sums, and what makes rows of a table unlike in budget."""

import math

import pytest
import torch
from figures import as_json, typed

from coterie.core.metrics import (
    ACCURACY,
    PERPLEXITY,
    accuracy,
    best,
    better,
    change,
    deviation,
    perplexity,
    prediction,
    worst,
)
from coterie.core.result.rows import comparability, improved, lost, row, rows


def test_perplexity_is_the_exponential_of_the_mean_nll() -> None:
    assert perplexity(torch.tensor([3 * math.log(7), 3], dtype=torch.float64)) == pytest.approx(7)
    assert perplexity(torch.tensor([1e6, 1], dtype=torch.float64)) == math.inf


def test_the_deviation_is_that_of_a_sample() -> None:
    assert deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
    assert deviation([5.0]) == 0


def line(method: str, trainable: int, active: int | None = None, flops: int = 100) -> dict:
    return {
        "method": method,
        "trainable_parameters": trainable,
        "active_parameters": active or trainable,
        "flops_per_token": flops,
    }


def test_rows_of_one_budget_need_no_note() -> None:
    assert (
        comparability(
            typed(
                [line("pretrained", 0, flops=50), line("fedavg", 980), line("comigs-1g1s", 1000)]
            ),
            "comigs-1g1s",
        )
        == []
    )


def test_rows_of_another_budget_are_named_with_what_differs() -> None:
    rows = [line("ffa-lora", 500), line("comigs-1gxs", 2000, 1000, 125), line("comigs-1g1s", 1000)]
    first, second = comparability(typed(rows), "comigs-1g1s")
    assert (
        first
        == "ffa-lora: -50% trainable parameters, -50% active parameters against comigs-1g1s: the "
        "budgets differ."
    )
    assert (
        second
        == "comigs-1gxs: +100% trainable parameters, +25% work per token against comigs-1g1s: the "
        "budgets differ."
    )


def test_a_bound_that_sees_all_data_is_called_one() -> None:
    (note,) = comparability(typed([line("local", 1000), line("centralized", 1000)]), "local")
    assert "centralized" in note
    assert "bound" in note


def test_without_the_recipes_method_rows_are_held_against_the_first_that_trains() -> None:
    (note,) = comparability(
        typed([line("pretrained", 0), line("local", 1000), line("ffa-lora", 500)]), "comigs-1g1s"
    )
    assert "against local" in note


def test_a_row_sums_up_its_seeds() -> None:
    def result(mean: float) -> dict:
        client = {
            "test": mean,
            "trainable_parameters": 10,
            "active_parameters": 10,
            "flops_per_token": 5,
            "bytes_up": 40,
            "bytes_down": 20,
        }
        return {
            "mean": mean,
            "mean_synced": mean + 1,
            "rounds": 4,
            "wall_s": 2.0,
            "clients": {"ann": client},
        }

    found = as_json(row("local", typed([result(1.0), result(3.0)])))
    assert (found["mean"], found["mean_synced"], found["clients"]) == (2.0, 3.0, {"ann": 2.0})
    assert (found["bytes_up_per_round"], found["bytes_down_per_round"]) == (10, 5)
    assert found["state_bytes"] is None  # an older result does not know it


def test_seeds_that_end_at_different_rounds_count_with_their_rounds_and_the_most_privacy() -> None:
    spent = dict.fromkeys(("where", "sampling"), "") | {"delta": 1e-5, "noise": 1.0, "clip": 1.0}

    def result(rounds: int, epsilon: float | None) -> dict:
        figures = scored("fedavg", 0, None, ann=1)
        client = figures["clients"]["ann"] | {"bytes_up": 10 * rounds, "bytes_down": 0}
        privacy = spent | {"epsilon": epsilon}
        return figures | {"rounds": rounds, "clients": {"ann": client}, "privacy": privacy}

    short, long, endless = result(2, 1.0), result(10, 2.0), result(2, None)
    for results, epsilon in (((short, long), 2.0), ((long, short), 2.0), ((short, endless), None)):
        of_seeds = row("fedavg", typed(results))
        assert of_seeds.bytes_up_per_round == 10
        assert of_seeds.privacy is not None
        assert of_seeds.privacy.epsilon == epsilon


def test_each_metric_has_its_direction_unit_and_predictions() -> None:
    low, high = PERPLEXITY.about, ACCURACY.about
    assert (best([1, 2, 3], low), worst([1, 2, 3], low), better(1, 2, low)) == (1, 3, True)
    assert (best([1, 2, 3], high), worst([1, 2, 3], high), better(1, 2, high)) == (3, 1, False)
    assert not better(2, 2, low)
    assert not better(2, 2, high)
    assert (str(low), str(high)) == ("test perplexity", "test accuracy, %")
    assert (prediction(low), prediction(high)) == ("token", "example")
    assert change(90, 100, low) == (pytest.approx(-10), "%")
    assert change(70.5, 72, high) == (-1.5, "points")
    assert accuracy(torch.tensor([9.0, 8, 6])) == 75


def scored(method: str, seed: int, metric: dict | None, **clients: float) -> dict:
    costs = {"trainable_parameters": 10, "flops_per_token": 5, "bytes_up": 40, "bytes_down": 20}
    found = {
        "method": method,
        "seed": seed,
        "mean": 1.0,
        "mean_synced": 1.0,
        "rounds": 4,
        "wall_s": 2.0,
    }
    found["clients"] = {i: {"test": x, **costs} for i, x in clients.items()}
    return found | ({"metric": metric} if metric else {})


def test_improved_is_the_share_of_clients_and_seeds_that_beat_their_own_local_run() -> None:
    high = ACCURACY.about
    alone = [scored("local", 0, high, ann=50, ben=60), scored("local", 1, high, ann=70, ben=60)]
    own = [scored("cobo", 0, high, ann=51, ben=60), scored("cobo", 1, high, ann=69, ben=61)]
    assert improved(typed(own), typed(alone)) == 50
    assert improved(typed(own), typed(alone[:1])) is None  # Local lacks a seed
    assert improved(typed(alone), typed(alone)) is None
    low = [scored("local", 0, None, ann=50, ben=60)], [scored("cobo", 0, None, ann=51, ben=59)]
    assert improved(typed(low[1]), typed(low[0])) == 50


def test_rows_hold_every_method_against_local() -> None:
    high = ACCURACY.about
    found = as_json(
        rows(
            typed(
                [
                    scored(m, s, high, ann=50 + k, ben=60 + k)
                    for k, m in enumerate(("local", "cobo"))
                    for s in (0, 1)
                ]
            )
        )
    )
    assert [(r["method"], len(r["per_seed"]), r["improved"]) for r in found] == [
        ("local", 2, None),
        ("cobo", 2, 100),
    ]
    assert found[0]["between_clients"] == 5
    assert found[0]["metric"] == high.to_json()
    assert found[0]["weights_error"] is None


def test_an_unequal_number_of_iterations_is_said() -> None:
    (note,) = comparability(
        typed([line("local", 10) | {"iterations": 6000}, line("cobo", 10) | {"iterations": 600}]),
        "cobo",
    )
    assert note == "local: +900% local iterations against cobo: the budgets differ."


def test_the_oracle_is_called_a_bound() -> None:
    assert comparability(typed([line("oracle", 10), line("cobo", 10)]), "cobo") == [
        "oracle: is given the true clusters, which are unknown in practice: a bound."
    ]


def test_lost_replies_are_counted_over_seeds_and_told_by_client() -> None:
    results = [
        scored("fedavg", k, None, ann=1, ben=1) | {"lost": own}
        for k, own in enumerate(({"ben": 2}, {}, {"ann": 1, "ben": 3}))
    ]
    found = as_json(row("fedavg", typed(results)))
    assert found["lost"] == {"ann": 1, "ben": 5}
    assert (
        as_json(row("local", typed([scored("local", 0, None, ann=1)])))["lost"] == {}
    )  # an older result does not say
    assert comparability(
        typed([line("local", 10) | {"lost": {}}, line("fedavg", 10) | {"lost": found["lost"]}])
    ) == [
        "fedavg: 6 replies were lost, rejected as invalid or missing (ben 5, ann 1). See the "
        "lines of kind lost in metrics.jsonl."
    ]


def test_of_many_clients_only_those_that_lost_most_are_named() -> None:
    sentence = lost({f"c{k:02}": 1 + (k == 30) for k in range(40)})
    assert sentence.startswith("41 replies were lost")
    assert (
        "(c30 2, c00 1, c01 1, c02 1, c03 1, c04 1, c05 1, c06 1 and 32 other clients)" in sentence
    )
    assert lost({"ann": 1}).startswith("1 reply was lost")


def test_what_privacy_was_spent_is_said_once_of_rows_that_spent_alike() -> None:
    spent = {
        "epsilon": 3.912,
        "delta": 1e-5,
        "where": "central",
        "noise": 6.0,
        "clip": 8.0,
        "sampling": "30 exchanges",
        "covers": "this; not that",
    }
    rows = [line("pretrained", 0), *(line(m, 10) | {"privacy": spent} for m in ("fedavg", "ditto"))]
    rows.append(line("comigs-1g1s", 10) | {"privacy": spent | {"epsilon": None, "noise": 0.0}})
    assert comparability(typed(rows), titles={"ditto": "Ditto"}) == [
        "fedavg, Ditto: epsilon 3.91, delta 1e-05 (central, noise z = 6, clip C = 8): 30 "
        "exchanges. It covers this; not that.",
        "comigs-1g1s: no finite epsilon (no protection), delta 1e-05 (central, noise z = 0, "
        "clip C = 8): 30 exchanges. "
        "It covers this; not that.",
    ]
    assert (
        as_json(row("fedavg", typed([scored("fedavg", 0, None, ann=1) | {"privacy": spent}])))[
            "privacy"
        ]
        == spent
    )
