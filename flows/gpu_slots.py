"""GPU slots: a share of Prefect's global concurrency limit `gpu`, held while a job computes.

Only for those who ask for slots. A lease keeps them, renewed by a thread of Prefect's own every few
minutes, so neither a long step nor a server that is away for a while loses them; when the process
dies they come free as the lease runs out.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.exceptions import ObjectNotFound

from flows.errors import SpecError

LIMIT = "gpu"


@contextmanager
def gpu_slots_held(num_slots: int) -> Generator[None]:
    """Wait for slots and hold them; 0 asks for none and calls nobody.

    Raises:
        SpecError: there is no such limit, or it is smaller than what is asked for.
    """
    if not num_slots:
        yield
        return
    _check_limit(num_slots)
    # A renewal that fails must not end a job whose rows cost hours: at worst a second job shares
    # the GPUs for as long as the server is away.
    with concurrency(LIMIT, occupy=num_slots, strict=True, raise_on_lease_renewal_failure=False):
        yield


def _check_limit(num_slots: int) -> None:
    with get_client(sync_client=True) as client:
        try:
            limit = client.read_global_concurrency_limit_by_name(LIMIT)
        except ObjectNotFound as fault:
            raise SpecError(
                f"gpu_slots is {num_slots}, but the Prefect server has no global concurrency limit "
                f"{LIMIT!r}; make it with `prefect gcl create {LIMIT} --limit N`, or leave "
                "gpu_slots at 0"
            ) from fault
    if limit.limit < num_slots:
        raise SpecError(
            f"gpu_slots is {num_slots}, but the global concurrency limit {LIMIT!r} is "
            f"{limit.limit}; ask for fewer, or raise it with `prefect gcl update {LIMIT} --limit N`"
        )
