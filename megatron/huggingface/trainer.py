# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer over sharded models and optimizers."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel, Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from megatron.huggingface import states
from megatron.huggingface.accelerator import ShardedAccelerator
from megatron.huggingface.refusals import (
    problems_of_model,
    problems_of_sharding,
    problems_of_training_arguments,
    raise_problems,
)
from megatron_fsdp import MegatronFSDP

SCHEDULER_FILE = "scheduler.pt"  # the Trainer's own name


class ShardedTrainer(Trainer):
    """transformers' Trainer, which shards model and optimizer when training or evaluation begins.

    ``trainer.model`` remains the user's model, ``trainer.model_wrapped`` is the
    :class:`megatron.fsdp.MegatronFSDP` around it. Checkpoints contain the shards of all ranks in
    a folder `sharded_state`, together with the Trainer's other files, and can be resumed on any
    number of ranks; those of a plain Trainer can be resumed too. ``save_model`` writes the whole
    model.

    Args:
        model: as in transformers.
        args: as in transformers.
        *others: further arguments of the Trainer.
        sharding: keyword arguments of :func:`megatron.fsdp.fully_shard_model`; see
            :class:`~megatron.huggingface.accelerator.ShardedAccelerator` for the default.
        **named: further arguments of the Trainer, by name.

    Raises:
        ValueError: lists everything that is not supported, before anything is built.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *others: Any,
        sharding: Mapping[str, Any] | None = None,
        **named: Any,
    ):
        problems = problems_of_sharding(sharding or {})
        if args is not None:
            problems += problems_of_training_arguments(args)
        if model is not None:
            for problem in problems_of_model(model):
                problems.append(f"{type(model).__name__}: {problem}")
        raise_problems("ShardedTrainer does not take this", problems)
        self.sharding = sharding
        super().__init__(model, args, *others, **named)

    # ---- preparation

    def create_accelerator_and_postprocess(self) -> None:
        """Create the Accelerator, with the Trainer's own arguments for it."""
        super().create_accelerator_and_postprocess()
        self.accelerator = ShardedAccelerator(sharding=self.sharding, **self._accelerator_arguments)
        self.gather_function = functools.partial(
            self.accelerator.gather_for_metrics, use_gather_object=self.args.eval_use_gather_object
        )

    def _build_accelerator_args(self, **arguments: Any) -> dict[str, Any]:
        self._accelerator_arguments = super()._build_accelerator_args(**arguments)
        return self._accelerator_arguments

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: sharding moves it, and tensors on meta cannot be moved."""

    def hyperparameter_search(self, *args: Any, **arguments: Any) -> NoReturn:
        """Refuse: it would shard one model after the other in one process.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            "hyperparameter_search is not supported: start a program for each trial"
        )

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # norms of sharded gradients span all meshes

    # ---- checkpoints

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        *others: Any,
        **named: Any,
    ) -> TrainOutput:
        """Train as transformers does; the first rank chooses the last checkpoint for all.

        Ranks that looked for themselves could find different ones, while old ones are deleted.

        Raises:
            ValueError: if ``resume_from_checkpoint`` is True and there is no checkpoint.
        """
        if resume_from_checkpoint is True and dist.is_initialized():
            folder = self.args.output_dir
            found = [None]
            if dist.get_rank() == 0 and os.path.isdir(folder):
                found = [get_last_checkpoint(folder)]
            dist.broadcast_object_list(found, device=self.args.device)
            if found[0] is None:
                raise ValueError(f"{folder} has no checkpoint to resume from")
            resume_from_checkpoint = found[0]
        return super().train(resume_from_checkpoint, *others, **named)

    def save_model(
        self,
        output_dir: str | None = None,
        _internal_call: bool = False,
    ) -> None:
        """Write the whole model as transformers does, or PEFT its adapters; a collective.

        Checkpoints of the training get no whole model: their weights are with the optimizer's
        state, as shards.
        """
        model = self.model_wrapped
        if not isinstance(model, MegatronFSDP):
            super().save_model(output_dir, _internal_call)
            return
        is_checkpoint = False
        if _internal_call and output_dir is not None:
            is_checkpoint = True
            # The Trainer looks for the folder of the best checkpoint when all ranks are back here.
            os.makedirs(output_dir, exist_ok=True)
        if is_checkpoint and not self.args.save_only_model and not states.is_peft_model(self.model):
            return
        folder = output_dir
        if folder is None:
            folder = self.args.output_dir
        weights = states.whole_state_dict(model, keep=self.args.should_save)
        if self.args.should_save:
            self._save(folder, state_dict=weights)
            if isinstance(self.model, PreTrainedModel):
                # transformers has written the dtype of main weights, with which it would load.
                self.model.config.dtype = model.sharded_params[0].compute.dtype
                self.model.config.save_pretrained(folder)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        states.save_shards(output_dir, [self.model_wrapped], [self.optimizer.optimizer])
        if self.args.should_save:
            state = self.lr_scheduler.state_dict()
            torch.save(state, os.path.join(output_dir, SCHEDULER_FILE))

    def _load_from_checkpoint(
        self,
        resume_from_checkpoint: str,
        model: nn.Module | None = None,
    ) -> None:
        # Shards are loaded into the sharded model, together with the optimizer's.
        if states.shared_shards_folder(resume_from_checkpoint) is None:
            if model is None:
                model = self.model_wrapped
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or states.shared_shards_folder(checkpoint) is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        states.load_shards(checkpoint, [self.model_wrapped], [self.optimizer.optimizer])
        scheduler = torch.load(os.path.join(checkpoint, SCHEDULER_FILE), weights_only=True)
        self.lr_scheduler.load_state_dict(scheduler)

    def _load_best_model(self) -> None:
        states.load_shards(self.state.best_model_checkpoint, [self.model_wrapped], [])


class ShardedSeq2SeqTrainer(ShardedTrainer, Seq2SeqTrainer):
    """transformers' Seq2SeqTrainer over sharded models.

    Evaluation with ``predict_with_generate`` continues until all ranks have ended their sequences.
    """

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **generation: Any,
    ) -> tuple[Any, Any, Any]:
        """Evaluate one batch; ranks generate together (`synced_gpus`).

        Args:
            model: the sharded model.
            inputs: the batch, by the names of the forward's arguments.
            prediction_loss_only: whether to return the loss only.
            ignore_keys: outputs of the model that are left out.
            **generation: arguments of `generate`; by default those of `evaluate` or `predict`.
        """
        generation = {**(generation or getattr(self, "_gen_kwargs", {})), "synced_gpus": True}
        return super().prediction_step(
            model,
            inputs,
            prediction_loss_only,
            ignore_keys=ignore_keys,
            **generation,
        )
