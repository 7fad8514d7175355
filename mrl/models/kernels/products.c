/* Batch-invariant matrix product x[P, I] weight[O, I]^T + bias[O] for one dtype: float32, or bfloat16 with -DBF16.
 *
 * Each element is one chain of fused multiply-adds over I, in fp32, from the first input to the last. The order is the
 * same for any number of rows or threads, any place in the matrix, and for a tensor-parallel slice of the outputs.
 * bfloat16 is rounded once, after the bias. With AVX512-BF16 the chain advances by pairs of inputs; with AMX by the
 * pairs of a tile.
 *
 * Packed weights are panels of PANEL outputs: [panel][step][PANEL][STEP]. Rows are packed in blocks of MICRO_ROWS:
 * [block][step][MICRO_ROWS]. A step is STEP inputs: one, or a pair.
 */

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif
#include "vectors.h"

#define PANEL (2 * LANES)
#define BLOCKS 8 /* blocks of rows per task */
#define LINE (64 / (int64_t)sizeof(T)) /* elements per cache line */
#define NEAR (1 << 19) /* bytes of a core's L2 cache that can be used for intermediate results */
#define LARGE (1 << 20) /* bytes of a weight that does not fit into a core's L2 cache */
#ifdef __AVX512F__
#define MICRO_ROWS 12
#else
#define MICRO_ROWS 6
#endif
#ifndef BF16
#define IN_PLACE /* full blocks of rows are multiplied where they are, without packing */
#endif

#if defined(BF16) && defined(__AVX512BF16__)
#define STEP 2
typedef uint32_t X; /* two consecutive inputs */
#else
#define STEP 1
typedef float X;
#endif

#if STEP == 2 && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define TILE_ROWS 16 /* rows of an AMX tile, and steps per tile */
#endif

#if STEP == 1
static inline vec weights_at(const T *panel) { return load(panel); }

static inline vec multiply_add(vec sum, X x, vec w) {
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

static inline vec multiply_add(vec sum, X x, vec w) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)x), (__m512bh)(__m512)w);
}
#endif

static inline int64_t steps_of(int64_t ins) {
#ifdef TILE_ROWS
    return (ins + STEP * TILE_ROWS - 1) / (STEP * TILE_ROWS) * TILE_ROWS; /* padded with zeros to full tiles */
#else
    return (ins + STEP - 1) / STEP;
#endif
}

/* Size of a packed weight, elements. */
int64_t packed_size(int64_t outs, int64_t ins) { return (outs + PANEL - 1) / PANEL * PANEL * steps_of(ins) * STEP; }

/* Number of row blocks that are not packed. */
static inline int64_t unpacked_blocks(int64_t rows) {
#ifdef IN_PLACE
    return rows / MICRO_ROWS;
#else
    (void)rows;
    return 0;
#endif
}

/* Size of the buffer for packed rows, bytes. */
int64_t rows_size(int64_t rows, int64_t ins) {
    return ((rows + MICRO_ROWS - 1) / MICRO_ROWS - unpacked_blocks(rows)) * MICRO_ROWS * steps_of(ins) * sizeof(X);
}

/* LANES x LANES squares of 32-bit values are transposed in registers, since a step of a panel has one value per row. */
#if defined(__has_builtin) && (STEP == 2 || !defined(BF16))
#if __has_builtin(__builtin_shufflevector)
#define TRANSPOSES
#endif
#endif

#ifdef TRANSPOSES
typedef uvec anywhere __attribute__((aligned(2), may_alias));

/* Swaps the right blocks of the upper rows with the left blocks of the lower rows, in blocks of `half`. */
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
#define STREAM_STORE(to, value) _mm512_stream_si512((void *)(to), (__m512i)(value))
#elif defined(__AVX__)
#define STREAM_STORE(to, value) _mm256_stream_si256((void *)(to), (__m256i)(value))
#endif

static inline void transpose_square(const T *from, int64_t stride, T *to, int non_temporal) {
    uvec rows[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) rows[i] = *(const anywhere *)(from + i * stride);
#if LANES == 16
    SWAP(8)
#endif
    SWAP(4)
    SWAP(2)
    SWAP(1)
#ifdef STREAM_STORE
    if (non_temporal) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) STREAM_STORE(to + i * PANEL * STEP, rows[i]);
        return;
    }
#endif
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(anywhere *)(to + i * PANEL * STEP) = rows[i];
}
#endif

