"""Services: replicas of an actor class behind one name, which are replaced when they die and share the requests."""

from typing import TYPE_CHECKING

from skipper.control.services.methods import ServiceMethod, SessionMethod
from skipper.control.services.metrics import ReplicaMetrics
from skipper.control.services.options import ServiceOptions, ServiceTemplate
from skipper.control.services.table import ReplicaState

if TYPE_CHECKING:
    from skipper.control.api.views import Service, Session
else:
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
