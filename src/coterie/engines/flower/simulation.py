"""Flower's simulation in a thread, on its own Ray cluster or the one that RAY_ADDRESS names."""

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.serverapp import Grid

from coterie.core.errors import ClientError, extra
from coterie.engines.flower.apps import Handle, client_app, server_app

ANSWER_S = 10.0  # seconds for a Ray cluster to answer


@dataclass(frozen=True)
class _Simulation:
    """A simulation in a separate thread."""

    about: tuple[int, int, Handle, int]
    grid: Grid
    stop: Callable[[], None]


_going_on: list[_Simulation] = []  # at most one: Ray is started once in a process


def simulated(clients: int, threads: int, handle: Handle, accelerators: int = 0) -> Grid:
    """Return a simulation's grid of nodes, the i-th with `partition-id` i and the picklable
    `handle`: the last one if the arguments are the same. As many programs run at once as there are
    cores, and accelerators, for each. It ends with the process, or when another one starts. Raises
    ClientError.
    """
    about = (clients, threads, handle, accelerators)
    if _going_on and _going_on[0].about != about:
        _going_on.pop().stop()
    if not _going_on:
        _going_on.append(_simulation(*about))
    return _going_on[0].grid


def _simulation(clients: int, threads: int, handle: Handle, accelerators: int) -> _Simulation:
    """Start a simulation. Raises ClientError."""
    for name, value in {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as later releases do; otherwise Ray warns
    }.items():
        os.environ.setdefault(name, value)
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: queue.Queue[Grid | BaseException] = queue.Queue()
    done = threading.Event()

    def main(grid: Grid, config: Mapping[str, Any]) -> None:
        grids.put(grid)
        done.wait()

    def simulate() -> None:
        resources: dict[str, Any] = {
            "client_resources": {"num_cpus": threads, "num_gpus": accelerators}
        }
        try:
            _connect(threads, accelerators)
            run_simulation(
                server_app(main),
                client_app(handle),
                num_supernodes=clients,
                backend_config=resources,
            )
            grids.put(RuntimeError("it ended"))  # nobody looks, if it ended because we wanted it to
        except BaseException as error:
            grids.put(error)

    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(timeout=30)

    # Flower's simulation works in a thread pool, which Python waits for before it calls what
    # `atexit` knows: it would wait for good.
    threading._register_atexit(stop)  # type: ignore[attr-defined]
    grid_or_error = grids.get()
    if isinstance(grid_or_error, ClientError):
        raise grid_or_error
    if isinstance(grid_or_error, BaseException):
        raise ClientError(
            f"Flower's simulation could not be started: {grid_or_error}",
            f"Is the extra complete? {extra('simulation')}",
        )
    return _Simulation((clients, threads, handle, accelerators), grid_or_error, stop)


def _connect(threads: int, accelerators: int) -> None:
    """Start Ray, or connect to RAY_ADDRESS, in a thread, as Ray would take the main one's SIGTERM.
    Raises ClientError: no cluster or suitable machine, for which Flower would wait endlessly.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():  # neither "auto" nor "local"
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise ClientError(
                f"RAY_ADDRESS is {address}, where no Ray cluster answers: {error}",
                "Start it there (ray start --head), or unset RAY_ADDRESS for this machine alone.",
            ) from None
    if not ray.is_initialized():
        known = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        ray.init(
            include_dashboard=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"PYTHONPATH": known}},
        )
    machines = [node["Resources"] for node in ray.nodes()]  # type: ignore[no-untyped-call]
    if not any(
        has.get("CPU", 0) >= threads and has.get("GPU", 0) >= accelerators for has in machines
    ):
        need = f"{threads} cores" + (f" and {accelerators} GPU" if accelerators else "")
        raise ClientError(
            f"no machine of Ray's has {need}, which a client needs",
            "Start Ray with more (ray start --num-cpus N --num-gpus N), or give the recipe fewer "
            "threads.",
        )