/* Packs a weight. A large one would be evicted before its next use, so it is written with non-temporal stores. */
void pack(const T *weight, T *packed, int64_t outs, int64_t ins) {
    int64_t panels = (outs + PANEL - 1) / PANEL, steps = steps_of(ins);
#ifdef STREAM_STORE
    int non_temporal = outs * ins * sizeof(T) >= LARGE && (uintptr_t)packed % sizeof(vec) == 0;
#else
    int non_temporal = 0;
#endif
#pragma omp parallel for schedule(static) if (outs * ins > SMALL)
    for (int64_t panel = 0; panel < panels; panel++) {
        const T *own = weight + panel * PANEL * ins;
        T *to = packed + panel * steps * PANEL * STEP;
        int64_t here = outs - panel * PANEL < PANEL ? outs - panel * PANEL : PANEL, transposed = 0;
        if (here < PANEL || ins < steps * STEP) memset(to, 0, steps * PANEL * STEP * sizeof(T));
#ifdef TRANSPOSES
        if (here == PANEL)
            for (; transposed + LANES <= ins / STEP; transposed += LANES)
                for (int64_t n = 0; n < PANEL; n += LANES)
                    transpose_square(own + n * ins + transposed * STEP, ins, to + (transposed * PANEL + n) * STEP,
                                     non_temporal);
#endif
        for (int64_t first = transposed * STEP; first < ins; first += 64) { /* in chunks, so that reads hit the cache */
            int64_t last = ins - first < 64 ? ins : first + 64;
            for (int64_t n = 0; n < here; n++) {
                const T *from = own + n * ins;
                for (int64_t k = first; k < last; k++) to[(k / STEP * PANEL + n) * STEP + k % STEP] = from[k];
            }
        }
#ifdef STREAM_STORE
        _mm_sfence();
#endif
    }
    (void)non_temporal;
}

static void pack_rows(const T *x, int64_t stride, X *to, int64_t count, int64_t ins) {
    int64_t steps = steps_of(ins);
    if (count < MICRO_ROWS || ins < steps * STEP) memset(to, 0, steps * MICRO_ROWS * sizeof(X));
    for (int64_t m = 0; m < count; m++) {
        const T *from = x + m * stride;
        for (int64_t k = 0; k < ins; k++) {
#if STEP == 2
            ((T *)(to + k / 2 * MICRO_ROWS + m))[k % 2] = from[k];
#elif defined(BF16)
            uint32_t bits = (uint32_t)from[k] << 16;
            memcpy(to + k * MICRO_ROWS + m, &bits, sizeof bits);
#else
            to[k * MICRO_ROWS + m] = from[k];
#endif
        }
    }
}

/* Microkernel: `num` rows times one panel. If `fetches`, it prefetches the panel at `next`, since the hardware prefetcher
 * would stall at the start of each panel. */
static inline __attribute__((always_inline)) void tile(const X *x, int64_t row, int64_t step, const T *panel,
                                                       const T *next, int64_t steps, const float *bias, T *out,
                                                       int64_t stride, int64_t rows, int64_t columns, const int num,
                                                       const int fetches) {
    vec low[MICRO_ROWS], high[MICRO_ROWS];
    const X *thirds[(MICRO_ROWS + 2) / 3]; /* one base pointer per three rows: x86 addresses base + {0, 1, 2} x row */
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
            low[m] = multiply_add(low[m], value, a);
            high[m] = multiply_add(high[m], value, b);
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

/* One task: blocks of rows [first, last) times one panel; `next` is the following panel, NULL at the end. */
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
#define AMX_ROWS (2 * TILE_ROWS) /* rows per multiplication */

/* Whether this process may use AMX; requests the permission from the kernel once. */
int64_t uses_amx(void) {
    static int known;
    if (!known) known = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XFEATURE_XTILEDATA */) ? -1 : 1;
    return known > 0;
}

/* Tiles 0 to 3: sums, of the `upper` and the `lower` rows; 4 and 5: these rows; 6 and 7: weights. */
static void configure_amx_tiles(int upper, int lower) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1, .rows = {upper, upper, lower, lower, upper, lower, TILE_ROWS, TILE_ROWS}};
    for (int tile = 0; tile < 8; tile++) shape.bytes[tile] = 64;
    _tile_loadconfig(&shape);
}

/* Like `tile`, with AMX and up to AMX_ROWS rows. */
static void multiply_amx(const T *x, int64_t x_stride, const T *panel, const T *next, int64_t steps, const float *bias,
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

static void product_amx(const T *x, int64_t stride, const T *packed, const T *bias, T *out, T *scratch, int64_t rows,
                             int64_t outs, int64_t ins) {
    int64_t steps = steps_of(ins), panels = (outs + PANEL - 1) / PANEL, wide = steps * STEP, copies = ins < wide;
    int64_t blocks = (rows + AMX_ROWS - 1) / AMX_ROWS, spans = spans_of(blocks);
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
                int64_t left = rows - block * AMX_ROWS, count = left < AMX_ROWS ? left : AMX_ROWS;
                const T *next = block == part.first ? part.next : 0;
                if (count != shaped)
                    configure_amx_tiles(count < TILE_ROWS ? count : TILE_ROWS, count > TILE_ROWS ? count - TILE_ROWS : 1);
                shaped = count;
                multiply_amx(xs + block * AMX_ROWS * apart, apart, part.weights, next, steps, part.bias,
                               out + block * AMX_ROWS * outs + part.column, outs, count, part.columns);
            }
        }
        if (shaped) _tile_release();
    }
}
#else
int64_t uses_amx(void) { return 0; }
#endif

