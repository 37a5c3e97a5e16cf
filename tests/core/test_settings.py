"""Fields of a dataclass with a declared check."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

from ppl_bnn.core.errors import InputError, UnknownNameError
from ppl_bnn.core.settings import OneOf, between, check_settings, flag, from_to, optional, setting, whole


@dataclass(frozen=True)
class Example:
    steps: int = setting(10, whole(2, 20))
    rate: float = setting(0.1, between(), advice="0.01")
    share: float = setting(0.5, from_to(0, 1))
    kind: str | None = setting(None, OneOf((None, "plateau")))
    quick: bool = setting(False, flag)
    rows: int | None = setting(None, optional(whole(1)), kw_only=True)
    free: object = None

    def __post_init__(self) -> None:
        check_settings(self, "Example")


@dataclass(frozen=True)
class Changed(Example):
    steps: int = 5
    rate: float = setting(3.0, between(1, 4))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"steps": 2},
        {"steps": np.int64(20)},
        {"rate": 1e-300},
        {"rate": np.float32(2.0)},
        {"share": 0},
        {"share": 1.0},
        {"kind": "plateau"},
        {"quick": True},
        {"rows": 1},
        {"free": "anything"},
    ],
)
def test_accepted_values(settings: dict[str, object]) -> None:
    Example(**settings)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"steps": 1}, "Example steps: expected a whole number from 2 to 20; got 1; try steps=10"),
        ({"steps": 21}, "got 21"),
        ({"steps": True}, "got True"),
        ({"steps": 3.0}, "got 3.0"),
        ({"rate": 0}, "Example rate: expected a positive number; got 0; try rate=0.01"),
        ({"rate": math.inf}, "got inf"),
        ({"rate": math.nan}, "got nan"),
        ({"rate": "1"}, "got '1'"),
        ({"rate": 1j}, "got 1j"),
        ({"share": -1e-9}, "expected a number from 0 to 1"),
        ({"share": 1.0000001}, "expected a number from 0 to 1"),
        ({"share": math.nan}, "got nan"),
        ({"quick": 1}, "expected True or False; got 1; try quick=False"),
        ({"rows": 0}, "expected a whole number of at least 1; got 0; try rows=None"),
    ],
)
def test_refused_values(settings: dict[str, object], text: str) -> None:
    with pytest.raises(InputError) as refused:
        Example(**settings)  # pyright: ignore[reportArgumentType]
    assert text in str(refused.value)


def test_an_unknown_word_gets_the_nearest_known_one() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'plateau'"):
        Example(kind="platau")


def test_a_subclass_with_another_default_keeps_the_check_and_may_declare_another() -> None:
    assert Changed().steps == 5
    with pytest.raises(InputError, match="from 2 to 20"):
        Changed(steps=50)
    with pytest.raises(InputError, match="between 1 and 4"):
        Changed(rate=0.5)
    assert Changed(rate=3.5).rate == 3.5


def test_a_string_of_numpy_is_a_string() -> None:
    assert Example(kind=np.str_("plateau")).kind == "plateau"
    with pytest.raises(UnknownNameError):
        Example(kind=np.array(["plateau"]))  # pyright: ignore[reportArgumentType]
