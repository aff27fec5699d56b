"""skipdecode: run bundles of precompiled engines that skip layers by position (SkipDecode, arXiv 2307.02628).

Example:
    import skipdecode

    model = skipdecode.load("engines/")
    print(model.generate("Hello", max_new_tokens=32).sequences[0].text)
"""

from skipdecode.errors import (
    BundleError,
    CapacityError,
    ModelNotSupportedError,
    ScheduleError,
    SkipDecodeError,
    TargetError,
)
from skipdecode.generate import Generator, load
from skipdecode.generation import Generation, Row, Step, Timings
from skipdecode.sampling import Sampling
from skipdecode.schedule import Anchor, Schedule, full_depth
from skipdecode.schedule_builders import ScheduleRequest, build_schedule
from skipdecode.trace import Trace

__all__ = [
    "Anchor",
    "BundleError",
    "CapacityError",
    "Generation",
    "Generator",
    "ModelNotSupportedError",
    "Row",
    "Sampling",
    "Schedule",
    "ScheduleError",
    "ScheduleRequest",
    "SkipDecodeError",
    "Step",
    "TargetError",
    "Timings",
    "Trace",
    "build_schedule",
    "full_depth",
    "load",
]
