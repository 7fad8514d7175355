/* Decoder kernels other than matrix products (norm, rotary, gated activation, attention, sampling), one pass over memory
 * each, for one dtype: float32, or bfloat16 with -DBF16. Compiled, loaded and called by `bindings.py`.
 *
 * The kernels are batch-invariant: one thread computes a row, in an order that depends only on the row's own size, so its
 * bits depend neither on the other rows nor on the number of threads. Sums and exponentials are fp32; the cumulative sum
 * of a draw is fp64. Code that two exported functions share is a function that is never inlined (ALONE), so that both
 * run the same instructions.
 *
 * Shapes: P packed tokens, B decoding rows, H columns, N heads and K KV heads, D head dim, I inner columns, V vocabulary.
 */

#include "vectors.h"

#define SPAN 64   /* KV-cache slots that attention processes at a time */
#define BLOCK 256 /* vocabulary entries whose probabilities are summed together */
#ifdef __clang__
#define ALONE static __attribute__((noinline))
#else
#define ALONE static __attribute__((noinline, noclone))
#endif

/* RMSNorm of one row: to = from / rms(from) * weight; `to` may be `from`. */
ALONE void norm_row(const T *from, const T *weight, T *to, int64_t cols, float eps) {
    vec squares = {0};
    for (int64_t i = 0; i < cols; i += LANES) {
        vec value = take(from + i, cols - i);
        squares += value * value;
    }
    float scale = 1.0f / sqrtf(total(squares) / (float)cols + eps);
    for (int64_t i = 0; i < cols; i += LANES)
        put(to + i, take(from + i, cols - i) * scale * take(weight + i, cols - i), cols - i);
}

/* out[P, H] = x / rms(x) * weight. `delta`, unless NULL, is first added to x in place (the residual connection). */
void norm(T *x, const T *delta, const T *weight, T *out, int64_t rows, int64_t cols, float eps) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * cols > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        T *own = x + row * cols;
        if (delta)
            for (int64_t i = 0; i < cols; i += LANES)
                put(own + i, take(own + i, cols - i) + take(delta + row * cols + i, cols - i), cols - i);
        norm_row(own, weight, out + row * cols, cols, eps);
    }
}

/* Rotates one head in place: its two halves by the angles with cosines c and sines s. */
ALONE void rotate_head(T *low, const T *c, const T *s, int64_t half) {
    T *high = low + half;
    for (int64_t i = 0; i < half; i += LANES) {
        vec a = take(low + i, half - i), b = take(high + i, half - i);
        vec vc = take(c + i, half - i), vs = take(s + i, half - i);
        put(low + i, a * vc - b * vs, half - i);
        put(high + i, b * vc + a * vs, half - i);
    }
}

/* Rotates the first `turned` dimensions of queries and keys of qkv[P, N + 2K, D] in place, after the QK norm if its
 * weights are not NULL. cos, sin: [positions, turned]; only the second half of sin is read. */
void rotate(T *qkv, const int64_t *positions, const T *cos, const T *sin, const T *q_norm, const T *k_norm,
            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t turned, float eps) {
    int64_t half = turned / 2;
#pragma omp parallel for schedule(static) if (rows > 1 && rows * (heads + kv_heads) * dim > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + positions[row] * turned, *s = sin + positions[row] * turned + half;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            T *head = qkv + (row * (heads + 2 * kv_heads) + h) * dim;
            const T *weight = h < heads ? q_norm : k_norm;
            if (weight) norm_row(head, weight, head, dim, eps);
            rotate_head(head, c, s, half);
        }
    }
}

/* out[P, I] = silu(gate) x up, with gate_up[P, 2I]. */
void gate(const T *gate_up, T *out, int64_t rows, int64_t inner) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * inner > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *g = gate_up + row * 2 * inner, *u = g + inner;
        T *to = out + row * inner;
        for (int64_t i = 0; i < inner; i += LANES) {
            vec x = take(g + i, inner - i);
            put(to + i, x / (1.0f + exponential(-x)) * take(u + i, inner - i), inner - i);
        }
    }
}

