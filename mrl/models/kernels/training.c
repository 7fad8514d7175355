/* Decoder kernels for training, forward and backward, one pass over memory each, for one dtype: float32, or bfloat16 with
 * -DBF16. Called by `training.py`.
 *
 * Sums are fp32, in an order that depends only on the sizes: any number of threads gives the same bits.
 *
 * Shapes: P packed tokens, H columns, N heads and K KV heads, D head dim, I inner columns, R runs of queries, F families.
 */

#include <float.h>
#include <omp.h>
#include "vectors.h"

#define ROWS 32 /* rows per partial sum of the norm's weight gradient; queries per block of attention */
#ifdef __AVX512F__
#define MICRO_ROWS 8
#else
#define MICRO_ROWS 4
#endif

static inline int64_t vectors(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

/* ---- norm */

/* Size of the buffer `room` of `norm_backward`, fp32 elements. */
int64_t norm_room(int64_t rows, int64_t cols) { return (rows + ROWS - 1) / ROWS * vectors(cols); }

/* Gradients of x / rms(x) * w, w = offset + weight, with respect to x[P, H] and the weight (fp32). With r = 1 / rms(x),
 * u = x r and output gradient g: grad_x = r (w g - u mean(w g u)), grad_w = sum over rows of g u. */
void norm_backward(const T *x, const T *weight, const T *grad, T *grad_x, float *grad_weight, float *room, int64_t rows,
                   int64_t cols, float eps, float offset) {
    int64_t blocks = (rows + ROWS - 1) / ROWS, wide = vectors(cols);
#pragma omp parallel for schedule(static) if (blocks > 1 && rows * cols > SMALL)
    for (int64_t block = 0; block < blocks; block++) {
        float *sums = room + block * wide;
        memset(sums, 0, wide * sizeof(float));
        int64_t last = block * ROWS + ROWS < rows ? block * ROWS + ROWS : rows;
        for (int64_t row = block * ROWS; row < last; row++) {
            const T *from = x + row * cols, *g = grad + row * cols;
            vec squares = {0}, products = {0};
            for (int64_t i = 0; i < cols; i += LANES) {
                vec value = take(from + i, cols - i);
                squares += value * value;
                products += value * (offset + take(weight + i, cols - i)) * take(g + i, cols - i);
            }
            float scale = 1.0f / sqrtf(total(squares) / (float)cols + eps);
            float along = total(products) * scale * scale / (float)cols;
            for (int64_t i = 0; i < cols; i += LANES) {
                vec value = take(from + i, cols - i), of_out = take(g + i, cols - i);
                *(vec *)(sums + i) += of_out * value * scale;
                vec factor = offset + take(weight + i, cols - i);
                put(grad_x + row * cols + i, (of_out * factor - value * along) * scale, cols - i);
            }
        }
    }
    for (int64_t i = 0; i < cols; i += LANES) {
        vec sum = {0};
        for (int64_t block = 0; block < blocks; block++) sum += *(const vec *)(room + block * wide + i);
        for (int64_t n = 0; n < LANES && i + n < cols; n++) grad_weight[i + n] = sum[n];
    }
}

/* ---- gated activation */

/* Gradient of activation(gate) x up with respect to gate_up[P, 2I]; see `gate`. */
void gate_backward(const T *gate_up, const T *grad, T *out, int64_t rows, int64_t inner, int64_t gelu) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * inner > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *g = gate_up + row * 2 * inner, *u = g + inner, *of_out = grad + row * inner;
        T *to = out + row * 2 * inner;
        for (int64_t i = 0; i < inner; i += LANES) {
            vec x = take(g + i, inner - i), up = take(u + i, inner - i), d = take(of_out + i, inner - i);
            vec logit = gelu ? gelu_logit(x) : x, slope = gelu ? gelu_slope(x) : splat(1.0f);
            vec share = 1.0f / (1.0f + exponential(-logit));
            put(to + i, d * up * share * (1.0f + x * slope * (1.0f - share)), inner - i);
            put(to + inner + i, d * x * share, inner - i);
        }
    }
}

/* ---- rotation */

/* out[P, N, D]: the heads of x, their first 2 * half dimensions rotated by the angles of their row; sign -1 rotates back.
 * Rows of x are `stride` apart, its heads `head_stride`. cos, sin: [P, half]. */
