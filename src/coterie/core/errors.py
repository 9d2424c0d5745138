"""Errors that state the problem, its place and the remedy."""

import re
from collections.abc import Sequence


class CoterieError(Exception):
    """An error that stops a command. `str(error)` is the whole message: the problem, then the
    remedy on a line of its own.

    Examples:
        >>> import coterie
        >>> try:
        ...     coterie.load("no-such-run")
        ... except coterie.CoterieError as error:
        ...     print(error.problem)
        no-such-run holds no personal models

    Args:
        problem: What is wrong and where, naming the field, file or tensor.
        remedy: What to do about it.
    """

    exit_code = 1  # failed while running

    def __init__(self, problem: str, remedy: str = "") -> None:
        self.problem, self.remedy = problem, remedy
        super().__init__(f"{problem}\n  {remedy}" if remedy else problem)


def extra(name: str) -> str:
    """Return how to install an optional extra: in a checkout, or of an installed package its
    requirements by their names, since a registry may know another package as coterie.
    """
    from importlib.metadata import requires

    if _in_checkout():
        return f"In a checkout: pip install -e '.[{name}]'"
    lines = (line.partition(";") for line in requires("coterie") or ())
    marker = re.compile(rf"\s*extra == ['\"]{name}['\"]\s*")
    packages = [package.strip() for package, _, rest in lines if marker.fullmatch(rest)]
    return f"pip install {' '.join(map(repr, packages))}"


def _in_checkout() -> bool:
    """Return whether coterie is installed from a folder in which its source is edited."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        origin = json.loads(distribution("coterie").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return True
    return bool(origin.get("dir_info", {}).get("editable", False))


class Refused(CoterieError):
    """Wrong input, found before any work started.

    Examples:
        >>> import coterie
        >>> try:
        ...     coterie.run("quickstart", method={"roundz": 3})
        ... except coterie.Refused as error:
        ...     print(error)
        recipe quickstart: 1 mistake
          - method.roundz: unknown key, did you mean rounds?
    """

    exit_code = 2


class RecipeError(Refused):
    """A recipe with mistakes: all of them at once, each naming its field."""

    def __init__(self, source: str, mistakes: Sequence[str]) -> None:
        self.mistakes = tuple(mistakes)
        lines = "\n".join(f"  - {mistake}" for mistake in self.mistakes)
        count = "1 mistake" if len(self.mistakes) == 1 else f"{len(self.mistakes)} mistakes"
        super().__init__(f"{source}: {count}\n{lines}")


class DataError(Refused):
    """Data that are missing, empty, too short or in the wrong format."""


class ModelError(Refused):
    """A base model that cannot be loaded or lacks the layers that adapters attach to."""


class CheckpointError(Refused):
    """A checkpoint or saved model that is damaged or belongs to another recipe."""


class TensorError(CoterieError):
    """Named tensors whose names, shapes, dtypes or values are not the expected ones."""


class ClientError(CoterieError):
    """A client's task failed; the message names both, and `__cause__` is the original error."""


class SpoiltSum(ClientError):
    """One client spoilt the sum of an exchange under masks; a later round can leave it out."""


class Divergence(ClientError, TensorError):
    """Training ran into values that are not finite."""


class SaveError(CoterieError):
    """A file could not be written (for example, the disk is full). Earlier files are intact."""


class ExportError(CoterieError):
    """An exported model does not run as it should in the other program; its files are removed."""


class CallbackError(CoterieError):
    """A callback raised an exception, which is `__cause__`. The run can be resumed from the last
    checkpoint.

    Examples:
        >>> import coterie
        >>> class Enough(coterie.Callback):
        ...     def round(self, done):
        ...         raise RuntimeError("enough")
        >>> settings = {"method": {"rounds": 2}, "compare_with": [], "checkpoint_every": 1}
        >>> try:
        ...     coterie.run("cobo-digits", out="stopped", callbacks=[Enough()], **settings)
        ... except coterie.CallbackError as error:
        ...     print(error.problem)
        callback Enough raised RuntimeError in `round`: enough
        >>> coterie.run("cobo-digits", out="stopped", resume=True, **settings).result.rounds
        2
    """
