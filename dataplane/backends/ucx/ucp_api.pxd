"""The part of UCX's public C API (ucp/api/ucp.h) that `_ucp.pyx` uses."""

from libc.stdint cimport int64_t, uint64_t

cdef extern from "ucs/type/status.h" nogil:
    ctypedef int ucs_status_t
    ctypedef void *ucs_status_ptr_t
    const char *ucs_status_string(ucs_status_t status)
    bint UCS_PTR_IS_ERR(ucs_status_ptr_t pointer)
    ucs_status_t UCS_PTR_RAW_STATUS(ucs_status_ptr_t pointer)
    ucs_status_t UCS_OK
    ucs_status_t UCS_ERR_BUSY
    ucs_status_t UCS_ERR_CANCELED
    ucs_status_t UCS_ERR_CONNECTION_RESET
    ucs_status_t UCS_ERR_NO_MEMORY

cdef extern from "ucs/type/thread_mode.h" nogil:
    ctypedef enum ucs_thread_mode_t:
        UCS_THREAD_MODE_MULTI

cdef extern from "ucs/memory/memory_type.h" nogil:
    ctypedef enum ucs_memory_type_t:
        UCS_MEMORY_TYPE_HOST

cdef extern from "ucs/config/global_opts.h" nogil:
    ucs_status_t ucs_global_opts_set_value(const char *name, const char *value)

