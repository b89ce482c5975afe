"""Part of `_ucp.pyx`: operations that travel as messages, which UCX's thread in the owner carries out.

Copies do so where the transport cannot reach the owner's memory by itself, as over TCP: UCX would emulate them by
copying, in the owner, from and to whatever address a request names. Atomic operations do so everywhere: UCX has some of
its own, but not on connections with peer error handling, without which a dead owner would go unnoticed. As messages
they are also atomic with whatever the owner's CPU does.

What is asked for names stretches of buffers; the owner looks each of them up, with its epoch word, while it touches
the memory. So no word needs to be fetched around a copy. A message carries at most MESSAGE_BYTES, a batch has at most
CREDITS of them under way, and neither side holds bytes anywhere but in UCX's own buffers for what is on the wire.

    ASK_READ    head_t, its items                   answered by BYTES: head_t, then the bytes and a verdict_t
    ASK_WRITE   head_t, its items, then the bytes   answered by ANSWER: answer_t
    ASK_ATOMIC  question_t                          answered by ANSWER: answer_t
    FORGET      numbers of connections              not answered

All in the byte order of one kind of machine, as are the words themselves. What a connection that was given up had sent
may still arrive later; FORGET, sent over the others before anything else, has the owner ignore it.
"""

cdef enum:
    ASK_ATOMIC = 1
    ANSWER = 2
    ASK_READ = 3
    BYTES = 4
    ASK_WRITE = 5
    FORGET = 6

    # With its head a message fits into one segment (TCP_TX_SEG_SIZE, TCP_RX_SEG_SIZE), and both stay in the cache.
    MESSAGE_BYTES = 252 << 10
    MOST_ITEMS = 63
    CREDITS = 8
    FORGOTTEN = 1024

cdef struct head_t:
    uint64_t connection  # number of the one that it was sent over
    uint64_t ticket  # of the batch that waits
    uint64_t slot  # the message among those of the batch
    uint64_t count  # of items
    uint64_t past_cache  # whether the bytes are part of so many that they would not stay in the cache

cdef struct request_t:
    head_t head
    item_t items[MOST_ITEMS]

cdef struct question_t:
    head_t head
    item_t word
    uint64_t swap  # 0: add the operand; 1: set to it what is equal to `compare`
    uint64_t operand
    uint64_t compare

cdef struct verdict_t:
    uint64_t status  # GRANTED, or why not
    uint64_t item

cdef struct answer_t:
    head_t head
    verdict_t verdict
    uint64_t previous  # of an atomic operation

# A message under way, and what it is about on this side.
cdef struct parcel_t:
    batch_t *batch
    int unsent  # UCX may still look at it
    int unanswered
    uint64_t nbytes
    uint64_t local[MOST_ITEMS]
    uint64_t word[MOST_ITEMS]  # indices
    request_t request

# A batch whose work is done by messages. Answers that come too late find nobody.
cdef struct waiting_t:
    uint64_t ticket  # 0 until it waits
    waiting_t *next
    int unanswered
    int status  # of the first verdict that is not good
    int64_t refused_word
    int past_cache
    parcel_t *parcels[CREDITS]
    int asks  # an atomic operation
    question_t question
    uint64_t previous
    int sent

# Those who wait at one worker, and what its messages are packed by.
cdef struct desk_t:
    pthread_mutex_t lock
    uint64_t tickets
    waiting_t *first
    exports_t *exports  # of a worker that answers
    uint64_t forgotten[FORGOTTEN]  # connections that it ignores, a ring
    uint64_t forgotten_ever
    ucp_datatype_t gather
    ucp_datatype_t reply


cdef void move(void *to, const void *source, size_t nbytes, int past_cache) noexcept nogil:
    if past_cache and nbytes >= SKIPPER_STREAM_RUN and skipper_can_stream():
        skipper_stream_run(<char *>to, <const char *>source, nbytes)
        skipper_fence()
    else:
        memcpy(to, source, nbytes)


cdef waiting_t *find_waiting(desk_t *desk, uint64_t ticket) noexcept nogil:
    """Who waits by that ticket, or NULL; the lock is held."""
    cdef waiting_t *waiting = desk.first
    while waiting != NULL and waiting.ticket != ticket:
        waiting = waiting.next
    return waiting


