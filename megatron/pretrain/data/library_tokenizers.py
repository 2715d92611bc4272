# SPDX-License-Identifier: Apache-2.0
"""Tokenizers by other libraries: transformers, sentencepiece, tiktoken and tokenizers.

Where Megatron-Core has a part that reads the files of such a tokenizer as Megatron-LM does, it is
called. Its part for GPT-2 fetches files over the network, so that library is called directly. The
libraries are optional and are imported by those who use them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron.pretrain.data.tokenizer import Tokenizer, as_text

PACKAGES = {
    "HuggingFaceTokenizer": "transformers",
    "GPT2BPETokenizer": "tokenizers",
    "SentencePieceTokenizer": "sentencepiece",
    "GPTSentencePieceTokenizer": "sentencepiece",
    "Llama2Tokenizer": "sentencepiece",
    "TikTokenizer": "tiktoken",
}
"""Type of tokenizer -> the package that it needs."""
EXTRAS = {"tokenizers": "transformers"}
"""Package -> the extra of this project that brings it, where that has another name."""
END_OF_TEXT = "<|endoftext|>"
TIKTOKEN_PATTERN = "v2"
TIKTOKEN_VOCABULARY = 2**17
"""Ids of a TikTokenizer without --vocab-size, as in Megatron-LM."""
TIKTOKEN_ENTRY = {"rank", "token_bytes", "token_str"}
TIKTOKEN_SPECIAL = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer saved by `transformers`, read from a local folder.

    Args:
        folder: of the files.
        include_special_tokens: give texts the special tokens that the tokenizer puts around them.
        trust_remote_code: permit Python code of the folder to run.

    Raises:
        ValueError: no such folder, the folder holds no tokenizer, or the tokenizer has no
            end-of-text token.
        ImportError: the package `transformers` is not installed.
    """

    def __init__(
        self,
        folder: str,
        *,
        include_special_tokens: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        if not Path(folder).is_dir():
            raise ValueError(
                "--tokenizer-model expects a local folder with a Hugging Face tokenizer, but there"
                f" is no folder {folder!r}; nothing is downloaded here, so fetch it first"
            )
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ImportError(missing_package("HuggingFaceTokenizer")) from error
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:  # of the library's own kinds, some of them plain
            raise _unreadable(f"{folder!r} holds no tokenizer that transformers", error) from error
        self._tokenizer = tokenizer
        self._folder = folder
        self._include_special_tokens = include_special_tokens
        self.name = Path(folder).resolve().name
        # Some vocabularies have gaps, so the number of tokens may be smaller than the largest id.
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))
        self.eod = _end_of_document(tokenizer, folder)
        others = dict(tokenizer.special_tokens_map)
        others.pop("pad_token", None)
        named = [each for each in others.values() if isinstance(each, str)]
        self._set_pad(tokenizer.pad_token_id, map(tokenizer.convert_tokens_to_ids, named))

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`."""
        ids = self._tokenizer(
            as_text(text), add_special_tokens=self._include_special_tokens, verbose=False
        )["input_ids"]
        return np.array(ids, dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        return self._tokenizer.decode([int(i) for i in ids if i != self.eod])

    def _id_of(self, token: str) -> int | None:
        return self._tokenizer.get_vocab().get(token)

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The class, the number of ids and the folder."""
        return OrderedDict({**super().unique_identifiers, "tokenizer_path": self._folder})


class GPT2BPETokenizer(Tokenizer):
    """The byte-level BPE of GPT-2, read from its `vocab.json` and `merges.txt`.

    Raises:
        ValueError: a file is missing or damaged, or the vocabulary has no `<|endoftext|>`.
        ImportError: the package `tokenizers`, which comes with `transformers`, is not installed.
    """

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        try:
            from tokenizers import Tokenizer as Encoder
            from tokenizers import decoders, models, pre_tokenizers
        except ImportError as error:
            raise ImportError(missing_package("GPT2BPETokenizer")) from error
        try:
            model = models.BPE.from_file(vocab_file, merge_file)
        except Exception as error:  # the library raises no other kind
            raise _unreadable(
                f"{vocab_file} and {merge_file} are no vocabulary and merges of a BPE that"
                " tokenizers",
                error,
            ) from error
        encoder = Encoder(model)
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        eod = encoder.token_to_id(END_OF_TEXT)
        if eod is None:
            raise ValueError(f"{vocab_file}: has no {END_OF_TEXT} to end documents with")
        encoder.add_special_tokens([END_OF_TEXT])
        self._encoder = encoder
        self._files = (vocab_file, merge_file)
        self.name = "gpt2_bpe"
        self.vocab_size = 1 + max(encoder.get_vocab().values())
        self.eod = eod

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`."""
        return np.array(self._encoder.encode(as_text(text)).ids, dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        kept = [int(i) for i in ids if i != self.eod]
        return self._encoder.decode(kept, skip_special_tokens=False)

    def _id_of(self, token: str) -> int | None:
        return self._encoder.token_to_id(token)

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The class, the number of ids and the files."""
        return OrderedDict({**super().unique_identifiers, "tokenizer_path": " ".join(self._files)})


