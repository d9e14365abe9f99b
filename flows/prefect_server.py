"""Whether there is a Prefect server, and whether it answers."""

from __future__ import annotations

from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.errors import ServerError

TIMEOUT_S = 10.0
HINT = "start one with `prefect server start`, and give its API as PREFECT_API_URL=http://.../api"


def server_url() -> str | None:
    """The API that Prefect is set to use, by the environment or a profile; None when none is."""
    return PREFECT_API_URL.value()


def check_server() -> str:
    """The API's URL, once it has answered.

    Raises:
        ServerError: none is set, or it does not answer within seconds.
    """
    url = server_url()
    if not url:
        raise ServerError(f"no Prefect server is set; {HINT}")
    with temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        client = get_client(httpx_settings={"timeout": TIMEOUT_S}, sync_client=True)
        fault = client.api_healthcheck()
    if fault is not None:
        said = str(fault).partition("\n")[0]
        raise ServerError(
            f"the Prefect server at {url} does not answer ({type(fault).__name__}: {said}); {HINT}"
        )
    return url
