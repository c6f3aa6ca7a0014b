"""The state that the resolving steps share: the file being completed, the run, and the decisions so far."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from bigtrain.config.problems import Problem
from bigtrain.config.rules import Context
from bigtrain.config.run import DEFAULTS, FLAGS, RunValues
from bigtrain.config.shape import ModelShape

Source = Literal["file", "flag", "launcher", "model", "device", "plan", "auto", "default"]
AUTO = "auto"


@dataclass(frozen=True)
class Decision:
    """One value and who decided it.

    Attributes:
        path: dotted path in the file, or the name of a run value that has no place there.
        value: what it is now.
        source: who decided: `file`, `flag`, `launcher`, `model`, `device`, `plan`, `auto` (--ds_config auto), or `default`.
        reason: in a few words.
    """

    path: str
    value: Any
    source: Source
    reason: str


@dataclass
class Work:
    """A config on its way to being resolved. Steps read it, write to it, and record why."""

    config: dict[str, Any]
    run: RunValues
    model: ModelShape | None
    world_size: int
    device: str
    decisions: list[Decision] = field(default_factory=list)
    errors: list[Problem] = field(default_factory=list)

    @property
    def ctx(self) -> Context:
        return Context(self.config, self.world_size, self.model, self.run, self.device)

    def get(self, path: str, default: Any = None) -> Any:
        """The value at a dotted path."""
        return self.ctx.get(path, default)

    def open(self, path: str) -> bool:
        """Nobody has decided this path yet: it is missing, null or "auto"."""
        return self.get(path) in (None, AUTO)

    def set(self, path: str, value: Any, source: Source, reason: str) -> None:
        """Write a value and say why."""
        node = self.config
        *parents, name = path.split(".")
        for part in parents:
            node = node.setdefault(part, {})
        node[name] = value
        self.say(path, value, source, reason)

    def drop(self, path: str, source: Source, reason: str) -> None:
        """Remove a key and say why."""
        *parents, name = path.split(".")
        node = self.get(".".join(parents)) if parents else self.config
        if isinstance(node, dict) and name in node:
            del node[name]
            self.say(path, None, source, f"removed: {reason}")

    def say(self, path: str, value: Any, source: Source, reason: str) -> None:
        """Record a decision that changes nothing in the file."""
        self.decisions.append(Decision(path, value, source, reason))

    def know(self, **values: Any) -> None:
        """Complete the run values."""
        self.run = replace(self.run, **values)

    def pick(self, name: str, *paths: str) -> tuple[Any, Source, str]:
        """The value of a run setting: the file's when it has a number, else the flag's, else the default.

        File and flag cannot differ here: linting refused that before.
        """
        said = getattr(self.run, name)
        for path in paths:
            value = self.get(path)
            if isinstance(value, bool | int | float):
                same = "" if said is None else f"; {FLAGS[name]} says the same"
                return value, "file", f"as written at {path}{same}"
        if said is not None:
            return said, "flag", FLAGS.get(name, name)
        return getattr(DEFAULTS, name), "default", "nobody said"

    def refuse(self, path: str, value: Any, why: str, fix: str) -> None:
        """Collect an error; all of them are raised together at the end."""
        self.errors.append(Problem(path, value, "error", why, fix))
