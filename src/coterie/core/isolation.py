"""The caller's settings of PyTorch and NumPy, set aside while coterie computes: its figures are the
same with gradients switched off, under another default dtype or device, and within autocast.
"""

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, contextmanager
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


# reads and writes a setting of the whole process, and the value under which coterie computes
_Setting = tuple[Callable[[], Any], Callable[[Any], object], Any]


def _precision(backend: str, operation: str) -> _Setting:
    """Return the setting of the precision in which products of fp32 are computed."""

    def read() -> str:
        now = torch._C._get_fp32_precision_getter(backend, operation)
        # what is inherited must stay inherited when it is written back
        return "none" if now == torch._C._get_fp32_precision_getter(backend, "all") else now

    def write(value: str) -> None:
        torch._C._set_fp32_precision_setter(backend, operation, value)

    return read, write, "ieee"


_SETTINGS: tuple[_Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
        (False, True),
    ),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, True),
    (flash_sdp_enabled, enable_flash_sdp, True),
    (math_sdp_enabled, enable_math_sdp, True),
    *(_precision(*of) for of in (("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "conv"))),
)


_lock = threading.Lock()
_before: list[list[Any]] = []  # of each block that is open in any thread, the settings before it


def _read() -> list[Any]:
    return [read() for read, *_ in _SETTINGS]


def _write(values: list[Any]) -> None:
    for (read, write, _), value in zip(_SETTINGS, values, strict=True):
        if read() != value:
            write(value)


@contextmanager
def _of_process() -> Iterator[None]:
    """Compute under coterie's settings while any thread is in such a block."""
    with _lock:
        _before.append(_read())
        if len(_before) == 1:
            _write([value for *_, value in _SETTINGS])
    try:
        yield
    finally:
        with _lock:
            before = _before.pop()
            if not _before:
                _write(before)


def _function_modes() -> list[Any]:
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
    """Undo what foreign code, such as a callback, changes of settings and the current folder."""
    before = _read()
    try:
        with _of_thread(), chdir(os.curdir):
            yield
    finally:
        _write(before)
