"""Services: replicas of an actor class behind one name, which are replaced when they die and share the requests."""

from control.services.methods import ServiceMethod, SessionMethod
from control.services.metrics import ReplicaMetrics
from control.services.options import ServiceOptions, ServiceTemplate
from control.services.service import Service, Session
from control.services.table import ReplicaState

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