void rotate_rows(const T *x, int64_t stride, int64_t head_stride, const T *cos, const T *sin, T *out, int64_t rows,
               int64_t heads, int64_t dim, int64_t half, float sign) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * heads * dim > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + row * half, *s = sin + row * half;
        for (int64_t h = 0; h < heads; h++) {
            const T *low = x + row * stride + h * head_stride, *high = low + half;
            T *to = out + (row * heads + h) * dim;
            for (int64_t i = 0; i < half; i += LANES) {
                vec a = take(low + i, half - i), b = take(high + i, half - i);
                vec vc = take(c + i, half - i), vs = take(s + i, half - i) * sign;
                put(to + i, a * vc - b * vs, half - i);
                put(to + half + i, b * vc + a * vs, half - i);
            }
            memcpy(to + 2 * half, low + 2 * half, (dim - 2 * half) * sizeof(T));
        }
    }
}

/* ---- attention */

/* Microkernel: c = a b, or c += a b if `adds`, for `tall` rows and one or two vectors of columns. a[m][k] is at
 * a[m * a_row + k * a_step]. */
static inline __attribute__((always_inline)) void tile(const float *a, int64_t a_row, int64_t a_step, const float *b,
                                                       int64_t b_row, float *c, int64_t c_row, int64_t depth, int adds,
                                                       const int tall, const int both) {
    vec low[tall], high[tall];
#pragma GCC unroll 16
    for (int m = 0; m < tall; m++) {
        low[m] = adds ? *(const vec *)(c + m * c_row) : (vec){0};
        high[m] = adds && both ? *(const vec *)(c + m * c_row + LANES) : (vec){0};
    }
    for (int64_t k = 0; k < depth; k++) {
        vec left = *(const vec *)b, right = both ? *(const vec *)(b + LANES) : (vec){0};
#pragma GCC unroll 16
        for (int m = 0; m < tall; m++) {
            low[m] += left * a[m * a_row];
            if (both) high[m] += right * a[m * a_row];
        }
        a += a_step;
        b += b_row;
    }
#pragma GCC unroll 16
    for (int m = 0; m < tall; m++) {
        *(vec *)(c + m * c_row) = low[m];
        if (both) *(vec *)(c + m * c_row + LANES) = high[m];
    }
}

/* c = a b, or c += a b if `adds`, for `rows` rows and `cols` columns, rounded up to full vectors. */
static void multiply(const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row, float *c, int64_t c_row,
                     int64_t rows, int64_t cols, int64_t depth, int adds) {
    for (int64_t n = 0; n < cols; n += 2 * LANES) {
        int both = cols - n > LANES;
        for (int64_t m = 0; m < rows;) {
            const float *left = a + m * a_row;
            float *to = c + m * c_row + n;
#define TILE(tall)                                                                                                     \
    if (rows - m >= tall) {                                                                                            \
        if (both) tile(left, a_row, a_step, b + n, b_row, to, c_row, depth, adds, tall, 1);                            \
        else tile(left, a_row, a_step, b + n, b_row, to, c_row, depth, adds, tall, 0);                                 \
        m += tall;                                                                                                     \
        continue;                                                                                                      \
    }
#if MICRO_ROWS > 4
            TILE(8)
#endif
            TILE(4)
            TILE(2)
            TILE(1)
        }
    }
}

/* Attention mask. The queries of run r are the tokens begins[r] to ends[r] - 1, its keys the tokens from firsts[r] on; a
 * query attends to its own key and to all before it, or with a `window` above 0 to its own and the window - 1 before. Token t is row rows[t] of keys and values, and row rows[t] - offset
 * of queries. Family f has the runs bounds[f] to bounds[f + 1] - 1; families share no key, and consecutive runs of a
 * family share a prefix of keys. */
typedef struct {
    const int64_t *rows, *firsts, *begins, *ends, *bounds;
    int64_t families, offset, longest, heads, kv_heads, dim, window;
    float scale;
} Plan;

static inline int64_t step_of(int64_t longest) { return vectors(longest) | LANES; } /* an odd number of vectors avoids cache set conflicts */

static inline int64_t queries_per_block(const Plan *p) {
    int64_t group = p->heads / p->kv_heads;
    return group < ROWS ? ROWS / group : 1;
}

/* Size of one thread's buffer for `attention` or `attention_backward`, fp32 elements. */
int64_t attention_room(int64_t longest, int64_t heads, int64_t kv_heads, int64_t dim, int64_t backward) {
    Plan p = {.heads = heads, .kv_heads = kv_heads};
    int64_t wide = vectors(dim), step = step_of(longest), tall = queries_per_block(&p) * (heads / kv_heads);
    return backward ? 2 * dim * step + 4 * longest * wide + tall * (3 * wide + 2 * step + LANES)
                    : dim * step + longest * wide + tall * (2 * wide + step);
}

