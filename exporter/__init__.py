"""From a Hugging Face checkpoint to a bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skipdecode.exporter.reference import skip_schedule

__all__ = ["skip_schedule"]


def __getattr__(name: str) -> Any:
    """Import `skip_schedule` on first access, since it imports torch."""
    if name != "skip_schedule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from skipdecode.exporter.packages import check_packages

    check_packages()
    from skipdecode.exporter.reference import skip_schedule

    return skip_schedule
