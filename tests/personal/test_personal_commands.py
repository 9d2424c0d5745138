"""predict, generate, serve and export as they are used in a terminal."""

import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest
import torch
from test_keyboard import free_port
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.core.files import load, save, write_all_sums
from coterie.models.layout import Layout

TWO = {"ann": Layout(rank=2), "ben": Layout(rank=2, routing="equal")}


def run(*words: object, columns: int = 100) -> subprocess.CompletedProcess[str]:
    """What a command says and returns, in this process."""
    done = CliRunner().invoke(app, list(map(str, words)), env={"COLUMNS": str(columns)})
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def test_predict_shows_all_clients_side_by_side(make_run):
    folder = make_run("few", **TWO)
    done = run("predict", folder, "--text", "cab a", "--top", "2")
    assert done.returncode == 0, done.stderr
    torch.set_num_threads(1)
    for client, model in coterie.load_all(folder).items():
        (line,) = (line for line in done.stdout.splitlines() if line.split()[:1] == [client])
        for word in model.next_words("cab a", 2):
            assert f"{word.word} {word.probability:.1%} {model.speaker(word)}".strip() in line
    assert "cab a …" in done.stdout
    assert "S specialist" in done.stdout
    only = run("predict", folder, "--client", "ben", "--text", "cab a")
    assert "ann" not in only.stdout
    assert "S specialist" not in only.stdout


def test_generate_is_repeatable_by_its_seed(make_run):
    folder = make_run("few", **TWO)
    words = ("generate", folder, "--client", "ann", "--text", "cab", "--tokens", 20)
    first, again, other, greedy = (
        run(*words),
        run(*words),
        run(*words, "--seed", 1),
        run(*words, "--temperature", 0),
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == again.stdout
    assert first.stdout.startswith("cab")
    assert len({first.stdout, other.stdout, greedy.stdout}) == 3
    assert first.stderr == ""


def test_a_text_is_an_argument_an_option_or_asked_for(make_run):
    folder = make_run("few", **TWO)
    for words in (("generate", folder, "--client", "ann"), ("predict", folder)):
        wanted = run(*words, "--text", "cab")
        assert wanted.returncode == 0, wanted.stderr
        given = run(*words, "cab")
        assert given.stderr == ""
        assert given.stdout == wanted.stdout
        asked = CliRunner().invoke(app, list(map(str, words)), input="cab\n")
        assert asked.stderr.startswith("Text: ")
        assert asked.stdout.split() == wanted.stdout.split()
        nothing = CliRunner().invoke(app, list(map(str, words)), input="")
        assert nothing.exit_code == 2
        assert "no text was given" in nothing.stderr
        assert "the same" in run(*words, "cab", "--text", "cab").stderr
    assert run("generate", folder, "cab", "--client", "ann", "--max-new-tokens", 1).stdout


def test_without_out_an_export_is_in_a_new_folder_of_exports(make_run, tmp_path, monkeypatch):
    folder = make_run("few", **TWO)
    monkeypatch.chdir(tmp_path)
    done = run("export", folder, "--client", "ann", "--part", "generalist")
    assert done.returncode == 0, done.stderr
    (made,) = (tmp_path / "exports").iterdir()
    assert made.name.startswith("ann-peft-")
    assert f"exports/{made.name}/export.json" in done.stdout


def test_export_says_what_it_leaves_out(make_run, tmp_path):
    folder = make_run("few", **TWO)
    words = ("export", folder, "--client", "ann", "--format", "peft", "--out", tmp_path / "adapter")
    done = run(*words)
    assert done.returncode == 2
    assert "a fold needs the client's validation text" in done.stderr
    done = run(*words, "--part", "generalist")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "router is left out" in done.stdout
    assert "perplexity was not measured" in done.stdout
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "export.json",
        "README.md",
        "SHA256SUMS",
    }


def test_a_base_that_has_moved_is_named_by_an_option(make_run, bases, tmp_path):
    folder = make_run("few", ann=Layout(rank=2))
    about = folder / "clients/ann/client.json"
    about.write_text(about.read_text().replace(str(bases["few"]), str(tmp_path / "gone")))
    write_all_sums(about.parent)
    lost = run("predict", folder, "--text", "cab")
    assert lost.returncode == 2
    assert "no model folder" in lost.stderr
    assert run("predict", folder, "--text", "cab", "--base", bases["few"]).returncode == 0
    wrong = run("predict", folder, "--text", "cab", "--base", bases["gpt2"])
    assert wrong.returncode == 2
    assert "belongs to another base" in wrong.stderr


@pytest.mark.parametrize("command", ["predict", "generate", "export"])
def test_mistakes_are_refused_in_one_message(command, make_run, tmp_path):
    folder = make_run("few", **TWO)
    options = {
        "predict": ["--text", "a"],
        "generate": ["--text", "a"],
        "export": ["--out", str(tmp_path / "out")],
    }[command]
    done = run(command, folder, "--client", "dan", *options)
    assert done.returncode == 2
    assert re.fullmatch(
        r"coterie: .* has no client 'dan'\n  Its clients: ann, ben\.\n", done.stderr
    )
    assert run(command, tmp_path / "none", *options).returncode == 2


@contextmanager
def heeding_interrupts():
    """A shell ignores SIGINT in what it runs in the background, tests included, and their
    children would inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_serve_answers_and_stops(number, code, make_run):
    pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "coterie",
        "serve",
        str(make_run("few", **TWO)),
        "--port",
        str(port),
    ]
    with heeding_interrupts():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    try:
        told = re.fullmatch(
            rf"Open (http://127\.0\.0\.1:{port}/\?token=\S{{32}}) \(only this machine can\)\. "
            r"Ctrl-C stops it\.\n",
            process.stdout.readline(),
        )
        browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with browser.open(told[1], timeout=10) as answer:
            assert (answer.status, answer.url) == (200, f"http://127.0.0.1:{port}/")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=10)
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(timeout=90) == code
        assert process.stderr.read().endswith("coterie: stopped.\n")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("command", ["predict", "generate", "export"])
def test_values_that_are_not_finite_are_refused(command, make_run, tmp_path):
    folder = make_run("few", ann=Layout(rank=2))
    weights = folder / "clients/ann/adapter.safetensors"
    tensors, metadata = load(weights)
    name = max(tensors)
    tensors[name].view(-1)[0] = float("nan")
    save(weights, tensors, metadata)
    write_all_sums(weights.parent)
    options = {
        "predict": ["--text", "a"],
        "generate": ["--text", "a"],
        "export": ["--out", str(tmp_path / "out")],
    }[command]
    done = run(command, folder, "--client", "ann", *options)
    assert done.returncode == 2
    assert f"{name!r} holds values that are not finite" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_made_is_refused(make_run, tmp_path):
    (tmp_path / "file").write_text("")
    done = run(
        "export", make_run("few", **TWO), "--client", "ann", "--out", tmp_path / "file/adapter"
    )
    assert done.returncode == 2
    assert "cannot make the folder" in done.stderr
