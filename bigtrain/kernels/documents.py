"""Documents packed into the rows of a micro batch: where they begin, and the tensors that attention kernels want of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from bigtrain.kernels import upload


def cumulative_lengths(position_ids: torch.Tensor) -> torch.Tensor:
    """Bounds of documents in a flattened micro batch.

    Args:
        position_ids: int [batch, seq_len]; a document starts at each row's begin and wherever positions do not go up by one.

    Returns:
        int32 [documents + 1] on the same device, from 0 to batch * seq_len.
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = torch.diff(position_ids, dim=-1) != 1
    end = torch.tensor([position_ids.numel()], device=position_ids.device)
    return torch.cat([starts.flatten().nonzero().flatten(), end]).to(torch.int32)


def places_for(documents: int) -> int:
    """Places in the graph for so many documents: the next power of two, so that few graphs serve all micro batches."""
    return 1 << max(documents - 1, 0).bit_length()


class Documents:
    """Where the documents of a flattened micro batch begin, and the tensors kernels want of it: made once for all layers.

    Attributes:
        bounds: int32 [documents + 1], from 0 to the number of tokens.
        longest: no document has more tokens; a bound known without asking the device, such as the row length.
        one_a_row: every row of the micro batch is one document, so that dense kernels do.
    """

    def __init__(self, bounds: torch.Tensor, longest: int, one_a_row: bool = False):
        self.bounds, self.longest, self.one_a_row = bounds, longest, one_a_row
        self.count = bounds.numel() - 1
        self.places = places_for(self.count)
        self._padded: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None
        self._offsets: dict[int, torch.Tensor] = {}

    def _all_places(self) -> torch.Tensor:
        """int64 [places + 1]: bounds, with the places left over at the end of the last document."""
        if self._padded is None:
            rest = self.bounds[-1:].expand(self.places - self.count)
            self._padded = torch.cat([self.bounds, rest]).to(torch.int64)
        return self._padded

    def lengths(self) -> torch.Tensor:
        """int32 [places]: tokens of each document, 0 in places left over."""
        if self._lengths is None:
            self._lengths = torch.diff(self._all_places()).to(torch.int32)
        return self._lengths

    def offsets(self, elements: int) -> torch.Tensor:
        """int64 [places + 1]: where each document begins in a tensor with so many elements a token."""
        if elements not in self._offsets:
            self._offsets[elements] = self._all_places() * elements
        return self._offsets[elements]


class DocumentsCache:
    """Documents of the tensor last seen: every layer asks for the same, and finding them on a device waits for it.

    A tensor is known again if it is the same object and nothing was written into it. Of that its version tells, but not where
    memory is shared with numpy or `.data` was written: on a host its content is compared too, which costs nothing there.
    """

    def __init__(self) -> None:
        self._seen: Callable[[], torch.Tensor | None] = lambda: None
        self._key: tuple[int, ...] = ()
        self._content: torch.Tensor | None = None
        self._documents: Documents | None = None

    def of(self, source: torch.Tensor, batch: int, length: int, *, is_bounds: bool) -> Documents:
        """Documents by position_ids ([batch or 1, length]) or, with `is_bounds`, by cumulative lengths."""
        found = self._remembered(source, batch, length)
        if found is None:
            bounds = source if is_bounds else cumulative_lengths(source.expand(batch, -1))
            # Bounds made here are at the begin of each row; those of a caller need not be, in more rows than one.
            one_a_row = bounds.numel() - 1 == batch and (batch == 1 or not is_bounds)
            found = Documents(bounds, length, one_a_row)
            self._note(source, batch, length, found)
        return found

    def remember(self, on_host: torch.Tensor, on_device: torch.Tensor, held: list[torch.Tensor] | None = None) -> None:
        """Find the documents where it costs no wait."""
        bounds = cumulative_lengths(on_host)
        batch, length = on_host.shape
        there = upload.to_device(bounds, on_device.device, held)
        self._note(on_device, batch, length, Documents(there, length, bounds.numel() - 1 == batch))

    def known(self, source: torch.Tensor) -> Documents | None:
        """What is remembered of this very tensor."""
        return self._remembered(source, *source.shape)

    def _note(self, source: torch.Tensor, batch: int, length: int, found: Documents) -> None:
        version = _version(source)
        if version is None:  # what is not noted is not known
            self._documents = None
            return
        self._documents, self._content = found, source.clone() if source.device.type == "cpu" else None
        self._seen, self._key = weakref.ref(source), (version, batch, length)

    def _remembered(self, source: torch.Tensor, *shape: int) -> Documents | None:
        if self._documents is None or self._seen() is not source or self._key != (_version(source), *shape):
            return None
        return self._documents if self._content is None or torch.equal(self._content, source) else None


def _version(source: torch.Tensor) -> int | None:
    """How often it was written to; None where nobody counts: tensors made under `torch.inference_mode`, on a device."""
    if not source.is_inference():
        return source._version
    return 0 if source.device.type == "cpu" else None


cache = DocumentsCache()
asked_by = {"masks": 0, "attention": 0}  # how often documents were kept apart, or looked for, by each
wanted = False  # set by an attention that looks documents up here


def remember(on_host: Any, on_device: Any, held: list[torch.Tensor] | None = None) -> None:
    """Tell what a micro batch's position_ids, [batch, seq_len], are before they leave the host: forward then need not ask the device.

    Asking waits for everything on the device, and behind the copies of an optimizer that streams its state. Does nothing unless
    an attention that wants them is registered and the second tensor is on a device.
    """
    if not wanted or not isinstance(on_host, torch.Tensor) or on_host.ndim != 2 or on_host.is_floating_point():
        return
    if on_host.device.type == "cpu" and on_device.device.type != "cpu":
        cache.remember(on_host, on_device, held)
