"""Models written in Pyro, in the floating type and on the device of a session.

A `PyroModule` that was made before the fit is mostly in single precision. A fit works on a copy in its own type.
"""

from __future__ import annotations

import copy
import functools
import types
from typing import Any

from ppl_bnn.backends.native import Model
from ppl_bnn.core.errors import ModelError, UnsupportedError
from ppl_bnn.language.modules.torch_defaults import floating


def in_session(model: Model) -> Model:
    """The model itself if it is a function; a copy in the type of the session if it is a module or bound to one.

    `ModelError` is raised for a module that cannot be copied.
    """
    import torch

    if isinstance(model, torch.nn.Module):
        return _copied(model)
    if isinstance(model, functools.partial) and isinstance(model.func, torch.nn.Module):
        return functools.partial(_copied(model.func), *model.args, **model.keywords)
    owner = getattr(model, "__self__", None)
    if isinstance(owner, torch.nn.Module) and isinstance(model, types.MethodType):
        return types.MethodType(model.__func__, _copied(owner))
    return model


def _copied(module: Any) -> Any:
    import torch

    try:
        copied = copy.deepcopy(module)
    except Exception as error:
        expected = "a module that copy.deepcopy can copy, since a fit does not change the user's own"
        got, advice = f"{type(error).__name__}: {error}", "a module whose tensors are parameters or buffers"
        raise ModelError.of("", expected, got, advice) from error
    return copied.to(dtype=floating(), device=torch.get_default_device())


@functools.cache
def messenger() -> Any:
    """The class of Pyro handlers that convert every distribution to the type and device of the session."""
    import torch
    from pyro.poutine.messenger import Messenger

    class InSession(Messenger):
        def __init__(self, rows: int) -> None:
            super().__init__()
            self.rows = rows
            self.dtype, self.device = floating(), torch.get_default_device()

        def _pyro_sample(self, msg: Any) -> None:
            if type(msg["fn"]).__name__ == "_Subsample":
                size, rows = msg["fn"].size, msg["fn"].subsample_size
                # A plate with as many rows as the data scales a mini-batch to a population.
                if rows not in (None, size, self.rows):
                    name = msg["name"]
                    advice = (
                        f"pyro.plate({name!r}, {size}), and mini-batches by SVI(batch_size={rows}) with a "
                    )
                    advice += "parameter population=None of the model"
                    got = f"subsample_size={rows} of {size}"
                    raise UnsupportedError.of(f"plate {name!r}", "a plate over all rows in Pyro", got, advice)
            elif not msg["is_observed"]:
                msg["fn"] = moved(msg["fn"], self.dtype, self.device)

    return InSession


def moved(value: Any, dtype: Any, device: Any) -> Any:
    """Convert a tensor, distribution, transform or list of them to that type; unchanged if it has it already."""
    import torch

    if isinstance(value, torch.Tensor):
        wanted = dtype if value.is_floating_point() else value.dtype
        return value if value.dtype == wanted and value.device == device else value.to(device, wanted)
    if type(value) in (list, tuple):
        parts = [moved(each, dtype, device) for each in value]
        same = all(part is each for part, each in zip(parts, value, strict=True))
        return value if same else type(value)(parts)
    if not isinstance(value, torch.distributions.Distribution | torch.distributions.Transform):
        return value
    parts = {name: moved(part, dtype, device) for name, part in vars(value).items()}
    changed = {name: part for name, part in parts.items() if part is not vars(value)[name]}
    if not changed:
        return value
    result = copy.copy(value)
    result.__dict__.update(changed)
    return result
