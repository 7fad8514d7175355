/* SIMD vectors of fp32, loaded from and stored to one dtype: float32, or bfloat16 with -DBF16. */

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
#define SMALL (1 << 14) /* elements; below it, starting threads costs more than it gains */

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
static inline hvec narrow(vec x) { /* to nearest, ties to even; NaN stays NaN */
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

/* Loads a partial vector at the end of a row; the other lanes are `rest`. */
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

/* Loads up to LANES of the `left` remaining elements of a row; missing lanes are 0. */
static inline vec take(const T *from, int64_t left) { return left >= LANES ? load(from) : load_part(from, left, 0.0f); }

/* Stores up to LANES of the `left` remaining elements of a row. */
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

/* Sums of adjacent lanes: those of a, then those of b. */
static inline vec pairs(vec a, vec b) {
#ifdef __clang__
    return __builtin_shufflevector(a, b, EVEN) + __builtin_shufflevector(a, b, ODD);
#else
    return __builtin_shuffle(a, b, (ivec){EVEN}) + __builtin_shuffle(a, b, (ivec){ODD});
#endif
}

/* Horizontal sums of LANES vectors, one per lane. */
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

/* 2 sqrt(2 / pi) (x + 0.044715 x^3): 1 + tanh of half of it is twice its sigmoid. */
static inline vec gelu_logit(vec x) { return x * (1.59576912160573071f + x * x * 0.0713548162726008987f); }

/* Derivative of gelu_logit. */
static inline vec gelu_slope(vec x) { return 1.59576912160573071f + x * x * 0.214064448817802696f; }

/* e^x within 2 ulp; 0 below -87; NaN stays NaN. Cephes' polynomial. */
static inline vec exponential(vec x) {
    ivec tiny = x < -87.0f;
    x = choose(x > 88.0f, splat(88.0f), x);
    x = choose(tiny, splat(-87.0f), x);
    vec shifted = x * 1.44269504088896341f + 12582912.0f; /* 1.5 x 2^23: the last bits of the sum are the rounded integer */
    vec integer = shifted - 12582912.0f;
    vec r = x - integer * 0.693359375f + integer * 2.12194440e-4f;
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
