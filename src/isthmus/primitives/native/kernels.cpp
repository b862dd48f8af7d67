// Steps of k-means and k nearest neighbours that never write an N x K matrix of distances.
//
// Rows stand in lanes.  A panel of 2 x LANES rows is centred and transposed once; tiles of centroids pass over it, each value of a centroid
// broadcast against the lanes, and the running minimum of a row stays in its lane: no shuffle, nothing written but the label.  The
// accumulators start at |c|^2 / 2 and lose <x, c>, which orders centroids as the squared distance does.  A tile of 12 centroids takes
// 4 bytes a cycle of a row's width from the cache, so centroids may come from L2 (or L3) while the panel stays in L1.
//
// The file is compiled once for each instruction set into a library of its own; kernels.py loads the best that the machine runs.
// In places where the text says T, the functions exist for float and double.  Data are finite (the caller has looked).

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#if defined(__AMX_BF16__)
#include <immintrin.h>
#include <sys/syscall.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64, COLUMNS = 12;
#elif defined(__AVX__)
constexpr int BYTES = 32, COLUMNS = 6;
#elif defined(__aarch64__)
constexpr int BYTES = 16, COLUMNS = 12;
#else
constexpr int BYTES = 16, COLUMNS = 6;
#endif
constexpr int VECTORS = 2;               // of rows, side by side
constexpr int TAIL = COLUMNS / 3 * 2;    // columns of the last tiles: less padding, and enough sums side by side to keep the units busy
template <class T> constexpr int LANES = BYTES / int(sizeof(T));
template <class T> constexpr int PANEL = VECTORS * LANES<T>;
template <class T> constexpr T FAR = sizeof(T) == 4 ? T(3e38) : T(1e308);

template <class T> struct Wide {
    typedef T value __attribute__((vector_size(BYTES)));
    typedef T loose __attribute__((vector_size(BYTES), aligned(sizeof(T))));  // may be loaded from anywhere
    typedef std::conditional_t<sizeof(T) == 4, int32_t, int64_t> number;
    typedef number index __attribute__((vector_size(BYTES)));
};
template <class T> using V = typename Wide<T>::value;
template <class T> using I = typename Wide<T>::index;

template <class T> inline V<T> wide(const T* p) { return *reinterpret_cast<const typename Wide<T>::loose*>(p); }
template <class T> inline V<T> all(T x) { return x - V<T>{}; }
template <class T> inline V<T> low(V<T> a, V<T> b) { return a < b ? a : b; }
template <class T> inline V<T> high(V<T> a, V<T> b) { return a < b ? b : a; }
template <class T> inline T total(V<T> v) {
    T s = 0;
    for (int i = 0; i < LANES<T>; i++) s += v[i];
    return s;
}

// So many rows are read side by side that the machine does not see what comes next: it is told, a panel ahead, and a few lines at a time, so
// that memory works while the products do.  (Never a fault.)
template <int LEVEL = 2> inline void fetch(const void* p) { __builtin_prefetch(p, 0, LEVEL); }
struct Ahead {
    const char* at = nullptr;  // of the next row to be fetched
    ptrdiff_t stride = 0;      // from row to row, bytes
    int rows = 0, bytes = 0, done = 0;
    inline void some(int lines) {
        for (; lines > 0 && rows > 0; lines--) {
            fetch(at + done);
            if ((done += 64) >= bytes) at += stride, done = 0, rows--;
        }
    }
};

size_t half_of_l2() {
    static const long size = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return size > 0 ? size_t(size) / 2 : 256 * 1024;
}

// body(thread, first, last) over [0, n) in contiguous parts, so that sums do not depend on who was faster
template <class F> void parallel(int threads, size_t n, size_t grain, F body) {
    size_t parts = std::max<size_t>(1, std::min<size_t>(threads, n / std::max<size_t>(1, grain)));
    auto edge = [&](size_t t) { return t == parts ? n : n / parts * t / grain * grain; };
    std::vector<std::thread> others;
    for (size_t t = 1; t < parts; t++) others.emplace_back([&, t] { body(int(t), edge(t), edge(t + 1)); });
    body(0, 0, edge(1));
    for (auto& o : others) o.join();
}

// Memory that starts at a cache line.
template <class T> struct Buffer {
    T* data;
    explicit Buffer(size_t n) : data(static_cast<T*>(aligned_alloc(64, (n * sizeof(T) + 63) / 64 * 64 + 64))) {}
    Buffer(const Buffer&) = delete;
    ~Buffer() { free(data); }
    operator T*() { return data; }
};

// ---- rows

template <class T> struct Rows {
    const T* x;
    ptrdiff_t row, column;  // strides, in numbers
    const T* shift;         // (d,), taken from every row: without it an offset of the data eats the digits of a float
    int d;
};

// The panel after the one at a row.
template <class T> Ahead next_panel(const Rows<T>& rows, size_t at, size_t last) {
    at += PANEL<T>;
    if (at >= last || rows.column != 1) return {};
    const char* first = reinterpret_cast<const char*>(rows.x + ptrdiff_t(at) * rows.row);
    return {first, ptrdiff_t(rows.row * sizeof(T)), int(std::min<size_t>(PANEL<T>, last - at)), int(rows.d * sizeof(T))};
}

template <class W, size_t... i> inline W zip_low(W a, W b, std::index_sequence<i...>) {
    return __builtin_shufflevector(a, b, (i % 2 ? sizeof...(i) + i / 2 : i / 2)...);
}
template <class W, size_t... i> inline W zip_high(W a, W b, std::index_sequence<i...>) {
    return __builtin_shufflevector(a, b, (sizeof...(i) / 2 + (i % 2 ? sizeof...(i) + i / 2 : i / 2))...);
}
// A square of vectors transposed: zipping the first half with the second, log2(lanes) times over.
template <class W, int N> inline void transpose(W (&a)[N]) {
    constexpr auto lanes = std::make_index_sequence<N>{};
#pragma GCC unroll 4
    for (int step = 1; step < N; step *= 2) {
        W b[N];
#pragma GCC unroll 16
        for (int i = 0; i < N / 2; i++) b[2 * i] = zip_low(a[i], a[i + N / 2], lanes), b[2 * i + 1] = zip_high(a[i], a[i + N / 2], lanes);
#pragma GCC unroll 16
        for (int i = 0; i < N; i++) a[i] = b[i];
    }
}

