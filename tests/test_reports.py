"""What a terminal shows: tables and progress."""

import io
from collections.abc import Sequence

import pytest
from rich.console import Console

from coterie.methods import METHODS
from coterie.reports.terminal import Terminal, tables


def test_the_table_shows_deviations_only_over_seeds() -> None:
    rows = [
        {
            "method": m,
            "mean": x,
            "std": 0.5,
            "per_seed": [x] * seeds,
            "mean_synced": x,
            "clients": {"ann": x},
            "trainable_parameters": 12345,
            "active_parameters": 12345,
            "flops_per_token": 8_500_000,
            "bytes_up_per_round": 2000,
            "bytes_down_per_round": 0,
            "wall_s": 3.0,
        }
        for m, x, seeds in (("local", 2.0, 3), ("fedavg", 1.0, 1))
    ]
    text = shown(rows, 150)
    assert "2.00 ± 0.50" in text
    assert "1.00 ±" not in text
    assert "12,345" in text


def shown(rows: list[dict], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(rows, {name: entry.title for name, entry in METHODS.items()}):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("clients", "expected"), [(("reference", "network", "numbers", "introspection"), "44.44"), (range(100), "worst client")]
)
def test_tables_fit_a_narrow_terminal(clients: Sequence[object], expected: str) -> None:
    row = {"method": "comigs-1g1s", "mean": 44.44, "std": 0.01, "per_seed": [1, 2, 3], "mean_synced": 44.44}
    costs = {
        "trainable_parameters": 123456,
        "active_parameters": 123456,
        "flops_per_token": 8_500_000,
        "bytes_up_per_round": 9e5,
        "bytes_down_per_round": 9e5,
        "wall_s": 99.0,
    }
    text = shown([row | costs | {"clients": dict.fromkeys(map(str, clients), 44.44)}], 80)
    assert expected in " ".join(text.split())
    assert "…" not in text


def test_a_live_display_shows_rounds_loss_and_speed() -> None:
    console = Console(file=io.StringIO(), width=150, force_terminal=True)
    with Terminal(console, rows=2) as terminal:
        terminal.begin("Local", 2, 0, ["ann", "ben"])
        for round in range(2):
            for client in ("ann", "ben"):
                terminal.client(round, client, {"tokens": 100, "loss/generalist": 2.5, "loss/router": 9.9})
            terminal.round(round + 1)
        terminal.evaluating(2)
        terminal.evaluated(2, {"valid": 3.0, "test": 4.0})
        terminal.end({"mean": 4.0})
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[1/2] Local" in text
    assert "round 2/2" in text
    assert "test perplexity 4.00" in text
