"""What a terminal shows: tables and progress."""

import io
import json
import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from figures import typed
from reports.samples import result
from rich.console import Console

from coterie.core.metrics import ACCURACY, PERPLEXITY
from coterie.core.result import Evaluated, Result, TunedRow, Tuning, WordScores
from coterie.core.result.rows import row as rows_of
from coterie.data.splits import SPLITS
from coterie.data.summary import ClientSummary, DataSummary, SplitSummary
from coterie.methods import METHODS
from coterie.papers import page as papers
from coterie.papers.reproduced import Reproduced
from coterie.personal.classifier import Prediction
from coterie.personal.ui.terminal import show, show_classes
from coterie.personal.word_search import Word
from coterie.reports import progress as terminals
from coterie.reports import tuning
from coterie.reports.data import print_data
from coterie.reports.progress import Terminal
from coterie.reports.tables import evaluated, tables


def ended(mean: float) -> Result:
    """A result that has this mean."""
    return Result.from_json(result("fedavg", 2, 0.0, mean=mean))


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


def test_each_clients_deviation_over_seeds_is_shown_where_there_is_room() -> None:
    """Against statistics of the scores themselves."""
    scores = {"ann": (2.0, 4.0, 9.0), "ben": (1.0, 1.5, 2.0)}
    results = [
        Result.from_json(
            result("fedavg", 2, 2.0, {i: of[seed] for i, of in scores.items()}, seed=seed)
        )
        for seed in range(3)
    ]
    row = rows_of("fedavg", results)
    for client, of in scores.items():
        assert row.clients_std is not None
        assert row.clients_std[client] == pytest.approx(statistics.stdev(of))
    assert rows_of("fedavg", results[:1]).clients_std is None
    titles = {"fedavg": "FedAvg"}
    for width, wanted in ((80, True), (40, False)):
        console = Console(file=io.StringIO(), width=width)
        console.print(tables([row], titles, width)[-1])
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("5.00 ± 3.61" in text) is wanted
        assert "5.00" in text


