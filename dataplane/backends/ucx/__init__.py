"""The backend on UCX, with its own binding of libucp.

    backend      the interface to the process
    peer         an owner: short and large copies, compiled batches, atomic operations
    run          one operation from its submission to its end
    connections  to one owner, one per client worker
    engine       the library, its workers with their threads, registered memory
    card         the UCX part of a handle
    admission    the handshake that opens an owner's TCP port
    _ucp         the binding, in Cython

Each imports only those below it.
"""
