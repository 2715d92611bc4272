# SPDX-License-Identifier: Apache-2.0
"""The choice of a tokenizer: its type and settings, checked before any file is read.

The flags of the training program and of `tools/preprocess_data.py` make the same choice.
"""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, fields
from pathlib import Path

from megatron.checkpoint.store import durable

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
SENTENCE_PIECE = tuple(kind for kind, package in PACKAGES.items() if package == "sentencepiece")
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
    **{kind: {"tokenizer_model": "a model file of sentencepiece"} for kind in SENTENCE_PIECE},
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
    """The pattern by which text is cut before it is encoded: v1 or v2 (the default)."""
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
        settings = {}
        for field in fields(cls):
            if hasattr(args, field.name):
                settings[field.name] = getattr(args, field.name)
        return cls(**settings)

    def problems(self) -> list[str]:
        """Return the problems of the choice: settings, missing files, a missing package."""
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
        for field in fields(self):
            types = OF_TYPES.get(field.name, TOKENIZER_TYPES)
            # Many scripts give a size that is no smaller than the vocabulary to other types.
            if field.name == "vocab_size" or self.tokenizer_type in types:
                continue
            if getattr(self, field.name) != field.default:
                problems.append(
                    f"{_flag(field.name)} is for {' or '.join(types)}, not for"
                    f" {self.tokenizer_type}: leave it out"
                )
        return problems

    def _missing_files(self) -> list[str]:
        problems = []
        for name in NEEDED.get(self.tokenizer_type, {}):
            path = getattr(self, name)
            if path is None or name == "vocab_size":
                continue
            if self.tokenizer_type == "HuggingFaceTokenizer":
                if not Path(path).is_dir():
                    problems.append(
                        f"{_flag(name)} must be a local folder with a Hugging Face tokenizer, but"
                        f" there is no folder {path!r}; nothing is downloaded here, so fetch it"
                        " first"
                    )
                    continue
                try:
                    for file in Path(path).iterdir():
                        durable.file_at(file)
                except OSError as error:
                    problems.append(f"{_flag(name)}: {error}")
            elif not Path(path).is_file():
                problems.append(f"{_flag(name)} {path}: no such file")
        return problems


def missing_package(tokenizer_type: str) -> str:
    """Return the line with the command that installs the package of a type of tokenizer."""
    package = PACKAGES[tokenizer_type]
    return (
        f"{tokenizer_type} needs the package {package}: pip install {package} (the extra"
        f" [{EXTRAS.get(package, package)}] of this project)"
    )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
