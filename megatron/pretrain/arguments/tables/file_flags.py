# SPDX-License-Identifier: Apache-2.0
"""Rows of the flags of files: checkpoints, data and tokenizers."""

import argparse

from megatron.pretrain.arguments.flags import (
    AT_LEAST_0,
    AT_LEAST_1,
    DEFAULT,
    DEPRECATED_DEFAULT,
    IN_SHORT_HELP,
    SIZE,
    Flag,
    Idle,
    Implied,
    Needs,
    Refused,
    choice,
    integer,
    number,
    off_switch,
    only_in_other_loop,
    switch,
    text,
)
from megatron.pretrain.arguments.tables.training_fields import NEEDS_FSDP, NOT_WITH_FSDP
from megatron.pretrain.data.splits import parse_blend
from megatron.pretrain.data.tokenizer_choice import TOKENIZER_TYPES

STRICTNESS = (
    "assume_ok_unexpected|log_unexpected|log_all|raise_unexpected|raise_all"
    "|return_unexpected|return_all|ignore_all"
)
FOR_BERT = Refused("is for BERT", ("BertWordPieceLowerCase", "BertWordPieceCase"))
FOR_IMAGES = Refused("is for images and text", ("MultimodalTokenizer", "NullMultimodalTokenizer"))
FOR_CONVERSATIONS = Refused("is for fine-tuning on conversations", ("SFTTokenizer",))
NEEDS_SAVE = Needs("save")
NEEDS_LOAD = Needs("load", unless="pretrained_checkpoint")
NEEDS_ASYNC_SAVE = Needs("async_save")
NEEDS_GLOBAL_SAVES = Needs("non_persistent_ckpt_type", ("global",))
NO_NODE_DISKS = Refused("checkpoints on the disks of nodes are not built; use --async-save")
NO_FILES_OF_PATHS = only_in_other_loop("the command line names data here")
NO_FILL_IN_THE_MIDDLE = Refused(
    "fill-in-the-middle data is not built; rearrange documents before they are tokenized"
)
IDLE_WITHOUT_SAVE = Idle(lambda args: not args.save, "without --save")
IDLE_WITHOUT_LOAD = Idle(
    lambda args: not (args.load or args.pretrained_checkpoint),
    "without --load or --pretrained-checkpoint",
)
IDLE_WITH_FSDP = Idle(
    lambda args: args.use_megatron_fsdp,
    "with --use-megatron-fsdp, whose optimizer state loads at any layout",
)
IDLE_WITHOUT_DISTRIBUTED_OPTIMIZER = Idle(
    lambda args: not args.use_distributed_optimizer, "without --use-distributed-optimizer"
)

SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
"""Data of single splits."""
DATA_PATHS = ("data_path", *SPLIT_PATHS)


def has_several_sets(args: argparse.Namespace) -> bool:
    """Return True if a data path blends several data sets."""
    return any(len(parse_blend(getattr(args, dest) or [])[0]) > 1 for dest in DATA_PATHS)


def has_weights(args: argparse.Namespace) -> bool:
    """Return True if a data path gives weights of data sets."""
    return any(parse_blend(getattr(args, dest) or [])[1] for dest in DATA_PATHS)


