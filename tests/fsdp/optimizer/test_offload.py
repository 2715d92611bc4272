# SPDX-License-Identifier: Apache-2.0
"""Main weights, gradients and optimizer state in host memory or files train as on the device."""

import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from megatron.fsdp import Memory, MixedPrecisionPolicy, Offload, clip_grad_norm_
from megatron.fsdp.backends.host_memory import HostMemory
from megatron.fsdp.optimizer import block_update, flat_segments, host_state
from megatron_fsdp import fully_shard, fully_shard_model, fully_shard_optimizer
from tests.support.fsdp import models
from tests.support.fsdp.meshes import Meshes
from tests.support.fsdp.offloaded import sums_as_on_a_gpu
from tests.support.fsdp.optimizers import ONE_OF_EACH, OPTIMIZERS
from tests.support.fsdp.reference import Ranks, batch, loss_of, on_ranks
from tests.support.fsdp.state_dicts import load_checkpoint

Make = Callable[..., torch.optim.Optimizer]


class Trained(NamedTuple):
    """The results of a training on this rank."""

    losses: list[float]
    norms: list[float]
    weights: list[Tensor]  # the local parts
    state: dict[str, Any]
    model: nn.Module


def sharded(
    offload: Any, mesh: str = "flat", dtype: torch.dtype = torch.float32, **settings: Any
) -> nn.Module:
    torch.manual_seed(3)
    return fully_shard_model(
        models.Stack().to(dtype),
        fsdp_unit_modules=models.Stack.units,
        offload_policy=offload,
        **Meshes().arguments(mesh),
        **settings,
    )


def run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int = 3,
    clip: Callable[..., Tensor] = clip_grad_norm_,
    dtype: torch.dtype = torch.float32,
) -> Trained:
    """Train with two microbatches a step, in blocks that end inside of parameters."""
    losses, norms = [], []
    for step in range(steps):
        for microbatch in range(2):
            loss = loss_of(model(batch(step, dist.get_rank(), microbatch).to(dtype)))
            loss.backward()
            losses.append(loss.item())
        norms.append(clip(model.parameters(), 0.1).item())
        with mock.patch.object(block_update, "BLOCK_BYTES", 512):
            optimizer.step()
        optimizer.zero_grad()
    weights = [each.to_local().clone() for each in model.parameters()]
    return Trained(losses, norms, weights, optimizer.state_dict(), model)


def train(offload: Any, make: Make, dtype: torch.dtype = torch.float32, **more: Any) -> Trained:
    """Shard a model, and train it with an optimizer over its parameters."""
    how = {name: more.pop(name) for name in ("steps", "clip") if name in more}
    model = sharded(offload, dtype=dtype, **more)
    optimizer = fully_shard_optimizer(make(model.parameters()))
    return run(model, optimizer, dtype=dtype, **how)


def assert_equal(actual: Trained, expected: Trained) -> None:
    assert actual.losses == expected.losses
    assert actual.norms == expected.norms
    for one, other in zip(actual.weights, expected.weights, strict=True):
        assert torch.equal(one, other)
    states = actual.state["state"], expected.state["state"]
    for own, wanted in zip(states[0].values(), states[1].values(), strict=True):
        assert own.keys() == wanted.keys()
        for name, value in wanted.items():
            pair = own[name], value
            if hasattr(value, "to_local"):
                pair = own[name].to_local(), value.to_local()
            assert torch.equal(*map(torch.as_tensor, pair)), name


def lies_in_a_file(tensor: Tensor) -> bool:
    return tensor.untyped_storage().filename is not None


def compare(folder: str, make: Make, **settings: Any) -> None:
    """Compare training with offload to the host and to files with training on the device."""
    expected = train(None, make, **settings)
    for place in ("host", folder):
        actual = train(place, make, **settings)
        assert_equal(actual, expected)
        for group in actual.model.groups:
            assert lies_in_a_file(group.main_shard) is (place == folder)
            assert lies_in_a_file(group.gradients.shard) is (place == folder)
    assert not os.listdir(folder)


