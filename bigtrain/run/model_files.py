"""The model that was named: its tokenizer and config, and whether the command line's tokens, rows and blocks fit them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from bigtrain import defaults, plan, ranks, shapes, standins
from bigtrain.data.tokens import model_limits
from bigtrain.errors import ModelError, UsageError
from bigtrain.models.source import is_about_files
from bigtrain.run.argument_problems import too_long, too_many_tokens
from bigtrain.run.arguments import TrainArguments

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def about_files(what: str, folder: str | None = None) -> Iterator[None]:
    """Turn what a library raises about files (of a tokenizer's `folder`, if it is one) into a UsageError that names the flag."""
    try:
        yield
    except Exception as error:
        if not is_about_files(error):
            raise
        raise UsageError(f"the {what} cannot be loaded: {standins.why_no_tokenizer(folder or '', error)}") from error


def load_tokenizer(args: TrainArguments) -> Any:
    """The tokenizer that was named, else the model's."""
    from transformers import AutoTokenizer

    name = args.tokenizer_name_or_path or args.model_name_or_path
    return AutoTokenizer.from_pretrained(name, trust_remote_code=args.trust_remote_code)


def vocabulary(args: TrainArguments, model_config: Any, tokenizer: Any) -> tuple[dict[str, Any], int | None]:
    """(config overrides, new number of embeddings): the model must know every token, and a preset the special ones.

    `model_config` is changed to match, so that the data can be checked against it.

    Raises:
        ModelError: the tokenizer has more tokens than the model and nobody allowed it to grow.
    """
    text = model_config.get_text_config()
    size, needed = int(text.vocab_size), len(tokenizer)
    overrides: dict[str, Any] = {}
    if shapes.is_preset(args.model_name_or_path):
        overrides = {n: getattr(tokenizer, n) for n in ("bos_token_id", "eos_token_id", "pad_token_id")}
    grown = None
    if needed > size:
        if not args.resize_vocab:
            raise ModelError(too_many_tokens(needed, size))
        grown = -(-needed // 64) * 64  # a multiple of 64 keeps the output matrix on the fast tensor-core path
        text.vocab_size = grown
        if overrides:
            overrides["vocab_size"], grown = grown, None
    return overrides, grown


def tell_foreign_tokenizer(args: TrainArguments, tokenizer: Any) -> None:
    """Warn where a tokenizer that was named means other tokens by the ids that a pretrained model has learned."""
    if not args.tokenizer_name_or_path or shapes.is_preset(args.model_name_or_path) or not ranks.is_main():
        return
    try:
        own = load_tokenizer(replace(args, tokenizer_name_or_path=None)).get_vocab()
    except (OSError, ValueError, ImportError):
        return  # the model comes without one
    given = tokenizer.get_vocab()
    same = sum(own.get(token) == number for token, number in given.items())
    if 2 * same < len(given):
        logger.warning(
            "%s is another tokenizer than that of %s: %d of its %d tokens have the same id there",
            args.tokenizer_name_or_path, args.model_name_or_path, same, len(given),
        )  # fmt: skip


def choose_seq_len(args: TrainArguments, model_config: Any) -> int:
    """Tokens per row: see `defaults.seq_len`.

    Raises:
        UsageError: the model has no positions for so many.
    """
    limit = model_limits(model_config)[1]
    if why := too_long(args.seq_len, limit, args.model_name_or_path):
        raise UsageError(why)
    return defaults.seq_len(args.seq_len, limit)


def refuse_too_many_blocks(args: TrainArguments, model_config: Any) -> None:
    """Compare --checkpoint_blocks with the model's layers, where its config tells how many there are.

    Raises:
        UsageError: with both numbers.
    """
    asked, there = args.recomputed_blocks, plan.block_count(model_config.to_dict())
    if asked is not None and there is not None and asked > there:
        raise UsageError(
            f"--checkpoint_blocks {asked}, but {args.model_name_or_path} has {there} blocks: give a number from 1 to {there}, "
            "auto, or leave it out to recompute all"
        )
