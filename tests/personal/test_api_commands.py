"""`serve --api` as it is used in a terminal, and as the documentation has it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from test_keyboard import free_port
from test_personal_commands import TWO, heeding_interrupts
from typer.testing import CliRunner

from coterie.cli import app
from coterie.models.layout import Layout

PAGE = Path(__file__).parents[2] / "docs/personal.md"


@contextmanager
def serving(*words: object, environment: dict[str, str] | None = None):
    """A server in a process of its own; yields the process, its address and what it printed."""
    port = free_port()
    command = [sys.executable, "-m", "coterie", "serve", *map(str, words), "--api", "--port", port]
    with heeding_interrupts():
        process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    lines = []
    try:
        while not lines or "OPENAI_BASE_URL" not in lines[-1]:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            lines.append(line)
        yield process, f"http://127.0.0.1:{port}/v1", lines
    finally:
        process.kill()
        process.communicate()


def test_it_says_where_it_is_answers_as_the_documentation_says_and_stops(make_run):
    """The curl and the Python of the page on personal models, against some clients of a run."""
    section = PAGE.read_text().split("\n## `serve --api`")[1].split("\n## ")[0]
    (shell,) = (block for block in section.split("```")[1::2] if block.startswith("\ncurl"))
    (python,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    folder = make_run("llama", network=Layout(rank=2), numbers=Layout(rank=2), other=Layout(rank=2))
    chosen = ("--client", "network", "--client", "numbers")
    with serving(folder, *chosen) as (process, address, lines):
        assert lines[0] == f"2 models at {address}. Ctrl-C stops it.\n"
        assert lines[1] == "  models: network, numbers\n"
        told = r"  export OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S{32})\n"
        told_address, token = re.fullmatch(told, lines[2]).groups()
        own = os.environ | {"OPENAI_BASE_URL": told_address, "OPENAI_API_KEY": token}
        said = []
        for command in (["bash", "-c", shell], [sys.executable, "-c", python]):
            done = subprocess.run(
                command, env=own, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            said.append(done.stdout)
        assert json.loads(said[0])["choices"][0]["finish_reason"] in ("length", "stop")
        assert said[1].strip()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        assert process.stderr.read() == "coterie: stopped.\n"  # no text, no caller, no token


def test_one_clients_folder_and_a_token_of_the_environment(make_run):
    folder = make_run("few", **TWO) / "clients/ann"
    token = "of-the-environment"
    with serving(folder, environment={"COTERIE_TOKEN": token}) as (_, address, lines):
        assert lines[0].startswith("1 model at ")
        assert lines[2:] == [f"  export OPENAI_BASE_URL={address}\n"]
        assert token not in "".join(lines)
        client = openai.OpenAI(base_url=address, api_key=token)
        assert [model.id for model in client.models.list()] == ["ann"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--api", "--client", "dan"], r"has no client 'dan'\n  Its clients: ann, ben\."),
        (["--api", "--token", "short"], "the token is unusable"),
        (["--api", "--context", "65"], r"--context 65 is longer than the base's, 64 tokens"),
        (["--batch", "3"], "--batch needs --api"),
        (["--host", "0.0.0.0"], "--host needs --api"),
        (["--token", "of-the-tests"], "--token needs --api"),
    ],
)
def test_mistakes_are_refused_in_one_message(make_run, words, problem):
    done = CliRunner().invoke(app, ["serve", str(make_run("few", **TWO)), *words])
    assert done.exit_code == 2
    assert re.fullmatch(rf"coterie: .*{problem}.*\n", done.stderr, re.DOTALL), done.stderr
    assert done.stderr.count("\n") == 2


def test_classifiers_are_refused(classifiers):
    done = CliRunner().invoke(app, ["serve", str(classifiers), "--api"])
    assert done.exit_code == 2
    assert "holds classifiers, which continue no text\n  Leave out --api" in done.stderr


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    import coterie

    out = tmp_path_factory.mktemp("run") / "digits"
    coterie.run("cobo-digits", out=out, method={"rounds": 1}, compare_with=[])
    return out


def test_logs_are_json_where_that_is_asked_for():
    runner = CliRunner()
    plain = runner.invoke(app, ["serve", "absent", "--access-log"])
    assert plain.stderr.startswith("coterie: --access-log needs --api")
    done = runner.invoke(app, ["--log-format", "json", "serve", "absent", "--api"])
    assert done.exit_code in (1, 2)
    entry = json.loads(done.stderr)
    assert entry.keys() == {"time", "level", "logger", "message"}
    assert (entry["level"], entry["logger"]) == ("ERROR", "coterie")
    assert entry["message"].startswith("absent holds no personal models")
