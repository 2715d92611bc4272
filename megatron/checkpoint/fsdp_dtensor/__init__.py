# SPDX-License-Identifier: Apache-2.0
"""Format fsdp_dtensor of runs with FSDP.

``keys`` explains its keys, ``dtensor_reader`` reads and ``dtensor_writer`` writes it.
"""
