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

from coterie.deploy.link import Link
from coterie.runs.recipe import Recipe

PEOPLE = ("ann", "ben")
ROUNDS = 3
_LONGEST = 10 * MINUTE  # for a run that is not disturbed any more, however busy the machine
VICTIMS = {  # where they run, and words of their command lines
    "SuperLink": ("server", "flower-superlink"),
    "the run's program on the server": ("server", "flwr-serverapp"),
    "coterie server": ("server", "-m coterie server"),
    "coterie submit": ("server", "-m coterie submit"),
    "a SuperNode": ("device", "bin/flower-supernode"),
    "a device's resident process": ("device", "-m coterie resident"),
    "coterie client": ("device", "-m coterie client"),
}


def tiny(folder: Path, rounds: int = ROUNDS) -> Recipe:
    """Return a recipe that waits for all of its clients, so that its result is one and the same."""
    path = written(
        folder,
        method__rounds=rounds,
        quorum__min_clients=len(PEOPLE),
        quorum__otherwise="wait",
        quorum__deadline=20,
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
        for machine in ("server", *PEOPLE):
            (folder / machine / "faults").mkdir(parents=True)
        self.site = Site(folder, open, *PEOPLE)
        self.network = Network(self.site.ports[0], rng)
        self.site.door = self.network.port
        self.server = self.site.server(*PEOPLE)
        self.devices = {client: self.site.client(client) for client in PEOPLE}
        self._runs = 0

    # Disturbances.

    def kill(self) -> str:
        """Kill -9 for one program."""
        what = self.rng.choice(list(VICTIMS))
        where, words = VICTIMS[what]
        machine = self.rng.choice(PEOPLE) if where == "device" else where
        victims = left(self.folder / machine, words) or {
            number: line
            for number, line in left(self.folder).items()
            if words in line and _in(number, self.folder / machine)
        }
        if not victims:
            return f"{what} of {machine} is not running just now"
        number = self.rng.choice(sorted(victims))
        with suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        return f"kill -9 of {what} of {machine}, process {number}"

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
        running = self._submit()
        for disturbance in disturbances:
            until(
                lambda after=disturbance.after, running=running: (
                    self._rounds() >= after or running.process.poll() is not None
                ),
                f"{disturbance.after} rounds of\n{running.text}",
                _LONGEST,
            )
            time.sleep(disturbance.delay)
            self.say(disturbance.act())
            self._revive()
            if running.process.poll() is not None and running.process.returncode != 0:
                running = self._again(running)
        while running.ends(_LONGEST) != 0:
            running = self._again(running)
        self._compare(self._personal() - before)

    def _rounds(self) -> int:
        """Return how many rounds are in checkpoints."""
        return max(
            (
                int(path.name.removeprefix("round-"))
                for path in self.site.run.glob("checkpoints/round-?????")
            ),
            default=0,
        )

    def _submit(self) -> Terminal:
        more = ("--resume",) if self.site.run.exists() else ()
        return self.site.submit(self.folder.parent / "tiny.yaml", len(PEOPLE), *more)

    def _again(self, ended: Terminal) -> Terminal:
        """Submit a run again that has ended by a fault: which one it must say."""
        code = ended.process.returncode
        if code != -signal.SIGKILL:
            assert code in (1, 2), f"exit code {code}:\n{ended.text}"
            problem = [line for line in ended.text.splitlines() if line.startswith("coterie: ")]
            assert problem, f"no reason is given:\n{ended.text}"
            assert "Traceback" not in ended.text, ended.text
            self.say(f"  refused, exit code {code}: {problem[-1]}")
        self._revive()
        time.sleep(2.0)
        return self._submit()

    def _revive(self) -> None:
        """Start the commands again that were killed, as their owners would."""
        if self.server.process.poll() is not None:
            self.server = self.site.server()
        for client, terminal in self.devices.items():
            if terminal.process.poll() is not None:
                self.devices[client] = self.site.client(client)
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


def _in(process: int, folder: Path) -> bool:
    try:
        return Path(os.readlink(f"/proc/{process}/cwd")) == folder
    except OSError:
        return False


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
