"""What a run with a pool shows: known counts have known fields, lines, tables and sentences."""

import io
import json
import math
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from statistics import fmean

import pytest
import reported
from browser import opened
from figures import as_json, typed
from reports.samples import ANCHORS, UNSEEN, classified, pooled
from rich.console import Console

from coterie.core.result.rows import rows
from coterie.methods import METHODS
from coterie.reports.experts import (
    Choices,
    choice_maps,
    classes,
    clustering,
    decisions,
    distribution,
    expert_curves,
    experts,
    gate_curves,
)
from coterie.reports.heat import LEVELS, Heat, heat_map
from coterie.reports.html import write_comparison, write_report
from coterie.reports.parts import bars
from coterie.reports.tables import tables
from coterie.runs.recipes import recipe as recipes

PAGE = [
    pooled("common-expert", -20.0, rounds=0, gate=False),
    pooled("fedavg", -5.0, gate=False),
    pooled("ddome"),
]


def choices(**figures: object) -> Choices:
    found = Choices.of("DDOME", typed(pooled("ddome", **figures)))
    assert found is not None
    return found


def fields(svg: str, level: int) -> set[tuple[int, int]]:
    """Rows and columns of the fields of a level."""
    (path,) = re.findall(rf'class="w{level}" d="([^"]*)"', svg)
    return {
        (int(i), int(j) + k)
        for j, i, wide in re.findall(r"M(\d+) (\d+)h(\d+)", path)
        for k in range(int(wide))
    }


def told(svg: str, name: str) -> list:
    """What the script reads."""
    (held,) = re.findall(rf'data-{name}="([^"]*)"', svg)
    return json.loads(unescape(held))


def framed(svg: str) -> set[tuple[int, int]]:
    """Rows and columns of the fields that are outlined."""
    (path,) = re.findall(r'class="block" d="([^"]*)"', svg)
    return {
        (int(i) + k, int(j))
        for j, i, high in re.findall(r"M(\d+) (\d+)h1v(\d+)", path)
        for k in range(int(high))
    }


