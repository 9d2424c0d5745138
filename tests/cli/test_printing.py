"""Text of others reaches no terminal, log or page as anything but text: through the objects that
show it.
"""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from figures import typed
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.errors import TensorError
from coterie.core.printing import printable
from coterie.deploy import process
from coterie.deploy.keys import Link
from coterie.deploy.supernode import Node, Supervisor
from coterie.engines.flower.nodes import described
from coterie.personal.classifier import Prediction
from coterie.personal.ui import terminal as personal_terminal
from coterie.reports.html import write_report
from coterie.reports.progress import Terminal
from coterie.reports.tables import tables

ESCAPES = "\x1b]0;pwned\x07\x1b[2J\x1b]52;c;cm0gLXJmIH4=\x07\x9b31m\x08\x00"
LINES = "\r\ncoterie: everything failed\nERROR : a forged line\u2028another"
EVIL = f"x{ESCAPES}{LINES}\u202eesrever\u2066\ufeff [link=file:///etc/passwd]click[/link] [red]"
FORBIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff]")


def clean(text: str) -> bool:
    """Whether a terminal does nothing but show it."""
    return not FORBIDDEN.search(text)


def test_a_million_spaces_take_no_time() -> None:
    assert printable(" " * 1_000_000) == " " * 1_000_000  # it took hours
    assert printable("a" + " \t" * 9 + "\r\n\n  b") == "a ↵ b"


@given(st.text(st.characters()), st.booleans())
def test_nothing_but_text_is_left_of_any_text(text: str, lines: bool) -> None:
    shown = printable(text, lines)
    assert clean(shown)
    shown.encode()
    assert printable(shown, lines) == shown
    if not lines:
        assert shown.splitlines() in ([], [shown])


def test_text_that_is_only_text_stays_as_it_is() -> None:
    text = "Größe 中文 हिन्दी می‌خواهم 👩‍💻 [b] a/b\\c"
    assert printable(text) == text
    assert printable(f"{text}\n\t{text}", lines=True) == f"{text}\n\t{text}"
    assert printable("one\r\n  two\n\nthree") == "one ↵ two ↵ three"
    assert printable("\x1b[2J\u202e\ud800") == r"\x1b[2J\u202e\ud800"


# A server's terminal, and its log.


@pytest.mark.parametrize("live", [False, True])
def test_warnings_of_a_terminal(live: bool) -> None:
    console = Console(file=io.StringIO(), width=1000, force_terminal=live, color_system=None)
    with Terminal(console, 1) as terminal:
        terminal.begin("FedAvg", 1, 0, ["ann"])
        before = len(console.file.getvalue())  # type: ignore[attr-defined]
        terminal.warning(0, f"ann{EVIL}", EVIL)
        text = console.file.getvalue()[before:]  # type: ignore[attr-defined]
    (line,) = [line for line in text.split("\n") if "round 1, ann" in line]
    line = (
        re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", line) if live else line
    )  # Rich's own, which move the cursor of the live display
    assert clean(line.strip("\r"))
    assert line.count("[link=file:///etc/passwd]click[/link] [red]") == 2  # shown, not obeyed
    assert line.count(r"\x1b[2J") == 2
    assert not any(part.startswith(("coterie: ", "ERROR")) for part in text.splitlines())


@pytest.fixture
def row() -> dict[str, Any]:
    costs = {
        "trainable_parameters": 1,
        "active_parameters": 1,
        "flops_per_token": 9,
        "bytes_up_per_round": 9,
        "bytes_down_per_round": 9,
    }
    metric = {"name": "test accuracy", "unit": "%", "lower_is_better": False}
    found = {
        "method": "fedavg",
        "metric": metric,
        "mean": 72.0,
        "std": 0.5,
        "per_seed": [1],
        "mean_synced": 72.0,
        "wall_s": 9.0,
    }
    return (
        found
        | costs
        | {
            "loss": 0.1,
            "best": 1.0,
            "best_of_last_ten": 1.0,
            "gate_accuracy": None,
            "clients": {EVIL: 1.0},
        }
    )


