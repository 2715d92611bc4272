# SPDX-License-Identifier: Apache-2.0
"""Run by Python when it starts: `typing.override` of Python 3.12, for a package that imports it."""

import typing

import typing_extensions

if not hasattr(typing, "override"):
    typing.override = typing_extensions.override
