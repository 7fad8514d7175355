/* x[P, I] weight[O, I]^T + bias[O] in one order of summation, whatever the rows beside it, for one dtype: float32, or
 * bfloat16 with -DBF16.
 *
 * Each element of the product is one chain of fused multiply-adds over I, from the first input to the last, in fp32: it
 * is added to in no other order for few rows or many, in any place of the matrix, by any number of threads, and also
 * where the weight is one rank's part of its rows. bfloat16 is rounded once, after the bias. Where the processor
 * multiplies pairs of bfloat16, the chain goes on by pairs; where it has tiles of them (AMX), by a tile's pairs.
 *
 * Packed weights are panels of PANEL outputs: [panel][step][PANEL][STEP]. Rows are packed in blocks of TALL:
 * [block][step][TALL], a step being one input, or a pair.
 */

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#include "vectors.h"

#define PANEL (2 * LANES)
#define BLOCKS 8 /* of rows that a task takes */
#define LINE (64 / (int64_t)sizeof(T)) /* elements that come from memory together */
#define NEAR (1 << 19) /* bytes that a cache near a core holds beside other things */
#define LARGE (1 << 20) /* bytes of a weight that a cache near a core does not hold */
#ifdef __AVX512F__
#define TALL 12
#else
#define TALL 6
#endif
#ifndef BF16
#define IN_PLACE /* rows are what is multiplied */
#endif

#if defined(BF16) && defined(__AVX512BF16__)
#define STEP 2
typedef uint32_t X; /* two neighbours */
#else
#define STEP 1
typedef float X;
#endif

#if STEP == 2 && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_ROWS 16 /* of a tile, or steps of one */
#endif

#if STEP == 1
static inline vec weights_at(const T *panel) { return load(panel); }

static inline vec added(vec sum, X x, vec w) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps(_mm512_set1_ps(x), (__m512)w, (__m512)sum);
#elif defined(__FMA__)
    return (vec)_mm256_fmadd_ps(_mm256_set1_ps(x), (__m256)w, (__m256)sum);
#else
    for (int i = 0; i < LANES; i++) sum[i] = __builtin_fmaf(x, w[i], sum[i]);
    return sum;
#endif
}
#else
static inline vec weights_at(const T *panel) { return (vec)_mm512_loadu_ps((const float *)panel); }

static inline vec added(vec sum, X x, vec w) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)(__m512)w);
}
#endif

static inline int64_t steps_of(int64_t ins) {
#ifdef TILE_ROWS
    return (ins + STEP * TILE_ROWS - 1) / (STEP * TILE_ROWS) * TILE_ROWS; /* whole tiles: the rest is 0 */
#else
    return (ins + STEP - 1) / STEP;
#endif
}

/* For a buffer: elements of a packed weight. */
int64_t packed_size(int64_t outs, int64_t ins) { return (outs + PANEL - 1) / PANEL * PANEL * steps_of(ins) * STEP; }

/* Blocks of rows that are read where they lie. */
static inline int64_t whole_blocks(int64_t rows) {
#ifdef IN_PLACE
    return rows / TALL;
#else
    (void)rows;
    return 0;
#endif
}

/* For a buffer: bytes of packed rows. */
int64_t rows_size(int64_t rows, int64_t ins) {
    return ((rows + TALL - 1) / TALL - whole_blocks(rows)) * TALL * steps_of(ins) * sizeof(X);
}

/* Squares of 32-bit values, LANES rows of LANES, are turned in registers: a step of a panel is a value of each row. */
#if defined(__has_builtin) && (STEP == 2 || !defined(BF16))
#if __has_builtin(__builtin_shufflevector)
#define TURNS
#endif
#endif

#ifdef TURNS
typedef uvec anywhere __attribute__((aligned(2), may_alias));

/* The upper rows' right blocks change places with the lower rows' left ones, in blocks of `half`. */
#if LANES == 16
#define PICK(a, b, f) __builtin_shufflevector(a, b, f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), \
                                              f(12), f(13), f(14), f(15))
