"""An audit as people read it: no figure is cut off, and sentences say what the figures mean."""

from reports.samples import audited
from rich.console import Console

from coterie.core.result.audit import AuditResult
from coterie.reports import audit as told


def test_the_longest_figures_fit_a_terminal_of_80_characters() -> None:
    found = audited() | {"secure": True, "data": "examples"}
    for own in found["observers"].values():
        own["membership"]["tpr"] |= {"value": 1.0, "low": 1.0, "high": 1.0}
    console = Console(width=80)
    with console.capture() as captured:
        for table in told.terminal(AuditResult.from_json(found)):
            console.print(table)
    lines = captured.get().splitlines()
    assert "…" not in captured.get()
    assert max(map(len, lines)) <= 80
    rate = next(line for line in lines if line.startswith(" TPR"))
    assert rate.count("100.0 (100.0 to 100.0)") == 2
    assert "a server of sums" in lines[1]
    assert "chance" in lines[1]


def test_three_observers_of_a_mixture_fit_too() -> None:
    found = audited() | {"secure": True, "data": "examples"}
    found["observers"]["user"] = found["observers"]["server"]
    for own in found["observers"].values():
        own["membership"]["tpr"] |= {"value": 1.0, "low": 1.0, "high": 1.0}
    console = Console(width=80)
    with console.capture() as captured:
        console.print(told.terminal(AuditResult.from_json(found))[0])
    lines = captured.get().splitlines()
    assert "…" not in captured.get()
    assert max(map(len, lines)) <= 80
    place = next(k for k, line in enumerate(lines) if line.startswith(" TPR"))
    assert lines[place].split()[-4:] == ["100.0", "100.0", "100.0", "1"]
    assert lines[place + 1].count("(100.0 to 100.0)") == 3
    assert all(name in lines[1] for name in ("a server of sums", "client", "the model's user"))
    sentences = told.sentences(AuditResult.from_json(found))
    assert any(line.startswith("The model's user can tell which examples") for line in sentences)


def test_sentences_say_who_can_tell_what() -> None:
    server, members, *_, words = told.sentences(AuditResult.from_json(audited()))
    assert server == (
        "The server finds planted canaries. It guesses 7 of 8 coin flips right. "
        "Epsilon is above 0.50 at 95 % confidence."
    )
    assert members == (
        "The server can tell which windows a client trained on. It is right for 90 % of pairs "
        "(without any trained model 50 %, by guessing 50 %)."
    )
    assert words == (
        "Another client's model suggests 50.0 % (40.0 to 60.0 %) of the 20 words that only one "
        "client has and that the base does not suggest."
    )


def test_what_shows_nothing_is_said_to_show_nothing() -> None:
    found = audited()
    del found["observers"]["others"]
    own = found["observers"]["server"]
    own["canaries"]["exposure"]["low"] = 1.0
    own["canaries"]["epsilon"]["at_least"] = 0.0
    own["membership"]["auc"]["low"] = 0.55  # the data alone tell as much
    found["words"]["control"] = found["words"]["others"]
    server, members, words = told.sentences(AuditResult.from_json(found))
    assert "does not find planted canaries better than by guessing." in server
    assert server.endswith("That shows no lower bound on epsilon.")
    assert "cannot tell which windows a client trained on better than the data alone show" in (
        members
    )
    assert words.endswith("Of words that nobody trained on it suggests 50.0 %.")
