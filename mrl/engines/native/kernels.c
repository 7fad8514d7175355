/* What stands between the products of a decoder, in one pass over memory each, for one dtype: float32, or bfloat16 with
 * -DBF16. `compiled.py` compiles, loads and calls it.
 *
 * Every row is computed by one thread, in an order that depends on the row's own size alone: its bits depend neither on
 * the other rows nor on the threads. Sums and exponentials are fp32, the draw's cumulative sum is fp64.
 *
 * Shapes: P packed tokens, B decoding rows, H columns, N heads and K KV heads, D head dim, I inner columns, V vocabulary.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(BF16) && defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define SMALL (1 << 14) /* elements: below it a second thread costs more than it does */
#define SPAN 64         /* cache slots that attention takes at a time */
#define BLOCK 256       /* tokens whose probabilities are summed together */

typedef float vec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4), aligned(4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2), aligned(2)));

#ifdef BF16
typedef uint16_t T;

static inline vec widen(hvec half) { return (vec)(__builtin_convertvector(half, uvec) << 16); }

#ifdef __AVX512BF16__
static inline hvec narrow(vec x) { return (hvec)_mm512_cvtneps_pbh((__m512)x); }
#else
static inline hvec narrow(vec x) { /* to nearest, ties to even; what is not a number stays so */
    uvec bits = (uvec)x;
    uvec rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    uvec is_nan = (uvec)(x != x);
    return __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), hvec);
}
#endif

static inline vec load(const T *from) { return widen(*(const hvec *)from); }
static inline void store(T *to, vec x) { *(hvec *)to = narrow(x); }
static inline vec round_to(vec x) { return widen(narrow(x)); }
typedef hvec raw;
#else
typedef float T;
static inline vec load(const T *from) { return *(const vec *)from; }
static inline void store(T *to, vec x) { *(vec *)to = x; }
static inline vec round_to(vec x) { return x; }
typedef vec raw;
#endif

/* The last vector of a row that does not end on a whole one; the rest of it is `rest`. */
static inline vec load_part(const T *from, int64_t count, float rest) {
    T part[LANES] = {0};
    memcpy(part, from, count * sizeof(T));
    vec x = load(part);
    for (int64_t i = count; i < LANES; i++) x[i] = rest;
    return x;
}

static inline void store_part(T *to, vec x, int64_t count) {
    T part[LANES];
    store(part, x);
    memcpy(to, part, count * sizeof(T));
}

static inline vec take(const T *from, int64_t left) { return left >= LANES ? load(from) : load_part(from, left, 0.0f); }

static inline void put(T *to, vec x, int64_t left) {
    if (left >= LANES) store(to, x);
    else store_part(to, x, left);
}

static inline vec splat(float x) { return x - (vec){0}; }

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#else
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#endif

/* Sums of neighbours: those of a, then those of b. */
static inline vec pairs(vec a, vec b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
#else
    return __builtin_shuffle(a, b, (ivec){EVEN}) + __builtin_shuffle(a, b, (ivec){ODD});
#endif
}

/* The sum of each of LANES vectors. */
static inline vec totals(vec *x) {
    for (int width = LANES; width > 1; width /= 2)
        for (int i = 0; i < width / 2; i++) x[i] = pairs(x[2 * i], x[2 * i + 1]);
    return x[0];
}

static inline float total(vec x) {
    for (int width = LANES; width > 1; width /= 2) x = pairs(x, x);
    return x[0];
}

static inline vec choose(ivec where, vec a, vec b) { return (vec)((where & (ivec)a) | (~where & (ivec)b)); }

static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }

/* e^x within 2 units in the last place; 0 below -87, what is not a number stays so. Cephes' polynomial. */
static inline vec exponential(vec x) {
    ivec tiny = x < -87.0f;
    x = choose(x > 88.0f, splat(88.0f), x);
    x = choose(tiny, splat(-87.0f), x);
    vec shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 x 2^23: the sum's last bits are the whole number */
    vec whole = shifted - 12582912.0f;
    vec r = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    uvec power = ((uvec)shifted << 23) + (127u << 23) - ((uvec)splat(12582912.0f) << 23);
    vec result = p * (vec)power;
    return choose(tiny, (vec){0}, result);
}

/* out[P, H] = x / rms(x) * weight; where there is a delta it is added to x first, in place. */
void norm(T *x, const T *delta, const T *weight, T *out, int64_t rows, int64_t cols, float eps) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * cols > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        T *own = x + row * cols, *to = out + row * cols;
        const T *more = delta ? delta + row * cols : 0;
        vec squares = {0};
        for (int64_t i = 0; i < cols; i += LANES) {
            vec value = take(own + i, cols - i);
            if (more) {
                value = round_to(value + take(more + i, cols - i));
                put(own + i, value, cols - i);
            }
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(total(squares) / (float)cols + eps);
        for (int64_t i = 0; i < cols; i += LANES)
            put(to + i, take(own + i, cols - i) * scale * take(weight + i, cols - i), cols - i);
    }
}