// Rows which[0..count) (or first, first + 1, ...) less the shift, as (d, PANEL); lanes without a row repeat the last.
template <class T> void load(const Rows<T>& rows, const int64_t* which, int64_t first, int count, T* panel, bool tell = false) {
    constexpr int N = LANES<T>, P = PANEL<T>;
    const T* row[P];
    for (int r = 0; r < P; r++) {
        int64_t at = std::min(r, count - 1);
        row[r] = rows.x + (which ? which[at] : first + at) * rows.row;
    }
    const ptrdiff_t ahead = tell ? P * rows.row : 0;
    int j = 0;
    if (rows.column == 1)
        for (; j + N <= rows.d; j += N)
            for (int v = 0; v < VECTORS; v++) {
                V<T> square[N];
#pragma GCC unroll 16
                for (int r = 0; r < N; r++) {
                    square[r] = wide(row[v * N + r] + j) - wide(rows.shift + j);
                    fetch(row[v * N + r] + j + ahead);
                }
                transpose(square);
#pragma GCC unroll 16
                for (int i = 0; i < N; i++) *reinterpret_cast<V<T>*>(panel + (j + i) * P + v * N) = square[i];
            }
    for (; j < rows.d; j++)
        for (int r = 0; r < P; r++) panel[j * P + r] = row[r][j * rows.column] - rows.shift[j];
}

// |x - c|^2 of one row and one centroid, both as they are
template <class T> T distance(const Rows<T>& rows, int64_t i, const T* c) {
    const T* x = rows.x + i * rows.row;
    T rest = 0;
    V<T> sum = {};
    int j = 0;
    if (rows.column == 1)
        for (; j + LANES<T> <= rows.d; j += LANES<T>) {
            V<T> gap = wide(x + j) - wide(c + j);
            sum += gap * gap;
        }
    for (; j < rows.d; j++) rest += (x[j * rows.column] - c[j]) * (x[j * rows.column] - c[j]);
    return rest + total<T>(sum);
}

template <class T> void add(const Rows<T>& rows, int64_t i, double weight, double* sum) {
    const T* x = rows.x + i * rows.row;
    if (rows.column == 1)
        for (int j = 0; j < rows.d; j++) sum[j] += weight * double(x[j]);
    else
        for (int j = 0; j < rows.d; j++) sum[j] += weight * double(x[j * rows.column]);
}

// Sum of absolute values: at least as large as any of them, and without squares that overflow or vanish.
template <class T> double size(const Rows<T>& rows, int64_t i) {
    const T* x = rows.x + i * rows.row;
    double rest = 0;
    V<T> sum = {};
    int j = 0;
    if (rows.column == 1)
        for (; j + LANES<T> <= rows.d; j += LANES<T>) sum += high<T>(wide(x + j), -wide(x + j));
    for (; j < rows.d; j++) rest += std::abs(double(x[j * rows.column]));
    return rest + double(total<T>(sum));
}

// ---- centroids

// Tiles of COLUMNS centroids, then some of TAIL: (tiles, d, columns), each with half its squared norm; FAR where there is none.
template <class T> struct Tiles {
    int d, k, full, tiles;
    Buffer<T> data, half;
    T longest = 0;  // |c|

    // no more of the last kind than make k of thirds of the first (two thirds each): 0, 1 or 2
    static int whole(int k) {
        int thirds = (3 * k + COLUMNS - 1) / COLUMNS;
        return std::max(0, thirds - 2 * (2 * thirds % 3)) / 3;
    }
    static int last(int k) { return std::max(0, k - whole(k) * COLUMNS + TAIL - 1) / TAIL; }
    int first(int tile) const { return tile <= full ? tile * COLUMNS : full * COLUMNS + (tile - full) * TAIL; }

    Tiles(const T* c, int k, int d, const T* shift)
        : d(d), k(k), full(whole(k)), tiles(full + last(k)), data(size_t(first(tiles)) * d), half(first(tiles)) {
        for (int t = 0; t < tiles; t++) {
            int from = first(t), columns = first(t + 1) - from;
            T* out = data + size_t(from) * d;
            for (int j = 0; j < columns; j++) {
                double norm = 0;
                for (int i = 0; i < d; i++) {
                    T value = from + j < k ? c[size_t(from + j) * d + i] - shift[i] : T(0);
                    out[size_t(i) * columns + j] = value;
                    norm += double(value) * double(value);
                }
                half[from + j] = from + j < k ? T(norm / 2) : FAR<T>;
                longest = std::max(longest, T(std::sqrt(norm)));
            }
        }
    }
};

// acc[j][v] = |c_j|^2 / 2 - <x, c_j> for the rows of vector v
template <class T, int N>
inline __attribute__((always_inline)) void scores(const T* panel, const T* c, const T* half, int d, V<T> (&acc)[N][VECTORS], Ahead& ahead, int lines) {
#pragma GCC unroll 12
    for (int j = 0; j < N; j++) acc[j][0] = acc[j][1] = all(half[j]);
    auto column = [&] {
        V<T> left = wide(panel), right = wide(panel + LANES<T>);
#pragma GCC unroll 12
        for (int j = 0; j < N; j++) {
            V<T> one = all(c[j]);
            acc[j][0] -= left * one;
            acc[j][1] -= right * one;
        }
        panel += PANEL<T>, c += N;
    };
    for (; d >= 16; d -= 16) {
        ahead.some(lines);
#pragma GCC unroll 2
        for (int i = 0; i < 16; i++) column();
    }
    while (d-- > 0) column();
}

// Calls seen(column, acc) for every tile of [from, to).
template <class T, class F>
inline __attribute__((always_inline)) void each(const T* panel, const Tiles<T>& c, int from, int to, Ahead ahead, F seen) {
    const int lines = (PANEL<T> * int(sizeof(T)) / 4 + c.tiles - 1) / c.tiles;  // for every 16 columns of a tile
    for (int t = from; t < to; t++) {
        int column = c.first(t);
        const T* data = c.data.data + size_t(column) * c.d;
        if (t < c.full) {
            V<T> acc[COLUMNS][VECTORS];
            scores<T, COLUMNS>(panel, data, c.half.data + column, c.d, acc, ahead, lines);
            seen(column, acc);
        } else {
            V<T> acc[TAIL][VECTORS];
            scores<T, TAIL>(panel, data, c.half.data + column, c.d, acc, ahead, lines);
            seen(column, acc);
        }
    }
}

// Smallest score of each row of a panel, whose it is (the lowest number among equals), and the second smallest.
template <class T> struct Best {
    V<T> value[VECTORS], second[VECTORS];
    I<T> who[VECTORS];
    Best() {
        for (int v = 0; v < VECTORS; v++) value[v] = second[v] = all(FAR<T>), who[v] = I<T>{};
    }
    template <bool SECOND> inline __attribute__((always_inline)) void see(int number, V<T> score, int v) {
        typename Wide<T>::number n = number;
        if (SECOND) second[v] = low<T>(second[v], high<T>(value[v], score));
        I<T> less = score < value[v];
        value[v] = low<T>(value[v], score);
        who[v] = less ? n - I<T>{} : who[v];
    }
};

