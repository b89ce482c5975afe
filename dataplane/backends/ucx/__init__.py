"""The backend on UCX, by our own binding of libucp.

    backend      what the process knows of it
    peer         an owner: short and large copies, atomic operations
    transfer     compiled batches
    run          one operation from its submission to its end
    connections  to one owner, one per client worker
    engine       the library, its workers and registered memory
    client       a worker for what this process initiates
    card         what a handle says for UCX (packed, segments: its parts)
    admission    the handshake that opens an owner's TCP port (admission_server: the owner's side)
    _ucp         the binding, in Cython

Each imports only those below it.
"""