def test_each_class_has_the_share_of_its_samples_that_an_expert_was_given() -> None:
    svg = heat_map(choices().shares("aligned"))
    assert told(svg, "rows") == [
        "4",
        "5",
        "0",
        "1",
        "2",
        "3",
    ]  # by anchor, and what no anchor has behind them
    assert told(svg, "columns") == ["0", "1", "2"]
    assert fields(svg, LEVELS) == {(0, 0), (1, 0), (3, 1), (4, 2), (5, 2)}
    assert fields(svg, LEVELS // 2) == {(2, 1), (2, 2)}
    assert framed(svg) == {(0, 0), (1, 0), (2, 1), (3, 1), (4, 2)}
    stages = told(svg, "stages")
    assert [at for at, _ in stages] == [1, 2, 3]
    assert bytes.fromhex(stages[0][1]) == bytes([255, 0, 0] * 6)
    assert stages[1] == [2, stages[2][1]]


def test_classes_of_several_anchors_are_outlined_for_each_and_named_once() -> None:
    found = choices(labels={"a0": [0, 5], "a1": [0, 1], "a2": [1, 5]})
    svg = heat_map(found.shares("aligned"))
    assert told(svg, "rows") == ["0", "5", "1", "2", "3", "4"]
    assert framed(svg) == {(0, 0), (1, 0), (0, 1), (2, 1), (2, 2), (1, 2)}


def test_experts_without_anchors_have_neither_outlines_nor_gate_accuracy() -> None:
    found = choices(anchors=None)
    assert framed(heat_map(found.shares("aligned"))) == set()
    assert gate_curves([found]) == ""
    drawn = choice_maps([found])
    assert drawn.count("<svg") == 2  # of either group
    assert "own anchor" not in drawn
    assert Choices.of("FedAvg", typed(pooled("fedavg", gate=False))) is None


def test_the_accuracy_of_an_expert_is_that_of_what_it_was_given() -> None:
    drawn = expert_curves(choices())
    aligned = drawn[drawn.index("aligned (unseen)") : drawn.index("random (unseen)")]
    assert re.findall(r"<title>(expert \d: [\d.]+ at \d)", aligned) == [
        *("expert 0: 100.00 at 1", "expert 0: 100.00 at 2", "expert 0: 100.00 at 3"),
        *(
            "expert 1: 86.67 at 2",
            "expert 1: 86.67 at 3",
        ),  # 13 of 15; in the first round it was given nothing
        *("expert 2: 76.00 at 2", "expert 2: 76.00 at 3"),  # 19 of 25
    ]


def test_ten_experts_look_unlike() -> None:
    found = pooled("ddome")
    for entry in found["evaluations"]:
        entry["choices"] = {
            "aligned": {"given": [[10] * 10] * 6, "right": [[9] * 10] * 6, "gate_accuracy": None}
        }
    lines = choices(evaluations=found["evaluations"]).expert_accuracy("aligned")
    assert len({line.style.sample for line in lines}) == 10


def test_gate_accuracy_has_a_panel_for_each_group_and_a_line_for_each_method() -> None:
    other = Choices.of("FedMix", typed(pooled("fedmix")))
    assert other is not None
    drawn = gate_curves([choices(), other])
    assert re.findall(r"<figcaption>([^<]*)", drawn) == ["aligned (unseen)", "random (unseen)"]
    assert drawn.count("DDOME: 33.33 at 1 rounds") == drawn.count("FedMix: 75.00 at 3 rounds") == 2


def test_decisions_are_counted_and_averaged_as_in_table_5() -> None:
    result = pooled("ddome")
    result["clients"]["u1"]["gate_accuracy"] = 90.0
    shown = decisions("DDOME", typed(result))
    assert re.findall(r"<td>([^<]*)</td>", shown[: shown.index("<details>")]) == [
        *("0, 2", "15", "45", "25.0 %"),
        *("0, 2", "6", "54", "10.0 %"),
        *("", "", "", "17.5 %"),
    ]
    assert "<summary>random (unseen)</summary>" in shown
    assert decisions("FedAvg", typed(pooled("fedavg", gate=False))) == ""
    assert decisions("DDOME", typed(pooled("ddome", label_counts=None))) == ""


def test_every_kind_of_client_has_its_label_shares() -> None:
    drawn = distribution(typed(pooled("ddome")))
    assert re.findall(r"<figcaption>([^<]*)", drawn) == [
        "3 anchors",
        "8 normal clients",
        "2 aligned (unseen)",
        "1 random (unseen)",
    ]
    anchors, *_ = drawn.split("</svg>")
    assert told(anchors, "columns") == list(ANCHORS)
    assert fields(anchors, LEVELS) == {(4, 2)}  # a2 has nothing but class 2
    assert fields(anchors, LEVELS // 2) == {(0, 0), (1, 0), (2, 1), (3, 1)}
    held = bytes.fromhex(told(anchors, "stages")[0][1])
    assert held[4 * 3 + 2] == 255


def grouped(sets: Sequence[Sequence[int]], members: int) -> dict:
    """A result in which so many normal clients have each of some sets of classes, in nearly
    equal shares.
    """
    counts = {
        f"n{g}-{k}": [(50 + k) * (c in own) + 1 for c in range(6)]
        for g, own in enumerate(sets)
        for k in range(members)
    }
    return pooled(
        "ddome",
        label_counts={i: n for i, n in pooled("ddome")["label_counts"].items() if i in ANCHORS}
        | counts,
    )


def test_the_sentence_on_k_means_is_what_was_found() -> None:
    apart, mixed = (
        grouped([(0, 1), (2, 3), (4, 5)], 5),
        grouped([(a, b) for a in range(6) for b in range(a)], 2),
    )
    for result, clients, verdict in ((apart, 15, "groups"), (mixed, 30, "no clear groups")):
        drawn = clustering(typed(result))
        clusters = dict(re.findall(r"<title>(\S+): cluster (\d), main classes \d·\d<", drawn))
        assert len(clusters) == clients
        assert f"finds {verdict}</h3>" in drawn
        assert f"silhouette is {silhouette(result['label_counts'], clusters):.2f}:" in drawn
    assert "n0-0: cluster" in clustering(typed(apart))
    assert "main classes 0·1" in clustering(typed(apart))


def silhouette(counts: dict, clusters: dict[str, str]) -> float:
    """The mean over clients of (b - a) / max(a, b): mean distances of label shares to their own
    cluster and to the nearest other one.
    """
    found = []
    for i, own in clusters.items():
        far: dict[str, list[float]] = {}
        for j, other in clusters.items():
            if i != j:
                far.setdefault(other, []).append(
                    math.dist(*([n / sum(counts[k]) for n in counts[k]] for k in (i, j)))
                )
        a, b = fmean(far[own]), min(fmean(values) for other, values in far.items() if other != own)
        found.append((b - a) / max(a, b))
    return fmean(found)


@pytest.mark.parametrize(
    "figures", [{"anchors": ["a0"]}, {"label_counts": {"a0": [1, 2], "n0": [3, 4], "u0": [1, 1]}}]
)
def test_too_few_clients_or_clusters_have_no_k_means(figures: dict) -> None:
    assert clustering(typed(pooled("ddome", **figures))) == ""


def test_runs_without_pools_or_unseen_clients_have_none_of_it(tmp_path: Path) -> None:
    plain = classified("cobo")
    assert experts(typed({"CoBo": plain})) == classes(typed(plain)) == ()
    write_report(tmp_path, typed([plain]), "digits")
    page = (tmp_path / "report.html").read_text()
    for absent in (
        "unseen",
        "gate",
        "best of last ten",
        'id="experts"',
        'id="labels"',
        "common expert",
    ):
        assert absent not in page
    assert ">synced</th>" in page


@pytest.fixture
def page(tmp_path: Path) -> str:
    write_report(tmp_path, typed(PAGE), "d")
    return (tmp_path / "report.html").read_text()


def cells(page: str, section: str) -> list[list[str]]:
    """The rows of the first table of a section, its header first."""
    table, _ = page[page.index(f'id="{section}"') :].split("</table>", maxsplit=1)
    return [re.findall(r"<t[hd][^>]*>([^<]*)", row) for row in table.split("<tr")[1:]]


def test_scores_have_a_column_for_each_group(page: str) -> None:
    header, *found = cells(page, "scores")
    assert header[:6] == [
        "method",
        "aligned (unseen)",
        "random (unseen)",
        "best",
        "best of last ten",
        "gate, %",
    ]
    assert [row[:6] for row in found] == [
        ["Common expert", "70.00", "80.00", "72.00", "71.00", "-"],
        ["FedAvg", "85.00", "65.00", "87.00", "86.00", "-"],
        ["DDOME", "90.00", "60.00", "92.00", "91.00", "75.0"],
    ]
    assert "chosen on the test set" in page
    assert "<b>90.00 %</b> mean test accuracy of aligned (unseen), one seed" in page
    assert "<b>60.00 %</b> mean test accuracy of random (unseen), one seed" in page
    assert "<b>75.0 %</b> gate accuracy" in page


def test_training_has_a_panel_for_each_group_with_the_common_expert_as_a_level_line(
    page: str,
) -> None:
    training = page[page.index('id="training"') : page.index("Client by client")]
    assert re.findall(r"<figcaption>([^<]*)", training) == [
        "Mean of aligned (unseen)",
        "Mean of random (unseen)",
    ]
    lines = re.findall(r"<title>([^<]*)", training)
    assert [line for line in lines if "Common" in line][:2] == [
        "Common expert: 70.00 at 0 rounds",
        "Common expert: 70.00 at 3 rounds",
    ]
    assert (
        "FedAvg: 83.00 at 1 rounds" in lines
    )  # and nothing before it: it does not start from the common expert
    assert "FedAvg: 70.00 at 0 rounds" not in lines
    assert "DDOME: 60.00 at 3 rounds" in lines


def test_costs_are_of_those_who_train_and_say_what_is_sent_once(page: str) -> None:
    costs = cells(page, "costs")
    assert costs[0][6] == "kB to an unseen client, once"
    assert [row[5:7] for row in costs[2:]] == [["1.3", "5.0"]] * 2  # 4,000 B in three rounds
    assert "the common expert is sent once to every client that embeds data with it: 7 kB" in page


def test_a_comparison_spreads_the_clients_of_every_group(tmp_path: Path) -> None:
    seeds = [
        pooled(m, shift + seed, gate=m == "ddome", seed=seed)
        for m, shift in (("fedavg", -5.0), ("ddome", 0.0))
        for seed in (0, 1)
    ]
    for found in seeds:
        folder = tmp_path / found["method"] / f"seed-{found['seed']}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found))
    about = {key: seeds[0][key] for key in ("recipe", "versions", "machine")}
    write_comparison(
        tmp_path,
        typed(about | {"rows": as_json(rows(typed(seeds))), "seeds": [0, 1], "notes": []}),
        "d",
    )
    page = (tmp_path / "report.html").read_text()
    aligned, random = page[page.index('id="clients"') :].split("<h3>random (unseen)</h3>")[:2]
    assert (aligned.count('class="dot"'), random.count('class="dot"')) == (2 * 2, 2 * 1)
    assert "DDOME, mean: 59.50 ± 0.71" in random
    assert cells(page, "scores")[2][:3] == ["DDOME", "90.50 ± 0.71", "59.50 ± 0.71"]
    for section in ("labels", "experts"):
        assert f'<a href="#{section}">' in page
        assert f'<section id="{section}">' in page


@pytest.mark.parametrize("long", [False, True])
def test_terminal_tables_of_unseen_clients_fit_80_columns(long: bool) -> None:
    console, large = (
        Console(file=io.StringIO(), width=80),
        {"trainable_parameters": 106_000_000, "bytes_down_per_round": 1.7e8},
    )
    results = [*PAGE, *(r | {"seed": 1} for r in PAGE if long)]
    found = [
        row | {"once_bytes": 85_000_000} | (large if long else {})
        for row in as_json(rows(typed(results)))
    ]
    for table in tables(typed(found), {name: entry.title for name, entry in METHODS.items()}, 80):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    lines = [line.split() for line in text.splitlines()]
    assert (["DDOME", "90.00", *["±", "0.00"] * long, "60.00", "92.00", "91.00", "75.0"]) in lines
    words = " ".join(text.split())
    assert "chosen on the test set" in words
    assert "common expert, once: 85.00 MB" in words
    assert "synced" not in text


def test_small_figures_are_not_rounded_to_nothing() -> None:
    assert [cell.text for cell in bars([0, 1210, 4_250_000, None], ",.2f", 1e6)] == [
        "0.00",
        "0.0012",
        "4.25",
        "-",
    ]


def test_a_map_leaves_out_names_for_which_it_has_no_room() -> None:
    names = [f"n{k}" for k in range(100)]
    svg = heat_map(Heat(names, ["a", "b"], [(0, [[0.5, 0.0]] * 100)], 1.0, "l", "t"))
    assert re.findall(r'class="tick"[^>]*>([^<]*)', svg) == ["a", "b"]
    assert fields(svg, LEVELS // 2) == {(k, 0) for k in range(100)}


def test_pointer_keys_and_slider_tell_of_maps_that_are_not_square(tmp_path: Path) -> None:
    write_report(tmp_path, typed(PAGE), "d")
    for width in (1200, 390):
        with opened(width=width) as page:
            page.on("console", lambda message: pytest.fail(message.text))
            page.goto((tmp_path / "report.html").as_uri())
            assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
            tip, box = page.locator("#tip"), page.locator("#experts svg.heat .fields").first
            box.hover(
                position={
                    "x": box.bounding_box()["width"] * 5 / 6,
                    "y": box.bounding_box()["height"] * 11 / 12,
                }
            )
            assert tip.inner_text() == "class 3: 100 % to expert 2"
            page.locator("input.stage").first.focus()
            page.keyboard.press("Home")
            assert page.locator("input.stage").first.get_attribute("aria-valuetext") == "1 rounds"
            page.keyboard.press("Tab")
            assert tip.inner_text() == "class 3: 0 % to expert 2"
            for key in (
                "ArrowDown",
                "ArrowLeft",
                "ArrowLeft",
                "ArrowLeft",
            ):  # and not beyond the edge
                page.keyboard.press(key)
            assert tip.inner_text() == "class 3: 100 % to expert 0"


def test_a_run_counts_the_labels_that_its_clients_have(tmp_path: Path) -> None:
    small = [
        "method.rounds=1",
        "compare_with=[]",
        "data.unseen={aligned: 2, random: 1}",
        "model.common.pretraining.epochs=1",
    ]
    (result,) = as_json(reported.run(recipes.load("ddome-digits", small), tmp_path / "run"))
    counts = result["label_counts"]
    assert counts.keys() == result["labels"].keys()
    assert {i: [c for c, n in enumerate(own) if n] for i, own in counts.items()} == result["labels"]
    assert all(sum(own) == 54 for i, own in counts.items() if i not in result["clients"])
    assert len(UNSEEN) == len(result["clients"]) == 3
    given = result["evaluations"][-1]["choices"]["random"]["given"]
    assert [sum(row) for row in given] == counts["random-00"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert 'id="experts"' in page
    assert "nan" not in page
