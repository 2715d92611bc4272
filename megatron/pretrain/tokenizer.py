# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back, with the attributes that Megatron-Core's datasets read.

There are three, none of which touches the network: `ByteTokenizer` (needs no files),
`HuggingFaceTokenizer` (a local folder) and `NullTokenizer` (numbers in, numbers out, for synthetic
runs).
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

NUM_BYTES = 256


class Tokenizer(ABC):
    """The interface that the training program and Megatron-Core's datasets use.

    Attributes:
        name: short, fit for a file name.
        vocab_size: number of token ids, special ones included; ids are `0 .. vocab_size - 1`.
        eod: id that ends a document.
        pad: id of padding, -1 if the vocabulary has none (an id that no data can hold).
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
        """Return the text of `ids`, without end-of-document tokens."""

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The properties that tell this tokenizer from others.

        Megatron-Core hashes them into the names of its index caches.
        """
        return OrderedDict({"class": type(self).__name__, "vocab_size": str(self.vocab_size)})


class NullTokenizer(Tokenizer):
    """A tokenizer of numbers separated by blanks.

    Its ids are `vocab_size` numbers and, after them, the end-of-document token.
    """

    name = "null"

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the numbers of `text`, int32 of shape `[tokens]`.

        Raises:
            ValueError: a word is no number, or no id of this vocabulary.
        """
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
        """Return the numbers separated by blanks, without end-of-document tokens."""
        return " ".join(str(int(i)) for i in ids if i != self.eod)


class ByteTokenizer(Tokenizer):
    """A tokenizer of bytes, UTF-8 or not: 256 ids, and the end-of-document token."""

    name = "bytes"
    vocab_size = NUM_BYTES + 1
    eod = NUM_BYTES

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the bytes of `text`, int32 of shape `[tokens]`."""
        data = text.encode() if isinstance(text, str) else text
        return np.frombuffer(data, dtype=np.uint8).astype(np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; a byte that is not UTF-8 becomes a replacement character."""
        # A padded vocabulary lets a model produce ids that are no byte; they are left out too.
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
        # Padding is masked out of the loss, the end of a document is not: one token cannot be both.
        self.pad = -1 if pad is None or pad == self.eod else pad

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`, without special tokens."""
        ids = self._tokenizer(_as_text(text), add_special_tokens=False, verbose=False)["input_ids"]
        return np.array(ids, dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        return self._tokenizer.decode([int(i) for i in ids if i != self.eod])

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The class, the number of ids and the folder."""
        return OrderedDict({**super().unique_identifiers, "tokenizer_path": self._folder})


def build_tokenizer(
    tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None
) -> Tokenizer:
    """Build a tokenizer.

    Args:
        tokenizer_type: ByteTokenizer, HuggingFaceTokenizer or NullTokenizer.
        tokenizer_model: a local folder, for HuggingFaceTokenizer only.
        vocab_size: the number of ids before the end-of-document token. NullTokenizer needs it; the
            others have their own, which must not be larger.

    Raises:
        ValueError: an unknown type, or a value that is missing or does not fit the type.
        ImportError: HuggingFaceTokenizer without the package `transformers`.
    """
    problems = _problems(tokenizer_type, tokenizer_model, vocab_size)
    if problems:
        raise ValueError("; ".join(problems))
    tokenizer: Tokenizer
    if tokenizer_type == "NullTokenizer":
        assert vocab_size is not None  # a problem otherwise
        return NullTokenizer(vocab_size)
    if tokenizer_type == "ByteTokenizer":
        tokenizer = ByteTokenizer()
    else:
        assert tokenizer_model is not None  # a problem otherwise
        tokenizer = HuggingFaceTokenizer(tokenizer_model)
    if vocab_size is not None and vocab_size + 1 < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size} is smaller than the vocabulary of {tokenizer_type}"
            f" ({tokenizer.vocab_size} with the end-of-document token): leave the flag out"
        )
    return tokenizer


def padded_vocab_size(
    tokenizer: Tokenizer,
    *,
    padded_size: int | None,
    vocab_size: int | None,
    divisible_by: int,
    tensor_size: int,
) -> int:
    """Return the number of rows of the embedding, which tensor parallelism can divide.

    This is `padded_size` if it is given. Otherwise it is the next multiple of `divisible_by *
    tensor_size` that covers the tokenizer's vocabulary and `vocab_size`.

    Args:
        tokenizer: has the vocabulary.
        padded_size: the value of --padded-vocab-size.
        vocab_size: the value of --vocab-size.
        divisible_by: the value of --make-vocab-size-divisible-by.
        tensor_size: number of tensor-parallel ranks.

    Raises:
        ValueError: `padded_size` is smaller than the vocabulary or not divisible by `tensor_size`.
    """
    if padded_size is not None:
        if padded_size < tokenizer.vocab_size or padded_size % tensor_size:
            raise ValueError(
                f"--padded-vocab-size {padded_size} must be at least the {tokenizer.vocab_size} ids"
                f" of the tokenizer and a multiple of the tensor parallel size {tensor_size}"
            )
        return padded_size
    multiple = divisible_by * tensor_size
    needed = max(tokenizer.vocab_size, vocab_size or 0)
    return math.ceil(needed / multiple) * multiple


def _problems(
    tokenizer_type: str, tokenizer_model: str | None, vocab_size: int | None
) -> list[str]:
    known = ("ByteTokenizer", "HuggingFaceTokenizer", "NullTokenizer")
    problems = []
    if tokenizer_type not in known:
        problems.append(
            f"--tokenizer-type expects one of {', '.join(known)}, but got {tokenizer_type}"
        )
    if vocab_size is not None and vocab_size < 1:
        problems.append(f"--vocab-size expects a positive number, but got {vocab_size}")
    if tokenizer_type == "NullTokenizer" and vocab_size is None:
        problems.append("NullTokenizer needs --vocab-size")
    if tokenizer_type == "HuggingFaceTokenizer" and tokenizer_model is None:
        problems.append("HuggingFaceTokenizer needs --tokenizer-model, a local folder")
    if tokenizer_type in ("NullTokenizer", "ByteTokenizer") and tokenizer_model is not None:
        problems.append(
            f"{tokenizer_type} has no files: leave --tokenizer-model {tokenizer_model} out"
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
