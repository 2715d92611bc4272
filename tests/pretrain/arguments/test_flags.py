# SPDX-License-Identifier: Apache-2.0
"""Flags of the tables change what they say; no flag is accepted and ignored."""

import argparse
import ast
import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.optimizer import get_standard_config_overrides

from megatron.mcore_adapter.checkpoints import torch_dist_format
from megatron.mcore_adapter.run.model_parallel import initialize_model_parallel
from megatron.mcore_adapter.run.run_state import TrainedParts
from megatron.pretrain import ranks
from megatron.pretrain.arguments import CommandLineError, build_parser, parse_arguments
from megatron.pretrain.arguments.config_flags import field_flags, known_flags
from megatron.pretrain.arguments.configs import ddp_config, optimizer_config, transformer_config
from megatron.pretrain.arguments.flags import Redundant
from megatron.pretrain.arguments.tables import PROGRAM_GROUPS
from megatron.pretrain.data.tokenizer_choice import TokenizerChoice
from megatron.pretrain.model import gpt_optimizer
from tests.support.pretrain.arguments.command_lines import REFUSED_HERE
from tests.support.pretrain.arguments.flag_rows import PIPELINE, TRAIN, FlagRow
from tests.support.pretrain.arguments.flag_tables import ROWS

ROOT = Path(__file__).parents[3]


@cache
def parse(line: str, gpu: bool = False) -> tuple[argparse.Namespace, list[str]]:
    return parse_arguments(
        line.split(),
        world_size=8,
        cuda=gpu,
        transformer_engine=gpu,
        fused_weight_gradient=gpu,
        emerging_optimizers=True,
        environment={},
    )


def keywords_of(module: Any, name: str, call: Callable[[], Any]) -> dict[str, Any]:
    """Return the keywords that `call` gives to `module.name`; a positional is the `backend`."""
    seen: dict[str, Any] = {}

    def record(*positional: Any, **keywords: Any) -> None:
        seen.update(keywords, **({"backend": positional[0]} if positional else {}))

    with patch.object(module, name, record):
        call()
    return seen


