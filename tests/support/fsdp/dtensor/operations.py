# SPDX-License-Identifier: Apache-2.0
"""Operations of torch that sharded tensors and whole ones must agree on."""

import copy
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

Operation = Callable[[Tensor], Any]

ELEMENTWISE: dict[str, Operation] = {
    "abs": torch.abs,
    "add number": lambda t: t + 1.5,
    "add itself": lambda t: t + t,
    "add 0-d tensor": lambda t: t + torch.tensor(2.0),
    "addcmul": lambda t: torch.addcmul(t, t, t, value=0.5),
    "bfloat16": lambda t: t.bfloat16(),
    "clamp": lambda t: t.clamp(-0.1, 0.2),
    "clone": torch.clone,
    "cpu": lambda t: t.cpu(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "deepcopy": copy.deepcopy,
    "divide": lambda t: 1.0 / t,
    "double": lambda t: t.double(),
    "equal to number": lambda t: t == 0.25,
    "equal to itself": lambda t: t == t,
    "exp": torch.exp,
    "greater": lambda t: t > 0,
    "gelu": F.gelu,
    "isfinite": torch.isfinite,
    "isnan": torch.isnan,
    "lerp": lambda t: torch.lerp(t, t * 2, 0.25),
    "masked fill": lambda t: t.masked_fill(t < 0, 0.0),
    "maximum": lambda t: torch.maximum(t, -t),
    "multiply": lambda t: t * t,
    "negate": lambda t: -t,
    "ones like": torch.ones_like,
    "power": lambda t: t**3,
    "rand like": torch.rand_like,
    "randint like": lambda t: torch.randint_like(t, 7),
    "randn like": torch.randn_like,
    "bernoulli": lambda t: t.sigmoid().bernoulli(),
    "reciprocal square root": lambda t: (t * t + 1).rsqrt(),
    "round": torch.round,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "square root": lambda t: t.abs().sqrt(),
    "subtract": lambda t: 3 - t,
    "tanh": torch.tanh,
    "to dtype": lambda t: t.to(torch.float64),
    "type as": lambda t: t.type_as(torch.ones(1, dtype=torch.float64)),
    "view of own shape": lambda t: t.view(t.shape),
    "where": lambda t: torch.where(t > 0, t, -t),
    "zeros like": torch.zeros_like,
    "foreach multiply": lambda t: torch._foreach_mul([t, t], 2.0),
}
"""Operations whose results are sharded tensors."""

WHOLE: dict[str, Operation] = {
    "all": lambda t: (t > -9).all(),
    "allclose": lambda t: torch.allclose(t, t + 1e-9),
    "any": lambda t: (t > 0).any(),
    "amax": lambda t: t.amax(-1),
    "argmax": torch.argmax,
    "argsort": lambda t: t.argsort(-1),
    "bincount": lambda t: torch.bincount((t.abs() * 3).long().flatten()),
    "bool of sum": lambda t: bool(t.sum() > 0),
    "cat": lambda t: torch.cat([t, t]),
    "chunk": lambda t: t.chunk(2),
    "contains": lambda t: 0.25 in t,
    "cumsum": lambda t: t.cumsum(0),
    "count nonzero": torch.count_nonzero,
    "diagonal": lambda t: t.diagonal(),
    "dot": lambda t: t.flatten() @ t.flatten(),
    "einsum": lambda t: torch.einsum("i...,j...->ij", t, t),
    "equal": lambda t: torch.equal(t, t.clone()),
    "expand": lambda t: t.expand(2, *t.shape),
    "flatten": lambda t: t.flatten(),
    "flip": lambda t: t.flip(0),
    "float of mean": lambda t: float(t.mean()),
    "gather": lambda t: t.gather(0, torch.zeros_like(t, dtype=torch.long)),
    "histc": lambda t: t.float().histc(5),
    "index": lambda t: t[0],
    "index by list": lambda t: t[[0, -1]],
    "index by mask": lambda t: t[t > 0],
    "index from the end": lambda t: t[-1:],
    "index select": lambda t: t.index_select(0, torch.tensor([0])),
    "infinity norm": lambda t: t.norm(float("inf")),
    "item": lambda t: t.sum().item(),
    "iterate": lambda t: [row.sum() for row in t],
    "kthvalue": lambda t: t.flatten().kthvalue(1).values,
    "linear": lambda t: F.linear(torch.ones(2, t.shape[-1], dtype=t.dtype), t),
    "logsumexp": lambda t: t.logsumexp(-1),
    "max": lambda t: t.max(),
    "max of dim": lambda t: t.max(0),
    "mean": lambda t: t.mean(),
    "mean of dim": lambda t: t.mean(-1, keepdim=True),
    "median": lambda t: t.median(),
    "min": lambda t: t.min(),
    "matrix transposed": lambda t: t.mT,
    "movedim": lambda t: t.movedim(0, -1),
    "multiply by whole": lambda t: t * torch.arange(t.numel(), dtype=t.dtype).view(t.shape),
    "narrow": lambda t: t.narrow(0, 0, 1),
    "new zeros": lambda t: t.new_zeros(4),
    "nonzero": torch.nonzero,
    "norm": lambda t: t.norm(),
    "norm by torch": torch.norm,
    "norm into a tensor": lambda t: torch.norm(t, out=torch.empty(())),
    "norm of order 1": lambda t: torch.linalg.vector_norm(t, 1),
    "norm of dim": lambda t: t.norm(dim=0),
    "normalize": lambda t: F.normalize(t, dim=-1),
    "numpy": lambda t: t.numpy(),
    "numpy array": np.asarray,
    "pad": lambda t: F.pad(t, (1, 1)),
    "permute": lambda t: t.permute(*reversed(range(t.ndim))),
    "prod": torch.prod,
    "quantile": lambda t: t.double().quantile(0.5),
    "ravel": torch.ravel,
    "repeat": lambda t: t.repeat(2, *[1] * (t.ndim - 1)),
    "reshape": lambda t: t.reshape(-1),
    "roll": lambda t: t.roll(1, 0),
    "select": lambda t: t.select(0, -1),
    "softmax": lambda t: t.softmax(-1),
    "softmax of dim 0": lambda t: t.softmax(0),
    "sort": lambda t: t.sort(0),
    "sparse": lambda t: t.to_sparse().to_dense(),
    "split": lambda t: t.split(1),
    "squeeze": lambda t: t.squeeze(),
    "stack": lambda t: torch.stack([t, -t]),
    "std": lambda t: t.std(),
    "std and mean": torch.std_mean,
    "sum": lambda t: t.sum(),
    "sum of dim": lambda t: t.sum(0),
    "svd": lambda t: torch.linalg.svdvals(t),
    "take": lambda t: t.take(torch.tensor([0])),
    "tolist": lambda t: t.tolist(),
    "topk": lambda t: t.topk(1),
    "trace of product": lambda t: (t.T @ t).trace(),
    "transpose": lambda t: t.t(),
    "triu": torch.triu,
    "unbind": lambda t: t.unbind(),
    "unique": torch.unique,
    "unsqueeze": lambda t: t.unsqueeze(0),
    "var": lambda t: t.var(),
    "var of dim": lambda t: t.var(0),
    "view": lambda t: t.view(-1),
    "view as": lambda t: t.view_as(torch.empty(t.numel(), 1)),
    "foreach norm": lambda t: torch._foreach_norm([t, t * 2]),
    "saved and loaded view": lambda t: _saved(t.view(-1, 1)),
}
"""Operations whose results are plain, equal on all ranks."""

IN_PLACE: dict[str, Operation] = {
    "add_": lambda t: t.add_(1.0),
    "addcdiv_": lambda t: t.addcdiv_(t.clone(), t.clone() ** 2 + 1, value=0.1),
    "assign element": lambda t: t.__setitem__(-1, 5.0),
    "assign by mask": lambda t: t.__setitem__(t > 0, 0.0),
    "assign everything": lambda t: t.__setitem__(..., 2.0),
    "assign rows": lambda t: t.__setitem__(slice(0, 2), torch.ones_like(t[0:2])),
    "assign data": lambda t: setattr(t, "data", t.data * 0.5),
    "assign whole data": lambda t: setattr(t, "data", torch.full(t.shape, 7.0, dtype=t.dtype)),
    "clamp_": lambda t: t.clamp_(min=0.0),
    "copy_ of whole": lambda t: t.copy_(torch.arange(t.numel(), dtype=t.dtype).view(t.shape)),
    "copy_ of number": lambda t: t.copy_(torch.tensor(3.0)),
    "copy_ of sharded": lambda t: t.copy_(t * 2),
    "data mul_": lambda t: t.data.mul_(0.5),
    "exponential_": lambda t: t.exponential_(),
    "fill_": lambda t: t.fill_(4.0),
    "fill_diagonal_": lambda t: t.fill_diagonal_(9.0),
    "index_fill_": lambda t: t.index_fill_(0, torch.tensor([0]), 3.0),
    "inplace operator": lambda t: t.__imul__(3.0),
    "kaiming": lambda t: torch.nn.init.kaiming_uniform_(t),
    "lerp_": lambda t: t.lerp_(t * 3, 0.5),
    "masked_fill_": lambda t: t.masked_fill_(t < 0, 1.0),
    "normal_": lambda t: t.normal_(),
    "out": lambda t: torch.mul(t.clone(), 2.0, out=t),
    "out of a sum": lambda t: torch.cumsum(t.clone(), 0, out=t),
    "trunc normal": lambda t: torch.nn.init.trunc_normal_(t),
    "uniform_": lambda t: t.uniform_(),
    "zero_": lambda t: t.zero_(),
    "foreach add_": lambda t: torch._foreach_add_([t], [t * 2], alpha=0.5),
    "foreach lerp_": lambda t: torch._foreach_lerp_([t], [t * 2], 0.5),
    "foreach add_ of whole": lambda t: torch._foreach_add_([t, t], [_whole(t), _whole(t)]),
    "add_ of whole": lambda t: t.add_(_whole(t), alpha=0.5),
    "mul_ of a row": lambda t: t.mul_(torch.arange(t.shape[-1], dtype=t.dtype)),
    "mul_ of means of rows": lambda t: t.mul_(t.mean(-1, keepdim=True)),
    "write to a row": lambda t: t[0].zero_(),
    "write to a view": lambda t: t.view(-1).add_(1.0),
    "write to a view of a view": lambda t: t.flatten()[:1].fill_(0.0),
    "write to a detached view": lambda t: t.flatten().detach().mul_(2.0),
    "write to rows": lambda t: [row.mul_(2.0) for row in t],
    "write to the transposed": lambda t: t.t().div_(t.norm()),
    "write random numbers to a row": lambda t: t[0].normal_(),
    "write sharded values to a view": lambda t: t.view(-1)[: t.shape[0]].copy_(t[:, 0] * t.sum()),
    "write sharded values to a view of a view": lambda t: t.t().t().copy_(t * 2),
}
"""Operations that write to the tensor."""

REFUSED: dict[str, Operation] = {
    "write to NumPy": lambda t: t.numpy().fill(0.0),
    "write to a view of what has changed since": lambda t: _write_late(t, t.view(-1)),
    "apply a function": lambda t: t.apply_(lambda each: each + 1),
    "map a function": lambda t: t.map_(t.clone(), lambda left, right: left + right),
    "share by DLPack": torch.from_dlpack,
    "share between processes": lambda t: t.share_memory_(),
    "set": lambda t: t.set_(torch.zeros(5, 7)),
    "resize": lambda t: t.unsqueeze_(0),
    "data of another shape": lambda t: setattr(t, "data", torch.zeros(11, 13)),
}
"""Operations on views, memory and shapes that would be lost; views of replicated tensors work."""


def _whole(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the shape of another one."""
    return torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape)


def _write_late(tensor: Tensor, view: Tensor) -> None:
    tensor.mul_(1.0)
    view.add_(1.0)


def _saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)
