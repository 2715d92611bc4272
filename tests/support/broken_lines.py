# SPDX-License-Identifier: Apache-2.0
"""Break lines of the engine, the adapter and the converter, one at a time: `make test` must notice.

    python -m tests.support.broken_lines                  every break of the table
    python -m tests.support.broken_lines layout divisor   those whose names contain one of the words

Each break is made in a copy of the repository. The tests that are likely to notice run first, then,
where they pass, everything that `make test` runs. Printed is one line per break, with the first
test that failed. The exit code is 1 where a break went unnoticed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", ".*_cache")


@dataclass(frozen=True)
class BrokenLine:
    """One line that is made wrong.

    Args:
        name: a few words for the break.
        file: path in the repository.
        line: text that stands in the file exactly once.
        broken: text that takes its place.
        tests: arguments of pytest that select the tests most likely to notice.
    """

    name: str
    file: str
    line: str
    broken: str
    tests: str

    def apply(self, root: Path) -> None:
        """Break the line in the copy at ``root``.

        Raises:
            ValueError: the line does not stand in the file exactly once.
        """
        path = root / self.file
        text = path.read_text()
        if text.count(self.line) != 1:
            times = text.count(self.line)
            raise ValueError(
                f"{self.name}: expects the line once in {self.file}, not {times} times"
            )
        path.write_text(text.replace(self.line, self.broken))

    def undo(self, root: Path) -> None:
        """Restore the file in the copy at ``root``."""
        shutil.copy(REPOSITORY / self.file, root / self.file)


BROKEN_LINES = [
    BrokenLine(
        "layout: a rank owns one element less",
        "megatron/fsdp/engine/layout.py",
        "stop = _clamp((rank + 1) * self.shard_size - position.start, position.numel)",
        "stop = _clamp((rank + 1) * self.shard_size - 1 - position.start, position.numel)",
        "tests/fsdp/engine/test_layout.py",
    ),
    BrokenLine(
        "layout: parts of a flat range",
        "megatron/fsdp/engine/layout.py",
        "_clamp(self.stop - at, size)",
        "_clamp(self.stop - at - 1, size)",
        "tests/fsdp/engine/test_layout.py",
    ),
    BrokenLine(
        "collectives: the divisor is forgotten",
        "megatron/fsdp/engine/collectives.py",
        "            result.div_(divisor)\n",
        "            pass\n",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "collectives: the divisor of an average",
        "megatron/fsdp/engine/collectives.py",
        "divisor = self.divisor / (self.inner_size * self.outer_size)",
        "divisor = self.divisor / self.inner_size",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "point to point: additions in another order",
        "megatron/fsdp/backends/gloo_messages.py",
        "            for other in order[1:]:\n",
        "            for other in reversed(order[1:]):\n",
        "tests/fsdp/backends/test_gloo_messages.py",
    ),
    BrokenLine(
        "point to point: a gather in place is gloo's own",
        "megatron/fsdp/backends/gloo_messages.py",
        "full.untyped_storage()._cdata == shard.untyped_storage()._cdata",
        "full is shard",
        "tests/fsdp/backends/test_gloo_messages.py",
    ),
    BrokenLine(
        "collectives: buffers of several dtypes are gathered as they are",
        "megatron/fsdp/engine/collectives.py",
        "_all_gather_single(full.view(torch.uint8), shard.view(torch.uint8), group=group)",
        "_all_gather_single(full, shard, group=group)",
        "tests/fsdp/backends/test_gloo_messages.py",
    ),
    BrokenLine(
        "weights: every group is gathered alone",
        "megatron/fsdp/engine/param_group.py",
        "by_ranks[group.has_all_shards, group.communicator.gather_groups].append(group)",
        "by_ranks[group].append(group)",
        "tests/fsdp/test_gathering_together.py",
    ),
    BrokenLine(
        "gradients: a second backward overwrites",
        "megatron/fsdp/engine/gradients.py",
        "torch._foreach_add_(targets, grads)",
        "torch._foreach_copy_(targets, grads)",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "gradients: the outer axis is not reduced",
        "megatron/fsdp/engine/gradients.py",
        "if over_outer and is_hybrid:",
        "if over_outer and self._partition.num_outer > 1:",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "gradients: stale values where nothing was used",
        "megatron/fsdp/engine/gradients.py",
        "            self._local.flat.zero_()\n",
        "            pass\n",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "gradients: local ones appear in reduced ones",
        "megatron/fsdp/engine/gradients.py",
        "        return dtype, None if has_reduced else self._grad_sum\n",
        "        return dtype, self._grad_sum\n",
        "tests/fsdp/engine/test_local_gradients.py",
    ),
    BrokenLine(
        "gradients: zeros that are shown are not reduced gradients",
        "megatron/fsdp/engine/gradients.py",
        "            self._grad_sum.add(total)  # in place: even zeros are reduced gradients now\n",
        "            pass\n",
        "tests/fsdp/engine/test_local_gradients.py",
    ),
    BrokenLine(
        "gradients: local ones are lost when the reduced ones are shown",
        "megatron/fsdp/engine/gradients.py",
        "            buffer.flat.copy_(self._local.flat)\n",
        "            pass\n",
        "tests/fsdp/engine/test_local_gradients.py",
    ),
    BrokenLine(
        "weights: a step is not gathered",
        "megatron/fsdp/engine/param_group.py",
        "        if self.state is WeightState.UNSHARDED and not is_in_place:\n",
        "        if self.state is WeightState.UNSHARDED and self.reshards_after_use:\n",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "weights: nothing is freed at level 3",
        "megatron/fsdp/engine/param_group.py",
        "                self.compute.free()\n",
        "                pass\n",
        "tests/fsdp/test_memory.py",
    ),
    BrokenLine(
        "prefetch: nothing is prefetched in backward",
        "megatron/fsdp/engine/schedule.py",
        "            backward=order[:1] + order[:0:-1],\n",
        "            backward=[],\n",
        "tests/fsdp/test_communication.py",
    ),
    BrokenLine(
        "prefetch: a unit that is called again at once is resharded in between",
        "megatron/fsdp/engine/schedule.py",
        "is_kept = unit in self._upcoming or unit in self._kept_for_backward()",
        "is_kept = unit in self._kept_for_backward()",
        "tests/fsdp/test_collectives_per_step.py",
    ),
    BrokenLine(
        "prefetch: units that stay for their backward are resharded by the next one's call",
        "megatron/fsdp/engine/schedule.py",
        "wanted = [*self._upcoming, *self._kept_for_backward()]",
        "wanted = self._upcoming",
        "tests/fsdp/test_collectives_per_step.py",
    ),
    BrokenLine(
        "prefetch: a prefetched unit does not make room in its memory slot",
        "megatron/fsdp/engine/schedule.py",
        "self.reshard_idle({self._unit_of[buffer] for buffer in unit.blockers})",
        "pass",
        "tests/fsdp/test_double_buffer.py",
    ),
    BrokenLine(
        "memory slots: buffers that are in use together share a slot",
        "megatron/fsdp/backends/memory_slots.py",
        "if buffer.num_bytes <= slot.num_bytes and slot not in taken:",
        "if buffer.num_bytes <= slot.num_bytes:",
        "tests/fsdp/backends/test_memory_slots.py tests/fsdp/test_double_buffer.py",
    ),
    BrokenLine(
        "memory slots: parameters stay where they were",
        "megatron/fsdp/engine/param_group.py",
        "FlatBuffer(*stored, memory.device, name, storage, self._point_parameters)\n",
        "FlatBuffer(*stored, memory.device, name, storage)\n",
        "tests/fsdp/test_double_buffer.py",
    ),
    BrokenLine(
        "memory slots: a rank that has not used a group allocates nothing",
        "megatron/fsdp/engine/gradients.py",
        "        if arrived or self._written or self._storage.is_assigned_ahead:\n",
        "        if arrived or self._written:\n",
        "tests/fsdp/test_double_buffer.py",
    ),
    BrokenLine(
        "hooks: calls over a shared input do not end when an earlier one begins",
        "megatron/fsdp/engine/hooks.py",
        "                self._post_backward(later)\n",
        "                pass\n",
        "tests/fsdp/test_collectives_per_step.py",
    ),
    BrokenLine(
        "hooks: the base of a view is not watched",
        "megatron/fsdp/engine/hooks.py",
        "                base.grad_fn.register_prehook(pre_backward_of_node)\n",
        "                pass\n",
        "tests/fsdp/test_gradients.py",
    ),
    BrokenLine(
        "unit: recomputation is not noticed",
        "megatron/fsdp/engine/unit.py",
        "            self.change_state(BackwardState.RECOMPUTED)\n",
        "            self.change_state(BackwardState.RUNNING)\n",
        "tests/fsdp/engine",
    ),
    BrokenLine(
        "weights: edited ones are not installed",
        "megatron/fsdp/engine/param_group.py",
        "        if self.main_state is not MainState.HELD:\n            self._make_due()\n",
        "        pass\n",
        "tests/fsdp/dtensor/test_operations.py",
    ),
    BrokenLine(
        "operations: a write to a gathered view is lost",
        "megatron/fsdp/dtensor/operations.py",
        "            local.copy_(part.of(whole).view(local.shape))\n",
        "            pass\n",
        "tests/fsdp/dtensor/test_operations.py",
    ),
    BrokenLine(
        "operations: a write to a tensor that torch has divided is lost",
        "megatron/fsdp/dtensor/operations.py",
        "            local.copy_(replicated.",
        "            str(replicated.",
        "tests/fsdp/dtensor/test_operations.py",
    ),
    BrokenLine(
        "norms: copies are counted",
        "megatron/fsdp/dtensor/sharded_param.py",
        "        copies = result.new_tensor(list(map(_copies_of, norm_groups)))\n",
        "        copies = 1\n",
        "tests/fsdp/test_clipping.py",
    ),
    BrokenLine(
        "weights: what a step installs is lost if the next one installs nothing",
        "megatron/fsdp/engine/param_group.py",
        "            self._cast()\n        if self._casts_at_unshard and",
        "            pass\n        if self._casts_at_unshard and",
        "tests/fsdp/engine/test_param_group.py",
    ),
    BrokenLine(
        "flat update: the counters of parameters stand still",
        "megatron/fsdp/optimizer/flat_update.py",
        "                counters.copy_to_members()\n",
        "                pass\n",
        "tests/fsdp/optimizer/test_flat_update.py",
    ),
    BrokenLine(
        "flat segments: parameters with different counters are one segment",
        "megatron/fsdp/optimizer/flat_segments.py",
        "(member.has_grad, member.counts)",
        "member.has_grad",
        "tests/fsdp/optimizer/test_flat_update.py",
    ),
    BrokenLine(
        "gradients: the next step writes to those that code has kept",
        "megatron/fsdp/engine/buffer.py",
        "            self._total = self._views = None\n",
        "            pass\n",
        "tests/fsdp/test_kept_gradients.py",
    ),
    BrokenLine(
        "gradient sync: ranks do not agree on which parameters are used",
        "megatron/fsdp/gradient_sync.py",
        "        all_reduce_over(table, groups, dist.ReduceOp.MAX)\n",
        "",
        "tests/fsdp/test_public_clients.py",
    ),
    BrokenLine(
        "hooks: a sharded parameter that is assigned is stored",
        "megatron/fsdp/module_access/shown_parameters.py",
        "value if value is None else self._compute.get(value, value)",
        "value",
        "tests/fsdp/test_public_clients.py",
    ),
    BrokenLine(
        "module loading: loaded weights are not installed",
        "megatron/fsdp/module_access/model_state.py",
        "            group.install_main_weights()\n",
        "            pass\n",
        "tests/fsdp/test_public_clients.py",
    ),
    BrokenLine(
        "chunks: the offset of a tensor-parallel slice",
        "megatron/fsdp/dtensor/tensor_part.py",
        "at[dim] + start",
        "at[dim]",
        "tests/fsdp/dtensor tests/fsdp/test_tensor_parallel.py",
    ),
    BrokenLine(
        "adapter: experts lie on the dense mesh",
        "megatron/mcore_adapter/axes.py",
        'expert = _mesh(device_type, tensor_of_experts, groups["intra_expt_dp_group"], outer)',
        'expert = _mesh(device_type, tensor_of_experts, groups["intra_dp_cp_group"], outer)',
        "tests/mcore_adapter tests/pretrain/test_parity.py",
    ),
    BrokenLine(
        "adapter: layers are numbered in each stage",
        "megatron/mcore_adapter/global_names.py",
        "name = str(layer_number - 1)",
        "name = str(int(name))",
        "tests/mcore_adapter/test_global_names.py",
    ),
    BrokenLine(
        "adapter: the norm of one instance",
        "megatron/mcore_adapter/core_optimizers.py",
        "getattr(wrapper, GROUP) if hasattr(wrapper, GROUP) else _original_group(optimizer)\n",
        "_original_group(optimizer)\n",
        "tests/mcore_adapter",
    ),
    BrokenLine(
        "adapter: a fused product is lost",
        "megatron/mcore_adapter/fused_gradients.py",
        "                total.add_(other)\n",
        "                pass\n",
        "tests/mcore_adapter/test_fused_gradients.py",
    ),
    BrokenLine(
        "adapter: a product that waits for another use of its weight is reduced early",
        "megatron/fsdp/engine/gradients.py",
        "                view.zero_()\n",
        "                pass\n",
        "tests/mcore_adapter/test_fused_gradients.py",
    ),
    BrokenLine(
        "adapter: an optimizer step is not installed",
        "megatron/mcore_adapter/data_parallel.py",
        "self.install_optimized_model_weights(only_trainable=True)",
        "pass",
        "tests/mcore_adapter tests/pretrain/test_parity.py",
    ),
    BrokenLine(
        "key rules: a weight is split along another dim",
        "megatron/checkpoint/core/key_rules.py",
        'ParameterRule("self_attention.linear_proj", ("hidden", "attention_width"), 1)',
        'ParameterRule("self_attention.linear_proj", ("hidden", "attention_width"), 0)',
        "tests/checkpoint",
    ),
    BrokenLine(
        "converter: a contradicting main weight counts",
        "megatron/checkpoint/torch_dist/exact_weights.py",
        "return not is_same",
        "return False",
        "tests/checkpoint/test_round_trips.py tests/checkpoint/commands/test_verification.py",
    ),
    BrokenLine(
        "converter: keys and values change places",
        "megatron/checkpoint/hugging_face/family.py",
        "view(heads, 3, width).transpose(0, 1)",
        "view(3, heads, width).transpose(0, 1)",
        "tests/checkpoint/hugging_face",
    ),
    BrokenLine(
        "converter: up before gate",
        "megatron/checkpoint/hugging_face/family.py",
        "tensor.rows(0, tensor.num_rows // 2),\n        tensor.rows(tensor.num_rows // 2,",
        "tensor.rows(tensor.num_rows // 2, tensor.num_rows),\n        tensor.rows(0,",
        "tests/checkpoint/hugging_face",
    ),
]


def first_failure(root: Path, tests: str) -> str | None:
    """Run the tests of the copy until one fails; return its name, None where all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not exhaustive", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return found.group(1) if found else f"pytest ended with {done.returncode}"


def main(words: list[str]) -> int:
    """Try every break whose name contains one of the words; all without words."""
    chosen = [line for line in BROKEN_LINES if not words or any(w in line.name for w in words)]
    unnoticed = 0
    with tempfile.TemporaryDirectory(prefix="broken_lines_") as directory:
        root = Path(directory, "repository")
        shutil.copytree(REPOSITORY, root, ignore=LEFT_OUT)
        for line in chosen:
            line.apply(root)
            noticed = first_failure(root, line.tests) or first_failure(root, "")
            line.undo(root)
            unnoticed += noticed is None
            print(f"{line.name}: {noticed or 'NOT NOTICED'}", flush=True)
    print(f"{len(chosen) - unnoticed} of {len(chosen)} broken lines were noticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
