# SPDX-License-Identifier: Apache-2.0
"""Corpora: text files and JSON lines, written as the indexed datasets that training reads.

An indexed dataset is Megatron-Core's: tokens in `<prefix>.bin`, their documents in `<prefix>.idx`.
"""

import hashlib
import json
import os
import platform
import random
import shutil
import socket
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import (
    DType,
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
)

from megatron.checkpoint.core.parts import Progress, progress_of
from megatron.checkpoint.store import durable
from megatron.pretrain.data.tokenizer_record import record_path
from megatron.pretrain.data.tokenizers import Tokenizer

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
# Installed packages are not the library, and its tests are mostly tables of odd data.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test"}
LIBRARY_SHUFFLE_SEED = 1234


@dataclass(frozen=True)
class CorpusSummary:
    """The size of a corpus that was written."""

    documents: int
    tokens: int
    """Tokens written, end-of-document tokens included."""
    bytes: int
    """Bytes of input read."""


def write_corpus(
    inputs: Sequence[str | Path],
    output_prefix: str | Path,
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    append_eod: bool = True,
    progress: bool = True,
    record: str | None = None,
) -> CorpusSummary:
    """Tokenize files and write them as one indexed dataset.

    Its two files, `<output_prefix>.bin` and `<output_prefix>.idx`, appear complete or not at all:
    they are written under other names and then renamed, the index last. Documents without any token
    are left out.

    Args:
        inputs: files and folders, in the order in which their documents are written. A folder
            stands for all files below it, sorted, hidden ones left out. A file whose name ends in
            .jsonl, .ndjson or .json holds one JSON object per line, each a document; any other file
            is one document of text.
        output_prefix: path without suffix; missing folders are made.
        tokenizer: its vocabulary decides the width of a stored token (2 bytes below 65500 ids, else
            4).
        json_key: member of a JSON line that holds the text.
        append_eod: end every document with `tokenizer.eod`.
        progress: show on stderr how far the work is: a bar on a terminal, else a plain line now and
            then.
        record: content of the record of the tokenizer, which is there before the index is.

    Raises:
        ValueError: an input is missing or malformed (with file and line), or there is no text in
            any of them.
        OSError: a file cannot be read or written.
    """
    files = _expand(inputs)
    prefix = str(output_prefix)
    num_bytes = sum(file.stat().st_size for file in files)
    with (
        _published_together(prefix, record) as (bin_path, idx_path),
        progress_of("tokenizing", num_bytes, show=progress) as advance,
    ):
        builder = IndexedDatasetBuilder(bin_path, dtype=DType.optimal_dtype(tokenizer.vocab_size))
        try:
            summary = _add_documents(
                builder,
                files,
                tokenizer=tokenizer,
                json_key=json_key,
                append_eod=append_eod,
                advance=advance,
            )
            if not summary.documents:
                names = ", ".join(str(path) for path in inputs)
                raise ValueError(f"there is no text in {names}: nothing to write")
            builder.finalize(idx_path)
        finally:
            builder.data_file.close()
    return summary


def standard_library_corpus(
    directory: str | Path,
    tokenizer: Tokenizer,
    *,
    library: str | Path | None = None,
) -> str:
    """Write the Python standard library as a corpus, and return its prefix.

    It is about 10 MB of text that every machine has. A complete corpus that is already there is
    used again. Its sources (version of Python, tokenizer, files and sizes) are listed in
    `<prefix>.json` and, as a digest, in the name, so that a changed library never meets the index
    caches of another one.

    Args:
        directory: folder of the corpus; made if missing.
        tokenizer: any that reads text.
        library: folder to read instead of the running Python's standard library.

    Raises:
        ValueError: the folder holds no Python files, or the tokenizer cannot read text.
        OSError: a file cannot be read or written.
    """
    root = Path(library or sysconfig.get_path("stdlib"))
    files = standard_library_files(root)
    fingerprint = {
        "python": platform.python_version(),
        "tokenizer": dict(tokenizer.unique_identifiers),
        "files": [[str(file.relative_to(root)), file.stat().st_size] for file in files],
    }
    text = json.dumps(fingerprint, indent=1)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    prefix = str(Path(directory) / f"python_stdlib_{tokenizer.name}_{digest}_text_document")
    record = Path(prefix + ".json")
    if not (IndexedDataset.exists(prefix) and record.is_file() and record.read_text() == text):
        write_corpus(files, prefix, tokenizer)
        durable.write_text(record, text)
    return prefix


