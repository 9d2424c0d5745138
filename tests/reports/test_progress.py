"""What a run says while it goes on, by a clock that the test turns."""

import io
import threading
from collections.abc import Sequence

import pytest
from reports.samples import result
from rich.console import Console

from coterie.core.result import Result
from coterie.reports import progress as terminals
from coterie.reports.pace import RoundTimer
from coterie.reports.progress import SILENCE, Terminal


def ended(mean: float) -> Result:
    """A result that has this mean."""
    return Result.from_json(result("fedavg", 2, 0.0, mean=mean))


class Clock:
    """Stands still until it is turned."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(terminals.time, "monotonic", found)
    return found


def said(terminal: Terminal) -> list[str]:
    return terminal.console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def plain(rows: int = 1) -> Terminal:
    return Terminal(Console(file=io.StringIO(), width=150), rows)


def exchange(
    terminal: Terminal, clock: Clock, clients: Sequence[str], seconds: float, tokens: int = 600
) -> None:
    """Clients train one after the other; now and then somebody asks whether something is to be
    said.
    """
    terminal.asking("local_round", len(clients))
    for client in clients:
        for _ in range(10):
            clock.now += seconds / 10
            terminal.beat()
        terminal.client(0, client, {"tokens": tokens, "loss/generalist": 2.0})


def test_a_long_round_is_not_silent_and_time_left_shows_before_it_ends(clock: Clock) -> None:
    terminal = plain()
    terminal.begin("Local", 3, 0, "abcd")
    exchange(terminal, clock, "abcd", 60.0)
    lines = said(terminal)[1:]
    assert lines[0] == "  round 1 of 3: 0 of 4 clients  0:30 so far"
    assert (
        lines[2] == "  round 1 of 3: 1 of 4 clients  loss 2.000  10 tokens/s  1:30 so far"
    )  # the first one says nothing of the others
    assert (
        lines[4] == "  round 1 of 3: 2 of 4 clients  loss 2.000  10 tokens/s  9:30 left"
    )  # 10 minutes after the second minute
    assert lines[-1].startswith("  round 1 of 3: 3 of 4 clients")
    assert len(lines) == 4 * 60 / SILENCE


def test_lines_that_were_said_make_others_needless(clock: Clock) -> None:
    terminal = plain()
    terminal.begin("Local", 100, 0, "ab")
    for done in range(100):
        exchange(terminal, clock, "ab", 1.5)
        terminal.round(done + 1)
    assert len(said(terminal)) == 1 + 100


def test_scoring_says_how_far_it_is(clock: Clock) -> None:
    terminal = plain()
    terminal.begin("Pretrained", 0, 0, "abcd")
    terminal.evaluating(0)
    terminal.asking("score", 4)
    for client in "abcd":
        clock.now += 40.0
        terminal.beat()
        terminal.answered(client)
    assert said(terminal)[1:] == [
        "  scoring: 0 of 4 clients  0:40 so far",
        "  scoring: 1 of 4 clients  1:20 left",
        "  scoring: 2 of 4 clients  0:40 left",
        "  scoring: 3 of 4 clients  0:00 left",
    ]


def test_preparation_says_that_it_goes_on(clock: Clock) -> None:
    terminal = plain()
    terminal.preparing()
    clock.now += 31.0
    terminal.beat()
    terminal.beat()
    assert said(terminal) == ["  loading base and data  0:31 so far"]


def test_nobody_has_to_ask_for_such_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminals, "SILENCE", 0.0)
    spoken = threading.Event()
    with plain() as terminal:
        monkeypatch.setattr(terminal, "_line", lambda text: spoken.set())
        terminal.preparing()
        assert spoken.wait(60)
    terminal._watch.join(60)
    assert not terminal._watch.is_alive()


def test_methods_that_were_done_before_are_counted(clock: Clock) -> None:
    terminal = plain(rows=3)
    terminal.known("Local")
    terminal.begin("FedAvg", 2, 1, "ab")
    assert said(terminal) == [
        "[1/3] Local: already done",
        "[2/3] FedAvg: 2 rounds, 2 clients, continuing after round 1",
    ]


def test_a_terminal_that_shows_rounds_live_says_no_such_lines(clock: Clock) -> None:
    with Terminal(Console(file=io.StringIO(), width=150, force_terminal=True), 2) as terminal:
        terminal.preparing()
        terminal.known("Local")
        terminal.begin("FedAvg", 2, 0, "ab")
        exchange(terminal, clock, "a", 2 * SILENCE)
        terminal.progress.refresh()
        text = "".join(said(terminal))
    assert "[2/2] FedAvg" in text
    assert "round 0/2" in text
    assert "10 tokens/s  1/1 clients" in text
    assert "1:00 so far" in text
    assert "of 1 clients" not in text


def test_scoring_and_checkpoints_do_not_dilute_the_pace(clock: Clock) -> None:
    terminal = plain()
    terminal.begin("Local", 2, 0, "ab")
    exchange(terminal, clock, "ab", 1.0)
    terminal.evaluating(1)
    clock.now += 500.0
    terminal.evaluated(1, {"test": 3.0})
    clock.now += 100.0  # a checkpoint
    terminal.round(1)
    exchange(terminal, clock, "a", 1.0)
    assert terminal.predictions / terminal.trained == pytest.approx(600)
    assert "600 tokens/s" in terminal._figures()


def test_time_left_is_of_this_session(clock: Clock) -> None:
    stretch = RoundTimer(10, 6)
    assert stretch.left is None
    stretch.ask(2, training=True)
    clock.now = 10.0
    stretch.reply()
    assert (
        stretch.left is None
    )  # until the first reply much is done once: it says nothing of the others
    clock.now = 15.0
    stretch.reply()
    stretch.round(7)
    assert stretch.left == 5.0 / 0.5 * 3
    clock.now = 18.0
    assert stretch.left == 5.0 / 0.5 * 3 - 3.0


@pytest.mark.parametrize("expected", [None, 40.0, 60.0])
def test_no_estimate_is_wild_however_long_the_first_step_takes(
    clock: Clock, expected: float | None
) -> None:
    stretch, found = RoundTimer(10, 0, expected), []
    ends = [
        30.0 + reply for reply in range(40)
    ]  # the first reply comes after half a minute, the others a second apart
    for reply, end in enumerate(ends):
        if reply % 4 == 0:
            stretch.ask(4, training=True)
        clock.now = end
        stretch.reply()
        if reply % 4 == 3:
            stretch.round(reply // 4 + 1)
        found.append((stretch.left, ends[-1] - end))
    assert found[0][0] is None or expected is not None
    for left, true in found[1:]:
        assert left == pytest.approx(true, rel=0.6, abs=3.0)


def test_with_an_expectation_there_is_time_left_from_the_start(clock: Clock) -> None:
    stretch = RoundTimer(10, 5, 60.0)
    assert stretch.left == 30.0  # half of the rounds were done before
    clock.now = 10.0
    assert stretch.left == 20.0


def test_in_eighty_columns_the_line_is_one_line(clock: Clock) -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, width=80, force_terminal=True), 3) as terminal:
        terminal.preparing()
        terminal.expects([10.0, 100.0, 100.0])
        terminal.begin("CoMiGS-1G1S", 10, 0, "abcd")
        exchange(terminal, clock, "a", 20.0)
        terminal.progress.refresh()
        rows = terminal.console.render_lines(
            terminal.progress.get_renderable(), terminal.console.options
        )
    text = "".join(segment.text for segment in rows[-1])
    assert len(rows) == 1
    assert "3:20 left" in text
    assert "1/1 clients" in text


def test_time_left_over_all_methods(clock: Clock) -> None:
    out = io.StringIO()
    terminal = Terminal(Console(file=out, width=160), rows=3)
    terminal.preparing()
    terminal.expects([10.0, 100.0, 100.0])
    assert "about 3:30 in all" in out.getvalue()
    terminal.begin("Pretrained", 0, 0, "ab")
    assert terminal._left() == "0:10 left (all: 3:30)"
    clock.now += 20.0
    terminal.end(ended(3.0))
    terminal.begin("Local", 2, 0, "ab")
    assert terminal._left() == "1:40 left (all: 5:00)"  # all took twice as long as expected so far
    clock.now += 200.0
    terminal.end(ended(3.0))
    terminal.begin("FedAvg", 2, 0, "ab")
    assert terminal._left() == "1:40 left"  # the last one


def test_a_round_with_several_exchanges_is_as_long_as_the_one_before(clock: Clock) -> None:
    stretch = RoundTimer(4, 0)
    for done in (1, 2):
        for _ in range(3):
            stretch.ask(2, training=True)
            stretch.reply()
            stretch.reply()
        stretch.round(done)
    stretch.ask(2, training=True)
    stretch.reply()
    assert stretch.rounds_done == 2 + 1 / 6
    stretch.reply()
    stretch.ask(2, training=False)  # of the scoring
    stretch.score()
    assert stretch.rounds_done == 2 + 2 / 6
