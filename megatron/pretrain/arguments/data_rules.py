# SPDX-License-Identifier: Apache-2.0
"""Rules of training data and tokenizer."""

import json
from pathlib import Path
from typing import Any

from megatron.checkpoint.store import durable
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.data.splits import DEFAULT_SPLIT, check_weights, parse_blend
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizer_record import changed, read_record

SPLIT_PATHS = {split: f"{split}_data_path" for split in ("train", "valid", "test")}
"""Key of a --per-split-data-args-path file -> the argument that it stands for."""
OTHER_WHEN_LEGACY = {
    "SentencePieceTokenizer": (
        "it then has tokens beyond its file; not built, use GPTSentencePieceTokenizer, whose end of"
        " a document is </s>"
    ),
    "Llama2Tokenizer": "it then begins every text with <s>; not built, leave it out",
    "TikTokenizer": (
        "it then reads special tokens in a text as plain text; not built, leave it out"
    ),
}
"""Type of tokenizer -> how its ids differ in Megatron-LM's older classes."""


def check_data(check: Check) -> None:
    """Check that there is one source of data, whose files exist, and choose a tokenizer for it."""
    args = check.args
    flags = read_data_paths(check)
    sources = [
        bool(args.mock_data),
        bool(args.data_path),
        any(getattr(args, dest) for dest in SPLIT_PATHS.values()),
    ]
    if not any(sources) and not flags:
        check.notes.append(
            "no --data-path and no --mock-data: the text of Python's standard library; give one of"
            " them for other data"
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
        args.split = DEFAULT_SPLIT
    else:
        try:
            check_weights(args.split)
        except ValueError as error:
            check.problems.append(str(error))
    for dest in ("data_path", *SPLIT_PATHS.values()):
        check_prefixes(check, flags.get(dest, check.flag(dest)), dest)
    check.require(args.num_dataset_builder_threads > 0, "--num-dataset-builder-threads: at least 1")
    check.require(args.mid_level_dataset_surplus >= 0, "--mid-level-dataset-surplus: at least 0")
    args.dataloader_type = args.dataloader_type or "single"
    choose_tokenizer(check)


def read_data_paths(check: Check) -> dict[str, str]:
    """Put the data paths that stand in files in the place of the flags that they replace.

    Returns:
        Destination -> the flag and the file that gave its value.
    """
    args = check.args
    flags = {}
    if args.data_args_path:
        check.at_most_one("data_path", "data_args_path")
        flags["data_path"] = f"--data-args-path {args.data_args_path}"
        words = read_text(check, "--data-args-path", args.data_args_path).split()
        args.data_path = words or args.data_path
        check.require(words, f"{flags['data_path']}: names no data set")
    if args.per_split_data_args_path:
        for dest in SPLIT_PATHS.values():
            check.at_most_one(dest, "per_split_data_args_path")
            flags[dest] = f"--per-split-data-args-path {args.per_split_data_args_path}"
        for key, words in read_paths_of_splits(check).items():
            setattr(args, SPLIT_PATHS[key], words or None)
    return flags


def read_paths_of_splits(check: Check) -> dict[str, list[str]]:
    """Return the data paths of a --per-split-data-args-path file by its keys."""
    path = check.args.per_split_data_args_path
    flag = f"--per-split-data-args-path {path}"
    text = read_text(check, "--per-split-data-args-path", path)
    if not text:
        return {}
    try:
        paths: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        check.problems.append(f"{flag}: no JSON: {error}")
        return {}
    if not isinstance(paths, dict) or set(paths) != set(SPLIT_PATHS):
        found = ", ".join(paths) if isinstance(paths, dict) else f"a {type(paths).__name__}"
        check.problems.append(
            f"{flag}: expects an object with the keys {', '.join(SPLIT_PATHS)}, but got {found}"
        )
        return {}
    words: dict[str, list[str]] = {}
    for key, value in paths.items():
        items = value.split() if isinstance(value, str) else value or []
        if isinstance(items, list) and all(isinstance(item, (str, int, float)) for item in items):
            words[key] = [str(item) for item in items]
        else:
            check.problems.append(f"{flag}: {key} must be a text or a list, but is {value!r}")
    return words


def read_text(check: Check, flag: str, path: str) -> str:
    """Return the text of a file; empty, with a problem, if there is none."""
    try:
        text = durable.file_at(Path(path)).read_text()
    except (OSError, UnicodeDecodeError) as error:
        check.problems.append(f"{flag} {path}: cannot be read: {error}")
        return ""
    check.require(text.strip(), f"{flag} {path}: is empty")
    return text


def choose_tokenizer(check: Check) -> None:
    """Complete the type of the tokenizer and check its settings and files."""
    args = check.args
    take_recorded_tokenizer(check)
    if args.tokenizer_type is None:
        if args.vocab_file and args.merge_file:
            args.tokenizer_type = "GPT2BPETokenizer"  # as in Megatron-LM
        else:
            args.tokenizer_type = "NullTokenizer" if args.mock_data else "ByteTokenizer"
    check.problems += TokenizerChoice.of(args).problems()
    if args.legacy_tokenizer:
        if args.tokenizer_type in OTHER_WHEN_LEGACY:
            check.problems.append(
                f"--legacy-tokenizer with {args.tokenizer_type}:"
                f" {OTHER_WHEN_LEGACY[args.tokenizer_type]}"
            )
        else:
            check.notes.append("--legacy-tokenizer: changes no id of this tokenizer, leave it out")


def take_recorded_tokenizer(check: Check) -> None:
    """Give the tokenizer the type and the settings that are recorded beside the data.

    What the command line says stays. Whether it gives the same ids is checked when the tokenizer is
    built, see :func:`megatron.pretrain.data.tokenizer_record.check_records`.
    """
    args = check.args
    if args.mock_data:
        return
    words: list[str] = []
    for dest in ("data_path", *SPLIT_PATHS.values()):
        words += parse_blend(getattr(args, dest) or [])[0]
    records = []
    for prefix in words:
        try:
            records.append(read_record(prefix))
        except (ValueError, OSError) as error:
            check.problems.append(str(error))
    found = [record for record in records if record is not None]
    others = [record for record in found if record.identity != found[0].identity]
    if others:
        check.problems.append(
            "the data sets were written with different tokenizers:"
            f" {found[0].path} says {found[0].choice.tokenizer_type}, {others[0].path}"
            f" {others[0].choice.tokenizer_type} ({len(others)} of {len(found)} differ from the"
            " first): write all with the same one"
        )
    elif found and args.tokenizer_type in (None, found[0].choice.tokenizer_type):
        new = {
            name: value
            for name, value in changed(found[0].choice).items()
            if getattr(args, name) == check.defaults[name]
        }
        for name, value in new.items():
            setattr(args, name, value)
        if "tokenizer_type" in new:
            check.notes.append(f"tokenizer: {args.tokenizer_type}, as {found[0].path} records")


def check_prefixes(check: Check, flag: str, dest: str) -> None:
    """Check that every prefix of a data path has an index and a data file.

    Args:
        check: the arguments.
        flag: the flag to name in problems.
        dest: destination of the path.
    """
    try:
        prefixes, _ = parse_blend(getattr(check.args, dest) or [])
    except ValueError as error:
        check.problems.append(f"{flag}: {error}")
        check.set_default(dest)
        return
    for prefix in prefixes:
        missing = [suffix for suffix in (".idx", ".bin") if not Path(prefix + suffix).is_file()]
        check.require(
            not missing, f"{flag}: {' and '.join(prefix + suffix for suffix in missing)} not found"
        )
