"""What a table says in one sentence: whoever wins, by what is measured, never by what was hoped."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from figures import as_json, typed
from rich.console import Console
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.cli.train import _show
from coterie.core.metrics import ACCURACY, PERPLEXITY
from coterie.core.result import WordScores
from coterie.core.result.rows import row
from coterie.reports.html import write_report
from coterie.reports.verdict import verdict


def result(
    method: str, clients: dict[str, float], seed: int = 0, groups: dict[str, float] | None = None
) -> dict:
    """A result of a method with these scores; of groups, the clients' names begin with their
    group's.
    """
    costs = {
        "trainable_parameters": 100,
        "active_parameters": 100,
        "flops_per_token": 10,
        "bytes_up": 0,
        "bytes_down": 0,
        "state_bytes": 0,
    }
    group = {i: {"group": i.rstrip("0123456789")} for i in clients} if groups else {}
    scores = {
        i: {"test": x, "test_loss": 1.0, "test_synced": x, "valid": x, **costs, **group.get(i, {})}
        for i, x in clients.items()
    }
    mean = next(iter(groups.values())) if groups else sum(clients.values()) / len(clients)
    entry = {"round": 2, "iteration": 4, "valid": mean, "test": mean, "clients": scores} | (
        {"groups": groups} if groups else {}
    )
    return {
        "method": method,
        "recipe": "folders",
        "seed": seed,
        "rounds": 2,
        "metric": (ACCURACY if groups else PERPLEXITY).about,
        "mean": mean,
        "mean_loss": 1.0,
        "mean_synced": mean,
        "best": mean,
        "best_of_last_ten": mean,
        "clients": scores,
        "training": None,
        "groups": groups,
        "labels": None,
        "anchors": None,
        "clusters": None,
        "evaluations": [entry],
        "lost": {},
        "privacy": None,
        "wall_s": 1.0,
        "machine": {"device": "cpu", "dtype": "float32", "threads": 1},
        "versions": {"coterie": "0", "torch": "0", "python": "3"},
    }


def line(method: str, *per_client: float, seeds: tuple[float, ...] = (0.0,)) -> dict:
    """A row over seeds, each of which moves all clients alike."""
    return as_json(
        row(
            method,
            typed(
                [
                    result(method, {f"c{k}": x + shift for k, x in enumerate(per_client)}, n)
                    for n, shift in enumerate(seeds)
                ]
            ),
        )
    )


OURS = "comigs-1g1s"


def test_a_loss_is_called_one_and_something_is_advised() -> None:
    said = verdict(
        typed([line("pretrained", 50, 50, 50), line("local", 20, 21, 22), line(OURS, 30, 31, 32)]),
        OURS,
    )
    assert said.startswith(
        "On these data Local is better than CoMiGS-1G1S for all 3 clients (21.00 against 31.00)"
    )
    assert "share less, or keep the local models. Or mix the predictions of Local and" in said
    assert "--set method.name=interpolation" in said
    assert "One seed" in said


def test_a_win_names_whom_it_beats() -> None:
    said = verdict(
        typed([line("local", 20, 21, 22), line("fedavg", 19, 30, 30), line(OURS, 10, 11, 12)]), OURS
    )
    assert said.startswith(
        "On these data CoMiGS-1G1S is better than Local, the best other row, for all 3 clients "
        "(11.00 against 21.00)."
    )


def test_what_a_keyboard_saves_is_said_where_it_was_measured() -> None:
    rows = typed([line("local", 20, 21, 22), line(OURS, 10, 11, 12)])
    words = [WordScores(20.0, 5, 10, saved) for saved in (31.2, 40.9)]
    measured = [replace(row, words=scores) for row, scores in zip(rows, words, strict=True)]
    assert verdict(measured, OURS).endswith(
        "A keyboard with its model saves a client 41 % of keystrokes with CoMiGS-1G1S and 31 % "
        "with Local, measured on 20 words of each."
    )
    assert "keystrokes" not in verdict(rows, OURS)


def test_a_win_on_average_says_for_how_many() -> None:
    for own in (OURS, "comigs"):
        said = verdict(typed([line("local", 20, 21, 22), line(own, 10, 11, 23)]), own)
        assert "on average, for 2 of 3 clients" in said
        assert "--set method.name=interpolation" in said


def test_clients_without_a_difference_are_no_loss() -> None:
    """A mixture that is one part alone scores as that part."""
    mixed = [line("local", 20, 21, 22), line("interpolation", 10, 21, 22)]
    said = verdict(typed(mixed), "interpolation")
    assert "for 1 of 3 clients, and as good for the others (" in said
    assert "Keep its models: they are under clients/." in said
    mixed = [line("local", 20, 21, 22), line("interpolation", 10, 21, 23)]
    said = verdict(typed(mixed), "interpolation")
    assert "on average, for 1 of 3 clients" in said
    assert "see the table for the others" in said


def test_to_mix_predictions_is_advised_where_it_is_new_and_needed() -> None:
    rows = [line("local", 20, 21, 22), line(OURS, 10, 11, 12)]
    assert "method.name=interpolation" not in verdict(typed(rows), OURS)  # best for all
    rows = [line("local", 20, 21, 22), line("interpolation", 9, 12, 23), line(OURS, 10, 11, 23)]
    assert "Or mix" not in verdict(typed(rows), OURS)
    assert "Or mix" not in verdict(typed(rows), "interpolation")


def test_training_that_did_not_help() -> None:
    said = verdict(
        typed([line("pretrained", 10, 10), line("local", 20, 20), line(OURS, 30, 30)]), OURS
    )
    assert "Pretrained is better than CoMiGS-1G1S for all 2 clients" in said
    assert "training did not help" in said


@pytest.mark.parametrize(
    ("base", "alone", "shared", "why"),
    [
        (50, (20, 30), (10, 20), "has too little data, and their data are alike"),
        (50, (10, 20), (20, 30), "better for no client than its own"),
        (50, (10, 32), (20, 20), "1 of 2 clients (c1), who have too little data alone"),
        (5, (10, 20), (20, 30), "too little data to train on: the base alone is better"),
    ],
)
def test_why_sharing_helps_or_not_comes_with_figures(
    base: float, alone: tuple[float, ...], shared: tuple[float, ...], why: str
) -> None:
    """Each figure once, whether the method that was tried is one of both or another."""
    rows = [line("pretrained", base, base), line("local", *alone), line("fedavg", *shared)]
    said = verdict(typed(rows), "fedavg")
    other = verdict(typed([*rows, line(OURS, 1, 1)]), OURS)
    means = [f"{sum(of) / 2:.2f}" for of in (shared, alone)]
    for text in (said, other):
        assert why in text
        assert [text.count(mean) for mean in means] == [1, 1]
    assert other.count(f" {base}.00") == (base == 5)
    assert why not in verdict(typed(rows[:2]), "local")


def test_a_difference_within_its_deviation_has_no_reason() -> None:
    seeds = (-2.0, 0.0, 2.0)
    rows = [line("local", 20, 20, seeds=seeds), line("fedavg", 19, 19, seeds=seeds)]
    assert "too little" not in verdict(typed(rows), "fedavg")


def test_a_bound_is_nobodys_rival() -> None:
    said = verdict(
        typed([line("centralized", 1, 1), line("local", 20, 20), line(OURS, 10, 10)]), OURS
    )
    assert "Centralized" not in said
    assert "CoMiGS-1G1S is better than Local" in said


def test_a_difference_within_its_deviation_is_none() -> None:
    seeds = (-2.0, 0.0, 2.0)
    said = verdict(
        typed([line("local", 20, 20, seeds=seeds), line(OURS, 19, 19, seeds=seeds)]), OURS
    )
    assert "alike" in said
    assert "within the deviation over 3 seeds" in said
    far = verdict(
        typed([line("local", 40, 40, seeds=seeds), line(OURS, 19, 19, seeds=seeds)]), OURS
    )
    assert "beyond the deviation over 3 seeds" in far
    assert "One seed" not in far


def test_one_row_alone_says_nothing_of_sharing() -> None:
    assert "says whether sharing helps" in verdict(typed([line(OURS, 10, 11)]), OURS)


def unseen_rows() -> list[dict]:
    ours = result(
        "ddome", {"aligned0": 70.0, "random0": 40.0}, groups={"aligned": 70.0, "random": 40.0}
    )
    other = result(
        "fedavg", {"aligned0": 60.0, "random0": 55.0}, groups={"aligned": 60.0, "random": 55.0}
    )
    return [other, ours]


def test_every_group_of_unseen_clients_counts() -> None:
    rows = [as_json(row(found["method"], typed([found]))) for found in unseen_rows()]
    said = verdict(typed(rows), "ddome")
    assert (
        "for aligned (unseen) (70.00 % against 60.00 %), not for random (unseen) (40.00 % "
        "against 55.00 %)" in said
    )


def loss(tmp_path: Path) -> list[dict]:
    return [
        result("local", {"ann": 20.0, "ben": 22.0}),
        result("fedavg", {"ann": 25.0, "ben": 20.0}),
        result(OURS, {"ann": 30.0, "ben": 31.0}),
    ]


def test_the_page_sets_off_the_best_of_each_column_and_says_worse(tmp_path: Path) -> None:
    write_report(tmp_path, typed(loss(tmp_path)), "")
    page = (tmp_path / "report.html").read_text()
    table = re.search(r"<h2>Test perplexity</h2>.*?</table>", page, re.DOTALL)
    assert table is not None
    best = dict.fromkeys(re.findall(r"<td class=best>([^<]+)", table[0]))
    assert {"21.00", "20.00"} <= best.keys()  # Local's mean and ann, FedAvg's ben
    assert "30.50" not in best
    assert "WORSE than Local, the best other row: from 21.00 to 30.50" in page
    assert "below" not in re.search(r'<ul class="tiles".*?</ul>', page, re.DOTALL)[0]  # type: ignore[index]
    assert "Local is better than CoMiGS-1G1S for all 2 clients" in page


@pytest.mark.parametrize("unseen", [False, True])
def test_a_terminal_of_80_by_24_ends_with_scores_and_verdict(tmp_path: Path, unseen: bool) -> None:
    found = unseen_rows() if unseen else loss(tmp_path)
    rows = [as_json(row(r["method"], typed([r]))) for r in found]
    console = Console(width=80, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    _show(console, typed(rows), "folders", found[-1]["method"])
    lines = console.export_text().splitlines()
    assert all(len(text) <= 80 for text in lines)
    last = "\n".join(lines[-22:])  # two lines more say where everything is
    assert all(
        title in last
        for title in (["FedAvg", "DDOME"] if unseen else ["Local", "FedAvg", "CoMiGS-1G1S"])
    )
    assert "is better than" in last
    assert lines[-1].strip()
    if unseen:
        assert "random (unseen)" in " ".join(last.split())
        assert "40.00" in last


def test_recipes_prints_one_to_start_from(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["recipes", "quickstart"])
    assert done.exit_code == 0
    (tmp_path / "mine.yaml").write_text(done.output)
    assert CliRunner().invoke(app, ["recipes", "quikstart"]).exit_code == 2
    from coterie.runs.recipes import recipe as recipes

    assert recipes.load(str(tmp_path / "mine.yaml")).method == recipes.load("quickstart").method


@pytest.mark.parametrize("command", ["methods", "recipes"])
def test_lists_fit_80_columns(command: str) -> None:
    lines = CliRunner().invoke(app, [command]).output.splitlines()
    assert max(map(len, lines)) <= 80


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = (
        "data.clusters=2",
        "data.clients_per_cluster=2",
        "method.rounds=3",
        "compare_with=[local]",
    )
    done = CliRunner().invoke(
        app, ["run", "cobo-digits", "--dry-run", *(word for s in settings for word in ("--set", s))]
    )
    assert done.exit_code == 0, done.output
    for expected in (
        "4 clients",
        "examples",
        "parameters trained per client",
        "a round:",
        "in all",
        "GB of memory",
    ):
        assert expected in done.output
    assert max(map(len, done.output.splitlines())) <= 80
    assert not list(tmp_path.iterdir())