/* scores[g][t] of `num` queries and `count` keys; rows of q are padded to full vectors. Prefetches the values. */
static inline __attribute__((always_inline)) void dot_keys(const float *q, int64_t wide, const T *keys, const T *values,
                                                           int64_t dim, int64_t count, float (*scores)[SPAN], const int num) {
    float tile[LANES * wide];
    for (int64_t first = 0; first < count; first += LANES) {
        int64_t here = count - first < LANES ? count - first : LANES;
        for (int64_t t = 0; t < here; t++)
            for (int64_t i = 0; i < dim; i += LANES) {
                __builtin_prefetch(values + (first + t) * dim + i);
                *(vec *)(tile + t * wide + i) = take(keys + (first + t) * dim + i, dim - i);
            }
        memset(tile + here * wide, 0, (LANES - here) * wide * sizeof(float));
        for (int g = 0; g < num; g++) {
            vec sums[LANES];
            for (int t = 0; t < LANES; t++) {
                vec sum = {0};
                for (int64_t i = 0; i < wide; i += LANES)
                    sum += *(const vec *)(tile + t * wide + i) * *(const vec *)(q + g * wide + i);
                sums[t] = sum;
            }
            *(vec *)(scores[g] + first) = totals(sums);
        }
    }
}

/* acc[g] = acc[g] * keep[g] + scores[g] values. Prefetches `next`. */
static inline __attribute__((always_inline)) void accumulate_values(float *acc, int64_t wide, const float *keep,
                                                                    const T *values, const T *next, int64_t dim,
                                                                    int64_t count, float (*scores)[SPAN],
                                                                    const int num) {
    for (int64_t i = 0; i < dim; i += LANES) {
        vec sums[4];
        for (int g = 0; g < num; g++) sums[g] = *(vec *)(acc + g * wide + i) * keep[g];
        for (int64_t t = 0; t < count; t++) {
            __builtin_prefetch(next + t * dim + i);
            vec v = take(values + t * dim + i, dim - i);
            for (int g = 0; g < num; g++) sums[g] += v * scores[g][t];
        }
        for (int g = 0; g < num; g++) *(vec *)(acc + g * wide + i) = sums[g];
    }
}

/* KV-cache slots of one head. The first `common` slots, a multiple of SPAN, are read from the first row with the same
 * prompt, which has equal values: so the processor's cache serves all samples of a prompt. If `ring` is not 0, position p
 * is in slot p % ring, a multiple of SPAN, and no slots are common. */
typedef struct {
    const T *keys, *values, *common_keys, *common_values;
    int64_t common, ring;
} Slots;

static inline int64_t slot_of(int64_t position, int64_t ring) { return ring ? position % ring : position; }

static inline const T *keys_at(const Slots *s, int64_t position, int64_t dim) {
    return (position < s->common ? s->common_keys : s->keys) + slot_of(position, s->ring) * dim;
}

static inline const T *values_at(const Slots *s, int64_t position, int64_t dim) {
    return (position < s->common ? s->common_values : s->values) + slot_of(position, s->ring) * dim;
}

/* First position that a query at `position` attends to. */
static inline int64_t begin_of(int64_t position, int64_t window) { return window && position >= window ? position - window + 1 : 0; }

/* Attention of up to four queries over the positions from `begin` to `length` - 1 of one head, span by span with a running
 * maximum (flash). Spans begin at multiples of SPAN, whatever `begin` is. If `sinks` is not NULL, it has a logit of each
 * query that joins the softmax and has no value. */
