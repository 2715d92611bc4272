# SPDX-License-Identifier: Apache-2.0
"""The record of the tokenizer that wrote an indexed dataset, in a file next to it.

`<prefix>.tokenizer.json` has the type, the settings, and digests of the files that decide which
ids a text gets. Paths are relative to its folder, so that data and tokenizer can move together.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint.store import durable
from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES, TokenizerChoice
from megatron.pretrain.data.tokenizers import Tokenizer

SUFFIX = ".tokenizer.json"
PATHS = ("tokenizer_model", "vocab_file", "merge_file")
LEFT_TO_THE_RUN = ("tokenizer_type", "trust_remote_code", "tokenizer_hf_include_special_tokens")
"""Fields that are not recorded: code is trusted by who runs it, and special tokens around new texts
do not change ids."""
FOLDER_FILES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "added_tokens.json")
"""Files that decide the ids of a Hugging Face tokenizer, as models of sentencepiece do."""


@dataclass(frozen=True)
class TokenizerRecord:
    """The record of the tokenizer of a dataset."""

    path: Path
    """Path of the record."""
    choice: TokenizerChoice
    identity: dict[str, Any]
    """Two tokenizers give the same ids if this is the same, see :func:`identity_of`."""


def changed(choice: TokenizerChoice) -> dict[str, Any]:
    """Return the settings that differ from their defaults, the type among them."""
    settings = {}
    for field in fields(choice):
        value = getattr(choice, field.name)
        if value != field.default:
            settings[field.name] = value
    return settings


def record_path(prefix: str | Path) -> Path:
    """Return the path of the record of a dataset, there or not."""
    return Path(f"{prefix}{SUFFIX}")


def record_text(
    prefix: str | Path,
    choice: TokenizerChoice,
    tokenizer: Tokenizer,
) -> str:
    """Return the content of the record of a dataset that is to be written.

    Args:
        prefix: path of the dataset without suffixes; paths in the record are relative to its
            folder.
        choice: type and settings of the tokenizer.
        tokenizer: the same, built.

    Raises:
        OSError: a file of the tokenizer cannot be read.
    """
    settings = changed(choice)
    for name in LEFT_TO_THE_RUN:
        settings.pop(name, None)
    folder = record_path(prefix).absolute().parent
    for name in PATHS:
        if name in settings:
            settings[name] = os.path.relpath(Path(settings[name]).absolute(), folder)
    content = {
        "tokenizer_type": choice.tokenizer_type,
        "settings": settings,
        "identity": identity_of(choice, tokenizer),
    }
    return json.dumps(content, indent=1) + "\n"


def read_record(prefix: str | Path) -> TokenizerRecord | None:
    """Return the record of a dataset; None if it is missing.

    Raises:
        ValueError: the file is damaged, or no record.
        OSError: it cannot be read.
    """
    path = record_path(prefix)
    if not path.is_file():
        return None
    names = {field.name for field in fields(TokenizerChoice)} - set(LEFT_TO_THE_RUN)
    try:
        with durable.naming(path):
            content = json.loads(path.read_text())
        kind = content["tokenizer_type"]
        settings = content["settings"]
        identity = content["identity"]
        if kind not in TOKENIZER_TYPES or not names.issuperset(settings):
            raise ValueError(f"{kind} with {', '.join(settings)} is no tokenizer of this release")
        if not isinstance(settings.get("vocab_size", 1), int):
            raise ValueError(f"vocab_size is {settings['vocab_size']!r}")
        for name in names.intersection(PATHS).intersection(settings):
            settings[name] = os.path.normpath(path.parent / settings[name])
        return TokenizerRecord(path, TokenizerChoice(kind, **settings), dict(identity))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{path}: no record of a tokenizer ({type(error).__name__}: {error}); remove it and"
            " name the tokenizer by flags, or write the data again"
        ) from error


def identity_of(choice: TokenizerChoice, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the properties that two tokenizers have in common if they give the same ids.

    Raises:
        OSError: a file of the tokenizer cannot be read.
    """
    identity: dict[str, Any] = {
        "class": tokenizer.kind,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
    }
    for name in ("tokenizer_special_tokens", "tiktoken_pattern"):
        value = getattr(choice, name)
        if value:
            identity[name] = value
    for name in PATHS:
        value = getattr(choice, name)
        if value is not None:
            identity[f"{name}_sha256"] = _digest(Path(value))
    return identity


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or of the files of a folder that decide ids."""
    files = {"": path}
    if path.is_dir():
        files = {}
        for file in sorted(path.iterdir()):
            if file.name in FOLDER_FILES or file.suffix == ".model":
                files[file.name] = file
    digest = hashlib.sha256()
    for name, file in files.items():
        with durable.naming(file):
            content = durable.file_at(file).read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def check_records(
    prefixes: Iterable[str],
    choice: TokenizerChoice,
    tokenizer: Tokenizer,
) -> None:
    """Check that datasets with a record were written with the tokenizer of the run.

    Args:
        prefixes: paths of the datasets without suffixes.
        choice: type and settings of the tokenizer.
        tokenizer: the same, built.

    Raises:
        ValueError: lists those that were not, with what differs.
        OSError: a file cannot be read.
    """
    problems: list[str] = []
    identity: dict[str, Any] = {}
    for prefix in sorted(set(prefixes)):
        record = read_record(prefix)
        if record is None:
            continue
        identity = identity or identity_of(choice, tokenizer)
        is_same = True
        differences = []
        for name in sorted(identity.keys() | record.identity.keys()):
            written = record.identity.get(name)
            if written == identity.get(name):
                continue
            is_same = False
            if not name.endswith("_sha256"):
                differences.append(f"{name} {written} instead of {identity.get(name)}")
        if is_same:
            continue
        problem = f"{prefix}: written with {record.choice.tokenizer_type}"
        if differences:
            problem += f" ({', '.join(differences)})"
        else:
            problem += ", from another file"
        problems.append(problem)
    if problems:
        raise ValueError(
            f"the tokenizer of this run, {choice.tokenizer_type}, is not that of the data:\n  "
            + "\n  ".join(problems)
            + "\nLeave out the flags of the tokenizer to use the recorded one, or write the data"
            " with this one"
        )
