# SPDX-License-Identifier: Apache-2.0
"""Format fsdp_dtensor of runs with FSDP.

``keys`` explains its keys, ``reader`` reads and ``writer`` writes it. ``spelling_choice`` finds the
parameter names of the model that will load a checkpoint, for every format.
"""
