# SPDX-License-Identifier: Apache-2.0
"""The algorithm of fully sharded data parallelism. Each file uses only files above it in this list.

    policy        the sharding strategy, the precision, and the overlap of communication
    microbatches  the backward passes of a step, and which of them synchronise gradients
    states        the states of weights and units: begin with [Note: the life of a unit]
    planner       the order and the starts of parameters in a flat buffer that is cut into shards
    layout        which rank owns which elements of which parameter
    axes          the mesh axes of a parameter
    mesh_checks   checks of the meshes, axis names and process groups that a user passes
    mesh          the mesh of a sharded model
    device        streams, events and storage
    collectives   all-gather, reduce-scatter, all-reduce, and the division of gradients
    buffer        flat buffers and running sums
    local_tensor  the local parts of parameters that are DTensors already
    partition     the shards of a group, and the shard of this rank
    local_gradients  this rank's sum of gradients since the last reduction
    gradients     accumulating and reducing the gradients of a group
    param_group   unsharding and resharding the weights of a group
    unit          the groups of a module, and the calls that use them
    units         the choice of units, and the assignment of parameters to them
    reductions    the reductions under way
    prefetch      all-gathers ahead of use, in the recorded order
    schedule      when units are unsharded, resharded and reduced
    hooks         the hooks on modules, tensors and parameters that drive the schedule

The algorithm itself is in the last nine, from ``local_gradients`` on.
"""
