"""Faults on purpose, in an order that a seed decides: what is disturbed ends bit-equal to what is
not, or is refused by name, and nothing is left running.

    make chaos SEED=1 BUDGET=900

BUDGET is in seconds, and shared out among the checks; no trial begins when a check's share is used
up. What happened, and when, is printed.
"""

import gc
import os
import random
import resource
import shutil
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPException, HTTPSConnection
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from deployment import PEOPLE, ROUNDS, Deployment, Disturbance, tiny
from faults import Disk
from folder_contents import contents
from network import FAULTS, Network
from terminals import MINUTE, terminals, until
from test_proxy import PULL, Behind, known, opened, signed

from coterie.core.errors import CoterieError
from coterie.deploy import keys
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import run

SEED = int(os.environ.get("CHAOS_SEED", "1"))
BUDGET = float(os.environ.get("CHAOS_BUDGET", "900"))
SHARES = {"disk": 0.25, "devices": 0.1, "deployment": 0.65}
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:7.1f} s  {text}", flush=True)


def share(check: str) -> float:
    """Return when the time of a check that begins now is used up."""
    return time.monotonic() + BUDGET * SHARES[check]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    say(f"seed {SEED}, {BUDGET:g} seconds")
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The folder of the run in one process."""
    run(tiny(folder), folder / "undisturbed")
    say(f"the undisturbed run is done: {ROUNDS} rounds")
    return folder / "undisturbed"


# A full disk at every file, in one process.


def full_from(recipe: Recipe, work: Path, name: str) -> str:
    """Run with a disk on which a file cannot be written; returns how that ended."""
    (work.parent / "faults/full").write_text(f"/{name}")
    try:
        run(recipe, work)
    except CoterieError as error:
        return f"refused: {str(error).splitlines()[0]}"
    finally:
        (work.parent / "faults/full").unlink()
    return "done all the same"


def cut_off_at(recipe: Recipe, work: Path, size: int) -> str:
    """Run where no file may be longer; returns how that ended."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        run(recipe, work)
    except CoterieError as error:
        return f"refused: {str(error).splitlines()[0]}"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return "done all the same"


def test_a_full_disk_at_every_file(folder: Path, undisturbed: Path) -> None:
    end, rng, place = share("disk"), random.Random(f"disk {SEED}"), folder / "disk"
    (place / "faults").mkdir(parents=True)
    disk, expected = Disk(place, place / "faults"), contents(undisturbed)
    disk.opened = []
    recipe = tiny(folder)
    run(recipe, place / "run")
    assert contents(place / "run") == expected
    names = sorted({str(Path(path).relative_to(place / "run")) for path in disk.opened} - {"."})
    sizes = sorted({p.stat().st_size - 1 for p in (place / "run").rglob("*") if p.is_file()} - {-1})
    trials: list[tuple[Callable[[Recipe, Path, Any], str], str | int]] = [
        *((full_from, name) for name in names),
        *((cut_off_at, size) for size in sizes),
    ]
    rng.shuffle(trials)
    for number, (fault, at) in enumerate(trials):
        if time.monotonic() > end:
            say(f"disk: no time left for {len(trials) - number} of {len(trials)} trials")
            break
        shutil.rmtree(place / "run")
        sys.stdout.flush()
        outcome = fault(recipe, place / "run", at)
        gc.collect()  # the folder of states, which a process that ends takes away
        if outcome != "done all the same":
            run(recipe, place / "run", resume=(place / "run").exists())
        assert contents(place / "run") == expected, f"{fault.__name__} {at}: {outcome}"
        say(f"disk: {fault.__name__} {at}: {outcome}; bit-equal")


# 64 devices on the proxy.


def ask(connection: HTTPSConnection, key: Path, body: bytes) -> bytes:
    """Ask once, as a device does; raises OSError or HTTPException where the network fails."""
    connection.request("POST", PULL.replace("pull-messages", "push-object"), body, signed(key))
    response = connection.getresponse()
    answer = response.read()
    if response.status != 201:
        raise HTTPException(f"{response.status} {answer[:100]!r}")
    return answer