#else
#define PICK(a, b, f) __builtin_shufflevector(a, b, f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7))
#endif
#define SWAP(half)                                                                                                     \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) if (!(i & half)) {                                        \
        uvec upper = rows[i], lower = rows[i + half];                                                                  \
        rows[i] = PICK(upper, lower, UPPER_##half);                                                                    \
        rows[i + half] = PICK(upper, lower, LOWER_##half);                                                             \
    }
#define UPPER(i, half) ((i) & half ? LANES + (i) - half : (i))
#define LOWER(i, half) ((i) & half ? LANES + (i) : (i) + half)
#define UPPER_8(i) UPPER(i, 8)
#define LOWER_8(i) LOWER(i, 8)
#define UPPER_4(i) UPPER(i, 4)
#define LOWER_4(i) LOWER(i, 4)
#define UPPER_2(i) UPPER(i, 2)
#define LOWER_2(i) LOWER(i, 2)
#define UPPER_1(i) UPPER(i, 1)
#define LOWER_1(i) LOWER(i, 1)

#ifdef __AVX512F__
#define PAST_CACHES(to, value) _mm512_stream_si512((void *)(to), (__m512i)(value))
#elif defined(__AVX__)
#define PAST_CACHES(to, value) _mm256_stream_si256((void *)(to), (__m256i)(value))
#endif

static inline void turn_square(const T *from, int64_t stride, T *to, int past_caches) {
    uvec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = *(const anywhere *)(from + i * stride);
#if LANES == 16
    SWAP(8)
#endif
    SWAP(4)
    SWAP(2)
    SWAP(1)
#ifdef PAST_CACHES
    if (past_caches) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) PAST_CACHES(to + i * PANEL * STEP, rows[i]);
        return;
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(anywhere *)(to + i * PANEL * STEP) = rows[i];
}
#endif

/* A large weight is not read again before others have taken its place in the caches: it is written past them. */
void pack(const T *weight, T *packed, int64_t outs, int64_t ins) {
    int64_t panels = (outs + PANEL - 1) / PANEL, steps = steps_of(ins);
#ifdef PAST_CACHES
    int past_caches = outs * ins * sizeof(T) >= LARGE && (uintptr_t)packed % sizeof(vec) == 0;
#else
    int past_caches = 0;
#endif
#pragma omp parallel for schedule(static) if (outs * ins > SMALL)
    for (int64_t panel = 0; panel < panels; panel++) {
        const T *own = weight + panel * PANEL * ins;
        T *to = packed + panel * steps * PANEL * STEP;
        int64_t here = outs - panel * PANEL < PANEL ? outs - panel * PANEL : PANEL, turned = 0;
        if (here < PANEL || ins < steps * STEP) memset(to, 0, steps * PANEL * STEP * sizeof(T));
#ifdef TURNS
        if (here == PANEL)
            for (; turned + LANES <= ins / STEP; turned += LANES)
                for (int64_t n = 0; n < PANEL; n += LANES)
                    turn_square(own + n * ins + turned * STEP, ins, to + (turned * PANEL + n) * STEP, past_caches);
#endif
        for (int64_t first = turned * STEP; first < ins; first += 64) { /* what was read stays near */
            int64_t last = ins - first < 64 ? ins : first + 64;
            for (int64_t n = 0; n < here; n++) {
                const T *from = own + n * ins;
                for (int64_t k = first; k < last; k++) to[(k / STEP * PANEL + n) * STEP + k % STEP] = from[k];
            }
        }
#ifdef PAST_CACHES
        _mm_sfence();
#endif
    }
    (void)past_caches;
}

