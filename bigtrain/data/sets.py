"""Training and evaluation rows of a run: read, tokenised once per host, packed, and the same on every rank. Collective."""

from __future__ import annotations

import logging
from typing import Any

from bigtrain import ranks
from bigtrain.data.files import shared
from bigtrain.data.pack import Packing, Rows, build_rows
from bigtrain.data.source import load_source, split_validation
from bigtrain.errors import DataError

logger = logging.getLogger(__name__)


def load_rows(
    train_data: str,
    eval_data: str | None,
    eval_fraction: float | None,
    order_seed: int,
    tokenizer: Any,
    seq_len: int,
    packing: Packing,
    model_config: Any,
) -> tuple[Rows, Rows | None]:
    """(training rows, evaluation rows or None). See `TrainArguments` for the arguments.

    Raises:
        DataError: on every rank alike. RanksDisagreeError: the ranks read different data, or one of them cannot read it.
    """
    with ranks.together("reading the data"):
        source = load_source(train_data)
        held_out = load_source(eval_data, split="validation") if eval_data else None
        if eval_fraction:
            source, held_out = split_validation(source, eval_fraction, order_seed)
        if eval_data and ranks.is_main() and (both := shared(train_data, eval_data)):
            logger.warning("--eval_data: %s are trained on too, so that their loss says nothing about other text", both)

    def pack(part: Any, what: str) -> Rows:
        first = ranks.main_first(f"tokenising the {what} data")
        failure: Exception | None = None
        try:
            rows = build_rows(part, tokenizer, seq_len, packing, model_config=model_config, main_first=first)
        except DataError as error:
            failure = DataError(f"{what} data: {error}")
            failure.__cause__ = error
        except Exception as error:
            failure = error
        with ranks.together(f"tokenising the {what} data"):  # apart from the block above, in which ranks meet
            if failure is not None:
                raise failure
        told = {"rows": len(rows), "tokens": rows.stats.tokens, "hash of all tokens": rows.content}
        ranks.agree(told, f"the {what} data")
        return rows

    return pack(source, "training"), None if held_out is None else pack(held_out, "evaluation")