template <class T, bool SECOND> void scan(const T* panel, const Tiles<T>& c, int from, int to, Best<T>& out, Ahead ahead = {}) {
    each(panel, c, from, to, ahead, [&](int column, auto& acc) {
        constexpr int N = sizeof(acc) / sizeof(acc[0]);
        __asm__ volatile("" : "+m"(out));  // it waits in memory: the products need every register
        Best<T> best = out;
#pragma GCC unroll 12
        for (int j = 0; j < N; j++)
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) best.template see<SECOND>(column + j, acc[j][v], v);
        out = best;
    });
}

// Passes every row's panel over every centroid.  Where the centroids do not fit into half of L2, as many panels as do take turns at a part
// of them.  State belongs to a panel, `pass(panel, from, to, state)` sees tiles, `done(first, count, panel, state)` ends it.
template <class T, class State, class Pass, class Done>
void sweep(const Rows<T>& rows, size_t first, size_t last, const Tiles<T>& c, Pass pass, Done done) {
    constexpr int P = PANEL<T>;
    size_t wide = size_t(P) * rows.d * sizeof(T), tile = size_t(COLUMNS) * rows.d * sizeof(T);
    bool fits = size_t(c.k) * rows.d * sizeof(T) <= half_of_l2();
    size_t panels = fits ? 1 : std::max<size_t>(1, half_of_l2() / wide);
    int some = fits ? c.tiles : int(std::max<size_t>(1, half_of_l2() / 4 / tile));
    Buffer<T> data(panels * P * rows.d);
    for (size_t at = first; at < last; at += panels * P) {
        size_t here = std::min(panels, (last - at + P - 1) / P);
        std::vector<State> state(here);
        auto count = [&](size_t p) { return int(std::min<size_t>(P, last - at - p * P)); };
        for (size_t p = 0; p < here; p++) load<T>(rows, nullptr, at + p * P, count(p), data + p * P * rows.d, !fits);
        Ahead ahead = fits ? next_panel(rows, at, last) : Ahead{};
        for (int t = 0; t < c.tiles; t += some)
            for (size_t p = 0; p < here; p++) pass(data + p * P * rows.d, t, std::min(t + some, c.tiles), state[p], ahead);
        for (size_t p = 0; p < here; p++) done(at + p * P, count(p), data + p * P * rows.d, state[p]);
    }
}

// Sums and weights of the rows of each centroid; every thread has its own and the first adds them up.  `moves`, where it is asked for, says
// of each centroid how much came and went, in sizes, and how often: from that follows what rounding may have done to sums that are kept.
struct Sums {
    struct Part {
        double *sum = nullptr, *weight = nullptr, *moves = nullptr;  // (k, d), (k,), (k, 3)
        template <class T> void move(const Rows<T>& rows, int64_t i, double one, int c, bool leaves) {
            add(rows, i, leaves ? -one : one, sum + size_t(c) * rows.d);
            weight[c] += leaves ? -one : one;
            if (moves) moves[3 * c + leaves] += one * size(rows, i), moves[3 * c + 2]++;
        }
    };
    Part all;
    size_t sizes[3];
    std::vector<std::vector<double>> own;
    Sums(int k, int d, double* sum, double* weight, double* moves, int threads)
        : all{sum, weight, moves}, sizes{size_t(k) * d, size_t(k), moves ? size_t(k) * 3 : 0}, own(threads) {}
    Part of(int thread) {
        if (thread == 0 || !all.sum) return all;
        own[thread].resize(sizes[0] + sizes[1] + sizes[2]);
        double* at = own[thread].data();
        return {at, at + sizes[0], all.moves ? at + sizes[0] + sizes[1] : nullptr};
    }
    void join() {
        double* const into[3] = {all.sum, all.weight, all.moves};
        for (auto& o : own) {
            if (o.empty()) continue;
            const double* from = o.data();
            for (int part = 0; part < 3; part++)
                for (size_t i = 0; i < sizes[part]; i++) into[part][i] += *from++;
        }
    }
};

// ---- products of bfloat16 with an error bound

// Where the unit has tiles of bfloat16 products, they say which centroid is nearest for all rows whose two best scores are further apart than
// the products may err; the others are looked at again in full.  The bound: with x = x' + e, c = c' + f (primes rounded),
// |<x, c> - <x', c'>| <= |e| |c| + |x'| |f|, and (d + 2) 2^-24 |x| |c| for the sums in float, twice over for two scores.
#if defined(__AMX_BF16__)
struct Config {
    uint8_t palette = 1, start = 0, zero[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
bool may_use_tiles() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;  // ask for the tiles' state to be saved
    return granted;
}
inline uint32_t rounded(float x) {  // to the nearest bfloat16, ties to even, as its upper 16 bits
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
}
inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// Centroids in bfloat16: (k / 16, d / 32, 16 pairs of columns, 16, 2), zeros as padding; each has its number and half its squared norm.
struct HalfTiles {
    int d, k, wide, many;
    Buffer<uint16_t> data;
    Buffer<float> half;
    Buffer<int32_t> number;
    float longest = 0, error = 0;  // |c|, |c - c'|
    HalfTiles(const float* c, int k, int d, const float* shift)
        : d(d), k(k), wide((d + 31) / 32), many((k + 15) / 16), data(size_t(many) * wide * 512), half(size_t(many) * 16), number(size_t(many) * 16) {
        memset(data.data, 0, size_t(many) * wide * 1024);
        for (int j = 0; j < many * 16; j++) {
            double norm = 0, lost = 0;
            for (int i = 0; j < k && i < d; i++) {
                float value = c[size_t(j) * d + i] - shift[i];
                uint32_t bits = rounded(value);
                data[(size_t(j / 16) * wide + i / 32) * 512 + i % 32 / 2 * 32 + j % 16 * 2 + i % 2] = uint16_t(bits >> 16);
                norm += double(value) * value;
                lost += (double(value) - as_float(bits)) * (double(value) - as_float(bits));
            }
            half[j] = j < k ? float(norm / 2) : FAR<float>;
            number[j] = j;
            longest = std::max(longest, float(std::sqrt(norm)));
            error = std::max(error, float(std::sqrt(lost)));
        }
    }
};

// A panel of 32 rows in bfloat16, (d / 32, 32, 32), and what its scores may be wrong by.  That follows from |x| and |e|, which stay the same
// from step to step: `known` keeps both for each row, rounded up to bfloat16; 0 where they were not measured yet.
struct HalfPanel {
    Buffer<uint16_t> data;
    alignas(64) float err[32];
    explicit HalfPanel(const HalfTiles& c) : data(size_t(c.wide) * 1024) {}
};

// Rows which[0..count) (or first, first + 1, ...) on their way into a panel, some at a time.
struct Loading {
    const Rows<float>& rows;
    const HalfTiles& c;
    uint32_t* known;
    HalfPanel& panel;
    const int64_t* which;
    int64_t first;
    int count, done = 0;  // of 32

