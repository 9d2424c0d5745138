"""Devices to compute on, the CPU or any accelerator of PyTorch (`cuda`, also AMD's, `mps`, `xpu`,
`npu` ...), and the memory of devices and of this machine.
"""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.core.errors import ModelError

_FEW = 16  # rows; a product of fewer costs less than the conversion of its weights


def accelerator() -> str | None:
    """Return the type of this machine's accelerator; None where there is none."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return None if device is None else device.type


def is_known(device: str) -> bool:
    """Return whether PyTorch has a type of device of this name, whether or not one is present."""
    try:
        torch.device(device)
    except RuntimeError:
        return False
    return True


def is_available(device: str | torch.device) -> bool:
    """Return whether tensors can be on a device."""
    if not is_known(str(device)):
        return False
    device = torch.device(device)
    if device.type in ("cpu", "meta"):
        return True
    module = _module(device)
    if module is None or not module.is_available():
        return False
    return device.index is None or device.index < int(module.device_count())


def check(device: str | torch.device) -> None:
    """Refuse a device that this machine does not have. Raises ModelError."""
    if not is_available(device):
        problem = f"device {str(device)!r} is not available here"
        raise ModelError(problem, f"Use {' or '.join(here())}.")


def here() -> list[str]:
    """Return the types of device that this machine has."""
    device = accelerator()
    return ["cpu"] if device is None else ["cpu", device]


def has_bf16(device: str | torch.device) -> bool:
    """Return whether a device has instructions for bf16, unlike CUDA devices before Ampere and
    CPUs without AVX512-BF16, on which oneDNN emulates them.
    """
    device = torch.device(device)
    if device.type == "cpu":
        built = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        x86 = platform.machine().lower() in ("x86_64", "amd64")
        known = torch.ops.mkldnn._is_mkldnn_bf16_supported
        return bool(built and (torch.cpu._is_avx512_bf16_supported if x86 else known)())
    module = _module(device)
    if (supported := getattr(module, "is_bf16_supported", None)) is None:
        return _computes(device, torch.bfloat16)
    try:
        return bool(supported(including_emulation=False))
    except TypeError:  # only CUDA's takes it
        return bool(supported())


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which products of (..., d) are fastest, conversions included: its own, or
    fp32 for many rows of bf16 on a CPU that emulates it.
    """
    many = x.device.type == "cpu" and x.numel() >= _FEW * x.shape[-1]
    emulated = many and x.dtype == torch.bfloat16 and not has_bf16("cpu")
    return torch.float32 if emulated else x.dtype


def exact(tensor: Tensor) -> Tensor:
    """Return a tensor in float64, on the CPU if its device has none (Apple's GPUs, some Intel)."""
    return (tensor if _computes(tensor.device, torch.float64) else tensor.cpu()).double()


def seed(value: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of one device. `torch.manual_seed` would also record where
    it was called, for devices that are not initialised.
    """
    torch.default_generator.manual_seed(value)
    if device.type not in ("cpu", "meta") and (module := _module(device)) is not None:
        with torch.accelerator.device_index(device.index):
            module.manual_seed(value)


@contextmanager
def forked(device: torch.device) -> Iterator[None]:
    """Restore the random generators of the CPU and of a device after the block."""
    here = device.type in ("cpu", "meta")
    with torch.random.fork_rng(
        [] if here else [device], device_type="cuda" if here else device.type
    ):
        yield


@contextmanager
def all_forked() -> Iterator[None]:
    """Restore the random generators of the CPU and of all devices in use after the block."""
    kind = accelerator()
    module = None if kind is None else _module(torch.device(kind))
    in_use = module is not None and getattr(module, "is_initialized", lambda: True)()
    devices = [*range(int(module.device_count()))] if in_use and module is not None else []
    with torch.random.fork_rng(devices, device_type=kind or "cuda"):
        yield


def synchronise(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def memory(device: torch.device) -> float | None:
    """Return an accelerator's memory in bytes; None if it is the machine's own or not reported."""
    module = None if device.type == "cpu" else _module(device)
    read = getattr(module, "get_device_properties", None)
    total = getattr(read(device), "total_memory", None) if read is not None else None
    return None if total is None else float(total)


def memory_here() -> float | None:
    """Return this machine's memory in bytes; None if the platform does not report it."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):
        return None


def peak_memory() -> int | None:
    """Return this process's peak resident memory in bytes; None if not reported (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def free_memory() -> int | None:
    """Return the available memory in bytes; None if not reported (all systems but Linux)."""
    source = Path("/proc/meminfo")
    if not source.exists():
        return None
    lines = dict(line.split(":", 1) for line in source.read_text().splitlines() if ":" in line)
    return 1024 * int(lines["MemAvailable"].split()[0])


def processor() -> list[str]:
    """Return the lines that tell this machine's processor from others."""
    source = Path("/proc/cpuinfo")
    if not source.exists():
        return [platform.processor(), platform.machine()]
    names = ("model", "flags", "CPU", "Features")
    return sorted({line for line in source.read_text().splitlines() if line.startswith(names)})


def _module(device: torch.device) -> Any:
    """Return PyTorch's module for a type of device (`torch.cuda`), or None."""
    try:
        return torch.get_device_module(device)
    except RuntimeError:
        return None


@lru_cache
def _computes(device: torch.device, dtype: torch.dtype) -> bool:
    try:
        one = torch.ones(2, 2, device=device, dtype=dtype)
        return float((one @ one).sum()) == 8.0
    except (TypeError, RuntimeError):
        return False
