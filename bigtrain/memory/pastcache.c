/* Copies that do not pass through the processor's cache: streaming stores, which need not read the target first.
   Four pages side by side keep more of the memory busy than one (docs/log.md). And such copies that are hashed on the way.
   Compiled and loaded by pastcache.py. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

enum { LINE = 64, PAGE = 4096, SIDE_BY_SIDE = 4 };

static inline void copy_line(char *target, const char *source) {
    const __m128i *from = (const __m128i *)source;
    __m128i *to = (__m128i *)target;
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
}

void bigtrain_copy(char *target, const char *source, size_t bytes) {
    size_t head = (size_t)(-(uintptr_t)target & (LINE - 1)), at = 0;
    if (head > bytes) head = bytes;
    memcpy(target, source, head);
    target += head, source += head, bytes -= head;
    for (; at + SIDE_BY_SIDE * PAGE <= bytes; at += SIDE_BY_SIDE * PAGE)
        for (size_t part = at; part < at + PAGE; part += 4 * LINE)
            for (size_t page = part; page < part + SIDE_BY_SIDE * PAGE; page += PAGE)
                for (size_t line = page; line < page + 4 * LINE; line += LINE) copy_line(target + line, source + line);
    for (; at + LINE <= bytes; at += LINE) copy_line(target + at, source + at);
    _mm_sfence();
    memcpy(target + at, source + at, bytes - at);
}
#else
void bigtrain_copy(char *target, const char *source, size_t bytes) { memcpy(target, source, bytes); }
#endif

/* Of the xxhash library, for one kind of hash. */
typedef struct {
    int (*reset)(void *state);
    int (*update)(void *state, const void *input, size_t bytes);
    uint64_t (*digest)(const void *state);
} hasher;

/* Copies bytes that go on where the last call with this state ended; returns how many chunks they completed, with their
   digests. `held`: bytes of the unfinished chunk. Pieces are hashed and then copied, so that they are in the cache between. What is
   at `target` already is hashed only. */
size_t bigtrain_copy_hashed(const hasher *hash, void *state, size_t *held, size_t chunk, size_t piece, char *target,
                            const char *source, size_t bytes, uint64_t *digests) {
    size_t complete = 0;
    while (bytes) {
        size_t part = chunk - *held;
        if (part > piece) part = piece;
        if (part > bytes) part = bytes;
        hash->update(state, source, part);
        if (target != source) bigtrain_copy(target, source, part);
        target += part, source += part, bytes -= part, *held += part;
        if (*held == chunk) {
            digests[complete++] = hash->digest(state);
            hash->reset(state);
            *held = 0;
        }
    }
    return complete;
}

/* Hashes runs of bytes that lie ready: each is the next `counts[run]` of the parts. Returns how many chunks there are, the shorter
   one at a run's end included, with their digests in order. One call for many runs: see hashing.py. */
size_t bigtrain_hash_runs(const hasher *hash, void *state, size_t chunk, size_t piece, size_t runs, const size_t *counts,
                          char *const *parts, const size_t *bytes, uint64_t *digests) {
    size_t found = 0, part = 0;
    for (size_t run = 0; run < runs; run++) {
        size_t held = 0, end = part + counts[run];
        hash->reset(state);
        for (; part < end; part++)
            found += bigtrain_copy_hashed(hash, state, &held, chunk, piece, parts[part], parts[part], bytes[part], digests + found);
        if (held) digests[found++] = hash->digest(state);
    }
    return found;
}
