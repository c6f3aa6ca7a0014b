"""The hub, which may be out of reach: found out once and in seconds. Its library tries each file again and again, for a minute in all."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

from bigtrain import ranks, shapes
from bigtrain.errors import ModelError

logger = logging.getLogger(__name__)

_heard: list[str] = []  # why this process has stopped asking the hub


def may_be_id(source: Any) -> bool:
    """Whether this is written as `owner/name`; there may still be a folder of that name."""
    return isinstance(source, str) and not source.startswith((shapes.PREFIX, ".", "/", "~")) and source.count("/") == 1


def look_for(*sources: Any) -> None:
    """See that the hub answers, if any of these is an id of it; without an answer, what lies in the cache is used. Collective for ids.

    One rank of each host asks, and all do as those heard that heard nothing: no rank may read what is newer than another's.

    Raises:
        ModelError: on every rank where the hub does not answer one host, and a host's cache lacks one of them.
    """
    ids = [source for source in sources if may_be_id(source)]
    if not ids:
        return
    with ranks.together("looking for the hub"):
        absent = [name for name in ids if not Path(name).is_dir()]
        why = _why_not() if absent and ranks.local_rank() == 0 else ""
    if why := next(filter(None, ranks.all_gather_object(why, "looking for the hub")), ""):
        with ranks.together("looking into the cache of the hub"):
            _use_the_cache(absent, why)


def _why_not() -> str:
    """Why the hub is not to be asked; empty if it answers."""
    from huggingface_hub import constants, is_offline_mode

    if is_offline_mode():
        return f"{_heard[0]}; a new start asks again" if _heard else "HF_HUB_OFFLINE is set"
    return _unreachable(constants.ENDPOINT, constants.HF_HUB_ETAG_TIMEOUT)


def _use_the_cache(ids: list[str], why: str) -> None:
    from huggingface_hub import constants, is_offline_mode

    if absent := sorted(name for name in {*ids} if not _is_cached(name)):
        raise ModelError(
            f"{', '.join(absent)}: neither a folder here nor in the cache {constants.HF_HUB_CACHE}, and the hub at {constants.ENDPOINT} cannot be "
            f"reached ({why}). Give a local folder with config.json, weights and tokenizer, fetched where there is a network (hf download "
            f"{absent[0]} --local-dir DIR); or set HF_ENDPOINT to a mirror that can be reached, or HF_HOME to a cache that has it "
            "(HF_HUB_OFFLINE=1: without asking the hub)."
        )
    if not is_offline_mode():
        if ids and ranks.is_main():
            logger.warning("the hub at %s cannot be reached (%s): %s from the cache", constants.ENDPOINT, why, ", ".join(ids))
        _heard.append(why)
        constants.HF_HUB_OFFLINE = True  # as the variable of that name, which is read at import


def _is_cached(name: str) -> bool:
    """Whether the cache has a snapshot, whole or not."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    snapshots = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model") / "snapshots"
    return snapshots.is_dir() and any(snapshots.iterdir())


def _unreachable(endpoint: str, limit_s: float) -> str:
    """Why nothing answers there; empty if something does. In a thread: no limit of a request holds for looking a name up."""
    said: list[str] = []

    def ask() -> None:
        from huggingface_hub.utils import get_session

        try:
            get_session().head(endpoint, timeout=limit_s)
            said.append("")
        except Exception as error:  # of the HTTP library below, which is another in each generation of huggingface_hub
            said.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=ask, daemon=True, name="bigtrain-hub")
    thread.start()
    thread.join(limit_s)
    return said[0] if said else f"no answer within {limit_s:g} s; HF_HUB_ETAG_TIMEOUT sets the limit"
