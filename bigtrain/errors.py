"""Every error that bigtrain raises on purpose.

    BigtrainError                    exit 1   something failed
    |-- UsageError                   exit 2   the caller asked for something that cannot be done
    |   |-- ConfigError                       a ds_config is wrong: carries every problem found, not the first one
    |   |-- DataError                         the training data cannot be used
    |   `-- ModelError                        the model cannot be built, frozen, wrapped or sharded as asked
    |-- DoesNotFitError              exit 3   the plan says that GPU or host memory does not suffice
    |-- WeightsError                 exit 1   a weight file is damaged or incomplete
    |   `-- WrongWeightsError        exit 2   of another model, quantised, or without some of its tensors
    |-- CheckpointError              exit 1   a training checkpoint is damaged, incomplete or does not match the run
    |   `-- UnreadableError                   it cannot be read now, or here, and may be whole: no older one is taken for it
    |-- RanksDisagreeError           exit 1   ranks hold different values where they must be equal, or one rank failed
    |-- BypassError                  exit 1   a loss was computed around the engine, so its gradients would be wrong
    |-- NonFiniteError               exit 1   too many non-finite losses or gradients in a row
    |-- BuildError                   exit 1   a native extension (CPU Adam, fused Adam) cannot be compiled here
    `-- StoppedError                 exit 75  stopped on request, resumable

A message says what is wrong, with which value, and what to do. The values are attributes too, so that a caller need not
parse text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class BigtrainError(Exception):
    """Base of all; `exit_code` is what a command exits with when the error reaches the top."""

    exit_code = 1

    @classmethod
    def not_writable(cls, path: object, error: OSError) -> BigtrainError:
        """What to say of a file of the run that the system does not take."""
        return cls(
            f"{path} cannot be written: {error.strerror}. Make room on that disk, or see who may write there and whether it is still mounted, "
            "and start again"
        )


class UsageError(BigtrainError):
    """The call, flag or file is wrong; nothing was built."""

    exit_code = 2


class ConfigError(UsageError):
    """A ds_config cannot be used as it is.

    Args:
        message: the whole report, ready to print.
        problems: the findings behind it (`bigtrain.config.Problem`), worst first.
    """

    def __init__(self, message: str, problems: Sequence[Any] = ()):
        super().__init__(message)
        self.problems = tuple(problems)


class DataError(UsageError):
    """Training data is missing, too little, or does not match the model."""


class ModelError(UsageError):
    """A model cannot be built or prepared as asked; `names` lists the parameters or modules concerned."""

    def __init__(self, message: str, names: Sequence[str] = ()):
        super().__init__(message)
        self.names = tuple(names)


class DoesNotFitError(BigtrainError):
    """The plan does not fit the memory that there is."""

    exit_code = 3


class WeightsError(BigtrainError):
    """A weight file cannot be used; `file` and `tensor` say which, where known."""

    def __init__(self, message: str, file: str | None = None, tensor: str | None = None):
        super().__init__(message)
        self.file = file
        self.tensor = tensor


class WrongWeightsError(WeightsError):
    """The weights that were named are not those of the model: another folder, or flag, is needed."""

    exit_code = 2


class CheckpointError(BigtrainError):
    """A checkpoint cannot be written or read; `path` says which, where known."""

    def __init__(self, message: str, path: str | None = None):
        super().__init__(message)
        self.path = path


class UnreadableError(CheckpointError):
    """The disk fails, its permissions forbid it, or a newer version wrote it: nothing is known of what the checkpoint holds."""


class RanksDisagreeError(BigtrainError):
    """Ranks differ, or some rank failed; `by_rank` maps rank to its value or its error text.

    `unforeseen`: a rank raised none of these errors, so that whoever catches them here goes on without that rank.
    """

    unforeseen = False

    def __init__(self, message: str, by_rank: dict[int, Any] | None = None):
        super().__init__(message)
        self.by_rank = by_rank or {}


class BypassError(BigtrainError):
    """A forward or backward went around the engine."""


class NonFiniteError(BigtrainError):
    """`count` losses or gradients in a row were not finite."""

    def __init__(self, message: str, step: int | None = None, count: int | None = None):
        super().__init__(message)
        self.step = step
        self.count = count


class BuildError(BigtrainError):
    """A native extension cannot be built or loaded."""


class StoppedError(BigtrainError):
    """Stopped on request; the run can be resumed."""

    exit_code = 75