def shown(rows: list[dict], width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    for table in tables(typed(rows), {name: entry.title for name, entry in METHODS.items()}, width):
        console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("clients", "expected"),
    [(("reference", "network", "numbers", "introspection"), "44.44"), (range(100), "worst client")],
)
def test_tables_fit_a_narrow_terminal(clients: Sequence[object], expected: str) -> None:
    row = {
        "method": "comigs-1g1s",
        "mean": 44.44,
        "std": 0.01,
        "per_seed": [1, 2, 3],
        "mean_synced": 44.44,
    }
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
                terminal.client(
                    round, client, {"tokens": 100, "loss/generalist": 2.5, "loss/router": 9.9}
                )
            terminal.round(round + 1)
        terminal.evaluating(2)
        terminal.evaluated(2, {"valid": 3.0, "test": 4.0})
        terminal.end(ended(4.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[1/2] Local" in text
    assert "round 2/2" in text
    assert "test perplexity 4.00" in text


def accurate(method: str, clients: Sequence[str], **figures: object) -> dict:
    """A row of a classifier whose clients have 70, 71, ... percent."""
    values = {i: 70.0 + k for k, i in enumerate(clients)}
    costs = {
        "trainable_parameters": 1,
        "active_parameters": 1,
        "flops_per_token": 9,
        "bytes_up_per_round": 9,
        "bytes_down_per_round": 9,
    }
    found = {
        "method": method,
        "metric": ACCURACY.about,
        "mean": 72.0,
        "std": 0.5,
        "per_seed": [1],
        "mean_synced": 72.0,
        "wall_s": 9.0,
    }
    beside = {"loss": 0.123, "between_clients": 3.4, "improved": None, "weights_error": None}
    return found | costs | beside | {"clients": values} | figures


def test_columns_of_clients_give_way_to_the_best_and_the_worst_where_they_do_not_fit() -> None:
    eight = [f"c{k}-{j}" for k in range(4) for j in range(2)]
    narrow, broad = (shown([accurate("cobo", eight)], width) for width in (60, 80))
    assert "best client" in narrow
    assert "c0-0" not in narrow
    assert narrow[narrow.rindex("CoBo") :].split()[:5] == [
        "CoBo",
        "72.00",
        "77.00",
        "70.00",
        "72.00",
    ]
    assert "c3-1" in broad
    assert broad[broad.rindex("CoBo") :].split()[2:10] == [f"{70 + k}.00" for k in range(8)]
    assert "70.00" in shown([accurate("cobo", eight[:4])], 80)
    assert "c1-1" in shown([accurate("cobo", eight[:4])], 80)


@pytest.mark.parametrize(
    "clients",
    [
        ["reference", "network", "numbers", "introspection"],  # the quickstart's
        ["ann.miller@example.org", "ben", "customer_support-emea"],
        ["dermatologist", "ophthalmologist", "endocrinologist"],
    ],
)
def test_no_name_is_broken_within_a_word_at_80_columns(clients: list[str]) -> None:
    figures = {"mean": 548.87, "mean_synced": 548.87, "clients": dict.fromkeys(clients, 865.97)}
    names = ("pretrained", "interpolation", "comigs-1g1s")
    lines = shown([accurate(name, clients) | figures for name in names], 80).splitlines()
    assert max(map(len, lines)) <= 80
    end = next(k for k, line in enumerate(lines) if "Pretrained" in line and "865.97" in line)
    begin = max(k for k in range(end) if "accuracy" in lines[k])
    words = set(re.findall(r"[^\W_]+", " ".join(lines[begin:end])))
    assert {word for name in clients for word in re.findall(r"[^\W_]+", name)} <= words


def test_beside_the_metric_stands_what_is_known() -> None:
    text = shown(
        [accurate("local", ["ann"]), accurate("cobo", ["ann"], improved=87.5, weights_error=0.25)],
        80,
    )
    assert "test accuracy, %" in text
    assert "/example" in text
    assert "token" not in text
    beside = text[text.index("± between") :]
    lines = [
        line.split() for line in beside.splitlines() if line.strip().startswith(("Local", "CoBo"))
    ]
    assert lines[:2] == [["Local", "0.123", "3.40"], ["CoBo", "0.123", "3.40", "88", "0.25"]]
    assert "Imp.%" not in shown([accurate("local", ["ann"])], 80)


def test_plain_progress_is_a_line_every_other_second_and_the_last_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr(terminals.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=150)
    with Terminal(console, rows=1) as terminal:
        terminal.begin("CoBo", 600, 0, ["ann"], ACCURACY.about)
        for round in range(600):
            clock[0] += 2 / 128
            terminal.client(round, "ann", {"tokens": 20, "loss/experts": 0.5})
            terminal.evaluated(round + 1, {"valid": 61.0, "test": 62.5})
            terminal.round(round + 1)
        terminal.end(ended(62.5))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines if line.startswith("  round")] == [
        "128/600",
        "256/600",
        "384/600",
        "512/600",
        "600/600",
    ]
    assert [line.split()[2] for line in lines if line.startswith("  after")] == [
        "128:",
        "256:",
        "384:",
        "512:",
        "600:",
    ]
    assert "1,280 examples/s" in lines[-1]
    assert lines[-2] == "  after round 600: valid accuracy 61.00 %, test accuracy 62.50 %"


NAMES = (
    "marketing-department/newsletter.team@example.org",
    "research and development, Reykjavík",
    "a_very_long_name_of_a_client.which-has-many-parts",
)


def data_tables(console: Console) -> str:
    split = SplitSummary(12_345, 1_234_567, 1_234_567, 1234, 12_345)
    client = ClientSummary(dict.fromkeys(SPLITS, split), 1, 2, 3, 4, 5, {}, {}, {})
    print_data(console, DataSummary("", [], dict.fromkeys(NAMES, client)))
    return "1,234,567 12,345 documents longest equal"


def scores_of_given_data(console: Console) -> str:
    words = WordScores(100, 23.45, 34.56, 45.67)
    endless = evaluated({"ann": Evaluated(perplexity=float("inf"), tokens=2)}, console.width)
    assert [str(cell) for cell in endless.columns[1].cells] == ["inf"]
    scores = Evaluated(perplexity=1234.56, tokens=1_234_567, words=words, questions=1000)
    console.print(evaluated(dict.fromkeys(NAMES, scores), console.width))
    return "1,234.56 1,234,567 23.45 45.67 keystrokes 1,000"


def chosen_settings(console: Console) -> str:
    chosen = {f"training.experts.{name}": 0.00123 for name in ("lr", "weight_decay", "momentum")}
    row = TunedRow(
        method="comigs-1g1s",
        recipe="r",
        chosen=chosen,
        rounds=1000,
        valid=1234.56,
        runs=100,
        iterations=1_234_567,
        at_edge=list(chosen),
    )
    tuned = Tuning(recipe="r", metric=PERPLEXITY.about, seeds=[0], effort="", rows=(row,))
    console.print(tuning.terminal(tuned, console.width))
    return "CoMiGS-1G1S 1,234.56 momentum 1,234,567"


def a_paper(console: Console) -> str:
    file = Path(__file__).parents[2] / "benchmarks" / "results" / "ddome-table1-small.json"
    found = Reproduced.from_json(json.loads(file.read_text()))
    for table in papers.terminal(found, console.width):
        console.print(table)
    return "ensembles what 93.38 aligned 93.42 0.26"


def classes_of_samples(console: Console) -> str:
    predicted = {name: [Prediction(0, "a_class-of_letters", 0.1234, 2)] for name in NAMES}
    show_classes(console, ["photographs/letter_a.png"], predicted)
    return "photographs png letters 12.3%"


def next_words(console: Console) -> str:
    words = [Word(word, word, 0.1234, (0.5, 0.5)) for word in ("introspection", "thread-safe")]
    model = SimpleNamespace(speaker=lambda word: "G1")
    show(console, dict.fromkeys(NAMES, model), dict.fromkeys(NAMES, words * 2), "The")  # type: ignore[arg-type]
    return "introspection thread 12.3% G1"


@pytest.mark.parametrize(
    "table",
    [
        data_tables,
        scores_of_given_data,
        chosen_settings,
        a_paper,
        classes_of_samples,
        next_words,
    ],
)
def test_no_table_breaks_a_word_or_a_figure_at_80_columns(
    table: Callable[[Console], str],
) -> None:
    console = Console(file=io.StringIO(), width=80)
    figures = table(console)
    written = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    text = "\n".join(line for line in written if not line.startswith("- "))  # sentences wrap
    assert max(map(len, text.splitlines())) <= 80
    assert text.count("…") == (table is next_words)  # the text that goes on
    names = NAMES if "marketing" in text else ()
    assert bool(names) is (table not in (chosen_settings, a_paper))
    shown_words = set(re.findall(r"[^\W_]+", text))
    assert {word for name in names for word in re.findall(r"[^\W_]+", name)} <= shown_words
    assert set(figures.split()) <= {*shown_words, *text.split()}
