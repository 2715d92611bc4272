# SPDX-License-Identifier: Apache-2.0
"""Flags of data and tokenizers."""

from megatron.pretrain.arguments.flags import Flag, row
from megatron.pretrain.arguments.not_built import OTHER_TOKENIZERS
from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES

PATTERNS = ("v1", "v2")
TOKENIZERS = (*TOKENIZER_TYPES, *OTHER_TOKENIZERS)

DATA_FLAGS: tuple[Flag, ...] = (
    row("--mock-data", "switch", "synthetic sequences"),
    row(
        "--data-path",
        str,
        "prefix of an indexed data set, several, or weight prefix pairs",
        nargs="*",
    ),
    row("--train-data-path", str, "the same, training only", nargs="*"),
    row("--valid-data-path", str, "the same, validation only", nargs="*"),
    row("--test-data-path", str, "the same, test only", nargs="*"),
    row("--split", str, "shares of training, validation and test; default 969,30,1"),
    row("--data-cache-path", str, "directory for index files"),
    row("--data-args-path", str, "file that holds the value of --data-path"),
    row(
        "--per-split-data-args-path",
        str,
        "JSON file with the values of the three above under train, valid, test",
    ),
    row("--num-dataset-builder-threads", int, "threads that index the data sets of a blend", 1),
    row(
        "--mid-level-dataset-surplus",
        float,
        "part of samples that a weighted data set is given beyond its share",
        0.005,
    ),
    row(
        "--allow-ambiguous-pad-tokens",
        "switch",
        "mask padding out of the loss also where its id is another special token's",
    ),
    row(
        "--tokenizer-type",
        str,
        "default: GPT2BPETokenizer with --vocab-file, NullTokenizer with --mock-data, else"
        " ByteTokenizer",
        choices=TOKENIZERS,
    ),
    row(
        "--tokenizer-model",
        str,
        "folder of a HuggingFaceTokenizer, file of a SentencePiece type or a TikTokenizer",
    ),
    row(
        "--vocab-size",
        int,
        "tokens of NullTokenizer, without its end of document, or ids of TikTokenizer",
    ),
    row("--vocab-file", str, "vocab.json of GPT2BPETokenizer"),
    row("--merge-file", str, "merges.txt of GPT2BPETokenizer"),
    row("--tiktoken-pattern", str, "how TikTokenizer cuts text; default v2", choices=PATTERNS),
    row("--tiktoken-num-special-tokens", int, "special ids of TikTokenizer", 1000),
    row(
        "--tokenizer-special-tokens --tiktoken-special-tokens",
        str,
        "special tokens of TikTokenizer or a SentencePiece type",
        nargs="+",
    ),
    row(
        "--tokenizer-sentencepiece-legacy",
        "switch",
        "special tokens may be added to a model file of sentencepiece",
    ),
    row(
        "--tokenizer-hf-include-special-tokens",
        "switch",
        "HuggingFaceTokenizer puts its special tokens around texts",
    ),
    row("--trust-remote-code", "switch", "run code in the folder of a HuggingFaceTokenizer"),
    row("--num-workers", int, "loader processes per rank", 2),
    row(
        "--no-mmap-bin-files",
        "off",
        "read data files instead of mapping them",
        dest="mmap_bin_files",
    ),
    row(
        "--no-create-attention-mask-in-dataloader",
        "off",
        "attention makes its own mask",
        dest="create_attention_mask_in_dataloader",
    ),
    row("--reset-position-ids", "switch", "positions restart at every document"),
    row("--reset-attention-mask", "switch", "no attention across documents"),
    row("--eod-mask-loss", "switch", "no loss on end-of-document tokens"),
    row(
        "--dataloader-type",
        str,
        "single: one pass in order; cyclic: shuffled passes",
        choices=("single", "cyclic", "external"),
    ),
    row("--fim-data", "switch", "fill-in-the-middle data"),
    row("--fim-rate", float, "probability that a document is rearranged", 0.5),
    row("--fim-spm-rate", float, "part of these that begin with their suffix", 0.5),
    row("--fim-split-sample", str, "token that cuts documents into fragments"),
    row("--fim-fragment-rate", float, "probability that a fragment is rearranged"),
    row("--fim-no-prefix", str, "text at the beginning of what is never rearranged"),
    row("--fim-prefix-token", str, "token before the prefix", "<fim_prefix>"),
    row("--fim-middle-token", str, "token before the middle", "<fim_middle>"),
    row("--fim-suffix-token", str, "token before the suffix", "<fim_suffix>"),
    row("--fim-pad-token", str, "token of padding, without loss", "<fim_pad>"),
    row("--fim-eod-token", str, "token between documents", "<|endoftext|>"),
    row(
        "--legacy-tokenizer",
        "switch",
        "tokenizers of older releases, where their ids are the same",
    ),
)
