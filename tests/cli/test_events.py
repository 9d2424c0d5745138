"""What servers and devices say is printed as it is, or as JSON like all that is logged."""

import json
import logging
from collections.abc import Iterator

import pytest

from coterie.cli.base import _event, _log


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("coterie", "coterie.deploy")]
    before = [(log, log.handlers, log.propagate, log.level) for log in loggers]
    yield
    for log, handlers, propagate, level in before:
        log.handlers, log.propagate, log.level = handlers, propagate, level


def test_events_are_lines_or_objects(capsys: pytest.CaptureFixture[str]) -> None:
    _log("text")
    _event("The device of 100%s is registered.")
    assert capsys.readouterr() == ("The device of 100%s is registered.\n", "")
    _log("json")
    _event("The device of ben is registered.")
    out, err = capsys.readouterr()
    assert out == ""
    line = json.loads(err)
    assert (line["logger"], line["level"]) == ("coterie.deploy", "INFO")
    assert line["message"] == "The device of ben is registered."
