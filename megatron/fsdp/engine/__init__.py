# SPDX-License-Identifier: Apache-2.0
"""The algorithm of fully sharded data parallelism. Each file uses only files before it.

policy, states, planner, layout, mesh, tensor_parallel, device, observe, collectives, buffer,
gradients, param_group, unit, unit_choice, schedule, hooks. Begin with the notes of ``states``.
"""