def talk(port: int, folder: Path, client: str, requests: int, failures: list[str]) -> None:
    """Ask some times, each as often as it takes; the answers must be whole."""
    rng, connection = random.Random(f"{client} {SEED}"), None
    context = ssl.create_default_context(cafile=folder / keys.CA)
    for _ in range(requests):
        body, answer = rng.randbytes(rng.randrange(1, 50_000)), None
        while answer is None:
            if connection is None:
                connection = HTTPSConnection("127.0.0.1", port, context=context, timeout=20)
            try:
                answer = ask(connection, folder / "clients" / client, body)
            except (OSError, HTTPException):
                connection.close()
                connection = None
                time.sleep(rng.random())
        if answer != body[::-1]:
            failures.append(client)
    if connection is not None:
        connection.close()


def test_64_devices_on_the_proxy(tmp_path: Path) -> None:
    end, rng = share("devices"), random.Random(f"devices {SEED}")
    clients = [f"client-{number}" for number in range(64)]
    keys.make(tmp_path, [], [*clients, "ann"])
    keys.make(tmp_path / "other", [], ["stranger"])
    failures: list[str] = []
    with opened(tmp_path) as (port, proxy):
        proxy.keys = {
            shown: key
            for client in clients
            for shown, key in known(tmp_path / "clients" / client).items()
        }
        network = Network(port, random.Random(rng.random()))
        Behind.seen.clear()
        talking = [
            threading.Thread(target=talk, args=(network.port, tmp_path, client, 10, failures))
            for client in clients
        ]
        for thread in talking:
            thread.start()
        while time.monotonic() < end and any(thread.is_alive() for thread in talking):
            fault = rng.choice(list(FAULTS))
            network.break_down(fault)
            say(f"devices: network {fault} with {sum(t.is_alive() for t in talking)} devices")
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
            time.sleep(rng.uniform(0.2, 2))
            network.break_down("")
            time.sleep(rng.uniform(1, 4))
            for stranger in strangers:
                stranger.close()
        for thread in talking:
            thread.join(2 * MINUTE)
            assert not thread.is_alive(), "a device is not answered any more"
        assert not failures
        assert len(Behind.seen) >= 640
        network.close()
        until(lambda: not proxy._devices and not proxy._strangers, "no connection is kept", MINUTE)
        assert not proxy.problems
    say(f"devices: 640 requests of 64 devices are answered, {len(Behind.seen)} arrived")


# A deployment over TLS.


@pytest.fixture(scope="module")
def deployment(folder: Path, undisturbed: Path) -> Iterator[Deployment]:
    """A server and two devices; in the end nothing of them is running, and no port is held."""
    inside = str(Path(__file__).parent / "inside")
    with pytest.MonkeyPatch.context() as patch:
        python_path = os.environ.get("PYTHONPATH")
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (inside, python_path))))
        with terminals(folder / "machines") as open:
            deployed = Deployment(
                folder / "machines", open, random.Random(f"deployed {SEED}"), undisturbed, say
            )
            say(f"a server and the devices of {' and '.join(PEOPLE)} are up")
            yield deployed
            deployed.network.close()
    for port in deployed.site.ports:
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), f"port {port} is still held"
    say("nothing is left running, and no port is held")


def test_a_deployment_over_tls(deployment: Deployment) -> None:
    end, rng = share("deployment"), deployment.rng
    kinds = [
        deployment.kill,
        deployment.set_clock,
        deployment.fill_disk,
        deployment.break_network,
    ]
    first = SEED % len(kinds)  # so that short runs of several seeds have all kinds too
    for act in cycle(kinds[first:] + kinds[:first]):
        if time.monotonic() > end:
            break
        disturbances = sorted(
            (
                Disturbance(rng.randrange(ROUNDS), rng.uniform(0, 3), act)
                for _ in range(rng.randint(1, 3))
            ),
            key=lambda disturbance: (disturbance.after, disturbance.delay),
        )
        say(f"deployment: a run with {len(disturbances)} times {act.__name__}")
        deployment.run(disturbances)
        say("deployment: bit-equal")
