"""What a clone, a copy or a download leaves in the place of a file: a git-lfs pointer, a web page, a link to nothing, nothing."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

_LFS = b"version https://git-lfs.github.com/spec/"
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml")
_ANSWERS = (b"Entry not found", b"Repository not found", b"Access to model", b"Invalid username or password")
_TOKENIZERS = re.compile(
    r"config\.json|(.*token.*|.*vocab.*|.*merges.*|normalizer|chat_template|.*processor_config)\.(json|txt|jinja)|.+\.(model|spm|bpe|codes|tiktoken)"
)


def instead(path: str | Path) -> str:
    """What is in the place of the file and what to do, to be read after "PATH is"; empty if it may be the file itself."""
    try:
        os.stat(path)
        if os.path.isdir(path):
            return "a folder"
        if not os.path.isfile(path):
            return "no plain file"
        with open(path, "rb") as file:
            first = file.read(256)
    except OSError as error:
        return _unreadable(path, error)
    if not first:
        return "empty: download or copy it again"
    if first.startswith(_LFS):
        return "a git-lfs pointer, the file itself was not downloaded: run `git lfs pull` in its folder"
    if first.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        return "a web page, which a server gave in place of the file (a wrong address, or one that wants a login): download it again"
    if first.startswith(_ANSWERS):
        return f"a hub's answer, {first.splitlines()[0].decode(errors='replace')!r}, in place of the file: download it again"
    return ""


def kind(value: Any) -> str:
    """What a value read from JSON or YAML is, in that language's words."""
    if value is None:
        return "null"
    names: dict[type, str] = {
        bool: "true or false",
        str: "a string",
        list: "a list",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return names.get(type(value), type(value).__name__)


def _unreadable(path: str | Path, error: OSError) -> str:
    if error.errno == errno.ELOOP:
        return (
            f"a link to {os.readlink(path)}, which leads back to itself" if os.path.islink(path) else "behind a link to itself"
        )
    if not os.path.lexists(path):
        return "not there"
    if error.errno == errno.ENOENT:
        return f"a link to {os.readlink(path)}, which does not exist (an incomplete download?)"
    return f"not readable: {error.strerror}"


def _no_json(path: str) -> str:
    try:
        if path.endswith(".json"):
            json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return "no JSON: download or copy it again"
    return ""


def why_no_tokenizer(folder: str | Path, error: Exception) -> str:
    """Why a library could not load one: a file of `folder` in whose place something else stands, and what the library said.

    Both, since it may have failed for another reason. Files that no tokenizer is read from do not count: an empty report, or the pointers
    of weights that who wants the tokenizer alone leaves.
    """
    names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    told = (
        (path, instead(path) or _no_json(path))
        for name in names
        if _TOKENIZERS.fullmatch(name)
        for path in [os.path.join(folder, name)]
    )
    said = f"{type(error).__name__}: {error}"
    return next((f"{path} is {why} ({said})" for path, why in told if why), said)