/* out[P, O] = x[P, I] packed^T + bias; `scratch` has `rows_size` bytes. */
void product(const T *x, int64_t stride, const T *packed, const T *bias, T *out, void *scratch, int64_t rows, int64_t outs,
             int64_t ins) {
#ifdef TILE_ROWS
    if (uses_amx()) {
        product_amx(x, stride, packed, bias, out, scratch, rows, outs, ins);
        return;
    }
#endif
    int64_t steps = steps_of(ins), panels = (outs + PANEL - 1) / PANEL, blocks = (rows + MICRO_ROWS - 1) / MICRO_ROWS;
    int64_t spans = spans_of(blocks), in_place = unpacked_blocks(rows);
    X *packed_rows = scratch;
#pragma omp parallel if (rows * outs * ins > 64 * SMALL)
    {
#pragma omp for schedule(static)
        for (int64_t block = in_place; block < blocks; block++)
            pack_rows(x + block * MICRO_ROWS * stride, stride, packed_rows + (block - in_place) * MICRO_ROWS * steps,
                      rows - block * MICRO_ROWS < MICRO_ROWS ? rows - block * MICRO_ROWS : MICRO_ROWS, ins);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < panels * spans; task++) {
            Part part = part_of(task, packed, bias, outs, blocks, steps);
            for (int64_t block = part.first; block < part.last; block++) {
                int64_t count = rows - block * MICRO_ROWS < MICRO_ROWS ? rows - block * MICRO_ROWS : MICRO_ROWS;
                const X *own = packed_rows + (block - in_place) * MICRO_ROWS * steps;
                const T *next = block == part.first ? part.next : 0;
                T *to = out + block * MICRO_ROWS * outs + part.column;
#define MULTIPLY(from, row, step, num)                                                                                 \
    {                                                                                                                  \
        if (next) tile(from, row, step, part.weights, next, steps, part.bias, to, outs, count, part.columns, num, 1);  \
        else tile(from, row, step, part.weights, next, steps, part.bias, to, outs, count, part.columns, num, 0);       \
        continue;                                                                                                      \
    }
#ifdef IN_PLACE
                if (block < in_place) MULTIPLY(x + block * MICRO_ROWS * stride, stride, 1, MICRO_ROWS)
#endif
                if (count <= 1) MULTIPLY(own, 1, MICRO_ROWS, 1)
                if (count <= 2) MULTIPLY(own, 1, MICRO_ROWS, 2)
                if (count <= 4) MULTIPLY(own, 1, MICRO_ROWS, 4)
#if MICRO_ROWS > 6
                if (count <= 6) MULTIPLY(own, 1, MICRO_ROWS, 6)
                if (count <= 8) MULTIPLY(own, 1, MICRO_ROWS, 8)
#endif
                MULTIPLY(own, 1, MICRO_ROWS, MICRO_ROWS)
            }
        }
    }
}

void gate(const T *gate_up, T *out, int64_t rows, int64_t inner, int64_t gelu); /* kernels.c */

/* Rows that `mlp` processes at a time: as many as keep the intermediate columns in the L2 cache, but enough to amortize
 * reading the weights once per block. */
int64_t mlp_rows(int64_t rows, int64_t cols, int64_t inner) {
    int64_t most = NEAR / (3 * inner * (int64_t)sizeof(T)), blocks;
    most = most < cols ? cols : most;
    blocks = (rows + most - 1) / most;
    return blocks < 2 ? rows : ((rows + blocks - 1) / blocks + MICRO_ROWS - 1) / MICRO_ROWS * MICRO_ROWS;
}

/* Size of the scratch buffer of `mlp` for up to `rows` rows, bytes; includes a partial block of MICRO_ROWS. */
int64_t mlp_size(int64_t rows, int64_t cols, int64_t inner) {
    int64_t longest = cols > inner ? cols : inner;
    return 3 * rows * inner * (int64_t)sizeof(T) + rows_size(rows, longest) + rows_size(MICRO_ROWS - 1, longest);
}

/* out[P, H] = (activation(gate) x up) down^T with [gate; up] = x[P, H] first^T, `block` rows at a time; `scratch` has
 * `mlp_size(block)` bytes. */
void mlp(const T *x, int64_t stride, const T *first, const T *first_bias, const T *down, const T *down_bias, T *out,
         T *scratch, int64_t rows, int64_t block, int64_t cols, int64_t inner, int64_t gelu) {
    T *gate_up = scratch, *gated = gate_up + 2 * block * inner, *packed_rows = gated + block * inner;
    for (int64_t row = 0; row < rows; row += block) {
        int64_t count = rows - row < block ? rows - row : block;
        product(x + row * stride, stride, first, first_bias, gate_up, packed_rows, count, 2 * inner, cols);
        gate(gate_up, gated, count, inner, gelu);
        product(gated, inner, down, down_bias, out + row * cols, packed_rows, count, cols, inner);
    }
}
