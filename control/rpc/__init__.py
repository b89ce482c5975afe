"""Names, namespaces, actor servers and their clients: actors that other jobs find and call."""

from skipper.control.api.namespaces import (
    JOB_ID_VARIABLE,
    NAMESPACE_VARIABLE,
    environment,
    job_id,
    namespace,
    use_namespace,
)
from skipper.control.rpc.actor_server import ActorServer
from skipper.control.rpc.gcs import GcsResolver
from skipper.control.rpc.metadata import MetadataMapping, MetadataResolver, MetadataServer
from skipper.control.rpc.remote_operation import RemoteOperation
from skipper.control.rpc.resolver import ChainResolver, FixedResolver, NameMapping, Resolver
from skipper.control.rpc.rpc_client import ActorHandle, RpcClient, RpcMethod, RpcOptions
from skipper.control.rpc.scope import is_cancelled, remaining_s
from skipper.control.rpc.urls import ServiceUrl
from skipper.control.wire.certificates import Tls

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
