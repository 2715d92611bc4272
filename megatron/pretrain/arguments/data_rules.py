# SPDX-License-Identifier: Apache-2.0
"""Rules of training data and tokenizer."""

import os
from pathlib import Path

from megatron.pretrain.arguments.check import Check


def check_data(check: Check) -> None:
    """Check that there is one source of data, whose files exist, and choose a tokenizer for it."""
    args = check.args
    separate = ("train_data_path", "valid_data_path", "test_data_path")
    sources = [
        bool(args.mock_data),
        bool(args.data_path),
        any(getattr(args, dest) for dest in separate),
    ]
    if not any(sources):
        check.notes.append(
            "no --data-path and no --mock-data: the text of Python's standard library"
        )
    check.require(
        sum(sources) < 2,
        "several data sources: give one of --mock-data, --data-path and --train-data-path",
    )
    if sources[2]:
        check.require(
            args.split is None, "--split is for --data-path; separate files per split have none"
        )
        check.require(
            args.train_data_path or args.skip_train,
            "--valid-data-path and --test-data-path need --train-data-path",
        )
    elif args.split is None:
        args.split = "969,30,1"
    for dest in ("data_path", *separate):
        check_prefixes(check, check.flag(dest), getattr(args, dest) or [])
    if args.tokenizer_type is None:
        args.tokenizer_type = "NullTokenizer" if args.mock_data else "ByteTokenizer"
    if args.tokenizer_type == "NullTokenizer":
        check.require(args.vocab_size, "NullTokenizer needs --vocab-size")
    if args.tokenizer_type == "HuggingFaceTokenizer":
        folder = args.tokenizer_model
        check.require(
            folder and os.path.isdir(folder),
            f"--tokenizer-model must be a local folder, got {folder}: download the tokenizer first",
        )
    args.dataloader_type = args.dataloader_type or "single"


def check_prefixes(check: Check, flag: str, words: list[str]) -> None:
    """Check that every prefix has an index and a data file.

    Args:
        check: the arguments.
        flag: the flag to name in problems.
        words: its value: prefixes, or pairs of weight and prefix.
    """
    weighted = (
        len(words) > 1 and len(words) % 2 == 0 and all(is_number(word) for word in words[::2])
    )
    for prefix in words[1::2] if weighted else words:
        missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
        check.require(
            not missing, f"{flag}: {' and '.join(prefix + suffix for suffix in missing)} not found"
        )


def is_number(word: str) -> bool:
    """Return True if the word is a number, which can be a weight."""
    try:
        float(word)
    except ValueError:
        return False
    return True
