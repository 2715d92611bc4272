# SPDX-License-Identifier: Apache-2.0
"""Rules of training data and tokenizer."""

from pathlib import Path

from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.tables.file_flags import DATA_PATHS, SPLIT_PATHS
from megatron.pretrain.data.splits import DEFAULT_SPLIT, check_weights, parse_blend
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.data.tokenizer_record import changed, read_record


def check_data(check: Check) -> None:
    """Check that there is one source of data, whose files exist, and choose a tokenizer for it."""
    args = check.args
    sources = [
        bool(args.mock_data),
        bool(args.data_path),
        any(getattr(args, dest) for dest in SPLIT_PATHS),
    ]
    if not any(sources):
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
    for dest in DATA_PATHS:
        check_prefixes(check, dest)
    args.dataloader_type = args.dataloader_type or "single"
    choose_tokenizer(check)


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


def take_recorded_tokenizer(check: Check) -> None:
    """Give the tokenizer the type and the settings that are recorded with the data.

    Settings of the command line stay. Whether it gives the same ids is checked when the tokenizer
    is built, see :func:`megatron.pretrain.data.tokenizer_record.check_records`.
    """
    args = check.args
    if args.mock_data:
        return
    words: list[str] = []
    for dest in DATA_PATHS:
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
            if getattr(args, name) == check.flags[name].default
        }
        for name, value in new.items():
            setattr(args, name, value)
        if "tokenizer_type" in new:
            check.notes.append(f"tokenizer: {args.tokenizer_type}, as {found[0].path} records")


def check_prefixes(check: Check, dest: str) -> None:
    """Check that every prefix of the data path of a destination has an index and a data file."""
    flag = check.flag(dest)
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
