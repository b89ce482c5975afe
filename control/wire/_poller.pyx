# cython: boundscheck=False, wraparound=False
"""`Poller`: the sockets to the other processes of this host, read by whichever thread waits for what they bring.

One thread at a time reads for all (leader and followers). A thread that waits takes the part where nobody has it, and
what it waits for needs no other thread to be woken. A thread of the poller's own takes it once nobody else has come for
a moment; until then it sleeps, so that a process which calls and calls, or an actor that is called and called, pays for
no second thread. That moment is `GRACE_NS` at first. It grows up to `MOST_GRACE_NS` each time that the thread wakes for
nothing, since somebody reads again, and is `GRACE_NS` again once the thread has taken the part.

An event loop with coroutines that wait has a turn whenever something has come (`read_in`). It cannot say that it is
about to run something long; so the poller's thread looks after it, without the interpreter lock: what the loop has not
read after `LOOP_NS`, that thread reads, and the loop has to ask again.

Of several idle actors one reads for all, and each message for another one costs waking that thread. So the reading goes
to an idle actor that is called again and again, and comes back to it by itself (`HANDED_`).

A thread of a user's may be interrupted wherever it is, by Ctrl-C for instance. Such a thread delivers only messages that
may be delivered twice (`REPLIES`), and leaves all others to the thread of the poller: three threads are woken for a call,
one after the other. So where many of the messages are calls, the event loop of an actor that is called goes before those
that wait for answers, and lets them on (`CALLS_`).
"""

cimport cython
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetFromErrno
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.contextvars cimport PyContext_Enter, PyContext_Exit, PyContext_New
from cpython.pythread cimport PyThread_get_thread_ident
from libc.errno cimport EAGAIN, ECONNRESET, EINTR, ENOBUFS, errno
from libc.stdint cimport int64_t, uint32_t, uint64_t

from collections import deque
import contextvars
import logging
import threading
import weakref

cdef extern from "Python.h" nogil:
    ctypedef struct Py_tss_t:
        pass
    int PyThread_tss_create(Py_tss_t *key)
    void *PyThread_tss_get(Py_tss_t *key)
    int PyThread_tss_set(Py_tss_t *key, void *value)

cdef extern from "sys/epoll.h" nogil:
    ctypedef union epoll_data_t:
        int fd
        uint64_t u64
    struct epoll_event:
        uint32_t events
        epoll_data_t data
    int epoll_create1(int flags)
    int epoll_ctl(int epfd, int op, int fd, epoll_event *event)
    int epoll_wait(int epfd, epoll_event *events, int count, int timeout)
    int EPOLL_CLOEXEC
    int EPOLL_CTL_ADD
    int EPOLL_CTL_MOD
    int EPOLL_CTL_DEL
    uint32_t EPOLLIN
    uint32_t EPOLLOUT
    uint32_t EPOLLONESHOT

cdef extern from "sys/eventfd.h" nogil:
    int eventfd(unsigned int value, int flags)
    int EFD_CLOEXEC
    int EFD_NONBLOCK

cdef extern from "time.h" nogil:
    struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec *time)
    int CLOCK_MONOTONIC

cdef extern from "sys/timerfd.h" nogil:
    struct itimerspec:
        timespec it_interval
        timespec it_value
    int timerfd_create(int clock, int flags)
    int timerfd_settime(int fd, int flags, const itimerspec *new, itimerspec *old)
    int TFD_CLOEXEC
    int TFD_NONBLOCK

cdef extern from "sys/socket.h" nogil:
    ssize_t c_recv "recv"(int fd, void *buffer, size_t nbytes, int flags)
    ssize_t c_send "send"(int fd, const void *buffer, size_t nbytes, int flags)
    int c_shutdown "shutdown"(int fd, int how)
    int SHUT_RDWR
    int MSG_DONTWAIT
    int MSG_NOSIGNAL
    int MSG_TRUNC

cdef extern from "unistd.h" nogil:
    ssize_t c_read "read"(int fd, void *buffer, size_t nbytes)
    ssize_t c_write "write"(int fd, const void *buffer, size_t nbytes)
    int c_close "close"(int fd)

