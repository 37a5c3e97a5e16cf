"""What tells two settings apart, in plain values: networks, functions, nested methods, and what they hold."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn.inference.fingerprint import identity


def leaky(z: Any, slope: float = 0.1) -> Any:
    return slope * z


def made(function: Any) -> Any:
    def inner(z: Any) -> Any:
        return function(z)

    return inner


@dataclass(frozen=True)
class Scaled:
    scale: float
    inner: Any = None


@dataclass
class Changing:
    scale: float
    more: list[Any] = field(default_factory=list)


class Net:
    def __init__(self, scale: float, inner: Any = None):
        self.scale, self.inner = scale, inner

    def __call__(self, z: Any) -> Any:
        return self.scale * z


def linear(bias: float) -> Any:
    torch = pytest.importorskip("torch")
    network = torch.nn.Linear(2, 1)
    with torch.no_grad():
        network.weight.fill_(0.5)
        network.bias.fill_(bias)
    return network


def flax(seed: int) -> Any:
    nnx = pytest.importorskip("flax.nnx")
    return nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(seed)), nnx.relu)


def far(value: float) -> np.ndarray:
    """An array of which a `repr` leaves the middle out."""
    found = np.zeros(5000)
    found[2500] = value
    return found


PAIRS: dict[str, Any] = {
    "modules of torch": lambda: (bnn.MAP(start=linear(0.0)), bnn.MAP(start=linear(1.0))),
    "weights of torch": lambda: (linear(0.0).state_dict(), linear(1.0).state_dict()),
    "modules of Flax": lambda: (flax(0), flax(1)),
    "arrays in nested methods": lambda: (
        bnn.Laplace(start=bnn.MAP(start={"w": far(0.0)})),
        bnn.Laplace(start=bnn.MAP(start={"w": far(1.0)})),
    ),
    "settings of nested methods": lambda: (
        bnn.Ensemble(bnn.MAP(steps=3), size=2),
        bnn.Ensemble(bnn.MAP(steps=4), size=2),
    ),
    "lambdas": lambda: (lambda z: z, lambda z: z * z),
    "lambdas held by functions": lambda: (made(lambda z: z), made(lambda z: z * z)),
    "partials": lambda: (functools.partial(leaky, slope=0.1), functools.partial(leaky, slope=0.5)),
    "callable objects": lambda: (Net(1.0), Net(2.0)),
    "what callable objects hold": lambda: (Net(1.0, Net(2.0)), Net(1.0, Net(3.0))),
    "methods of objects": lambda: (Net(1.0).__call__, Net(2.0).__call__),
    "plain classes": lambda: (Scaled(1.0), Scaled(2.0)),
    "arrays in plain classes": lambda: (Scaled(1.0, far(0.0)), Scaled(1.0, far(1.0))),
    "functions of libraries": lambda: (np.tanh, np.sin),
    "guides": lambda: (bnn.SVI(guide=made(leaky)), bnn.SVI(guide=made(made))),
}


@pytest.mark.parametrize("what", PAIRS)
def test_two_that_differ_are_told_apart_and_one_made_twice_is_the_same(what: str) -> None:
    one, other = (json.dumps(identity(value)) for value in PAIRS[what]())
    assert one != other
    assert [json.dumps(identity(value)) for value in PAIRS[what]()] == [one, other]
    assert " at 0x" not in one + other


def test_types_of_arrays_and_shapes_count() -> None:
    values = [np.zeros(4), np.zeros(4, np.float32), np.zeros((2, 2)), np.zeros(5)]
    assert len({identity(value) for value in values}) == 4


def test_of_what_may_change_under_way_the_class_counts() -> None:
    """Its content is a state, and not what somebody chose."""
    assert identity(Changing(1.0)) == identity(Changing(2.0)) == {"class": f"{__name__}.Changing"}


def test_what_holds_itself_ends() -> None:
    net = Net(1.0)
    net.inner = net
    assert identity(net)["state"]["inner"] == "itself"


def test_a_folder_is_no_part_of_what_a_fit_is(tmp_path: Path) -> None:
    assert identity(bnn.SVI(checkpoint=tmp_path)) == identity(bnn.SVI())


SCRIPT = """
import functools, json
import numpy as np
from ppl_bnn.inference.fingerprint import identity

SLOPE = 0.1
OTHER = 1


def leaky(z, slope=SLOPE):
    return factor() * slope * z


def factor():
    return WEIGHTS.sum()


WEIGHTS = np.ones(3)
HALF = functools.partial(leaky, slope=0.5)


class Net:
    def __call__(self, z):
        return HALF(z)


print(json.dumps([identity(leaky), identity(Net())]))
"""


def test_a_function_is_what_it_says_and_reaches(tmp_path: Path) -> None:
    def of(text: str) -> Any:
        (tmp_path / "script.py").write_text(text)
        ran = subprocess.run(
            [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    function, net = of(SCRIPT)
    assert of(SCRIPT.replace("OTHER = 1", "OTHER = 2  # more")) == [function, net]
    # Defaults are values, a name may stand for an array, and a class reaches what its methods name.
    for before, after, both in (
        ("SLOPE = 0.1", "SLOPE = 0.2", True),
        ("np.ones(3)", "np.ones(4)", True),
        ("slope=0.5", "slope=0.25", False),
    ):
        one, other = of(SCRIPT.replace(before, after))
        assert other != net, before
        assert (one != function) is both, before
