/* Attention of a prefill chunk in bf16 on processors with AVX512-BF16; called by native_chunk.py.
 *
 * Six query rows at a time: their scores over all keys they see (fp32, in the cache), softmax, then the sum of
 * values. K and V are read from the blocks they lie in and packed once a call as vdpbf16ps wants them: pairs of
 * neighbours of a row (K) or of two keys (V) side by side. A row's result has the same bits whatever other rows
 * are in the call: what it does not see adds zeros.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(_OPENMP)
#define HERE 1
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#include <immintrin.h>
#include <omp.h>

enum { ROWS = 6, KEYS = 64, COLUMNS = 64, LANES = 16 };
static const float UNSEEN = -1e30f; /* finite: minus infinity less minus infinity would be NaN */

typedef uint16_t bf16;

typedef struct {
    const bf16 *queries; /* [rows, kv_heads * group, dim], rows query_step apart */
    const bf16 *kv; /* of the layer: block b at b * block_step, its tokens token_step apart, K heads first */
    const int64_t *table; /* blocks of the context */
    bf16 *out; /* [rows, kv_heads * group, dim], rows out_step apart */
    char *work;
    int64_t query_step, block_step, token_step, out_step;
    int64_t block_size, kv_heads, group, dim, rows, prefix, window, threads;
} Call;

/* e^x for x <= 0, relative error below 1e-5: the result is rounded to bf16. */
static inline __m512 exponential(__m512 x) {
    const __m512 turns = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    const __m512 whole = _mm512_roundscale_ps(turns, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(turns, whole);
    __m512 sum = _mm512_set1_ps(1.3333558e-3f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

/* 16 rows of 16 pairs, from pair `at` on, become 16 rows of the same pair, `step` pairs apart. */
static inline void transpose(const bf16 *const *rows, int64_t at, uint32_t *out, int64_t step) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + 2 * at);
    for (int i = 0; i < 8; i++) {
        b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
        b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        a[4 * i] = _mm512_unpacklo_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 1] = _mm512_unpackhi_epi64(b[4 * i], b[4 * i + 2]);
        a[4 * i + 2] = _mm512_unpacklo_epi64(b[4 * i + 1], b[4 * i + 3]);
        a[4 * i + 3] = _mm512_unpackhi_epi64(b[4 * i + 1], b[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0x88);
        b[4 + i] = _mm512_shuffle_i32x4(a[i], a[4 + i], 0xdd);
        b[8 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0x88);
        b[12 + i] = _mm512_shuffle_i32x4(a[8 + i], a[12 + i], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_store_si512(out + i * step, _mm512_shuffle_i32x4(b[i], b[8 + i], 0x88));
        _mm512_store_si512(out + (4 + i) * step, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0x88));
        _mm512_store_si512(out + (8 + i) * step, _mm512_shuffle_i32x4(b[i], b[8 + i], 0xdd));
        _mm512_store_si512(out + (12 + i) * step, _mm512_shuffle_i32x4(b[4 + i], b[12 + i], 0xdd));
    }
}

/* 64 keys of one head: K as [dim / 2][key], V as [dim / 64][key / 2][64 columns], all of it pairs. */
static void pack(const Call *c, int64_t head, int64_t first, uint32_t *keys, uint32_t *values, int64_t plane) {
    static const bf16 nothing[512] = {0};
    const bf16 *k[KEYS], *v[KEYS];
    const int64_t end = c->prefix + c->rows;
    for (int64_t i = 0; i < KEYS; i++) {
        const int64_t at = first + i;
        k[i] = v[i] = nothing;
        if (at < end) {
            const bf16 *token = c->kv + c->table[at / c->block_size] * c->block_step;
            k[i] = token + (at % c->block_size) * c->token_step + head * c->dim;
            v[i] = k[i] + c->kv_heads * c->dim;
        }
    }
    for (int64_t pair = 0; pair < c->dim / 2; pair += LANES)
        for (int64_t i = 0; i < KEYS; i += LANES) transpose(k + i, pair, keys + pair * KEYS + i, KEYS);
    for (int64_t column = 0; column < c->dim; column += LANES) {
        uint32_t *out = values + column / COLUMNS * plane + column % COLUMNS;
        for (int64_t i = 0; i < KEYS; i += 2) {
            const __m512i one = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(v[i] + column)));
            const __m512i two = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(v[i + 1] + column)));
            _mm512_store_si512(out + i / 2 * COLUMNS, _mm512_or_si512(one, _mm512_slli_epi32(two, 16)));
        }
    }
}

