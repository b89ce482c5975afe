"""A thin binding of libucp: contexts, workers, endpoints, remote keys, and batches that run without the GIL.

Two rules hold throughout. No call that can block or copy holds the GIL. And an object of a process is not touched by
its forked child: UCX does not survive a fork, so there a destructor frees nothing.

The classes refer to each other in one direction only (batch, key, endpoint, worker, context), and stay out of cyclic
garbage collection, which would clear those references before the destructors that need them.

A `Batch` is the unit of work: epoch words, data, (flush,) epoch words again, as one state machine in C. Whoever drives
it calls `step` through `Batch.advance` or `Worker.drive`; one thread at a time per batch, any thread per worker.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free
from libc.string cimport memset

from dataplane.backends.ucp_api cimport *

cdef extern from "rows.h" nogil:
    ctypedef struct skipper_row:
        int64_t local
        int64_t remote
        int64_t run
        int64_t key
        int64_t ndim
    ctypedef struct skipper_cursor:
        const skipper_row *rows
        int64_t end
    int SKIPPER_ROW_WORDS
    int skipper_cursor_next(skipper_cursor *at, int64_t limit, int64_t *local, int64_t *remote, int64_t *nbytes,
                            int64_t *key)

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long nfds, int timeout)
    short POLLIN

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *now)

cdef extern from "unistd.h" nogil:
    int getpid()

cdef extern from *:
    """
    #define skipper_get(at)      __atomic_load_n((at), __ATOMIC_ACQUIRE)
    #define skipper_set(at, v)   __atomic_store_n((at), (v), __ATOMIC_RELEASE)
    #define skipper_add(at, v)   __atomic_add_fetch((at), (v), __ATOMIC_ACQ_REL)
    /* A word that guards data: read after what was read before, and before what is read after. */
    static inline uint64_t skipper_load(uint64_t at)
    {
        uint64_t found;
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        found = __atomic_load_n((uint64_t *)at, __ATOMIC_SEQ_CST);
        __atomic_thread_fence(__ATOMIC_SEQ_CST);
        return found;
    }
    /* Keeps the first error only. */
    static inline void skipper_first_error(int *at, int status)
    {
        int none = 0;
        __atomic_compare_exchange_n(at, &none, status, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
    }
    """
    uint64_t skipper_load(uint64_t at) nogil
    int skipper_get(int *at) nogil
    void skipper_set(int *at, int value) nogil
    int skipper_add(int *at, int value) nogil
    void skipper_first_error(int *at, int status) nogil

FINISHED = 0
RUNNING = 1
CHANGED = 2
CANCELED = UCS_ERR_CANCELED

# The endpoint as shared with callbacks, which may run after the Python object is gone.
cdef struct endpoint_t:
    pthread_mutex_t lock  # between posting and closing
    ucp_ep_h handle  # NULL once closed
    int failed  # status that the error callback reported
    int references


class UcxError(Exception):
    """A call of UCX that failed."""

    def __init__(self, call, status):
        super().__init__(f"{call}: {status_text(status)}")
        self.status = status


def status_text(int status):
    """UCX's own words for a status."""
    return ucs_status_string(<ucs_status_t>status).decode()


def library_version():
    """(major, minor, release) of the libucp that was loaded."""
    cdef unsigned major, minor, release
    ucp_get_version(&major, &minor, &release)
    return major, minor, release


def set_global_option(str name, str value):
    """Set an option of the library itself, such as LOG_LEVEL."""
    check("ucs_global_opts_set_value", ucs_global_opts_set_value(name.encode(), value.encode()))


cdef int check(str call, ucs_status_t status) except -1:
    if status < 0:
        raise UcxError(call, status)
    return 0


cdef inline double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef class Context:
    """ucp_context_h: one library instance with its options."""

    cdef ucp_context_h handle
    cdef int pid

    def __cinit__(self, dict options):
        cdef ucp_config_t *config
        cdef ucp_params_t params
        cdef unsigned major, minor, release
        cdef ucs_status_t status
        self.pid = getpid()
        check("ucp_config_read", ucp_config_read(NULL, NULL, &config))
        try:
            for name, value in options.items():
                check(f"option {name}={value}", ucp_config_modify(config, name.encode(), value.encode()))
            memset(&params, 0, sizeof(params))
            params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED
            params.features = UCP_FEATURE_RMA | UCP_FEATURE_WAKEUP
            params.mt_workers_shared = 1
            # The version of the library that runs, not of the headers: an older one refuses to be newer.
            ucp_get_version(&major, &minor, &release)
            with nogil:
                status = ucp_init_version(major, minor, &params, config, &self.handle)
            check("ucp_init", status)
        finally:
            ucp_config_release(config)

    def memory_types(self):
        """Bit mask of the ucs_memory_type_t that this instance can move."""
        cdef ucp_context_attr_t attr
        memset(&attr, 0, sizeof(attr))
        attr.field_mask = UCP_ATTR_FIELD_MEMORY_TYPES
        check("ucp_context_query", ucp_context_query(self.handle, &attr))
        return attr.memory_types


@cython.no_gc
cdef class MemoryHandle:
    """ucp_mem_h: registered memory, and the packed key that a peer needs."""

    cdef ucp_mem_h handle
    cdef Context context
    cdef readonly bytes key

    def __cinit__(self, Context context, uintptr_t address, size_t nbytes, int memory_type):
        cdef ucp_mem_map_params_t params
        cdef ucs_status_t status
        cdef void *packed
        cdef size_t length
        self.context = context
        memset(&params, 0, sizeof(params))
        params.field_mask = (UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                             | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE)
        params.address = <void *>address
        params.length = nbytes
        params.memory_type = <ucs_memory_type_t>memory_type
        with nogil:
            status = ucp_mem_map(context.handle, &params, &self.handle)
        check("ucp_mem_map", status)
        check("ucp_rkey_pack", ucp_rkey_pack(context.handle, self.handle, &packed, &length))
        self.key = (<char *>packed)[:length]
        ucp_rkey_buffer_release(packed)

    def __dealloc__(self):
        if self.handle != NULL and self.context.handle != NULL and self.context.pid == getpid():
            ucp_mem_unmap(self.context.handle, self.handle)


@cython.no_gc
cdef class Worker:
    """ucp_worker_h: a set of connections with one event file descriptor."""

    cdef ucp_worker_h handle
    cdef Context context
    cdef int efd
    cdef int asleep  # a driver may be in poll()
    cdef int woken
    cdef int stopping

    def __cinit__(self, Context context):
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

    def address(self):
        """What a peer needs to connect."""
        cdef ucp_address_t *packed
        cdef size_t length
        check("ucp_worker_get_address", ucp_worker_get_address(self.handle, &packed, &length))
        try:
            return (<char *>packed)[:length]
        finally:
            ucp_worker_release_address(self.handle, packed)

    def serve(self):
        """Progress this worker for its peers, asleep while nothing happens, until `stop`."""
        cdef ucs_status_t status = UCS_OK
        with nogil:
            while not skipper_get(&self.stopping) and status >= 0:
                while ucp_worker_progress(self.handle) != 0:
                    pass
                status = ucp_worker_wait(self.handle)
        check("ucp_worker_wait", status)

    def stop(self):
        """End `serve`. From any thread."""
        skipper_set(&self.stopping, 1)
        ucp_worker_signal(self.handle)

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
cdef class Endpoint:
    """ucp_ep_h: a connection to the worker of one peer, with peer error handling."""

    cdef endpoint_t *state
    cdef readonly Worker worker

    def __cinit__(self, Worker worker, bytes address):
        cdef ucp_ep_params_t params
        cdef ucs_status_t status
        cdef const char *raw = address
        cdef ucp_ep_h handle
        self.worker = worker
        self.state = <endpoint_t *>calloc(1, sizeof(endpoint_t))
        if self.state == NULL:
            raise MemoryError
        pthread_mutex_init(&self.state.lock, NULL)
        self.state.references = 1
        memset(&params, 0, sizeof(params))
        params.field_mask = (UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                             | UCP_EP_PARAM_FIELD_ERR_HANDLER)
        params.address = <const ucp_address_t *>raw
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER
        params.err_handler.cb = on_error
        params.err_handler.arg = self.state
        with nogil:
            status = ucp_ep_create(worker.handle, &params, &handle)
        check("ucp_ep_create", status)
        self.state.handle = handle
        self.state.references = 2  # this object, and UCX until the endpoint is closed

    @property
    def usable(self):
        """Whether nothing has failed on it and it is not closed."""
        return self.state.handle != NULL and skipper_get(&self.state.failed) == 0

    @property
    def failed(self):
        """The status that broke it, or 0."""
        return skipper_get(&self.state.failed)

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
    cdef readonly Endpoint endpoint

    def __cinit__(self, Endpoint endpoint, bytes packed):
        cdef const char *raw = packed
        cdef ucs_status_t status = UCS_ERR_CONNECTION_RESET
        self.endpoint = endpoint
        with nogil:
            pthread_mutex_lock(&endpoint.state.lock)
            if endpoint.state.handle != NULL:
                status = ucp_ep_rkey_unpack(endpoint.state.handle, raw, &self.handle)
            pthread_mutex_unlock(&endpoint.state.lock)
        check("ucp_ep_rkey_unpack", status)

    def __dealloc__(self):
        if self.handle != NULL and self.endpoint.worker.handle != NULL and self.endpoint.worker.context.pid == getpid():
            ucp_rkey_destroy(self.handle)


include "_ucp_batch.pxi"
