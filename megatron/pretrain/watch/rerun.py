# SPDX-License-Identifier: Apache-2.0
"""Repeated steps, to tell errors of the hardware from those of the run.

Megatron-Core's rerun machine decides which steps are repeated and which runs end; this module gives
it the state of a run that a step changes, and the results to validate.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.rerun_state_machine import (
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION,
    EXIT_CODE_RESUME_TO_DISAMBIGUATE,
    Call,
    Caller,
    RerunDataIterator,
    RerunDiagnostic,
    RerunErrorInjector,
    RerunMode,
    RerunState,
    RerunStateMachine,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.module import MegatronModule
from torch.distributed.tensor import DTensor

from megatron.mcore_adapter.core_optimizers import gradient_of

MODES = {
    "disabled": RerunMode.DISABLED,
    "validate_results": RerunMode.VALIDATE_RESULTS,
    "report_stats": RerunMode.REPORT_DETERMINISM_STATS,
}
SPIKE = 10
"""A loss or gradient this many times as large as all of the first 100 is reported."""
ENDINGS = {
    EXIT_CODE_RESUME_TO_DISAMBIGUATE: (
        "a result was rejected and came out the same again: resume from the checkpoint, on other"
        " devices, to find out whether this one is at fault"
    ),
    EXIT_CODE_FAILED_ON_RESULT_VALIDATION: (
        "a result was rejected, and the diagnosis is in the log above: do not go on from it"
    ),
}
"""Exit code of Megatron-Core's machine -> its meaning."""


class RerunExitError(Exception):
    """The end of a run that the rerun machine asks for, on every rank, with its exit code."""

    def __init__(self, code: int):
        super().__init__(
            f"{ENDINGS.get(code, 'the rerun machine ends this run')} (exit code {code})"
        )
        self.code = code


def is_repeating(args: argparse.Namespace) -> bool:
    """Return True if steps of this run may be repeated."""
    return args.rerun_mode != "disabled"


def validates(args: argparse.Namespace) -> bool:
    """Return True if the rerun machine rejects results: statistics only record them."""
    return args.rerun_mode == "validate_results"


@contextmanager
def machine(
    args: argparse.Namespace, model: list[MegatronModule], say: Callable[[str], None]
) -> Iterator[None]:
    """Have a rerun machine inside the context; it restores the buffers of the model's chunks."""
    destroy_rerun_state_machine()  # one that Megatron-Core has made because there was none
    with _quiet() if not is_repeating(args) else nullcontext():
        initialize_rerun_state_machine(
            state_save_func=partial(_saved_state, model),
            state_restore_func=partial(_restore_state, model),
            mode=MODES[args.rerun_mode],
            error_injector=RerunErrorInjector(
                args.error_injection_rate, RerunDiagnostic(args.error_injection_type)
            ),
            result_rejected_tracker_filename=args.result_rejected_tracker_filename,
        )
    results = get_rerun_state_machine()
    # Megatron-Core's own reads fields that its callers no longer have.
    results._maybe_report_stats = partial(_report_statistics, results, args.log_interval, say)
    try:
        yield
    finally:
        destroy_rerun_state_machine()


