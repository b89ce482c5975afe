"""Part of `_ucp.pyx`: workers, and what belongs to a connection of one of them."""

cdef enum:
    MOST_LANES = 64  # UCX has some 16 per connection
    # What an owner does before it sleeps, and how long that is at most. A transport that was rung is left out of what
    # UCX arms and watches until a progress finds no ring there any more, and nobody is told: where somebody rings all
    # the time the owner has to look again soon.
    LOOKS = 16
    NAP_MS = 1000
    NAP_WHEN_RUNG_MS = 1
    PADDING = 64 << 10  # as much as UCX can take for a key, or a device's part of an address, whatever it has read so far

# The endpoint as shared with callbacks, which may run after the Python object is gone.
cdef struct endpoint_t:
    pthread_mutex_t lock  # between posting and closing
    ucp_ep_h handle  # NULL once closed
    int failed  # status that the error callback reported
    uint64_t number  # by which the owner knows what was sent over it
    int references


@cython.no_gc
cdef class UcpWorker:
    """ucp_worker_h: a set of connections with one event file descriptor."""

    cdef ucp_worker_h handle
    cdef UcpContext context
    cdef int efd
    cdef int asleep  # a driver may be in poll()
    cdef int woken
    cdef int stopping
    cdef int retired
    cdef desk_t *desk

    def __cinit__(self, UcpContext context):
        cdef ucp_worker_params_t params
        cdef ucs_status_t status
        self.context = context
        memset(&params, 0, sizeof(params))
        params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE
        params.thread_mode = UCS_THREAD_MODE_MULTI
        with nogil:
            status = ucp_worker_create(context.handle, &params, &self.handle)
        check("ucp_worker_create", status)
        check("ucp_worker_get_efd", ucp_worker_get_efd(self.handle, &self.efd))
        self.desk = <desk_t *>calloc(1, sizeof(desk_t))
        if self.desk == NULL:
            raise MemoryError
        pthread_mutex_init(&self.desk.lock, NULL)
        self.desk.gather = datatype(parcel_nbytes, pack_parcel)
        self.desk.reply = datatype(reply_nbytes, pack_reply)
        self._receive(ANSWER, on_answer)
        self._receive(BYTES, on_data)

    def address(self):
        """What a peer needs to connect."""
        cdef ucp_address_t *packed
        cdef size_t length
        check("ucp_worker_get_address", ucp_worker_get_address(self.handle, &packed, &length))
        try:
            return (<char *>packed)[:length]
        finally:
            ucp_worker_release_address(self.handle, packed)

    def answer(self, Exports exports):
        """Carry out what peers ask for by messages, whenever this worker is progressed; on those buffers only."""
        self.desk.exports = exports.state
        self._receive(ASK_ATOMIC, on_atomic)
        self._receive(ASK_READ, on_read)
        self._receive(ASK_WRITE, on_write)
        self._receive(FORGET, on_forget)

    cdef int _receive(self, unsigned message, ucp_am_recv_callback_t callback) except -1:
        cdef ucp_am_handler_param_t params
        memset(&params, 0, sizeof(params))
        params.field_mask = (UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB
                             | UCP_AM_HANDLER_PARAM_FIELD_ARG)
        params.id = message
        params.cb = callback
        params.arg = self.desk
        return check("ucp_worker_set_am_recv_handler", ucp_worker_set_am_recv_handler(self.handle, &params))

    def serve(self):
        """Progress this worker for its peers, asleep while nothing happens, until `stop`."""
        cdef ucs_status_t status = UCS_OK
        cdef unsigned heard
        cdef int idle
        with nogil:
            while not skipper_get(&self.stopping) and (status == UCS_OK or status == UCS_ERR_BUSY):
                heard = skipper_rings_heard()
                idle = 0
                while idle < LOOKS:
                    idle = 0 if ucp_worker_progress(self.handle) != 0 else idle + 1
                status = ucp_worker_arm(self.handle)
                if status == UCS_OK:
                    await_event(self.efd, NAP_MS if skipper_rings_heard() == heard else NAP_WHEN_RUNG_MS)
        if status != UCS_ERR_BUSY:
            check("ucp_worker_arm", status)

    def stop(self):
        """End `serve`. From any thread."""
        skipper_set(&self.stopping, 1)
        ucp_worker_signal(self.handle)

    def retire(self):
        """Let UCX's worker be destroyed with this object; else it stays until the process ends."""
        self.retired = 1

    def __dealloc__(self):
        # Endpoints and batches refer to their worker, so that nobody is inside of it any more.
        if self.retired and self.handle != NULL and self.context.pid == getpid():
            with nogil:
                ucp_worker_destroy(self.handle)
            pthread_mutex_destroy(&self.desk.lock)
            free(self.desk)

    def wake(self):
        """End `drive` now, or the next one at once. From any thread."""
        skipper_set(&self.woken, 1)
        ucp_worker_signal(self.handle)

    def drive(self, list batches, double deadline):
        """Run batches until at least one is over, `wake` is called, or CLOCK_MONOTONIC reaches `deadline`.

        Returns:
            The batches that are over.
        """
        cdef Py_ssize_t count = len(batches)
        cdef batch_t **running = <batch_t **>calloc(max(count, 1), sizeof(batch_t *))
        cdef Py_ssize_t i
        cdef Batch batch
        if running == NULL:
            raise MemoryError
        try:
            for i in range(count):
                batch = batches[i]
                running[i] = &batch.state
            with nogil:
                drive(self, running, count, deadline)
        finally:
            free(running)
        return [batch for batch in batches if batch.state.result != RUNNING_]


