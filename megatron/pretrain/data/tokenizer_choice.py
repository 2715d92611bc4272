# SPDX-License-Identifier: Apache-2.0
"""The choice of a tokenizer: its type and settings, checked before any file is read.

The flags of the training program and of `tools/preprocess_data.py` make the same choice.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.pretrain.data.library_tokenizers import (
    PACKAGES,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    SentencePieceTokenizer,
    TikTokenizer,
    missing_package,
)
from megatron.pretrain.data.tokenizer import (
    ByteTokenizer,
    NullTokenizer,
    Tokenizer,
    padded_vocab_size,
)

SENTENCE_PIECE = tuple(each for each, package in PACKAGES.items() if package == "sentencepiece")
TOKENIZER_TYPES = ("ByteTokenizer", "NullTokenizer", *PACKAGES)
OF_TYPES = {
    "vocab_size": ("NullTokenizer", "TikTokenizer"),
    "tokenizer_model": ("HuggingFaceTokenizer", "TikTokenizer", *SENTENCE_PIECE),
    "vocab_file": ("GPT2BPETokenizer",),
    "merge_file": ("GPT2BPETokenizer",),
    "tokenizer_special_tokens": ("TikTokenizer", *SENTENCE_PIECE),
    "tiktoken_pattern": ("TikTokenizer",),
    "tiktoken_num_special_tokens": ("TikTokenizer",),
    "tokenizer_sentencepiece_legacy": SENTENCE_PIECE,
    "tokenizer_hf_include_special_tokens": ("HuggingFaceTokenizer",),
    "trust_remote_code": ("HuggingFaceTokenizer",),
}
"""Setting -> the types that read it."""
NEEDED = {
    "HuggingFaceTokenizer": {"tokenizer_model": "a local folder"},
    "TikTokenizer": {"tokenizer_model": "a vocabulary in JSON"},
    "GPT2BPETokenizer": {"vocab_file": "vocab.json", "merge_file": "merges.txt"},
    "NullTokenizer": {"vocab_size": "the number of ids before the end-of-document token"},
    **{each: {"tokenizer_model": "a model file of sentencepiece"} for each in SENTENCE_PIECE},
}
"""Type -> settings without which it cannot be built, with what they are."""


@dataclass(frozen=True)
class TokenizerChoice:
    """A type of tokenizer and its settings, named as the flags."""

    tokenizer_type: str
    tokenizer_model: str | None = None
    """A folder for HuggingFaceTokenizer, a file for SentencePiece types and TikTokenizer."""
    vocab_size: int | None = None
    """NullTokenizer: ids before the end-of-document token. TikTokenizer: ids in all, special ones
    included; 131072 without it. Others have their own size, which must not be larger."""
    vocab_file: str | None = None
    merge_file: str | None = None
    tokenizer_special_tokens: list[str] | None = None
    tiktoken_pattern: str | None = None
    """How text is cut before it is encoded: v1 or v2 (the default)."""
    tiktoken_num_special_tokens: int = 1000
    """Ids from 0 on that are special."""
    tokenizer_sentencepiece_legacy: bool = False
    """Special tokens may be added to the vocabulary of the model file."""
    tokenizer_hf_include_special_tokens: bool = False
    """Texts get the special tokens that the tokenizer puts around them, such as BOS."""
    trust_remote_code: bool = False
    """The folder's own Python code may be run."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> TokenizerChoice:
        """Take the settings from the arguments of a run; those that it lacks keep their default."""
        names = [each.name for each in fields(cls) if hasattr(args, each.name)]
        return cls(**{name: getattr(args, name) for name in names})

    def problems(self) -> list[str]:
        """Return what is wrong with the choice: settings, missing files, a missing package."""
        kind = self.tokenizer_type
        if kind not in TOKENIZER_TYPES:
            expected = ", ".join(TOKENIZER_TYPES)
            return [f"--tokenizer-type expects one of {expected}, but got {kind}"]
        problems = self._misplaced()
        for name, meaning in NEEDED.get(kind, {}).items():
            if getattr(self, name) is None:
                problems.append(f"{kind} needs {_flag(name)}, {meaning}")
        if self.vocab_size is not None and self.vocab_size < 1:
            problems.append(f"--vocab-size expects a positive number, but got {self.vocab_size}")
        problems += self._missing_files()
        package = PACKAGES.get(kind)
        if package and importlib.util.find_spec(package) is None:
            problems.append(missing_package(kind))
        adds_tokens = kind in SENTENCE_PIECE and self.tokenizer_special_tokens
        if adds_tokens and not self.tokenizer_sentencepiece_legacy:
            problems.append(
                f"--tokenizer-special-tokens with {kind} needs --tokenizer-sentencepiece-legacy"
            )
        return problems

    def _misplaced(self) -> list[str]:
        """Return the settings that this type would ignore."""
        problems = []
        for each in fields(self):
            types = OF_TYPES.get(each.name, TOKENIZER_TYPES)
            # A size that is no smaller than the vocabulary is told to other types by many scripts.
            if each.name == "vocab_size" or self.tokenizer_type in types:
                continue
            value = getattr(self, each.name)
            if value != each.default:
                problems.append(
                    f"{_flag(each.name)} is for {' or '.join(types)}, not for"
                    f" {self.tokenizer_type}: leave it out"
                )
        return problems

    def _missing_files(self) -> list[str]:
        problems = []
        names = [name for name in NEEDED.get(self.tokenizer_type, {}) if name != "vocab_size"]
        for name in names:
            path = getattr(self, name)
            if path is None:
                continue
            if self.tokenizer_type == "HuggingFaceTokenizer":
                if not Path(path).is_dir():
                    problems.append(
                        f"{_flag(name)} must be a local folder with a Hugging Face tokenizer, but"
                        f" there is no folder {path!r}; nothing is downloaded here, so fetch it"
                        " first"
                    )
            elif not Path(path).is_file():
                problems.append(f"{_flag(name)} {path}: no such file")
        return problems