static inline __attribute__((always_inline)) void attend_some(const T *queries, const Slots *slots, const T *next, T *out,
                                                              const float *sinks, int64_t begin, int64_t length,
                                                              int64_t dim, float scale, const int num) {
    int64_t wide = (dim + LANES - 1) / LANES * LANES;
    float q[4 * wide], acc[4 * wide], scores[4][SPAN], top[4], sum[4], keep[4];
    memset(acc, 0, sizeof acc);
    for (int g = 0; g < num; g++) {
        top[g] = sinks ? sinks[g] : -INFINITY;
        sum[g] = sinks ? 1.0f : 0.0f;
        for (int64_t i = 0; i < dim; i += LANES) *(vec *)(q + g * wide + i) = take(queries + g * dim + i, dim - i) * scale;
    }
    for (int64_t first = begin / SPAN * SPAN; first < length; first += SPAN) {
        int64_t count = length - first < SPAN ? length - first : SPAN;
        int64_t padded = (count + LANES - 1) / LANES * LANES;
        const T *values = values_at(slots, first, dim);
        dot_keys(q, wide, keys_at(slots, first, dim), values, dim, count, scores, num);
        for (int g = 0; g < num; g++) {
            for (int64_t t = 0; t < begin - first; t++) scores[g][t] = -INFINITY;
            for (int64_t t = count; t < padded; t++) scores[g][t] = -INFINITY;
            vec high = *(vec *)scores[g];
            for (int64_t t = LANES; t < padded; t += LANES) high = larger(high, *(vec *)(scores[g] + t));
            float now = top[g];
            for (int i = 0; i < LANES; i++) now = high[i] > now ? high[i] : now;
            keep[g] = now == top[g] ? 1.0f : expf(top[g] - now);
            top[g] = now;
            vec sums = {0};
            for (int64_t t = 0; t < padded; t += LANES) {
                vec p = exponential(*(vec *)(scores[g] + t) - now);
                *(vec *)(scores[g] + t) = p;
                sums += p;
            }
            sum[g] = sum[g] * keep[g] + total(sums);
        }
        accumulate_values(acc, wide, keep, values, first + SPAN < length ? keys_at(slots, first + SPAN, dim) : next,
                          dim, count, scores, num);
    }
    for (int g = 0; g < num; g++)
        for (int64_t i = 0; i < dim; i += LANES)
            put(out + g * dim + i, *(vec *)(acc + g * wide + i) / sum[g], dim - i);
}

#define ATTEND(num)                                                                                                    \
    ALONE void attend_##num(const T *queries, const Slots *slots, const T *next, T *out, const float *sinks,           \
                            int64_t begin, int64_t length, int64_t dim, float scale) {                                \
        attend_some(queries, slots, next, out, sinks, begin, length, dim, scale, num);                                \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)

/* Attention of a token's queries that share one KV head (GQA), over the positions from `begin` to `length` - 1. Prefetches
 * `after`. */
static inline void attend_group(const T *queries, const Slots *slots, const T *after, T *out, const float *sinks,
                                int64_t group, int64_t begin, int64_t length, int64_t dim, float scale) {
    for (int64_t g = 0; g < group; g += 4) {
        const T *some = queries + g * dim, *next = g + 4 < group ? keys_at(slots, begin / SPAN * SPAN, dim) : after;
        T *to = out + g * dim;
        const float *own = sinks ? sinks + g : NULL;
        switch (group - g) {
        case 1: attend_1(some, slots, next, to, own, begin, length, dim, scale); break;
        case 2: attend_2(some, slots, next, to, own, begin, length, dim, scale); break;
        case 3: attend_3(some, slots, next, to, own, begin, length, dim, scale); break;
        default: attend_4(some, slots, next, to, own, begin, length, dim, scale);
        }
    }
}

/* Writes the keys and values of new tokens into the first rows of the KV cache [row, head, slot, D] at their positions,
 * and computes causal attention out[P, N, D] of each token over its row. Row r has the tokens firsts[r] to
 * firsts[r + 1] - 1 at consecutive positions; if `firsts` is NULL, the token r. If `homes` is not NULL, the first
 * commons[r] slots of row r equal those of row homes[r]. q[N, D], k[K, D] and v[K, D] of consecutive tokens are `stride`
 * apart. A token attends to the last `window` positions (0: to all), and `ring` is that of `Slots`, at least `window` plus
 * the number of tokens per row less 1. `sinks` are those of `attend_some` for all heads, or NULL. */
