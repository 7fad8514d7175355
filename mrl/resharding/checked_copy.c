/* Copies elements and sums their bit patterns in one pass over memory, or sums them only. Called by `checked_copy.py`;
 * `resharding/checksum.py` defines the sums.
 *
 * Large copies use non-temporal stores: the target is not read again soon, and completely written cache lines need not
 * be fetched from memory first.
 */

#include <stddef.h>
#include <stdint.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define STREAMED (1 << 17) /* smallest copy with non-temporal stores, bytes */
#define TASK (1 << 18)     /* part of a row that is processed at a time, bytes */
#define READS 4            /* streams that a sum reads concurrently: hardware prefetch stops at page borders */
#define WRITES 2           /* streams that a copy reads and writes concurrently */

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
#define SETTLE() _mm_sfence() /* makes non-temporal stores visible to other cores */
#else
#define BYTES 16
#define STREAM(to, value) (*(to) = (value))
#define SETTLE()
#endif

/* 4K aliasing: a load stalls on a recent store whose address differs by a multiple of the page size. Where stores are
 * slightly ahead of loads modulo the page size, the copy runs from the end to the beginning. */
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

/* Processes contiguous elements; `target` NULL: sums without copying. */
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

/* Copies `rows` x `count` elements of `width` bytes; `*_step` is the distance between rows in bytes. Returns the sum of
 * the elements read; only its lower `width` bytes are valid. */
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
