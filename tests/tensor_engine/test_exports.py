from skipper import tensor_engine

EXPORTED = """
    Borrow BorrowedTensorError CheckpointTargetError CommunicationError CommunicationTimeoutError CompileError
    CompiledFunction DroppedTensorError EngineClosedError Fetched LocalTensorError MemberLostError MeshMismatchError
    MisuseError NoActiveMeshError NotPropagatableError OpaqueModule OpaqueObject OpaqueRef ReductionError RemoteError
    RemoteFunction RemoteProcessGroup RespawnedError RestoreError Stream StreamMismatchError Tensor TensorEngineError
    UnevenShardError UnreachableMembersError all_gather all_to_all call_on_shard_and_fetch compile fetch_shard
    get_active_mesh get_active_stream grad_function inspect no_mesh opaque_method place process_group random reduce
    reduce_ rejoin remote restore show shutdown slice_mesh to_mesh
"""


def test_the_package_exports_what_it_promises() -> None:
    assert sorted(tensor_engine.__all__) == EXPORTED.split()
    assert [name for name in tensor_engine.__all__ if not hasattr(tensor_engine, name)] == []