def build_tokenizer(choice: TokenizerChoice) -> Tokenizer:
    """Build the tokenizer that was chosen.

    Raises:
        ValueError: a setting, a file or the size of the vocabulary does not fit.
        ImportError: the package of this type is not installed.
    """
    problems = choice.problems()
    if problems:
        raise ValueError("; ".join(problems))
    tokenizer = _build(choice)
    size = choice.vocab_size
    if choice.tokenizer_type == "NullTokenizer" or size is None or size >= tokenizer.vocab_size:
        return tokenizer
    raise ValueError(
        f"--vocab-size {size} is smaller than the vocabulary of {choice.tokenizer_type}"
        f" ({tokenizer.vocab_size} with the end-of-document token): leave the flag out"
    )


def _build(choice: TokenizerChoice) -> Tokenizer:
    kind = choice.tokenizer_type
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "NullTokenizer":
        assert choice.vocab_size is not None  # a problem otherwise, as for the files below
        return NullTokenizer(choice.vocab_size)
    if kind == "GPT2BPETokenizer":
        assert choice.vocab_file is not None and choice.merge_file is not None
        return GPT2BPETokenizer(choice.vocab_file, choice.merge_file)
    assert choice.tokenizer_model is not None
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(
            choice.tokenizer_model,
            include_special_tokens=choice.tokenizer_hf_include_special_tokens,
            trust_remote_code=choice.trust_remote_code,
        )
    if kind == "TikTokenizer":
        return TikTokenizer(
            choice.tokenizer_model,
            vocab_size=choice.vocab_size,
            pattern=choice.tiktoken_pattern,
            num_special_tokens=choice.tiktoken_num_special_tokens,
            special_tokens=choice.tokenizer_special_tokens,
        )
    return SentencePieceTokenizer(
        choice.tokenizer_model,
        tokenizer_type=kind,
        special_tokens=choice.tokenizer_special_tokens,
        legacy=choice.tokenizer_sentencepiece_legacy,
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def embedding_rows(args: argparse.Namespace, tokenizer: Tokenizer) -> int:
    """Return the number of rows of the embedding that the arguments and the tokenizer need.

    Raises:
        ValueError: --padded-vocab-size does not fit, see :func:`padded_vocab_size`.
    """
    return padded_vocab_size(
        tokenizer,
        padded_size=args.padded_vocab_size,
        vocab_size=args.vocab_size,
        divisible_by=args.make_vocab_size_divisible_by,
        tensor_size=args.tensor_model_parallel_size,
    )
