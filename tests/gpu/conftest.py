"""Every test here needs a GPU. Without one it is skipped, naming what is missing."""

from __future__ import annotations

import pytest

from skipdecode.cuda import CudaDevice
from skipdecode.engines.ort import prepare_cuda
from skipdecode.errors import TargetError


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    try:
        CudaDevice()
    except TargetError as error:
        pytest.skip(str(error))
    import torch  # noqa: F401  ONNX Runtime finds torch's CUDA libraries


@pytest.fixture(scope="session")
def provider(gpu: None) -> None:
    """ONNX Runtime's CUDA provider."""
    try:
        prepare_cuda()
    except TargetError as error:
        pytest.skip(str(error))
