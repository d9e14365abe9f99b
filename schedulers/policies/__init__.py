"""The table of policies. A new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from schedulers.policies.exclusive import Exclusive
from schedulers.policies.mixed import Mixed
from schedulers.view import Policy

POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "exclusive": Exclusive,
        "mixed": Mixed,
    }
)


def make_policy(name: str) -> Policy:
    """A fresh policy by name.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    try:
        return POLICIES[name]()
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}") from None
