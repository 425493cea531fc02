"""The one place where the errors of the hub's client become ours, with what to do about them.

Knows the client's exceptions; does not know what was being fetched, only for which model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from slicing.checkpoint import SINGLE_NAME
from slicing.errors import ModelError


@contextmanager
def explained(model: str) -> Iterator[None]:
    """Turn what the hub's client raises while it works for `model` into `ModelError`, with advice."""
    try:
        yield
    except GatedRepoError as error:
        page = f"{constants.ENDPOINT}/{model.partition('@')[0]}"
        raise ModelError(f"{model} is gated: accept its terms at {page}, then set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model}: the hub knows the model but not this revision") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub at {constants.ENDPOINT} has no model {model.partition('@')[0]}; "
            "check the name, and set HF_TOKEN if it is private"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ModelError(
            f"HF_HUB_OFFLINE is set but {model} is not fully here; fetch it once without"
        ) from error
    except LocalEntryNotFoundError as error:
        if constants.is_offline_mode():
            raise ModelError(
                f"HF_HUB_OFFLINE is set but {model} is not here; fetch it once without"
            ) from error
        raise ModelError(
            f"cannot reach the hub at {constants.ENDPOINT}, and {model} is not cached here"
        ) from error
    except EntryNotFoundError as error:
        raise ModelError(
            f"{model} holds no {SINGLE_NAME} (or a shard that its index names); "
            "pickled weights are refused: look for a safetensors copy"
        ) from error
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise ModelError(
            f"the hub at {constants.ENDPOINT} fails for {model}: {_first_line(error)}"
        ) from error
    except OSError as error:
        raise ModelError(f"cannot store {model}: {error.strerror or error}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
