"""Whatever the format: what is asked for is checked first, what is written is run, and a summary
says what it is.
"""

import json
import re
import subprocess
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import version

import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli.base import app
from coterie.core.errors import ExportError
from coterie.export import FORMATS, Source, export
from coterie.export.format import TorchRuntime
from coterie.models.architecture import locate
from coterie.models.layout import Layout


def command(*words: object):
    return CliRunner().invoke(app, ["export", *map(str, words)])


def test_everybody_of_a_quickstart_is_exported_and_measured(quickstart, tmp_path):
    done = command(quickstart, "--all", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert done.stderr == ""
    summary = json.loads((tmp_path / "out/export.json").read_text())
    models = coterie.load_all(quickstart)
    assert list(summary["clients"]) == list(models) == list(coterie.personal.clients_of(quickstart))
    base = f"{locate('embedded')}/model.safetensors"
    with open(base, "rb") as file:
        assert summary["base"]["sha256"]["model.safetensors"] == sha256(file.read()).hexdigest()
    assert summary["base"]["name"] == "embedded"
    assert summary["versions"]["torch"] == version(
        "torch"
    )  # torch.__version__ names the build, too
    assert summary["outputs"]["logits"]["shape"][-1] == 4096
    result = json.loads((quickstart / "result.json").read_text())
    for client, entry in summary["clients"].items():
        for name, file in entry["files"].items():
            content = (tmp_path / "out" / name).read_bytes()
            assert file == {"bytes": len(content), "sha256": sha256(content).hexdigest()}
        assert entry["check"]["difference"] < 1e-4
        assert entry["check"]["tokens"] == 199
        measured = result["clients"][client]["test"]
        assert entry["check"]["original"] == pytest.approx(measured, rel=1e-4)
        shown = f"perplexity {entry['check']['perplexity']:.2f}, of the personal model"
        assert shown in done.output


def test_mistakes_are_refused_with_the_remedy(make_run, own_text, tmp_path, monkeypatch):
    run = make_run("llama", ann=Layout(rank=2), ben=Layout(rank=2))
    mistakes = {
        ("--client", "dan"): r"no client 'dan'\n.*ann, ben",
        ("--client", "ann", "--all"): "--all and --client exclude each other",
        ("--all", "--data", own_text): "--data is the text of one client",
        ("--client", "ann", "--format", "tflite"): r"--format tflite: unknown\n  peft: .*",
        ("--client", "ann", "--part", "half"): r"no --part half\n.*fold, generalist",
        ("--client", "ann", "--precision", "q8_0"): r"no --precision q8_0\n.*f32, f16",
        ("--client", "ann", "--format", "mixtral", "--part", "fold"): r"no --part fold\n.*routed",
        ("--client", "ann", "--chat"): r"--format peft has no --chat\n.*--format web",
        ("--client", "ann", "--expert", "G", "--part", "fold"): "for an export of one expert",
        ("--client", "ann", "--data", tmp_path / "none"): "none",
    }
    for words, message in mistakes.items():
        refused = command(run, "--out", tmp_path / "out", *words)
        assert refused.exit_code == 2, refused.output
        assert re.search(message, refused.stderr), refused.stderr
    monkeypatch.setattr(type(FORMATS["peft"]), "packages", ("no_such_package",))
    missing = command(run, "--client", "ann", "--out", tmp_path / "out")
    assert missing.exit_code == 2
    assert re.search(r"needs no_such_package, .*\n.*pip install -e '\.\[export\]'", missing.stderr)
    assert not (tmp_path / "out").exists()


def test_what_does_not_compute_the_same_is_not_kept(make_run, tmp_path, monkeypatch):
    run = make_run("llama", ann=Layout(specialists=0, rank=2))
    whole = FORMATS["peft"].runtime

    @contextmanager
    def other(client, written):
        with whole(client, written) as runtime, torch.no_grad():
            next(iter(runtime.model.parameters())).mul_(1.5)
            yield TorchRuntime(runtime.model)

    @contextmanager
    def broken(client, written):
        raise RuntimeError("it cannot read that")
        yield

    for runtime, message in ((other, "differs from"), (broken, "it cannot read that")):
        monkeypatch.setattr(FORMATS["peft"], "runtime", runtime)
        with pytest.raises(ExportError, match=message):
            export(Source(run), "peft", tmp_path / "out")
        assert list(tmp_path.iterdir()) == [run]


def test_one_text_of_a_client_alone_folds_and_measures(make_run, own_text, tmp_path):
    """As on a device, whose folder of a client lies beside no recipe."""
    run = make_run("llama", ann=Layout(rank=2))
    folder = run / "clients/ann"
    (found,) = export(Source(folder, data=own_text), "peft", tmp_path / "out")
    (client,) = Source(folder, data=own_text).load()
    nll, tokens = client.model.score(client.test.scoring(4))
    assert found.check.tokens == tokens > 100
    assert found.check.original == pytest.approx(torch.tensor(nll / tokens).exp().item(), rel=1e-4)
    assert "recipe.yaml" in Source(folder).load()[0].absent


def test_the_text_of_a_client_is_that_of_its_run(quickstart):
    (client,) = Source(quickstart / "clients/network").load()
    (same,) = Source(quickstart, "network").load()
    assert client.test.digest() == same.test.digest()
    assert (len(client.valid), len(client.test)) == (200, 200)


def test_one_flipped_bit_of_any_file_shows_by_its_checksum(make_run, tmp_path):
    source = Source(make_run("llama", ann=Layout(rank=2), ben=Layout(rank=2)), everyone=True)
    export(source, "peft", tmp_path / "out", part="generalist")
    out, check = tmp_path / "out", ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    subprocess.run(check, cwd=out, check=True)
    listed = [line[66:] for line in (out / "SHA256SUMS").read_text().splitlines()]
    files = [path for path in out.rglob("*") if path.is_file() and path.name != "SHA256SUMS"]
    assert listed == sorted(path.relative_to(out).as_posix() for path in files)
    assert {"export.json", "ann/adapter_model.safetensors"} <= {*listed}
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        done = subprocess.run(check, cwd=out, capture_output=True, text=True, check=False)
        assert f"{file.relative_to(out)}: FAILED" in done.stdout
        file.write_bytes(whole)