cdef extern from *:
    """
    /* What threads look at that do not hold the interpreter lock: whole, and in no order but that of `synchronize`. */
    #define look(at)          __atomic_load_n((at), __ATOMIC_RELAXED)
    #define note(at, value)   __atomic_store_n((at), (value), __ATOMIC_RELAXED)
    #define synchronize()     __atomic_thread_fence(__ATOMIC_SEQ_CST)
    """
    bint is_set "look"(bint *at) nogil
    void set_to "note"(bint *at, bint value) nogil
    unsigned long thread_of "look"(unsigned long *at) nogil
    void set_thread "note"(unsigned long *at, unsigned long value) nogil
    uint64_t count_of "look"(uint64_t *at) nogil
    void set_count "note"(uint64_t *at, uint64_t value) nogil
    void synchronize() nogil

cdef enum:
    MAX_NBYTES_ = 1 << 16
    REPLIES_ = 3
    EVENTS_ = 32
    # Messages of one socket in a row, before others have their turn.
    IN_A_ROW_ = 32
    GRACE_NS_ = 300_000
    MOST_GRACE_NS_ = 2_400_000
    FLUSH_NS_ = 200_000
    LOOP_NS_ = 2_000_000
    # An event loop that should not have read, or could not, does not for so long.
    LOOP_REST_NS_ = 20_000_000
    LONGEST_S_ = 1 << 30
    # So many messages in a row that another thread has read for an idle actor make that read itself.
    HANDED_ = 4
    # A message that is no answer counts as much as so many answers. The loop of an actor goes before those that wait for
    # answers once there have been `CALLS_` more than answers; it is counted up to `MOST_CALLS_`, so that they come back.
    CALL_ = 4
    CALLS_ = 16
    MOST_CALLS_ = 32
    # Sent without letting go of the interpreter lock, for which others may keep this thread waiting.
    SHORT_ = 16384

MAX_NBYTES = MAX_NBYTES_
"""Of one message."""

REPLIES = REPLIES_
"""The first byte of a message that may be delivered twice."""

_log = logging.getLogger("skipper.control")


cdef Py_tss_t _serving  # by thread: how often it has begun to serve streams, and not ended that

if PyThread_tss_create(&_serving) != 0:
    raise MemoryError("no room for what each thread has of its own")


cdef inline void add_serving(Py_ssize_t more) noexcept nogil:
    PyThread_tss_set(&_serving, <void *>(<Py_ssize_t>PyThread_tss_get(&_serving) + more))


def serve_here(bint begins=True):
    """Make the current thread one that streams depend on; False takes that back."""
    add_serving(1 if begins else -1)


def on_stream_thread():
    """Whether the current thread is one that streams depend on: what it waits for must not have to come by stream."""
    return <Py_ssize_t>PyThread_tss_get(&_serving) > 0


cdef object _WRITABLE = object()
cdef object _HUNG_UP = object()


@cython.final
cdef class PacketSocket:
    """A connected socket of packets, as a poller reads it.

    Args:
        fd: taken over: `close` closes it.
        user: told of what happens: ``received(message)``, ``blocked(message)``, ``writable()`` and ``hung_up()``.

    Attributes:
        fd: -1 once it is closed.
        repeats: whether messages that begin with `REPLIES` may be delivered twice.
        receive: takes messages in place of ``received`` of the user, unless it is None.
    """

    cdef readonly int fd
    cdef public bint repeats
    cdef public object receive
    cdef object user
    cdef object kept
    cdef bint is_overdue

    def __init__(self, int fd, user):
        self.fd = fd
        self.repeats = False
        self.user = user
        self.receive = None
        self.kept = deque()  # what has been read and is left to the poller's thread, in order
        self.is_overdue = False  # whether that thread knows

    def send(self, bytes message not None):
        """Send a message of at most `MAX_NBYTES`; from any thread, one at a time.

        Returns:
            True: it is out. False: the other end reads too slowly; nothing was sent.

        Raises:
            OSError: the other end is gone, or this one is closed.
        """
        cdef const char *data = PyBytes_AS_STRING(message)
        cdef size_t nbytes = PyBytes_GET_SIZE(message)
        cdef int fd = self.fd
        cdef ssize_t sent
        while True:
            if nbytes <= SHORT_:
                sent = c_send(fd, data, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL)
            else:
                with nogil:
                    sent = c_send(fd, data, nbytes, MSG_DONTWAIT | MSG_NOSIGNAL)
            if sent >= 0:
                return True
            if errno == EAGAIN or errno == ENOBUFS:
                return False
            if errno != EINTR:
                PyErr_SetFromErrno(OSError)

    def post(self, bytes message not None):
        """`send`, and hand what is not sent to ``blocked(message)`` of the user.

        Returns:
            Whether that was not needed. If the other end is gone, it was not: the end of the file tells the user.
        """
        try:
            if self.send(message):
                return True
        except OSError:
            return True
        self.user.blocked(message)
        return False

    def shut_down(self):
        """Have both ends read the end of the file; idempotent."""
        if self.fd >= 0:
            c_shutdown(self.fd, SHUT_RDWR)

    def close(self):
        """Close it; idempotent. A poller that has it is to remove it first."""
        cdef int fd = self.fd
        self.fd = -1
        if fd >= 0:
            c_close(fd)


