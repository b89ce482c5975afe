"""Names, namespaces, actor servers and their clients: actors that are found and called from beyond their job."""

from control.namespaces import (
    JOB_ID_VARIABLE,
    NAMESPACE_VARIABLE,
    environment,
    job_id,
    namespace,
    use_namespace,
)
from control.naming.actor_server import ActorServer
from control.naming.gcs import GcsResolver
from control.naming.handles import ActorHandle
from control.naming.metadata import MetadataMapping, MetadataResolver, MetadataServer
from control.naming.remote_operation import RemoteOperation
from control.naming.resolver import ChainResolver, FixedResolver, NameMapping, Resolver
from control.naming.rpc_client import RpcClient, RpcMethod, RpcOptions
from control.naming.scope import is_cancelled, remaining_s
from control.naming.urls import ServiceUrl
from control.wire.tls import Tls

__all__ = [
    # from names to addresses
    "Resolver",
    "NameMapping",
    "FixedResolver",
    "ChainResolver",
    "GcsResolver",
    "MetadataServer",
    "MetadataResolver",
    "MetadataMapping",
    "ServiceUrl",
    # namespaces
    "namespace",
    "use_namespace",
    "environment",
    "job_id",
    "NAMESPACE_VARIABLE",
    "JOB_ID_VARIABLE",
    # serving and calling
    "ActorServer",
    "RpcClient",
    "RpcMethod",
    "RpcOptions",
    "RemoteOperation",
    "ActorHandle",
    "Tls",
    "remaining_s",
    "is_cancelled",
]
