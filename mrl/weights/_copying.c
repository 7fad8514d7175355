/* A copy that sums what it reads and what it wrote, in one pass over memory. `checksum.py` says what the sums are, and
   does the same with torch where this was not compiled. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define CHUNK_BYTES 16384 /* source and target of a chunk fit into a first-level cache, where it is read back */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define VECTORS
#endif

#if defined(__GNUC__)
#define WRITTEN() __asm__ volatile("" ::: "memory") /* what follows reads memory, not what the compiler remembers */
#else
#define WRITTEN()
#endif

#define ROW_OF(type)                                                                                                   \
    VECTORS static type move_##type(type *restrict target, const type *restrict source, size_t count) {                \
        type sum = 0;                                                                                                  \
        for (size_t i = 0; i < count; i++) {                                                                           \
            target[i] = source[i];                                                                                     \
            sum += source[i];                                                                                          \
        }                                                                                                              \
        return sum;                                                                                                    \
    }                                                                                                                  \
    VECTORS static type sum_##type(const type *values, size_t count) {                                                 \
        type sum = 0;                                                                                                  \
        for (size_t i = 0; i < count; i++)                                                                             \
            sum += values[i];                                                                                          \
        return sum;                                                                                                    \
    }                                                                                                                  \
    static void row_##type(char *target, const char *source, size_t count, uint64_t *given, uint64_t *stored) {        \
        const size_t most = CHUNK_BYTES / sizeof(type);                                                                \
        for (size_t i = 0; i < count; i += most) {                                                                     \
            const size_t now = count - i < most ? count - i : most;                                                    \
            type *into = (type *)target + i;                                                                           \
            *given += move_##type(into, (const type *)source + i, now);                                                \
            WRITTEN();                                                                                                 \
            *stored += sum_##type(into, now);                                                                          \
        }                                                                                                              \
    }

ROW_OF(uint8_t)
ROW_OF(uint16_t)
ROW_OF(uint32_t)
ROW_OF(uint64_t)

static PyObject *copy(PyObject *module, PyObject *args) {
    unsigned long long target, source;
    Py_ssize_t rows, count, target_step, source_step;
    int width;
    if (!PyArg_ParseTuple(args, "KKnnnni", &target, &source, &rows, &count, &target_step, &source_step, &width))
        return NULL;
    void (*row)(char *, const char *, size_t, uint64_t *, uint64_t *) =
        width == 1 ? row_uint8_t : width == 2 ? row_uint16_t : width == 4 ? row_uint32_t : row_uint64_t;
    uint64_t given = 0, stored = 0;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < rows; i++)
        row((char *)target + i * target_step, (const char *)source + i * source_step, count, &given, &stored);
    Py_END_ALLOW_THREADS
    const int shift = 64 - 8 * width;
    return Py_BuildValue("LL", (long long)(given << shift), (long long)(stored << shift));
}

static PyMethodDef methods[] = {
    {"copy", copy, METH_VARARGS, "copy(target, source, rows, count, target_step, source_step, width) -> (given, stored)"},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copying", NULL, -1, methods};

PyMODINIT_FUNC PyInit__copying(void) { return PyModule_Create(&module); }