void attend(const T *q, const T *k, const T *v, int64_t stride, const int64_t *positions, const int64_t *firsts,
            const int64_t *homes, const int64_t *commons, T *keys, T *values, T *out, int64_t rows, int64_t heads,
            int64_t kv_heads, int64_t dim, int64_t row_stride, int64_t head_stride, int64_t window, int64_t ring, float scale,
            const float *sinks) {
    int64_t group = heads / kv_heads;
    if (ring) homes = NULL;
#pragma omp parallel for schedule(dynamic) if (rows * kv_heads > 1)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
        int64_t row = task / kv_heads, head = task % kv_heads;
        T *own_keys = keys + row * row_stride + head * head_stride;
        T *own_values = values + row * row_stride + head * head_stride;
        int64_t from = homes ? homes[row] * row_stride + head * head_stride : 0, end = firsts ? firsts[row + 1] : row + 1;
        Slots slots = {own_keys, own_values, keys + from, values + from, homes ? commons[row] / SPAN * SPAN : 0, ring};
        for (int64_t token = firsts ? firsts[row] : row; token < end; token++) {
            int64_t position = positions[token], slot = slot_of(position, ring), begin = begin_of(position, window);
            memcpy(own_keys + slot * dim, k + token * stride + head * dim, dim * sizeof(T));
            memcpy(own_values + slot * dim, v + token * stride + head * dim, dim * sizeof(T));
            attend_group(q + token * stride + head * group * dim, &slots,
                         token + 1 < end ? keys_at(&slots, begin / SPAN * SPAN, dim) : own_keys + head_stride,
                         out + (token * heads + head * group) * dim, sinks ? sinks + head * group : NULL, group, begin,
                         position + 1, dim, scale);
        }
    }
}

/* Causal attention for P tokens whose keys and values are in the KV cache already: token p is at position positions[p] of
 * row rows[p]. `window`, `ring` and `sinks` are those of `attend`. */
void attend_at(const T *q, int64_t stride, const int64_t *rows, const int64_t *positions, const T *keys, const T *values,
               T *out, int64_t count, int64_t heads, int64_t kv_heads, int64_t dim, int64_t row_stride,
               int64_t head_stride, int64_t window, int64_t ring, float scale, const float *sinks) {
    int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic, 16) if (count * kv_heads > 1)
    for (int64_t task = 0; task < count * kv_heads; task++) {
        int64_t token = task % count, head = task / count, from = rows[token] * row_stride + head * head_stride;
        Slots slots = {keys + from, values + from, NULL, NULL, 0, ring};
        attend_group(q + token * stride + head * group * dim, &slots, keys + from + head_stride,
                     out + (token * heads + head * group) * dim, sinks ? sinks + head * group : NULL, group,
                     begin_of(positions[token], window), positions[token] + 1, dim, scale);
    }
}

/* Uniform number in [0, 1), equal to `functional.sampling.uniforms`: SplitMix64 with the position as the counter. */
static inline double uniform(int64_t key, int64_t position) {
    uint64_t state = (uint64_t)key + ((uint64_t)position + 1) * 0x9E3779B97F4A7C15u;
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
    state = (state ^ state >> 27) * 0x94D049BB133111EBu;
    state ^= state >> 31;
    return (double)(state >> 11) * 0x1p-53;
}

static inline vec logits_at(const T *logits, int64_t left, float inverse) {
    return (left >= LANES ? load(logits) : load_part(logits, left, -INFINITY)) * inverse;
}

static inline float highest(vec x) {
    float found = x[0];
    for (int i = 1; i < LANES; i++) found = x[i] > found ? x[i] : found;
    return found;
}

/* Index in a block of `count` tokens at which the cumulative sum, `before` at its start, exceeds `target`. If rounding
 * keeps the sum below the target: the last token with a nonzero probability. */
static inline int64_t pick_in_block(const T *logits, int64_t count, float inverse, float base, float share, double before,
                             double target) {
    float weights[BLOCK];
    int64_t chosen = 0;
    for (int64_t i = 0; i < count; i += LANES)
        *(vec *)(weights + i) = exponential(logits_at(logits + i, count - i, inverse) - base) * share;
    for (int64_t i = 0; i < count; i++) {
        if (!(weights[i] > 0.0f)) continue;
        chosen = i;
        before += weights[i];
        if (before > target) break;
    }
    return chosen;
}

/* Softmax statistics of one row of logits / temperature. `row_stats` also returns per block: its largest finite logit
 * (bases), e^(base - top) (shares), and the sum of e^(logit - top) (sums). */
typedef struct {
    float top;      /* largest logit */
    int64_t best;   /* block of the largest logit */
    int64_t last;   /* last block with a nonzero probability */
    double all;     /* sum of e^(logit - top) */
} RowStats;

