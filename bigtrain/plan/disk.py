"""Does what a run writes fit the disk that it writes to: arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

SPARE_BYTES = 64 << 20  # beyond the exact sizes: manifests, tokenizer, file system bookkeeping


@dataclass(frozen=True, kw_only=True)
class Writes:
    """What a run will write from now on.

    Attributes:
        checkpoint_bytes: of one checkpoint.
        model_bytes: of the exported model; 0 for none.
        saves: checkpoints still to come.
        keep: how many are kept; None: all.
        there: how many there are now.
    """

    checkpoint_bytes: int
    model_bytes: int
    saves: int
    keep: int | None
    there: int

    @property
    def more(self) -> int:
        """Most checkpoints at one time beyond those that are there: a new one is whole before an old one goes."""
        if self.keep is None:
            return self.saves
        return max(min(self.saves, 1), min(self.saves, self.keep + 1 - self.there))

    @property
    def peak_bytes(self) -> int:
        """Most space that is taken beyond what is taken now. The model comes last, when old checkpoints have gone."""
        left = self.saves if self.keep is None else max(0, min(self.saves, self.keep - self.there))
        return max(self.more * self.checkpoint_bytes, left * self.checkpoint_bytes + self.model_bytes) + SPARE_BYTES

    @property
    def least_bytes(self) -> int:
        """Space without which nothing would be left of the run: that of one checkpoint, or, if it saves none, of the model."""
        return (self.checkpoint_bytes if self.saves else self.model_bytes) + SPARE_BYTES

    def too_much(self, free_bytes: int, folder: str) -> str | None:
        """Why the run would fail for want of space; None where `least_bytes` are free."""
        if not (self.saves or self.model_bytes) or self.least_bytes <= free_bytes:
            return None
        what, leave = ("a checkpoint", "--save_steps") if self.saves else ("the exported model", "the export (--no_export)")
        return (
            f"{what} of this run takes {_gib(self.least_bytes)} and {folder} has {_gib(free_bytes)} free: free some space, choose "
            f"another --output_dir, or leave out {leave}."
        )

    def too_many(self, free_bytes: int, folder: str) -> str | None:
        """Why the disk will be full before the end; None where `peak_bytes` are free."""
        if self.peak_bytes <= free_bytes:
            return None
        parts = [f"{self.more} more checkpoint(s) of {_gib(self.checkpoint_bytes)} at a time"] if self.saves else []
        parts += [f"a model of {_gib(self.model_bytes)}"] if self.model_bytes else []
        return (
            f"{folder} has {_gib(free_bytes)} free, and this run writes up to {' and '.join(parts)}: {_gib(self.peak_bytes)}. It "
            "will fail when the disk is full: free some space, choose another --output_dir, or keep fewer checkpoints "
            "(--save_total_limit)."
        )


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"


def saves_to_come(start: int, steps: int, every: int | None) -> int:
    """Checkpoints of a run from step `start` to `steps`: at multiples of `every`, and at the end."""
    if not every or start >= steps:
        return 0
    return steps // every - start // every + (steps % every > 0)