static inline void load_fp32(const T *from, float *to, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) *(vec *)(to + i) = take(from + i, dim - i);
}

static inline void load_transposed(const T *from, float *to, int64_t step, int64_t dim) {
    for (int64_t i = 0; i < dim; i += LANES) {
        vec x = take(from + i, dim - i);
        for (int64_t n = 0; n < LANES && i + n < dim; n++) to[(i + n) * step] = x[n];
    }
}

/* First key that a query with `own` keys up to its own attends to. */
static inline int64_t first_seen(const Plan *p, int64_t own) { return p->window && own > p->window ? own - p->window : 0; }

/* Number of leading keys that run r shares with the previous run, of whose keys the first `kept` are loaded. */
static inline int64_t shared_keys(const Plan *p, int64_t r, int64_t kept) {
    int64_t count = 0, most = p->ends[r] - p->firsts[r];
    if (kept < most) most = kept;
    while (count < most && p->rows[p->firsts[r] + count] == p->rows[p->firsts[r - 1] + count]) count++;
    return count;
}

/* Attention out[P, N, D], and lse[P, N], the log-sum-exp of each query's scores, for the backward pass. */
void attention(const T *q, const T *k, const T *v, int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head,
               const int64_t *rows, const int64_t *firsts, const int64_t *begins, const int64_t *ends, const int64_t *bounds,
               int64_t families, int64_t offset, int64_t longest, int64_t heads, int64_t kv_heads, int64_t dim, int64_t window,
               float scale, T *out, float *lse, float *rooms, int64_t threads) {
    Plan plan = {rows, firsts, begins, ends, bounds, families, offset, longest, heads, kv_heads, dim, window, scale}, *p = &plan;
    int64_t group = heads / kv_heads, wide = vectors(dim), step = step_of(longest), most = queries_per_block(p);
    int64_t room = attention_room(longest, heads, kv_heads, dim, 0);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < families * kv_heads; task++) {
        int64_t family = task / kv_heads, head = task % kv_heads, loaded = 0;
        float *keys = rooms + omp_get_thread_num() * room, *values = keys + dim * step, *qs = values + longest * wide;
        float *outs = qs + most * group * wide, *scores = outs + most * group * wide;
        memset(keys, 0, dim * step * sizeof(float));
        for (int64_t r = bounds[family]; r < bounds[family + 1]; r++) {
            int64_t count = ends[r] - firsts[r];
            for (int64_t t = r > bounds[family] ? shared_keys(p, r, loaded) : 0; t < count; t++) {
                int64_t row = rows[firsts[r] + t];
                load_transposed(k + row * k_row + head * k_head, keys + t, step, dim);
                load_fp32(v + row * v_row + head * v_head, values + t * wide, dim);
            }
            loaded = count;
            for (int64_t first = begins[r]; first < ends[r]; first += most) {
                int64_t num = ends[r] - first < most ? ends[r] - first : most, seen = first + num - firsts[r];
                int64_t begin = first_seen(p, first - firsts[r] + 1) / LANES * LANES, span = seen - begin;
                for (int64_t m = 0; m < num * group; m++)
                    load_fp32(q + ((rows[first + m / group] - offset) * heads + head * group + m % group) * dim, qs + m * wide, dim);
                multiply(qs, wide, 1, keys + begin, step, scores + begin, step, num * group, span, dim, 0);
                float shares[num * group];
                for (int64_t m = 0; m < num * group; m++) {
                    int64_t own = first + m / group - firsts[r] + 1, end = vectors(own);
                    float *score = scores + m * step;
                    for (int64_t t = begin; t < first_seen(p, own); t++) score[t] = -INFINITY;
                    for (int64_t t = own; t < end; t++) score[t] = -INFINITY;
                    vec high = *(const vec *)(score + begin), sum = {0};
                    for (int64_t t = begin + LANES; t < end; t += LANES) high = larger(high, *(const vec *)(score + t));
                    float top = high[0];
                    for (int n = 1; n < LANES; n++) top = high[n] > top ? high[n] : top;
                    for (int64_t t = begin; t < end; t += LANES) {
                        vec weight = exponential((*(const vec *)(score + t) - top) * scale);
                        *(vec *)(score + t) = weight;
                        sum += weight;
                    }
                    for (int64_t t = end; t < seen; t++) score[t] = 0.0f;
                    float all = total(sum);
                    shares[m] = 1.0f / all;
                    lse[(rows[first + m / group] - offset) * heads + head * group + m % group] = top * scale + logf(all);
                }
                multiply(scores + begin, step, 1, values + begin * wide, wide, outs, wide, num * group, dim, span, 0);
                for (int64_t m = 0; m < num * group; m++) {
                    T *to = out + ((rows[first + m / group] - offset) * heads + head * group + m % group) * dim;
                    for (int64_t i = 0; i < dim; i += LANES) put(to + i, *(const vec *)(outs + m * wide + i) * shares[m], dim - i);
                }
            }
        }
    }
}

