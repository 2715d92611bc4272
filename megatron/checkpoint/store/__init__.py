# SPDX-License-Identifier: Apache-2.0
"""Places of checkpoints: directories, and URLs of any store that fsspec knows."""
