"""The kernels that TensorRT-RTX compiles for the GPU at hand: compiled once for all engines, and kept for the next start.

NVIDIA's word for it is runtime cache. It checks by itself that a file fits the GPU, the driver and its own version.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class KernelCache:
    """One for all engines of a bundle, written when nobody uses it any more.

    Args:
        path: of the file, which need not be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._cache: Any = None

    def attach(self, config: Any) -> None:
        """Let contexts of this runtime configuration (TensorRT-RTX's) take kernels from here, and leave theirs."""
        if self._cache is None:
            self._cache = config.create_runtime_cache()
            known = _read(self._path)
            if known and not self._cache.deserialize(known):
                logger.info("%s does not fit this machine, and will be written anew", self._path)
                known = b""
            weakref.finalize(self, _save, self._cache, known, self._path)
        if not config.set_runtime_cache(self._cache):
            logger.warning("TensorRT-RTX takes no kernels from %s: each start compiles its own", self._path)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # most often, because it is not there yet
        return b""


def _save(cache: Any, known: bytes, path: Path) -> None:
    kernels = bytes(cache.serialize())
    if kernels == known:
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(kernels)
        partial.replace(path)
    except OSError as error:  # the next start compiles again, that is all
        with contextlib.suppress(OSError):
            partial.unlink()
        logger.warning("compiled kernels were not kept: %s", error)