static void pack_rows(const T *x, int64_t stride, X *to, int64_t count, int64_t ins) {
    int64_t steps = steps_of(ins);
    if (count < TALL || ins < steps * STEP) memset(to, 0, steps * TALL * sizeof(X));
    for (int64_t m = 0; m < count; m++) {
        const T *from = x + m * stride;
        for (int64_t k = 0; k < ins; k++) {
#if STEP == 2
            ((T *)(to + k / 2 * TALL + m))[k % 2] = from[k];
#elif defined(BF16)
            uint32_t bits = (uint32_t)from[k] << 16;
            memcpy(to + k * TALL + m, &bits, sizeof bits);
#else
            to[k * TALL + m] = from[k];
#endif
        }
    }
}

/* With `fetches`, as much as the panel has is fetched from `next` meanwhile: a processor that is left to itself waits for
 * memory at each panel. */
static inline __attribute__((always_inline)) void tile(const X *x, int64_t row, int64_t step, const T *panel,
                                                       const T *next, int64_t steps, const float *bias, T *out,
                                                       int64_t stride, int64_t rows, int64_t columns, const int num,
                                                       const int fetches) {
    vec low[TALL], high[TALL];
    const X *thirds[(TALL + 2) / 3]; /* of which a processor addresses three rows */
#pragma GCC unroll 16
    for (int i = 0; i < (num + 2) / 3; i++) thirds[i] = x + 3 * i * row;
#pragma GCC unroll 16
    for (int m = 0; m < num; m++) low[m] = high[m] = (vec){0};
    for (int64_t k = 0; k < steps; k++) {
        if (fetches)
#pragma GCC unroll 16
            for (int64_t n = 0; n < PANEL * STEP; n += LINE) __builtin_prefetch(next + k * PANEL * STEP + n, 0, 2);
        vec a = weights_at(panel + k * PANEL * STEP), b = weights_at(panel + (k * PANEL + LANES) * STEP);
#pragma GCC unroll 16
        for (int m = 0; m < num; m++) {
            X value = thirds[m / 3][m % 3 * row + k * step];
            low[m] = added(low[m], value, a);
            high[m] = added(high[m], value, b);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < num; m++) {
        if (m >= rows) break;
        T *to = out + m * stride;
        vec first = low[m] + *(const vec *)bias, second = high[m] + *(const vec *)(bias + LANES);
        put(to, first, columns);
        if (columns > LANES) put(to + LANES, second, columns - LANES);
    }
}

/* A panel and the blocks of rows that a task multiplies by it; its weights, and those of the panel after it, if any. */
typedef struct {
    int64_t first, last, column, columns;
    const T *weights, *next;
    float bias[PANEL];
} Part;

static inline int64_t spans_of(int64_t blocks) { return (blocks + BLOCKS - 1) / BLOCKS; }

static inline Part part_of(int64_t task, const T *packed, const T *bias, int64_t outs, int64_t blocks, int64_t steps) {
    int64_t spans = spans_of(blocks), column = task / spans * PANEL, first = task % spans * BLOCKS;
    const T *weights = packed + column * steps * STEP;
    Part part = {first, first + BLOCKS < blocks ? first + BLOCKS : blocks, column, outs - column, weights,
                 outs - column > PANEL ? weights + steps * PANEL * STEP : 0, {0}};
    for (int64_t i = 0; bias && i < (part.columns < PANEL ? part.columns : PANEL); i++)
        part.bias[i] = load_part(bias + column + i, 1, 0.0f)[0];
    return part;
}

#ifdef TILE_ROWS
#define TALL_TILES (2 * TILE_ROWS) /* rows that are multiplied at a time */

/* Whether the kernel lets this process use tiles, which it is asked for once. */
int64_t by_tiles(void) {
    static int known;
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* their data */) ? -1 : 1;
    return known > 0;
}

/* Tiles 0 to 3 are sums, of `upper` and then of `lower` rows, 4 and 5 those rows, 6 and 7 weights. */
static void shape_tiles(int upper, int lower) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64;
    _tile_loadconfig(&shape);
}