static inline void norm_head(T *head, const T *weight, int64_t dim, float eps) {
    vec squares = {0};
    for (int64_t i = 0; i < dim; i += LANES) {
        vec value = take(head + i, dim - i);
        squares += value * value;
    }
    float scale = 1.0f / sqrtf(total(squares) / (float)dim + eps);
    for (int64_t i = 0; i < dim; i += LANES)
        put(head + i, take(head + i, dim - i) * scale * take(weight + i, dim - i), dim - i);
}

/* Queries and keys in qkv[P, N + 2K, D], in place: normed where the model does, and rotated. cos, sin: [positions, D],
 * of which the second half of sin is read. */
void rotate(T *qkv, const int64_t *positions, const T *cos, const T *sin, const T *q_norm, const T *k_norm,
            int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, float eps) {
    int64_t half = dim / 2;
#pragma omp parallel for schedule(static) if (rows > 1 && rows * (heads + kv_heads) * dim > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + positions[row] * dim, *s = sin + positions[row] * dim + half;
        for (int64_t h = 0; h < heads + kv_heads; h++) {
            T *low = qkv + (row * (heads + 2 * kv_heads) + h) * dim, *high = low + half;
            const T *weight = h < heads ? q_norm : k_norm;
            if (weight) norm_head(low, weight, dim, eps);
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = take(low + i, half - i), b = take(high + i, half - i);
                vec vc = take(c + i, half - i), vs = take(s + i, half - i);
                put(low + i, a * vc - b * vs, half - i);
                put(high + i, b * vc + a * vs, half - i);
            }
        }
    }
}

/* out[P, I] = silu(gate) x up of gate_up[P, 2I]. */
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

