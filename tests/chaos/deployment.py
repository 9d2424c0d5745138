"""A server and two devices over TLS, and runs on them that are disturbed."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from network import FAULTS, Network
from terminals import MINUTE, OWN, Site, Terminal, left, loaded, texts, until, written

from coterie.deploy.keys import Link
from coterie.runs.recipes.recipe import Recipe

PEOPLE = ("ann", "ben")
ROUNDS = 3
_LONGEST = 10 * MINUTE  # for a run that is not disturbed any more, however busy the machine
PROGRAMS = {  # of a machine: words of their command lines
    "server": {
        "the SuperLink": "bin/flower-superlink",
        "the run's program": "bin/flwr-serverapp",
        "what starts it": "bin/flower-superexec",
    },
    "device": {
        "the SuperNode": "bin/flower-supernode",
        "the resident process": "-m coterie resident",
        "what starts tasks": "bin/flower-superexec",
    },
}


def tiny(folder: Path) -> Recipe:
    """Return a recipe that waits for all of its clients, so that its result is one and the same."""
    path = written(
        folder,
        method__rounds=ROUNDS,
        quorum__min_clients=len(PEOPLE),
        quorum__otherwise="wait",
    )
    data = folder / "texts"
    return loaded(path, data if data.exists() else texts(data, *PEOPLE))


@dataclass(frozen=True)
class Disturbance:
    """What happens to a run.

    Args:
        after: Rounds that are done by then.
        delay: Seconds after that.
        act: Does it, and returns what it did.
    """

    after: int
    delay: float
    act: Callable[[], str]


class Deployment:
    """A server and devices of which something fails now and then.

    Args:
        folder: For all of it.
        open: Opens a terminal in a folder of that one.
        rng: Decides what happens when.
        undisturbed: The folder of the run in one process.
        say: Called with what happens.
    """

    def __init__(
        self,
        folder: Path,
        open: Callable[..., Terminal],
        rng: random.Random,
        undisturbed: Path,
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.rng, self.undisturbed, self.say = folder, rng, undisturbed, say
        began = time.monotonic()
        for machine in ("server", *PEOPLE):
            (folder / machine / "faults").mkdir(parents=True)
        self.site = Site(folder, open, *PEOPLE)
        self.network = Network(self.site.ports[0], random.Random(rng.random()))
        self.site.door = self.network.port
        self._commands = {"server": {"coterie server": self.site.server(*PEOPLE)}} | {
            client: {"coterie client": self.site.client(client)} for client in PEOPLE
        }
        # Until a device is asked again: as slow as the machine was so far.
        self._deadline = max(15.0, time.monotonic() - began)
        self._runs = 0

    # Disturbances.

    def kill(self) -> str:
        """Kill -9 for one program."""
        machine = self.rng.choice(self._machines)
        programs = PROGRAMS["server" if machine == "server" else "device"]
        what = self.rng.choice([*programs, *self._commands[machine]])
        if what in self._commands[machine]:
            command = self._commands[machine][what].process
            command.kill()
            command.wait()
            return f"kill -9 of {what} on {machine}, process {command.pid}"
        victims = left(self.folder / machine, programs[what])
        if not victims:
            return f"{what} on {machine} is not running just now"
        number = self.rng.choice(sorted(victims))
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return f"kill -9 of {what} on {machine}, process {number}"

    def set_clock(self) -> str:
        """Have one machine's clock, or all of them, jump, and jump back."""
        machines = self.rng.choice([["server"], *([client] for client in PEOPLE), self._machines])
        seconds = self.rng.choice((-1, 1)) * 10 ** self.rng.uniform(0, 5)
        self._for_a_while("clock", f"{seconds}", machines)
        return f"clock of {', '.join(machines)} wrong by {seconds:.0f} s, and right again"

    def fill_disk(self) -> str:
        """Have one machine's disk be full for a while, for all files or one of them."""
        machine = self.rng.choice(self._machines)
        written_files = sorted(
            path.name for path in (self.folder / machine).rglob("*") if path.is_file()
        )
        word = self.rng.choice(["", self.rng.choice(written_files)])
        self._for_a_while("full", word, [machine])
        return f"disk of {machine} full for {word or 'all files'}, and free again"

    def break_network(self) -> str:
        """Have the network be bad for a while."""
        fault = self.rng.choice(list(FAULTS))
        self.network.break_down(fault)
        time.sleep(self.rng.uniform(1, 8))
        self.network.break_down("")
        return f"network {fault} ({FAULTS[fault]}), and well again"

    @property
    def _machines(self) -> list[str]:
        return ["server", *PEOPLE]

    def _for_a_while(self, fault: str, text: str, machines: Sequence[str]) -> None:
        places = [self.folder / machine / "faults" / fault for machine in machines]
        for place in places:
            place.with_suffix(".new").write_text(text)
            place.with_suffix(".new").replace(place)
        time.sleep(self.rng.uniform(1, 8))
        for place in places:
            place.unlink()

    # A run.

    def run(self, disturbances: Sequence[Disturbance]) -> None:
        """Run the recipe while it is disturbed, start again what has ended, and compare the end
        with the undisturbed run.
        """
        self._runs += 1
        self.site.run = self.folder / f"server/run-{self._runs}"
        before = self._personal()
        self._submit()
        for disturbance in disturbances:
            until(
                lambda after=disturbance.after: (
                    self._rounds() >= after or self._running.process.poll() is not None
                ),
                f"{disturbance.after} rounds of\n{self._running.text}",
                _LONGEST,
            )
            time.sleep(disturbance.delay)
            self.say(disturbance.act())
            self._revive()
            if self._running.process.poll():
                self._submit_again()
        while self._running.ends(_LONGEST) != 0:
            self._submit_again()
        self._compare(self._personal() - before)

    @property
    def _running(self) -> Terminal:
        return self._commands["server"]["coterie submit"]

    def _rounds(self) -> int:
        """Return how many rounds are in checkpoints."""
        return max(
            (
                int(path.name.removeprefix("round-"))
                for path in self.site.run.glob("checkpoints/round-?????")
            ),
            default=0,
        )

    def _submit(self) -> None:
        more = ["--set", f"quorum.deadline={self._deadline:.0f}"]
        more += ["--resume"] if self.site.run.exists() else []
        recipe = self.folder.parent / "tiny.yaml"
        self._commands["server"]["coterie submit"] = self.site.submit(recipe, len(PEOPLE), *more)

    def _submit_again(self) -> None:
        """Submit a run again that has ended by a fault; it must have said by which."""
        text, code = self._running.text, self._running.process.returncode
        if code != -signal.SIGKILL:
            assert code in (1, 2), f"exit code {code}:\n{text}"
            problems = [line for line in text.splitlines() if line.startswith("coterie: ")]
            assert problems, f"no reason is given:\n{text}"
            assert "Traceback" not in text, text
            self.say(f"  refused, exit code {code}: {problems[-1]}")
        self._revive()
        time.sleep(2.0)
        self._submit()

    def _revive(self) -> None:
        """Start the commands again that were killed, as their owners would."""
        for machine, commands in self._commands.items():
            for command, terminal in commands.items():
                if command != "coterie submit" and terminal.process.poll() is not None:
                    commands[command] = (
                        self.site.server() if machine == "server" else self.site.client(machine)
                    )
        devices = Link(f"127.0.0.1:{self.site.ports[0]}", self.site.keys / "ca.crt")
        until(lambda: devices.answers("fleet"), "the server answers")

    def _personal(self) -> set[Path]:
        return {
            path
            for client in PEOPLE
            for path in (self.folder / client / "home").glob(f"*/clients/{client}")
        }

    def _compare(self, personal: set[Path]) -> None:
        """Compare result, metrics, shared tensors and personal models with the undisturbed run."""
        run = self.site.run
        assert _result(run) == _result(self.undisturbed)
        assert _figures(run) == _figures(self.undisturbed)
        shared = f"checkpoints/round-{ROUNDS:05}/server.safetensors"
        assert (run / shared).read_bytes() == (self.undisturbed / shared).read_bytes()
        assert sorted(path.name for path in personal) == sorted(PEOPLE)
        for path in personal:
            expected = self.undisturbed / "clients" / path.name / "adapter.safetensors"
            assert (path / "adapter.safetensors").read_bytes() == expected.read_bytes()


def _result(run: Path) -> object:
    """Return a result without what depends on the machine, and on when somebody was away."""
    result = json.loads((run / "result.json").read_text())
    return {key: value for key, value in result.items() if key not in OWN | {"lost"}}


def _figures(run: Path) -> list[str]:
    """Return the lines of metrics of training and scores, in an order of their own: devices answer
    in any order.
    """
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return sorted({line for line in lines if json.loads(line)["kind"] in ("train", "score")})