/* As `tile`, of up to TALL_TILES rows. */
static void multiply_tiles(const T *x, int64_t x_stride, const T *panel, const T *next, int64_t steps, const float *bias,
                           T *out, int64_t stride, int64_t rows, int64_t columns) {
    float sums[4][TILE_ROWS * LANES] __attribute__((aligned(64)));
    int64_t between = PANEL * STEP * sizeof(T), apart = x_stride * sizeof(T);
    int both = rows > TILE_ROWS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; k += TILE_ROWS) {
        if (next)
            for (int64_t n = 0; n < TILE_ROWS * PANEL * STEP; n += LINE)
                __builtin_prefetch(next + k * PANEL * STEP + n, 0, 2);
        _tile_loadd(6, panel + k * PANEL * STEP, between);
        _tile_loadd(7, panel + (k * PANEL + LANES) * STEP, between);
        _tile_loadd(4, x + k * STEP, apart);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (both) {
            _tile_loadd(5, x + TILE_ROWS * x_stride + k * STEP, apart);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], LANES * sizeof(float));
    _tile_stored(1, sums[1], LANES * sizeof(float));
    _tile_stored(2, sums[2], LANES * sizeof(float));
    _tile_stored(3, sums[3], LANES * sizeof(float));
    for (int64_t m = 0; m < rows; m++) {
        const float *low = sums[m / TILE_ROWS * 2] + m % TILE_ROWS * LANES, *high = low + TILE_ROWS * LANES;
        T *to = out + m * stride;
        put(to, *(const vec *)low + *(const vec *)bias, columns);
        if (columns > LANES) put(to + LANES, *(const vec *)high + *(const vec *)(bias + LANES), columns - LANES);
    }
}

static void product_by_tiles(const T *x, int64_t stride, const T *packed, const T *bias, T *out, T *scratch, int64_t rows,
                             int64_t outs, int64_t ins) {
    int64_t steps = steps_of(ins), panels = (outs + PANEL - 1) / PANEL, wide = steps * STEP, copies = ins < wide;
    int64_t blocks = (rows + TALL_TILES - 1) / TALL_TILES, spans = spans_of(blocks);
    const T *xs = copies ? scratch : x;
    int64_t apart = copies ? wide : stride;
#pragma omp parallel if (rows * outs * ins > 64 * SMALL)
    {
        int64_t shaped = 0;
        if (copies) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < rows; row++) {
                memcpy(scratch + row * wide, x + row * stride, ins * sizeof(T));
                memset(scratch + row * wide + ins, 0, (wide - ins) * sizeof(T));
            }
        }
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels * spans; task++) {
            Part part = part_of(task, packed, bias, outs, blocks, steps);
            for (int64_t block = part.first; block < part.last; block++) {
                int64_t left = rows - block * TALL_TILES, count = left < TALL_TILES ? left : TALL_TILES;
                const T *next = block == part.first ? part.next : 0;
                if (count != shaped)
                    shape_tiles(count < TILE_ROWS ? count : TILE_ROWS, count > TILE_ROWS ? count - TILE_ROWS : 1);
                shaped = count;
                multiply_tiles(xs + block * TALL_TILES * apart, apart, part.weights, next, steps, part.bias,
                               out + block * TALL_TILES * outs + part.column, outs, count, part.columns);
            }
        }
        if (shaped) _tile_release();
    }
}
#else
int64_t by_tiles(void) { return 0; }
#endif

