"""A thin binding of libucp: contexts, workers, endpoints, remote keys, and batches that run without the GIL.

Two rules hold throughout. No call that can block or copy holds the GIL. And an object of a process is not touched by
its forked child: UCX does not survive a fork, so there a destructor frees nothing.

The classes refer to each other in one direction only (batch, key, endpoint, worker, context), and stay out of cyclic
garbage collection, which would clear those references before the destructors that need them.

A `Batch` is the unit of work: epoch words, data, (flush,) epoch words again, as one state machine in C. Whoever drives
it calls `step` through `Batch.advance` or `UcpWorker.drive`; one thread at a time per batch, any thread per worker.
Several batches on several workers may share one list of rows, of which each takes what it can carry.

This file has the context and its memory; included are what peers may reach of it, the connections, the state machine,
messages for what UCX cannot do by itself, and the batches.
"""

cimport cython
from libc.stdint cimport int64_t, uint64_t, uintptr_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcpy, memset

from skipper.dataplane.backends.ucx.ucp_api cimport *

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
    int SKIPPER_STREAM_RUN
    int skipper_can_stream()
    void skipper_stream_run(char *dst, const char *src, size_t nbytes)
    void skipper_fence()

cdef extern from "backends/ucx/ucp_guard.h":
    int SKIPPER_GUARD_IN_PLACE
    int SKIPPER_GUARD_NOT_NEEDED
    int skipper_guard()
    int skipper_guard_bells()
    unsigned skipper_rings_heard() nogil

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int CLOCK_MONOTONIC
    int clock_gettime(int clock, timespec *now)

cdef extern from "poll.h" nogil:
    struct pollfd:
        int fd
        short events
        short revents
    int poll(pollfd *fds, unsigned long nfds, int timeout)
    short POLLIN

cdef extern from "unistd.h" nogil:
    int getpid()

cdef extern from *:
    """
    /* In one order for all threads: one says that it sleeps and then looks whether there is something, while another
     * says that there is something and then looks who sleeps. On the processors that we know, only a store costs more. */
    #define skipper_get(at)      __atomic_load_n((at), __ATOMIC_SEQ_CST)
    #define skipper_set(at, v)   __atomic_store_n((at), (v), __ATOMIC_SEQ_CST)
    #define skipper_add(at, v)   __atomic_add_fetch((at), (v), __ATOMIC_SEQ_CST)
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
NOT_ALLOWED = 3
CANCELED = UCS_ERR_CANCELED


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


def guard():
    """See that a reader that is gone before its request to connect is answered does not end this process.

    To be called before anything else is; see `ucp_guard.h`. Returns whether it is seen to, None for a UCX of another
    version than that which has the fault.
    """
    cdef int state = skipper_guard()
    return None if state == SKIPPER_GUARD_NOT_NEEDED else state == SKIPPER_GUARD_IN_PLACE


def guard_bells():
    """See that a datagram without a byte, to a socket by which workers within a host wake each other, ends no process.

    To be called before there is a worker; see `ucp_guard.h`. Returns whether it is seen to.
    """
    return skipper_guard_bells() == SKIPPER_GUARD_IN_PLACE


def set_global_option(str name, str value):
    """Set an option of the library itself, such as LOG_LEVEL."""
    check("ucs_global_opts_set_value", ucs_global_opts_set_value(name.encode(), value.encode()))


def taken(dict options):
    """The names of those options that the library knows and whose values it accepts, as far as it checks at once."""
    cdef ucp_config_t *config
    check("ucp_config_read", ucp_config_read(NULL, NULL, &config))
    try:
        return {
            name
            for name, value in options.items()
            if ucp_config_modify(config, name.encode(), value.encode()) == UCS_OK
        }
    finally:
        ucp_config_release(config)


cdef int check(str call, ucs_status_t status) except -1:
    if status < 0:
        raise UcxError(call, status)
    return 0


cdef inline double now() noexcept nogil:
    cdef timespec t
    clock_gettime(CLOCK_MONOTONIC, &t)
    return t.tv_sec + 1e-9 * t.tv_nsec


cdef class UcpContext:
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
            params.features = UCP_FEATURE_RMA | UCP_FEATURE_AM | UCP_FEATURE_WAKEUP
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
    cdef UcpContext context
    cdef readonly bytes key

    def __cinit__(self, UcpContext context, uintptr_t address, size_t nbytes, int memory_type):
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


include "_ucp_exports.pxi"
include "_ucp_connection.pxi"
include "_ucp_steps.pxi"
include "_ucp_messages.pxi"
include "_ucp_batch.pxi"
