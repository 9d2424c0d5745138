"""The pages of the site, in the order in which they are listed."""

from typing import TypeAlias

Entry: TypeAlias = "str | dict[str, str | list[Entry]]"

NAVIGATION: list[Entry] = [
    {"Start": "index.md"},
    {
        "Tutorials": [
            "tutorials/index.md",
            {"First run": "tutorials/first-run.md"},
            {"Your own text": "tutorials/own-text.md"},
            {"Your own chats": "tutorials/own-chats.md"},
            {"A method of your own": "tutorials/own-method.md"},
            {"Across machines": "tutorials/across-machines.md"},
            {"On a device": "tutorials/on-device.md"},
            {"Privacy": "tutorials/privacy.md"},
            {"The first hour": "first-hour.md"},
            {"Gallery": "gallery/index.md"},
        ]
    },
    {
        "How-to": [
            {"Your own text": "own-text.md"},
            {"Commands": "commands.md"},
            {"Experiments": "experiments.md"},
            {"Base models": "bases.md"},
            {"From Python": "python.md"},
            {"Use a personal model": "personal.md"},
            {"Export for other programs": "on-device.md"},
            {"Which method?": "which-method.md"},
            {"Choose settings": "tune.md"},
            {"Run on real machines": "deploy.md"},
            {"Many clients": "scale.md"},
            {"Privacy and attackers": "privacy.md"},
            {"Security": "security.md"},
            {"Tools: trackers, the Hub, doctor": "tools.md"},
            {"Write a method": "write-a-method.md"},
            {"Examples": "examples.md"},
        ]
    },
    {"Methods": []},
    {
        "Reference": [
            {"Recipes": "recipes.md"},
            {"Data": "recipes/data.md"},
            {"Model": "recipes/model.md"},
            {"Method": "recipes/method.md"},
            {"Training": "recipes/training.md"},
            {"Aggregation": "recipes/aggregation.md"},
            {"Who takes part": "recipes/participation.md"},
            {"Privacy and attacks": "recipes/privacy.md"},
            {"The command line": "reference/command-line.md"},
            {"The package": "reference/coterie.md"},
            {"Personal models": "reference/personal.md"},
            {"What a method is made of": "reference/methods.md"},
            {"Testing": "reference/testing.md"},
        ]
    },
    {
        "Results": [
            {"What the papers say": "results/index.md"},
            {"How statements are judged": "tables.md"},
            {"From the papers to the code": "paper-index.md"},
            {"Never worse than alone": "research.md"},
            {"Mixed predictions, proven": "theory.md"},
            {"Quickstart": "results/quickstart.md"},
            {"Speed and scale": "results/suite.md"},
            {"Benchmarks": "benchmarks.md"},
        ]
    },
    {
        "Project": [
            {"Architecture": "architecture.md"},
            {"Contributing": "contributing.md"},
            {"Changelog": "changelog.md"},
        ]
    },
]
