"""The kernels that TensorRT-RTX compiles for the GPU at hand: compiled once for all engines, and kept for the next start.

NVIDIA calls this the runtime cache. TensorRT-RTX itself checks that a file fits the GPU, the driver and its own version.
"""

from __future__ import annotations

import logging
import weakref
from pathlib import Path
from typing import Any

from skipdecode.whole_file import replace_file

logger = logging.getLogger(__name__)


class KernelCache:
    """One cache for all engines of a bundle, written after runs that compiled kernels, and when it is no longer used.

    Args:
        path: the cache's file, which need not exist.
    """

    def __init__(self, path: Path) -> None:
        self._file = _KernelFile(path)
        self._cache: Any = None
        self._may_have_grown = False

    def attach(self, config: Any) -> None:
        """Let contexts with this runtime configuration (TensorRT-RTX's) take kernels from here and add theirs."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._file.read_into(self._cache)
            weakref.finalize(self, self._file.write, self._cache)
        if not config.set_runtime_cache(self._cache):
            logger.warning("TensorRT-RTX does not use the kernels in %s: each start compiles them again", self._file.path)
        self.expect_more()

    def expect_more(self) -> None:
        """Note that a context runs shapes that are new to it, for which kernels may be compiled."""
        self._may_have_grown = self._cache is not None  # None with the package tensorrt, which has no such cache

    def save(self) -> None:
        """Write the kernels compiled since the last call: a service that a signal ends does not get to write them."""
        if self._may_have_grown:
            self._may_have_grown = False
            self._file.write(self._cache)


class _KernelFile:
    """The file from which the next start takes its kernels."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._saved = b""

    def read_into(self, cache: Any) -> None:
        try:
            self._saved = self.path.read_bytes()
        except OSError:  # mostly because it does not exist yet
            return
        if not cache.deserialize(self._saved):
            logger.info("%s does not fit this machine and will be rewritten", self.path)
            self._saved = b""

    def write(self, cache: Any) -> None:
        kernels = bytes(cache.serialize())
        if kernels == self._saved:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, kernels)
            self._saved = kernels
        except OSError as error:  # the next start compiles again, that is all
            logger.warning("compiled kernels were not saved: %s", error)
