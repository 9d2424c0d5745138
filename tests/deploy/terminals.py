"""Real commands in processes of their own, as somebody would type them, and a tiny federation of
texts for them.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.deploy.keys import free_port
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

RECIPE = """
data: {kind: folders}
model: {base: embedded, context: 32}
method: {name: comigs-1g1s, rounds: 2, local_steps: 1, router_every: 2, router_steps: 1}
training: {batch_size: 4, experts: {lr: 1.0e-2}, routers: {lr: 2.0e-3}}
quorum: {deadline: 30}
evaluate_every: 0
samples: false
"""
WORDS = {
    "ann": "the tea is hot and the cup is blue",
    "ben": "a train goes over the old bridge",
    "cleo": "we sing low songs of rain",
}
MINUTE = 60.0
OWN = {"wall_s", "peak_memory_bytes", "machine"}  # of a result: what is of the machine that made it


def texts(folder: Path, *clients: str) -> Path:
    """A folder with a folder of texts per client, with splits of its own."""
    for client in clients:
        rng, words = random.Random(client), WORDS[client].split()
        (folder / client).mkdir(parents=True)
        for split, number in {"train": 40, "valid": 8, "test": 8}.items():
            paragraphs = (" ".join(rng.choices(words, k=30)) for _ in range(number))
            (folder / client / f"{split}.txt").write_text("\n\n".join(paragraphs))
    return folder


def written(folder: Path, **changes: Any) -> Path:
    """The recipe as a file, with other rounds, say."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(RECIPE)
    path.write_text(
        recipes.dump(
            recipes.load(
                str(path), [f"{key.replace('__', '.')}={value}" for key, value in changes.items()]
            )
        )
    )
    return path


def loaded(path: Path, data: Path) -> Recipe:
    return recipes.load(str(path), [f"data.path={data}"])


def until(true: Callable[[], Any], what: str, within: float = 3 * MINUTE) -> Any:
    """Wait for something."""
    end = time.monotonic() + within
    while not (found := true()):
        assert time.monotonic() < end, f"not within {within:g} s: {what}"
        time.sleep(0.1)
    return found


def demonstration(recipe: Path, data: Path) -> tuple[str, ...]:
    """Return the words that run a recipe on devices of this machine, into `run`."""
    words = "deploy", "--demo", "--recipe", str(recipe), "--set", f"data.path={data}"
    return *words, "--out", "run"


class Terminal:
    """A command that runs.

    Args:
        folder: In which it was given; its output goes to a file there.
        command: `coterie`'s arguments, or the whole of a shell's line.
    """

    def __init__(self, folder: Path, *command: str, shell: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / f"terminal-{len(list(folder.glob('terminal-*')))}.txt"
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        with open(self.file, "wb") as out:
            self.process = subprocess.Popen(
                ["bash", "-e", "-c", command[0]]
                if shell
                else [sys.executable, "-m", "coterie", *command],
                cwd=folder,
                env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": path},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self.file.read_text()

    def says(self, what: str, within: float = 3 * MINUTE) -> None:
        def said() -> bool:
            assert what in self.text or self.process.poll() is None, (
                f"ended without {what!r}:\n{self.text}"
            )
            return what in self.text

        until(said, f"{what!r} in\n{self.text}", within)

    def ends(self, within: float = 6 * MINUTE) -> int:
        try:
            return self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {within:g} s:\n{self.text}") from None

    def stop(self, how: int = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.ends(MINUTE)


class Site:
    """A server at two free ports, its keys, and devices with data of their own.

    Args:
        folder: For all of it.
        open: Callable[..., Terminal]s a terminal in a folder of that one.
        clients: Whose keys are made.
    """

    def __init__(self, folder: Path, open: Callable[..., Terminal], *clients: str) -> None:
        self.folder, self.open, self.ports = folder, open, (free_port(), free_port())
        assert (
            open(
                "server",
                "keys",
                "keys",
                *(part for client in clients for part in ("--client", client)),
            ).ends()
            == 0
        )
        self.keys, self.run = folder / "server/keys", folder / "server/run"
        self.door = self.ports[0]

    def server(self, *new: str) -> Terminal:
        """Which says whose devices it has come to know; what it knew before it was killed it
        knows.
        """
        ports = ("--port", str(self.ports[0]), "--runs-port", str(self.ports[1]))
        terminal = self.open(
            "server", "server", "--keys", "keys", "--host", "127.0.0.1", *ports, "--home", "home"
        )
        terminal.says("Ctrl-C stops it.")
        for client in new:
            terminal.says(f"The device of {client} is registered.")
        return terminal

    def client(self, client: str, *more: str) -> Terminal:
        """Its data are made when it is started for the first time."""
        if not (self.folder / client / "data").exists():
            texts(self.folder / client / "data", client)
        known = ("--ca", str(self.keys / "ca.crt"), "--key", str(self.keys / "clients" / client))
        server = ("--server", f"127.0.0.1:{self.door}")
        return self.open(
            client,
            "client",
            *server,
            "--client",
            client,
            "--data",
            "data",
            "--home",
            "home",
            *(more or known),
        )

    def submit(self, recipe: Path, clients: int, *more: str) -> Terminal:
        server = ("--server", f"127.0.0.1:{self.ports[1]}", "--ca", "keys/ca.crt", "--home", "home")
        return self.open(
            "server",
            "submit",
            str(recipe),
            *server,
            "--clients",
            str(clients),
            "--out",
            self.run.name,
            *more,
        )

    def lines(self, kind: str, client: str = "") -> list[dict[str, Any]]:
        """Those of metrics.jsonl."""
        path = self.run / "metrics.jsonl"
        found = (
            [
                json.loads(line)
                for line in path.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            if path.exists()
            else []
        )
        return [line for line in found if line["kind"] == kind and client in ("", line["client"])]


@contextmanager
def terminals(folder: Path) -> Iterator[Callable[..., Terminal]]:
    """Opens terminals in folders of this one; in the end all are closed, and nothing is left
    running.
    """
    opened: list[Terminal] = []

    def opening(where: str, *command: str, shell: bool = False) -> Terminal:
        opened.append(Terminal(folder / where, *command, shell=shell))
        return opened[-1]

    try:
        yield opening
    finally:
        for terminal in reversed(opened):
            if terminal.process.poll() is None:
                terminal.stop()
    end = (
        time.monotonic() + MINUTE
    )  # what Flower's own programs started looks every few seconds whether they are still there
    while left(folder) and time.monotonic() < end:
        time.sleep(0.5)
    assert not left(folder), left(folder)


def left(folder: Path, *words: str) -> dict[int, str]:
    """The command lines of processes that have to do with a folder, by their ids; only those
    that have all of the words in them.
    """
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            line, environment = (
                (place / name).read_bytes().replace(b"\0", b" ").decode(errors="replace")
                for name in ("cmdline", "environ")
            )
        except (OSError, ValueError):  # no process, or no more
            continue
        if (
            int(place.name) != os.getpid()
            and line
            and str(folder) in line + environment
            and all(word in line for word in words)
        ):
            found[int(place.name)] = line
    return found


def kill(folder: Path, *words: str) -> None:
    """Kill -9 for the one process of a folder with these words in its command line."""
    (process,) = left(folder, *words)
    os.kill(process, signal.SIGKILL)
