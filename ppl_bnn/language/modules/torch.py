"""`torch.nn.Module` in Pyro."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from ppl_bnn.core.errors import BNNError, ModelError, UnsupportedError
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.language.modules import protocol
from ppl_bnn.language.modules.protocol import Array, Arrays, Call, Framework, Inputs, Parameter, mapped
from ppl_bnn.language.modules.torch_defaults import defaults, floating

# One module at a time is in evaluation mode, so that two threads restore what there was before both.
_EVALUATION = threading.RLock()


class Torch(Framework):
    """`torch.nn.Module`: runs `torch.func.functional_call` with all parameters and copies of all buffers."""

    library, system, kind = "torch", "pyro", "a torch.nn.Module"

    def refuse(self, word: str, network: Any) -> None:
        layers = sys.modules["torch"].nn.modules
        check, rows = ModelError.check, "rows that do not interact"
        for path, part in network.named_modules():
            name = f"{type(part).__name__} {path!r}" if path else type(part).__name__
            if isinstance(part, layers.batchnorm._BatchNorm):
                got = f"{name} without running statistics, which normalises by those of the batch"
                check(part.running_mean is not None, word, rows, got, "torch.nn.LayerNorm or GroupNorm")
                got = f"{name} in training, which normalises by the statistics of the batch"
                advice = "mode='eval', for the running statistics that it has, or torch.nn.LayerNorm"
                check(not part.training, word, rows, got, advice)
            # A parametrization is a part; the older function of torch leaves a hook.
            found = {type(each).__name__ for each in (part, *part._forward_pre_hooks.values())}
            if found & {"_SpectralNorm", "SpectralNorm"}:
                got = f"{name} with a spectral norm in training, which moves its vectors in every run"
                advice = "mode='eval', or priors.SpectralNorm on a layer without it"
                check(not part.training, word, "a module that is a function", got, advice)
            if isinstance(part, layers.dropout._DropoutNd) and part.training:
                got = f"{name} in training, with p={part.p}"
                advice = "mode='eval', or bnn.MCDropout on bnn.dense layers"
                check(part.p <= 0, word, "a module without randomness of its own", got, advice)

    def parameters(self, word: str, network: Any) -> list[Parameter]:
        found = []
        for name, tensor in network.named_parameters():
            path, _, leaf = name.rpartition(".")
            lazy, got = type(tensor).__name__ == "UninitializedParameter", "a lazy layer that has not run"
            ModelError.check(not lazy, word, f"{name!r} with a shape", got, "calling it once on a row of x")
            good, got = tensor.is_floating_point(), f"a parameter of {tensor.dtype}"
            ModelError.check(good, word, f"{name!r} in floats", got, "a registered buffer")
            owner = network.get_submodule(path)
            kinds, shape = protocol.kinds_of(owner, "torch"), tuple(map(int, tensor.shape))
            count = math.prod(shape[1:])
            if "_ConvTransposeNd" in kinds and len(shape) > 1:
                # Unlike other layers of torch, the axes are (in, out / groups, places).
                count = shape[0] // owner.groups * math.prod(shape[2:])
            inputs, gain = protocol.fan_in_of(kinds, leaf, shape, count)
            table = bool(kinds & {"Embedding", "EmbeddingBag"})
            with self.aside():
                own = None if tensor.is_meta else tensor.detach()
            found.append(Parameter(name, shape, inputs, own, gain, len(shape) < 2 or table))
        return found

    def further_names(self, network: Any) -> dict[str, str]:
        listed = {id(tensor): name for name, tensor in network.named_parameters()}
        every = network.named_parameters(remove_duplicate=False)
        return {name: listed[id(tensor)] for name, tensor in every if listed[id(tensor)] != name}

    def constants(self, network: Any) -> dict[str, Array]:
        every = network.named_buffers(remove_duplicate=False)
        return {name: buffer.detach() for name, buffer in every if _has_value(buffer)}

    def start(self, own: Any) -> Array:
        # A copy, because optimisers change parameters in place.
        return own.to(dtype=floating(), device=sys.modules["torch"].get_default_device(), copy=True)

    def number(self, own: Any) -> np.ndarray:
        return own.detach().cpu().double().numpy() if protocol.library_of(own) == "torch" else np.asarray(own)

    @contextlib.contextmanager
    def in_evaluation(self, network: Any) -> Iterator[Any]:
        # Not by `eval()`, which some modules use to change their weights. A copy of a large module takes long.
        with _EVALUATION:
            parts = [part for part in network.modules() if part.training]
            try:
                for part in parts:
                    part.training = False
                yield network
            finally:
                for part in parts:
                    part.training = True

    def mode(self, network: Any) -> Any:
        return tuple(part.training for part in network.modules())

    def aside(self) -> contextlib.AbstractContextManager[Any]:
        # Inside vmap and vjp of torch no tensor has values that can be read, not even the module's own.
        return sys.modules["torch"]._functorch.pyfunctorch.temporarily_clear_interpreter_stack()

    def check_mapped(self, call: Call, inputs: Inputs, dtype: str) -> None:
        two_draws = [np.stack([each, each]) for each in call.artificial_values(dtype)]
        vmap = sys.modules["torch"].func.vmap
        try:
            # torch warns of operations that it maps slowly; the user sees the warning in the fit itself.
            with self.concrete(dtype) as like, ignored():
                numbers = two_draws, call.artificial(inputs, 2, dtype, 1)
                draws, rows = mapped(lambda each: self.native(each, like), numbers)
                vmap(lambda values: self.run(call, values, rows, like), randomness="different")(draws)
        except BNNError:
            raise
        except Exception as error:
            # Any other error is reported when the module runs on the actual inputs.
            got = str(error).partition("\n")[0]
            if "batching rule" not in got.lower():
                return
            advice = "bnn.gru or bnn.lstm in place of recurrent layers of torch, or a Flax NNX or an Equinox module"
            expected = "operations that torch.func.vmap maps over draws"
            raise UnsupportedError.of(call.word, expected, got, advice) from error

    def native(self, value: Array, like: Array) -> Array:
        torch = sys.modules["torch"]
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(np.array(value), device=like.device)
        return value.to(dtype=like.dtype if value.is_floating_point() else None, device=like.device)

    def run(self, call: Call, values: Arrays, inputs: Inputs, like: Array) -> Any:
        torch = sys.modules["torch"]
        buffers = {name: _copied(call, name, buffer, like) for name, buffer in call.network.named_buffers()}
        versions = {name: buffer._version for name, buffer in buffers.items()}
        given = dict(zip((each.name for each in call.parameters), values, strict=True)) | buffers
        before = _random_state(like.device)
        with _plain()(like.dtype):
            output = torch.func.functional_call(call.network, given, inputs)
        good = torch.equal(before, _random_state(like.device))
        got = "one that draws random numbers (dropout in training, perhaps)"
        advice = "mode='eval', or what is drawn as bnn.sample in the model"
        call.check(good, "a module without randomness of its own", got, advice)
        now = {name: given[name]._version for name in buffers if given[name] is buffers[name]}
        changed = ", ".join(repr(name) for name in buffers if now.get(name) != versions[name])
        expected = "a module that is a function, and leaves its buffers as they are"
        call.check(not changed, expected, f"changes of {changed}", "mode='eval'")
        return output

    @contextlib.contextmanager
    def concrete(self, dtype: Any) -> Iterator[Array]:
        torch = sys.modules["torch"]
        # A record that is being made has no values, and a count is of the model alone.
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            yield torch.zeros(0, dtype=getattr(torch, str(dtype)), device=torch.get_default_device())

    def count(self, call: Call, values: Arrays, inputs: Inputs, dtype: Any) -> int:
        torch = sys.modules["torch"]
        sizes = []

        class Counting(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = function(*args, **(kwargs or {}))
                sizes.append(result.numel() if isinstance(result, torch.Tensor) else 0)
                return result

        with Counting():
            self.on_numbers(call, values, inputs, dtype)
        return sum(sizes)


def _has_value(buffer: Any) -> bool:
    return not buffer.is_meta and type(buffer).__name__ != "UninitializedBuffer"


def _copied(call: Call, name: str, buffer: Any, like: Array) -> Any:
    """A copy of a buffer in the type and on the device of the fit, which the module may overwrite."""
    advice = "a module that has been initialised"
    call.check(_has_value(buffer), f"a value of the buffer {name!r}", "a shape only", advice)
    dtype = buffer.dtype
    if buffer.is_floating_point():
        dtype = like.dtype
    elif buffer.is_complex():
        dtype = like.dtype.to_complex()
    return buffer.detach().to(dtype=dtype, device=like.device, copy=True)


@functools.cache
def _plain() -> Any:
    """A torch mode in which operations have all derivatives and can be mapped, and tensors a given type by default.

    The fused operations of attention have a first derivative only, and cannot be mapped over draws. Layers do not use
    them under a torch mode, nor in attention that returns its weights. The forward derivative of a normalisation with
    weights cannot be recorded; that of one without can.
    """
    torch = sys.modules["torch"]
    functional, unfused = torch.nn.functional, torch.ops.aten._scaled_dot_product_attention_math
    norms = functional.layer_norm, functional.group_norm, functional.batch_norm

    def normalised(function: Any, *args: Any, weight: Any, bias: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        # The channels are the second axis, except those of a layer norm.
        places = [1] * (0 if function is functional.layer_norm else output.ndim - 2)
        output = output if weight is None else output * weight.reshape(*weight.shape, *places)
        return output if bias is None else output + bias.reshape(*bias.shape, *places)

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # The plain operation adds a mask, whatever its type.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -math.inf)
        return unfused(query, key, value, attn_mask, *args, **kwargs)[0]

    class Plain(defaults()):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if function in norms and torch._C._functorch.peek_interpreter_stack() is not None:
                return normalised(function, *args, **kwargs)
            if function is functional.scaled_dot_product_attention and not _first_derivative():
                return attention(*args, **kwargs)
            if function is functional.multi_head_attention_forward and kwargs.get("need_weights") is False:
                return function(*args, **{**kwargs, "need_weights": True})[0], None
            return super().__torch_function__(function, types, args, kwargs)

    return Plain


def _first_derivative() -> bool:
    """Whether this thread computes a value or a gradient, by torch.func or without it, and nothing else."""
    transforms = sys.modules["torch"]._C._functorch.get_interpreter_stack() or []
    return [each.key().name for each in transforms] in ([], ["Grad"])


def _random_state(device: Any) -> Any:
    """The state of the generator that layers on this device draw from."""
    torch = sys.modules["torch"]
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.random.get_rng_state()