/* scores[g][t] of `num` queries and `count` keys; q holds whole vectors. The values are read next. */
static inline __attribute__((always_inline)) void score(const float *q, int64_t wide, const T *keys, const T *values,
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

/* acc[g] = acc[g] * keep[g] + scores[g] values; `next` is read next. */
static inline __attribute__((always_inline)) void mix(float *acc, int64_t wide, const float *keep, const T *values,
                                                      const T *next, int64_t dim, int64_t count, float (*scores)[SPAN],
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

/* Up to four queries over `length` slots of one head, span by span with a running maximum. */
static inline __attribute__((always_inline)) void attend_some(const T *queries, const T *keys, const T *values, const T *next,
                                                              T *out, int64_t length, int64_t dim, float scale,
                                                              const int num) {
    int64_t wide = (dim + LANES - 1) / LANES * LANES;
    float q[4 * wide], acc[4 * wide], scores[4][SPAN], top[4], sum[4], keep[4];
    memset(acc, 0, sizeof acc);
    for (int g = 0; g < num; g++) {
        top[g] = -INFINITY;
        sum[g] = 0.0f;
        for (int64_t i = 0; i < dim; i += LANES) *(vec *)(q + g * wide + i) = take(queries + g * dim + i, dim - i) * scale;
    }
    for (int64_t first = 0; first < length; first += SPAN) {
        int64_t count = length - first < SPAN ? length - first : SPAN;
        int64_t whole = (count + LANES - 1) / LANES * LANES;
        score(q, wide, keys + first * dim, values + first * dim, dim, count, scores, num);
        for (int g = 0; g < num; g++) {
            for (int64_t t = count; t < whole; t++) scores[g][t] = -INFINITY;
            vec high = *(vec *)scores[g];
            for (int64_t t = LANES; t < whole; t += LANES) high = larger(high, *(vec *)(scores[g] + t));
            float now = top[g];
            for (int i = 0; i < LANES; i++) now = high[i] > now ? high[i] : now;
            keep[g] = now == top[g] ? 1.0f : expf(top[g] - now);
            top[g] = now;
            vec sums = {0};
            for (int64_t t = 0; t < whole; t += LANES) {
                vec p = exponential(*(vec *)(scores[g] + t) - now);
                *(vec *)(scores[g] + t) = p;
                sums += p;
            }
            sum[g] = sum[g] * keep[g] + total(sums);
        }
        mix(acc, wide, keep, values + first * dim, first + SPAN < length ? keys + (first + SPAN) * dim : next, dim, count,
            scores, num);
    }
    for (int g = 0; g < num; g++)
        for (int64_t i = 0; i < dim; i += LANES)
            put(out + g * dim + i, *(vec *)(acc + g * wide + i) / sum[g], dim - i);
}

/* New tokens of the first rows of the cache, whose keys and values [row, head, slot, D] they enter at their positions:
 * attention of each over its row's slots up to its own. Row r has tokens firsts[r] to firsts[r + 1] - 1, at one position
 * after the other; without `firsts`, token r. A token's q[N, D], k[K, D] and v[K, D] are `stride` from the last one's;
 * out[P, N, D]. */
void attend(const T *q, const T *k, const T *v, int64_t stride, const int64_t *positions, const int64_t *firsts, T *keys,
            T *values, T *out, int64_t rows, int64_t heads, int64_t kv_heads, int64_t dim, int64_t row_stride,
            int64_t head_stride, float scale) {
    int64_t group = heads / kv_heads;
#pragma omp parallel for schedule(dynamic) if (rows * kv_heads > 1)
    for (int64_t task = 0; task < rows * kv_heads; task++) {
        int64_t row = task / kv_heads, head = task % kv_heads;
        T *own_keys = keys + row * row_stride + head * head_stride;
        T *own_values = values + row * row_stride + head * head_stride;
        int64_t end = firsts ? firsts[row + 1] : row + 1;
        for (int64_t token = firsts ? firsts[row] : row; token < end; token++) {
            int64_t position = positions[token];
            const T *queries = q + token * stride + head * group * dim;
            memcpy(own_keys + position * dim, k + token * stride + head * dim, dim * sizeof(T));
            memcpy(own_values + position * dim, v + token * stride + head * dim, dim * sizeof(T));
            for (int64_t g = 0; g < group; g += 4) {
                const T *some = queries + g * dim;
                const T *next = own_keys + (g + 4 < group || token + 1 < end ? 0 : head_stride);
                T *to = out + (token * heads + head * group + g) * dim;
                switch (group - g) {
                case 1: attend_some(some, own_keys, own_values, next, to, position + 1, dim, scale, 1); break;
                case 2: attend_some(some, own_keys, own_values, next, to, position + 1, dim, scale, 2); break;
                case 3: attend_some(some, own_keys, own_values, next, to, position + 1, dim, scale, 3); break;
                default: attend_some(some, own_keys, own_values, next, to, position + 1, dim, scale, 4);
                }
            }
        }
    }
}

/* `functional.sampling.uniforms`: SplitMix64 of the key, the position as its counter. */
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

/* Token of a block, of which `count` are left in the row, at `target` of the cumulative sum that is `before` ahead of it;
 * at rounding's edge the last token that weighs something. */
static inline int64_t inside(const T *logits, int64_t count, float inverse, float base, float share, double before,
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

/* The next token of each row of logits[P, V] and its log-probability, of softmax(logits / temperature): the most likely
 * one, or the one at `uniform(key, count)` of the cumulative sum, which runs over blocks, then inside one. Memory is
 * read once: each block's weights are summed relative to its own largest. Where a logit is not a number, or none is
 * finite, the log-probability is not finite. */
void sample(const T *logits, int64_t stride, const int64_t *keys, const int64_t *counts, int64_t *tokens,
            float *logprobs, int64_t rows, int64_t vocabulary, float temperature, int greedy) {
    int64_t blocks = (vocabulary + BLOCK - 1) / BLOCK, whole = (blocks + LANES - 1) / LANES * LANES;
    float inverse = 1.0f / temperature;
#pragma omp parallel for schedule(static) if (rows > 1 && rows * vocabulary > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *own = logits + row * stride;
        float bases[whole], shares[whole], sums[whole], top = -INFINITY;
        int64_t block, best = 0, last = 0;
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
            if (most > top) {
                top = most;
                best = block;
            }
        }
        for (; block < whole; block++) bases[block] = sums[block] = 0.0f;
        double all = 0.0;
        for (block = 0; block < whole; block += LANES)
            *(vec *)(shares + block) = exponential(*(vec *)(bases + block) - top);
        for (block = 0; block < blocks; block++) {
            if (sums[block] == 0.0f) continue; /* its base is no logit */
            sums[block] *= shares[block];
            all += sums[block];
            if (sums[block] > 0.0f) last = block;
        }
        double before = 0.0, target = uniform(keys[row], counts[row]) * all;
        int64_t token;
        if (greedy) {
            for (token = best * BLOCK; token < vocabulary - 1; token++)
                if (load_part(own + token, 1, 0.0f)[0] * inverse == top) break;
        } else {
            for (block = 0; block < last && !(before + sums[block] > target); block++) before += sums[block];
            int64_t count = vocabulary - block * BLOCK < BLOCK ? vocabulary - block * BLOCK : BLOCK;
            token = block * BLOCK +
                    inside(own + block * BLOCK, count, inverse, bases[block], shares[block], before, target);
        }
        tokens[row] = token;
        logprobs[row] = (float)((double)(load_part(own + token, 1, 0.0f)[0] * inverse - top) - log(all));
    }
}