PLACES: dict[str, tuple[int, dict[str, Any]]] = {
    **{f"level{level}": (2, {"zero_dp_strategy": level}) for level in (0, 2, 3)},
    "hybrid optim": (4, {"mesh": "outer2", "outer_dp_sharding_strategy": 1}),
    "bfloat16": (2, {"dtype": torch.bfloat16}),
    "bfloat16 gradients": (
        2,
        {
            "dtype": torch.bfloat16,
            "mixed_precision_policy": MixedPrecisionPolicy(
                torch.float32, torch.bfloat16, torch.float32
            ),
        },
    ),
    "bfloat16 weights": (
        2,
        {"dtype": torch.bfloat16, "mixed_precision_policy": MixedPrecisionPolicy(None)},
    ),
    "slots": (2, {"fsdp_double_buffer": True}),
    "no_sync": (2, {"sync_model_each_microbatch": False, "zero_dp_strategy": 1}),
    "torch's clipping": (2, {"clip": nn.utils.clip_grad_norm_}),
}


def test_pinned_memory_is_no_larger_than_its_tensors_and_is_unlocked_with_them() -> None:
    cuda = mock.Mock(cudaHostRegister=mock.Mock(return_value=0))
    memory = HostMemory(torch.device("cuda"), Offload())
    with (
        mock.patch.object(torch.cuda, "cudart", return_value=cuda),
        mock.patch.object(torch.cuda, "check_error"),
        mock.patch.object(torch.cuda, "device"),
        mock.patch.object(torch.cuda, "synchronize") as waited,
    ):
        tensor = memory.empty((1 << 20) + 3, torch.float32)
        address = tensor.data_ptr()
        cuda.cudaHostRegister.assert_called_once_with(address, tensor.nbytes, 0)
        assert tensor.untyped_storage().nbytes() == tensor.nbytes and not tensor.any()
        view = tensor[4:]
        del tensor
        cuda.cudaHostUnregister.assert_not_called()
        waited.assert_not_called()
        del view
        waited.assert_called_once_with(memory.device)  # for copies under way
        cuda.cudaHostUnregister.assert_called_once_with(address)


def compare_sums_of_gpus(folder: str, **settings: Any) -> None:
    with sums_as_on_a_gpu():
        compare(folder, OPTIMIZERS["adamw"], **settings)


@pytest.mark.parametrize("place", ["level0", "level3", "hybrid optim", "bfloat16 gradients"])
def test_sums_that_a_gpu_adds_to_have_the_same_bits(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    size, settings = PLACES[place]
    ranks(size, compare_sums_of_gpus, str(tmp_path), **settings)


@pytest.mark.always("level3", "bfloat16 gradients", "slots", "no_sync")
@pytest.mark.parametrize("place", PLACES)
def test_training_has_the_bits_of_one_on_the_device(
    ranks: Ranks, tmp_path: Path, place: str
) -> None:
    size, settings = PLACES[place]
    ranks(size, compare, str(tmp_path), OPTIMIZERS["adamw"], **settings)


SOME = ("adamw_fused", "adamw_tensor_rate", "sgd", "adagrad", "nadam", "rprop")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "names", [SOME, tuple(name for name in ONE_OF_EACH if name not in SOME)], ids=["some", "others"]
)
@on_ranks(2)
def test_every_element_wise_optimizer_steps_in_blocks(names: Sequence[str]) -> None:
    """Train with one optimizer after the other, and compare with the device each time."""
    of_device, of_host = sharded(None), sharded("host")
    for name in names:
        expected, actual = (
            run(model, fully_shard_optimizer(OPTIMIZERS[name](model.parameters())))
            for model in (of_device, of_host)
        )
        try:
            assert_equal(actual, expected)
        except AssertionError as error:
            error.add_note(f"with {name}")
            raise


@pytest.mark.always("0.4")
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
@on_ranks(2)
def test_a_fraction_of_the_elements_is_offloaded(fraction: float) -> None:
    trained = train(Offload(fraction=fraction), OPTIMIZERS["adamw"])
    assert_equal(trained, train(None, OPTIMIZERS["adamw"]))
    groups = trained.model.groups
    total = sum(group.layout.numel for group in groups)
    away = [group.layout.numel for group in groups if group.memory.is_offloaded]
    assert fraction * total <= sum(away) < fraction * total + (max(away) if away else 1)