/* out[P, O]; `scratch` has `rows_size` bytes. */
void product(const T *x, int64_t stride, const T *packed, const T *bias, T *out, void *scratch, int64_t rows, int64_t outs,
             int64_t ins) {
#ifdef TILE_ROWS
    if (by_tiles()) {
        product_by_tiles(x, stride, packed, bias, out, scratch, rows, outs, ins);
        return;
    }
#endif
    int64_t steps = steps_of(ins), panels = (outs + PANEL - 1) / PANEL, blocks = (rows + TALL - 1) / TALL;
    int64_t spans = spans_of(blocks), in_place = whole_blocks(rows);
    X *packed_rows = scratch;
#pragma omp parallel if (rows * outs * ins > 64 * SMALL)
    {
#pragma omp for schedule(static)
        for (int64_t block = in_place; block < blocks; block++)
            pack_rows(x + block * TALL * stride, stride, packed_rows + (block - in_place) * TALL * steps,
                      rows - block * TALL < TALL ? rows - block * TALL : TALL, ins);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels * spans; task++) {
            Part part = part_of(task, packed, bias, outs, blocks, steps);
            for (int64_t block = part.first; block < part.last; block++) {
                int64_t count = rows - block * TALL < TALL ? rows - block * TALL : TALL;
                const X *own = packed_rows + (block - in_place) * TALL * steps;
                const T *next = block == part.first ? part.next : 0;
                T *to = out + block * TALL * outs + part.column;
#define MULTIPLY(from, row, step, num)                                                                                 \
    {                                                                                                                  \
        if (next) tile(from, row, step, part.weights, next, steps, part.bias, to, outs, count, part.columns, num, 1);  \
        else tile(from, row, step, part.weights, next, steps, part.bias, to, outs, count, part.columns, num, 0);       \
        continue;                                                                                                      \
    }
#ifdef IN_PLACE
                if (block < in_place) MULTIPLY(x + block * TALL * stride, stride, 1, TALL)
#endif
                if (count <= 1) MULTIPLY(own, 1, TALL, 1)
                if (count <= 2) MULTIPLY(own, 1, TALL, 2)
                if (count <= 4) MULTIPLY(own, 1, TALL, 4)
#if TALL > 6
                if (count <= 6) MULTIPLY(own, 1, TALL, 6)
                if (count <= 8) MULTIPLY(own, 1, TALL, 8)
#endif
                MULTIPLY(own, 1, TALL, TALL)
            }
        }
    }
}

void gate(const T *gate_up, T *out, int64_t rows, int64_t inner); /* kernels.c */

/* Rows that `mlp` takes at a time: as many as leave room for their inner columns in a cache near a core, but not so few
 * that their numbers are fewer than the weights', which are read for each. */
int64_t mlp_rows(int64_t rows, int64_t cols, int64_t inner) {
    int64_t most = NEAR / (3 * inner * (int64_t)sizeof(T)), blocks;
    most = most < cols ? cols : most;
    blocks = (rows + most - 1) / most;
    return blocks < 2 ? rows : ((rows + blocks - 1) / blocks + TALL - 1) / TALL * TALL;
}

/* For a buffer: bytes of what `mlp` keeps of so many rows, or fewer, which may leave a block of TALL that is not whole. */
int64_t mlp_size(int64_t rows, int64_t cols, int64_t inner) {
    int64_t longest = cols > inner ? cols : inner;
    return 3 * rows * inner * (int64_t)sizeof(T) + rows_size(rows, longest) + rows_size(TALL - 1, longest);
}

/* out[P, H] = (silu(gate) x up) down^T of [gate; up] = x[P, H] first^T, `block` rows at a time; `scratch` has `mlp_size`
 * bytes of these. */
void mlp(const T *x, int64_t stride, const T *first, const T *first_bias, const T *down, const T *down_bias, T *out,
         T *scratch, int64_t rows, int64_t block, int64_t cols, int64_t inner) {
    T *gate_up = scratch, *gated = gate_up + 2 * block * inner, *packed_rows = gated + block * inner;
    for (int64_t row = 0; row < rows; row += block) {
        int64_t count = rows - row < block ? rows - row : block;
        product(x + row * stride, stride, first, first_bias, gate_up, packed_rows, count, 2 * inner, cols);
        gate(gate_up, gated, count, inner);
        product(gated, inner, down, down_bias, out + row * cols, packed_rows, count, cols, inner);
    }
}
