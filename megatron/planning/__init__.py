# SPDX-License-Identifier: Apache-2.0
"""Plans: the time and memory of a training step on a machine, and the settings that fit."""
