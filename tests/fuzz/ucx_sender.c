/* Sends active messages of any content to a UCX worker, as no peer of ours would. One sender for each process. */
#include <string.h>
#include <ucp/api/ucp.h>

static ucp_context_h context;
static ucp_worker_h worker;
static ucp_ep_h endpoint;
static int failed;

static ucs_status_t on_answer(void *arg, const void *header, size_t header_length, void *data, size_t length,
                              const ucp_am_recv_param_t *info)
{
    return UCS_OK;
}

static void on_error(void *arg, ucp_ep_h ep, ucs_status_t status)
{
    failed = status;
}

/* Connect to the worker with this address; a negative status where that fails. */
int sender_open(const void *address)
{
    ucp_params_t params;
    ucp_worker_params_t worker_params;
    ucp_ep_params_t ep_params;
    ucp_am_handler_param_t handler;
    ucp_config_t *config;
    ucs_status_t status;
    unsigned id;

    memset(&params, 0, sizeof(params));
    params.field_mask = UCP_PARAM_FIELD_FEATURES;
    params.features = UCP_FEATURE_AM;
    if ((status = ucp_config_read(NULL, NULL, &config)) != UCS_OK) {
        return status;
    }
    ucp_config_modify(config, "TLS", "posix,cma,self");
    ucp_config_modify(config, "POSIX_ERROR_HANDLING", "y");
    status = ucp_init(&params, config, &context);
    ucp_config_release(config);
    if (status != UCS_OK) {
        return status;
    }
    memset(&worker_params, 0, sizeof(worker_params));
    if ((status = ucp_worker_create(context, &worker_params, &worker)) != UCS_OK) {
        return status;
    }
    for (id = 0; id < 16; id++) {
        memset(&handler, 0, sizeof(handler));
        handler.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB;
        handler.id = id;
        handler.cb = on_answer;
        ucp_worker_set_am_recv_handler(worker, &handler);
    }
    memset(&ep_params, 0, sizeof(ep_params));
    ep_params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                           UCP_EP_PARAM_FIELD_ERR_HANDLER;
    ep_params.address = address;
    ep_params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    ep_params.err_handler.cb = on_error;
    return ucp_ep_create(worker, &ep_params, &endpoint);
}

/* Send a message and let what comes back arrive; a negative status where the connection is broken. */
int sender_send(unsigned id, const void *header, size_t header_length, const void *data, size_t length, int rounds)
{
    ucp_request_param_t param;
    ucs_status_ptr_t request;

    memset(&param, 0, sizeof(param));
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = UCP_AM_SEND_FLAG_EAGER | UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_COPY_HEADER;
    request = ucp_am_send_nbx(endpoint, id, header, header_length, data, length, &param);
    if (UCS_PTR_IS_ERR(request)) {
        return UCS_PTR_STATUS(request);
    }
    while (request != NULL && ucp_request_check_status(request) == UCS_INPROGRESS && failed == 0) {
        ucp_worker_progress(worker);
    }
    if (request != NULL) {
        ucp_request_free(request);
    }
    while (rounds-- > 0 && failed == 0) {
        ucp_worker_progress(worker);
    }
    return failed;
}
