# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back, with the attributes that Megatron-Core's datasets read.

Those here need no files: `ByteTokenizer`, and `NullTokenizer` (numbers in, numbers out, for
synthetic runs). `library_tokenizers` has those that read files. None touches the network.
"""

import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

import numpy as np

NUM_BYTES = 256
NO_TOKEN = -1
"""Id of padding in a vocabulary without padding: no data can hold it."""


class Tokenizer(ABC):
    """The interface that the training program and Megatron-Core's datasets use.

    Attributes:
        name: short, fit for a file name.
        vocab_size: number of token ids, special ones included; ids are `0 .. vocab_size - 1`.
        eod: id that ends a document.
        pad: id of padding, -1 if the vocabulary has none (an id that no data can hold), or if it is
            that of another special token.
        ambiguous_pad: id of padding that is another special token too, else -1.
    """

    name: str
    vocab_size: int
    eod: int
    pad: int = NO_TOKEN
    ambiguous_pad: int = NO_TOKEN

    def _set_pad(self, pad: int | None, others: Iterable[int | None]) -> None:
        """Note the id of padding.

        Padding is masked out of the loss, the end of a document and unknown words are not: one
        token cannot be both, unless the user says so.

        Args:
            pad: its id; None or a negative number if there is none.
            others: ids of the other special tokens.
        """
        number = NO_TOKEN if pad is None or pad < 0 else pad
        is_ambiguous = number != NO_TOKEN and number in {self.eod, *others}
        self.pad = NO_TOKEN if is_ambiguous else number
        self.ambiguous_pad = number if is_ambiguous else NO_TOKEN

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

    def token_id(self, token: str) -> int:
        """Return the id of a token that stands for itself, such as `<fim_prefix>`.

        Raises:
            ValueError: the vocabulary has no such token.
        """
        number = self._id_of(token)
        if number is None:
            raise ValueError(f"the vocabulary of {type(self).__name__} has no token {token!r}")
        return number

    def _id_of(self, token: str) -> int | None:
        """Return the id of a token, None if there is none."""
        return None

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
        words = as_text(text).split()
        try:
            ids = np.array([int(word) for word in words], dtype=np.int64)
        except ValueError as error:
            raise ValueError(
                f"NullTokenizer reads numbers separated by blanks, not text ({error}); for text use"
                " --tokenizer-type ByteTokenizer or another, for synthetic data --mock-data"
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


def as_text(text: str | bytes) -> str:
    """Return text that may be given in UTF-8."""
    return text if isinstance(text, str) else text.decode()