/* sums[6][4 x 16] += pairs of the rows times `count` rows of 64 packed pairs. */
static inline __attribute__((always_inline)) void multiply(
    __m512 sums[ROWS][4], const uint32_t *const rows[ROWS], const uint32_t *packed, int64_t count) {
#pragma GCC unroll 2
    for (int64_t n = 0; n < count; n++) {
        const __m512bh p0 = (__m512bh)_mm512_load_si512(packed + n * 64);
        const __m512bh p1 = (__m512bh)_mm512_load_si512(packed + n * 64 + 16);
        const __m512bh p2 = (__m512bh)_mm512_load_si512(packed + n * 64 + 32);
        const __m512bh p3 = (__m512bh)_mm512_load_si512(packed + n * 64 + 48);
#pragma GCC unroll 6
        for (int i = 0; i < ROWS; i++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32((int)rows[i][n]);
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], pair, p0);
            sums[i][1] = _mm512_dpbf16_ps(sums[i][1], pair, p1);
            sums[i][2] = _mm512_dpbf16_ps(sums[i][2], pair, p2);
            sums[i][3] = _mm512_dpbf16_ps(sums[i][3], pair, p3);
        }
    }
}

static inline int64_t begin_of(const Call *c, int64_t token) { /* first key a token sees */
    const int64_t at = c->prefix + token - c->window + 1;
    return c->window > 0 && at > 0 ? at : 0;
}

/* Six rows, from `first` on, of one KV head; a row is a token's head of the group. */
static void attend_rows(const Call *c, int64_t head, int64_t first, const uint32_t *keys, const uint32_t *values,
                        int64_t origin, int64_t plane, float *scores) {
    const uint32_t *query[ROWS], *shares[ROWS];
    bf16 *out[ROWS];
    int64_t begin[ROWS], end[ROWS];
    for (int i = 0; i < ROWS; i++) {
        const int64_t last = c->rows * c->group - 1, row = first + i < last ? first + i : last;
        const int64_t token = row / c->group, at = (head * c->group + row % c->group) * c->dim;
        query[i] = (const uint32_t *)(c->queries + token * c->query_step + at);
        out[i] = c->out + token * c->out_step + at;
        begin[i] = begin_of(c, token);
        end[i] = c->prefix + token + 1;
    }
    const int64_t from = begin[0] / KEYS * KEYS, to = (end[ROWS - 1] + KEYS - 1) / KEYS * KEYS, count = to - from;
    const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf((float)c->dim));
    __m512 most[ROWS];
    for (int i = 0; i < ROWS; i++) most[i] = _mm512_set1_ps(UNSEEN);
    for (int64_t key = from; key < to; key += KEYS) {
        __m512 sums[ROWS][4];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = _mm512_setzero_ps();
        multiply(sums, query, keys + (key - origin) / 2 * c->dim, c->dim / 2);
        const int whole = key + KEYS <= end[0] && key >= begin[ROWS - 1];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) {
                __m512 score = _mm512_mul_ps(sums[i][j], scale);
                if (!whole) {
                    const int64_t low = begin[i] - key - LANES * j, high = end[i] - key - LANES * j;
                    const uint32_t above = low <= 0 ? 0xffff : low >= LANES ? 0 : 0xffffu << low;
                    const uint32_t below = high >= LANES ? 0xffff : high <= 0 ? 0 : (1u << high) - 1;
                    score = _mm512_mask_blend_ps((__mmask16)(above & below), _mm512_set1_ps(UNSEEN), score);
                }
                most[i] = _mm512_max_ps(most[i], score);
                _mm512_store_ps(scores + i * count + key - from + LANES * j, score);
            }
    }
    float total[ROWS];
    for (int i = 0; i < ROWS; i++) {
        const __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most[i]));
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        const float *score = scores + i * count;
        bf16 *share = (bf16 *)(scores + i * count); /* in place: half as wide */
        shares[i] = (const uint32_t *)share;
        for (int64_t n = 0; n < count; n += 2 * LANES) {
            const __m512 one = exponential(_mm512_sub_ps(_mm512_load_ps(score + n), top));
            const __m512 two = exponential(_mm512_sub_ps(_mm512_load_ps(score + n + LANES), top));
            even = _mm512_add_ps(even, one);
            odd = _mm512_add_ps(odd, two);
            _mm512_store_si512(share + n, (__m512i)_mm512_cvtne2ps_pbh(two, one));
        }
        total[i] = _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
    }
    for (int64_t column = 0; column < c->dim; column += COLUMNS) {
        __m512 sums[ROWS][4];
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) sums[i][j] = _mm512_setzero_ps();
        multiply(sums, shares, values + column / COLUMNS * plane + (from - origin) / 2 * COLUMNS, count / 2);
        for (int i = 0; i < ROWS; i++)
            for (int j = 0; j < 4; j++) {
                const __m512 mean = _mm512_mul_ps(sums[i][j], _mm512_set1_ps(1.0f / total[i]));
                _mm256_storeu_si256((void *)(out[i] + column + LANES * j), (__m256i)_mm512_cvtneps_pbh(mean));
            }
    }
}

