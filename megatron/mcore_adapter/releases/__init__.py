# SPDX-License-Identifier: Apache-2.0
"""Differences between releases of Megatron-Core, one module a concern.

The rest of the project is written for the newest release. A module here gives it the newest form of
one thing, and brings older releases to it: what to do is chosen by a name, a field or a parameter
that the installed release has, never by its number. `tested` alone knows numbers.
"""
