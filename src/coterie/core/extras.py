"""Optional packages: which extra brings them, and refusals where they are missing."""

import sys
from collections.abc import Mapping
from importlib.util import find_spec

from coterie.core.errors import Refused, extra

# what each extra of pyproject.toml is for, and modules by which one sees that it is installed
EXTRAS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "tensorboard": ("figures of a run for TensorBoard", ("tensorboard",)),
    "hub": ("data sets of the Hub, and local ones in its formats", ("datasets",)),
    "vision": ("images, and scikit-learn's digits", ("PIL", "pyarrow", "sklearn")),
    "scipy": (
        "`coterie audit` and `reproduce`, the methods ddome (under a load), fdlora, fedlease",
        ("scipy",),
    ),
    "export": ("`coterie export --format peft`", ("peft",)),
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