def losses_with_old_weights(offload: Any) -> list[float]:
    torch.manual_seed(3)
    module = models.Stack()
    optimizer = OPTIMIZERS["adamw"](module.parameters())
    model, optimizer = fully_shard(
        module, optimizer, fsdp_unit_modules=models.Stack.units, offload_policy=offload
    )
    losses = []
    for step in range(3):
        loss = loss_of(model(batch(step, dist.get_rank(), 0).float()))
        loss.backward()
        optimizer.step(install_optimized_model_weights=False)
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_steps_that_install_no_weights_are_those_on_the_device() -> None:
    expected = losses_with_old_weights(None)
    for offload in ("host", Offload(fraction=0.5)):
        assert losses_with_old_weights(offload) == expected


# ---- checkpoints


def resume(folder: str, checkpoint: str) -> None:
    """Save with state in files, and go on with it there, and on the device."""
    make, whole = OPTIMIZERS["adamw"], train(None, OPTIMIZERS["adamw"], steps=4)
    saved = train(folder, make, steps=2)
    state = {"model": saved.model.state_dict(), "optimizer": saved.state}
    dcp.save(state, checkpoint_id=checkpoint)
    for place in (folder, None):
        other = train(place, make, steps=1)
        optimizer = other_optimizer(other.model)
        load_checkpoint(checkpoint, other.model, optimizer)
        for step in (2, 3):
            for microbatch in range(2):
                data = batch(step, dist.get_rank(), microbatch).float()
                loss_of(other.model(data)).backward()
            clip_grad_norm_(other.model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        for parameter, expected in zip(other.model.parameters(), whole.weights, strict=True):
            assert torch.equal(parameter.to_local(), expected)
            moment = optimizer.state[parameter]["exp_avg"].to_local()
            assert not moment.numel() or lies_in_a_file(moment) is (place == folder)


def other_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return fully_shard_optimizer(OPTIMIZERS["adamw"](model.parameters()))


@pytest.mark.exhaustive
def test_a_checkpoint_loads_into_files_and_onto_the_device(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    ranks(2, resume, str(tmp_path / "files"), str(tmp_path / "checkpoint"))


# ---- memory


def test_moments_that_lie_in_one_tensor_are_not_copied() -> None:
    memory = HostMemory(torch.device("cpu"), Offload())
    whole = memory.empty(8, torch.float32).copy_(torch.arange(8))
    flat = host_state.flat_moment(memory, [(0, whole[1:4]), (3, whole[4:6])], 5)
    assert flat.data_ptr() == whole[1:].data_ptr()


@on_ranks(2)
def test_state_that_is_loaded_takes_no_memory_on_its_way_to_the_files(tmp_path: Path) -> None:
    trained = train(tmp_path, OPTIMIZERS["adamw"])
    optimizer = fully_shard_optimizer(OPTIMIZERS["adamw"](trained.model.parameters()))
    loaded: list[Tensor] = []

    def flat_moment(memory: Any, places: Any, numel: int) -> Tensor:
        loaded.extend(value for _, value in places if value.numel())
        return host_state.flat_moment(memory, places, numel)

    with mock.patch.object(flat_segments, "flat_moment", flat_moment):
        optimizer.load_state_dict(trained.state)
    assert loaded and all(map(lies_in_a_file, loaded))


def resident() -> int:
    with open("/proc/self/status") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("RssFile")) * 1024


def highest_resident(folder: str, width: int, layers: int) -> int:
    """Train; return the most bytes of files that are resident, above those before."""
    torch.manual_seed(0)
    before, seen = resident(), list[int]()
    module = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    model, optimizer = fully_shard(
        module, optimizer, fsdp_unit_modules=[nn.Linear], offload_policy=folder
    )
    optimizer.register_step_pre_hook(lambda *_: seen.append(resident()))
    for _ in range(3):
        loss = model(torch.randn(4, width)).sum()
        seen.append(resident())
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        seen.append(resident())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(resident())
    return max(seen) - before


@pytest.mark.exhaustive
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="Linux tells what is resident")
@on_ranks(2)
def test_files_take_memory_only_while_they_are_in_use(tmp_path: Path) -> None:
    width, layers = 512, 24
    highest_resident(tmp_path, 8, 2)  # pages of libraries come with the first use
    own = 16 * layers * width**2 // dist.get_world_size()
    assert highest_resident(tmp_path, width, layers) < own / 8


