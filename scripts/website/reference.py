"""The reference pages: the public names, what methods are made of, and the command line."""

import inspect
from collections.abc import Iterable
from typing import Any

from typer.main import get_command

import coterie
from coterie.cli import app

PERSONAL = (
    "coterie.personal.PersonalModel",
    "coterie.personal.ManyModels",
    "coterie.personal.PersonalClassifier",
    "coterie.personal.Word",
    "coterie.personal.Prediction",
    "coterie.personal.About",
)
METHOD = {
    "The contract": (
        "coterie.methods.base.Method",
        "coterie.core.protocol.Ask",
        "coterie.core.protocol.Sends",
        "coterie.core.protocol.task",
        "coterie.core.roles.Role",
    ),
    "The client": (
        "coterie.client.blueprint.AnyClient",
        "coterie.client.client.Client",
        "coterie.client.settings.Training",
    ),
    "The model's shape": ("coterie.models.layout.Layout",),
    "Families": tuple(
        f"coterie.methods.templates.{name}"
        for name in (
            "Aggregating",
            "Averaged",
            "Alone",
            "OneAdapter",
            "Ranked",
            "Routed",
            "TwoExperts",
        )
    ),
    "Aggregation": (
        "coterie.aggregation.uniform_mean",
        "coterie.aggregation.weighted_mean",
        "coterie.aggregation.by_holders",
        "coterie.aggregation.mixtures",
        "coterie.aggregation.midpoints",
        "coterie.aggregation.agreement",
    ),
    "Data": ("coterie.data.Section", "coterie.data.Source"),
}
TESTING = tuple(
    f"coterie.testing.{name}" for name in ("check_method", "Checked", "NotApplicable", "World")
)


def documented(names: Iterable[str]) -> str:
    """Return the lines from which the docstrings of these names are rendered."""
    return "\n\n".join(f"::: {name}" for name in names)


def public() -> str:
    """Return the page of `coterie.__all__`."""
    names = [name for name in coterie.__all__ if name != "__version__"]
    functions = [name for name in names if inspect.isfunction(getattr(coterie, name))]
    classes = [name for name in names if name not in functions]
    return "\n\n".join(
        [
            "# The package `coterie`",
            "All public names. Their examples are run by the tests. [From Python](../python.md) "
            "shows them in use. `coterie.__version__` is the version.",
            "## Functions",
            documented(f"coterie.{name}" for name in functions),
            "## Classes",
            documented(f"coterie.{name}" for name in classes),
        ]
    )


def methods() -> str:
    """Return the page of what a method is made of."""
    parts = [
        "# What a method is made of",
        "For authors of methods: [Write a method](../write-a-method.md) shows it in use, and "
        "[Architecture](../architecture.md) how it fits together.",
    ]
    for title, names in METHOD.items():
        parts += [f"## {title}", documented(names)]
    return "\n\n".join(parts)


def pages() -> dict[str, str]:
    """Return the reference pages, by their path on the site."""
    personal = (
        "# Personal models\n\nWhat `coterie.load`, `load_all` and `load_many` return: "
        "[A personal model in use](../personal.md).\n\n" + documented(PERSONAL)
    )
    testing = (
        "# `coterie.testing`\n\nThe conformance suite, for authors of methods: "
        "[Check it](../write-a-method.md#check-it).\n\n" + documented(TESTING)
    )
    return {
        "reference/coterie.md": public(),
        "reference/personal.md": personal,
        "reference/methods.md": methods(),
        "reference/testing.md": testing,
        "reference/command-line.md": command_line(),
    }


def command_line() -> str:
    """Return the page of all commands and their options, from the program itself."""
    group: Any = get_command(app)
    parts = [
        "# The command line",
        "`coterie COMMAND --help` says the same in a terminal. Exit codes: 0 done, 1 failed while "
        "running, 2 refused before anything started, 130 and 143 stopped by a signal, which "
        "leaves a run that `--resume` continues.",
    ]
    for name, command in sorted(group.commands.items()):
        if not command.hidden:
            parts += [f"## `coterie {name}`", *about(command)]
    return "\n\n".join(parts)


def about(command: Any) -> list[str]:
    """Return what a command does, and its arguments and options."""
    context = command.context_class(command)
    records = [(p, p.get_help_record(context)) for p in command.params]
    shown = [record for _, record in records if record and record[0] != "--help"]
    rows = [f"| {cell(left)} | {cell(right)} |" for left, right in shown]
    said = inspect.cleandoc(command.help or "").replace("\b\n", "").split("\f")[0]
    head = ["| argument or option | meaning |", "| --- | --- |"]
    return [said, "\n".join([*head, *rows])] if rows else [said]


def cell(text: str) -> str:
    """Return text for a cell of a table, and options as code."""
    text = " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
    return f"`{text}`" if text.startswith("-") else text