@cython.final
cdef class Poller:
    """Reads the sockets of a process. For any thread.

    What is written here without a lock is written under the interpreter lock, which nothing gives up in between; only
    ``_timer_runs``, ``_grace_ns``, ``_leader``, ``_has_loop``, ``_has_unflushed``, ``_turns`` and ``_is_watching`` are also looked at
    without it, and the first two are also written. `look` and `note` are for these: for reading where another thread may
    write, and for writing where another may read. ``_is_watching`` needs neither, being written by the one that looks.

    Args:
        name: of its thread.
    """

    cdef int _epoll  # all sockets, and the next
    cdef int _nudge  # wakes a thread of others that reads
    cdef int _own_epoll  # what the poller's thread waits for; the other one too while that thread reads
    cdef int _own_nudge  # wakes that thread
    cdef int _timer
    cdef bint _timer_runs
    cdef int64_t _timer_ends_ns  # when it is due
    cdef uint64_t _grace_ns
    cdef int _patience  # the time that an event loop has
    cdef bint _is_watching  # whether the poller's thread looks after the event loop
    cdef bint _has_loop
    cdef object _loop  # a weak reference to the one that reads
    cdef bint _loop_takes_all
    cdef int64_t _loop_rests_until_ns
    cdef object _resting  # a weak reference to the loop that does
    cdef bint _loop_waits  # for a thread that was asked to give way
    cdef uint64_t _turns  # that it has had
    cdef uint64_t _turns_before  # when the poller's thread saw that something had come
    cdef unsigned long _handed_to  # the thread of the idle actor that was let on last by one that read for it
    cdef int _handed  # how often in a row
    cdef int _calls  # of late, against answers
    cdef bint _leader_takes_all  # whether it is the poller's, or an idle actor's
    cdef bint _leader_yields  # whether it may have to give way
    cdef unsigned long _leader  # the thread that reads; 0: nobody
    cdef unsigned long _own
    cdef int64_t _left_ns  # when the last one stopped
    cdef bint _is_closed
    cdef bint _is_forked
    cdef object _followers  # those that want to read next
    cdef object _unflushed  # functions that send what has queued up
    cdef bint _has_unflushed
    cdef object _overdue  # sockets of which something is kept
    cdef dict _sockets
    cdef dict _watched
    cdef char _buffer[MAX_NBYTES_ + 1]

    def __cinit__(self):
        self._epoll = self._nudge = self._own_epoll = self._own_nudge = self._timer = self._patience = -1
        self._grace_ns = GRACE_NS_

    def __init__(self, str name):
        self._followers = deque()
        self._overdue = deque()
        self._unflushed = deque()
        self._sockets = {}
        self._watched = {}
        self._epoll = _made(epoll_create1(EPOLL_CLOEXEC))
        self._own_epoll = _made(epoll_create1(EPOLL_CLOEXEC))
        self._nudge = _made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
        self._own_nudge = _made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK))
        self._timer = _made(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK))
        self._patience = _made(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK))
        _control(self._epoll, EPOLL_CTL_ADD, self._nudge, EPOLLIN)
        _control(self._own_epoll, EPOLL_CTL_ADD, self._own_nudge, EPOLLIN)
        _control(self._own_epoll, EPOLL_CTL_ADD, self._timer, EPOLLIN)
        _control(self._own_epoll, EPOLL_CTL_ADD, self._patience, EPOLLIN)
        _control(self._own_epoll, EPOLL_CTL_ADD, self._epoll, 0)
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def __dealloc__(self):
        cdef int fd
        for fd in (self._epoll, self._nudge, self._own_epoll, self._own_nudge, self._timer, self._patience):
            if fd >= 0:
                c_close(fd)

    # Sockets

    def add(self, PacketSocket socket not None):
        """Begin to read a socket.

        Raises:
            OSError: the system has no room for it.
        """
        self._sockets[socket.fd] = socket
        _control(self._epoll, EPOLL_CTL_ADD, socket.fd, EPOLLIN)
        self._see_to_it()

    def remove(self, PacketSocket socket not None):
        """Read a socket no more; idempotent."""
        if socket.fd >= 0 and self._sockets.get(socket.fd) is socket:
            del self._sockets[socket.fd]
            _control(self._epoll, EPOLL_CTL_DEL, socket.fd, 0)

    def want_out(self, PacketSocket socket not None):
        """Have ``writable()`` told once, as soon as the other end has read enough for another message."""
        if socket.fd >= 0 and self._sockets.get(socket.fd) is socket:
            _control(self._epoll, EPOLL_CTL_MOD, socket.fd, EPOLLIN | EPOLLOUT)
            self._see_to_it()

    def watch(self, int fd, readable):
        """Call ``readable()`` on the poller's thread whenever a descriptor can be read.

        Raises:
            OSError: the system has no room for it.
        """
        self._watched[fd] = readable
        _control(self._own_epoll, EPOLL_CTL_ADD, fd, EPOLLIN)

    def unwatch(self, int fd):
        """Take `watch` back; idempotent."""
        if self._watched.pop(fd, None) is not None:
            _control(self._own_epoll, EPOLL_CTL_DEL, fd, 0)

    def flush_soon(self, flush):
        """Call ``flush()`` once, when a thread of this process begins to wait, or within `FLUSH_NS_`."""
        self._unflushed.append(flush)
        set_to(&self._has_unflushed, True)
        synchronize()  # either this thread sees that the timer has run out, or the other one that there is something
        self._look_after(FLUSH_NS_)

    def close(self):
        """End the poller's thread, and have nobody read any more; idempotent."""
        self._is_closed = True
        _wake(self._own_nudge)
        _wake(self._nudge)

    def fall_silent(self):
        """Close all sockets without a word: this is a forked copy of the process, and they belong to the original."""
        cdef PacketSocket socket
        self._is_forked = self._is_closed = True
        for socket in list(self._sockets.values()):
            socket.close()
        self._sockets.clear()
        self._watched.clear()

    # Those who wait

    def nudge(self):
        """Have whoever reads look at what it waits for. For `Gate`."""
        if self._leader != PyThread_get_thread_ident():
            _wake(self._nudge)

    def wait(self, gate, double timeout_s, bint takes_all):
        """Wait until a gate is opened, which this thread waits at alone. If nobody else reads, this thread does.

        Args:
            gate: a `Gate`.
            timeout_s: seconds; -1 for no limit.
            takes_all: whether everything may be delivered here, since nothing interrupts this thread.
        """
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef int64_t end_ns = -1 if timeout_s < 0 else _now() + <int64_t>(min(timeout_s, LONGEST_S_) * 1e9)
        cdef bint is_within = self._leader == me  # what is delivered here waits itself
        if self._has_unflushed:
            self._flush()
        try:
            while not (gate.is_open or _is_over(end_ns)):
                if self._is_closed:
                    gate.lock.acquire(timeout=_left_s(end_ns))
                    continue
                if self._leader == 0 and not self._leaves_it_to_loop(me, takes_all):
                    set_thread(&self._leader, me)
                if self._leader == me:
                    self._lead(gate, end_ns, takes_all or me == self._own)
                    if self._leader == me and self._is_asked_for():
                        self._leave()
                else:
                    self._follow(gate, end_ns, takes_all, me)
        finally:
            if self._leader == me:
                if not is_within:
                    self._leave()
                elif me == self._own:
                    _control(self._own_epoll, EPOLL_CTL_MOD, self._epoll, EPOLLIN)

    def read_in(self, loop, bint takes_all=False):
        """Have an event loop read whenever it runs nothing else; one of a process does. On its thread.

        Args:
            loop: whose coroutines wait.
            takes_all: as for `wait`; it is for an idle actor, which goes behind those that wait for an answer.
        """
        if self._is_closed or self._has_loop and not self._gives_way(loop, takes_all):
            return
        if self._leader != 0 and not self._is_before_leader(takes_all):
            return
        if self._resting is not None:
            if _now() >= self._loop_rests_until_ns:
                self._resting = None
            elif self._resting() is loop:
                return
        self._loop = weakref.ref(loop)
        self._loop_takes_all = takes_all
        set_to(&self._has_loop, True)
        self._loop_waits = self._leader != 0
        if not self._loop_waits:
            self._begin_in(loop)
        _wake(self._own_nudge)
        self._ask()

    def _begin_in(self, loop):
        """Have an event loop call `_serve`. On its thread."""
        try:
            # In no context: the loop would keep that of the code that waits here.
            contextvars.Context().run(loop.add_reader, self._epoll, self._serve, loop)
        except (NotImplementedError, OSError):
            set_to(&self._has_loop, False)  # it has no descriptors, or no room for one more

    cdef _call_loop(self):
        """Nobody reads any more: have the event loop that has waited for that begin."""
        self._loop_waits = False
        loop = self._loop()
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._begin_in, loop)
            except RuntimeError:
                pass  # it is closed

    cdef bint _gives_way(self, loop, bint takes_all):
        """Whether the event loop that reads is to let another one read."""
        reads = self._loop()
        if reads is loop:
            self._loop_takes_all = self._loop_takes_all or takes_all
            return False
        if reads is None or reads.is_closed():
            return True
        return self._loop_takes_all != takes_all and takes_all == self._gets_calls()

    cdef bint _is_before_leader(self, bint takes_all) noexcept:
        """Whether an event loop is to read in place of the thread that does."""
        if not self._leader_yields:
            return False  # it waits for an answer, and may have it before the loop begins
        return self._leader == self._own or self._leader_takes_all != takes_all

    cdef bint _leaves_it_to_loop(self, unsigned long me, bint takes_all) noexcept:
        """Whether a thread is to wait though nobody reads at this moment, since an event loop does."""
        if not self._has_loop:
            return False
        return not self._is_called_most(me) if takes_all else self._loop_takes_all and self._gets_calls()

    cdef bint _gets_calls(self) noexcept:
        """Whether the event loop of an actor goes before those that wait for answers."""
        return self._calls >= CALLS_

    def _serve(self, loop):
        """Read what has come; called by an event loop."""
        cdef epoll_event events[EVENTS_]
        cdef unsigned long me = PyThread_get_thread_ident()
        cdef int count, i
        cdef bint is_read_in = self._has_loop and self._loop() is loop
        if self._is_closed or self._leader != 0 or not is_read_in:
            set_to(&self._has_loop, self._has_loop and not is_read_in)
            loop.remove_reader(self._epoll)
            return
        set_count(&self._turns, self._turns + 1)
        set_thread(&self._leader, me)
        self._leader_takes_all = self._loop_takes_all
        self._leader_yields = False
        try:
            count = epoll_wait(self._epoll, events, EVENTS_, 0)
            for i in range(count):
                self._read(events[i].data.fd, events[i].events, self._loop_takes_all)
                if self._leader != me:
                    return
            if self._overdue and not self._loop_takes_all and self._gets_calls():
                self._let_loop_rest()
        finally:
            if self._leader == me:
                self._leave()

    cdef _let_loop_rest(self):
        set_to(&self._has_loop, False)
        self._resting = self._loop
        self._loop_rests_until_ns = _now() + LOOP_REST_NS_

    cdef tuple _ask_for(self, unsigned long me, lock):
        """Have the reading given to this thread, whose lock is opened then."""
        turn = (me, lock)
        self._followers.append(turn)
        self._ask()
        return turn

    cdef _ask(self):
        """Have the thread that reads give that up, if it does not wait for an answer itself."""
        if self._leader == self._own:
            _wake(self._own_nudge)
        if self._leader != 0 and self._leader_yields:
            _wake(self._nudge)  # the poller's own thread may wait within what it delivers

    cdef bint _is_asked_for(self):
        """Whether the thread that reads, which is this one, is to give that up."""
        if not self._leader_yields:
            return False
        if self._leader_takes_all:
            return self._followers or self._has_loop and not self._loop_takes_all
        return self._has_loop and self._loop_takes_all

    cdef _follow(self, gate, int64_t end_ns, bint takes_all, unsigned long me):
        """Wait while another thread reads: for the gate, the time, or this thread's turn to read."""
        cdef bint asks
        turn = None
        if takes_all:  # a thread of others reads for an idle actor as well, unless it is for this one alone
            asks = self._leader == self._own or self._is_called_most(me)
        else:
            asks = not self._leaves_it_to_loop(me, False)
        if asks:
            turn = self._ask_for(me, gate.lock)
        try:
            gate.lock.acquire(timeout=_left_s(end_ns))
            if takes_all and gate.is_open and self._leader != me:
                self._handed = self._handed + 1 if self._handed_to == me else 1
                self._handed_to = me
        finally:
            if turn is not None and self._leader != me:
                try:
                    self._followers.remove(turn)
                except ValueError:
                    pass

    cdef bint _is_called_most(self, unsigned long me) noexcept:
        """Whether an idle actor is to read itself, since all that has come of late was for it."""
        return self._handed_to == me and self._handed >= HANDED_ and (self._loop_takes_all or not self._has_loop)

    cdef _lead(self, gate, int64_t end_ns, bint takes_all):
        """Read until the gate is open, or the time is over."""
        cdef epoll_event events[EVENTS_]
        cdef int count, i, timeout_ms
        cdef int64_t left_ns
        cdef unsigned long me = self._leader
        gate.reader = self
        try:
            while not (gate.is_open or self._is_closed):
                self._leader_takes_all = takes_all
                self._leader_yields = takes_all or self._gets_calls()
                if self._is_asked_for():
                    return
                timeout_ms = -1
                if end_ns >= 0:
                    left_ns = end_ns - _now()
                    if left_ns <= 0:
                        return
                    timeout_ms = <int>min(left_ns // 1000000 + 1, 1 << 30)
                with nogil:
                    count = epoll_wait(self._epoll, events, EVENTS_, timeout_ms)
                PyErr_CheckSignals()
                for i in range(count):
                    self._read(events[i].data.fd, events[i].events, takes_all)
                    if self._leader != me:
                        return  # given up while something was delivered that waits
                    if gate.is_open:
                        self._handed_to = 0
                        break  # the kernel tells of the others again
        finally:
            gate.reader = None

    cdef _leave(self):
        """Stop reading: who has asked for it goes on; if nobody has, the poller's thread does in a moment."""
        if self._leader == self._own:
            _control(self._own_epoll, EPOLL_CTL_MOD, self._epoll, 0)
        if self._followers:
            follower, lock = self._followers.popleft()
            set_thread(&self._leader, follower)
            _open(lock)
            return
        self._left_ns = _now()
        set_thread(&self._leader, 0)
        synchronize()  # either this thread sees that the timer has run out, or the other one that nobody reads
        if not (self._has_loop and self._is_watching):
            self._look_after(count_of(&self._grace_ns))
        if self._loop_waits:
            self._call_loop()

    # Reading

    cdef _read(self, int fd, uint32_t events, bint takes_all):
        """Read what a socket has, as far as others are not kept waiting."""
        cdef PacketSocket socket
        cdef ssize_t nbytes
        cdef int count
        cdef unsigned long leader = self._leader
        if fd == self._nudge:
            if not self._is_closed:  # an event loop is to see it, too
                _drain(fd)
            return
        found = self._sockets.get(fd)
        if found is None:
            return
        socket = <PacketSocket>found
        if events & EPOLLOUT:
            _control(self._epoll, EPOLL_CTL_MOD, fd, EPOLLIN)
            self._deliver(socket, _WRITABLE, takes_all)
        if events == EPOLLOUT:
            return
        for count in range(IN_A_ROW_):
            nbytes = c_recv(fd, self._buffer, sizeof(self._buffer), MSG_DONTWAIT | MSG_TRUNC)
            if nbytes < 0:
                if errno == ECONNRESET or errno == EINTR:
                    continue  # the other end has left without reading all; what it has sent is there
                if errno == EAGAIN:
                    return
            if nbytes <= 0 or nbytes > MAX_NBYTES_:
                self.remove(socket)
                self._deliver(socket, _HUNG_UP, takes_all)
                return
            if socket.repeats and self._buffer[0] == REPLIES_:
                self._calls = max(self._calls - 1, 0)
            else:
                self._calls = min(self._calls + CALL_, MOST_CALLS_)
            self._deliver(socket, PyBytes_FromStringAndSize(self._buffer, nbytes), takes_all)
            if socket.fd != fd or self._leader != leader:
                return  # its user has closed it; or has waited, and another thread reads now

    cdef _deliver(self, PacketSocket socket, thing, bint takes_all):
        """Deliver here what may be delivered here, and leave the rest to the poller's thread."""
        if socket.kept or not (takes_all or _is_repeatable(socket, thing)):
            self._keep(socket, thing)
            return
        if self._leader == self._own:
            self._tell(socket, thing)
            return
        add_serving(1)
        context = PyContext_New()  # not that of the code that waits here
        PyContext_Enter(context)
        try:
            self._tell(socket, thing)
        except BaseException:  # this thread was interrupted
            if _is_repeatable(socket, thing):
                socket.kept.appendleft(thing)
                self._keep(socket, None)
            raise
        finally:
            PyContext_Exit(context)
            add_serving(-1)

    cdef _keep(self, PacketSocket socket, thing):
        if thing is not None:
            socket.kept.append(thing)
        if not socket.is_overdue:
            socket.is_overdue = True
            self._overdue.append(socket)
            _wake(self._own_nudge)

    cdef _tell(self, PacketSocket socket, thing):
        try:
            if thing is _WRITABLE:
                socket.user.writable()
            elif thing is _HUNG_UP:
                socket.receive = None  # which may lead back to the socket
                socket.user.hung_up()
            elif socket.receive is not None:
                socket.receive(thing)
            else:
                socket.user.received(thing)
        except Exception:  # (a defect around one socket must not cost all others their reader)
            _log.exception("a connection ends because its user failed")
            self.remove(socket)
            socket.close()

    # The poller's own thread

    def _run(self):
        cdef epoll_event events[EVENTS_]
        cdef int count, i, fd
        cdef bint is_timer_alone
        add_serving(1)
        self._own = PyThread_get_thread_ident()
        self._take_over_if_due()
        while not self._is_closed:
            with nogil:
                while True:
                    count = self._without_watching(events, epoll_wait(self._own_epoll, events, EVENTS_, -1))
                    if count == 0:
                        continue
                    is_timer_alone = count == 1 and events[0].data.fd == self._timer
                    if not is_timer_alone:
                        break
                    # Most often somebody reads again: seen without the interpreter lock, which that may need.
                    _drain(self._timer)
                    set_to(&self._timer_runs, False)
                    synchronize()
                    if thread_of(&self._leader) == 0 or is_set(&self._has_unflushed):
                        break
                    set_count(&self._grace_ns, min(2 * count_of(&self._grace_ns), <uint64_t>MOST_GRACE_NS_))
            for i in range(count):
                fd = events[i].data.fd
                if fd == self._own_nudge:
                    _drain(fd)
                elif fd == self._timer and not is_timer_alone:
                    _drain(fd)
                    set_to(&self._timer_runs, False)
                elif fd == self._patience:
                    self._is_watching = False
                    if self._has_loop:
                        self._let_loop_rest()
            try:
                self._attend(events, count)
            except Exception:
                _log.exception("the thread that reads for the others goes on after a failure")
        if not self._is_forked:
            for socket in list(self._sockets.values()):
                self.remove(socket)
                socket.close()

    cdef _attend(self, epoll_event *events, int count):
        cdef epoll_event found[EVENTS_]
        cdef int i, fd, more
        while self._overdue:
            self._catch_up(self._overdue[0])
            self._overdue.popleft()
        if self._has_unflushed:
            self._flush()
        self._take_over_if_due()
        for i in range(count):
            fd = events[i].data.fd
            if fd == self._epoll:
                if self._leader == self._own:
                    more = epoll_wait(self._epoll, found, EVENTS_, 0)
                    for k in range(more):
                        self._read(found[k].data.fd, found[k].events, True)
                        if self._leader != self._own:
                            break  # given up while something was delivered that waits
            elif fd in self._watched:
                self._watched[fd]()
        if self._leader == self._own and (self._followers or self._has_loop):
            self._leave()
            self._take_over_if_due()

    cdef _catch_up(self, PacketSocket socket):
        """Deliver in order what others have left."""
        while socket.kept:
            self._tell(socket, socket.kept[0])
            socket.kept.popleft()
        socket.is_overdue = False

    cdef _flush(self):
        set_to(&self._has_unflushed, False)
        while self._unflushed:
            self._unflushed.popleft()()

    cdef _take_over_if_due(self):
        cdef int64_t since_ns, grace_ns
        if self._leader != 0 or self._is_closed:
            return
        if self._has_loop:
            if not self._is_watching:
                self._is_watching = True
                _control(self._own_epoll, EPOLL_CTL_MOD, self._epoll, EPOLLIN | EPOLLONESHOT)
            return
        since_ns = _now() - self._left_ns
        grace_ns = count_of(&self._grace_ns)
        if since_ns < grace_ns:
            self._look_after(grace_ns - since_ns)
            return
        set_count(&self._grace_ns, GRACE_NS_)
        set_thread(&self._leader, self._own)
        self._leader_takes_all = self._leader_yields = True
        self._is_watching = False
        _control(self._own_epoll, EPOLL_CTL_MOD, self._epoll, EPOLLIN)

    cdef int _without_watching(self, epoll_event *events, int count) noexcept nogil:
        """Look after the event loop; returns how many events are left, those of something else."""
        cdef int i, left = 0
        for i in range(count):
            if not self._watches(events[i].data.fd):
                events[left] = events[i]
                left += 1
        return left

    cdef bint _watches(self, int fd) noexcept nogil:
        """Whether an event means no more than that the event loop is looked after."""
        cdef epoll_event event
        if fd == self._epoll and self._is_watching:
            self._turns_before = count_of(&self._turns)
            _set(self._patience, LOOP_NS_)
            return True
        if fd != self._patience:
            return False
        _drain(fd)
        if not (is_set(&self._has_loop) and self._is_watching):
            return False
        if thread_of(&self._leader) == 0 and count_of(&self._turns) == self._turns_before:
            if epoll_wait(self._epoll, &event, 1, 0) > 0:
                return False  # it is kept from reading
        _changed(self._own_epoll, EPOLL_CTL_MOD, self._epoll, EPOLLIN | EPOLLONESHOT)
        return True

    cdef _look_after(self, int64_t after_ns):
        """Have the poller's thread look at what there is to do, after so long or sooner."""
        cdef int64_t ends_ns = _now() + after_ns
        if not is_set(&self._timer_runs) or ends_ns < self._timer_ends_ns:
            self._timer_ends_ns = ends_ns
            set_to(&self._timer_runs, True)
            _set(self._timer, after_ns)

    cdef _see_to_it(self):
        """See that somebody reads."""
        if self._leader == 0 and not (is_set(&self._timer_runs) or self._has_loop and self._is_watching):
            _wake(self._own_nudge)


cdef bint _is_repeatable(PacketSocket socket, thing):
    return socket.repeats and type(thing) is bytes and PyBytes_AS_STRING(thing)[0] == REPLIES_


cdef int _made(int fd) except -1:
    if fd < 0:
        PyErr_SetFromErrno(OSError)
    return fd


cdef bint _changed(int epoll, int operation, int fd, uint32_t events) noexcept nogil:
    cdef epoll_event event
    event.events = events
    event.data.u64 = 0
    event.data.fd = fd
    return epoll_ctl(epoll, operation, fd, &event) == 0


cdef _control(int epoll, int operation, int fd, uint32_t events):
    if not _changed(epoll, operation, fd, events):
        PyErr_SetFromErrno(OSError)


cdef void _wake(int fd) noexcept nogil:
    cdef uint64_t one = 1
    c_write(fd, &one, sizeof(one))


cdef void _drain(int fd) noexcept nogil:
    cdef uint64_t count
    c_read(fd, &count, sizeof(count))


cdef void _set(int timer, int64_t after_ns) noexcept nogil:
    cdef itimerspec when
    when.it_interval.tv_sec = when.it_interval.tv_nsec = 0
    when.it_value.tv_sec = 0
    when.it_value.tv_nsec = max(after_ns, 1)
    timerfd_settime(timer, 0, &when, NULL)


cdef int64_t _now() noexcept:
    cdef timespec time
    clock_gettime(CLOCK_MONOTONIC, &time)
    return <int64_t>time.tv_sec * 1000000000 + time.tv_nsec


cdef bint _is_over(int64_t end_ns) noexcept:
    return end_ns >= 0 and _now() >= end_ns


cdef double _left_s(int64_t end_ns) noexcept:
    return -1 if end_ns < 0 else max(end_ns - _now(), 0) / 1e9


cdef _open(lock):
    try:
        lock.release()
    except RuntimeError:
        pass  # it is open
