# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back, with the attributes that Megatron-Core's datasets read.

Three kinds, none of which touches the network: `ByteTokenizer` (no files needed),
`HuggingFaceTokenizer` (a local folder) and `NullTokenizer` (numbers in, numbers out, for synthetic
runs).
"""

import argparse
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

NUM_BYTES = 256


class Tokenizer(ABC):
    """What the training program and Megatron-Core's datasets need of a tokenizer.

    Attributes:
        name: short, fit for a file name.
        vocab_size: number of token ids, special ones included; ids are `0 .. vocab_size - 1`.
        eod: id that ends a document.
        pad: id of padding, -1 where the vocabulary has none (an id that no data can hold).
    """

    name: str
    vocab_size: int
    eod: int
    pad: int = -1

    @abstractmethod
    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`, without an end-of-document token.

        Raises:
            ValueError: the text is not valid for this tokenizer (bytes that are not UTF-8 raise
                UnicodeDecodeError).
        """

    @abstractmethod
    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; end-of-document tokens stand for nothing."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What tells this tokenizer from others: Megatron-Core hashes it into the names of its index caches."""
        return OrderedDict({"class": type(self).__name__, "vocab_size": str(self.vocab_size)})


class NullTokenizer(Tokenizer):
    """Numbers separated by blanks; `vocab_size` numbers and, after them, the end-of-document token."""

    name = "null"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def tokenize(self, text: str | bytes) -> np.ndarray:
        words = _as_text(text).split()
        try:
            ids = np.array([int(word) for word in words], dtype=np.int64)
        except ValueError as error:
            raise ValueError(
                f"NullTokenizer reads numbers separated by blanks, not text ({error}); for text use"
                " --tokenizer-type ByteTokenizer or HuggingFaceTokenizer, for synthetic data"
                " --mock-data"
            ) from error
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(
                f"NullTokenizer has the ids 0 to {self.vocab_size - 1}, but the text holds"
                f" {ids.min()} to {ids.max()}"
            )
        return ids.astype(np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids if i != self.eod)


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8, and the end-of-document token: 257 ids.

    Takes any bytes at all.
    """

    name = "bytes"
    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES

    def tokenize(self, text: str | bytes) -> np.ndarray:
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        # A padded vocabulary lets a model produce ids that are no byte; they stand for nothing
        # either.
        return bytes(int(i) for i in ids if 0 <= i < NUM_BYTES).decode(errors="replace")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer saved by `transformers`, read from a local folder.

    Raises:
        ValueError: no such folder, the folder holds no tokenizer, or the tokenizer has no
            end-of-text token.
        ImportError: the package `transformers` is not installed.
    """

    def __init__(self, folder: str) -> None:
        if not Path(folder).is_dir():
            raise ValueError(
                "--tokenizer-model expects a local folder with a Hugging Face tokenizer, but there"
                f" is no folder {folder!r}; nothing is downloaded here, so fetch it first"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(
                "HuggingFaceTokenizer needs the package transformers: pip install transformers "
                "(or use --tokenizer-type ByteTokenizer, which needs nothing)"
            ) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(
                f"{folder!r} holds no tokenizer that transformers can read: {reason}"
            ) from error
        self._tokenizer = tokenizer
        self._folder = folder
        self.name = Path(folder).resolve().name
        # Some vocabularies have gaps, so the number of tokens may be smaller than the largest id.
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        self.eod = _end_of_document(tokenizer, folder)
        pad = tokenizer.pad_token_id
        # Padding is masked out of the loss: a pad token that doubles as end of document must not
        # be.
        self.pad = -1 if pad is None or pad == self.eod else pad

    def tokenize(self, text: str | bytes) -> np.ndarray:
        ids = self._tokenizer(_as_text(text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode([int(i) for i in ids if i != self.eod])

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        return OrderedDict({**super().unique_identifiers, "tokenizer_path": self._folder})


def build_tokenizer(args: argparse.Namespace) -> Tokenizer:
    """Build the tokenizer that the command line names.

    Args:
        args: `tokenizer_type`, `tokenizer_model` (a local folder, Hugging Face only) and
            `vocab_size` (the number of ids before the end-of-document token; NullTokenizer needs
            it, the others have their own and check it).

    Raises:
        ValueError: an unknown type, or a value that is missing or does not fit the type.
        ImportError: HuggingFaceTokenizer without the package `transformers`.
    """
    problems = _argument_problems(args)
    if problems:
        raise ValueError("; ".join(problems))
    if args.tokenizer_type == "NullTokenizer":
        return NullTokenizer(args.vocab_size)
    if args.tokenizer_type == "ByteTokenizer":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    if args.vocab_size is not None and args.vocab_size + 1 < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {args.vocab_size} is smaller than the vocabulary of"
            f" {args.tokenizer_type} ({tokenizer.vocab_size} with the end-of-document token): leave"
            " the flag out"
        )
    return tokenizer


def padded_vocab_size(tokenizer: Tokenizer, args: argparse.Namespace) -> int:
    """Return the number of rows of the embedding: the vocabulary rounded up so that tensor parallelism can divide it.

    Args:
        tokenizer: gives the size to round up.
        args: `padded_vocab_size` decides alone where it is given; otherwise the result is the next
            multiple of `make_vocab_size_divisible_by * tensor_model_parallel_size` that also covers
            `vocab_size`.

    Raises:
        ValueError: `args.padded_vocab_size` is smaller than the vocabulary or not divisible by the
            tensor size.
    """
    tensor_size = args.tensor_model_parallel_size
    if args.padded_vocab_size is not None:
        if args.padded_vocab_size < tokenizer.vocab_size or args.padded_vocab_size % tensor_size:
            raise ValueError(
                f"--padded-vocab-size {args.padded_vocab_size} must be at least the"
                f" {tokenizer.vocab_size} ids of the tokenizer and a multiple of the tensor"
                f" parallel size {tensor_size}"
            )
        return args.padded_vocab_size
    multiple = args.make_vocab_size_divisible_by * tensor_size
    needed = max(tokenizer.vocab_size, args.vocab_size or 0)
    return -(-needed // multiple) * multiple


def _argument_problems(args: argparse.Namespace) -> list[str]:
    known = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")
    problems = []
    if args.tokenizer_type not in known:
        problems.append(
            f"--tokenizer-type expects one of {', '.join(known)}, but got {args.tokenizer_type}"
        )
    if args.vocab_size is not None and args.vocab_size < 1:
        problems.append(f"--vocab-size expects a positive number, but got {args.vocab_size}")
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size is None:
        problems.append("NullTokenizer needs --vocab-size")
    if args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model is None:
        problems.append("HuggingFaceTokenizer needs --tokenizer-model, a local folder")
    if (
        args.tokenizer_type in ("NullTokenizer", "ByteTokenizer")
        and args.tokenizer_model is not None
    ):
        problems.append(
            f"{args.tokenizer_type} has no files: leave --tokenizer-model"
            f" {args.tokenizer_model} out"
        )
    return problems


def _as_text(text: str | bytes) -> str:
    return text if isinstance(text, str) else text.decode()


def _end_of_document(tokenizer: object, folder: str) -> int:
    for attribute in ("eos_token_id", "sep_token_id"):
        token_id = getattr(tokenizer, attribute)
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer in {folder!r} has neither eos_token nor sep_token to end documents with"
    )