    // `later` is what will be read in a while
    template <bool MEASURE>
    static inline void convert(const float* x, const float* later, const float* shift, int d, uint16_t* out, float& size, float& lost) {
        V<float> s2 = {}, l2 = {};
        auto two = [&](__m512 a, __m512 b) {
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(b, a);
            _mm512_store_si512(out, both);
            if (MEASURE) {
                __m512 ra = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(both)), 16);
                __m512 rb = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(both, 1)), 16);
                s2 += a * a + b * b;
                l2 += (a - ra) * (a - ra) + (b - rb) * (b - rb);
            }
        };
        for (; d >= 32; d -= 32, x += 32, later += 32, shift += 32, out += 1024) {
            fetch<3>(later);
            fetch<3>(later + 16);
            two(_mm512_sub_ps(_mm512_loadu_ps(x), _mm512_loadu_ps(shift)), _mm512_sub_ps(_mm512_loadu_ps(x + 16), _mm512_loadu_ps(shift + 16)));
        }
        if (d > 0) {
            __mmask16 m0 = (1u << d) - 1, m1 = ((1u << d) - 1) >> 16;
            two(_mm512_sub_ps(_mm512_maskz_loadu_ps(m0, x), _mm512_maskz_loadu_ps(m0, shift)),
                _mm512_sub_ps(_mm512_maskz_loadu_ps(m1, x + 16), _mm512_maskz_loadu_ps(m1, shift + 16)));
        }
        if (MEASURE) size = std::sqrt(total<float>(s2)), lost = std::sqrt(total<float>(l2));
    }

    void some(int more) {
        for (; more > 0 && done < 32; more--, done++) {
            auto number = [&](int r) { return which ? which[std::min(r, count - 1)] : first + std::min(r, count - 1); };
            const int64_t at = number(done), after = which ? number(done + 1) : at + 1536 / rows.d + 1;
            const float *x = rows.x + at * rows.row, *later = rows.x + after * rows.row;
            uint16_t* out = panel.data + done * 32;
            uint32_t bits = known ? known[at] : 0;
            float size, lost;
            if (bits) {
                convert<false>(x, later, rows.shift, rows.d, out, size, lost);
            } else {
                convert<true>(x, later, rows.shift, rows.d, out, size, lost);
                bits = up(size) << 16 | up(lost);
                if (known) known[at] = bits;
            }
            size = as_float(bits & 0xffff0000u), lost = as_float(bits << 16);
            panel.err[done] = 1.0001f * (lost * c.longest + (size + lost) * c.error + (rows.d + 4) * 6e-8f * (size + c.longest) * c.longest) + 1e-30f;
        }
    }
    static uint32_t up(float x) {
        uint32_t bits;
        memcpy(&bits, &x, 4);
        return (bits + 0xffff) >> 16;
    }
};

// Calls seen(row, column, products, n) for every row and 16 n columns at a time; meanwhile the next panel is loaded, so that memory and tiles
// work at the same time.
template <class F> inline __attribute__((always_inline)) void each_half(const HalfPanel& panel, const HalfTiles& c, Loading* next, F seen) {
    constexpr int SOME = 8;
    alignas(64) float products[32][SOME][16];
    const int steps = (c.many + 1) / 2 * c.wide;
    int credit = 0;
    for (int m = 0; m < c.many; m += SOME) {
        const int here = std::min(SOME, c.many - m);
        for (int g = 0; g < here; g += 2) {
            const bool two = g + 1 < here;
            const uint16_t *p = panel.data.data, *q = c.data.data + size_t(m + g) * c.wide * 512, *r = q + size_t(c.wide) * 512;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int w = 0; w < c.wide; w++, p += 1024, q += 512, r += 512) {
                _tile_loadd(4, p, 64);
                _tile_loadd(5, p + 512, 64);
                _tile_loadd(6, q, 64);
                if (two || w % 2 == 0) {
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 5, 6);
                }
                if (two) {
                    _tile_loadd(7, r, 64);
                    _tile_dpbf16ps(2, 4, 7);
                    _tile_dpbf16ps(3, 5, 7);
                } else if (w % 2) {  // a last tile alone has its columns' odd parts there: a sum waits long for the one before
                    _tile_dpbf16ps(2, 4, 6);
                    _tile_dpbf16ps(3, 5, 6);
                }
                if (next)
                    for (credit += 32; credit >= steps; credit -= steps) next->some(1);
            }
            _tile_stored(0, products[0][g], sizeof products[0]);
            _tile_stored(1, products[16][g], sizeof products[0]);
            _tile_stored(2, products[0][g + 1], sizeof products[0]);
            _tile_stored(3, products[16][g + 1], sizeof products[0]);
            for (int i = 0; i < 32 && !two; i++) *reinterpret_cast<V<float>*>(products[i][g]) += wide(products[i][g + 1]);
        }
        for (int i = 0; i < 32; i++) seen(i, m * 16, products[i], here);
    }
}
inline V<float> score(const HalfTiles& c, int column, const float* product) { return wide(c.half.data + column) - wide(product); }

