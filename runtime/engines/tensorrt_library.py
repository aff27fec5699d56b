"""Finds TensorRT's Python packages, and polygraphy, which drives either of them."""

from __future__ import annotations

import importlib
import os
from typing import Any

from skipdecode.errors import TargetError

LIBRARIES = {"tensorrt-rtx": "tensorrt_rtx", "tensorrt": "tensorrt"}  # target -> Python package


def library(target: str) -> Any:
    """The Python package of a TensorRT target.

    Raises:
        TargetError: it is not installed, or its shared libraries cannot be loaded.
    """
    package = LIBRARIES[target]
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise missing_package_error(target, package) from error
    except (ImportError, OSError) as error:  # its shared libraries
        raise TargetError(f"{package} cannot be loaded ({error})", _remedy(target, package), where="--target") from error


def polygraphy(target: str, module: str) -> Any:
    """A module of polygraphy for a target's TensorRT library; its first import in a process decides which library that is.

    Raises:
        TargetError: polygraphy is not installed.
    """
    os.environ["POLYGRAPHY_USE_TENSORRT_RTX"] = str(int(target == "tensorrt-rtx"))
    try:
        logger = importlib.import_module("polygraphy.logger").G_LOGGER
    except ImportError as error:
        raise missing_package_error(target, "polygraphy") from error
    logger.module_severity = logger.CRITICAL + 1  # the caller reports what matters
    return importlib.import_module(f"polygraphy.{module}")


def missing_package_error(target: str, package: str) -> TargetError:
    """The error for a target without one of its Python packages."""
    return TargetError(f"target {target} needs the Python package {package}", _remedy(target, package), where="--target")


def _remedy(target: str, package: str) -> str:
    if target == "tensorrt-rtx":
        return "pip install 'skipdecode[tensorrt-rtx]'"
    return "docs/tensorrt.md says where to get it" if package == LIBRARIES[target] else f"pip install {package}"
