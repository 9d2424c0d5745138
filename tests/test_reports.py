"""What people see: the table in a terminal, and the report."""

import io
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from coterie.methods import METHODS
from coterie.reports.html import write_report
from coterie.reports.terminal import Terminal, tables

CLIENTS = {"ann": 20.0, "<b>ben</b>": 30.0}


def result(method: str, rounds: int, shift: float) -> dict:
    evaluations = [
        {"round": r, "iteration": 10 * r, "clients": {i: {"valid": x, "test": x + shift - r} for i, x in CLIENTS.items()}}
        for r in range(0 if rounds == 0 else 1, rounds + 1)
    ]
    last = evaluations[-1]["clients"]
    costs = {"trainable_parameters": 1000, "flops_per_token": 2_500_000, "bytes_up": 4000, "bytes_down": 4000}
    return {
        "method": method,
        "recipe": "r",
        "seed": 0,
        "rounds": rounds,
        "mean": sum(c["test"] for c in last.values()) / 2,
        "mean_synced": 25.0,
        "clients": {i: {**values, "test_synced": 25.0, **costs} for i, values in last.items()},
        "evaluations": evaluations,
        "wall_s": 12.0,
        "versions": {"coterie": "0", "torch": "2"},
        "machine": {"device": "cpu", "dtype": "float32", "threads": 2},
    }


def test_the_report_is_one_file_without_anything_from_elsewhere(tmp_path: Path) -> None:
    write_report(
        tmp_path, [result("pretrained", 0, 9.0), result("local", 4, 5.0), result("comigs-1g1s", 4, 0.0)], "four <i>unlike</i> clients"
    )
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert "<b>ben" not in page
    assert "<i>unlike" not in page
    for expected in ("Pretrained", "Local", "CoMiGS-1G1S", "21.00", "1.0", "<svg"):
        assert expected in page
    assert page.count("<tr class=best>") == 1


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
