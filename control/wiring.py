"""Registers with the lower layers of `control` what the upper ones do for them; costly imports come later."""

from __future__ import annotations

from typing import Any

from skipper.control.api.service import ServiceTemplate, starts_services


def register() -> None:
    """Register everything; importing `skipper.control` calls this."""
    starts_services(_start_service)


def _start_service(
    template: ServiceTemplate[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str | None
) -> Any:
    from skipper.control.services.service import start_service  # most processes start no services

    return start_service(template, args, kwargs, name)
