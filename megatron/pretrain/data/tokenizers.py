# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: text to token ids and back, with the attributes that Megatron-Core's datasets read.

Bytes and numbers need no files. Folders of transformers, models of sentencepiece and vocabularies
of tiktoken are read by Megatron-Core's `core.tokenizers`, as Megatron-LM reads them. Its part for
GPT-2 fetches files over the network, so that library is called directly: nothing here does.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron.checkpoint.store import durable
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice

NUM_BYTES = 256
NO_TOKEN = -1
"""Id of padding in a vocabulary without padding: no data can hold it."""
END_OF_TEXT = "<|endoftext|>"
TIKTOKEN_PATTERN = "v2"
TIKTOKEN_VOCABULARY = 2**17
"""Ids of a TikTokenizer without --vocab-size, as in Megatron-LM."""
TIKTOKEN_ENTRY = {"rank", "token_bytes", "token_str"}
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class Tokenizer:
    """A tokenizer as the training program and Megatron-Core's datasets use it.

    Args:
        kind: type of the tokenizer, under which caches and records know it.
        name: short name, fit for a file name.
        vocab_size: number of token ids, special ones included; ids are `0 .. vocab_size - 1`.
        eod: id that ends a document.
        encode: returns the ids of a text.
        decode: returns the text of ids.
        identifiers: further properties that distinguish this tokenizer from others of its type and
            size.
        pad: id of padding; None or a negative number if the vocabulary has none.
        special: ids of other special tokens. Megatron-Core's datasets mask padding out of the loss,
            but not where it is one of these too, unless --allow-ambiguous-pad-tokens.
    """

    def __init__(
        self,
        *,
        kind: str,
        name: str,
        vocab_size: int,
        eod: int,
        encode: Callable[[str], Sequence[int]],
        decode: Callable[[list[int]], str],
        identifiers: dict[str, str] | None = None,
        pad: int | None = None,
        special: dict[str, int] | None = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.vocab_size = vocab_size
        self.eod = eod
        self.pad = NO_TOKEN
        if pad is not None and pad >= 0:
            self.pad = pad
        self.special_tokens_dict = {"eod_token": eod, **(special or {})}
        self._encode = encode
        self._decode = decode
        self._identifiers = identifiers or {}

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`, without an end-of-document token.

        Raises:
            ValueError: the text is not valid for this tokenizer (bytes that are not UTF-8 raise
                UnicodeDecodeError).
        """
        if isinstance(text, bytes):
            text = text.decode()
        return np.array(self._encode(text), dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        return self._decode([int(number) for number in ids if number != self.eod])

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The properties that Megatron-Core hashes into the names of its index caches."""
        size = str(self.vocab_size)
        return OrderedDict({"class": self.kind, "vocab_size": size, **self._identifiers})


class ByteTokenizer(Tokenizer):
    """A tokenizer of bytes, UTF-8 or not: 256 ids, and the end-of-document token."""

    def __init__(self) -> None:
        super().__init__(
            kind="ByteTokenizer",
            name="bytes",
            vocab_size=NUM_BYTES + 1,
            eod=NUM_BYTES,
            encode=str.encode,
            decode=str,
        )

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the bytes of `text`, int32 of shape `[tokens]`."""
        if isinstance(text, str):
            text = text.encode()
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`; a byte that is not UTF-8 becomes a replacement character."""
        # A padded vocabulary lets a model produce ids that are no byte; they are left out too.
        data = bytes(int(number) for number in ids if 0 <= number < NUM_BYTES)
        return data.decode(errors="replace")


class NullTokenizer(Tokenizer):
    """A tokenizer of numbers between blanks: `vocab_size` of them, then the end of a document."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(
            kind="NullTokenizer",
            name="null",
            vocab_size=vocab_size + 1,
            eod=vocab_size,
            encode=self._numbers,
            decode=self._text,
        )

    def _numbers(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError as error:
            raise ValueError(
                f"NullTokenizer reads numbers separated by blanks, not text ({error}); for text use"
                " --tokenizer-type ByteTokenizer or another, for synthetic data --mock-data"
            ) from error
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise ValueError(
                f"NullTokenizer has the ids 0 to {self.vocab_size - 1}, but the text holds"
                f" {min(ids)} to {max(ids)}"
            )
        return ids

    def _text(self, ids: list[int]) -> str:
        return " ".join(str(number) for number in ids)


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer that was chosen.

    Raises:
        ValueError: a setting, a file, a package or the size of the vocabulary does not fit.
    """
    problems = choice.problems()
    if problems:
        raise ValueError("; ".join(problems))
    kind = choice.tokenizer_type
    size = choice.vocab_size
    if kind == "NullTokenizer":
        assert size is not None  # a problem otherwise, as for the files of others
        return NullTokenizer(size)
    if kind == "ByteTokenizer":
        tokenizer: Tokenizer = ByteTokenizer()
    else:
        build = BUILDERS.get(kind, _sentence_piece)
        tokenizer = build(choice)
    if size is not None and size < tokenizer.vocab_size:
        raise ValueError(
            f"--vocab-size {size} is smaller than the vocabulary of {kind}"
            f" ({tokenizer.vocab_size} with the end-of-document token): leave the flag out"
        )
    return tokenizer


def _hugging_face(choice: TokenizerChoice) -> Tokenizer:
    """Read a tokenizer that transformers has saved, from a local folder."""
    from megatron.core.tokenizers.text.libraries.huggingface_tokenizer import HuggingFaceTokenizer

    folder = str(choice.tokenizer_model)
    try:
        part = HuggingFaceTokenizer(
            folder,
            use_fast=True,
            trust_remote_code=choice.trust_remote_code,
            include_special_tokens=choice.tokenizer_hf_include_special_tokens,
        )
    except Exception as error:  # of the library's own kinds, some of them plain
        raise _unreadable(f"{folder!r} holds no tokenizer that transformers", error) from error
    library = part.tokenizer
    if part.eod is None:
        raise ValueError(
            f"the tokenizer in {folder!r} has neither eos_token nor sep_token to end documents with"
        )
    # Some vocabularies have gaps, so the number of tokens may be smaller than the largest id.
    size = max(len(library), 1 + max(library.get_vocab().values()))
    special = {}
    for name, token in library.special_tokens_map.items():
        if isinstance(token, str):
            special[name] = library.convert_tokens_to_ids(token)
    return Tokenizer(
        kind="HuggingFaceTokenizer",
        name=Path(folder).resolve().name,
        vocab_size=size,
        eod=part.eod,
        encode=part.text_to_ids,
        decode=part.ids_to_text,
        identifiers={"tokenizer_path": folder},
        pad=library.pad_token_id,
        special=special,
    )


def _gpt2_bpe(choice: TokenizerChoice) -> Tokenizer:
    """Read the byte-level BPE of GPT-2 from its `vocab.json` and `merges.txt`."""
    from tokenizers import Tokenizer as Encoder
    from tokenizers import decoders, models, pre_tokenizers

    vocab_file = str(choice.vocab_file)
    merge_file = str(choice.merge_file)
    try:
        encoder = Encoder(models.BPE.from_file(vocab_file, merge_file))
    except Exception as error:  # the library raises no other kind
        subject = f"{vocab_file} and {merge_file} are no vocabulary and merges of a BPE that"
        raise _unreadable(f"{subject} tokenizers", error) from error
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    eod = encoder.token_to_id(END_OF_TEXT)
    if eod is None:
        raise ValueError(f"{vocab_file}: has no {END_OF_TEXT} to end documents with")
    encoder.add_special_tokens([END_OF_TEXT])
    return Tokenizer(
        kind="GPT2BPETokenizer",
        name="gpt2_bpe",
        vocab_size=1 + max(encoder.get_vocab().values()),
        eod=eod,
        encode=lambda text: encoder.encode(text).ids,
        decode=encoder.decode,
        identifiers={"tokenizer_path": f"{vocab_file} {merge_file}"},
    )


def _sentence_piece(choice: TokenizerChoice) -> Tokenizer:
    """Read a model file of sentencepiece; its three types give the same ids, without BOS."""
    from megatron.core.tokenizers.text.libraries import sentencepiece_tokenizer

    path = str(choice.tokenizer_model)
    added = choice.tokenizer_special_tokens or None
    try:
        part = sentencepiece_tokenizer.SentencePieceTokenizer(
            path, special_tokens=added, legacy=choice.tokenizer_sentencepiece_legacy
        )
    except Exception as error:  # RuntimeError or OSError by release of the library
        raise _unreadable(f"{path}: no model that sentencepiece", error) from error
    library = part.tokenizer
    if library.eos_id() < 0:
        raise ValueError(
            f"{path}: has no token that ends a sequence (</s>) to end documents with; train it"
            " with an eos_id"
        )
    identifiers = {"tokenizer_path": path}
    if added:
        identifiers["special_tokens"] = " ".join(added)
    return Tokenizer(
        kind="SentencePieceTokenizer",
        name=Path(path).stem,
        vocab_size=part.vocab_size,
        eod=library.eos_id(),
        encode=part.text_to_ids,
        decode=part.ids_to_text,
        identifiers=identifiers,
        pad=library.pad_id(),
        special={"unk_token": library.unk_id(), "bos_token": library.bos_id()},
    )


def _tiktoken(choice: TokenizerChoice) -> Tokenizer:
    """Read a vocabulary of tiktoken in Megatron-LM's JSON.

    Ids from 0 to below `tiktoken_num_special_tokens` are special: first the named ones, then
    fillers. The entries of the file follow, as many as the vocabulary leaves room for.
    """
    from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

    path = str(choice.tokenizer_model)
    size = choice.vocab_size or TIKTOKEN_VOCABULARY
    pattern = choice.tiktoken_pattern or TIKTOKEN_PATTERN
    special = list(choice.tokenizer_special_tokens or TIKTOKEN_SPECIAL)
    num_special = choice.tiktoken_num_special_tokens
    _check_special_tokens(special, num_special)
    _check_tiktoken_file(path, size, num_special)
    try:
        part = TikTokenTokenizer(
            path,
            special_tokens=special,
            num_special_tokens=num_special,
            pattern=pattern,
            vocab_size=size,
        )
    except (ValueError, AssertionError, KeyError) as error:
        raise _unreadable(f"{path}: no vocabulary that tiktoken", error) from error
    settings = f"{pattern} {num_special} {' '.join(special)}"
    return Tokenizer(
        kind="TikTokenizer",
        name=Path(path).stem,
        vocab_size=part.vocab_size,
        eod=part.eos_id,
        encode=part.text_to_ids,
        decode=part.tokenizer.decode,  # that of `part` breaks characters of several tokens
        identifiers={"tokenizer_path": path, "settings": settings},
        pad=part.pad_id,
    )


BUILDERS: dict[str, Callable[[TokenizerChoice], Tokenizer]] = {
    "HuggingFaceTokenizer": _hugging_face,
    "GPT2BPETokenizer": _gpt2_bpe,
    "TikTokenizer": _tiktoken,
}
"""Type -> the function that builds it, whose files and package have been found."""


def _check_special_tokens(special: list[str], num_special_tokens: int) -> None:
    """Raise ValueError if tokens are missing or named twice, or there are more than ids."""
    missing = [token for token in TIKTOKEN_SPECIAL if token not in special]
    if missing or len(set(special)) < len(special):
        problem = "names a token twice"
        if missing:
            problem = f"lacks {' '.join(missing)}"
        raise ValueError(f"--tokenizer-special-tokens {' '.join(special)}: {problem}")
    if num_special_tokens < len(special):
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special_tokens} must be at least {len(special)},"
            " the number of special tokens"
        )


def _check_tiktoken_file(
    path: str,
    size: int,
    num_special_tokens: int,
) -> None:
    """Raise ValueError with the first damaged entry, or if there are too few of them."""
    if not path.endswith(".json"):
        raise ValueError(f"{path}: TikTokenizer reads a vocabulary in a file that ends in .json")
    try:
        entries = json.loads(durable.file_at(Path(path)).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(f"{path}: no JSON that TikTokenizer", error) from error
    if not isinstance(entries, list):
        raise ValueError(f"{path}: expects a list of tokens, but got a {type(entries).__name__}")
    for number, entry in enumerate(entries):
        is_entry = isinstance(entry, dict) and entry.keys() == TIKTOKEN_ENTRY
        if not is_entry or entry["rank"] != number or not isinstance(entry["token_bytes"], str):
            raise ValueError(
                f"{path}: entry {number} must have the rank {number}, token_bytes in base64 and"
                f" token_str, but is {str(entry)[:80]}"
            )
    if not num_special_tokens < size <= num_special_tokens + len(entries):
        raise ValueError(
            f"{path}: has {len(entries)} tokens, which with {num_special_tokens} special ones"
            f" (--tiktoken-num-special-tokens) do not make a vocabulary of {size}: give"
            f" --vocab-size {num_special_tokens + len(entries)}"
        )


def _unreadable(subject: str, error: Exception) -> ValueError:
    """Return the error of a file, on one line."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return ValueError(f"{subject} can read: {reason}")


def embedding_rows(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Return the number of rows of the embedding, which tensor parallelism can divide.

    This is `padded_vocab_size` if it is given. Otherwise it is the next multiple of
    `make_vocab_size_divisible_by` and the tensor-parallel size that covers the tokenizer's
    vocabulary and `vocab_size`.

    Raises:
        ValueError: `padded_vocab_size` is smaller than the vocabulary, or cannot be divided.
    """
    padded = args.padded_vocab_size
    tensor_size = args.tensor_model_parallel_size
    if padded is None:
        multiple = args.make_vocab_size_divisible_by * tensor_size
        return math.ceil(max(tokenizer.vocab_size, args.vocab_size or 0) / multiple) * multiple
    if padded < tokenizer.vocab_size or padded % tensor_size:
        raise ValueError(
            f"--padded-vocab-size {padded} must be at least the {tokenizer.vocab_size} ids"
            f" of the tokenizer and a multiple of the tensor parallel size {tensor_size}"
        )
    return int(padded)
