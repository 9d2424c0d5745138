"""Experiment trackers beside TensorBoard: Weights & Biases and MLflow.

They get numbers, the recipe and the names of clients, and never a client's text: what the programs
collect on their own (the terminal's output, the command line, the repository) is switched off.
"""

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from coterie.core.callback import Callback
from coterie.core.errors import CoterieError, Refused
from coterie.core.files import read_json, write_json
from coterie.core.importing import EXTRAS, require
from coterie.core.names import encoded
from coterie.core.result import Comparison, Result
from coterie.core.result.rows import rows
from coterie.reports.verdict import verdict
from coterie.runs.recipes.dotted import flat

PROJECT = "coterie"  # if the program's own environment variable names no other
TRACKED = "tracked.json"  # in a run's folder: the run's id in each program


@dataclass(frozen=True)
class TrackedRun:
    """A method's run as a tracker sees it."""

    name: str  # within the group: the method, or the path of the run's folder in the group's
    group: str  # the name of the folder of all runs that belong together
    config: Mapping[str, Any]  # the recipe, with only the last part of paths on this machine
    known: str | None  # the id that the program gave the run before; None for a new run
    parent: str = ""  # the id of the run of the group, if it has several methods or seeds


class Tracker(ABC):
    """A program that keeps figures of runs. One run is open at a time."""

    name: ClassVar[str]  # what --track takes
    remedy: ClassVar[str]  # what to do where the program cannot be reached

    def open_group(self, name: str, known: str | None) -> str:
        """Begin or continue the run above those of a group; return its id, "" without such."""
        return ""

    def close_group(self, id: str, complete: bool) -> None:
        """End the run above those of a group, where `open_group` gave one."""
        raise NotImplementedError

    @abstractmethod
    def open(self, run: TrackedRun) -> str:
        """Begin or continue a run; return its id."""

    @abstractmethod
    def log(self, round: int, values: Mapping[str, float]) -> None:
        """Record the figures of a round."""

    @abstractmethod
    def close(self, complete: bool) -> None:
        """End the open run."""

    def keep(self, id: str, files: Mapping[str, Any], sentences: str) -> None:  # noqa: B027
        """Keep files of JSON values and a verdict with a run that has ended, where that can be."""


class WeightsAndBiases(Tracker):
    """Weights & Biases; `WANDB_MODE=offline` keeps everything on this machine."""

    name = "wandb"
    remedy = "Log in (`wandb login`), or keep the figures on this machine: WANDB_MODE=offline."

    def __init__(self) -> None:
        import wandb

        self._wandb = wandb
        self._run: Any = None
        mode = os.environ.get("WANDB_MODE") or wandb.setup().settings.mode or "online"
        if mode == "online" and not wandb.api.api_key:  # it would ask during a run
            raise Refused("--track wandb: nobody is logged in on this machine", self.remedy)

    def open(self, run: TrackedRun) -> str:
        settings = self._wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            quiet=True,
            save_code=False,
            x_disable_machine_info=True,
            x_disable_meta=True,
        )
        id = run.known or uuid4().hex[:12]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            group=run.group,
            name=run.name,
            id=id,
            resume="allow",
            config=dict(run.config),
            settings=settings,
        )
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")  # a resumed run may repeat rounds
        return id

    def log(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "round": round})

    def close(self, complete: bool) -> None:
        self._run.finish(exit_code=0 if complete else 1)


class MLflow(Tracker):
    """MLflow; `MLFLOW_TRACKING_URI` names the server, or the file on this machine."""

    name = "mlflow"
    remedy = "Set MLFLOW_TRACKING_URI to a server that runs, or to a file: sqlite:///mlflow.db."
    _longest = 500  # characters of a value of the recipe that every release takes
    _names = str.maketrans("%+", "::")  # of figures, which MLflow refuses with these characters

    def __init__(self) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._param, self._client = Metric, Param, MlflowClient()
        self._id = ""

    def open_group(self, name: str, known: str | None) -> str:
        return self._begun(name, known, {"coterie.group": name})

    def close_group(self, id: str, complete: bool) -> None:
        self._client.set_terminated(id, "FINISHED" if complete else "FAILED")

    def _begun(self, name: str, known: str | None, tags: Mapping[str, str]) -> str:
        """Begin or continue a run of the experiment; return its id."""
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            return known
        project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        existing = self._client.get_experiment_by_name(project)
        experiment = existing.experiment_id if existing else self._client.create_experiment(project)
        id: str = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
        return id

    def open(self, run: TrackedRun) -> str:
        tags = {"coterie.group": run.group}
        tags |= {"mlflow.parentRunId": run.parent} if run.parent else {}
        self._id = self._begun(run.name, run.known, tags)
        if run.known is None:
            settings = flat(run.config).items()
            params = [self._param(key, str(value)[: self._longest]) for key, value in settings]
            self._client.log_batch(self._id, params=params)
        return self._id

    def log(self, round: int, values: Mapping[str, float]) -> None:
        from time import time

        now = int(1000 * time())
        metrics = [
            self._metric(name.translate(self._names), float(value), now, round)
            for name, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, complete: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if complete else "FAILED")

    def keep(self, id: str, files: Mapping[str, Any], sentences: str) -> None:
        for name, values in files.items():
            self._client.log_dict(id, values, name)
        if sentences:
            self._client.log_text(id, sentences, "verdict.txt")


TRACKERS: Mapping[str, type[Tracker]] = {each.name: each for each in (WeightsAndBiases, MLflow)}


