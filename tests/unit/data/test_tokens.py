"""Counting labels of pieces takes time in proportion to their number, however many chunks the table has."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from bigtrain.data.tokens import TokenStore


class Counted(np.ndarray):
    """Counts the elements that arithmetic goes over."""

    elems = 0

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        Counted.elems += max(np.size(one) for one in inputs)
        return getattr(ufunc, method)(*(np.asarray(one) for one in inputs), **kwargs)


def test_every_chunk_looks_at_its_own_pieces_alone():
    """A table of a million samples has a thousand chunks: minutes where each went over all pieces."""
    labels = [[[-100, 5, 6], [7, -100]], [[]], [[-100, -100, 8, 9]]] * 100
    table = pa.table({name: pa.chunked_array(labels) for name in ("input_ids", "labels")})
    documents, start, stop = (
        np.array([[4 * n, 4 * n + 1, 4 * n + 3, 4 * n + 3] for n in range(100)]).ravel(),
        [1, 0, 1, 3],
        [3, 2, 3, 4],
    )
    counted = [np.asarray(a).view(Counted) for a in (documents, np.tile(start, 100), np.tile(stop, 100))]
    store = TokenStore(SimpleNamespace(_indices=None, data=table))
    assert store.labelled(*counted).tolist() == [2, 1, 1, 1] * 100
    assert Counted.elems <= 8 * len(documents)
