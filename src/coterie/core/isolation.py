"""The caller's settings of PyTorch and NumPy, set aside while coterie computes: its figures are the
same with gradients switched off, under another default dtype or device, and within autocast.
"""

import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.backends.cuda import (
    enable_flash_sdp,
    enable_math_sdp,
    flash_sdp_enabled,
    math_sdp_enabled,
)
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from coterie.core.devices import all_forked
from coterie.core.importing import check_docstrings

_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "maia", "xla", "privateuseone")
_NUMPY = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}


@dataclass
class _Setting:
    """A setting of the whole process, with the value under which coterie computes."""

    read: Callable[[], Any]
    write: Callable[[Any], object]
    own: Any


def _precision(backend: str, operation: str) -> _Setting:
    """Return the setting of the precision in which products of fp32 are computed."""

    def read() -> str:
        now = torch._C._get_fp32_precision_getter(backend, operation)
        # what is inherited must stay inherited when it is written back
        return "none" if now == torch._C._get_fp32_precision_getter(backend, "all") else now

    def write(value: str) -> None:
        torch._C._set_fp32_precision_setter(backend, operation, value)

    return _Setting(read, write, "ieee")


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    _Setting(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    _Setting(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    _Setting(flash_sdp_enabled, enable_flash_sdp, True),
    _Setting(math_sdp_enabled, enable_math_sdp, True),
    *(_precision(*of) for of in (("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "conv"))),
)


@dataclass
class _Process:
    """The settings of the process before the first of the blocks that are open, in any thread."""

    open: int = 0
    before: list[Any] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


_process = _Process()


def _write(values: list[Any]) -> None:
    for setting, value in zip(_SETTINGS, values, strict=True):
        if setting.read() != value:
            setting.write(value)


@contextmanager
def _of_process() -> Iterator[None]:
    """Compute under coterie's settings while any thread is in such a block."""
    with _process.lock:
        _process.open += 1
        if _process.open == 1:
            _process.before = [setting.read() for setting in _SETTINGS]
            _write([setting.own for setting in _SETTINGS])
    try:
        yield
    finally:
        with _process.lock:
            _process.open -= 1
            if not _process.open:
                _write(_process.before)


def _function_modes() -> list[Any]:
    """Take all modes of functions from this thread's stack, and return them from the top."""
    return [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]  # type: ignore[no-untyped-call]


@contextmanager
def _of_thread() -> Iterator[None]:
    """Compute without this thread's modes of PyTorch; restore them, whatever the block changes."""
    modes = _function_modes()
    default_device = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    torch._GLOBAL_DEVICE_CONTEXT.device_context = None
    hooks = []  # for tensors that autograd saves
    while of_saved := torch._C._autograd._top_saved_tensors_default_hooks(True):
        hooks.append(of_saved)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    flushes = sys.float_info.min / 2 == 0  # denormal numbers to zero
    torch.set_flush_denormal(False)
    try:
        with ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(np.errstate(**_NUMPY))  # type: ignore[arg-type]
            for device in _AUTOCAST:
                if torch.is_autocast_enabled(device):
                    stack.enter_context(torch.autocast(device, enabled=False))
            yield
    finally:
        torch.set_flush_denormal(flushes)
        _function_modes()
        for mode in reversed(modes):
            _push_mode(mode)
        torch._GLOBAL_DEVICE_CONTEXT.device_context = default_device
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def inference() -> Iterator[None]:
    """Compute without gradients under coterie's settings. Random numbers are the caller's."""
    with _of_thread(), _of_process(), torch.no_grad():
        yield


@contextmanager
def isolated() -> Iterator[None]:
    """Compute under coterie's settings, and restore the caller's and the global random generators
    of Python, NumPy and PyTorch afterwards. Raises Refused under `python -OO`.
    """
    check_docstrings()
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with _of_thread(), _of_process(), all_forked():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def unchanged() -> Iterator[None]:
    """Undo what foreign code, such as a callback, changes of the settings."""
    before = [setting.read() for setting in _SETTINGS]
    try:
        with _of_thread():
            yield
    finally:
        _write(before)
