# cython: boundscheck=False, wraparound=False
"""`FutureState`: what a future is made of, in C, since there is one for each call; `Gate`: where a thread waits.

A script may have many thousands of calls on their way. So a pending future is one object, with no lock, no list and no
function of its own, and the cyclic garbage collector does not look at it as long as it cannot be a part of a cycle: it
is tracked once it has something that may lead back to it: a callback, an error, or a result that is a container.

It needs no lock because it holds the interpreter's: nothing releases that between a check and the action after it.
Objects are created before the check and released after the action, since both may run code of others.

What only this package does with a future is a function here, not a method, since users have futures, too.
"""

cimport cython
from cpython.pythread cimport PyThread_get_thread_ident

from _thread import allocate_lock

from skipper.control.model import forked
from skipper.control.model.exception_text import is_interrupt

cdef extern from "Python.h":
    void PyObject_GC_Track(object thing)
    void PyObject_GC_UnTrack(object thing)
    int PyObject_GC_IsTracked(object thing)
    int PyObject_IS_GC(object thing)

cdef object _NOTHING = object()
cdef object _reader = None
cdef object _call = None


def set_reader(reader):
    """Make the threads of this process that wait at gates read for ``reader``; None: none of them reads."""
    global _reader
    _reader = reader


def reader():
    """The reader that they read for."""
    return _reader


def call_by(call):
    """Have the callbacks of futures called by ``call(callback)``, which raises nothing but interrupts."""
    global _call
    _call = call


@cython.final
cdef class Gate:
    """Where one thread waits until another thread opens it; each opening lets it continue once.

    Attributes:
        is_open: whether the next wait returns at once.
        lock: what the thread waits for while it does not read.
        reader: the reader that it reads for at this moment; None if there is none.
    """

    cdef public bint is_open
    cdef readonly object lock
    cdef public object reader

    def __cinit__(self):
        self.lock = allocate_lock()
        self.lock.acquire()

    def open(self):
        """Let the thread continue; from any thread."""
        self.is_open = True  # before the check of the reader, which checks in the opposite order
        reads = self.reader
        if reads is not None:
            reads.nudge()
        try:
            self.lock.release()
        except RuntimeError:
            pass  # it is open

    def wait(self, timeout_s=-1, *, takes_all=False):
        """Wait until it is opened, and close it; or until the time is over. One thread only.

        Args:
            timeout_s: seconds, -1 for no limit.
            takes_all: see `Reader.wait`.
        """
        if _reader is not None:
            _reader.wait(self, timeout_s, takes_all)
        else:
            self.lock.acquire(timeout=timeout_s)
        self.is_open = False


cdef class FutureState:
    """How a future ends, and who learns of it. For any thread; only the first end counts.

    Attributes:
        pending: what the end depends on, for the message of an error; None once it has ended.
    """

    cdef object __weakref__
    cdef object _open  # the first caller that asks for the result calls it; then None
    cdef object _given  # its argument
    cdef object _value
    cdef object _error
    cdef object _pending
    cdef object _callback  # the first callback for the end
    cdef list _callbacks  # the others
    cdef object _opened  # a lock for callers that ask while another thread opens the result
    cdef unsigned long _opener  # that thread; 0: none
    cdef bint _is_settled
    cdef bint _tells  # whether a thread calls the callbacks

    def __cinit__(self, *args, **kwargs):
        PyObject_GC_UnTrack(self)

    @property
    def pending(self):
        return self._pending

    @pending.setter
    def pending(self, pending):
        self._track()  # it holds its callbacks
        self._pending = pending

    def done(self):
        """Whether there is a result or an error."""
        return self._is_settled

    cdef void _track(self) noexcept:
        if not PyObject_GC_IsTracked(self):
            PyObject_GC_Track(self)

    cdef _open_once(self):
        """Find out how it ended, unless another thread does that or has done it."""
        cdef unsigned long me = PyThread_get_thread_ident()
        while self._open is not None:
            if self._opener == me:
                raise RuntimeError("a result is asked for by what is called to make it")
            if self._opener != 0:
                self._await_opener()
                continue
            self._opener = me
            open_result, given = self._open, self._given
            try:
                value = open_result() if given is _NOTHING else open_result(given)
            except BaseException as error:  # kept, and raised as often as asked for
                if is_interrupt(error):
                    self._end_opening()
                    raise
                self._track()
                self._error = error
            else:
                if PyObject_IS_GC(value):
                    self._track()
                self._value = value
            self._given = None
            self._open = None  # last: code that no longer finds it relies on the other fields
            self._end_opening()

    cdef _await_opener(self):
        forked.check()  # a forked copy of the process does not have that thread
        opened = self._opened
        if opened is None:
            opened = allocate_lock()
            opened.acquire()
            if self._opener == 0:
                return
            if self._opened is None:
                self._opened = opened
            else:
                opened = self._opened
        opened.acquire()
        opened.release()

    cdef _end_opening(self):
        opened, self._opened = self._opened, None
        self._opener = 0
        if opened is not None:
            opened.release()


def settle(FutureState self not None, open_result, given=_NOTHING):
    """End with what ``open_result`` returns or raises; the first caller that asks for the result calls it.

    Args:
        open_result: called without arguments, or with ``given``; then a function that knows nothing of this future.
        given: its argument.
    """
    if not (self._is_settled or given is not _NOTHING and _is_plain(given)):
        self._track()
    if not self._is_settled:
        self._open = open_result
        self._given = given
        self._is_settled = True
    elif self._tells:
        return
    pending, self._pending = self._pending, None
    self._tells = True
    try:  # one by one: if an interrupt comes here, the caller settles it again, and no waiter is forgotten
        while self._callback is not None:
            _tell(self._callback)
            self._callback = self._callbacks.pop(0) if self._callbacks else None
    finally:
        self._tells = False


def when_settled(FutureState state not None, callback):
    """Call ``callback()`` at the end, in the thread that causes the end; or now, if it has ended.

    Args:
        state: state of the future.
        callback: a function; or a `Gate`, which is opened.
    """
    cdef list others = None
    if not state._is_settled:
        if type(callback) is not Gate:
            state._track()
        if state._callback is not None:
            others = []
    if state._is_settled:
        _tell(callback)
    elif state._callback is None:
        state._callback = callback
    else:
        if state._callbacks is None:
            state._callbacks = others
        state._callbacks.append(callback)


def error_of(FutureState state not None):
    """The error of a future that is done; None if it has a result.

    The first thread that asks opens what has arrived.
    """
    if state._open is not None:
        state._open_once()
    return state._error


def value_of(FutureState state not None):
    """The result of a future, after a call of `error_of`."""
    return state._value


def is_opened(FutureState state not None):
    """Whether somebody has asked how a future has ended; True if it is not done."""
    return state._open is None


cdef _tell(callback):
    if type(callback) is Gate:
        (<Gate>callback).open()
    else:
        _call(callback)


cdef bint _is_plain(given):
    """Whether a payload is one segment of bytes, which refers to nothing."""
    return type(given) is tuple and len(<tuple>given) == 1 and type((<tuple>given)[0]) is bytes
