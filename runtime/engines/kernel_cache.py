"""The kernels that TensorRT-RTX compiles for the GPU at hand: compiled once for all engines, and kept for the next start.

NVIDIA's word for it is runtime cache. It checks by itself that a file fits the GPU, the driver and its own version.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class KernelCache:
    """One for all engines of a bundle, written after runs that compiled kernels, and when nobody uses it any more.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._file = _File(path)
        self._cache: Any = None
        self._grown = False

    def attach(self, config: Any) -> None:
        """Let contexts of this runtime configuration (TensorRT-RTX's) take kernels from here, and leave theirs."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            self._file.read_into(self._cache)
            weakref.finalize(self, self._file.write, self._cache)
        if not config.set_runtime_cache(self._cache):
            logger.warning("TensorRT-RTX takes no kernels from %s: each start compiles its own", self._file.path)
        self.expect_more()

    def expect_more(self) -> None:
        """A context of this cache runs shapes that it has not run before, for which kernels may be compiled."""
        self._grown = self._cache is not None  # the package tensorrt has none

    def keep(self) -> None:
        """Write what was compiled since: a service is ended by a signal, and writes nothing then."""
        if self._grown:
            self._grown = False
            self._file.write(self._cache)


class _File:
    """What the next start takes its kernels from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = b""

    def read_into(self, cache: Any) -> None:
        try:
            self._known = self.path.read_bytes()
        except OSError:  # most often, because it is not there yet
            return
        if not cache.deserialize(self._known):
            logger.info("%s does not fit this machine, and will be written anew", self.path)
            self._known = b""

    def write(self, cache: Any) -> None:
        kernels = bytes(cache.serialize())
        if kernels == self._known:
            return
        partial = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")  # containers share process ids
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(kernels)
            partial.replace(self.path)
            self._known = kernels
        except OSError as error:  # the next start compiles again, that is all
            with contextlib.suppress(OSError):
                partial.unlink()
            logger.warning("compiled kernels were not kept: %s", error)