cdef parcel_t *find_parcel(waiting_t *waiting, uint64_t slot) noexcept nogil:
    """The message that an answer names, if it awaits one; the lock is held."""
    if waiting == NULL or waiting.asks or slot >= CREDITS or waiting.parcels[slot] == NULL:
        return NULL
    return waiting.parcels[slot] if skipper_get(&waiting.parcels[slot].unanswered) else NULL


cdef void judge(waiting_t *waiting, parcel_t *parcel, const verdict_t *verdict) noexcept nogil:
    """Note the owner's verdict on one message; the lock is held."""
    if verdict.status == GRANTED or skipper_get(&waiting.status) != 0:
        return
    if parcel != NULL and verdict.item < parcel.request.head.count:
        waiting.refused_word = <int64_t>parcel.word[verdict.item]
    skipper_set(&waiting.status, CHANGED_ if verdict.status == GONE else NOT_ALLOWED_)


cdef ucs_status_t on_answer(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef waiting_t *waiting
    cdef parcel_t *parcel
    cdef answer_t answer
    if header_length != sizeof(answer_t):
        return UCS_OK
    memcpy(&answer, header, sizeof(answer_t))
    pthread_mutex_lock(&desk.lock)
    waiting = find_waiting(desk, answer.head.ticket)
    parcel = find_parcel(waiting, answer.head.slot)
    if parcel != NULL:
        judge(waiting, parcel, &answer.verdict)
        skipper_set(&parcel.unanswered, 0)
        skipper_add(&waiting.unanswered, -1)
    elif waiting != NULL and waiting.asks and skipper_get(&waiting.unanswered):
        judge(waiting, NULL, &answer.verdict)
        waiting.previous = answer.previous
        skipper_set(&waiting.unanswered, 0)
    pthread_mutex_unlock(&desk.lock)
    return UCS_OK


cdef ucs_status_t on_data(void *arg, const void *header, size_t header_length, void *data, size_t length,
                          const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef const char *at = <const char *>data
    cdef waiting_t *waiting
    cdef parcel_t *parcel
    cdef verdict_t verdict
    cdef head_t head
    cdef uint64_t i
    if header_length != sizeof(head_t) or info.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV:
        return UCS_OK
    memcpy(&head, header, sizeof(head_t))
    pthread_mutex_lock(&desk.lock)
    waiting = find_waiting(desk, head.ticket)
    parcel = find_parcel(waiting, head.slot)
    if parcel != NULL and length == parcel.nbytes + sizeof(verdict_t):
        memcpy(&verdict, at + parcel.nbytes, sizeof(verdict_t))
        judge(waiting, parcel, &verdict)
        if verdict.status == GRANTED:
            for i in range(parcel.request.head.count):
                move(<void *>parcel.local[i], at, parcel.request.items[i].nbytes, waiting.past_cache)
                at += parcel.request.items[i].nbytes
        skipper_set(&parcel.unanswered, 0)
        skipper_add(&waiting.unanswered, -1)
    pthread_mutex_unlock(&desk.lock)
    return UCS_OK


cdef void *same_state(void *context, const void *buffer, size_t count) noexcept nogil:
    return <void *>buffer


cdef void nothing_to_finish(void *state) noexcept nogil:
    pass


cdef size_t parcel_nbytes(void *state) noexcept nogil:
    return (<parcel_t *>state).nbytes


cdef size_t pack_parcel(void *state, size_t offset, void *into, size_t room) noexcept nogil:
    """Gather the bytes that a write of several stretches sends."""
    cdef parcel_t *parcel = <parcel_t *>state
    cdef size_t done = 0
    cdef size_t part
    cdef uint64_t i
    for i in range(parcel.request.head.count):
        if offset >= parcel.request.items[i].nbytes:
            offset -= parcel.request.items[i].nbytes
            continue
        part = min(parcel.request.items[i].nbytes - offset, room - done)
        memcpy(<char *>into + done, <const char *>parcel.local[i] + offset, part)
        done += part
        offset = 0
        if done == room:
            break
    return done


cdef void on_sent(void *request, ucs_status_t status, void *arg) noexcept nogil:
    cdef parcel_t *parcel = <parcel_t *>arg
    cdef batch_t *batch = parcel.batch
    skipper_set(&parcel.unsent, 0)
    on_complete(request, status, batch)


cdef int fill(batch_t *batch, parcel_t *parcel) noexcept nogil:
    """Take what one message can carry from the share; whether there was anything."""
    cdef share_t *share = batch.share
    cdef item_t *item
    cdef int64_t local, remote, nbytes, key
    cdef uint64_t count = 0
    cdef int64_t room = MESSAGE_BYTES
    pthread_mutex_lock(&share.lock)
    while room > 0 and count < MOST_ITEMS and not skipper_get(&share.stopped):
        if not skipper_cursor_next(&share.cursor, room, &local, &remote, &nbytes, &key):
            break
        item = &parcel.request.items[count]
        item.word_at = batch.word_at[key]
        item.word_expected = batch.word_expected[key]
        item.at = <uint64_t>remote
        item.nbytes = <uint64_t>nbytes
        parcel.local[count] = <uint64_t>local
        parcel.word[count] = <uint64_t>key
        room -= nbytes
        count += 1
    share.left -= MESSAGE_BYTES - room
    pthread_mutex_unlock(&share.lock)
    parcel.nbytes = <uint64_t>(MESSAGE_BYTES - room)
    parcel.request.head.count = count
    return count > 0


cdef parcel_t *free_parcel(batch_t *batch, uint64_t *slot) noexcept nogil:
    """One that is not under way, or NULL."""
    cdef waiting_t *waiting = batch.waiting
    cdef int i
    for i in range(CREDITS):
        if waiting.parcels[i] == NULL:
            waiting.parcels[i] = <parcel_t *>malloc(sizeof(parcel_t))
            if waiting.parcels[i] == NULL:
                skipper_first_error(&batch.status, UCS_ERR_NO_MEMORY)
                return NULL
            waiting.parcels[i].batch = batch
            waiting.parcels[i].unsent = waiting.parcels[i].unanswered = 0
        if not skipper_get(&waiting.parcels[i].unsent) and not skipper_get(&waiting.parcels[i].unanswered):
            slot[0] = i
            return waiting.parcels[i]
    return NULL


cdef void post_parcels(batch_t *batch, ucp_request_param_t *param) noexcept nogil:
    """Send as many messages as there are credits for; the endpoint is locked and usable."""
    cdef waiting_t *waiting = batch.waiting
    cdef parcel_t *parcel
    cdef uint64_t slot = 0
    cdef ucs_status_ptr_t request
    cdef const void *content
    cdef size_t count
    cdef size_t header
    while skipper_get(&batch.status) == 0:
        parcel = free_parcel(batch, &slot)
        if parcel == NULL:
            return
        if not fill(batch, parcel):
            batch.posted = 1
            return
        parcel.request.head.connection = batch.endpoint.number
        parcel.request.head.ticket = waiting.ticket
        parcel.request.head.slot = slot
        parcel.request.head.past_cache = <uint64_t>waiting.past_cache
        header = sizeof(head_t) + parcel.request.head.count * sizeof(item_t)
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS
        param.cb.send = on_sent
        param.user_data = parcel
        content = NULL
        count = 0
        if batch.to_remote and parcel.request.head.count == 1:
            content = <const void *>parcel.local[0]
            count = parcel.nbytes
        elif batch.to_remote:
            param.op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE
            param.datatype = batch.desk.gather
            content = parcel
            count = 1
        skipper_set(&parcel.unsent, 1)
        skipper_set(&parcel.unanswered, 1)
        skipper_add(&waiting.unanswered, 1)
        skipper_add(&batch.pending, 1)
        request = ucp_am_send_nbx(batch.endpoint.handle, ASK_WRITE if batch.to_remote else ASK_READ, &parcel.request,
                                  header, content, count, param)
        if request == NULL or UCS_PTR_IS_ERR(request):
            skipper_set(&parcel.unsent, 0)
        posted(batch, request)


cdef void post_question(batch_t *batch, ucp_request_param_t *param) noexcept nogil:
    """Send the question; the endpoint is locked and usable."""
    cdef waiting_t *waiting = batch.waiting
    waiting.question.head.connection = batch.endpoint.number
    waiting.question.head.ticket = waiting.ticket
    waiting.question.head.count = 1
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS
    param.cb.send = on_complete
    param.user_data = batch
    batch.posted = 1
    waiting.sent = 1
    skipper_set(&waiting.unanswered, 1)
    skipper_add(&batch.pending, 1)
    posted(batch, ucp_am_send_nbx(batch.endpoint.handle, ASK_ATOMIC, &waiting.question, sizeof(question_t), NULL, 0,
                                  param))


cdef int step_messages(batch_t *batch) noexcept nogil:
    """`step` for a batch whose work is done by messages."""
    cdef waiting_t *waiting = batch.waiting
    cdef ucp_request_param_t param
    cdef int status
    if waiting.ticket == 0:
        enter(batch)
    if may_send(batch):
        memset(&param, 0, sizeof(param))
        param.flags = UCP_AM_SEND_FLAG_REPLY | UCP_AM_SEND_FLAG_EAGER
        pthread_mutex_lock(&batch.endpoint.lock)
        if unusable(batch.endpoint) != 0:
            skipper_first_error(&batch.status, unusable(batch.endpoint))
        elif waiting.asks:
            post_question(batch, &param)
        else:
            post_parcels(batch, &param)
        pthread_mutex_unlock(&batch.endpoint.lock)
    if skipper_get(&batch.pending) > 0:
        return RUNNING_
    status = skipper_get(&waiting.status)
    if status == 0 and batch.posted and skipper_get(&waiting.unanswered) == 0:
        status = skipper_get(&waiting.status)  # the last answer may have come in between
    elif status == 0:
        status = skipper_get(&batch.status)
        if status == 0:
            pthread_mutex_lock(&batch.endpoint.lock)
            status = unusable(batch.endpoint)
            pthread_mutex_unlock(&batch.endpoint.lock)
        if status == 0:
            return RUNNING_
    leave(batch)
    return status


cdef inline int may_send(batch_t *batch) noexcept nogil:
    """Whether there may be something to send, and a credit for it."""
    return (not batch.posted and skipper_get(&batch.status) == 0 and skipper_get(&batch.waiting.status) == 0
            and skipper_get(&batch.waiting.unanswered) < CREDITS)


cdef inline int answered(batch_t *batch) noexcept nogil:
    """Whether `step_messages` would come further without any progress of the worker."""
    if may_send(batch) or skipper_get(&batch.waiting.status) != 0:
        return 1
    return skipper_get(&batch.pending) == 0 and skipper_get(&batch.waiting.unanswered) == 0


cdef void enter(batch_t *batch) noexcept nogil:
    """Be found by the answers from now on."""
    pthread_mutex_lock(&batch.desk.lock)
    batch.desk.tickets += 1
    batch.waiting.ticket = batch.desk.tickets
    batch.waiting.next = batch.desk.first
    batch.desk.first = batch.waiting
    pthread_mutex_unlock(&batch.desk.lock)


cdef void leave(batch_t *batch) noexcept nogil:
    """Wait for answers no longer: when this returns, nobody writes to the local memory."""
    cdef waiting_t **at
    pthread_mutex_lock(&batch.desk.lock)
    at = &batch.desk.first
    while at[0] != NULL and at[0] != batch.waiting:
        at = &at[0].next
    if at[0] != NULL:
        at[0] = batch.waiting.next
    pthread_mutex_unlock(&batch.desk.lock)


# The owner's side, run by the thread that progresses the worker that answers. Whatever a message says is checked here,
# and only what was exported is touched. What is not in the form of a message is not answered.

# The answer to a ASK_READ. It holds no bytes: they are looked up and packed when UCX has room for them.
cdef struct reply_t:
    exports_t *exports
    head_t head
    verdict_t verdict
    uint64_t nbytes
    item_t items[MOST_ITEMS]


cdef uint64_t understood(const void *header, size_t header_length, const ucp_am_recv_param_t *info,
                         request_t *request) noexcept nogil:
    """Take a request out of its message: how many bytes it is about, or 0 where it is none."""
    cdef uint64_t nbytes = 0
    cdef uint64_t i
    if header_length < sizeof(head_t) or not info.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP:
        return 0
    memcpy(&request.head, header, sizeof(head_t))
    if request.head.count > MOST_ITEMS or header_length != sizeof(head_t) + request.head.count * sizeof(item_t):
        return 0
    memcpy(request.items, <const char *>header + sizeof(head_t), request.head.count * sizeof(item_t))
    for i in range(request.head.count):
        if request.items[i].nbytes > MESSAGE_BYTES - nbytes:
            return 0
        nbytes += request.items[i].nbytes
    return nbytes


cdef ucs_status_t on_forget(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef uint64_t number
    cdef size_t i
    for i in range(header_length // 8):
        memcpy(&number, <const char *>header + 8 * i, 8)
        if not is_forgotten(desk, number):
            desk.forgotten[desk.forgotten_ever % FORGOTTEN] = number
            desk.forgotten_ever += 1
    return UCS_OK


cdef int is_forgotten(desk_t *desk, uint64_t connection) noexcept nogil:
    """Whether what comes from a connection is to be ignored. Only what the one UCX thread of the owner calls."""
    cdef uint64_t i
    for i in range(min(desk.forgotten_ever, <uint64_t>FORGOTTEN)):
        if desk.forgotten[i] == connection:
            return 1
    return 0


cdef ucs_status_t on_read(void *arg, const void *header, size_t header_length, void *data, size_t length,
                          const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef request_t request
    cdef reply_t *reply
    cdef ucp_request_param_t param
    cdef uint64_t nbytes = understood(header, header_length, info, &request)
    cdef size_t items = request.head.count * sizeof(item_t) if nbytes != 0 else 0
    if nbytes == 0:
        return UCS_OK
    reply = <reply_t *>malloc(sizeof(reply_t) - sizeof(request.items) + items)
    if reply == NULL:
        return UCS_OK
    reply.exports = desk.exports
    reply.head = request.head
    reply.verdict.status = GRANTED
    reply.verdict.item = 0
    reply.nbytes = nbytes
    memcpy(reply.items, request.items, items)
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = (UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS
                          | UCP_OP_ATTR_FIELD_DATATYPE)
    param.flags = UCP_AM_SEND_FLAG_EAGER
    param.datatype = desk.reply
    send_back(info.reply_ep, BYTES, reply, &reply.head, sizeof(head_t), reply, 1, &param)
    return UCS_OK


cdef ucs_status_t on_write(void *arg, const void *header, size_t header_length, void *data, size_t length,
                           const ucp_am_recv_param_t *info) noexcept nogil:
    cdef exports_t *exports = (<desk_t *>arg).exports
    cdef const char *at = <const char *>data
    cdef request_t request
    cdef answer_t answer
    cdef uint64_t nbytes = understood(header, header_length, info, &request)
    cdef uint64_t i
    if nbytes == 0 or nbytes != length or info.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV:
        return UCS_OK
    if is_forgotten(<desk_t *>arg, request.head.connection):
        return UCS_OK
    memset(&answer, 0, sizeof(answer_t))
    answer.head = request.head
    for i in range(request.head.count):
        pthread_mutex_lock(&exports.lock)
        answer.verdict.status = asked_for(exports, &request.items[i], 1)
        if answer.verdict.status == GRANTED:
            move(<void *>request.items[i].at, at, request.items[i].nbytes, request.head.past_cache != 0)
        pthread_mutex_unlock(&exports.lock)
        if answer.verdict.status != GRANTED:
            answer.verdict.item = i
            break
        at += request.items[i].nbytes
    send_answer(info.reply_ep, &answer)
    return UCS_OK


cdef ucs_status_t on_atomic(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef exports_t *exports = (<desk_t *>arg).exports
    cdef question_t question
    cdef answer_t answer
    if header_length != sizeof(question_t) or not info.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP:
        return UCS_OK
    memcpy(&question, header, sizeof(question_t))
    if is_forgotten(<desk_t *>arg, question.head.connection):
        return UCS_OK
    memset(&answer, 0, sizeof(answer_t))
    answer.head = question.head
    question.word.nbytes = 8
    pthread_mutex_lock(&exports.lock)
    answer.verdict.status = asked_for(exports, &question.word, 1)
    if answer.verdict.status == GRANTED and question.word.at % 8:
        answer.verdict.status = REFUSED_
    if answer.verdict.status == GRANTED and question.swap:
        answer.previous = skipper_compare_and_swap(question.word.at, question.compare, question.operand)
    elif answer.verdict.status == GRANTED:
        answer.previous = skipper_fetch_add(question.word.at, question.operand)
    pthread_mutex_unlock(&exports.lock)
    send_answer(info.reply_ep, &answer)
    return UCS_OK


cdef void send_answer(ucp_ep_h ep, const answer_t *answer) noexcept nogil:
    cdef ucp_request_param_t param
    cdef answer_t *kept = <answer_t *>malloc(sizeof(answer_t))
    if kept == NULL:
        return
    kept[0] = answer[0]
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    send_back(ep, ANSWER, kept, kept, sizeof(answer_t), NULL, 0, &param)


cdef void send_back(ucp_ep_h ep, unsigned message, void *kept, const void *header, size_t header_length,
                    const void *content, size_t count, ucp_request_param_t *param) noexcept nogil:
    """Send a message and free `kept` when UCX has sent it, or will never."""
    cdef ucs_status_ptr_t request
    param.cb.send = on_sent_back
    param.user_data = kept
    request = ucp_am_send_nbx(ep, message, header, header_length, content, count, param)
    if request == NULL or UCS_PTR_IS_ERR(request):
        free(kept)


cdef void on_sent_back(void *request, ucs_status_t status, void *arg) noexcept nogil:
    ucp_request_free(request)
    free(arg)


cdef size_t reply_nbytes(void *state) noexcept nogil:
    return (<reply_t *>state).nbytes + sizeof(verdict_t)


cdef size_t pack_reply(void *state, size_t offset, void *into, size_t room) noexcept nogil:
    """Copy what was asked for, each stretch while it is there; zeros, and a verdict at the end, for what is not."""
    cdef reply_t *reply = <reply_t *>state
    cdef size_t done = 0
    cdef size_t part
    cdef uint64_t i
    cdef int status
    for i in range(reply.head.count):
        if done == room:
            return done
        if offset >= reply.items[i].nbytes:
            offset -= reply.items[i].nbytes
            continue
        part = min(reply.items[i].nbytes - offset, room - done)
        pthread_mutex_lock(&reply.exports.lock)
        status = asked_for(reply.exports, &reply.items[i], 0)
        if status == GRANTED:
            memcpy(<char *>into + done, <const char *>reply.items[i].at + offset, part)
        pthread_mutex_unlock(&reply.exports.lock)
        if status != GRANTED:
            memset(<char *>into + done, 0, part)
            if reply.verdict.status == GRANTED:
                reply.verdict.status = status
                reply.verdict.item = i
        done += part
        offset = 0
    part = min(sizeof(verdict_t) - offset, room - done)
    memcpy(<char *>into + done, <const char *>&reply.verdict + offset, part)
    return done + part


ctypedef size_t (*nbytes_of_t)(void *state) noexcept nogil
ctypedef size_t (*pack_t)(void *state, size_t offset, void *into, size_t room) noexcept nogil


cdef ucp_datatype_t datatype(nbytes_of_t nbytes, pack_t pack) except? 0:
    """A datatype of UCX that is sent only, by such functions."""
    cdef ucp_generic_dt_ops_t ops
    cdef ucp_datatype_t made
    memset(&ops, 0, sizeof(ops))
    ops.start_pack = same_state
    ops.packed_size = nbytes
    ops.pack = pack
    ops.finish = nothing_to_finish
    check("ucp_dt_create_generic", ucp_dt_create_generic(&ops, NULL, &made))
    return made