// The labels of the rows [first, last) of one thread, by settle(row, label).  A row that needs a second look has those as
// candidates that are within the error of its best; few are measured one by one, many are left to the full scan, whose rows are counted.
template <class Settle>
int64_t assign_half(const Rows<float>& rows, size_t first, size_t last, const float* centres, const Tiles<float>& tiles, const HalfTiles& c,
                    uint32_t* known, Settle settle) {
    Config config;
    _tile_loadconfig(&config);
    HalfPanel panels[2] = {HalfPanel(c), HalfPanel(c)}, second_look(c);
    Buffer<float> whole(size_t(32) * rows.d);
    std::vector<int64_t> open;
    std::vector<float> reach;                     // of each open row: scores up to this may belong to its nearest
    std::vector<std::pair<int, int>> candidates;  // row of the panel, centroid
    int64_t again = 0;
    auto close = [&](size_t from, int count) {
        Loading{rows, c, known, second_look, open.data() + from, 0, count}.some(32);
        candidates.clear();
        const size_t most = 8 * count;
        each_half(second_look, c, nullptr, [&](int r, int column, const float (*products)[16], int n) {
            if (r >= count) return;
            const V<float> limit = all(reach[from + r]);
            for (int g = 0; g < n; g++) {
                __mmask16 near = _mm512_cmp_ps_mask((__m512)score(c, column + g * 16, products[g]), (__m512)limit, _CMP_LE_OQ);
                for (; near && candidates.size() <= most; near &= near - 1) candidates.emplace_back(r, column + g * 16 + __builtin_ctz(near));
            }
        });
        if (candidates.size() <= most) {
            float closest[32];
            int32_t who[32];
            std::fill(closest, closest + 32, FAR<float>);
            for (auto [r, column] : candidates) {  // a row's columns ascend: the lowest number wins
                float square = distance(rows, open[from + r], centres + size_t(column) * rows.d);
                if (square < closest[r]) closest[r] = square, who[r] = column;
            }
            for (int r = 0; r < count; r++) settle(open[from + r], who[r]);
        } else {
            again += count;
            load<float>(rows, open.data() + from, 0, count, whole);
            Best<float> full;
            scan<float, false>(whole, tiles, 0, tiles.tiles, full);
            for (int r = 0; r < count; r++) settle(open[from + r], full.who[r / 16][r % 16]);
        }
    };
    struct Row {
        V<float> value, second;
        I<float> who;
    } state[32];
    auto loading = [&](size_t at) {
        return Loading{rows, c, known, panels[(at - first) / 32 % 2], nullptr, int64_t(at), int(std::min<size_t>(32, last - at))};
    };
    if (first < last) loading(first).some(32);
    for (size_t at = first; at < last; at += 32) {
        const int count = int(std::min<size_t>(32, last - at));
        const HalfPanel& panel = panels[(at - first) / 32 % 2];
        Loading next = loading(std::min(at + 32, last - 1));
        for (Row& row : state) row = {all(FAR<float>), all(FAR<float>), I<float>{}};
        each_half(panel, c, at + 32 < last ? &next : nullptr, [&](int r, int column, const float (*products)[16], int n) {
            Row row = state[r];
            for (int g = 0; g < n; g++) {
                V<float> now = score(c, column + g * 16, products[g]);
                row.second = low<float>(row.second, high<float>(row.value, now));
                I<float> less = now < row.value;
                row.value = low<float>(row.value, now);
                row.who = less ? *reinterpret_cast<const I<float>*>(c.number.data + column + g * 16) : row.who;
            }
            state[r] = row;
        });
        for (int v = 0; v < 2; v++) {
            V<float> value[16], second[16];  // of each lane, then of each row
            I<float> who[16];
            for (int r = 0; r < 16; r++) value[r] = state[v * 16 + r].value, second[r] = state[v * 16 + r].second, who[r] = state[v * 16 + r].who;
            transpose(value);
            transpose(second);
            transpose(who);
            for (int i = 1; i < 16; i++) {
                second[0] = low<float>(low<float>(second[0], second[i]), high<float>(value[0], value[i]));
                I<float> less = value[i] < value[0];
                value[0] = low<float>(value[0], value[i]);
                who[0] = less ? who[i] : who[0];
            }
            V<float> edge = value[0] + 2 * *reinterpret_cast<const V<float>*>(panel.err + v * 16);
            __mmask16 clear = _mm512_cmp_ps_mask((__m512)second[0], (__m512)edge, _CMP_GT_OQ);
            for (int r = 0; r < 16 && v * 16 + r < count; r++)
                if (clear >> r & 1)
                    settle(at + v * 16 + r, who[0][r]);
                else
                    open.push_back(at + v * 16 + r), reach.push_back(edge[r]);
        }
        for (; open.size() >= 32; open.resize(open.size() - 32), reach.resize(open.size())) close(open.size() - 32, 32);
    }
    if (!open.empty()) close(0, int(open.size()));
    _tile_release();
    return again;
}
#endif

// ---- what is exported

// `kept`: labels and sums are those of the step before, and only rows whose label changes are moved.
template <class T>
int64_t assign(const Rows<T>& rows, size_t n, const T* centres, int k, int32_t* labels, double* sum, double* weight, double* moves, int kept,
               const T* weights, [[maybe_unused]] int filter, [[maybe_unused]] uint32_t* known, int64_t* changed, int threads) {
    Tiles<T> tiles(centres, k, rows.d, rows.shift);
    Sums sums(k, rows.d, sum, weight, moves, threads);
    std::vector<int64_t> again(threads, 0), other(threads, 0);
#if defined(__AMX_BF16__)
    std::unique_ptr<HalfTiles> half;
    if constexpr (sizeof(T) == 4)
        if (filter && rows.column == 1 && may_use_tiles()) half = std::make_unique<HalfTiles>(centres, k, rows.d, rows.shift);
#endif
    parallel(threads, n, PANEL<T>, [&](int thread, size_t first, size_t last) {
        Sums::Part mine = sums.of(thread);
        int64_t others = 0;
        auto settle = [&](int64_t i, int32_t label) {
            const int32_t before = labels[i];
            labels[i] = label;
            others += before != label;
            if (!sum || (kept && before == label)) return;
            double one = weights ? double(weights[i]) : 1.0;
            mine.move(rows, i, one, label, false);
            if (kept) mine.move(rows, i, one, before, true);
        };
#if defined(__AMX_BF16__)
        if constexpr (sizeof(T) == 4)
            if (half) {
                again[thread] = assign_half(rows, first, last, centres, tiles, *half, known, settle);
                other[thread] = others;
                return;
            }
#endif
        sweep<T, Best<T>>(
            rows, first, last, tiles,
            [&](const T* panel, int from, int to, Best<T>& best, Ahead ahead) { scan<T, false>(panel, tiles, from, to, best, ahead); },
            [&](size_t at, int count, const T*, Best<T>& best) {
                for (int r = 0; r < count; r++) settle(at + r, int32_t(best.who[r / LANES<T>][r % LANES<T>]));
            });
        again[thread] = last - first;
        other[thread] = others;
    });
    sums.join();
    int64_t looked = 0;
    for (int t = 0; t < threads; t++) {
        looked += again[t];
        if (changed) *changed += other[t];
    }
    return looked;
}

// Sort-inverse: rows in the order of their labels, so that every centroid is summed in one place.
template <class T>
void update(const Rows<T>& rows, size_t n, const int32_t* labels, int k, double* sum, double* weight, double* moves, const T* weights, int threads) {
    std::vector<int64_t> start(k + 1, 0), order(n);
    for (size_t i = 0; i < n; i++) start[labels[i] + 1]++;
    for (int i = 0; i < k; i++) start[i + 1] += start[i];
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (size_t i = 0; i < n; i++) order[next[labels[i]]++] = i;
    parallel(threads, k, 1, [&](int, size_t first, size_t last) {
        for (size_t c = first; c < last; c++)
            for (int64_t i = start[c]; i < start[c + 1]; i++)
                Sums::Part{sum, weight, moves}.move(rows, order[i], weights ? double(weights[order[i]]) : 1.0, int(c), false);
    });
}

