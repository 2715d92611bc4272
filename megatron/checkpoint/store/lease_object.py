# SPDX-License-Identifier: Apache-2.0
"""The object at a URL by which a run keeps others out, as a store reads and writes it."""

from __future__ import annotations

from contextlib import suppress

from megatron.checkpoint.store.stores import Store, errors_of

LEASE = ".save_lease"
"""Name of the object."""


class LeasedStore(Store):
    """A store, and the object in it that says which run saves there.

    A thread makes its own: file systems are of threads, unless they are asynchronous.
    """

    def read_lease(self) -> bytes | None:
        """Return the content of the object; None if there is none.

        Raises:
            OSError: if the URL cannot be reached.
        """
        with errors_of(self.url):
            if not self._system.async_impl:  # those read objects past their lists of names
                self._system.invalidate_cache()
            try:
                return bytes(self._system.cat_file(self._remote(LEASE)))
            except FileNotFoundError:
                return None

    def write_lease(self, content: bytes) -> None:
        """Write the object.

        Raises:
            OSError: if it cannot be written.
        """
        with errors_of(self.url):
            self._write(LEASE, content)

    def remove_lease(self) -> None:
        """Remove the object, if it is there.

        Raises:
            OSError: if the URL cannot be reached.
        """
        with errors_of(self.url), suppress(FileNotFoundError):
            self._system.rm_file(self._remote(LEASE))
