# SPDX-License-Identifier: Apache-2.0
"""The data of a run: datasets, tokenizers, and the samples that each rank reads."""