// Squared distance of each row to its own centroid, and their weighted sum.
template <class T> double own(const Rows<T>& rows, size_t n, const T* centres, const int32_t* labels, const T* weights, T* out, int threads) {
    std::vector<double> sums(threads, 0.0);
    parallel(threads, n, 64, [&](int thread, size_t first, size_t last) {
        double sum = 0;
        for (size_t i = first; i < last; i++) {
            T square = distance(rows, i, centres + size_t(labels[i]) * rows.d);
            if (out) out[i] = square;
            sum += (weights ? double(weights[i]) : 1.0) * double(square);
        }
        sums[thread] = sum;
    });
    double sum = 0;
    for (double s : sums) sum += s;
    return sum;
}

// k-means++: nearest (n,) becomes min(nearest, |x - centre|^2); weighted sums of every BLOCK rows of it into sums.
constexpr int64_t BLOCK = 4096;
template <class T> void take(const Rows<T>& rows, int64_t n, const T* centre, T* nearest, const T* weights, double* sums, int threads) {
    parallel(threads, (n + BLOCK - 1) / BLOCK, 1, [&](int, size_t first, size_t last) {
        for (size_t b = first; b < last; b++) {
            double sum = 0;
            for (int64_t i = b * BLOCK; i < std::min<int64_t>(n, (b + 1) * BLOCK); i++) {
                nearest[i] = std::min(nearest[i], distance(rows, i, centre));
                sum += (weights ? double(weights[i]) : 1.0) * double(nearest[i]);
            }
            sums[b] = sum;
        }
    });
}

// k-means++: weighted sum of min(nearest, |x - candidate|^2) for each of k candidates.
template <class T>
void potential(const Rows<T>& rows, size_t n, const T* candidates, int k, const T* nearest, const T* weights, double* out, int threads) {
    Tiles<T> tiles(candidates, k, rows.d, rows.shift);
    std::vector<std::vector<double>> sums(threads, std::vector<double>(k, 0.0));
    constexpr int P = PANEL<T>;
    parallel(threads, n, P, [&](int thread, size_t first, size_t last) {
        Buffer<T> panel(size_t(P) * rows.d);
        std::vector<V<T>> part(k);
        for (size_t at = first; at < last; at += P) {
            int count = int(std::min<size_t>(P, last - at));
            load<T>(rows, nullptr, at, count, panel);
            V<T> size[VECTORS] = {}, near[VECTORS] = {}, weight[VECTORS] = {};
            for (int j = 0; j < rows.d; j++)
                for (int v = 0; v < VECTORS; v++) {
                    V<T> x = wide(panel + size_t(j) * P + v * LANES<T>);
                    size[v] += x * x;
                }
            for (int r = 0; r < count; r++) near[r / LANES<T>][r % LANES<T>] = nearest[at + r], weight[r / LANES<T>][r % LANES<T>] = weights ? weights[at + r] : T(1);
            each(panel.data, tiles, 0, tiles.tiles, Ahead{}, [&](int column, auto& acc) {
                constexpr int N = sizeof(acc) / sizeof(acc[0]);
                for (int j = 0; j < N && column + j < k; j++)
                    for (int v = 0; v < VECTORS; v++) part[column + j] += weight[v] * low<T>(near[v], high<T>(V<T>{}, size[v] + 2 * acc[j][v]));
            });
            if ((at - first) / P % 32 == 31 || at + P >= last)  // few enough for a float to add up
                for (int j = 0; j < k; j++) sums[thread][j] += double(total<T>(part[j])), part[j] = V<T>{};
        }
    });
    for (int j = 0; j < k; j++) {
        out[j] = 0;
        for (auto& s : sums) out[j] += s[j];
    }
}

// The `many` nearest centroids of every row, nearest first: scores are turned into squared distances of the shifted data.
template <class T>
void nearest(const Rows<T>& rows, size_t n, const T* memory, int k, int many, int64_t* who, T* far, int threads) {
    Tiles<T> tiles(memory, k, rows.d, rows.shift);
    struct List {
        std::vector<T> value;
        std::vector<int64_t> who;
        V<T> worst[VECTORS] = {all(FAR<T>), all(FAR<T>)};
    };
    parallel(threads, n, PANEL<T>, [&](int, size_t first, size_t last) {
        sweep<T, List>(
            rows, first, last, tiles,
            [&](const T* panel, int from, int to, List& list, Ahead ahead) {
                if (list.value.empty()) list.value.assign(size_t(PANEL<T>) * many, FAR<T>), list.who.assign(size_t(PANEL<T>) * many, -1);
                each(panel, tiles, from, to, ahead, [&](int column, auto& acc) {
                    constexpr int N = sizeof(acc) / sizeof(acc[0]);
                    V<T> lowest[VECTORS] = {acc[0][0], acc[0][1]};
                    for (int j = 1; j < N; j++) lowest[0] = low<T>(lowest[0], acc[j][0]), lowest[1] = low<T>(lowest[1], acc[j][1]);
                    for (int v = 0; v < VECTORS; v++) {
                        I<T> some = lowest[v] < list.worst[v];
                        for (int lane = 0; lane < LANES<T>; lane++) {
                            if (!some[lane]) continue;
                            T* value = list.value.data() + size_t(v * LANES<T> + lane) * many;
                            int64_t* name = list.who.data() + size_t(v * LANES<T> + lane) * many;
                            for (int j = 0; j < N; j++) {
                                T score = acc[j][v][lane];
                                if (!(score < value[many - 1])) continue;
                                int at = many - 1;
                                for (; at > 0 && score < value[at - 1]; at--) value[at] = value[at - 1], name[at] = name[at - 1];
                                value[at] = score, name[at] = column + j;
                            }
                            list.worst[v][lane] = value[many - 1];
                        }
                    }
                });
            },
            [&](size_t at, int count, const T* panel, List& list) {
                for (int r = 0; r < count; r++) {
                    T norm = 0;
                    for (int j = 0; j < rows.d; j++) norm += panel[size_t(j) * PANEL<T> + r] * panel[size_t(j) * PANEL<T> + r];
                    for (int m = 0; m < many; m++) {
                        who[(at + r) * many + m] = list.who[size_t(r) * many + m];
                        far[(at + r) * many + m] = std::max(T(0), norm + 2 * list.value[size_t(r) * many + m]);
                    }
                }
            });
    });
}

