"""The limits that a device's owner sets in a file on the device; no run can lift them.

Nothing here needs torch, so that the file is checked as soon as a device starts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, ValidationError
from pydantic_core import ErrorDetails

from coterie.core.errors import RecipeError, Refused
from coterie.core.foreign import yaml_file
from coterie.core.importing import require

# answers in a round of a device that protects its owner, unless its owner says otherwise
EXCHANGES = 8
OWNERS = "The owner of the device decides, in its file of limits (coterie client --limits)."


def _not_bool(value: object) -> object:
    """Refuse true and false, which Python treats as 1 and 0. Raises ValueError."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, found {str(value).lower()}")
    return value


_Float = Annotated[FiniteFloat, BeforeValidator(_not_bool)]
_Int = Annotated[int, BeforeValidator(_not_bool)]
_Named = Annotated[tuple[str, ...], Field(min_length=1)]


class LocalPrivacy(BaseModel):
    """The least noise that an update may leave with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    noise_at_least: _Float = Field(gt=0)  # z, the noise multiplier
    # C; null: any, as epsilon does not depend on it
    clip_at_most: _Float | None = Field(None, gt=0)


class Limits(BaseModel):
    """The limits of a device's owner, whatever a run says. Without a file everything is allowed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: _Named | None = None  # methods that it takes part in; null: all
    tasks: _Named | None = None  # tasks of them that it does; null: all
    # base models (`model.base`, and a common expert's) that it loads; null: any
    bases: _Named | None = None
    # kinds of data of one's own, `module:Class`, that it imports; null: none
    data: _Named | None = None
    runs: _Int | None = Field(None, ge=1)  # runs that it ever takes part in; null: any number
    rounds: _Int | None = Field(None, ge=1)  # rounds of a run; null: any number
    # unlike answers in a round; null: 8 where updates are protected, else any number
    exchanges: _Int | None = Field(None, ge=1)
    # scores, losses and other figures leave; false: none, and epsilon is of all that leaves
    scores: bool = True
    secure: bool = False  # updates leave by secure aggregation only
    # what noise has to protect, and epsilon is about: client, all of its data; or example: single
    # windows or images
    unit: Literal["client", "example"] = "client"
    # the least noise that updates leave with; null: as a run says
    local_privacy: LocalPrivacy | None = None
    # privacy that may be spent over all runs, with noise only; null: any amount
    epsilon: _Float | None = Field(None, gt=0)
    delta: _Float = Field(1e-5, gt=0, lt=1)  # of epsilon

    @property
    def noisy(self) -> bool:
        """Whether updates may be sent with noise only."""
        return self.local_privacy is not None or self.epsilon is not None

    def check_installed(self) -> None:
        """Refuse limits that need missing packages. Raises Refused."""
        if self.epsilon is not None:
            require("limits.epsilon: counting what is spent", "privacy", "opacus")
        if self.noisy:
            require("limits: noise", "privacy")

    def check_run(self, method: str, base: str | None, rounds: int) -> None:
        """Refuse a run that the owner does not allow. Raises Refused."""
        if self.methods is not None and method not in self.methods:
            raise Refused(
                f"limits.methods: this device takes part in {', '.join(self.methods)}, not in "
                f"{method}",
                OWNERS,
            )
        if self.bases is not None and base not in (None, *self.bases):
            problem = f"limits.bases: this device loads {', '.join(self.bases)}, not {base}"
            raise Refused(problem, OWNERS)
        if self.rounds is not None and rounds > self.rounds:
            raise Refused(
                f"limits.rounds: this device takes part in at most {self.rounds} rounds of a "
                f"run, this one has {rounds}",
                OWNERS,
            )

    def check_keeping(self, needed: Sequence[str]) -> None:
        """Refuse a run with `keep: best` that needs a forbidden task. Raises Refused."""
        if self.tasks is not None and (forbidden := [t for t in needed if t not in self.tasks]):
            raise Refused(
                f"limits.tasks: this device does {', '.join(self.tasks)}; a run with keep: best "
                f"also needs {' and '.join(forbidden)}",
                f"{OWNERS} A run with keep: last, and patience: null, does without.",
            )

    def check_noise(self, noise: float, clip: float) -> None:
        """Refuse local privacy below the owner's minimum. Raises Refused."""
        if self.local_privacy is None:
            return
        least, most = self.local_privacy.noise_at_least, self.local_privacy.clip_at_most
        problem = ""
        if noise < least:
            problem = f"z of at least {least:g}, the run has {noise:g}"
        elif most is not None and clip > most:
            problem = f"C of at most {most:g}, the run has {clip:g}"
        if problem:
            raise Refused(f"limits.local_privacy: this device wants {problem}", OWNERS)

    def check_task(self, task: str, round: int, rounds: int) -> None:
        """Refuse a task, or a round that the run does not have. Raises Refused."""
        if self.tasks is not None and task not in self.tasks:
            problem = f"limits.tasks: this device does {', '.join(self.tasks)}, not {task}"
            raise Refused(problem, OWNERS)
        if round > rounds:
            raise Refused(f"round {round + 1} of a run of {rounds}", "It was not done.")


def read(path: Path) -> Limits:
    """Return the limits in a file. Raises Refused, or RecipeError with all mistakes by field."""
    values = yaml_file(path, "limits", "Name the owner's file: see docs/deploy.md.")
    if not values:
        problem = f"limits {path}: the file is empty, so it would limit nothing"
        raise Refused(problem, "Write limits into it, or leave out --limits.")
    try:
        return Limits.model_validate(values)
    except ValidationError as error:
        raise RecipeError(f"limits {path}", list(map(_readable, error.errors()))) from None


def _readable(error: ErrorDetails) -> str:
    message = error["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if error["type"] == "extra_forbidden":
        message = f"unknown key; there are {', '.join(Limits.model_fields)}"
    return f"{'.'.join(map(str, error['loc'])) or 'it'}: {message}"