def check(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of trackers without repetitions. Raises Refused for unknown ones."""
    if unknown := [name for name in names if name not in TRACKERS]:
        raise Refused(f"--track {unknown[0]}: there is no such tracker", f"{', '.join(TRACKERS)}.")
    return tuple(dict.fromkeys(names))


def _built(name: str) -> Tracker:
    """Return a tracker that is ready for use. Raises Refused."""
    if name in EXTRAS:
        require(f"--track {name}", name)
    try:
        return TRACKERS[name]()
    except CoterieError:
        raise
    except Exception as error:
        raise Refused(f"--track {name}: {_line(error)}", TRACKERS[name].remedy) from error


@contextmanager
def tracked(names: Sequence[str], folder: Path) -> Iterator[list[Callback]]:
    """Provide callbacks that report every run within the block to trackers, in a group named like
    the folder. Raises Refused if a tracker is unknown, not installed, or cannot be used.
    """
    callbacks, complete = [Tracking(_built(name), folder) for name in check(names)], False
    try:
        yield list(callbacks)
        complete = True
    finally:
        for callback in callbacks:
            callback.close(complete=False)
            callback.close_group(complete)


class Tracking(Callback):
    """A callback that reports each method's run to a tracker, the figures of a round together.

    A tracker that fails during a run is not called again, with a warning: the run goes on, and
    metrics.jsonl has all figures.
    """

    def __init__(self, tracker: Tracker, folder: Path) -> None:
        self._tracker, self._folder = tracker, folder
        self._open, self._round, self._values = False, 0, dict[str, float]()
        self._group = ""  # the id of the run above those of the folder
        self._id, self._run_folder, self._recipe = "", folder, dict[str, Any]()

    def opened(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.close(complete=False)
        name, group = self._tracker.name, self._folder.resolve().name
        parts = [part for part in folder.relative_to(self._folder).parts if part != "baselines"]
        try:
            if len(parts) > 1 and not self._group:  # a comparison or a search
                known = _ids(self._folder).get(name)
                self._group = self._tracker.open_group(group, known)
                if self._group:
                    write_json(self._folder / TRACKED, {**_ids(self._folder), name: self._group})
            title = "/".join(parts) or str(recipe["method"]["name"])
            known, parent = _ids(folder).get(name), self._group
            run = TrackedRun(title, group, _without_paths(recipe), known, parent)
            self._id = self._tracker.open(run)
        except Exception as error:
            raise Refused(f"--track {name}: {_line(error)}", self._tracker.remedy) from error
        self._open = True
        write_json(folder / TRACKED, {**_ids(folder), name: self._id})
        self._run_folder, self._recipe = folder, dict(run.config)

    def recorded(self, kind: str, round: int, client: str, values: Mapping[str, Any]) -> None:
        if round != self._round:
            self._send()
            self._round = round
        parts = (encoded(client),) if client else ()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._values["/".join((kind, name, *parts))] = value

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        self.recorded("score", round, "", means)

    def end(self, result: Result) -> None:
        figures = {"mean": result.mean, "mean_synced": result.mean_synced}
        self.recorded("result", result.rounds, "", figures | {"seconds": result.wall_s})
        self._send()
        works = self._open  # up to here
        self.close(complete=True)
        if works:
            files = {Result.file: result.to_json(), "recipe.yaml": self._recipe}
            others = sorted(self._run_folder.glob(f"baselines/*/{Result.file}"))
            compared = rows([*(Result.read(path.parent) for path in others), result])
            sentences = verdict(compared, result.method) if others else ""
            self._tried(lambda: self._tracker.keep(self._id, files, sentences))

    def close(self, complete: bool) -> None:
        """End the open run, if there is one."""
        self._send()
        if self._open:
            self._tried(lambda: self._tracker.close(complete))
        self._open, self._round = False, 0

    def close_group(self, complete: bool) -> None:
        """End the run above those of the folder, if there is one."""
        if self._group:
            self._tried(lambda: self._tracker.close_group(self._group, complete))
            if complete and (comparison := Comparison.read_any(self._folder)):
                files = {Comparison.file: comparison.to_json()}
                sentences = verdict(comparison.rows, comparison.own)
                self._tried(lambda: self._tracker.keep(self._group, files, sentences))

    def _send(self) -> None:
        """Send the figures of a round."""
        values, self._values = self._values, {}
        if values and self._open:
            self._tried(lambda: self._tracker.log(self._round, values))

    def _tried(self, step: Any) -> None:
        """Take a step; if it fails, warn, and do not call the tracker again."""
        try:
            step()
        except Exception as error:
            self._open = False
            warnings.warn(
                f"--track {self._tracker.name} has stopped: {_line(error)}. The run goes on, and "
                f"metrics.jsonl has all figures.",
                RuntimeWarning,
                stacklevel=2,
            )


def _ids(folder: Path) -> dict[str, str]:
    """Return the ids of a folder's run by tracker; empty if it has none."""
    path = folder / TRACKED
    return dict(read_json(path)) if path.exists() else {}


def _line(error: Exception) -> str:
    """Return an error in one line."""
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


def _without_paths(value: Any) -> Any:
    """Return JSON values with only the last part of paths on this machine."""
    if isinstance(value, Mapping):
        return {key: _without_paths(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_paths(entry) for entry in value]
    if isinstance(value, str) and os.sep in value:
        path = Path(value)
        local = path.is_absolute() or value.startswith(("~", ".")) or path.exists()
        return path.name if local else value
    return value