# ---- the interface


def test_policies_of_fsdp2_and_short_forms_mean_offload() -> None:
    assert Memory().offload is None
    assert Memory(offload=OffloadPolicy()).offload is None
    assert Memory(offload=CPUOffloadPolicy(pin_memory=False)).offload == Offload(pins=False)
    assert Memory(offload="host").offload == Offload()
    assert Memory(offload=Path("somewhere")).offload == Offload(to=Path("somewhere"))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "fraction": ({"fraction": 1.5}, "Offload.fraction expects a number from 0 to 1 but got 1.5"),
    "flag as fraction": ({"fraction": True}, "Offload.fraction expects a number from 0 to 1"),
    "place": ({"to": 3}, "Offload.to expects 'host' or a folder but got 3"),
    "flag": ({"on_device": "yes"}, "Offload.on_device expects True or False but got 'yes'"),
}


def test_wrong_settings_are_refused() -> None:
    for arguments, message in BAD.values():
        with pytest.raises(ValueError, match=message):
            Offload(**arguments)


def test_graphs_hold_no_offload() -> None:
    with pytest.raises(ValueError, match=r"Memory\.holds_addresses is for graphs"):
        Memory(offload="host", holds_addresses=True)


def refuse(folder: str, make: Make, message: str, fails_on: int | None, gigabytes: float) -> None:
    """Refuse on all ranks, whichever has the problem, and change nothing."""
    module = models.build_stack()
    before = [parameter.clone() for parameter in module.parameters()]
    free = gigabytes if fails_on in (None, dist.get_rank()) else 1e6
    refused = pytest.raises((ValueError, NotImplementedError), match=message)
    with scarce_disk(free), refused:
        fully_shard(
            module,
            make(module.parameters()),
            fsdp_unit_modules=models.Stack.units,
            offload_policy=folder,
        )
    assert all(map(torch.equal, module.parameters(), before))


@contextmanager
def scarce_disk(gigabytes: float) -> Any:
    original = shutil.disk_usage
    shutil.disk_usage = lambda folder: original(folder)._replace(free=int(gigabytes * 1e9))
    try:
        yield
    finally:
        shutil.disk_usage = original


@pytest.mark.parametrize(
    ("name", "message", "fails_on", "gigabytes"),
    [
        ("absent", "cannot map a file there .* name a folder on a local disk", None, 1e6),
        (".", "GB free, but the ranks of this machine need", 1, 1e-9),
    ],
)
def test_a_folder_that_does_not_do_is_refused_by_all_ranks(
    ranks: Ranks, tmp_path: Path, name: str, message: str, fails_on: int | None, gigabytes: float
) -> None:
    ranks(2, refuse, str(tmp_path / name), OPTIMIZERS["adamw"], message, fails_on, gigabytes)


def muon_over_matrices(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([each for each in parameters if each.ndim == 2])


def refuse_later(folder: str) -> None:
    model = fully_shard_model(models.build_stack(), offload_policy=folder)
    with pytest.raises(NotImplementedError, match="Muon keeps its state in memory of its own"):
        fully_shard_optimizer(muon_over_matrices(model.parameters()))


def test_state_that_would_not_lie_in_the_files_is_refused(ranks: Ranks, tmp_path: Path) -> None:
    message = "Muon keeps its state in memory of its own"
    ranks(2, refuse, str(tmp_path), muon_over_matrices, message, None, 1e6)
    ranks(2, refuse_later, str(tmp_path))


@on_ranks(2)
def test_matrices_in_host_memory_have_owners_too() -> None:
    assert_equal(train("host", muon_over_matrices), train(None, muon_over_matrices))
