"""Collaboration weights as pictures: known matrices have known fields, colours, shares and
lines.
"""

import json
import re
from html import unescape

import pytest
from figures import typed
from reports.samples import PAIRED, classified

from coterie.reports.collaboration import (
    Weights,
    at_stages,
    collaboration,
    domains,
    heat_map,
    shares,
)
from coterie.reports.heat import LEVELS


def weights(**figures: object) -> Weights:
    found = Weights.of("CoBo", typed(classified("cobo", **figures)))
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


def test_clients_are_ordered_by_cluster_and_weights_with_them() -> None:
    found = weights()
    assert list(found.clients) == ["ann", "cleo", "<b>ben</b>", "dan"]
    assert found.clusters == [0, 0, 1, 1]
    assert [at for at, _ in found.stages] == [10, 20, 30]
    last = found.stages[-1][1]
    assert [last[0][1], last[2][3], last[0][2]] == pytest.approx([1, 1, 0.1])


def test_weights_of_clients_that_are_scored_are_under_their_names() -> None:
    written = classified("cobo")
    training = {i: {**c} for i, c in written["clients"].items()}
    last = list(training)[1:]

    def scored(*names: str) -> Weights | None:
        clients = {i: written["clients"][i] for i in names}
        return Weights.of("CoBo", typed(written | {"training": training, "clients": clients}))

    some = scored(*last)
    assert some is not None
    assert set(some.clients) == set(last)
    matrix, order = (
        written["evaluations"][-1]["weights"],
        [[*training].index(i) for i in some.clients],
    )
    assert some.stages[-1][1] == [[matrix[i][j] for j in order] for i in order]
    assert scored(last[0]) is None


def test_a_known_matrix_has_the_known_fields() -> None:
    found = weights()
    blocks = {(0, 1), (1, 0), (2, 3), (3, 2)}
    svg = heat_map(found, found.stages[-1:])
    assert fields(svg, LEVELS) == blocks
    assert fields(svg, 1) == {(i, j) for i in range(4) for j in range(4) if i != j} - blocks
    assert fields(heat_map(found, found.stages[:1]), 4) == {
        (i, j) for i in range(4) for j in range(4) if i != j
    }
    assert found.truth is not None
    truth = heat_map(found, [(0, found.truth)])
    assert fields(truth, LEVELS) == blocks
    assert (0, 0) not in fields(truth, LEVELS)  # diagonals are masked


def test_what_the_script_reads_are_the_weights() -> None:
    found = weights()
    svg = heat_map(found, found.stages)
    (held,) = re.findall(r'data-stages="([^"]*)"', svg)
    stages = json.loads(unescape(held))
    assert [at for at, _ in stages] == [10, 20, 30]
    values = [value / 255 for value in bytes.fromhex(stages[0][1])]
    assert values == pytest.approx([w for row in found.stages[0][1] for w in row], abs=1 / 510)
    assert "<b>" not in svg


@pytest.mark.parametrize(
    ("largest", "top"), [(0.05, 0.1), (0.2, 0.2), (0.33, 0.5), (0.51, 1.0), (0.0, 0.1)]
)
def test_the_scale_ends_at_a_round_number_above_the_largest_weight(
    largest: float, top: float
) -> None:
    found = Weights("t", ["a", "b"], None, [(1, [[0.9, largest], [0.0, 0.9]])])
    assert found.top == top
    assert found.truth is None


def test_the_share_within_clusters() -> None:
    found = weights()
    assert found.inside(found.stages[0][1]) == pytest.approx(
        1 / 3
    )  # one of three others, all weights alike
    assert found.inside(found.stages[-1][1]) == pytest.approx(1 / 1.2)
    assert found.inside([[0.0] * 4] * 4) == 0
    panel = shares([found])
    assert "CoBo: 33.33 at 10 local iterations" in panel
    assert "if all weights were equal: 33.33 at 0 local iterations" in panel
    assert shares([weights(clusters=None)]) == ""


def test_every_client_has_a_panel_with_a_line_to_each_other_one() -> None:
    drawn = domains(weights())
    assert drawn.count("<figure>") == 4
    assert drawn.count("<title>for ") == 4 * 3 * 3
    assert "for dan: 0.10 at 30 local iterations" in drawn
    one = domains(weights(), ["dan"])
    assert one.count("<figure>") == 1
    assert "for &lt;b&gt;ben&lt;/b&gt;: 1.00 at 30 local iterations" in one


def test_of_many_clients_eight_are_drawn_with_lines_to_eight() -> None:
    many = {f"client-{k}": k // 4 for k in range(80)}
    found = weights(clusters=many, rounds=60)
    drawn = domains(found)
    assert drawn.count("<figure>") == 8
    assert "8 of 80 clients." in drawn
    mates = drawn[drawn.index("client-0</figcaption>") : drawn.index("client-1</figcaption>")]
    assert all(f"for client-{k}:" in mates for k in (1, 2, 3))
    assert mates.count('class="line"') == 8
    assert len(found.stages) < 60
    assert [found.stages[0][0], found.stages[-1][0]] == [10, 600]
    assert len(heat_map(found, found.stages)) < 1_000_000


def test_stages_are_the_evaluations_nearest_to_what_is_asked() -> None:
    drawn = at_stages(weights(), [1, 19, 22, 4000])
    assert re.findall(r"<figcaption>([^<]*)<", drawn) == [
        "10 iterations",
        "20 iterations",
        "30 iterations",
        "True clusters",
    ]
    assert weights(rounds=9).nearest(()) == [weights(rounds=9).stages[k] for k in (0, 2, 4, 6, 8)]


def test_results_without_weights_have_no_pictures() -> None:
    old = classified("local")
    for entry in old["evaluations"]:
        del entry["weights"]
    assert collaboration(typed({"Local": old})) == ()
    shown = "".join(
        collaboration(
            typed({"Local": old, "CoBo": classified("cobo"), "FC": classified("fc", clusters=None)})
        )
    )
    assert shown.count('class="heat moving"') == 2
    assert "True clusters" in shown
    assert "W error 0.00 at the end" in shown
    assert "<summary>FC: weights over training</summary>" in shown


def test_weights_of_one_client_are_nothing_to_look_at() -> None:
    alone = classified("cobo", clusters={"ann": 0})
    assert len(alone["evaluations"][0]["weights"]) == 1
    assert Weights.of("t", typed(alone)) is None
    assert PAIRED.keys() == set(weights().clients)
