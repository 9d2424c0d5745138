"""The command that checks this installation and this machine: doctor."""

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import typer

from coterie.cli.base import _stopping, app
from coterie.core.errors import CoterieError, extra
from coterie.core.importing import EXTRAS, missing
from coterie.core.printing import printable
from coterie.core.version import __version__

LEAST_MEMORY = 1.0  # GiB that the quickstart needs at most
LEAST_DISK = 1.0  # GiB for runs and the cache
CORE = ("torch", "transformers", "safetensors", "tokenizers", "huggingface-hub", "numpy")


@app.command()
def doctor() -> None:
    """Look at this installation and machine: versions, devices, threads, memory, disk, extras, and
    what to do about what is missing. Exit code 1 if something has to be done before a run.
    """
    with _stopping("stopped."):
        problems = 0
        for check in examined():
            print(f"{'ok ' if check.fine else '-- '} {check.name}: {printable(check.finding)}")
            if check.remedy:
                print(f"      {printable(check.remedy)}")
            problems += check.needed and not check.fine
        if problems:
            print(f"\n{problems} of these must be mended before a run.")
            raise typer.Exit(1)
        print("\nReady: coterie run quickstart")


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    finding: str  # the state of the item, in words
    fine: bool = True  # whether that state is good enough
    remedy: str = ""  # what to do; "" if nothing is needed
    needed: bool = True  # whether every run needs the item


def examined() -> Iterator[Check]:
    """Run all checks, and yield their results."""
    supported = sys.version_info >= (3, 11)
    remedy = "" if supported else "coterie needs Python 3.11 or newer."
    yield Check("Python", platform.python_version(), supported, remedy)
    yield Check("coterie", f"{__version__}, in {Path(__file__).parents[1]}")
    yield from map(_package, CORE)
    for look in (_base, _device, _threads, _memory):
        yield _guarded(look)
    yield _disk("this folder", Path.cwd(), "Go to another folder, or give --out.")
    yield _disk("temporary files", Path(tempfile.gettempdir()), "Set TMPDIR to another folder.")
    for name, (what, _) in EXTRAS.items():
        absent = missing(name)
        title = f"extra {name}"
        finding = f"{what}" + (f"; not installed: {', '.join(absent)}" if absent else "")
        yield Check(title, finding, not absent, extra(name) if absent else "", needed=False)


def _guarded(look: Callable[[], Check]) -> Check:
    """Run a check; if it raises an error, return that as its result."""
    try:
        return look()
    except Exception as error:
        name = look.__name__.strip("_")
        return Check(name, " ".join(str(error).split())[:200], False, "Install coterie again.")


def _package(name: str) -> Check:
    """Check that a package that every run needs is installed."""
    # imported here, as `coterie --help` imports this file and not that one
    from importlib.metadata import PackageNotFoundError, version

    try:
        return Check(name, version(name))
    except PackageNotFoundError:
        return Check(name, "not installed", False, f"pip install {name}")


def _base() -> Check:
    """Check that the embedded base can be loaded, and computes finite values."""
    import torch

    from coterie.models.backbone import Backbone

    try:
        model = Backbone.load("embedded").model
        with torch.no_grad():
            fine = bool(model(torch.zeros(1, 2, dtype=torch.int64)).logits.isfinite().all())
    except CoterieError as error:
        return Check("embedded base", error.problem, False, "Install coterie again.")
    return Check("embedded base", "loads and computes" if fine else "computes nonsense", fine)


def _device() -> Check:
    """Check which device torch uses, and whether it misses a GPU."""
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        free = torch.cuda.mem_get_info()[0] / 2**30
        return Check("device", f"cuda: {', '.join(names)}, {free:.1f} GiB free on the first")
    driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")
    if driver:
        return Check(
            "device",
            f"cpu; an NVIDIA GPU is here, and torch {torch.__version__} does not use it",
            False,
            "Install a torch for your CUDA version: https://pytorch.org/get-started/locally",
            needed=False,
        )
    return Check("device", "cpu")


def _threads() -> Check:
    """Check the number of threads and cores, and the load of the machine."""
    import torch

    affinity = getattr(os, "sched_getaffinity", None)  # Linux's: what this process may use
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    setting = os.environ.get("OMP_NUM_THREADS")
    summary = f"{torch.get_num_threads()} of torch, {cores} cores, load {busy:.1f}"
    summary += f", OMP_NUM_THREADS={setting}" if setting else ""
    crowded = busy > 1.5 * cores
    remedy = "Other programs use the cores: a run will be slow." if crowded else ""
    return Check("threads", summary, not crowded, remedy, needed=False)


def _memory() -> Check:
    from coterie.core.devices import free_memory

    free = free_memory()
    if free is None:
        return Check("memory", "free memory is not known on this system")
    known = free / 2**30
    fine = known >= LEAST_MEMORY
    remedy = "" if fine else f"A run needs about {LEAST_MEMORY:.0f} GiB: end other programs."
    return Check("memory", f"{known:.1f} GiB free", fine, remedy)


def _disk(name: str, folder: Path, remedy: str) -> Check:
    """Check how much of a disk is free, and that it can be written to."""
    try:
        free = shutil.disk_usage(folder).free / 2**30
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Check(f"disk, {name}", f"{folder}: {error.strerror}", False, remedy)
    fine = free >= LEAST_DISK
    return Check(f"disk, {name}", f"{free:.1f} GiB free in {folder}", fine, "" if fine else remedy)
