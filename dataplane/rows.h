/* Rows: the compiled form of a batch of copies.
 *
 * A row is an N-dimensional box of equally long contiguous runs, with a stride of its own on either side. A million
 * runs of a column slice are one row, so compiling and replaying a batch costs nothing per run outside of C. Python
 * builds rows as an int64 array of shape (n, SKIPPER_ROW_WORDS); its columns are the members below, in order.
 */
#ifndef SKIPPER_ROWS_H
#define SKIPPER_ROWS_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define SKIPPER_MAX_DIMS 6

typedef struct {
    int64_t local;  /* address of the first run on this side */
    int64_t remote; /* the same on the other side, in the address space that the backend uses */
    int64_t run;    /* bytes of one run, > 0 */
    int64_t key;    /* which of the transfer's remote registrations this row is in */
    int64_t ndim;   /* dimensions in use: 0 is a single run */
    struct {
        int64_t count, local_stride, remote_stride;
    } dim[SKIPPER_MAX_DIMS]; /* outermost first */
} skipper_row;

#define SKIPPER_ROW_WORDS ((int)(sizeof(skipper_row) / sizeof(int64_t)))

/* The position of an interrupted walk over the runs of some rows. Zero it, then set rows and end. */
typedef struct {
    const skipper_row *rows;
    int64_t end, row, offset;
    int64_t index[SKIPPER_MAX_DIMS];
    int64_t local, remote; /* of the run that contains offset; valid when entered */
    int entered;
} skipper_cursor;

/* Gives the next piece of at most `limit` bytes; returns 0 when there is none left. */
static inline int skipper_cursor_next(skipper_cursor *at, int64_t limit, int64_t *local, int64_t *remote,
                                      int64_t *nbytes, int64_t *key)
{
    const skipper_row *row;
    int64_t left;
    int64_t d;

    if (at->row >= at->end) {
        return 0;
    }
    row = &at->rows[at->row];
    if (!at->entered) {
        memset(at->index, 0, sizeof(at->index));
        at->local   = row->local;
        at->remote  = row->remote;
        at->offset  = 0;
        at->entered = 1;
    }
    left    = row->run - at->offset;
    *local  = at->local + at->offset;
    *remote = at->remote + at->offset;
    *key    = row->key;
    if (left > limit) {
        *nbytes = limit;
        at->offset += limit;
        return 1;
    }
    *nbytes    = left;
    at->offset = 0;
    for (d = row->ndim - 1; d >= 0; --d) {
        at->local += row->dim[d].local_stride;
        at->remote += row->dim[d].remote_stride;
        if (++at->index[d] < row->dim[d].count) {
            return 1;
        }
        at->index[d] = 0;
        at->local -= row->dim[d].local_stride * row->dim[d].count;
        at->remote -= row->dim[d].remote_stride * row->dim[d].count;
    }
    ++at->row;
    at->entered = 0;
    return 1;
}

/* Shorter runs are not worth the detour around the cache. */
#define SKIPPER_STREAM_RUN 1024

#if defined(__x86_64__)
/* Copies past the cache. A plain store first reads the line that it overwrites; for blocks larger than the cache that
 * is a third of the traffic. The C library does the same, but on machines with much cache only from hundreds of
 * megabytes on, and not across the parts that a large copy is cut into. Ends without a fence: see skipper_fence. */
__attribute__((target("avx2"))) static inline void skipper_stream_run(char *dst, const char *src, size_t nbytes)
{
    size_t head = (size_t)(-(uintptr_t)dst & 31);

    memcpy(dst, src, head);
    dst += head;
    src += head;
    nbytes -= head;
    for (; nbytes >= 128; nbytes -= 128, dst += 128, src += 128) {
        __m256i a, b, c, d;
        _mm_prefetch(src + 1024, _MM_HINT_T0); /* harmless beyond the end: a prefetch never faults */
        _mm_prefetch(src + 1088, _MM_HINT_T0);
        a = _mm256_loadu_si256((const __m256i *)src);
        b = _mm256_loadu_si256((const __m256i *)(src + 32));
        c = _mm256_loadu_si256((const __m256i *)(src + 64));
        d = _mm256_loadu_si256((const __m256i *)(src + 96));
        _mm256_stream_si256((__m256i *)dst, a);
        _mm256_stream_si256((__m256i *)(dst + 32), b);
        _mm256_stream_si256((__m256i *)(dst + 64), c);
        _mm256_stream_si256((__m256i *)(dst + 96), d);
    }
    memcpy(dst, src, nbytes);
}

