# SPDX-License-Identifier: Apache-2.0
"""Parameters, gradients and chunks as optimizers and checkpoints see them: DTensors."""