// A step with bounds (Yinyang over groups of tiles): a row whose distance to its own centroid, grown by what that one moved, stays below every
// group's bound, lowered by what the group moved at most, keeps its label unseen.  Bounds allow for the rounding of scores.
//   edges (groups + 1): first tile of each group.  upper (n,), lower (n, groups): distances.  moved (k,): of the centroids since the last
//   step.  sum, weight: kept up to date.  The first step (labels -1) looks at everything.  Returns how many (row, group) pairs were looked at.
template <class T>
int64_t bounded(const Rows<T>& rows, size_t n, const T* centres, int k, const int32_t* edges, int groups, int32_t* labels, T* upper, T* lower,
                const T* moved, double* sum, double* weight, double* moves, const T* weights, int64_t* changed, int threads) {
    Tiles<T> tiles(centres, k, rows.d, rows.shift);
    Sums sums(k, rows.d, sum, weight, moves, threads);
    std::vector<int> group(k);
    std::vector<T> most(groups, T(0));
    for (int g = 0; g < groups; g++)
        for (int c = tiles.first(edges[g]); c < std::min(k, tiles.first(edges[g + 1])); c++) group[c] = g, most[g] = std::max(most[g], moved[c]);
    const T eps = sizeof(T) == 4 ? T(6e-8) : T(1.2e-16), more = 1 + 4 * eps, less = 1 - 4 * eps;
    std::vector<int64_t> looked(threads, 0), other(threads, 0);
    constexpr int P = PANEL<T>;
    constexpr size_t BLOCK = 16 * P;
    parallel(threads, n, P, [&](int thread, size_t first, size_t last) {
        Sums::Part mine = sums.of(thread);
        std::vector<std::vector<int64_t>> open(groups);
        std::vector<T> score(BLOCK), size(BLOCK);
        std::vector<int32_t> found(BLOCK);
        Buffer<T> panel(size_t(P) * rows.d);
        for (size_t at = first; at < last; at += BLOCK) {
            size_t end = std::min(at + BLOCK, last);
            for (auto& o : open) o.clear();
            for (size_t i = at; i < end; i++) {
                T* bound = lower + i * groups;
                int32_t label = labels[i];
                found[i - at] = -1, score[i - at] = FAR<T>;
                if (label < 0) {
                    for (auto& o : open) o.push_back(i);
                    continue;
                }
                T closest = FAR<T>, u = (upper[i] + moved[label]) * more;
                for (int g = 0; g < groups; g++) closest = std::min(closest, bound[g] = (bound[g] - most[g]) * (bound[g] > most[g] ? less : more));
                if (u >= closest) u = std::sqrt(distance(rows, i, centres + size_t(label) * rows.d)) * (1 + eps * (rows.d + 4));
                upper[i] = u;
                if (u < closest) continue;
                // its own group is looked at in any case, so that all scores that are compared come from one arithmetic
                for (int g = 0; g < groups; g++)
                    if (bound[g] <= u || g == group[label]) open[g].push_back(i);
                found[i - at] = label;
            }
            for (size_t i = at; i < end; i++)
                if (labels[i] < 0 || found[i - at] >= 0) {
                    T norm = 0;
                    const T* x = rows.x + i * rows.row;
                    for (int j = 0; j < rows.d; j++) norm += (x[j * rows.column] - rows.shift[j]) * (x[j * rows.column] - rows.shift[j]);
                    size[i - at] = norm, found[i - at] = -1;
                }
            auto err = [&](size_t i) { return 2 * eps * (rows.d + 8) * (size[i - at] + tiles.longest * tiles.longest); };
            auto floor = [&](size_t i, T value) { return std::sqrt(std::max(T(0), size[i - at] + 2 * value - err(i))) * less; };
            for (int g = 0; g < groups; g++)
                for (size_t q = 0; q < open[g].size(); q += P) {
                    int count = int(std::min<size_t>(P, open[g].size() - q));
                    load<T>(rows, open[g].data() + q, 0, count, panel);
                    Best<T> best;
                    scan<T, true>(panel, tiles, edges[g], edges[g + 1], best);
                    looked[thread] += count;
                    for (int r = 0; r < count; r++) {
                        size_t i = open[g][q + r];
                        T value = best.value[r / LANES<T>][r % LANES<T>];
                        int32_t who = int32_t(best.who[r / LANES<T>][r % LANES<T>]), before = found[i - at];
                        T* bound = lower + i * groups;
                        if (value < score[i - at] || (value == score[i - at] && who < before)) {
                            if (before >= 0 && group[before] != g) bound[group[before]] = std::min(bound[group[before]], floor(i, score[i - at]));
                            score[i - at] = value, found[i - at] = who;
                            bound[g] = floor(i, best.second[r / LANES<T>][r % LANES<T>]);
                        } else
                            bound[g] = floor(i, value);
                    }
                }
            for (size_t i = at; i < end; i++) {
                int32_t now = found[i - at], before = labels[i];
                if (now < 0) continue;
                upper[i] = std::sqrt(std::max(T(0), size[i - at] + 2 * score[i - at] + err(i))) * more;
                if (now == before) continue;
                double one = weights ? double(weights[i]) : 1.0;
                mine.move(rows, i, one, now, false);
                if (before >= 0) mine.move(rows, i, one, before, true);
                labels[i] = now;
                other[thread]++;
            }
        }
    });
    sums.join();
    int64_t pairs = 0;
    for (int t = 0; t < threads; t++) pairs += looked[t], *changed += other[t];
    return pairs;
}

// Lloyd's iterations of many small problems, each on one thread: x (problems, n, d), centres (problems, k, d) from start to end,
// labels those of the final centres.  An empty cluster takes the row that is furthest from its centre.
template <class T>
void lloyd(const T* x, int64_t problems, int64_t n, int d, T* centres, int k, int iterations, const T* tol, int32_t* labels, double* inertia,
           int32_t* done, int threads) {
    parallel(threads, problems, 1, [&](int, size_t first, size_t last) {
        std::vector<double> sum(size_t(k) * d), weight(k);
        std::vector<T> shift(d), far(n);
        for (size_t p = first; p < last; p++) {
            const T* mine = x + p * n * d;
            T* c = centres + p * k * d;
            int32_t* l = labels + p * n;
            std::fill(sum.begin(), sum.begin() + d, 0.0);
            Rows<T> rows{mine, d, 1, shift.data(), d};
            for (int64_t i = 0; i < n; i++) add(rows, i, 1.0 / double(n), sum.data());
            for (int j = 0; j < d; j++) shift[j] = T(sum[j]);
            int step = 0;
            for (bool moving = true; moving && step < iterations; step++) {
                std::fill(sum.begin(), sum.end(), 0.0), std::fill(weight.begin(), weight.end(), 0.0);
                assign<T>(rows, n, c, k, l, sum.data(), weight.data(), nullptr, 0, nullptr, 0, nullptr, nullptr, 1);
                if (std::find(weight.begin(), weight.end(), 0.0) != weight.end()) {
                    own<T>(rows, n, c, l, nullptr, far.data(), 1);
                    for (int i = 0; i < k; i++) {
                        if (weight[i] > 0) continue;
                        int64_t at = std::max_element(far.begin(), far.end()) - far.begin();
                        add(rows, at, -1.0, &sum[size_t(l[at]) * d]), add(rows, at, 1.0, &sum[size_t(i) * d]);
                        weight[l[at]] -= 1, weight[i] = 1, far[at] = 0;
                    }
                }
                double moved = 0;
                for (int i = 0; i < k; i++)
                    for (int j = 0; weight[i] > 0 && j < d; j++) {
                        T now = T(sum[size_t(i) * d + j] / weight[i]), gap = now - c[size_t(i) * d + j];
                        moved += double(gap) * gap, c[size_t(i) * d + j] = now;
                    }
                moving = moved > double(tol[p]);
            }
            done[p] = step;
            assign<T>(rows, n, c, k, l, nullptr, nullptr, nullptr, 0, nullptr, 0, nullptr, nullptr, 1);
            inertia[p] = own<T>(rows, n, c, l, nullptr, nullptr, 1);
        }
    });
}

