"""An accelerator that every machine has: a device of its own for PyTorch, whose tensors the CPU
computes, and which refuses what a GPU refuses.

Tensors are on `simulated:0` for all of PyTorch (autograd, modules, `torch.accelerator`). An
operation that meets a tensor of another device fails, unless that is a single value on the CPU; so
does float64, which Apple's and some of Intel's GPUs lack. A process that has registered the device
keeps it until it ends, so the tests that use it have one of their own.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from coterie.core import isolation

NAME = "simulated"
LIBRARY = torch.library.Library("aten", "IMPL")  # registrations last as long as it does
# what takes a tensor of any device: it is how values come to a device and leave it
ACROSS = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense"}


class Simulated(Tensor):
    """A tensor on the device: a shell around the values, which are on the CPU."""

    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "Simulated":
        shell = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(NAME, 0),
        )
        shell.values = values.detach()
        return shell

    def __repr__(self, **_: Any) -> str:
        return f"Simulated({self.values})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]  # PyTorch's would leave the values behind
        return self.detach()

    @data.setter
    def data(self, other: "Simulated") -> None:
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.values = other.values

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        return self.values.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"can't convert {NAME}:0 device type tensor to numpy: use Tensor.cpu()")

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatched(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """What makes new tensors on the device, where one is asked for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat, _ = tree_flatten((args, kwargs))
        if any(isinstance(value, Simulated) or is_here(value) for value in flat):
            return dispatched(func, args, kwargs)
        return func(*args, **kwargs)


def is_here(value: Any) -> bool:
    return isinstance(value, torch.device) and value.type == NAME


def check(func: Any, flat: list[Any]) -> None:
    """Refuse tensors of several devices, as a GPU's kernels do, but where one is only a model for
    a new one.
    """
    if func._schema.name in ACROSS or any(is_here(value) for value in flat):
        return
    for value in flat:
        if isinstance(value, Tensor) and not isinstance(value, Simulated) and value.ndim:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, "
                f"{NAME}:0 and {value.device}! ({func})"
            )


def dispatched(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation on the CPU."""
    flat, form = tree_flatten((args, kwargs))
    check(func, flat)
    target = kwargs.get("device")
    stays = func._schema.name == "aten::_to_copy" and target is not None and not is_here(target)
    inner, own = tree_unflatten(
        [
            value.values
            if isinstance(value, Simulated)
            else torch.device("cpu")
            if is_here(value)
            else value
            for value in flat
        ],
        form,
    )
    found = func(*inner, **own)
    if func._schema.name == "aten::_local_scalar_dense" or stays:
        return found
    before = {id(value.values): value for value in flat if isinstance(value, Simulated)}
    return tree_map(lambda value: placed(value, before, func), found)


def placed(value: Any, before: dict[int, Simulated], func: Any) -> Any:
    """Return a result on the device; what was changed in place stays the tensor that it was."""
    if not isinstance(value, Tensor):
        return value
    if id(value) in before:
        return before[id(value)]
    if func._schema.name == "aten::copy_":  # from the device into a tensor of the CPU
        return value
    if value.dtype == torch.float64:
        raise TypeError(f"Cannot make a float64 tensor: {NAME} has no float64 ({func})")
    return Simulated(value)


class _Module:
    """What PyTorch asks of a device's module (`torch.simulated`)."""

    states = torch.Generator()

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def is_bf16_supported(self) -> bool:
        return False

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def synchronize(self, device: Any = None) -> None:
        """Nothing is under way."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed(self, seed: int) -> None:
        self.states.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return self.states.get_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        self.states.set_state(state)


def _empty_strided(size: Any, stride: Any, **how: Any) -> Tensor:
    return Simulated(torch.empty_strided(size, stride, dtype=how["dtype"]))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    read, written = (t.values if isinstance(t, Simulated) else t for t in (source, target))
    written.copy_(read)
    return target


def register() -> None:
    """Give this process the device, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    # `torch.tensor` and `new_tensor` call these two behind `__torch_dispatch__`
    LIBRARY.impl("empty_strided", _empty_strided, "PrivateUse1")
    LIBRARY.impl("_copy_from", _copy_from, "PrivateUse1")
    # a moved module keeps its parameters, as on other devices: only their contents change
    torch.__future__.set_swap_module_params_on_conversion(True)
    isolation._disable_current_modes = nullcontext  # the device is one of them
    Device().__enter__()