static int64_t padded_keys(int64_t keys) { return (keys + KEYS - 1) / KEYS * KEYS; }

static int64_t work_bytes(int64_t kv_heads, int64_t dim, int64_t keys, int64_t threads) {
    /* One KEYS more: a window may begin within one. */
    return (padded_keys(keys) + KEYS) * (kv_heads * dim * 2 * 2 + threads * ROWS * 4);
}

static void attend_all(const Call *c) {
    const int64_t origin = begin_of(c, 0) / KEYS * KEYS;
    const int64_t span = padded_keys(c->prefix + c->rows - origin), packs = span / KEYS;
    const int64_t plane = span / 2 * COLUMNS, per_head = span / 2 * c->dim;
    const int64_t tiles = (c->rows * c->group + ROWS - 1) / ROWS;
    uint32_t *keys = (uint32_t *)c->work, *values = keys + c->kv_heads * per_head;
    float *scores = (float *)(values + c->kv_heads * per_head);
#pragma omp parallel num_threads((int)c->threads)
    {
        const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
#pragma omp for schedule(static)
        for (int64_t n = 0; n < c->kv_heads * packs; n++) {
            const int64_t head = n / packs, first = n % packs * KEYS;
            pack(c, head, origin + first, keys + head * per_head + first / 2 * c->dim,
                 values + head * per_head + first / 2 * COLUMNS, plane);
        }
        /* Every other tile is a thread's: later rows see more keys. */
        for (int64_t n = thread; n < c->kv_heads * tiles; n += threads) {
            const int64_t head = n / tiles;
            attend_rows(c, head, n % tiles * ROWS, keys + head * per_head, values + head * per_head, origin, plane,
                        scores + thread * ROWS * span);
        }
    }
}

static int is_supported(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bf16");
}
#endif

static PyObject *supported(PyObject *self, PyObject *unused) {
#ifdef HERE
    return PyBool_FromLong(is_supported());
#else
    Py_RETURN_FALSE;
#endif
}

static PyObject *room(PyObject *self, PyObject *args) {
#ifdef HERE
    long long kv_heads, dim, keys, threads;
    if (!PyArg_ParseTuple(args, "LLLL", &kv_heads, &dim, &keys, &threads)) return NULL;
    return PyLong_FromLongLong(work_bytes(kv_heads, dim, keys, threads));
#else
    return PyErr_Format(PyExc_RuntimeError, "not built for this processor");
#endif
}

static PyObject *attend(PyObject *self, PyObject *args) {
#ifdef HERE
    Call c;
    long long queries, kv, table, out, work, n[12];
    if (!PyArg_ParseTuple(args, "LLLLLLLLLLLLLLLLL", &queries, &kv, &table, &out, &work, n, n + 1, n + 2, n + 3,
                          n + 4, n + 5, n + 6, n + 7, n + 8, n + 9, n + 10, n + 11))
        return NULL;
    c.queries = (const bf16 *)(intptr_t)queries;
    c.kv = (const bf16 *)(intptr_t)kv;
    c.table = (const int64_t *)(intptr_t)table;
    c.out = (bf16 *)(intptr_t)out;
    c.work = (char *)(intptr_t)work;
    c.query_step = n[0], c.block_step = n[1], c.token_step = n[2], c.out_step = n[3];
    c.block_size = n[4], c.kv_heads = n[5], c.group = n[6], c.dim = n[7], c.rows = n[8];
    c.prefix = n[9], c.window = n[10], c.threads = n[11];
    Py_BEGIN_ALLOW_THREADS
    attend_all(&c);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
#else
    return PyErr_Format(PyExc_RuntimeError, "not built for this processor");
#endif
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "supported() -> bool: this processor can run it."},
    {"room", room, METH_VARARGS, "room(kv_heads, dim, keys, threads) -> bytes of work memory, aligned to 64."},
    {"attend", attend, METH_VARARGS,
     "attend(queries, kv, table, out, work, query_step, block_step, token_step, out_step, block_size, "
     "kv_heads, group, dim, rows, prefix, window, threads): addresses, then steps in numbers."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_chunk_attention", "A prefill chunk's attention; see native_chunk.py.", -1, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__chunk_attention(void) { return PyModule_Create(&module); }