@pytest.mark.parametrize("groups", [None, {"ann": 1.0, EVIL: 2.0}, {EVIL: 1.0}])
def test_tables_of_clients_and_groups(row: dict[str, Any], groups: dict[str, float] | None) -> None:
    console = Console(file=io.StringIO(), width=2000, force_terminal=True, color_system=None)
    for table in tables(typed([row | {"groups": groups}]), {"fedavg": "FedAvg"}, 2000):
        console.print(table)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert clean(re.sub(r"\x1b\[[0-9;]*m", "", text))  # Rich's own bold and italic
    assert "\x1b]8;" not in text  # no link
    assert "[link=file:///etc/passwd]click[/link]" in re.sub(r"\s+", " ", text)


def test_what_a_device_says_of_its_problems() -> None:
    said = described(TensorError(EVIL, EVIL))
    assert clean(said)
    assert len(said.split("\n")) == 2  # the problem, and below it the remedy


def test_lines_of_a_run_that_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "flwr"
    (tmp_path / "said").write_bytes(
        b"\x1b[92m  round 1/2\x1b[0m\n  evil \x1b]0;pwned\x07\x1b[2J\xc2\x9b \xff\n"
    )
    log.write_text(f"#!/bin/sh\ncat {tmp_path}/said\n")
    log.chmod(0o755)
    monkeypatch.setattr(process, "program", lambda name: str(log))
    said: list[str] = []
    process._follow("1", tmp_path, said.append)
    assert said == ["  round 1/2", r"  evil \x1b]0;pwned\x07\x1b[2J\x9b " + "\ufffd"]


def test_what_a_devices_log_says_of_its_end(tmp_path: Path) -> None:
    supervisor = Supervisor(Node(Link("127.0.0.1:9", None), tmp_path), {})
    (tmp_path / "resident.log").write_text("a\n" * 100_000 + f"coterie: {ESCAPES}")
    why = supervisor._why("resident")
    assert clean(why)
    assert "pwned" in why


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", f"no{EVIL}.yaml"],
        ["run", "quickstart", "--set", f"{EVIL}=1"],
        ["predict", f"/nowhere/{ESCAPES[:-1]}", "--text", "a"],
        ["server", "--keys", f"/nowhere/{ESCAPES[:-1]}"],
    ],
)
def test_messages_of_the_command_line(arguments: list[str]) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code in (1, 2)
    assert isinstance(done.exception, SystemExit)
    assert clean(done.output)
    assert "pwned" in done.output


# Those of whoever uses a model.


def test_classes_samples_and_clients_in_a_terminal() -> None:
    console = Console(file=io.StringIO(), width=2000, force_terminal=True, color_system=None)
    said = Prediction(0, EVIL, 0.5, None)
    personal_terminal.show_classes(console, [EVIL], {EVIL: [said], "ben": [said]})
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert clean(text)
    assert text.count("[link=file:///etc/passwd]click[/link]") == 5
    assert len(text.strip().splitlines()) == 4  # header, rule, two rows: no line was added


# Pages.


def report(folder: Path) -> str:
    from reports.samples import result, routing, write_metrics

    clients = {"ann": 20.0, f"{EVIL}</script><img src=x onerror=alert(1)>": 30.0}
    found = routing()
    texts = {i: ["</script>", ESCAPES, "\u202e", "\n"] * 2 for i in found["texts"]}
    eight = {
        text: [[block[0]] * 8 for block in of]
        for text, of in next(iter(found["weights"].values())).items()
    }
    weights = dict.fromkeys(found["weights"], eight)
    (folder / "routing.json").write_text(json.dumps(found | {"texts": texts, "weights": weights}))
    write_metrics(folder)
    write_report(
        folder,
        typed([result("local", 4, 5.0, clients), result("comigs-1g1s", 4, 0.0, clients)]),
        f"about {EVIL}</title><script>",
    )
    return (folder / "report.html").read_text()


def test_a_report_has_no_markup_or_control_characters_of_others(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert clean(page)
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<img" not in page
    assert page.count("</title>") == page.count("<title>")
    assert r"\x1b[2J" in page