def start(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords with which the program opens its process group."""
    nothing = dict.fromkeys(
        ("agree_on_arguments", "initialize_model_parallel", "seed"), lambda *args: None
    )
    with (
        patch.multiple(ranks, **nothing),
        patch.object(ranks.cpu, "install"),
        patch.dict("os.environ"),
    ):
        return keywords_of(ranks.dist, "init_process_group", lambda: ranks.start(args))


def torch_dist(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings with which a torch_dist checkpoint is described and read."""
    seen = torch_dist_format.metadata_of(args)

    def load(content: Any, source: str, sharded_strategy: Any, strict: Any) -> None:
        seen["strict"] = strict.value
        raise KeyError("enough seen")

    inner = {"gathered_weights": lambda model: nullcontext(), "sharded_state": lambda *a, **k: {}}
    inner |= {"on_first_rank": lambda action: None, "agree": lambda problems: list(problems)}
    inner["read_metadata"] = lambda source: argparse.Namespace(state_dict_metadata={})
    inner["_common_state_readable"] = lambda source: nullcontext()
    outer = {"load": load, "load_content_metadata": lambda source: {}}
    with (
        patch.multiple(torch_dist_format, **inner),
        patch.multiple(torch_dist_format.dist_checkpointing, **outer),
        pytest.raises(ValueError, match="enough seen"),
    ):
        parts = TrainedParts([])
        torch_dist_format.TorchDistFormat().load(args, {}, parts, Path("nowhere"), print)
    return seen


def overrides(args: argparse.Namespace) -> dict[str, Any]:
    """Return the optimizer's settings for the embedding and the output layer."""
    found = get_standard_config_overrides(optimizer_config(args))
    merged: dict[str, Any] = {}
    for settings in found.values():
        merged |= dict(settings)
    return merged


def schedule(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of the scheduler of rates and weight decay."""
    group = {"lr": 0.0, "weight_decay": 0.0, "max_lr": args.lr, "min_lr": args.min_lr}
    return vars(gpt_optimizer.build_scheduler(args, SimpleNamespace(param_groups=[group])))


PLACES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "args": vars,
    "model": lambda args: vars(transformer_config(args)),
    "optimizer": lambda args: vars(optimizer_config(args)),
    "ddp": lambda args: vars(ddp_config(args)),
    "schedule": schedule,
    "overrides": overrides,
    "groups": lambda args: keywords_of(
        ranks.parallel_state,
        "initialize_model_parallel",
        lambda: initialize_model_parallel(args),
    ),
    "start": start,
    "torch_dist": torch_dist,
}


def unchanged(row: FlagRow) -> list[str]:
    """Return what a flag should change and does not, each as one line."""
    try:
        without, _ = parse(f"{row.base} {row.beside}", row.gpu)
        args, _ = parse(f"{row.base} {row.beside} {row.flag}", row.gpu)
    except CommandLineError as error:
        return [f"{row.flag} {row.beside}: {error}"]
    wrong = []
    for name, value in row.changes.items():
        place, _, key = name.partition(".")
        before, after = (PLACES[place](given).get(key) for given in (without, args))
        if isinstance(value, str) and not isinstance(after, str):
            after = str(after)  # a pipeline layout
        if after != value or before == after:
            wrong.append(f"{row.flag} {row.beside}: {name} is {after!r} and was {before!r}")
    return wrong


def test_a_flag_changes_what_it_says() -> None:
    wrong = [*chain.from_iterable(unchanged(row) for row in ROWS if row.changes)]
    assert not wrong, "\n".join(wrong)


@cache
def functions_of(path: str) -> tuple[str, set[str]]:
    """Return the text of a file below tests/pretrain, and the names of its functions."""
    (file,) = (ROOT / "tests" / "pretrain").rglob(path)
    text = file.read_text()
    nodes = ast.walk(ast.parse(text))
    return text, {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def test_a_flag_of_the_loop_is_shown_by_a_test_that_exists() -> None:
    missing = []
    for row in ROWS:
        if row.shown_by:
            path, _, name = row.shown_by.partition("::")
            text, names = functions_of(path)
            if name not in names or not re.search(rf"{row.name}\b", text):
                missing.append(f"{row.name}: {row.shown_by}")
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    ("flag", "aligned"), [("", True), ("--no-align-grad-reduce", False)], ids=["aligned", "each"]
)
def test_gradients_of_stages_are_reduced_together_unless_told_otherwise(
    flag: str, aligned: bool
) -> None:
    from megatron.pretrain import loop

    args, _ = parse(f"{TRAIN} --overlap-grad-reduce {PIPELINE} {flag}")
    config = SimpleNamespace(grad_sync_func=None)
    chunk = SimpleNamespace(no_sync=object(), start_grad_sync=object())
    with patch.object(loop, "get_model_config", lambda model: config):
        report = SimpleNamespace(times=SimpleNamespace(connect=lambda model, optimizer: None))
        loop.connect(SimpleNamespace(args=args, model=[chunk], optimizer=None, report=report))
    assert config.grad_sync_func is (chunk.start_grad_sync if aligned else None)
    assert config.no_sync_func is chunk.no_sync


# Destinations outside of the tables that are no field of a config: where the program reads them. A
# rule that turns one into something else counts too; `arguments` is where those are.
READ_BY = {
    "arguments": (
        """swiglu squared_relu openai_gelu use_rotary_position_embeddings recompute_activations
            use_flash_attn no_persist_layer_norm bias_gelu_fusion bias_swiglu_fusion
            enable_experimental group_query_attention"""
    ),
    "gpt_model": (
        """position_embedding_type rotary_base rotary_percent use_rope_scaling rope_scaling_factor
        rotary_seq_len_interpolation_factor max_position_embeddings
        untie_embeddings_and_output_weights"""
    ),
    "gpt_datasets": (
        """seq_length mock_data data_path train_data_path valid_data_path test_data_path
            data_cache_path create_attention_mask_in_dataloader eval_iters train_samples"""
    ),
    "loop": (
        """padded_vocab_size micro_batch_size
            global_batch_size train_iters exit_interval exit_duration_in_mins
            exit_signal_handler skip_train eval_interval manual_gc manual_gc_interval
            empty_unused_memory_level log_params_norm"""
    ),
    "tokenizers": "make_vocab_size_divisible_by",
    "timing": ("timing_log_level timing_log_option log_timers_to_tensorboard barrier_with_L1_time"),
    "scalars": ("""wandb_project wandb_exp_name wandb_entity wandb_save_dir"""),
    "samplers": "dataloader_type num_workers",
    "profiling": (
        """profile profile_step_start profile_step_end profile_ranks use_pytorch_profiler"""
    ),
    "ranks": "seed tp_comm_overlap_cfg",
    "speed": "device_peak_tflops",
    "pretrain_gpt": "logging_level dry_run",
    "report": (
        """log_interval log_validation_ppl_to_tensorboard log_memory_to_tensorboard
            tensorboard_dir log_progress
            log_loss_scale_to_tensorboard
            record_memory_history memory_snapshot_path"""
    ),
}


def sources(name: str) -> str:
    """Return the text of a module or package of this name."""
    folder = ROOT / "megatron" / "pretrain"
    files = {*ROOT.glob(f"{name}.py"), *folder.rglob(f"{name}.py"), *folder.glob(f"{name}/*.py")}
    return "\n".join(path.read_text() for path in files if path.parent.name != "tables")


def test_other_flags_are_read_where_they_are_said_to_be() -> None:
    unread = []
    for module, names in READ_BY.items():
        text = sources(module)
        unread += [
            f"{module}: {dest}" for dest in names.split() if not re.search(rf"args\.{dest}\b", text)
        ]
    assert not unread


def test_no_flag_is_accepted_and_ignored() -> None:
    actions = [action for action in build_parser()._actions if action.dest != "help"]
    of_rows = {row.name for row in ROWS}
    in_tables = {action.dest for action in actions if of_rows & set(action.option_strings)}
    # Each field has a test in test_config_flags.py.
    program = [*chain.from_iterable(PROGRAM_GROUPS.values())]
    flags = chain.from_iterable(named.values() for named in field_flags(program).values())
    known = {action.dest for action in actions}
    fields = {flag.dest for flag in flags}
    # Each of these has a test in test_gpt_datasets.py or test_dataset_settings.py.
    fields |= known & {setting.name for setting in dataclasses.fields(GPTDatasetConfig)}
    read = set(" ".join(READ_BY.values()).split())
    # Each setting is tested in test_tokenizers.py.
    read |= {setting.name for setting in dataclasses.fields(TokenizerChoice)}
    read.add("loop")  # by pretrain_gpt.py, before the parser
    shown = in_tables | fields | read | {"dry_run_ranks"}
    same = {dest for dest, flag in known_flags().items() if flag.rules_of(Redundant)}
    assert known == shown | REFUSED_HERE | same
    assert read.isdisjoint(in_tables | fields | REFUSED_HERE), "listed twice"


def test_every_row_names_a_flag_and_is_of_one_kind() -> None:
    names = set(chain.from_iterable(each.option_strings for each in build_parser()._actions))
    assert {row.name for row in ROWS} <= names
    assert all(bool(row.changes) != bool(row.shown_by) for row in ROWS)