ALONE RowStats row_stats(const T *own, int64_t vocabulary, float inverse, float *bases, float *shares, float *sums) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK, padded = (blocks + LANES - 1) / LANES * LANES, block;
    RowStats found = {-INFINITY, 0, 0, 0.0};
    for (block = 0; block < blocks; block++) {
        const T *from = own + block * BLOCK;
        int64_t count = vocabulary - block * BLOCK < BLOCK ? vocabulary - block * BLOCK : BLOCK;
        vec high = splat(-INFINITY), sum = {0};
        for (int64_t i = 0; i < count; i += LANES) high = larger(logits_at(from + i, count - i, inverse), high);
        float most = highest(high);
        bases[block] = most > -INFINITY ? most : 0.0f;
        for (int64_t i = 0; i < count; i += LANES)
            sum += exponential(logits_at(from + i, count - i, inverse) - bases[block]);
        sums[block] = total(sum);
        if (most > found.top) {
            found.top = most;
            found.best = block;
        }
    }
    for (; block < padded; block++) bases[block] = sums[block] = 0.0f;
    for (block = 0; block < padded; block += LANES)
        *(vec *)(shares + block) = exponential(*(vec *)(bases + block) - found.top);
    for (block = 0; block < blocks; block++) {
        if (sums[block] == 0.0f) continue; /* no finite logit: the base is a placeholder */
        sums[block] *= shares[block];
        found.all += sums[block];
        if (sums[block] > 0.0f) found.last = block;
    }
    return found;
}

ALONE float logprob_of(const T *logit, float inverse, RowStats row) {
    return (float)((double)(load_part(logit, 1, 0.0f)[0] * inverse - row.top) - log(row.all));
}

static inline int64_t padded_blocks(int64_t vocabulary) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK;
    return (blocks + LANES - 1) / LANES * LANES;
}

/* Samples the next token of each row of logits[P, V] from softmax(logits / temperature) and returns its log-probability:
 * the most likely token if `greedy`, else inverse transform sampling with `uniform(key, count)`, first over blocks, then
 * inside one. Memory is read once, since each block is summed relative to its own largest logit. If a logit is NaN or
 * none is finite, the log-probability is not finite. */
void sample(const T *logits, int64_t stride, const int64_t *keys, const int64_t *counts, int64_t *tokens,
            float *logprobs, int64_t rows, int64_t vocabulary, float temperature, int greedy) {
    int64_t room = padded_blocks(vocabulary);
    float inverse = 1.0f / temperature;
#pragma omp parallel for schedule(static) if (rows > 1 && rows * vocabulary > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *own = logits + row * stride;
        float bases[room], shares[room], sums[room];
        RowStats found = row_stats(own, vocabulary, inverse, bases, shares, sums);
        double before = 0.0, target = uniform(keys[row], counts[row]) * found.all;
        int64_t token, block;
        if (greedy) {
            for (token = found.best * BLOCK; token < vocabulary - 1; token++)
                if (load_part(own + token, 1, 0.0f)[0] * inverse == found.top) break;
        } else {
            for (block = 0; block < found.last && !(before + sums[block] > target); block++) before += sums[block];
            int64_t count = vocabulary - block * BLOCK < BLOCK ? vocabulary - block * BLOCK : BLOCK;
            token = block * BLOCK +
                    pick_in_block(own + block * BLOCK, count, inverse, bases[block], shares[block], before, target);
        }
        tokens[row] = token;
        logprobs[row] = logprob_of(own + token, inverse, found);
    }
}

/* Log-probability of each row's token, with the bits of `sample`. */
void score(const T *logits, int64_t stride, const int64_t *tokens, float *logprobs, int64_t rows, int64_t vocabulary,
           float temperature) {
    int64_t room = padded_blocks(vocabulary);
    float inverse = 1.0f / temperature;
#pragma omp parallel for schedule(static) if (rows > 1 && rows * vocabulary > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *own = logits + row * stride;
        float bases[room], shares[room], sums[room];
        logprobs[row] = logprob_of(own + tokens[row], inverse, row_stats(own, vocabulary, inverse, bases, shares, sums));
    }
}