/* Adds the accumulated gradients of keys [from, to) of run r, now complete, to the output, and resets them to 0. */
static void flush_gradients(const Plan *p, int64_t r, int64_t from, int64_t to, int64_t head, float *own, float *all) {
    int64_t wide = vectors(p->dim);
    for (int64_t t = from; t < to; t++) {
        float *sum = all + (p->rows[p->firsts[r] + t] * p->kv_heads + head) * p->dim;
        for (int64_t i = 0; i < p->dim; i++) sum[i] += own[t * wide + i];
        memset(own + t * wide, 0, wide * sizeof(float));
    }
}

/* Gradients of q[P, N, D]; the gradients of k and v[rows, K, D] are added to grad_k and grad_v, fp32. */
void attention_backward(const T *q, const T *k, const T *v, int64_t k_row, int64_t k_head, int64_t v_row, int64_t v_head,
                        const int64_t *rows, const int64_t *firsts, const int64_t *begins, const int64_t *ends,
                        const int64_t *bounds, int64_t families, int64_t offset, int64_t longest, int64_t heads,
                        int64_t kv_heads, int64_t dim, int64_t window, float scale, const T *out, const float *lse, const T *grad, T *grad_q,
                        float *grad_k, float *grad_v, float *rooms, int64_t threads) {
    Plan plan = {rows, firsts, begins, ends, bounds, families, offset, longest, heads, kv_heads, dim, window, scale}, *p = &plan;
    int64_t group = heads / kv_heads, wide = vectors(dim), step = step_of(longest), most = queries_per_block(p), tall = most * group;
    int64_t room = attention_room(longest, heads, kv_heads, dim, 1);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < families * kv_heads; task++) {
        int64_t family = task / kv_heads, head = task % kv_heads, loaded = 0;
        float *across = rooms + omp_get_thread_num() * room, *values = across + dim * step, *keys = values + dim * step;
        float *of_keys = keys + longest * wide, *of_values = of_keys + longest * wide, *qs = of_values + longest * wide;
        float *grads = qs + tall * wide, *of_qs = grads + tall * wide, *probs = of_qs + tall * wide;
        float *slopes = probs + tall * step, *along = slopes + tall * step;
        memset(across, 0, 2 * dim * step * sizeof(float));
        memset(of_keys, 0, 2 * longest * wide * sizeof(float));
        for (int64_t r = bounds[family]; r < bounds[family + 1]; r++) {
            int64_t count = ends[r] - firsts[r], same = r > bounds[family] ? shared_keys(p, r, loaded) : 0;
            if (r > bounds[family]) {
                flush_gradients(p, r - 1, same, loaded, head, of_keys, grad_k);
                flush_gradients(p, r - 1, same, loaded, head, of_values, grad_v);
            }
            for (int64_t t = same; t < count; t++) {
                int64_t row = rows[firsts[r] + t];
                load_transposed(k + row * k_row + head * k_head, across + t, step, dim);
                load_transposed(v + row * v_row + head * v_head, values + t, step, dim);
                load_fp32(k + row * k_row + head * k_head, keys + t * wide, dim);
            }
            loaded = count;
            for (int64_t first = begins[r]; first < ends[r]; first += most) {
                int64_t num = ends[r] - first < most ? ends[r] - first : most, seen = first + num - firsts[r];
                int64_t begin = first_seen(p, first - firsts[r] + 1) / LANES * LANES, span = seen - begin;
                for (int64_t m = 0; m < num * group; m++) {
                    int64_t place = (rows[first + m / group] - offset) * heads + head * group + m % group;
                    vec sum = {0};
                    for (int64_t i = 0; i < dim; i += LANES) {
                        vec g = take(grad + place * dim + i, dim - i);
                        *(vec *)(grads + m * wide + i) = g;
                        *(vec *)(qs + m * wide + i) = take(q + place * dim + i, dim - i);
                        sum += g * take(out + place * dim + i, dim - i);
                    }
                    along[m] = total(sum);
                }
                multiply(qs, wide, 1, across + begin, step, probs + begin, step, num * group, span, dim, 0);
                multiply(grads, wide, 1, values + begin, step, slopes + begin, step, num * group, span, dim, 0);
                for (int64_t m = 0; m < num * group; m++) {
                    int64_t own = first + m / group - firsts[r] + 1, end = vectors(own);
                    float *prob = probs + m * step, *slope = slopes + m * step;
                    float norm = lse[(rows[first + m / group] - offset) * heads + head * group + m % group];
                    for (int64_t t = begin; t < first_seen(p, own); t++) prob[t] = -INFINITY;
                    for (int64_t t = own; t < end; t++) prob[t] = -INFINITY;
                    for (int64_t t = begin; t < end; t += LANES) {
                        vec weight = exponential(*(const vec *)(prob + t) * scale - norm);
                        *(vec *)(prob + t) = weight;
                        *(vec *)(slope + t) = weight * (*(const vec *)(slope + t) - along[m]) * scale;
                    }
                    for (int64_t t = own; t < end; t++) slope[t] = 0.0f;
                    for (int64_t t = end; t < seen; t++) prob[t] = slope[t] = 0.0f;
                }
                multiply(probs + begin, 1, step, grads, wide, of_values + begin * wide, wide, span, dim, num * group, 1);
                multiply(slopes + begin, 1, step, qs, wide, of_keys + begin * wide, wide, span, dim, num * group, 1);
                multiply(slopes + begin, step, 1, keys + begin * wide, wide, of_qs, wide, num * group, dim, span, 0);
                for (int64_t m = 0; m < num * group; m++) {
                    T *to = grad_q + ((rows[first + m / group] - offset) * heads + head * group + m % group) * dim;
                    for (int64_t i = 0; i < dim; i += LANES) put(to + i, *(const vec *)(of_qs + m * wide + i), dim - i);
                }
            }
        }
        int64_t last = bounds[family + 1] - 1;
        flush_gradients(p, last, 0, loaded, head, of_keys, grad_k);
        flush_gradients(p, last, 0, loaded, head, of_values, grad_v);
    }
}

