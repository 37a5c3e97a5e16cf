"""The base class of methods that fit another method, their member."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from ppl_bnn.core.errors import InputError
from ppl_bnn.inference.method import Method


@dataclass(frozen=True)
class OfMember(Method):
    """A method that fits `member`. A given system or dtype replaces that of the member."""

    # The type checker does not see that the base class's fields are keyword-only.
    member: Method  # type: ignore[misc]
    ppl: str = dataclasses.field(default="", kw_only=True)
    dtype: str = dataclasses.field(default="", kw_only=True)
    finds_centre: ClassVar[bool] = False

    def __post_init__(self) -> None:
        member = self.member
        if not isinstance(member, Method):
            instead = f"{member.__name__}()" if isinstance(member, type) else "MAP(), SWAG() or another"
            raise InputError.of("member", "an instance of a method", repr(member), f"member={instead}")
        given = {name: getattr(self, name) for name in ("ppl", "dtype") if getattr(self, name)}
        if any(getattr(member, name) != value for name, value in given.items()):
            object.__setattr__(self, "member", dataclasses.replace(member, **given))
        for name in ("ppl", "dtype"):
            object.__setattr__(self, name, getattr(self.member, name))
        super().__post_init__()

    serves_local = property(attrgetter("member.serves_local"))  # type: ignore[assignment]
    serves_priors = property(attrgetter("member.serves_priors"))  # type: ignore[assignment]
