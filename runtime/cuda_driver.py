"""NVIDIA's driver through cuda-python: which GPU is there, and what the driver's answers mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skipdecode.errors import CapacityError, TargetError

MEMORY_REMEDY = "send fewer rows, shorter prompts, or export with a smaller --max-length"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU's properties."""

    name: str
    capability: str  # sm89
    memory_bytes: int


def gpu_at_hand() -> Gpu:
    """The GPU that `CudaDevice` uses, without creating a context on it.

    Raises:
        TargetError: as `first_gpu`.
    """
    driver, device = first_gpu()
    name = checked(driver, driver.cuDeviceGetName(256, device)).decode().rstrip("\0")
    memory = checked(driver, driver.cuDeviceTotalMem(device))
    return Gpu(name=name, capability=capability_of(driver, device), memory_bytes=int(memory))


def first_gpu() -> tuple[Any, Any]:
    """cuda-python's driver, and the handle of the first GPU that this process sees.

    Raises:
        TargetError: cuda-python, the driver or a GPU is missing.
    """
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise TargetError("needs the Python package cuda-bindings", "pip install cuda-bindings", where="--target") from error
    try:
        code = driver.cuInit(0)[0]
    except RuntimeError as error:  # cuda-python's, if there is no libcuda.so.1
        raise TargetError("there is no NVIDIA driver here", "choose a machine with a GPU, or another --target") from error
    if code != driver.CUresult.CUDA_SUCCESS:
        raise TargetError(f"the NVIDIA driver finds no GPU ({code.name})", "check nvidia-smi, or choose another --target")
    return driver, checked(driver, driver.cuDeviceGet(0))


def capability_of(driver: Any, device: Any) -> str:
    """A GPU's compute capability: sm89."""
    kinds = driver.CUdevice_attribute
    names = (kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)
    return "sm" + "".join(str(checked(driver, driver.cuDeviceGetAttribute(name, device))) for name in names)


def checked(driver: Any, answer: tuple[Any, ...]) -> Any:
    """What a driver call gave beside its status: the value, or a tuple of several.

    Raises:
        CapacityError: CUDA has no memory left.
        TargetError: the driver is too old for the call, or the call failed.
    """
    code, *values = answer
    if code == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise CapacityError("CUDA has no memory left for its own use", MEMORY_REMEDY)
    if code == driver.CUresult.CUDA_ERROR_UNSUPPORTED_PTX_VERSION:
        raise TargetError("the NVIDIA driver is older than CUDA 13", "install driver 580 or a later one")
    if code != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(code)
        reason = text.decode() if isinstance(text, bytes) else code.name
        raise TargetError(f"CUDA failed: {reason} ({code.name})", "check nvidia-smi, and start again")
    return values[0] if len(values) == 1 else tuple(values)