def standard_library_files(library: str | Path | None = None) -> list[Path]:
    """Return the standard library's Python files, in an order that is shuffled but always the same.

    Training and validation data are cut from a corpus by document; in the order of names,
    validation would be a few packages late in the alphabet.

    Raises:
        ValueError: if it finds none, as in a Python that keeps its library in an archive.
    """
    root = Path(library or sysconfig.get_path("stdlib"))
    files = []
    for file in sorted(root.rglob("*.py")):
        is_skipped = SKIPPED_FOLDERS.intersection(file.relative_to(root).parent.parts)
        if not is_skipped and file.is_file():
            files.append(file)
    if not files:
        raise ValueError(
            f"{root} holds no Python files to train on: give --data-path or --mock-data"
        )
    random.Random(LIBRARY_SHUFFLE_SEED).shuffle(files)
    return files


def _expand(inputs: Sequence[str | Path]) -> list[Path]:
    """Return the input files, and the files of input folders in the order of their names."""
    paths = []
    missing = []
    for name in inputs:
        path = Path(name)
        if path.is_file() or path.is_dir():
            paths.append(path)
        else:
            missing.append(str(name))
    if missing:
        raise ValueError(f"no such file or folder: {', '.join(missing)}")
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        for file in sorted(path.rglob("*")):
            is_hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
            if file.is_file() and not is_hidden:
                files.append(file)
    return files


def _add_documents(
    builder: IndexedDatasetBuilder,
    files: Sequence[Path],
    *,
    tokenizer: Tokenizer,
    json_key: str,
    append_eod: bool,
    advance: Progress,
) -> CorpusSummary:
    documents = tokens = num_bytes = 0
    for file in files:
        for where, text, size in _documents(file, json_key):
            try:
                ids = tokenizer.tokenize(text)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from error
            if ids.size:
                if append_eod:
                    ids = np.append(ids, tokenizer.eod)
                builder.add_document(ids, [ids.size])
                documents += 1
                tokens += ids.size
            num_bytes += size
            advance(size)
    return CorpusSummary(documents, tokens, num_bytes)


def _documents(file: Path, json_key: str) -> Iterator[tuple[str, str | bytes, int]]:
    """Yield every document: its file and line, its text, and its bytes in the file."""
    if file.suffix.lower() not in JSON_LINES_SUFFIXES:
        with durable.naming(file):
            data = file.read_bytes()
        yield str(file), data, len(data)
        return
    with durable.opened(file) as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file}, line {number}"
            if line.strip():
                yield where, _text_of_json_line(line, json_key, where), len(line)


def _text_of_json_line(
    line: bytes,
    json_key: str,
    where: str,
) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where}: not a JSON value ({error}); the file must hold one JSON object per line"
        ) from error
    if not isinstance(record, dict) or json_key not in record:
        found = f"a {type(record).__name__}"
        if isinstance(record, dict):
            found = f"the keys {', '.join(repr(key) for key in record)}"
        raise ValueError(f"{where}: expects an object with the key {json_key!r}, but got {found}")
    text = record[json_key]
    if not isinstance(text, str):
        raise ValueError(
            f"{where}: expects a string under {json_key!r}, but got a {type(text).__name__}"
        )
    return text


@contextmanager
def _published_together(prefix: str, record: str | None) -> Iterator[tuple[str, str]]:
    """Yield temporary names for the two files of a dataset, which are renamed at the end.

    The record of the tokenizer is written between them: a dataset without one would be read with
    any tokenizer. After an error the temporary files are removed.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(prefix)
    bin_path = _temporary(prefix, ".bin")
    idx_path = _temporary(prefix, ".idx")
    try:
        with durable.naming(bin_path):
            yield str(bin_path), str(idx_path)
        for path in (bin_path, idx_path):
            durable.sync_file(path)
        # Megatron-Core caches sample indices here by name alone. They would describe the corpus
        # that is replaced.
        for folder in Path(prefix, "cache").glob("*Dataset_indices"):
            shutil.rmtree(folder)
        # Without its index a dataset does not exist. The old index is removed first, so that no
        # reader ever sees the index of one corpus with the tokens of another.
        Path(get_idx_path(prefix)).unlink(missing_ok=True)
        record_path(prefix).unlink(missing_ok=True)  # of the tokenizer of that corpus
        durable.rename(bin_path, Path(get_bin_path(prefix)))
        if record is not None:
            durable.write_text(record_path(prefix), record)
        durable.rename(idx_path, Path(get_idx_path(prefix)))
    finally:
        for path in (bin_path, idx_path):
            with suppress(OSError):  # the error before it is the cause
                path.unlink(missing_ok=True)


def _temporary(prefix: str, suffix: str) -> Path:
    """Return the name of a temporary file, with the process that writes it."""
    path = Path(prefix)
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.tmp{suffix}")


def _remove_leftovers(prefix: str) -> None:
    """Remove the temporary files of processes of this host that were killed."""
    start = f".{Path(prefix).name}.{socket.gethostname()}."
    for path in Path(prefix).parent.iterdir():
        process, _, end = path.name.removeprefix(start).partition(".")
        is_temporary = path.name.startswith(start) and end in ("tmp.bin", "tmp.idx")
        if is_temporary and process.isdecimal() and not Path("/proc", process).exists():
            path.unlink()