class SentencePieceTokenizer(Tokenizer):
    """A model file of sentencepiece, read by Megatron-Core's part for it.

    Args:
        tokenizer_type: its name on the command line, for messages.
        path: of the model file.
        special_tokens: tokens that the vocabulary gets where the file lacks them, with `legacy`.
        legacy: such tokens are found in texts.

    Raises:
        ValueError: the file is missing or damaged, or has no token that ends sequences.
        ImportError: the package `sentencepiece` is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer_type: str = "SentencePieceTokenizer",
        special_tokens: list[str] | None = None,
        legacy: bool = False,
    ) -> None:
        try:
            import sentencepiece  # noqa: F401  # Megatron-Core's part has its own error
        except ImportError as error:
            raise ImportError(missing_package(tokenizer_type)) from error
        from megatron.core.tokenizers.text.libraries.sentencepiece_tokenizer import (
            SentencePieceTokenizer as CorePart,
        )

        try:
            self._part = CorePart(path, special_tokens=special_tokens or None, legacy=legacy)
        except Exception as error:  # RuntimeError or OSError by release of the library
            raise _unreadable(f"{path}: no model that sentencepiece", error) from error
        processor = self._part.tokenizer
        self._path = path
        self._special_tokens = special_tokens or []
        self.name = Path(path).stem
        self.vocab_size = self._part.vocab_size
        self.eod = processor.eos_id()
        if self.eod < 0:
            raise ValueError(
                f"{path}: has no token that ends a sequence (</s>) to end documents with; train it"
                " with an eos_id"
            )
        self._set_pad(
            processor.pad_id(), (processor.unk_id(), processor.bos_id(), processor.eos_id())
        )

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`, without BOS."""
        return np.array(self._part.text_to_ids(as_text(text)), dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        return self._part.ids_to_text([int(i) for i in ids if i != self.eod])

    def _id_of(self, token: str) -> int | None:
        number = self._part.token_to_id(token)
        return None if number == self._part.unk_id else number

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The class, the number of ids, the file and the tokens added to it."""
        added = {"special_tokens": " ".join(self._special_tokens)} if self._special_tokens else {}
        return OrderedDict({**super().unique_identifiers, "tokenizer_path": self._path, **added})


class TikTokenizer(Tokenizer):
    """A vocabulary of tiktoken in Megatron-LM's JSON, read by Megatron-Core's part for it.

    Ids from 0 to below `num_special_tokens` are special: first `special_tokens`, then fillers. The
    entries of the file follow, as many as `vocab_size` leaves room for.

    Args:
        path: of the vocabulary: a list of `rank`, `token_bytes` (base64) and `token_str`.
        vocab_size: ids in all.
        pattern: v1 or v2, how text is cut before it is encoded.
        num_special_tokens: special ids.
        special_tokens: the first of them; must hold those of `TIKTOKEN_SPECIAL`, the default.

    Raises:
        ValueError: the file is missing or damaged, or the numbers or tokens do not fit.
        ImportError: the package `tiktoken` is not installed.
    """

    def __init__(
        self,
        path: str,
        *,
        vocab_size: int | None = None,
        pattern: str | None = None,
        num_special_tokens: int = 1000,
        special_tokens: list[str] | None = None,
    ) -> None:
        try:
            import tiktoken  # noqa: F401  # Megatron-Core's part has its own error
        except ImportError as error:
            raise ImportError(missing_package("TikTokenizer")) from error
        from megatron.core.tokenizers.text.libraries.tiktoken_tokenizer import TikTokenTokenizer

        size = vocab_size or TIKTOKEN_VOCABULARY
        special = list(special_tokens or TIKTOKEN_SPECIAL)
        _check_special_tokens(special, num_special_tokens)
        _check_tiktoken_file(path, size, num_special_tokens)
        try:
            part = TikTokenTokenizer(
                path,
                special_tokens=special,
                num_special_tokens=num_special_tokens,
                pattern=pattern or TIKTOKEN_PATTERN,
                vocab_size=size,
            )
        except (ValueError, AssertionError, KeyError) as error:
            raise _unreadable(f"{path}: no vocabulary that tiktoken", error) from error
        self._encoding = part.tokenizer
        self._settings = f"{pattern or TIKTOKEN_PATTERN} {num_special_tokens} {' '.join(special)}"
        self._path = path
        self.name = Path(path).stem
        self.vocab_size = part.vocab_size
        self.eod = part.eos_id
        self.pad = part.pad_id

    def tokenize(self, text: str | bytes) -> np.ndarray:
        """Return the ids of `text`, int32 of shape `[tokens]`; special tokens are recognized."""
        ids = self._encoding.encode(as_text(text), allowed_special="all")
        return np.array(ids, dtype=np.int32)

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of `ids`, without end-of-document tokens."""
        return self._encoding.decode([int(i) for i in ids if i != self.eod])

    def _id_of(self, token: str) -> int | None:
        try:
            return self._encoding.encode_single_token(token)
        except KeyError:
            return None

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """The class, the number of ids, the file, the pattern and the special tokens."""
        return OrderedDict(
            {
                **super().unique_identifiers,
                "tokenizer_path": self._path,
                "settings": self._settings,
            }
        )


def missing_package(tokenizer_type: str) -> str:
    """Return the line that says how to install what a type of tokenizer needs."""
    package = PACKAGES[tokenizer_type]
    return (
        f"{tokenizer_type} needs the package {package}: pip install {package} (the extra"
        f" [{EXTRAS.get(package, package)}] of this project)"
    )


def _check_special_tokens(special: list[str], num_special_tokens: int) -> None:
    """Check the special tokens of a TikTokenizer.

    Raises:
        ValueError: some are missing, there are two of the same, or more than there are ids.
    """
    missing = [token for token in TIKTOKEN_SPECIAL if token not in special]
    if missing or len(set(special)) < len(special):
        problem = f"lacks {' '.join(missing)}" if missing else "names a token twice"
        raise ValueError(f"--tokenizer-special-tokens {' '.join(special)}: {problem}")
    if num_special_tokens < len(special):
        raise ValueError(
            f"--tiktoken-num-special-tokens {num_special_tokens} must be at least {len(special)},"
            " the number of special tokens"
        )


def _check_tiktoken_file(path: str, size: int, num_special_tokens: int) -> None:
    """Check that a file is a vocabulary with enough entries, as Megatron-Core does without a word.

    Raises:
        ValueError: names the first entry that is damaged, or how many there are.
    """
    if not path.endswith(".json"):
        raise ValueError(f"{path}: TikTokenizer reads a vocabulary in a file that ends in .json")
    try:
        entries = json.loads(Path(path).read_bytes())
    except (OSError, ValueError) as error:
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


def _end_of_document(tokenizer: Any, folder: str) -> int:
    for attribute in ("eos_token_id", "sep_token_id"):
        token_id = getattr(tokenizer, attribute)
        if token_id is not None:
            return token_id
    raise ValueError(
        f"the tokenizer in {folder!r} has neither eos_token nor sep_token to end documents with"
    )
