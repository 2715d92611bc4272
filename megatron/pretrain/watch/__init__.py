# SPDX-License-Identifier: Apache-2.0
"""The watch over a run: ranks that hang or fail, faulty hardware, and reasons to stop."""