/* ---- logits, always fp32 */

static inline vec logits_at(const float *from, int64_t left) {
    if (left >= LANES) return *(const vec *)from;
    vec x = splat(-INFINITY);
    memcpy(&x, from, left * sizeof(float));
    return x;
}

/* sums[3, P] of each row of x[P, V]: the maximum m (at least -FLT_MAX), the sum of e^(x - m), and the sum of
 * (x - m) e^(x - m). */
void logit_sums(const float *x, float *sums, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * cols > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * cols;
        vec high = splat(-FLT_MAX), powers = {0}, products = {0};
        for (int64_t i = 0; i < cols; i += LANES) high = larger(logits_at(from + i, cols - i), high);
        float top = high[0];
        for (int n = 1; n < LANES; n++) top = high[n] > top ? high[n] : top;
        for (int64_t i = 0; i < cols; i += LANES) {
            vec below = logits_at(from + i, cols - i) - top, power = exponential(below);
            powers += power;
            products += choose(below < -87.0f, (vec){0}, below * power); /* -inf contributes 0 */
        }
        sums[row] = top;
        sums[rows + row] = total(powers);
        sums[2 * rows + row] = total(products);
    }
}

/* In place: x[P, V] = -p (slope + bend log p) with log p = x - normalizer; `bend` NULL: 0. */
void logit_gradients(float *x, const float *normalizer, const float *slope, const float *bend, int64_t rows, int64_t cols) {
#pragma omp parallel for schedule(static) if (rows > 1 && rows * cols > SMALL)
    for (int64_t row = 0; row < rows; row++) {
        float *at = x + row * cols, level = normalizer[row], steady = -slope[row], by_log = bend ? -bend[row] : 0.0f;
        for (int64_t i = 0; i < cols; i += LANES) {
            vec log = logits_at(at + i, cols - i) - level, p = exponential(log);
            vec found = p * (bend ? steady + by_log * choose(log < -87.0f, (vec){0}, log) : splat(steady));
            if (cols - i >= LANES) *(vec *)(at + i) = found;
            else memcpy(at + i, &found, (cols - i) * sizeof(float));
        }
    }
}
