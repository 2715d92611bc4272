# SPDX-License-Identifier: Apache-2.0
"""Names of optimizers on command lines."""

MUON = ("muon", "dist_muon")
