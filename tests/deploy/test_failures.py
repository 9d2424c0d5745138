"""Strangers, devices that die and a server that dies, with the commands of docs/deploy.md and
real processes.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from figures import as_json
from terminals import MINUTE, OWN, Site, kill, left, loaded, terminals, texts, until, written

from coterie.deploy.keys import Link, free_port
from coterie.runs.run import run

pytestmark = pytest.mark.slow


def test_strangers_are_refused_and_never_appear_in_a_run(tmp_path: Path) -> None:
    with terminals(tmp_path) as open:
        site = Site(tmp_path, open, "ann", "ben")
        site.server("ann", "ben")
        subprocess.run(
            [
                "ssh-keygen",
                "-q",
                "-t",
                "ecdsa",
                "-b",
                "384",
                "-N",
                "",
                "-f",
                str(tmp_path / "stranger"),
            ],
            check=True,
        )
        stranger = site.client(
            "cleo", "--ca", str(site.keys / "ca.crt"), "--key", str(tmp_path / "stranger")
        )
        for client in ("ann", "ben"):
            site.client(client)
        plain = open(
            "plain",
            "client",
            "--server",
            f"127.0.0.1:{site.ports[0]}",
            "--client",
            "cleo",
            "--insecure",
        )
        assert plain.ends() == 2
        assert "requires TLS" in plain.text
        links = [
            ["--insecure"],
            ["--root-certificates", str(site.keys / "ca.crt")],
        ]  # no TLS; TLS, but no key
        names = [
            f'client="cleo" home="{tmp_path}/flower"',
            f'client="ann" home="{tmp_path}/flower"',
        ]
        for number, link in enumerate(links):
            flower = " ".join(
                f"'{part}'"
                for part in [
                    "--superlink",
                    f"127.0.0.1:{site.ports[0]}",
                    *link,
                    "--port",
                    str(free_port()),
                ]
            )
            open(
                f"flower-{number}",
                f"exec flower-supernode {flower} --node-config '{names[number]}'",
                shell=True,
            )
        assert site.submit(written(tmp_path, method__rounds=1), 2).ends() == 0
        result = json.loads((site.run / "result.json").read_text())
        assert set(result["clients"]) == {"ann", "ben"}
        assert result["lost"] == {}
        assert not site.lines("lost")
        stranger.says("[code: 2004]")
        assert stranger.text.count("[code: 2004]") == 1
        assert not list((tmp_path / "flower").glob("*"))
        assert not list((tmp_path / "cleo/home").glob("*/states"))


@pytest.mark.parametrize(
    ("name", "program"),
    [("resident", "-m coterie resident"), ("supernode", "bin/flower-supernode")],
)
def test_a_device_that_is_killed_comes_back_and_goes_on_from_its_state(
    tmp_path: Path, name: str, program: str
) -> None:
    with terminals(tmp_path) as open:
        site = Site(tmp_path, open, "ann", "ben")
        site.server("ann", "ben")
        ben, _ = site.client("ben"), site.client("ann")
        running = site.submit(written(tmp_path, method__rounds=1000, quorum__deadline=20), 2)
        until(lambda: len(site.lines("train", "ben")) >= 2, "two rounds of ben")
        kill(tmp_path / "ben", program)
        missed = until(lambda: site.lines("lost", "ben"), "a round without ben")[0]["round"]
        ben.says(f"The {name} ended and is started again.")
        until(
            lambda: [line for line in site.lines("train", "ann") if line["round"] >= missed],
            "ann goes on",
        )
        until(
            lambda: [line for line in site.lines("train", "ben") if line["round"] > missed],
            "ben again",
            5 * MINUTE,
        )
        assert running.process.poll() is None
        assert not [
            line
            for line in site.lines("note", "ben")
            if "starts from the beginning" in line["note"]
        ]
        assert running.stop() == 143
        assert "The run continues" in running.text


def test_a_server_that_is_killed_goes_on_from_its_checkpoint_to_the_same_result(
    tmp_path: Path,
) -> None:
    recipe = written(tmp_path, method__rounds=6)
    (expected,) = as_json(
        run(loaded(recipe, texts(tmp_path / "texts", "ann", "ben")), tmp_path / "one")
    )
    with terminals(tmp_path) as open:
        site = Site(tmp_path, open, "ann", "ben")
        server = site.server("ann", "ben")
        for client in ("ann", "ben"):
            site.client(client)
        first = site.submit(recipe, 2)
        until((site.run / "checkpoints/round-00001").exists, "a checkpoint")
        kill(tmp_path / "server", "flwr-serverapp")
        assert first.ends() == 1
        assert "the run ended as failed" in first.text
        second = site.submit(recipe, 2, "--resume")
        until((site.run / "checkpoints/round-00003").exists, "another checkpoint")
        kill(tmp_path / "server", "flower-superlink")
        server.says("The SuperLink ended and is started again")
        assert second.ends() == 1
        until(
            lambda: Link(f"127.0.0.1:{site.ports[0]}", site.keys / "ca.crt").answers("fleet"),
            "a SuperLink again",
        )
        server.process.kill()
        until(lambda: not left(tmp_path / "server/home"), "what it had started ends with it")
        server = site.server()
        third = site.submit(recipe, 2, "--resume")
        assert third.ends() == 0, third.text
        assert "is registered" not in server.text
        begun = [
            int(number)
            for terminal in (second, third)
            for number in re.findall(r"round (\d+)/6", terminal.text)
        ]
        assert begun[0] >= 2
        result = json.loads((site.run / "result.json").read_text())
        own = OWN | {"lost"}  # a round that was under way is asked for again
        assert {k: v for k, v in result.items() if k not in own} == json.loads(
            json.dumps({k: v for k, v in expected.items() if k not in own})
        )
        for client in ("ann", "ben"):
            (mine,) = (tmp_path / client / "home").glob("*/clients/*/adapter.safetensors")
            assert (
                mine.read_bytes()
                == (tmp_path / f"one/clients/{client}/adapter.safetensors").read_bytes()
            )


def test_a_run_whose_metrics_are_lost_goes_on_where_that_is_meant(tmp_path: Path) -> None:
    recipe = written(tmp_path, method__rounds=1000)
    with terminals(tmp_path) as open:
        site = Site(tmp_path, open, "ann", "ben")
        site.server("ann", "ben")
        for client in ("ann", "ben"):
            site.client(client)
        first = site.submit(recipe, 2)
        until((site.run / "checkpoints/round-00002").exists, "a checkpoint")
        kill(tmp_path / "server", "flwr-serverapp")
        assert first.ends() == 1
        done = int(max((site.run / "checkpoints").glob("round-?????")).name.removeprefix("round-"))
        (site.run / "metrics.jsonl").unlink()
        second = site.submit(recipe, 2, "--resume")
        assert second.ends() == 1
        assert "metrics of the rounds before it are lost" in second.text
        assert "--resume-changed" in second.text
        assert not site.lines("train")
        third = site.submit(recipe, 2, "--resume-changed")
        third.says(f"round {done + 2}/1000")
        begun = [
            line["round"] for line in until(lambda: site.lines("train"), "metrics of what follows")
        ]
        assert min(begun) == done + 1
        assert third.stop() == 143
