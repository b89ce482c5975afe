/* Atomic operations on the 8-byte words of buffers, as every part of the data plane that runs on a CPU does them: with
 * one another, for operations from all sources.
 */
#ifndef SKIPPER_ATOMICS_H
#define SKIPPER_ATOMICS_H

#include <stdint.h>

/* Both return what the word held before. */
static inline uint64_t skipper_fetch_add(uint64_t at, uint64_t value)
{
    return __atomic_fetch_add((uint64_t *)(uintptr_t)at, value, __ATOMIC_SEQ_CST);
}

static inline uint64_t skipper_compare_and_swap(uint64_t at, uint64_t compare, uint64_t desired)
{
    __atomic_compare_exchange_n((uint64_t *)(uintptr_t)at, &compare, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return compare; /* left alone where it was equal, else what was found */
}

#endif
