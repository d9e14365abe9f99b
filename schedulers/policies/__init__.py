"""The table of policies. A new policy is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

from schedulers.estimate import Estimator
from schedulers.policies.exclusive import Exclusive
from schedulers.policies.hybrid import Hybrid
from schedulers.policies.mixed import Mixed
from schedulers.view import Policy


class PolicyMaker(Protocol):
    """Makes a policy that learns through an estimator, or through a fresh one of its own."""

    def __call__(self, estimator: Estimator | None = None, /) -> Policy: ...


POLICIES: Mapping[str, PolicyMaker] = MappingProxyType(
    {
        "hybrid": Hybrid,
        "exclusive": Exclusive,
        "mixed": Mixed,
    }
)


def make_policy(name: str, estimator: Estimator | None = None) -> Policy:
    """A fresh policy by name.

    Args:
        name: in `POLICIES`.
        estimator: what it learns through; a fresh one by default.

    Raises:
        ValueError: unknown name; the message lists the known ones.
    """
    try:
        return POLICIES[name](estimator)
    except KeyError:
        raise ValueError(f"unknown policy {name!r}; choose from {', '.join(POLICIES)}") from None
