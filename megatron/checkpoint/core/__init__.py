# SPDX-License-Identifier: Apache-2.0
"""What every checkpoint format shares."""
