"""Services: replicas of an actor class behind one name, which are replaced when they die and share the requests."""

from typing import TYPE_CHECKING

from skipper.control.api.service import ReplicaMetrics, ReplicaState, ServiceOptions, ServiceTemplate
from skipper.control.services.methods import SessionMethod

if TYPE_CHECKING:
    from skipper.control.api.views import Service, ServiceMethod, Session
else:
    from skipper.control.services.methods import ServiceMethod
    from skipper.control.services.service import Service, Session

__all__ = [
    "ReplicaMetrics",
    "ReplicaState",
    "Service",
    "ServiceMethod",
    "ServiceOptions",
    "ServiceTemplate",
    "Session",
    "SessionMethod",
]
