# SPDX-License-Identifier: Apache-2.0
"""Rules of the machine: what runs on it, and what it can observe of a run.

One command runs on CPU and on GPU.

Settings that only change speed (backend, layer implementation, fused kernels) are replaced with a
note, even if they were given. Settings that would change results are refused.
"""

import importlib.util
from typing import Any

from megatron.core import fp8_utils
from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER
from megatron.core.transformer.enums import AttnBackend
from torch.cuda import device_count

from megatron.checkpoint.store.stores import is_staged
from megatron.mcore_adapter.captured_iterations import captures_iterations
from megatron.mcore_adapter.run.optimizer_names import MUON
from megatron.pretrain.arguments.check import Check
from megatron.pretrain.arguments.flags import NotCaptured

PLAIN_LAYERS = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "apply_rope_fusion": False,
    "moe_grouped_gemm": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
}
"""Settings that work without Transformer Engine."""
ASKS_FOR_BUFFER = fp8_utils.HAVE_TE and fp8_utils.is_te_min_version("2.10.0")
"""Layers of Transformer Engine ask sharded weights for the buffer of their gradient."""
HAS_LATE_GRADIENTS = not fp8_utils.HAVE_TE or fp8_utils.is_te_min_version("2.8.0")
"""Its layers can compute weight gradients late with every setting, as Megatron-LM has it."""
OF_LAYERS = {"transformer_impl", "no_persist_layer_norm", "moe_grouped_gemm"}
"""Those that its layers have no need for, with any kernels."""
NO_GPU = PLAIN_LAYERS | {
    "distributed_backend": "gloo",
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Settings that work without a GPU."""
# These fusions run on CPU too, but each costs ten seconds of compilation and a C++ compiler.
COMPILED = {"bias_gelu_fusion": False, "bias_swiglu_fusion": False, "bias_dropout_fusion": False}


def check_graphs(check: Check) -> None:
    """Refuse what cannot be captured as CUDA graphs, with the reason."""
    args = check.args
    flag = check.flag("cuda_graph_impl")
    try:
        if not captures_iterations(args):
            return
    except ValueError as error:
        check.problems.append(f"{flag}: {error}. See docs/gpus.md")
        check.set_default("cuda_graph_impl")
        return
    chosen = f"{flag} {args.cuda_graph_impl}"
    check.require(check.machine.cuda, f"{chosen}: CUDA graphs need GPUs; leave it out")
    check.require(
        args.optimizer not in MUON,
        f"{chosen} does not go with --optimizer {args.optimizer}: it has not been tried",
    )
    for dest, other in check.flags.items():
        value = getattr(args, dest)
        is_on = value is True or (value and value != other.default)
        words = "needs" if other.name.startswith("--no-") else "does not go with"
        for rule in other.rules_of(NotCaptured):
            check.require(not is_on, f"{chosen} {words} {other.name}: {rule.reason}")
    check.require(
        args.use_megatron_fsdp or not args.overlap_param_gather,
        f"{chosen} does not go with --overlap-param-gather without --use-megatron-fsdp: weights"
        " that an evaluation has gathered would not be gathered in the graph",
    )


def fit_to_machine(check: Check) -> None:
    """Choose backend, layers and kernels for the machine."""
    args = check.args
    machine = check.machine
    check_graphs(check)
    check_offload(check)
    check_muon(check)
    if args.use_flash_attn:
        asked_other = (
            check.changed("attention_backend") and args.attention_backend is not AttnBackend.flash
        )
        check.require(
            not asked_other, "--use-flash-attn contradicts --attention-backend: leave one out"
        )
        args.attention_backend = AttnBackend.flash
    fit_numerics(check)
    local = int(machine.environment.get("LOCAL_WORLD_SIZE", "0"))  # from torchrun
    check.require(
        not machine.cuda or local <= device_count(),
        f"{local} ranks on a machine of {device_count()} GPUs would share some, which NCCL refuses:"
        " give torchrun --nproc-per-node the number of GPUs",
    )
    asked = check.given.get("transformer_impl") == "transformer_engine"
    if not machine.cuda:
        keep_tanh_gelu(check)
        values = NO_GPU | COMPILED
        if asked and machine.transformer_engine:  # with kernels of somebody's own
            values = {dest: value for dest, value in values.items() if dest not in OF_LAYERS}
        replace(check, "no CUDA", values)
    elif not machine.transformer_engine:
        # With a GPU the package can be installed, so asking for it by name is an error.
        check.require(
            not asked,
            "--transformer-impl transformer_engine: Transformer Engine is not installed; install it"
            " or give local",
        )
        replace(check, "no Transformer Engine", PLAIN_LAYERS)
    elif args.transformer_impl == "local":
        replace(check, "local layers", PLAIN_LAYERS)
    check_kernels(check)
    if args.transformer_impl == "local":
        fit_local_layers(check)
    if not machine.fused_weight_gradient:
        replace(check, "no fused_weight_gradient_mlp_cuda", {"gradient_accumulation_fusion": False})
    elif args.use_megatron_fsdp and args.transformer_impl != "local" and not ASKS_FOR_BUFFER:
        # Older layers add into a buffer that they expect on the weight all the time; the sharded
        # weight has one in backward only.
        replace(
            check,
            "Transformer Engine's layers before 2.10 under --use-megatron-fsdp",
            {"gradient_accumulation_fusion": False},
        )


def check_kernels(check: Check) -> None:
    """Refuse what would change more than speed where its kernels are not installed."""
    args = check.args
    machine = check.machine
    check.require(
        args.moe_token_dispatcher_type != "flex" or machine.expert_dispatch,
        "--moe-token-dispatcher-type flex needs GPUs and the package deep_ep, which is not"
        " installed; use alltoall, results are the same",
    )
    check.require(
        args.transformer_impl == "transformer_engine" or "a2a+p2p" not in args.cp_comm_type,
        "--cp-comm-type a2a+p2p needs Transformer Engine on GPUs; use another, results are the"
        " same",
    )
    check.require(
        not args.delay_wgrad_compute or HAS_LATE_GRADIENTS,
        "--delay-wgrad-compute needs Transformer Engine 2.8 or newer; leave it out, results are the"
        " same",
    )


def check_offload(check: Check) -> None:
    """Check the flags of optimizer state on the host."""
    args = check.args
    flag = check.flag("optimizer_offload_fraction")
    fraction = args.optimizer_offload_fraction
    if args.optimizer_cpu_offload and not 0 <= fraction <= 1:
        check.problems.append(f"{flag} must be from 0 to 1, got {fraction}")
        check.set_default("optimizer_offload_fraction")
    check.require(
        not args.optimizer_cpu_offload or USING_PYTORCH_OPTIMIZER,
        "--optimizer-cpu-offload clips and updates on the host by torch, but Megatron-Core takes"
        " kernels of Transformer Engine or Apex where these are installed: leave it out",
    )


def check_muon(check: Check) -> None:
    """Check what --optimizer muon needs, with Megatron-Core's own data parallelism too."""
    args = check.args
    name = f"--optimizer {check.args.optimizer}"
    if args.optimizer not in MUON:
        return
    check.require(
        check.machine.emerging_optimizers,
        f"{name} needs the package emerging_optimizers, for Python 3.12 or newer: pip install"
        " emerging-optimizers",
    )
    check.require(not args.fp16, f"{name} does not go with --fp16 in Megatron-Core: use --bf16")
    for dest in ("optimizer_cpu_offload", "use_precision_aware_optimizer"):
        check.require(
            not getattr(args, dest),
            f"{name} does not go with {check.flag(dest)}, which is for adam",
        )
    if args.use_megatron_fsdp:
        return
    check.require(
        args.optimizer == "muon",
        f"{name} needs --use-megatron-fsdp: Megatron-Core's layer-wise optimizer is not built in",
    )
    for dest in ("use_distributed_optimizer", "dump_param_to_param_group_map"):
        check.require(
            not getattr(args, dest),
            f"{check.flag(dest)} does not go with {name} in Megatron-Core: leave it out",
        )


def replace(
    check: Check,
    cause: str,
    values: dict[str, Any],
) -> None:
    """Set the destinations to the values, and note which of them changed and the cause."""
    named = []
    off = []
    for dest, value in values.items():
        if getattr(check.args, dest) == value:
            continue
        setattr(check.args, dest, value)
        name = dest.replace("_", "-")
        if isinstance(value, str):
            named.append(f"{name} {value}")
        else:
            off.append(name.removeprefix("no-"))
    if off:
        named.append(f"off: {', '.join(off)}")
    if named:
        check.notes.append(f"{cause}, results are the same: {'; '.join(named)}")


def keep_tanh_gelu(check: Check) -> None:
    """Use the tanh formula of GELU if the fused GELU, which computes it, is switched off.

    Otherwise losses would change with the machine.
    """
    args = check.args
    if args.bias_gelu_fusion and args.add_bias_linear and not args.swiglu and not args.squared_relu:
        args.openai_gelu = True


def fit_local_layers(check: Check) -> None:
    """Fit the arguments to local layers, which have one attention and PyTorch's norms."""
    args = check.args
    if args.attention_backend in (AttnBackend.flash, AttnBackend.fused):
        check.notes.append(
            f"local layers: attention-backend {args.attention_backend.name} replaced by auto; the"
            " other one needs Transformer Engine on GPUs"
        )
        args.attention_backend = AttnBackend.auto
    check.require(
        not args.layernorm_zero_centered_gamma,
        "--apply-layernorm-1p needs Transformer Engine layers: PyTorch's norms have no zero-centred"
        " weight",
    )
    if args.context_parallel_size > 1 and args.cp_comm_type != ["all_gather"]:
        args.cp_comm_type = ["all_gather"]
        check.notes.append(
            "local layers: cp-comm-type all_gather; others need Transformer Engine on GPUs"
        )
    check.require(
        not (args.window_size or args.softmax_type != "vanilla")
        or (args.context_parallel_size == 1 and not args.multi_latent_attention),
        "--window-size and --softmax-type need Transformer Engine layers with"
        " --context-parallel-size above 1 or --multi-latent-attention",
    )
    check.require(
        not (args.cross_entropy_loss_fusion and args.cross_entropy_fusion_impl == "te"),
        "--cross-entropy-fusion-impl te needs Transformer Engine: use native",
    )


def fit_numerics(check: Check) -> None:
    """Check deterministic mode and environment variables."""
    args = check.args
    environment = check.machine.environment
    if args.deterministic_mode:
        check.require(
            args.attention_backend is not AttnBackend.flash
            or environment.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0",
            "--deterministic-mode with flash attention needs the environment variable"
            " NVTE_ALLOW_NONDETERMINISTIC_ALGO=0, by which Transformer Engine chooses its kernels",
        )
        algorithms = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")
        check.require(
            not check.machine.cuda or environment.get("NCCL_ALGO") in algorithms,
            "--deterministic-mode needs the environment variable NCCL_ALGO, one of"
            f" {', '.join(algorithms)}",
        )
    if check.machine.cuda:
        fit_connections(check, environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1")


def fit_connections(check: Check, single: bool) -> None:
    """Check how many hardware queues of a GPU the environment allows.

    A single queue keeps the order of kernels, several overlap them.
    """
    args = check.args
    if args.use_megatron_fsdp:
        check.require(
            not single,
            "--use-megatron-fsdp overlaps communication and compute, which"
            " CUDA_DEVICE_MAX_CONNECTIONS=1 forbids: unset it",
        )
    elif not single and max(args.tensor_model_parallel_size, args.context_parallel_size) > 1:
        check.notes.append(
            "tensor and context parallelism overlap only with the environment variable"
            " CUDA_DEVICE_MAX_CONNECTIONS=1 on GPUs before Blackwell: set it there"
        )


def check_observing(check: Check) -> None:
    """Refuse what this machine cannot observe, with the reason."""
    args = check.args
    check.require(
        check.machine.cuda or not args.record_memory_history,
        "--record-memory-history needs CUDA: the recorder is that of its allocator; give --profile",
    )
    check.require(
        not args.wandb_project or importlib.util.find_spec("wandb") is not None,
        "--wandb-project needs the package wandb: pip install wandb",
    )
    check.require(
        not (args.wandb_project and is_staged(args.save or "")) or args.wandb_save_dir,
        "--wandb-project with a URL for --save: its files are local, and would go with the staged"
        " ones; give --wandb-save-dir",
    )
    if args.profile:
        check_profile(check)


def check_profile(check: Check) -> None:
    """Check the steps and the ranks of a profile."""
    args = check.args
    start = args.profile_step_start
    ranks = args.profile_ranks
    check.require(
        0 <= start < args.profile_step_end,
        "--profile-step-start must be less than --profile-step-end",
    )
    check.require(
        not args.train_iters or start < args.train_iters,
        f"--profile-step-start {start} must be less than --train-iters {args.train_iters}",
    )
    check.require(
        all(0 <= rank < check.machine.world_size for rank in ranks),
        f"--profile-ranks {' '.join(map(str, ranks))}: must be less than the number of ranks,"
        f" {check.machine.world_size}",
    )
