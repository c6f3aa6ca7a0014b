"""What a model gives attention beside queries, keys and values, which not every implementation takes."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

SINKS = "s_aux"
# How modeling files of transformers pass them on, what they are, and the setting without whose value nothing is passed.
_ARGUMENTS = {"softcap": ("a cap of its scores", "attn_logit_softcapping"), SINKS: ("sinks", None)}


def left_out(cls: Any, config: Any, takes: tuple[str, ...] = ()) -> str:
    """What this model's attention is given that sdpa, or an implementation that `takes` more than it, would leave out; empty: nothing.

    `_supports_sdpa` does not tell: of Gemma 2 and VaultGemma it was true up to transformers 5.17, whose sdpa then dropped the cap.
    """
    passed = _passes(getattr(cls, "__module__", ""))
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    beyond = {name: setting for name, (_, setting) in _ARGUMENTS.items() if name in passed and name not in takes}
    given = (name for name, setting in beyond.items() if not setting or getattr(text, setting, None))
    return " and ".join(f"{_ARGUMENTS[name][0]} ({name})" for name in given)


@functools.cache
def _passes(module: str) -> frozenset[str]:
    """The `_ARGUMENTS` in a module's calls: told by its code, since an argument that nothing takes is told by nobody."""
    if not module.startswith("transformers") or module not in sys.modules:
        return frozenset()
    code = inspect.getsource(sys.modules[module])
    return frozenset(name for name in _ARGUMENTS if re.search(rf"\b{name}=self\.", code))