cdef extern from "ucp/api/ucp.h" nogil:
    ctypedef struct ucp_config_t:
        pass
    ctypedef void *ucp_context_h
    ctypedef void *ucp_worker_h
    ctypedef void *ucp_ep_h
    ctypedef void *ucp_mem_h
    ctypedef void *ucp_rkey_h
    ctypedef void *ucp_address_t
    ctypedef uint64_t ucp_datatype_t

    uint64_t UCP_PARAM_FIELD_FEATURES
    uint64_t UCP_PARAM_FIELD_MT_WORKERS_SHARED
    uint64_t UCP_FEATURE_RMA
    uint64_t UCP_FEATURE_AM
    uint64_t UCP_FEATURE_WAKEUP
    ctypedef struct ucp_params_t:
        uint64_t field_mask
        uint64_t features
        int mt_workers_shared

    uint64_t UCP_ATTR_FIELD_MEMORY_TYPES
    ctypedef struct ucp_context_attr_t:
        uint64_t field_mask
        uint64_t memory_types

    uint64_t UCP_WORKER_PARAM_FIELD_THREAD_MODE
    ctypedef struct ucp_worker_params_t:
        uint64_t field_mask
        ucs_thread_mode_t thread_mode

    uint64_t UCP_MEM_MAP_PARAM_FIELD_ADDRESS
    uint64_t UCP_MEM_MAP_PARAM_FIELD_LENGTH
    uint64_t UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE
    ctypedef struct ucp_mem_map_params_t:
        uint64_t field_mask
        void *address
        size_t length
        ucs_memory_type_t memory_type

    uint64_t UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
    uint64_t UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
    uint64_t UCP_EP_PARAM_FIELD_ERR_HANDLER
    ctypedef enum ucp_err_handling_mode_t:
        UCP_ERR_HANDLING_MODE_PEER
    ctypedef void (*ucp_err_handler_cb_t)(void *arg, ucp_ep_h ep, ucs_status_t status) noexcept nogil
    ctypedef struct ucp_err_handler_t:
        ucp_err_handler_cb_t cb
        void *arg
    ctypedef struct ucp_ep_params_t:
        uint64_t field_mask
        const ucp_address_t *address
        ucp_err_handling_mode_t err_mode
        ucp_err_handler_t err_handler

    int UCP_OP_ATTR_FIELD_FLAGS
    int UCP_OP_ATTR_FIELD_CALLBACK
    int UCP_OP_ATTR_FIELD_USER_DATA
    int UCP_OP_ATTR_FIELD_MEMORY_TYPE
    int UCP_OP_ATTR_FIELD_DATATYPE
    int UCP_EP_CLOSE_FLAG_FORCE
    ctypedef void (*ucp_send_nbx_callback_t)(void *request, ucs_status_t status, void *user_data) noexcept nogil
    ctypedef union ucp_request_callback_t "decltype(ucp_request_param_t.cb)":
        ucp_send_nbx_callback_t send
    ctypedef struct ucp_request_param_t:
        unsigned op_attr_mask
        unsigned flags
        ucp_request_callback_t cb
        void *user_data
        ucp_datatype_t datatype
        ucs_memory_type_t memory_type

    ctypedef struct ucp_transport_entry_t:
        const char *transport_name
        const char *device_name
    ctypedef struct ucp_transports_t:
        ucp_transport_entry_t *entries
        unsigned num_entries
        size_t entry_size
    uint64_t UCP_EP_ATTR_FIELD_TRANSPORTS
    ctypedef struct ucp_ep_attr_t:
        uint64_t field_mask
        ucp_transports_t transports

    ctypedef struct ucp_generic_dt_ops_t:
        void *(*start_pack)(void *context, const void *buffer, size_t count) noexcept nogil
        void *(*start_unpack)(void *context, void *buffer, size_t count) noexcept nogil
        size_t (*packed_size)(void *state) noexcept nogil
        size_t (*pack)(void *state, size_t offset, void *into, size_t room) noexcept nogil
        ucs_status_t (*unpack)(void *state, size_t offset, const void *data, size_t length) noexcept nogil
        void (*finish)(void *state) noexcept nogil

    int UCP_AM_SEND_FLAG_REPLY
    int UCP_AM_SEND_FLAG_EAGER
    uint64_t UCP_AM_RECV_ATTR_FIELD_REPLY_EP
    uint64_t UCP_AM_RECV_ATTR_FLAG_RNDV
    uint64_t UCP_AM_HANDLER_PARAM_FIELD_ID
    uint64_t UCP_AM_HANDLER_PARAM_FIELD_CB
    uint64_t UCP_AM_HANDLER_PARAM_FIELD_ARG
    ctypedef struct ucp_am_recv_param_t:
        uint64_t recv_attr
        ucp_ep_h reply_ep
    ctypedef ucs_status_t (*ucp_am_recv_callback_t)(void *arg, const void *header, size_t header_length, void *data,
                                                    size_t length, const ucp_am_recv_param_t *param) noexcept nogil
    ctypedef struct ucp_am_handler_param_t:
        uint64_t field_mask
        unsigned id
        ucp_am_recv_callback_t cb
        void *arg

    void ucp_get_version(unsigned *major, unsigned *minor, unsigned *release)
    ucs_status_t ucp_config_read(const char *prefix, const char *filename, ucp_config_t **config)
    ucs_status_t ucp_config_modify(ucp_config_t *config, const char *name, const char *value)
    void ucp_config_release(ucp_config_t *config)
    ucs_status_t ucp_init_version(unsigned major, unsigned minor, const ucp_params_t *params,
                                  const ucp_config_t *config, ucp_context_h *context)
    ucs_status_t ucp_context_query(ucp_context_h context, ucp_context_attr_t *attr)
    ucs_status_t ucp_worker_create(ucp_context_h context, const ucp_worker_params_t *params, ucp_worker_h *worker)
    void ucp_worker_destroy(ucp_worker_h worker)
    ucs_status_t ucp_worker_get_address(ucp_worker_h worker, ucp_address_t **address, size_t *length)
    void ucp_worker_release_address(ucp_worker_h worker, ucp_address_t *address)
    ucs_status_t ucp_worker_get_efd(ucp_worker_h worker, int *fd)
    ucs_status_t ucp_worker_arm(ucp_worker_h worker)
    ucs_status_t ucp_worker_signal(ucp_worker_h worker)
    unsigned ucp_worker_progress(ucp_worker_h worker)
    ucs_status_t ucp_mem_map(ucp_context_h context, const ucp_mem_map_params_t *params, ucp_mem_h *memory)
    ucs_status_t ucp_mem_unmap(ucp_context_h context, ucp_mem_h memory)
    ucs_status_t ucp_rkey_pack(ucp_context_h context, ucp_mem_h memory, void **buffer, size_t *length)
    void ucp_rkey_buffer_release(void *buffer)
    ucs_status_t ucp_ep_create(ucp_worker_h worker, const ucp_ep_params_t *params, ucp_ep_h *ep)
    ucs_status_t ucp_ep_query(ucp_ep_h ep, ucp_ep_attr_t *attr)
    ucs_status_ptr_t ucp_ep_close_nbx(ucp_ep_h ep, const ucp_request_param_t *param)
    ucs_status_t ucp_ep_rkey_unpack(ucp_ep_h ep, const void *buffer, ucp_rkey_h *rkey)
    void ucp_rkey_destroy(ucp_rkey_h rkey)
    ucs_status_ptr_t ucp_get_nbx(ucp_ep_h ep, void *buffer, size_t count, uint64_t remote, ucp_rkey_h rkey,
                                 const ucp_request_param_t *param)
    ucs_status_ptr_t ucp_put_nbx(ucp_ep_h ep, const void *buffer, size_t count, uint64_t remote, ucp_rkey_h rkey,
                                 const ucp_request_param_t *param)
    ucs_status_t ucp_worker_set_am_recv_handler(ucp_worker_h worker, const ucp_am_handler_param_t *param)
    ucs_status_ptr_t ucp_am_send_nbx(ucp_ep_h ep, unsigned message, const void *header, size_t header_length,
                                     const void *buffer, size_t count, const ucp_request_param_t *param)
    ucs_status_ptr_t ucp_ep_flush_nbx(ucp_ep_h ep, const ucp_request_param_t *param)
    ucs_status_t ucp_dt_create_generic(const ucp_generic_dt_ops_t *ops, void *context, ucp_datatype_t *datatype)
    void ucp_request_free(void *request)
