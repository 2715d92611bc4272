# SPDX-License-Identifier: Apache-2.0
"""Messages of what operations on uneven DTensors refuse, with the remedies."""

NO_MEMORY = (
    "a sharded tensor has no memory that can be shared or replaced as a whole, since each rank has"
    " a part: use its full_tensor(), or to_local() for the part of this rank, and"
    " parameter.copy_(value) to write"
)
NO_GRADIENT = (
    "autograd does not go through operations on a sharded parameter outside of a forward, since"
    " gradients are those of the module's own parameters. Compute the term inside the forward of"
    " the module that owns the parameter (for a decay of weights use the optimizer's weight_decay)."
    " To look at values only, use parameter.detach() or torch.no_grad()"
)
LOST_WRITE = (
    "a view of a sharded tensor was gathered from all ranks, and what is written to it would be"
    " lost. Write to the tensor itself (parameter[index] = value, parameter.copy_(value)), or to"
    " parameter.to_local(), or clone() the view"
)
UNKNOWN_PART = (
    "the ranks do not know which part of this DTensor each of them has, so a whole result cannot"
    " be written back: assign the result of the operation on dtensor.full_tensor()"
)