cdef inline int unusable(endpoint_t *endpoint) noexcept nogil:
    """Why nothing can be posted, or 0; the lock is held."""
    return UCS_ERR_CANCELED if endpoint.handle == NULL else skipper_get(&endpoint.failed)


cdef void release_endpoint(endpoint_t *endpoint) noexcept nogil:
    if skipper_add(&endpoint.references, -1) == 0:
        pthread_mutex_destroy(&endpoint.lock)
        free(endpoint)


cdef void on_error(void *arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil:
    skipper_first_error(&(<endpoint_t *>arg).failed, status)


cdef void on_closed(void *request, ucs_status_t status, void *arg) noexcept nogil:
    ucp_request_free(request)
    release_endpoint(<endpoint_t *>arg)


@cython.final
@cython.no_gc
cdef class UcpEndpoint:
    """ucp_ep_h: a connection to the worker of one peer, with peer error handling."""

    cdef endpoint_t *state
    cdef readonly UcpWorker worker
    cdef readonly tuple transports

    def __cinit__(self, UcpWorker worker, bytes address, uint64_t number):
        cdef ucp_ep_params_t params
        cdef ucs_status_t status
        cdef char *raw
        cdef ucp_ep_h handle
        self.worker = worker
        self.state = <endpoint_t *>calloc(1, sizeof(endpoint_t))
        if self.state == NULL:
            raise MemoryError
        pthread_mutex_init(&self.state.lock, NULL)
        self.state.references = 1
        self.state.number = number
        memset(&params, 0, sizeof(params))
        params.field_mask = (UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                             | UCP_EP_PARAM_FIELD_ERR_HANDLER)
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER
        params.err_handler.cb = on_error
        params.err_handler.arg = self.state
        raw = padded(address)
        params.address = <const ucp_address_t *>raw
        with nogil:
            status = ucp_ep_create(worker.handle, &params, &handle)
        free(raw)
        check("ucp_ep_create", status)
        self.state.handle = handle
        self.state.references = 2  # this object, and UCX until the endpoint is closed
        self.transports = transports_of(handle)

    @property
    def usable(self):
        """Whether nothing has failed on it and it is not closed."""
        return self.state.handle != NULL and skipper_get(&self.state.failed) == 0

    @property
    def failed(self):
        """The status that broke it, or 0."""
        return skipper_get(&self.state.failed)

    @property
    def number(self):
        """As given."""
        return self.state.number

    def forget(self, list numbers):
        """Have the owner ignore what was sent over the connections with these numbers and has not arrived yet.

        That holds before anything that is sent over this one from now on.
        """
        cdef size_t nbytes = len(numbers) * sizeof(uint64_t)
        cdef uint64_t *kept = <uint64_t *>malloc(nbytes)
        cdef ucp_request_param_t param
        if kept == NULL:
            raise MemoryError
        for i, number in enumerate(numbers):
            kept[i] = number
        memset(&param, 0, sizeof(param))
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
        with nogil:
            pthread_mutex_lock(&self.state.lock)
            if unusable(self.state) == 0:
                send_back(self.state.handle, FORGET, kept, kept, nbytes, NULL, 0, &param)
            else:
                free(kept)
            pthread_mutex_unlock(&self.state.lock)

    def close(self):
        """Close without waiting for the peer: whatever is in flight completes as cancelled. Idempotent."""
        with nogil:  # another thread may hold the worker for the length of a copy
            close_endpoint(self.state, self.worker.handle)

    def __dealloc__(self):
        if self.state == NULL or self.worker.context.pid != getpid():
            return
        if self.worker.handle != NULL:
            close_endpoint(self.state, self.worker.handle)
        release_endpoint(self.state)


cdef char *padded(bytes packed) except NULL:
    """A copy with zeros behind it: UCX is not told where it ends, and reads what it takes to be there."""
    cdef size_t length = len(packed)
    cdef char *copy = <char *>calloc(1, length + PADDING)
    if copy == NULL:
        raise MemoryError
    memcpy(copy, <const char *>packed, length)
    return copy


cdef tuple transports_of(ucp_ep_h handle):
    """The names of the transports that a connection may use; none where this UCX does not tell."""
    cdef ucp_transport_entry_t entries[MOST_LANES]
    cdef ucp_ep_attr_t attr
    cdef unsigned i
    memset(&attr, 0, sizeof(attr))
    memset(entries, 0, sizeof(entries))
    attr.field_mask = UCP_EP_ATTR_FIELD_TRANSPORTS
    attr.transports.entries = entries
    attr.transports.num_entries = MOST_LANES
    attr.transports.entry_size = sizeof(ucp_transport_entry_t)
    if ucp_ep_query(handle, &attr) != UCS_OK:
        return ()
    # A library that does not know the field leaves the entries as they are.
    names = [entries[i].transport_name for i in range(min(attr.transports.num_entries, <unsigned>MOST_LANES))
             if entries[i].transport_name != NULL]
    return tuple([name.decode() for name in names])


cdef void close_endpoint(endpoint_t *endpoint, ucp_worker_h worker) noexcept nogil:
    cdef ucp_request_param_t param
    cdef ucs_status_ptr_t request
    cdef ucp_ep_h handle
    pthread_mutex_lock(&endpoint.lock)
    handle = endpoint.handle
    endpoint.handle = NULL
    pthread_mutex_unlock(&endpoint.lock)
    if handle == NULL or worker == NULL:
        return
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS | UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    param.flags = UCP_EP_CLOSE_FLAG_FORCE
    param.cb.send = on_closed
    param.user_data = endpoint
    request = ucp_ep_close_nbx(handle, &param)
    if request == NULL or UCS_PTR_IS_ERR(request):
        release_endpoint(endpoint)


@cython.final
@cython.no_gc
cdef class RemoteKey:
    """ucp_rkey_h: a peer's registration as one endpoint reaches it."""

    cdef ucp_rkey_h handle
    cdef readonly UcpEndpoint endpoint

    def __cinit__(self, UcpEndpoint endpoint, bytes packed):
        cdef char *raw = padded(packed)
        cdef ucs_status_t status = UCS_ERR_CONNECTION_RESET
        self.endpoint = endpoint
        with nogil:
            pthread_mutex_lock(&endpoint.state.lock)
            if endpoint.state.handle != NULL:
                status = ucp_ep_rkey_unpack(endpoint.state.handle, raw, &self.handle)
            pthread_mutex_unlock(&endpoint.state.lock)
        free(raw)
        check("ucp_ep_rkey_unpack", status)

    def __dealloc__(self):
        if self.handle != NULL and self.endpoint.worker.handle != NULL and self.endpoint.worker.context.pid == getpid():
            ucp_rkey_destroy(self.handle)