def _report_statistics(
    results: RerunStateMachine, interval: int, say: Callable[[str], None]
) -> None:
    """Say how much the results of repeated steps differ, over all ranks; a collective."""
    if results.current_iteration % interval:
        return
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(results.stats))
    # With pipelines only the last stage has losses.
    for caller in dict.fromkeys(chain.from_iterable(everyone)):
        own, *others = (stats[caller] for stats in everyone if caller in stats)
        own.combine(others)
        say(f"repeated steps, {caller.message}: {own.print_stats()}")
    for statistics in results.stats.values():
        statistics.reset()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the machine from warning that it is there, though it does nothing."""
    logger = logging.getLogger("megatron.core.rerun_state_machine")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def replayable(data: Any) -> Any:
    """Return the iterator of each model chunk with a memory for the microbatches of a step."""
    if isinstance(data, list):
        return [RerunDataIterator(iterator) for iterator in data]
    return RerunDataIterator(data)


def _saved_state(model: list[MegatronModule]) -> dict[str, Any]:
    """Return what forward and backward change besides the generators that the machine saves.

    Routers count tokens in buffers, and gradients that are finished move their biases.
    """
    buffers = [{name: each.clone() for name, each in chunk.named_buffers()} for chunk in model]
    return {"tracker": get_cuda_rng_tracker().get_states(), "buffers": buffers}


def _restore_state(model: list[MegatronModule], state: dict[str, Any]) -> None:
    # A copy: the tracker changes the dict, and before a checkpoint the state is restored again.
    get_cuda_rng_tracker().set_states(dict(state["tracker"]))
    for chunk, saved in zip(model, state["buffers"]):
        for name, buffer in chunk.named_buffers():
            buffer.copy_(saved[name])


# ---- across a restart


def pending_state() -> str:
    """Return the state of a machine that waits for a restart, of all ranks; empty if none does.

    A collective if it does. The text is JSON, so that a checkpoint with it needs no class of
    Megatron-Core to be read. It has no microbatches: a run that resumes reads them again.
    """
    results = get_rerun_state_machine()
    if results.state is not RerunState.WILL_RERUN_FROM_CHECKPOINT:
        return ""
    state = results.state_dict(None, "torch_dist", force=True)
    mine = dict(state["sharded"].data)
    call = mine["failed_validation_call"]
    mine["failed_validation_call"] = call and (*call.caller, call.sequence)
    result = mine["initial_result"]
    mine["initial_result"] = None if result is None else float(result)
    device = mine["suspicious_device"]
    mine["suspicious_device"] = device if isinstance(device, int) else device and str(device)
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    iteration = state["current_iteration"]
    return json.dumps({"mode": state["mode"], "iteration": iteration, "ranks": ranks})


def resume(text: str, say: Callable[[str], None]) -> None:
    """Let the machine repeat the step for which :func:`pending_state` has returned a text."""
    state = json.loads(text)
    if len(state["ranks"]) != dist.get_world_size():
        say(
            f"a step of {len(state['ranks'])} ranks waits to be repeated, which"
            f" {dist.get_world_size()} ranks cannot: training goes on"
        )
        return
    mine = state["ranks"][dist.get_rank()]
    if mine["failed_validation_call"] is not None:
        message, rank, sequence = mine["failed_validation_call"]
        mine["failed_validation_call"] = Call(Caller(message, rank), sequence)
    if mine["initial_result"] is not None:
        mine["initial_result"] = torch.tensor(mine["initial_result"])
    if isinstance(mine["suspicious_device"], str):
        mine["suspicious_device"] = torch.device(mine["suspicious_device"])
    injector = mine["error_injector_checkpoint"]
    for name in ("error_injection_type", "injected_error_type"):
        injector[name] = injector[name] and RerunDiagnostic(injector[name])
    get_rerun_state_machine().load_state_dict(
        {
            "mode": RerunMode(state["mode"]),
            "current_iteration": state["iteration"],
            "state": RerunState.WILL_RERUN_FROM_CHECKPOINT,
            "sharded": mine,
        }
    )


# ---- results


def validate_loss(args: argparse.Namespace, loss: torch.Tensor) -> None:
    """Let the machine check the sum of losses of a microbatch, a scalar tensor.

    Without reruns, NaN and Inf are the business of the caller.
    """
    checks = args.check_for_nan_in_loss_and_grad and is_repeating(args)
    _validate(loss, "{} in local forward loss calculation" if checks else "")
    if args.check_for_spiky_loss:
        _warn_of_spike(loss, "loss", "spiky loss")


def validate_gradients(args: argparse.Namespace, model: list[MegatronModule]) -> None:
    """Let the machine check the norm of this rank's reduced gradients, with --use-megatron-fsdp.

    Megatron-Core's own wrapper does so by itself. Without reruns, the engine looks for NaN and Inf.
    """
    checks = args.check_for_nan_in_loss_and_grad and is_repeating(args)
    if not args.use_megatron_fsdp or not (checks or args.check_for_large_grads):
        return
    parameters = chain.from_iterable(chunk.parameters() for chunk in model)
    gradients = map(gradient_of, parameters)
    norm = torch.nn.utils.get_total_norm(
        [grad.to_local().float() for grad in gradients if isinstance(grad, DTensor)]
    )
    # Backward passes of some attention kernels differ by this much from one another.
    tolerance = 0.001
    _validate(norm, "{} in the norm of this rank's gradients" if checks else "", tolerance)
    if args.check_for_large_grads:
        _warn_of_spike(norm, "grads", "found unexpectedly large gradients", tolerance)


def _validate(result: torch.Tensor, message: str, tolerance: float = 0.0) -> None:
    """Let the machine reject NaN and Inf, if there is a message for it."""
    for rejects, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        if message:
            get_rerun_state_machine().validate_result(
                result=result,
                rejection_func=rejects,
                message=f"found {message.format(name)}",
                tolerance=tolerance,
            )


def _warn_of_spike(
    result: torch.Tensor, context: str, message: str, tolerance: float = 0.0
) -> None:
    """Let the machine warn of a result that is much larger than all of the first 100."""
    results = get_rerun_state_machine()
    results.validate_result(
        result=result,
        rejection_func=partial(results.is_unexpectedly_large, threshold=SPIKE, context=context),
        message=message,
        tolerance=tolerance,
        fatal=False,
    )
