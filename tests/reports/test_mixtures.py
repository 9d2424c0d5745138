"""What a client's model is made of, in words and figures."""

from pathlib import Path

import pytest
from figures import typed
from rich.console import Console
from test_verdict import result

from coterie.reports.html import write_report
from coterie.reports.scores import made_of, mixtures
from coterie.reports.tables import mixture_tables


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"local": 0.59, "fedavg": 0.41}, "59 % its own, 41 % everybody's"),
        ({"local": 0.999, "fedavg": 0.001}, "99 % its own, 1 % everybody's"),
        ({"local": 0.0, "fedavg": 1.0}, "everybody's alone"),
        (
            {"fedavg": 0.25, "comigs-1g1s": 0.75, "local": 0.0},
            "25 % everybody's, 75 % CoMiGS-1G1S",
        ),
    ],
)
def test_weights_in_words(weights: dict[str, float], words: str) -> None:
    assert made_of(weights) == words


def mixed(clients: int = 2) -> dict:
    """A result of two parts: one client mixes them, the others keep one alone."""
    scores = {f"<introspection> {k}": 20.0 + k for k in range(clients)}
    whole = result("interpolation", scores)
    for k, client in enumerate(whole["clients"].values()):
        client["parts"] = {
            "local": {"weight": 0.6 if k == 0 else 0.0, "test": 30.0 + k, "valid": 1.0},
            "fedavg": {"weight": 0.4 if k == 0 else 1.0, "test": 20.0 + k, "valid": 1.0},
        }
    return whole


def test_a_table_has_each_clients_parts_and_what_they_would_give(tmp_path: Path) -> None:
    local = result("local", {f"<introspection> {k}": 30.0 for k in range(2)})
    ((title, (header, lines)),) = mixtures(typed([local, mixed()])).items()
    expected = "Interpolation, on average: 30 % its own, 70 % everybody's."
    assert title == expected
    assert header == ["client, made of", "Local", "FedAvg", "mixed"]
    assert [[cell.text for cell in line] for line in lines] == [
        ["<introspection> 0: 60 % its own, 40 % everybody's", "30.00", "20.00", "20.00"],
        ["<introspection> 1: everybody's alone", "31.00", "21.00", "21.00"],
    ]
    assert [cell.best for cell in lines[0]] == [False, False, True, True]
    console = Console(width=80, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in mixture_tables(typed([mixed()])):
        console.print(table)
    text = console.export_text().splitlines()
    assert max(map(len, text)) <= 80
    row = next(line for line in text if "introspection" in line)
    words = "<introspection> 0: 60 % its own, 40 % everybody's 30.00 20.00 20.00"
    assert " ".join(row.split()) == words
    write_report(tmp_path, typed([local, mixed()]), "")
    page = (tmp_path / "report.html").read_text()
    assert "Interpolation, on average: 30 % its own, 70 % everybody&#x27;s." in page
    assert "&lt;introspection&gt; 0: 60 % its own" in page


def test_of_many_clients_the_terminal_has_the_average_alone() -> None:
    (table,) = mixture_tables(typed([mixed(40)]))
    assert table.row_count == 0
    assert "on average" in str(table.title)
    assert not mixture_tables(typed([result("local", {"ann": 1.0})]))
