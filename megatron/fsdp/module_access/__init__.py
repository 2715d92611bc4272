# SPDX-License-Identifier: Apache-2.0
"""Access to a sharded module between its forwards."""
