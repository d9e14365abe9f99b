"""Models from the Hugging Face hub: safetensors, JSON and chat templates only, never code or
pickled data.
"""

from __future__ import annotations

from pathlib import Path

from workers.errors import ModelError

ALLOW = ("*.safetensors", "*.json", "*.jinja")
IGNORE = ("[!0-9]*/*",)
"""Files in sub-folders are other formats of the same model, but for the numbered folders of
sentence-transformers' modules.
"""


def download(repo_id: str, *, revision: str | None) -> Path:
    """The folder with the files of a hub model, from the hub's cache when HF_HUB_OFFLINE is set or
    they are there already.

    Raises:
        ModelError: no such model or revision, no access, or the hub cannot be reached.
    """
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    what = f"{repo_id!r} at revision {revision!r}" if revision else repr(repo_id)
    try:
        folder = snapshot_download(
            repo_id, revision=revision, allow_patterns=list(ALLOW), ignore_patterns=list(IGNORE)
        )
    except GatedRepoError as fault:
        raise ModelError(
            f"the hub model {what} is gated; accept its terms on its page and set HF_TOKEN"
        ) from fault
    except RevisionNotFoundError as fault:
        raise ModelError(f"the hub model {what} has no such revision; check --revision") from fault
    except RepositoryNotFoundError as fault:
        raise ModelError(
            f"the hub has no model {what}, or it is private; check the name, or set HF_TOKEN"
        ) from fault
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as fault:
        raise ModelError(
            f"the hub model {what} is not in the local cache and the hub cannot be asked "
            "(HF_HUB_OFFLINE is set, or there "
            "is no network); unset HF_HUB_OFFLINE, or give the path of a model folder"
        ) from fault
    except (HfHubHTTPError, httpx.HTTPError, OSError) as fault:
        raise ModelError(
            f"the hub model {what} could not be fetched ({fault}); try again, or give the path of "
            "a model folder"
        ) from fault
    return Path(folder)