FILE_FLAGS: dict[str, tuple[Flag, ...]] = {
    "checkpoints": (
        text("--save", "directory, or URL, to save checkpoints in", IN_SHORT_HELP),
        switch("--overwrite", "begin anew in --save; what is there is moved aside", NEEDS_SAVE),
        text("--load", "directory, or URL, to load the newest checkpoint from", IN_SHORT_HELP),
        switch(
            "--no-load-fallback",
            "stop where the newest checkpoint is damaged",
            NEEDS_LOAD,
            Idle(lambda args: args.ckpt_step, "with --ckpt-step, which names the checkpoint"),
        ),
        integer(
            "--save-interval",
            "iterations between saves; default: one at the end",
            IN_SHORT_HELP,
            AT_LEAST_1,
        ),
        integer(
            "--save-retain-interval",
            "keep multiples of this iteration, and the newest",
            AT_LEAST_1,
            NEEDS_SAVE,
            Needs("save_interval"),
        ),
        choice(
            "--ckpt-format",
            "torch|torch_dist|torch_dcp|zarr|fsdp_dtensor",
            "layout of files",
            Implied("use_megatron_fsdp", "fsdp_dtensor"),
            Refused(
                "not written or read here; use torch_dist or fsdp_dtensor",
                ("torch", "torch_dcp", "zarr"),
            ),
            default="torch_dist",
        ),
        off_switch(
            "--no-strict-fsdp-dtensor-load --disable-strict-fsdp-dtensor-load",
            "parameters may lack or be unknown in a load with FSDP",
            NEEDS_FSDP,
        ),
        switch("--auto-detect-ckpt-format", "find the format out from the directory", DEFAULT),
        choice(
            "--dist-ckpt-strictness",
            STRICTNESS,
            "about keys that differ",
            default="assume_ok_unexpected",
        ),
        switch(
            "--dist-ckpt-optim-fully-reshardable",
            "optimizer state for any layout",
            IDLE_WITH_FSDP,
            IDLE_WITHOUT_DISTRIBUTED_OPTIMIZER,
        ),
        switch(
            "--dist-ckpt-save-pre-mcore-014",
            Refused(
                "Megatron-Core no longer writes fully_sharded_model_space; leave it out, it is"
                " still read"
            ),
        ),
        switch(
            "--distrib-optim-fully-reshardable-mem-efficient",
            "gather it on one rank",
            IDLE_WITH_FSDP,
            IDLE_WITHOUT_DISTRIBUTED_OPTIMIZER,
        ),
        switch(
            "--async-save",
            "write while training goes on",
            NEEDS_SAVE,
            Idle(lambda args: args.skip_train, "with --skip-train, which saves nothing"),
        ),
        switch(
            "--use-persistent-ckpt-worker", "one writer process for all saves", NEEDS_ASYNC_SAVE
        ),
        choice(
            "--async-strategy",
            "nvrx|mcore",
            "library that writes asynchronously",
            NEEDS_ASYNC_SAVE,
            default="nvrx",
        ),
        integer(
            "--dist-ckpt-workers",
            Refused("one process of each rank writes; leave it out"),
            default=1,
        ),
        integer(
            "--non-persistent-save-interval",
            "extra saves that are overwritten",
            AT_LEAST_1,
            NEEDS_SAVE,
            NEEDS_GLOBAL_SAVES,
        ),
        choice(
            "--non-persistent-ckpt-type",
            "global|local|in_memory",
            "where they go",
            Needs("load", unless="non_persistent_save_interval"),
            Refused("not built; use --async-save, or global", ("local", "in_memory")),
        ),
        text(
            "--non-persistent-global-ckpt-dir",
            "directory of those of type global",
            NEEDS_GLOBAL_SAVES,
        ),
        text("--non-persistent-local-ckpt-dir", NO_NODE_DISKS),
        choice(
            "--non-persistent-local-ckpt-algo",
            "fully_parallel|atomic",
            NO_NODE_DISKS,
            default="fully_parallel",
        ),
        switch(
            "--ckpt-assume-constant-structure",
            "reuse the plan of the save before",
            Idle(
                lambda args: args.async_save and not args.use_persistent_ckpt_worker,
                "with --async-save but --use-persistent-ckpt-worker, whose process keeps plans",
            ),
        ),
        switch(
            "--ckpt-fully-parallel-save",
            "deprecated: is the default",
            DEPRECATED_DEFAULT,
            dest="ckpt_fully_parallel_save_deprecated",
        ),
        off_switch("--no-ckpt-fully-parallel-save", "the first rank writes what several have"),
        switch(
            "--ckpt-fully-parallel-load",
            "ranks read parts and exchange them",
            Idle(
                lambda args: args.use_megatron_fsdp,
                "with --use-megatron-fsdp, where ranks read their part",
            ),
        ),
        switch("--no-save-optim", "save no optimizer state", IDLE_WITHOUT_SAVE),
        switch("--no-save-rng", "save no random state", IDLE_WITHOUT_SAVE),
        switch("--no-load-optim", "load no optimizer state", IDLE_WITHOUT_LOAD),
        switch("--no-load-rng", "load no random state", IDLE_WITHOUT_LOAD),
        switch("--finetune", "load weights only and start at iteration 0", IDLE_WITHOUT_LOAD),
        integer(
            "--ckpt-step", "iteration to load instead of the newest", AT_LEAST_0, Needs("load")
        ),
        switch(
            "--exit-on-missing-checkpoint",
            "stop where --load holds no checkpoint",
            IDLE_WITHOUT_LOAD,
        ),
        switch("--use-checkpoint-args", "arguments of the model from the checkpoint", NEEDS_LOAD),
        off_switch(
            "--no-use-tokenizer-model-from-checkpoint-args", "the tokenizer as given here", DEFAULT
        ),
        switch("--no-check-checkpoint-args", "load the weights of another model too", NEEDS_LOAD),
        text("--pretrained-checkpoint", "load these weights where --load has no checkpoint"),
        text(
            "--dump-param-to-param-group-map",
            "write the optimizer group of each parameter",
            NOT_WITH_FSDP,
        ),
        switch("--verify-integrity", "is the default", DEFAULT),
        switch(
            "--no-verify-integrity",
            "load without digests and checksums of the files",
            IDLE_WITHOUT_LOAD,
        ),
        switch(
            "--load-main-params-from-ckpt",
            Refused("main weights are part of the optimizer's state here"),
        ),
    ),
    "data and tokenizer": (
        switch("--mock-data", "synthetic sequences"),
        text(
            "--data-path",
            "prefixes of data sets, or weights and prefixes",
            IN_SHORT_HELP,
            nargs="*",
        ),
        text("--train-data-path", "the same, training only", nargs="*"),
        text("--valid-data-path", "the same, validation only", nargs="*"),
        text("--test-data-path", "the same, test only", nargs="*"),
        text("--split", "shares of training, validation and test; default 969,30,1"),
        text("--data-cache-path", "directory for index files"),
        text("--data-args-path", NO_FILES_OF_PATHS),
        text("--per-split-data-args-path", NO_FILES_OF_PATHS),
        integer(
            "--num-dataset-builder-threads",
            "threads that index the data sets of a blend",
            AT_LEAST_1,
            Idle(lambda args: not has_several_sets(args), "without several data sets"),
            default=1,
        ),
        number(
            "--mid-level-dataset-surplus",
            "further samples of a weighted data set",
            AT_LEAST_0,
            Idle(lambda args: not has_weights(args), "without weights of data sets"),
            default=0.005,
        ),
        switch("--allow-ambiguous-pad-tokens", "no loss on other tokens with padding's id"),
        text(
            "--tokenizer-type",
            "default: as the data, the files or --mock-data say",
            IN_SHORT_HELP,
            FOR_BERT,
            FOR_IMAGES,
            FOR_CONVERSATIONS,
            choices=(
                *TOKENIZER_TYPES,
                *FOR_BERT.values,
                *FOR_IMAGES.values,
                *FOR_CONVERSATIONS.values,
            ),
        ),
        text(
            "--tokenizer-model", "folder or file of the tokenizer, as its type needs", IN_SHORT_HELP
        ),
        integer(
            "--vocab-size",
            "tokens of NullTokenizer without its end, or of TikTokenizer",
            SIZE,
        ),
        text("--vocab-file", "vocab.json of GPT2BPETokenizer"),
        text("--merge-file", "merges.txt of GPT2BPETokenizer"),
        choice("--tiktoken-pattern", "v1|v2", "how TikTokenizer cuts text; default v2"),
        integer("--tiktoken-num-special-tokens", "special ids of TikTokenizer", default=1000),
        text(
            "--tokenizer-special-tokens --tiktoken-special-tokens",
            "those of TikTokenizer or a SentencePiece type",
            nargs="+",
        ),
        switch("--tokenizer-sentencepiece-legacy", "special tokens beyond the model file"),
        switch("--tokenizer-hf-include-special-tokens", "special tokens around texts"),
        switch("--trust-remote-code", "run code in the folder of a HuggingFaceTokenizer"),
        integer("--num-workers", "loader processes per rank", AT_LEAST_0, default=2),
        off_switch("--no-mmap-bin-files", "read data files instead of mapping them"),
        off_switch("--no-create-attention-mask-in-dataloader", "attention makes its own mask"),
        switch("--reset-position-ids", "positions restart at every document"),
        switch(
            "--reset-attention-mask",
            "no attention across documents",
            Needs(
                "create_attention_mask_in_dataloader",
                remedy="has no effect with --no-create-attention-mask-in-dataloader",
            ),
        ),
        switch("--eod-mask-loss", "no loss on end-of-document tokens"),
        choice(
            "--dataloader-type",
            "single|cyclic|external",
            "cyclic: shuffled passes",
            Refused("this program reads its own data; use single or cyclic", ("external",)),
        ),
        switch("--fim-data", NO_FILL_IN_THE_MIDDLE),
        text("--fim-rate", NO_FILL_IN_THE_MIDDLE),
        text("--fim-spm-rate", NO_FILL_IN_THE_MIDDLE),
        text("--fim-split-sample", NO_FILL_IN_THE_MIDDLE),
        text("--fim-fragment-rate", NO_FILL_IN_THE_MIDDLE),
        text("--fim-no-prefix", NO_FILL_IN_THE_MIDDLE),
        text("--fim-prefix-token", NO_FILL_IN_THE_MIDDLE),
        text("--fim-middle-token", NO_FILL_IN_THE_MIDDLE),
        text("--fim-suffix-token", NO_FILL_IN_THE_MIDDLE),
        text("--fim-pad-token", NO_FILL_IN_THE_MIDDLE),
        text("--fim-eod-token", NO_FILL_IN_THE_MIDDLE),
        switch("--legacy-tokenizer", Refused("newer releases have no other classes of tokenizers")),
    ),
}
"""Title of a group in --help -> rows."""