// What the machine can do, to hold the kernels against: multiply-adds in registers, and reading.
template <class T> double flops(int64_t repeats, int threads) {
    std::vector<double> sums(threads);
    parallel(threads, size_t(threads), 1, [&](int thread, size_t, size_t) {
        V<T> acc[COLUMNS][VECTORS], x = all(T(1) / T(repeats + 3)), y = all(T(0.999));
        for (int j = 0; j < COLUMNS; j++) acc[j][0] = acc[j][1] = all(T(j));
        for (int64_t i = 0; i < repeats; i++) {
#pragma GCC unroll 12
            for (int j = 0; j < COLUMNS; j++) acc[j][0] = acc[j][0] * y + x, acc[j][1] = acc[j][1] * y + x;
        }
        for (int j = 0; j < COLUMNS; j++) sums[thread] += double(total<T>(acc[j][0] + acc[j][1]));
    });
    double sum = 0;
    for (double s : sums) sum += s;
    return sum;
}

double read_all(const float* x, size_t n, int threads) {
    std::vector<float> sums(threads);
    parallel(threads, n, 1024, [&](int thread, size_t first, size_t last) {
        V<float> sum[4] = {};
        for (size_t i = first; i + 4 * LANES<float> <= last; i += 4 * LANES<float>)
            for (int j = 0; j < 4; j++) sum[j] += wide(x + i + j * LANES<float>);
        sums[thread] = total<float>(sum[0] + sum[1] + sum[2] + sum[3]);
    });
    return sums[0];
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))
#define BOTH(T, suffix)                                                                                                                                \
    EXPORT int64_t assign_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* shift, const T* centres, int k,                 \
                                   int32_t* labels, double* sum, double* weight, double* moves, int kept, const T* weights, int filter,                \
                                   uint32_t* known, int64_t* changed, int threads) {                                                                   \
        return assign<T>({x, row, column, shift, d}, n, centres, k, labels, sum, weight, moves, kept, weights, filter, known, changed, threads);       \
    }                                                                                                                                                  \
    EXPORT void update_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const int32_t* labels, int k, double* sum, double* weight,  \
                                double* moves, const T* weights, int threads) {                                                                        \
        update<T>({x, row, column, nullptr, d}, n, labels, k, sum, weight, moves, weights, threads);                                                   \
    }                                                                                                                                                  \
    EXPORT double own_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* centres, const int32_t* labels, const T* weights,   \
                               T* out, int threads) {                                                                                                  \
        return own<T>({x, row, column, nullptr, d}, n, centres, labels, weights, out, threads);                                                        \
    }                                                                                                                                                  \
    EXPORT void take_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* centre, T* nearest, const T* weights,                \
                              double* sums, int threads) {                                                                                             \
        take<T>({x, row, column, nullptr, d}, n, centre, nearest, weights, sums, threads);                                                             \
    }                                                                                                                                                  \
    EXPORT void potential_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* shift, const T* candidates, int k,              \
                                   const T* nearest, const T* weights, double* out, int threads) {                                                     \
        potential<T>({x, row, column, shift, d}, n, candidates, k, nearest, weights, out, threads);                                                    \
    }                                                                                                                                                  \
    EXPORT void nearest_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* shift, const T* memory, int k, int many,          \
                                 int64_t* who, T* far, int threads) {                                                                                  \
        nearest<T>({x, row, column, shift, d}, n, memory, k, many, who, far, threads);                                                                 \
    }                                                                                                                                                  \
    EXPORT int64_t bounded_##suffix(const T* x, int64_t n, int d, int64_t row, int64_t column, const T* shift, const T* centres, int k,                \
                                    const int32_t* edges, int groups, int32_t* labels, T* upper, T* lower, const T* moved, double* sum,                \
                                    double* weight, double* moves, const T* weights, int64_t* changed, int threads) {                                  \
        return bounded<T>({x, row, column, shift, d}, n, centres, k, edges, groups, labels, upper, lower, moved, sum, weight, moves, weights, changed, \
                          threads);                                                                                                                    \
    }
#define LLOYD(T, suffix)                                                                                                                              \
    EXPORT void lloyd_##suffix(const T* x, int64_t problems, int64_t n, int d, T* centres, int k, int iterations, const T* tol, int32_t* labels,      \
                               double* inertia, int32_t* done, int threads) {                                                                         \
        lloyd<T>(x, problems, n, d, centres, k, iterations, tol, labels, inertia, done, threads);                                                     \
    }
LLOYD(float, f32)
LLOYD(double, f64)
BOTH(float, f32)
BOTH(double, f64)

EXPORT double flops_f32(int64_t repeats, int threads) { return flops<float>(repeats, threads); }
EXPORT double read_f32(const float* x, int64_t n, int threads) { return read_all(x, n, threads); }
EXPORT int64_t flops_of_a_repeat() { return 2 * COLUMNS * VECTORS * LANES<float>; }
// First centroid of each tile, and k; returns how many tiles there are.
EXPORT int tiles(int k, int32_t* edges) {
    int whole = Tiles<float>::whole(k), n = whole + Tiles<float>::last(k);
    for (int t = 0; t <= n; t++) edges[t] = t == n ? k : t <= whole ? t * COLUMNS : whole * COLUMNS + (t - whole) * TAIL;
    return n;
}
EXPORT int half_products() {
#if defined(__AMX_BF16__)
    return may_use_tiles();
#else
    return 0;
#endif
}
// Which of the libraries the machine can run; asked of the plainest one.
EXPORT int level() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (wide && __builtin_cpu_supports("avx512bf16")) {
        unsigned a = 7, b, c = 0, d;
        __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        if (d >> 22 & 1 && d >> 24 & 1) return 3;  // tiles of bfloat16
    }
    if (wide) return 2;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}