static inline int skipper_can_stream(void)
{
    return __builtin_cpu_supports("avx2");
}

/* Streamed stores are ordered by nothing else, not even by a release. */
static inline void skipper_fence(void)
{
    _mm_sfence();
}
#else
/* The C library's copies are the processor's fastest, and are ordered like any other stores. */
static inline void skipper_stream_run(char *dst, const char *src, size_t nbytes)
{
    memcpy(dst, src, nbytes);
}

static inline int skipper_can_stream(void)
{
    return 0;
}

static inline void skipper_fence(void)
{
}
#endif

/* memcpy past the cache, where the processor can; done when it returns. */
static inline void skipper_stream(char *dst, const char *src, size_t nbytes)
{
    if (nbytes >= SKIPPER_STREAM_RUN && skipper_can_stream()) {
        skipper_stream_run(dst, src, nbytes);
        skipper_fence();
    } else {
        memcpy(dst, src, nbytes);
    }
}

#define SKIPPER_FIXED_RUN(size)                                                                                        \
    case size:                                                                                                         \
        for (; count > 0; --count, dst += dst_stride, src += src_stride) {                                             \
            memcpy(dst, src, size);                                                                                    \
        }                                                                                                              \
        break

/* Copies `count` runs. The short ones get a loop of their own, where a call of memcpy would cost more than the bytes. */
static inline void skipper_copy_runs(char *dst, const char *src, int64_t run, int64_t count, int64_t dst_stride,
                                     int64_t src_stride, int stream)
{
    if (stream && run >= SKIPPER_STREAM_RUN) {
        for (; count > 0; --count, dst += dst_stride, src += src_stride) {
            skipper_stream_run(dst, src, (size_t)run);
        }
        return;
    }
    switch (run) {
    SKIPPER_FIXED_RUN(1);
    SKIPPER_FIXED_RUN(2);
    SKIPPER_FIXED_RUN(4);
    SKIPPER_FIXED_RUN(8);
    SKIPPER_FIXED_RUN(16);
    SKIPPER_FIXED_RUN(32);
    SKIPPER_FIXED_RUN(64);
    default:
        for (; count > 0; --count, dst += dst_stride, src += src_stride) {
            memcpy(dst, src, (size_t)run);
        }
    }
}

/* Copies rows whose two sides are both addresses of this process; `stream`: past the cache. */
static inline void skipper_copy_rows(const skipper_row *rows, int64_t end, int to_remote, int stream)
{
    int64_t i, d, last;

    stream = stream && skipper_can_stream();

    for (i = 0; i < end; ++i) {
        const skipper_row *row = &rows[i];
        int64_t index[SKIPPER_MAX_DIMS] = {0};
        int64_t local                   = row->local;
        int64_t remote                  = row->remote;

        if (row->ndim == 0) {
            skipper_copy_runs((char *)(to_remote ? remote : local), (const char *)(to_remote ? local : remote),
                              row->run, 1, 0, 0, stream);
            continue;
        }
        last = row->ndim - 1;
        for (;;) {
            if (to_remote) {
                skipper_copy_runs((char *)remote, (const char *)local, row->run, row->dim[last].count,
                                  row->dim[last].remote_stride, row->dim[last].local_stride, stream);
            } else {
                skipper_copy_runs((char *)local, (const char *)remote, row->run, row->dim[last].count,
                                  row->dim[last].local_stride, row->dim[last].remote_stride, stream);
            }
            for (d = last - 1; d >= 0; --d) {
                local += row->dim[d].local_stride;
                remote += row->dim[d].remote_stride;
                if (++index[d] < row->dim[d].count) {
                    break;
                }
                index[d] = 0;
                local -= row->dim[d].local_stride * row->dim[d].count;
                remote -= row->dim[d].remote_stride * row->dim[d].count;
            }
            if (d < 0) {
                break;
            }
        }
    }
    if (stream) {
        skipper_fence();
    }
}

#endif
