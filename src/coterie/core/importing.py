"""Large libraries, their imports undisturbed by the garbage collector; optional packages, which
extra brings them; and extensions: classes named `my_package.my_file:MyClass`, and entry points.
"""

import gc
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from coterie.core.errors import Refused, extra

# objects that Python freezes as it starts, at most: 3.12.1 has 375, 3.11 and 3.13 none
AT_START = 1000


def check_docstrings() -> None:
    """Raise Refused under `python -OO`, where transformers cannot be imported."""
    if sys.flags.optimize > 1:
        raise Refused(
            "Python runs with -OO (PYTHONOPTIMIZE=2): transformers reads docstrings, which it "
            "removes",
            "Leave it out, or use -O (PYTHONOPTIMIZE=1).",
        )


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable the garbage collector in a block or a decorated function that imports large
    libraries. It would search their many lasting objects again and again: a fifth of the time to a
    first training step.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() < AT_START:  # otherwise it is what others want to stay so
                gc.freeze()  # what was made is old at once, and not looked through
                gc.unfreeze()
            gc.enable()


@contextmanager
def quietly() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers within the block."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def is_own(name: object) -> bool:
    """Return whether a name has the form `module:Class`."""
    return isinstance(name, str) and ":" in name


def own_name(kind: type) -> str:
    """Return the name of a class, `module:Class`."""
    return f"{kind.__module__}:{kind.__qualname__}"


@cache
def installed(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group that installed packages declare, by their names."""
    return {point.name: point for point in entry_points(group=group)}


def package_of(point: EntryPoint) -> str:
    """Return the name and version of the package that declares an entry point."""
    return point.value if point.dist is None else f"{point.dist.name} {point.dist.version}"


@cache
def imported(name: str) -> object:
    """Import `module:Class`, also from the current folder. Raises ImportError with the reason."""
    if "" not in sys.path:
        sys.path.append("")
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module does when it is imported
        raise ImportError(f"{type(error).__name__}: {error}") from error


# what each extra of pyproject.toml is for, and modules by which one sees that it is installed
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tensorboard": ("figures of a run for TensorBoard", ("tensorboard",)),
    "hub": ("data sets of the Hub, and local ones in its formats", ("datasets",)),
    "vision": ("images, and scikit-learn's digits", ("PIL", "pyarrow", "sklearn")),
    "scipy": (
        "`coterie audit` and `reproduce`, the methods ddome (under a load), fdlora, fedamole, "
        "fedlease",
        ("scipy",),
    ),
    "export": ("`coterie export --format peft`", ("peft",)),
    "gguf": ("a GGUF file as base", ("gguf", "accelerate")),
    "device": (
        "`coterie export --format gguf` and `onnx`",
        ("gguf", "xllamacpp", "onnx", "onnxscript", "onnxruntime"),
    ),
    "serve": ("`coterie serve`", ("starlette", "uvicorn")),
    "privacy": ("differential privacy", ("opacus", "cryptography")),
    "flower": ("clients on machines of their own", ("flwr", "psutil")),
    "simulation": ("the engine flower on one machine", ("flwr", "ray")),
    "wandb": ("`coterie run --track wandb`", ("wandb",)),
    "mlflow": ("`coterie run --track mlflow`", ("mlflow", "sqlalchemy", "alembic")),
}


def available(module: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def missing(name: str) -> list[str]:
    """Return the modules of an extra that are not installed."""
    return [module for module in EXTRAS[name][1] if not available(module)]


def require(what: str, name: str, *modules: str) -> None:
    """Raise Refused unless an extra's modules (default: all) are installed; `what` needs them."""
    absent = [module for module in modules if not available(module)] if modules else missing(name)
    if absent:
        are = "is" if len(absent) == 1 else "are"
        problem = f"{what} needs {' and '.join(absent)}, which {are} not installed"
        raise Refused(problem, extra(name))
