"""Where the layers of `control` meet: what lies above says here, once in each process, what it does for those below."""

from __future__ import annotations

from typing import Any

from skipper.control.api.service import ServiceTemplate, starts_services


def connect() -> None:
    """Register everything; importing `skipper.control` calls this."""
    starts_services(_start_service)


def _start_service(
    template: ServiceTemplate[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
) -> Any:
    from skipper.control.services.service import start_service  # most processes have no services

    return start_service(template, args, kwargs, name)
