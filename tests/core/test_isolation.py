"""Whatever a caller has set, coterie computes the same figures, and leaves everything as it was."""

import contextlib
import json
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import coterie
from coterie.core.isolation import isolated, unchanged
from coterie.personal import PersonalClassifier, PersonalModel


class _Doubled(TorchFunctionMode):
    """Make every product of this thread wrong."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.nn.functional.linear else result


@contextlib.contextmanager
def _set(write: Callable[[Any], object], value: Any, usual: Any) -> Iterator[None]:
    write(value)
    try:
        yield
    finally:
        write(usual)


SETTINGS: dict[str, Callable[[], Any]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "bfloat16": lambda: _set(torch.set_default_dtype, torch.bfloat16, torch.float32),
    "meta": lambda: _set(torch.set_default_device, "meta", None),
    "with meta": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "anomaly": lambda: _set(torch.set_anomaly_enabled, True, False),
    "deterministic": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "precision": lambda: _set(torch.set_float32_matmul_precision, "medium", "highest"),
    "attention": lambda: sdpa_kernel(SDPBackend.MATH),
    "oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "denormals": lambda: _set(torch.set_flush_denormal, True, False),
    "saved on the CPU": torch.autograd.graph.save_on_cpu,
    "fake tensors": FakeTensorMode,
    "a function mode": _Doubled,
    "NumPy": lambda: np.errstate(all="raise"),
    "generators": lambda: contextlib.nullcontext(
        (random.seed(3), np.random.seed(3), torch.default_generator.manual_seed(3))
    ),
}
IDS = torch.tensor([[1, 2, 3]])
TEXT = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}


def _figures(folder: Path, base: Path, *callbacks: coterie.Callback) -> list[Any]:
    """Return the figures of a run, its training loss, and the use of one of its models."""
    method = {"name": "fedavg", "rounds": 1, "local_steps": 2}
    model = {"base": str(base), "context": 32}
    short = {"method": method, "model": model, "data": TEXT, "compare_with": []}
    run = coterie.run("synthetic", out=folder, callbacks=callbacks, **short)
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    losses = [
        {name: value for name, value in line.items() if "loss" in name}
        for line in lines
        if line["kind"] == "train"
    ]
    assert any(losses)
    model = run.load(run.clients[0])
    assert isinstance(model, PersonalModel)
    words = model.next_words("the water and the", 2)
    logits = model(IDS).logits.tolist()
    return [run.result.mean, losses, words, logits]


def _observed() -> tuple[Any, ...]:
    """Return all that a caller may have set, and the states of the global generators."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        str(torch.get_default_device()),
        torch.is_autocast_enabled("cpu"),
        torch.is_anomaly_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.mkldnn.enabled,
        torch._C._len_torch_function_stack(),
        sys.float_info.min / 2,
        np.geterr(),
        random.getstate(),
        str(np.random.get_state()),
    )


@pytest.fixture(scope="module")
def usual(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return _figures(tmp_path_factory.mktemp("usual") / "run", tiny_base)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_caller_s_settings_change_no_figure(
    setting: str, usual: list[Any], tiny_base: Path, tmp_path: Path
) -> None:
    with SETTINGS[setting]():
        before = _observed()
        figures = _figures(tmp_path / "run", tiny_base)
        assert _observed() == before
    assert figures == usual


def test_the_generators_of_torch_go_on_where_they_were(tiny_base: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    _figures(tmp_path / "run", tiny_base)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("setting", ["no_grad", "float64", "meta"])
def test_classifiers_are_trained_and_used_whatever_is_set(setting: str, tmp_path: Path) -> None:
    short = {"method": {"name": "fedavg", "rounds": 1, "local_steps": 1}, "compare_with": []}
    images = np.zeros((2, 1, 8, 8), dtype="float32")
    figures = []
    for place in (contextlib.nullcontext, SETTINGS[setting]):
        with place():
            run = coterie.run("cobo-digits", out=tmp_path / place.__name__, **short)
            model = run.load("c0-0")
            assert isinstance(model, PersonalClassifier)
            figures.append((run.result.mean, repr(model.predict(images))))
    assert figures[0] == figures[1]


def test_two_threads_share_the_settings_of_the_process_until_both_have_ended() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        entered, ended = threading.Event(), threading.Event()
        seen: list[torch.dtype] = []

        def second() -> None:
            with isolated():
                entered.set()
                ended.wait(10)
                seen.append(torch.empty(()).dtype)

        thread = threading.Thread(target=second)
        with isolated():
            thread.start()
            assert entered.wait(10)
        ended.set()
        thread.join()
        assert seen == [torch.float32]
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_callback_cannot_change_the_settings_of_its_run(
    usual: list[Any], tiny_base: Path, tmp_path: Path
) -> None:
    class Careless(coterie.Callback):
        def opened(self, *_: Any) -> None:
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_grad_enabled(False)
            np.seterr(all="raise")

    assert _figures(tmp_path / "run", tiny_base, Careless()) == usual
    assert torch.get_default_dtype() == torch.float32
    assert torch.get_default_device().type == "cpu"


def test_what_foreign_code_has_set_is_undone() -> None:
    before = _observed()
    with unchanged():
        SETTINGS["float64"]().__enter__()
        SETTINGS["precision"]().__enter__()
        torch.set_anomaly_enabled(True)
        torch.set_default_device("meta")
    assert _observed() == before


def test_python_without_docstrings_is_refused_by_its_option(tmp_path: Path) -> None:
    code = f"import coterie; coterie.run('quickstart', out={str(tmp_path / 'run')!r})"
    for command in (["-c", code], ["-m", "coterie", "run", "quickstart"]):
        done = subprocess.run(
            [sys.executable, "-OO", *command], capture_output=True, text=True, check=False
        )
        assert "-OO (PYTHONOPTIMIZE=2)" in done.stderr
        assert done.returncode == (2 if "coterie" in command else 1)
