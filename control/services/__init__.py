"""Services: replicas of an actor class behind one name, which are replaced when they die and share the requests."""

from typing import TYPE_CHECKING

from control.services.methods import ServiceMethod, SessionMethod
from control.services.metrics import ReplicaMetrics
from control.services.options import ServiceOptions, ServiceTemplate
from control.services.table import ReplicaState

if TYPE_CHECKING:
    from control.views import Service, Session
else:
    from control.services.service import Service, Session

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
