"""The floating type of a session of torch, local to one thread.

`torch.set_default_dtype` changes the type for all threads. A torch mode is local to a thread, but costs some
microseconds per operation; it is used for third-party code that makes tensors without a type.
"""

from __future__ import annotations

import functools
import sys
import threading
from typing import Any

_LOCAL = threading.local()


def floating() -> Any:
    """The floating type of the session of this thread; torch's default without a session."""
    return getattr(_LOCAL, "floating", None) or sys.modules["torch"].get_default_dtype()


def set_floating(dtype: Any) -> Any:
    """Set the floating type of this thread, or torch's default with None; returns the previous setting."""
    before, _LOCAL.floating = getattr(_LOCAL, "floating", None), dtype
    return before


# Modules that call `torch.get_default_dtype` and pass its value on.
_CALLERS = ("torch.distributions.utils", "pyro.distributions.transforms.polynomial", "pyro.nn.auto_reg_nn")


@functools.cache
def defaults() -> Any:
    """The mode, a class: `defaults()(dtype)` is a context manager.

    Inside, tensors have type `dtype` if no type is given: those made by factory functions, from Python numbers and by
    arithmetic on integers. `torch.get_default_dtype` and `torch.Tensor(...)` cannot be changed in this way.
    """
    torch = sys.modules["torch"]
    always = {torch.empty, torch.eye, torch.linspace, torch.logspace, torch.ones, torch.rand, torch.randn}
    always |= {torch.zeros, torch.normal, torch.empty_strided}
    of_numbers = {torch.arange, torch.as_tensor, torch.asarray, torch.full, torch.scalar_tensor, torch.tensor}
    # The type of these functions is in their name or in their arguments.
    of = torch.Tensor
    typed = {of.bfloat16, of.float, of.half, of.to, of.type, of.type_as, of.view}
    typed |= {torch.from_numpy, torch.frombuffer, torch.load}

    class Defaults(torch.overrides.TorchFunctionMode):
        def __init__(self, dtype: Any):
            super().__init__()
            self.dtype, self.common = dtype, torch.get_default_dtype()

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if self.dtype is self.common:
                return function(*args, **kwargs)
            given, with_type = kwargs.get("dtype"), {**kwargs, "dtype": self.dtype}
            if function in always and given is None and not _floating(torch, (args, kwargs)):
                return function(*args, **with_type)
            # The type came from `torch.get_default_dtype`.
            if given is self.common and sys._getframe(1).f_globals.get("__name__") in _CALLERS:
                return function(*args, **with_type)
            result = function(*args, **kwargs)
            common = type(result) is torch.Tensor and result.dtype is self.common
            if given is not None or not common or function in typed or _floating(torch, (args, kwargs)):
                return result
            if function in of_numbers:
                return function(*args, **with_type)
            # Arithmetic on integers.
            tree_map_only = torch.utils._pytree.tree_map_only
            args, kwargs = tree_map_only(torch.Tensor, lambda each: each.to(self.dtype), (args, kwargs))
            return function(*args, **kwargs)

    return Defaults


def _floating(torch: Any, value: Any) -> bool:
    """Whether a tensor or an array of floats is among the arguments of a function."""
    for leaf in torch.utils._pytree.tree_leaves(value):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return True
        if getattr(getattr(leaf, "dtype", None), "kind", "") in ("f", "c"):
            return True
    return False
