# SPDX-License-Identifier: Apache-2.0
"""Tiny vocabularies of every library, made in a folder."""

import base64
import json
from pathlib import Path

TEXT = "the cat sat on the mat and the dog ran to the hat"


def sentence_piece(folder: Path, *, symbols: tuple[str, ...] = (), **settings: object) -> str:
    """Train a model of sentencepiece with 60 tokens; return its file."""
    import sentencepiece

    source = folder / "text.txt"
    source.write_text("\n".join(TEXT[start:] for start in range(20)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(source),
        model_prefix=str(folder / "pieces"),
        vocab_size=60,
        hard_vocab_limit=False,
        user_defined_symbols=list(symbols),
        minloglevel=2,
        **settings,
    )
    return str(folder / "pieces.model")


def gpt2_bpe(folder: Path) -> tuple[str, str]:
    """Train a byte-level BPE; return vocab.json and merges.txt."""
    import tokenizers

    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(
        [TEXT], vocab_size=270, min_frequency=1, special_tokens=["<|endoftext|>"]
    )
    trained.save_model(str(folder))
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def tiktoken_json(folder: Path) -> str:
    """Write bytes and three merges as Megatron-LM's vocabulary for tiktoken; return its file."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b"tH"]
    entries = [
        {
            "rank": rank,
            "token_bytes": base64.b64encode(token).decode(),
            "token_str": token.decode(errors="replace"),
        }
        for rank, token in enumerate(tokens)
    ]
    path = folder / "tiktoken.json"
    path.write_text(json.dumps(entries))
    return str(path)


def save_words(
    folder: Path, words: dict[str, int], unk: str, eos: str, begin: str = "", **special: str
) -> None:
    """Save a tokenizer of words, with further special tokens by their names.

    Args:
        folder: where it is saved.
        words: word -> its number.
        unk: stands for unknown words.
        eos: ends a text.
        begin: a word that is put before texts.
        **special: tokens by the names that transformers has for them.
    """
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unk))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    if begin:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, words[begin])]
        )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{"eos_token": eos, **special}
    ).save_pretrained(folder)


def hugging_face(folder: Path) -> str:
    """Save a tokenizer of words that puts <bos> before texts; return the folder."""
    words = {"<eos>": 0, "<bos>": 1, **{word: 2 + i for i, word in enumerate(set(TEXT.split()))}}
    special = {"unk": "<eos>", "eos": "<eos>", "bos_token": "<bos>"}
    save_words(folder / "words", words, begin="<bos>", **special)
    return str(folder / "words")
