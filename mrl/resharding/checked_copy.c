/* A copy that adds up the bit patterns of what it reads, in one pass over memory, and the sum alone. `checked_copy.py` calls
 * them; `resharding/checksum.py` says what the sums are.
 *
 * A large copy is written past the caches: its target is not read again soon, and lines that are written whole need not
 * be fetched from memory first.
 */

#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define STREAMED (1 << 17) /* bytes of a copy from which on it is written past the caches */
#define TASK (1 << 18)     /* bytes of a row that are taken at a time */
#define READS 4            /* places at which a sum reads at the same time: what fetches ahead ends with each page */
#define WRITES 2           /* places at which a copy does */

#if defined(__AVX512F__)
#define BYTES 64
#define STREAM(to, value) _mm512_stream_si512((void *)(to), (__m512i)(value))
#elif defined(__AVX__)
#define BYTES 32
#define STREAM(to, value) _mm256_stream_si256((void *)(to), (__m256i)(value))
#elif defined(__SSE2__)
#define BYTES 16
#define STREAM(to, value) _mm_stream_si128((void *)(to), (__m128i)(value))
#endif

#ifdef STREAM
#define SETTLE() _mm_sfence() /* others see what was written past the caches */
#else
#define BYTES 16
#define STREAM(to, value) (*(to) = (value))
#define SETTLE()
#endif

/* A processor takes a load for one of what it has just stored if their addresses differ by whole pages, and waits: where
 * stores run a little ahead of loads, within the page, the copy goes from the end to the beginning. */
#define PAGE 4096
#define BEHIND(target, source) (((uintptr_t)(target) - (uintptr_t)(source) - 1) % PAGE < 512)

#define FOR_WIDTH(type)                                                                                                \
    typedef type part_##type __attribute__((vector_size(BYTES), may_alias));                                           \
    typedef type loose_##type __attribute__((vector_size(BYTES), may_alias, aligned(sizeof(type))));                   \
    static type all_of_##type(part_##type sums) {                                                                      \
        type sum = 0;                                                                                                  \
        for (size_t n = 0; n < BYTES / sizeof(type); n++) sum += sums[n];                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static type sum_##type(const type *values, int64_t count) {                                                        \
        const int64_t each = BYTES / sizeof(type), lane = count / READS / each * each;                                 \
        part_##type sums = {0};                                                                                        \
        type sum = 0;                                                                                                  \
        for (int64_t i = 0; i < lane; i += each)                                                                       \
            for (int n = 0; n < READS; n++) sums += *(const loose_##type *)(values + n * lane + i);                    \
        for (int64_t i = READS * lane; i < count; i++) sum += values[i];                                               \
        return sum + all_of_##type(sums);                                                                              \
    }                                                                                                                  \
    static type copy_##type(type *restrict target, const type *restrict source, int64_t count) {                       \
        type sum = 0;                                                                                                  \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            target[i] = source[i];                                                                                     \
            sum += source[i];                                                                                          \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static type stream_##type(type *restrict target, const type *restrict source, int64_t count) {                     \
        const int64_t each = BYTES / sizeof(type);                                                                     \
        int64_t first = (-(uintptr_t)target & (BYTES - 1)) / sizeof(type);                                             \
        if (first > count) first = count;                                                                              \
        const int64_t lane = (count - first) / WRITES / each * each, end = first + WRITES * lane;                      \
        const int down = BEHIND(target, source);                                                                       \
        int64_t i = down ? first + lane - each : first;                                                                \
        part_##type sums = {0};                                                                                        \
        for (int64_t done = 0; done < lane; done += each, i += down ? -each : each)                                    \
            for (int n = 0; n < WRITES; n++) {                                                                         \
                part_##type value = *(const loose_##type *)(source + n * lane + i);                                    \
                STREAM((part_##type *)(target + n * lane + i), value);                                                 \
                sums += value;                                                                                         \
            }                                                                                                          \
        return all_of_##type(sums) + copy_##type(target, source, first) +                                              \
               copy_##type(target + end, source + end, count - end);                                                   \
    }

FOR_WIDTH(uint8_t)
FOR_WIDTH(uint16_t)
FOR_WIDTH(uint32_t)
FOR_WIDTH(uint64_t)

/* Elements one after the other; `target` NULL: they are not copied. */
static uint64_t run(char *target, const char *source, int64_t count, int64_t width, int streamed) {
#define CASE(bytes, type)                                                                                              \
    case bytes:                                                                                                        \
        return !target   ? sum_##type((const type *)source, count)                                                     \
               : streamed ? stream_##type((type *)target, (const type *)source, count)                                 \
                          : copy_##type((type *)target, (const type *)source, count);
    switch (width) {
        CASE(1, uint8_t)
        CASE(2, uint16_t)
        CASE(4, uint32_t)
        CASE(8, uint64_t)
    }
    return 0;
}

/* Copies `rows` x `count` elements of `width` bytes, whose rows begin so many bytes apart; the sum of what was read, of
 * which the lower `width` bytes count. */
uint64_t copy_rows(char *target, const char *source, int64_t rows, int64_t count, int64_t target_step,
                   int64_t source_step, int64_t width) {
    const int streamed = rows * count * width >= STREAMED;
    const int64_t each = TASK / width;
    uint64_t sum = 0;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t first = 0; first < count; first += each)
            sum += run(target ? target + row * target_step + first * width : 0, source + row * source_step + first * width,
                       count - first < each ? count - first : each, width, streamed);
    SETTLE();
    return sum;
}
