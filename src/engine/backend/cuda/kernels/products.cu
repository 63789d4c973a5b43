// Products of weight matrices with activations: for a few tokens, for prompts on tensor cores, for any number of tokens.
//
// All these kernels give bit-identical results. Columns are processed in steps of 256, in order. For types with blocks of 256 columns,
// a step is summed in integers; for types with blocks of 32, the eight terms of a step are summed pairwise. Unquantised types are
// summed by eight lanes, each in column order, whose sums are then added pairwise.
#include "copies.cuh"
#include "weights.cuh"

#define WARPS 4
#define MATRICES_MAX 8

// Rows of a matrix. Weights may be read up to the next multiple of 16 bytes beyond their end.
struct Matrix {
  uint64_t offset;                  // in the part, bytes
  float* out;
  const float* bias;                // added to the sum; nullable
  uint32_t part, type, rows, stride, first_block;            // stride: elements between tokens of `out`
  // 0: all rows are in one part. Else, for a single token, the rows are in consecutive parts: rows of each but the last, times FILE_PAGE,
  // plus the increase of the start within a page of the file from one part to the next.
  uint32_t tiles;
};
#define FILE_PAGE 4096u
// Combination of gate and upper projection, two matrices with the same number of rows, after both are complete.
struct Pair {
  Copies to;
  uint32_t* counters;               // one per 256 rows and 8 tokens; zero before and after
  uint32_t activation, unused;      // 0: no pair; 1: SiLU; 2: GELU
};
struct Products {
  const uint64_t* parts;            // address of each part of the weights
  Copies input;
  Pair pair;
  uint32_t tokens, matrices;
  Matrix matrix[MATRICES_MAX];
};

// Adds the integer sums of a step to the chain of steps.
template <class T> DEVICE float chained(float sum, float2 factors, float scale, int products, int least) {
  sum = fmaf(factors.x * scale, (float)products, sum);
  return T::MINIMUM ? fmaf(-(factors.y * scale), (float)least, sum) : sum;
}
// Term of a block of 32 columns.
template <class T> DEVICE float term(float2 factors, float scale, int products, int sum) {
  const float t = factors.x * scale * (float)products;
  return T::MINIMUM ? fmaf(factors.y * scale, (float)sum, t) : t;
}
DEVICE float eight_lanes(float v) {
#pragma unroll
  for (int m = 1; m < 8; m <<= 1) v += __shfl_xor_sync(ALL, v, m);
  return v;
}
DEVICE float activated(uint32_t kind, float gate, float up) { return (kind == 2u ? gelu_of(gate) : silu_of(gate)) * up; }

// Sums over four lanes: with one value, each lane receives the sum; with four, in the order p ^ 0 to p ^ 3, lane p receives sum p.
template <int N, class V> DEVICE V four_lanes(const V* v) {
  const V pair = v[0] + __shfl_xor_sync(ALL, v[N > 1 ? 1 : 0], 1);
  return pair + (N > 1 ? __shfl_xor_sync(ALL, v[2], 2) + __shfl_xor_sync(ALL, v[3], 3) : __shfl_xor_sync(ALL, pair, 2));
}

// Steps copied at once, and their bytes per row in shared memory, rounded out to units of 16 bytes.
template <class T> struct Together { static constexpr int STEPS = T::STEP > 210 ? 1 : T::STEP > 110 ? 2 : T::STEP > 84 ? 3 : 4, BYTES = (STEPS * T::STEP + 29) / 16 * 16; };
#define SEGMENT_MAX 464
#define ROWS_OF_BLOCK (8 * WARPS)
#define STAGES_OF(N) ((N) == 1 ? 2 : 3)

// Eight rows per warp by N tokens: four lanes share a row, each with a quarter of a step: two sub-blocks, or 16 columns of four.
// Lane p processes tokens in the order n ^ p, and holds the sums of tokens p and p + 4.
template <class T, int N> DEVICE void rows_of(const Products& job, const Matrix& m, uint32_t block, uint32_t first, uint8_t* memory) {
  // With several tokens, registers limit the number of warps, so each has more copies in flight.
  constexpr int K = Together<T>::STEPS, SEGMENT = Together<T>::BYTES, STAGE = ROWS_OF_BLOCK * SEGMENT_MAX, STAGES = STAGES_OF(N);
  static_assert(SEGMENT <= SEGMENT_MAX, "a segment has its place");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, p = lane & 3;
  const uint32_t row = (block * WARPS + warp) * 8u + g, at = row < m.rows ? row : m.rows - 1u;
  const uint32_t columns = job.input.columns, blocks = columns / 32u, steps = (columns + 255u) / 256u;
  const uint32_t row_bytes = T::SUPER ? columns / 256u * T::STEP : blocks * (T::STEP / 8);
  const uint8_t* weights = (const uint8_t*)job.parts[m.part] + m.offset + (size_t)at * row_bytes;
  const uint32_t odd = (uint32_t)(size_t)weights & 15u;
  uint8_t* mine = memory + (warp * 8 + g) * SEGMENT_MAX;
  // Copies the next steps to the next stage: four lanes copy 16 bytes each.
  uint32_t skip = odd, left = row_bytes, fill = 0u, fetched = 0u;     // bytes before the first step, bytes left
  const uint8_t* source = weights - odd + p * 16;
  const Shared target = shared_of(mine) + p * 16;
  auto fetch = [&] {
    const int end = fetched < steps ? (int)(skip + min(left, (uint32_t)(K * T::STEP))) - p * 16 : 0;
#pragma unroll
    for (int u = 0; u < (SEGMENT + 63) / 64; u++)
      if (u * 64 + (PLANTED(TAIL_OF_SEGMENT) ? 15 : 0) < end) copy16_async(target + fill + u * 64, source + u * 64);
    copies_commit();
    source += (skip + K * T::STEP) & ~15u;
    skip = (skip + K * T::STEP) & 15u; left -= K * T::STEP; fetched += K;
    fill = fill == (STAGES - 1) * STAGE ? 0u : fill + STAGE;
  };
  // Offsets of the tokens from the first: shuffled between lanes, since compilers would otherwise recompute them in every step.
  uint32_t token[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    token[n] = (min(first + (n & 4) + (N > 1 ? p : 0), job.tokens - 1u) - first) * job.input.stride;
    if (N > 1) token[n] = __shfl_xor_sync(ALL, token[n], n & 3);
  }
  const uint8_t* x = job.input.base + format_offset(job.input.formats, T::SUPER ? FORMAT_Q8K : FORMAT_Q8_0, columns) + (size_t)first * job.input.stride;
  const uint8_t* bytes = x + (T::SUPER ? (p >> 1) * 128 + (p & 1) * 16 : p * 64);
  const uint8_t *sums = x + columns + p * 8, *scales = x + columns + columns / 8u + (T::SUPER ? 0 : p * 8);
  constexpr int OWN = (N + 3) / 4;
  float sum[OWN];
#pragma unroll
  for (int n = 0; n < OWN; n++) sum[n] = 0.0f;
#pragma unroll
  for (int s = 0; s < STAGES - 1; s++) fetch();
  uint32_t drain = 0u, before = odd;
  for (uint32_t from = 0; from < steps; from += K) {
    fetch();
    if (PLANTED(NO_COPY_WAIT)) copies_wait<STAGES>(); else copies_wait<STAGES - 1>();
    if (!PLANTED(NO_WARP_BARRIER)) __syncwarp();
    const uint8_t* stage = mine + drain + before;
    drain = drain == (STAGES - 1) * STAGE ? 0u : drain + STAGE;
    before = (before + K * T::STEP) & 15u;
#pragma unroll
    for (int k = 0; k < K; k++) {
      if (k > 0 && from + k >= steps) break;
      const uint8_t* step = stage + k * T::STEP;
      // Weights are unpacked once for all tokens.
      if constexpr (T::SUPER) {
        uint32_t q[4][4], scale[T::WORDS], least[T::WORDS]; int i1[N], i2[N];
        T::sixteens(step, p, q);
        T::scales(step, p >> 1, scale, least);
        int of_sums = 0;
        if constexpr (T::MINIMUM || T::LESS != 0) of_sums = (int)T::four_of(T::MINIMUM ? least : scale, p & 1);
#pragma unroll
        for (int n = 0; n < N; n++) {
          i1[n] = i2[n] = 0;
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const uint4 v = load16(bytes + token[n] + k * 256 + j * 32);
            int products = T::dot(q[j][0], v.x, 0);
            products = T::dot(q[j][1], v.y, products);
            products = T::dot(q[j][2], v.z, products);
            products = T::dot(q[j][3], v.w, products);
            i1[n] += T::scale_of(scale, j, p & 1) * (1 << T::up(j)) * products;
          }
          if constexpr (T::MINIMUM || T::LESS != 0) {
            const uint2 four = load8(sums + token[n] + k * 32);
            i2[n] = dp2a_hi((int)four.y, of_sums, dp2a_lo((int)four.x, of_sums, 0));
            if constexpr (T::LESS != 0) i1[n] -= (T::LESS << T::RAISED) * i2[n];
          }
        }
#pragma unroll
        for (int n = 0; n < OWN; n++) {
          const int products = four_lanes<N>(i1 + 4 * n) >> T::RAISED, minimums = T::MINIMUM ? four_lanes<N>(i2 + 4 * n) : 0;
          sum[n] = chained<T>(sum[n], T::factors(step), *(const float*)(scales + token[4 * n] + k * 4), products, minimums);
        }
      } else {
        float t[N] = {};
#pragma unroll
        for (int j = 0; j < 2; j++) {
          if ((from + k) * 8u + 2u * p + j >= blocks) continue;
          const float2 factors = T::factors(step, 2 * p + j);
          uint32_t q[8];
          if constexpr (N > 1) T::template quads<8>(step, 2 * p + j, 0, q);
#pragma unroll
          for (int n = 0; n < N; n++) {
            const uint8_t* copy = bytes + token[n] + k * 256 + j * 32;
            const uint4 a = load16(copy), c = load16(copy + 16);
            const int v[8] = {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)c.x, (int)c.y, (int)c.z, (int)c.w};
            int low = 0, high = 0;
            if constexpr (N == 1) T::dots(step, 2 * p + j, v, low, high);
            else
#pragma unroll
              for (int i = 0; i < 8; i++) low = dp4a((int)q[i], v[i], low);
            const uint32_t both = T::LESS != 0 || T::MINIMUM ? *(const uint32_t*)(sums + token[n] + k * 32 + j * 4) : 0u;
            const int all = low_short(both) + high_short(both);
            const float one = term<T>(factors, *(const float*)(scales + token[n] + k * 32 + j * 4), low + high - T::LESS * all, all);
            t[n] = j ? t[n] + one : one;
          }
        }
#pragma unroll
        for (int n = 0; n < OWN; n++) sum[n] += four_lanes<N>(t + 4 * n);
      }
    }
    bytes += K * 256; sums += K * 32; scales += K * (T::SUPER ? 4 : 32);
    __syncwarp();                                      // all lanes have read this stage, which is refilled next
  }
  copies_wait<0>();
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const uint32_t own = first + 4u * n + p;
    if (row >= m.rows || own >= job.tokens || p >= N) continue;
    m.out[(size_t)own * m.stride + row] = m.bias ? sum[n] + m.bias[row] : sum[n];
  }
}

// The same for unquantised types, which are read in place.
template <int KIND, int N> DEVICE void plain_rows_of(const Products& job, const Matrix& m, uint32_t block, uint32_t first) {
  typedef Plain<KIND> T;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 3, p = lane & 7;
  const uint32_t row = (block * WARPS + warp) * 4u + g, at = row < m.rows ? row : m.rows - 1u, columns = job.input.columns;
  const uint8_t* weights = (const uint8_t*)job.parts[m.part] + m.offset + (size_t)at * columns * T::BYTES;
  const uint32_t format = KIND == TYPE_F32 ? FORMAT_F32 : KIND == TYPE_F16 ? FORMAT_F16 : FORMAT_BF16;
  const uint8_t* x = job.input.base + format_offset(job.input.formats, format, columns);
  float sum[N];
#pragma unroll
  for (int n = 0; n < N; n++) sum[n] = 0.0f;
#pragma unroll 2
  for (uint32_t c = p * 8u; c < columns; c += 64u) {
    const uint8_t* w = weights + c * T::BYTES;
    float v[8], y[8];
    T::eight(load16_once(w), KIND == TYPE_F32 ? load16_once(w + 16) : make_uint4(0, 0, 0, 0), v);
#pragma unroll
    for (int n = 0; n < N; n++) {
      const uint8_t* copy = x + (size_t)min(first + n, job.tokens - 1u) * job.input.stride + c * T::BYTES;
      T::eight(load16(copy), KIND == TYPE_F32 ? load16(copy + 16) : make_uint4(0, 0, 0, 0), y);
#pragma unroll
      for (int i = 0; i < 8; i++) sum[n] = fmaf(v[i], y[i], sum[n]);
    }
  }
#pragma unroll
  for (int n = 0; n < N; n++) {
    const float all = eight_lanes(sum[n]);
    if (p != n || row >= m.rows || first + n >= job.tokens) continue;
    m.out[(size_t)(first + n) * m.stride + row] = m.bias ? all + m.bias[row] : all;
  }
}

// Gate and upper projection of 256 rows: the last block to arrive combines them into the input of the next product.
DEVICE void pair_of(const Products& job, uint32_t row, uint32_t rows_of_block, uint32_t first, uint32_t count, uint32_t* slot) {
  const uint32_t rows = job.matrix[0].rows, chunk = row / 256u, chunks = (rows + 255u) / 256u;
  const uint32_t blocks = (min(rows - chunk * 256u, 256u) + rows_of_block - 1u) / rows_of_block;
  if (!last_to_arrive(job.pair.counters + first / 8u * chunks + chunk, 2u * blocks, slot)) return;
  for (uint32_t n = threadIdx.x >> 5; n < count; n += WARPS) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t at = chunk * 256u + (threadIdx.x & 31u) * 8u + i;
      v[i] = 0.0f;
      if (at < rows) v[i] = activated(job.pair.activation, load_shared_by_blocks(job.matrix[0].out + (size_t)(first + n) * job.matrix[0].stride + at),
        load_shared_by_blocks(job.matrix[1].out + (size_t)(first + n) * job.matrix[1].stride + at));
    }
    put_copies(job.pair.to, first + n, chunk, v);
  }
}

// Builds of a single type, for a few tokens, whose machine code is inspected.
#ifdef ONLY
#define CASE(type) (TYPE_##type == ONLY)
#else
#define CASE(type) true
#endif
#define FOR_EACH_QUANTISED(of) of(Q4_K) of(Q6_K) of(Q5_K) of(Q3_K) of(Q2_K) of(Q8_0) of(Q4_0) of(Q4_1) of(Q5_0) of(Q5_1) \
  of(IQ4_NL) of(IQ4_XS) of(MXFP4)

DEVICE uint32_t matrix_of(const Products& job, uint32_t block) {
  uint32_t at = 0;
  while (at + 1u < job.matrices && block >= job.matrix[at + 1u].first_block) at++;
  return at;
}

// 32 rows per block by N tokens: blockIdx.x iterates over the rows of all matrices, blockIdx.y over the tokens.
template <int N> DEVICE void product(const Products& job, uint8_t* memory, uint32_t* slot) {
  Matrix m = job.matrix[matrix_of(job, blockIdx.x)];
  const uint32_t first = blockIdx.y * N;
  uint32_t block = blockIdx.x - m.first_block;
  if (N == 1 && m.tiles != 0u) {
    const uint32_t rows = m.tiles / FILE_PAGE, blocks = (rows + ROWS_OF_BLOCK - 1u) / ROWS_OF_BLOCK, tile = block / blocks;
    block -= tile * blocks;
    m.part += tile; m.out += tile * rows; m.rows = min(rows, m.rows - tile * rows);
    m.offset = (m.offset + tile * (m.tiles % FILE_PAGE)) % FILE_PAGE;
    if (m.bias) m.bias += tile * rows;
  }
  switch (m.type) {
#define OF(type) case TYPE_##type: if constexpr (CASE(type)) rows_of<type, N>(job, m, block, first, memory); break;
    FOR_EACH_QUANTISED(OF)
#undef OF
#define OF(type) case TYPE_##type: if constexpr (CASE(type)) { plain_rows_of<TYPE_##type, N>(job, m, 2u * block, first); plain_rows_of<TYPE_##type, N>(job, m, 2u * block + 1u, first); } break;
    OF(F16) OF(BF16) OF(F32)
#undef OF
  }
  if (job.pair.activation != 0u) pair_of(job, block * ROWS_OF_BLOCK, ROWS_OF_BLOCK, first, min((uint32_t)N, job.tokens - first), slot);
}
#define PRODUCT(N, blocks) extern "C" __global__ void __launch_bounds__(WARPS * 32, blocks) product_##N(const Products job) { \
  __shared__ uint4 memory[STAGES_OF(N) * ROWS_OF_BLOCK * SEGMENT_MAX / 16]; __shared__ uint32_t slot; product<N>(job, (uint8_t*)memory, &slot); } \
  SIMT_EXPORT(product_##N)
PRODUCT(1, 4) PRODUCT(4, 3) PRODUCT(8, 2)

#ifndef ONLY
// Small matrices, one token per block, that of blockIdx.y: a block has eight rows, whose groups of steps its warps process in turns, so that
// small matrices also occupy the device. Four lanes share a row, each with a quarter of a step. The contributions of steps stay in shared
// memory until one lane has chained them in order.
#define ROWS_OF_ONE 8
template <class T> struct One {
  static constexpr int K = Together<T>::STEPS, UNITS = Together<T>::BYTES / 16;
  static constexpr int SEGMENT = (UNITS | 1) * 16, STAGE = WARPS * ROWS_OF_ONE * SEGMENT;
  // Groups per warp, and steps of all warps, chained in one round.
  static constexpr int GROUPS = 8 / K, ROUND = WARPS * K * GROUPS;
  // Contribution of a step: a factor and a sum of products, and the same for minimums, if any; or a term.
  static constexpr int WORDS = T::SUPER ? (T::MINIMUM ? 4 : 2) : 1;
};
template <class T> DEVICE void one_of(const Products& job, const Matrix& m, uint32_t block, uint8_t* memory) {
  typedef One<T> S;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, p = lane & 3;
  const uint32_t columns = job.input.columns, blocks = columns / 32u, steps = (columns + 255u) / 256u, top = block * ROWS_OF_ONE;
  const uint32_t row_bytes = T::SUPER ? columns / 256u * T::STEP : blocks * (T::STEP / 8);
  const uint8_t* weights = (const uint8_t*)job.parts[m.part] + m.offset + (size_t)min(top + g, m.rows - 1u) * row_bytes;
  uint8_t* mine = memory + (warp * ROWS_OF_ONE + g) * S::SEGMENT;
  float* terms = (float*)(memory + 2 * S::STAGE);      // of a round: per step, per row
  // Copies a group of steps to one of two stages, rounded out to units of 16 bytes.
  auto fetch = [&](uint32_t from, uint32_t stage) {
    const uint32_t begin = from * T::STEP;
    const uint8_t* source = weights + begin;
    const uint32_t skip = (uint32_t)(size_t)source & 15u;
    const int end = from < steps ? (int)(skip + min((uint32_t)(S::K * T::STEP), row_bytes - begin)) - p * 16 : 0;
    source = source - skip + p * 16;
    const Shared target = shared_of(mine) + stage * S::STAGE + p * 16;
#pragma unroll
    for (int u = 0; u < (S::SEGMENT + 63) / 64; u++)
      if (u * 64 + (PLANTED(TAIL_OF_SEGMENT) ? 15 : 0) < end) copy16_async(target + u * 64, source + u * 64);
    copies_commit();
  };
  const uint8_t* x = job.input.base + format_offset(job.input.formats, T::SUPER ? FORMAT_Q8K : FORMAT_Q8_0, columns) + (size_t)blockIdx.y * job.input.stride;
  float sum = 0.0f;
  uint32_t stage = 0u;
  fetch(warp * S::K, 0u);
  for (uint32_t round = 0; round < steps; round += S::ROUND) {
    for (uint32_t from = round + warp * S::K; from < min(round + S::ROUND, steps); from += WARPS * S::K) {
      fetch(from + WARPS * S::K, stage ^ 1u);
      if (PLANTED(NO_COPY_WAIT)) copies_wait<2>(); else copies_wait<1>();
      if (!PLANTED(NO_WARP_BARRIER)) __syncwarp();
      const uint8_t* segment = mine + stage * S::STAGE + ((uint32_t)(size_t)(weights + from * T::STEP) & 15u);
#pragma unroll
      for (int k = 0; k < S::K; k++) {
        const uint32_t number = from + k;
        if (k > 0 && number >= steps) break;
        const uint8_t* step = segment + k * T::STEP;
        const uint8_t *bytes = x + number * 256u + (T::SUPER ? (p >> 1) * 128 + (p & 1) * 16 : p * 64), *sums = x + columns + number * 32u + p * 8;
        const float* scales = (const float*)(x + columns + columns / 8u) + (T::SUPER ? number : number * 8u + 2u * p);
        float* to = terms + ((number - round) * ROWS_OF_ONE + g) * S::WORDS;
        if constexpr (T::SUPER) {
          uint32_t q[4][4], scale[T::WORDS], least[T::WORDS]; int i1 = 0, i2 = 0;
          T::sixteens(step, p, q);
          T::scales(step, p >> 1, scale, least);
#pragma unroll
          for (int j = 0; j < 4; j++) {
            const uint4 v = load16(bytes + j * 32);
            int products = T::dot(q[j][0], v.x, 0);
            products = T::dot(q[j][1], v.y, products);
            products = T::dot(q[j][2], v.z, products);
            products = T::dot(q[j][3], v.w, products);
            i1 += T::scale_of(scale, j, p & 1) * (1 << T::up(j)) * products;
          }
          if constexpr (T::MINIMUM || T::LESS != 0) {
            const int of_sums = (int)T::four_of(T::MINIMUM ? least : scale, p & 1);
            const uint2 four = load8(sums);
            i2 = dp2a_hi((int)four.y, of_sums, dp2a_lo((int)four.x, of_sums, 0));
            if constexpr (T::LESS != 0) i1 -= (T::LESS << T::RAISED) * i2;
          }
          i1 = four_lanes<1>(&i1) >> T::RAISED;
          if constexpr (T::MINIMUM) i2 = four_lanes<1>(&i2);
          if (p == 0) {
            const float2 factors = T::factors(step);
            const uint32_t a = as_bits(factors.x * *scales), b = as_bits((float)i1);
            if constexpr (T::MINIMUM) store16(to, make_uint4(a, b, as_bits(-(factors.y * *scales)), as_bits((float)i2)));
            else store8(to, make_uint2(a, b));
          }
        } else {
          float t = 0.0f;
#pragma unroll
          for (int j = 0; j < 2; j++) {
            if (number * 8u + 2u * p + j >= blocks) continue;
            const uint4 a = load16(bytes + j * 32), c = load16(bytes + j * 32 + 16);
            const int v[8] = {(int)a.x, (int)a.y, (int)a.z, (int)a.w, (int)c.x, (int)c.y, (int)c.z, (int)c.w};
            const uint32_t both = T::LESS != 0 || T::MINIMUM ? *(const uint32_t*)(sums + j * 4) : 0u;
            const int all = low_short(both) + high_short(both);
            int low = 0, high = 0;
            T::dots(step, 2 * p + j, v, low, high);
            const float one = term<T>(T::factors(step, 2 * p + j), scales[j], low + high - T::LESS * all, all);
            t = j ? t + one : one;
          }
          t = four_lanes<1>(&t);
          if (p == 0) *to = t;
        }
      }
      __syncwarp();                                      // all lanes have read this stage, which is refilled next
      stage ^= 1u;
    }
    if (!PLANTED(NO_ROUND_BARRIER)) __syncthreads();
    if (threadIdx.x < ROWS_OF_ONE) {
      const float* from = terms + threadIdx.x * S::WORDS;
#pragma unroll 4
      for (uint32_t step = round; step < min(round + S::ROUND, steps); step++, from += ROWS_OF_ONE * S::WORDS) {
        if constexpr (T::SUPER && T::MINIMUM) {
          const uint4 v = load16(from);
          sum = fmaf(as_float(v.z), as_float(v.w), fmaf(as_float(v.x), as_float(v.y), sum));
        } else if constexpr (T::SUPER) {
          const uint2 v = load8(from);
          sum = fmaf(as_float(v.x), as_float(v.y), sum);
        } else {
          sum += *from;
        }
      }
    }
    if (round + S::ROUND < steps) __syncthreads();
  }
  copies_wait<0>();
  const uint32_t row = top + threadIdx.x;
  if (threadIdx.x < ROWS_OF_ONE && row < m.rows) m.out[(size_t)blockIdx.y * m.stride + row] = m.bias ? sum + m.bias[row] : sum;
}
extern "C" __global__ void __launch_bounds__(WARPS * 32, 5) product_narrow(const Products job) {
  DYNAMIC_SHARED(memory);
  __shared__ uint32_t slot;
  const Matrix& m = job.matrix[matrix_of(job, blockIdx.x)];
  const uint32_t block = blockIdx.x - m.first_block;
  switch (m.type) {
#define OF(type) case TYPE_##type: if constexpr (CASE(type)) one_of<type>(job, m, block, (uint8_t*)memory); break;
    FOR_EACH_QUANTISED(OF)
#undef OF
  }
  if (job.pair.activation != 0u) pair_of(job, block * ROWS_OF_ONE, ROWS_OF_ONE, blockIdx.y, 1u, &slot);
}
SIMT_EXPORT(product_narrow)

// 64 rows by 32 tokens: a warp computes 16 rows for all these tokens. The next step is copied while a step is computed.
#define TILE_ROWS 64
#define TILE_TOKENS 32
#define COPY_STRIDE 272
template <class T> struct Tile {
  static constexpr int UNITS = (T::STEP + 29) / 16;
  static constexpr int RAW_STRIDE = (UNITS | 1) * 16;             // an odd number of units, so that eight rows cover all banks
  // Layout of a stage: unconverted rows, bytes of tokens, 16 sums per token, and its scales: one, or eight.
  static constexpr int BYTES = TILE_ROWS * RAW_STRIDE, SUMS = BYTES + TILE_TOKENS * COPY_STRIDE, SCALES = SUMS + TILE_TOKENS * 32;
  static constexpr int STAGE = SCALES + TILE_TOKENS * (T::SUPER ? 4 : 32);
};
// Decoded form of a step, shared by all warps. `sums`: of 32 bytes each, as pairs of 16 bits or as words.
union Decoded {
  struct { uint32_t scale[TILE_ROWS][4], least[TILE_ROWS][4]; float2 factors[TILE_ROWS]; uint32_t sums[TILE_TOKENS][4]; } super;
  struct { float2 factors[TILE_ROWS][8]; int sums[TILE_TOKENS][8]; } small;
};

template <class T> DEVICE void tile_of(const Products& job, const Matrix& m, uint32_t block, uint8_t* memory) {
  typedef Tile<T> S;
  constexpr int PARTS = TILE_TOKENS / 8;
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5, g = lane >> 2, t = lane & 3;
  const uint32_t columns = job.input.columns, blocks = columns / 32u, steps = (columns + 255u) / 256u, top = block * TILE_ROWS;
  const uint32_t row_bytes = T::SUPER ? columns / 256u * T::STEP : blocks * (T::STEP / 8), first = blockIdx.y * TILE_TOKENS;
  const uint8_t* part = (const uint8_t*)job.parts[m.part] + m.offset;
  auto row_at = [&](uint32_t r) { return part + (size_t)min(top + r, m.rows - 1u) * row_bytes; };
  Decoded& made = *(Decoded*)(memory + 2 * S::STAGE);
  // Two threads copy a row, four threads a token.
  const uint32_t raw_row = thread >> 1, token = thread >> 2;
  const uint8_t *raw = row_at(raw_row), *x = job.input.base + format_offset(job.input.formats, T::SUPER ? FORMAT_Q8K : FORMAT_Q8_0, columns)
    + (size_t)min(first + token, job.tokens - 1u) * job.input.stride;
  // Absent tokens are zero: with the last token's copies instead, all blocks would read the same address at once.
  const bool there = first + token < job.tokens;
  for (uint32_t u = thread & 3u; !there && u < 2u * (COPY_STRIDE / 16 + 4); u += 4u) {
    uint8_t* stage = memory + (u & 1u) * S::STAGE;
    const uint32_t at = u >> 1;
    if (at < COPY_STRIDE / 16) store16(stage + S::BYTES + token * COPY_STRIDE + at * 16u, make_uint4(0, 0, 0, 0));
    else if (at < COPY_STRIDE / 16 + 2) store16(stage + S::SUMS + token * 32u + (at - COPY_STRIDE / 16) * 16u, make_uint4(0, 0, 0, 0));
    else if (!T::SUPER) store16(stage + S::SCALES + token * 32u + (at - COPY_STRIDE / 16 - 2) * 16u, make_uint4(0, 0, 0, 0));
    else if (at == COPY_STRIDE / 16 + 2) *(float*)(stage + S::SCALES + token * 4u) = 0.0f;
  }
  auto fetch = [&](uint32_t b, uint8_t* stage) {
    const uint32_t begin = b * T::STEP, parts = there ? min(8u, blocks - b * 8u) : 0u;
    const uint8_t* source = raw + begin;
    const uint32_t skip = (uint32_t)(size_t)source & 15u, end = min((uint32_t)T::STEP, row_bytes - begin) + skip;
    const Shared to = shared_of(stage), row = to + raw_row * S::RAW_STRIDE, bytes = to + S::BYTES + token * COPY_STRIDE;
#pragma unroll
    for (uint32_t u = 0; u < (S::UNITS + 1) / 2 * 2; u += 2) {
      const uint32_t at = (u + (thread & 1u)) * 16u;
      if (at < end) copy16_async(row + at, source - skip + at);
    }
#pragma unroll
    for (uint32_t u = 0; u < 16; u += 4) {
      const uint32_t at = (u + (thread & 3u)) * 16u;
      if (at < parts * 32u) copy16_async(bytes + at, x + b * 256u + at);
    }
    const uint8_t *sums = x + columns + b * 32u, *scales = x + columns + columns / 8u;
#pragma unroll
    for (uint32_t u = 0; u < 2; u++) {
      const uint32_t j = (thread & 3u) * 2u + u;
      if (T::MINIMUM && j < parts) copy4_async(to + S::SUMS + token * 32u + j * 4u, sums + j * 4u);
      if (!T::SUPER && j < parts) copy4_async(to + S::SCALES + token * 32u + j * 4u, scales + b * 32u + j * 4u);
    }
    if (T::SUPER && there && (thread & 3) == 0) copy4_async(to + S::SCALES + token * 4u, scales + b * 4u);
    copies_commit();
  };
  float sum[PARTS][4];
#pragma unroll
  for (int i = 0; i < PARTS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) sum[i][e] = 0.0f;
  const uint32_t upper = warp * 16 + g, lower = upper + 8;
  const uint32_t odd_raw = (uint32_t)(size_t)raw, odd_upper = (uint32_t)(size_t)row_at(upper), odd_lower = (uint32_t)(size_t)row_at(lower);
  fetch(0u, memory);
  for (uint32_t b = 0; b < steps; b++) {
    uint8_t* stage = memory + (b & 1u) * S::STAGE;
    const uint32_t begin = b * T::STEP, parts = min(8u, blocks - b * 8u);
    copies_wait<0>();
    __syncthreads();                                     // this step has arrived, and all warps have computed the previous one
    if (b + 1u < steps) fetch(b + 1u, memory + (~b & 1u) * S::STAGE);
    const uint8_t* step = stage + raw_row * S::RAW_STRIDE + ((odd_raw + begin) & 15u);
    if constexpr (T::SUPER) {
      const uint32_t half = thread & 1;
      uint32_t scale[T::WORDS], least[T::WORDS];
      T::scales(step, half, scale, least);
#pragma unroll
      for (int w = 0; w < T::WORDS; w++) { made.super.scale[raw_row][half * T::WORDS + w] = scale[w]; if (T::MINIMUM) made.super.least[raw_row][half * T::WORDS + w] = least[w]; }
      if (half == 0u) made.super.factors[raw_row] = T::factors(step);
      if constexpr (T::MINIMUM && T::SUB == 32) {
        const uint2 two = load8(stage + S::SUMS + token * 32u + (thread & 3u) * 8u);
        made.super.sums[token][thread & 3] = ((uint32_t)(low_short(two.x) + high_short(two.x)) & 0xffffu) | (uint32_t)(low_short(two.y) + high_short(two.y)) << 16;
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 4; i++) {
        const uint32_t j = (thread & 1u) * 4u + i;
        if (j < parts) made.small.factors[raw_row][j] = T::factors(step, j);
      }
#pragma unroll
      for (uint32_t i = 0; i < 2; i++) {
        const uint32_t j = (thread & 3u) * 2u + i;
        if (!T::MINIMUM || j >= parts) continue;
        const uint32_t both = *(const uint32_t*)(stage + S::SUMS + token * 32u + j * 4u);
        made.small.sums[token][j] = low_short(both) + high_short(both);
      }
    }
    if (!PLANTED(NO_TILE_BARRIER)) __syncthreads();
    const uint8_t *up = stage + upper * S::RAW_STRIDE + ((odd_upper + begin) & 15u), *down = stage + lower * S::RAW_STRIDE + ((odd_lower + begin) & 15u);
    const Shared bytes = shared_of(stage) + S::BYTES;
    const float* scales = (const float*)(stage + S::SCALES);
    int whole[PARTS][4]; float pair[PARTS][4], four[PARTS][4], eight[PARTS][4];
#pragma unroll
    for (int i = 0; i < PARTS; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) { whole[i][e] = 0; pair[i][e] = four[i][e] = eight[i][e] = 0.0f; }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      if (!T::SUPER && j >= (int)parts) {
        // Absent terms count as zero, as in the other kernels.
#pragma unroll
        for (int i = 0; i < PARTS; i++)
#pragma unroll
          for (int e = 0; e < 4; e++) if (!(j & 1)) pair[i][e] = 0.0f;
      } else {
        uint32_t a[4], one[1];
        T::template quads<1>(up, j, t, one); a[0] = T::centred(one[0]);
        T::template quads<1>(down, j, t, one); a[1] = T::centred(one[0]);
        T::template quads<1>(up, j, t + 4, one); a[2] = T::centred(one[0]);
        T::template quads<1>(down, j, t + 4, one); a[3] = T::centred(one[0]);
        int su[2] = {0, 0}, sl[2] = {0, 0}; float2 fu = make_float2(0.0f, 0.0f), fl = fu;
        if constexpr (T::SUPER) {
          if (T::SUB == 32) { su[0] = ((const int8_t*)made.super.scale[upper])[j]; sl[0] = ((const int8_t*)made.super.scale[lower])[j]; }
          else {
            const uint32_t u = ((const uint16_t*)made.super.scale[upper])[j], l = ((const uint16_t*)made.super.scale[lower])[j];
            su[0] = signed_byte(u, 0); su[1] = signed_byte(u, 1); sl[0] = signed_byte(l, 0); sl[1] = signed_byte(l, 1);
          }
        } else { fu = made.small.factors[upper][j]; fl = made.small.factors[lower][j]; }
        // Word t of the block's first and last 16 bytes of each token; each lane addresses a row of 16 bytes.
        uint32_t copied[PARTS / 2][4];
#pragma unroll
        for (int i = 0; i < PARTS / 2; i++) load_matrices(copied[i], bytes + (i * 16 + (lane >> 4) * 8 + (lane & 7)) * COPY_STRIDE + j * 32 + (lane >> 3 & 1) * 16);
#pragma unroll
        for (int i = 0; i < PARTS; i++) {
          const uint32_t b0 = copied[i / 2][i % 2 * 2], b1 = copied[i / 2][i % 2 * 2 + 1];
          int c[4] = {0, 0, 0, 0};
          if constexpr (T::SUPER) {
            if constexpr (T::SUB == 32) {
              const uint32_t bb[2] = {b0, b1};
              mma_16x8x32(c, a, bb);
              whole[i][0] += su[0] * c[0]; whole[i][1] += su[0] * c[1]; whole[i][2] += sl[0] * c[2]; whole[i][3] += sl[0] * c[3];
            } else {
              const uint32_t a0[2] = {a[0], a[1]}, a1[2] = {a[2], a[3]};
              int d[4] = {0, 0, 0, 0};
              mma_16x8x16(c, a0, b0); mma_16x8x16(d, a1, b1);
              whole[i][0] += su[0] * c[0] + su[1] * d[0]; whole[i][1] += su[0] * c[1] + su[1] * d[1];
              whole[i][2] += sl[0] * c[2] + sl[1] * d[2]; whole[i][3] += sl[0] * c[3] + sl[1] * d[3];
            }
          } else {
            const uint32_t bb[2] = {b0, b1};
            mma_16x8x32(c, a, bb);
#pragma unroll
            for (int e = 0; e < 4; e++) {
              const int n = i * 8 + 2 * t + (e & 1);
              const float v = term<T>(e < 2 ? fu : fl, scales[n * 8 + j], c[e], T::MINIMUM ? made.small.sums[n][j] : 0);
              if (j & 1) pair[i][e] += v; else pair[i][e] = v;
            }
          }
        }
      }
      if constexpr (!T::SUPER) {                         // ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
        if (j & 1)
#pragma unroll
          for (int i = 0; i < PARTS; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
              if (j == 1) eight[i][e] = pair[i][e]; else if (j == 3) eight[i][e] += pair[i][e];
              else if (j == 5) four[i][e] = pair[i][e]; else { four[i][e] += pair[i][e]; sum[i][e] += eight[i][e] + four[i][e]; }
            }
      }
    }
    if constexpr (T::SUPER) {
      constexpr int WORDS = !T::MINIMUM ? 0 : T::SUB == 32 ? 2 : 4;
      uint32_t least[2][WORDS + 1];
#pragma unroll
      for (int w = 0; w < WORDS; w++) { least[0][w] = made.super.least[upper][w]; least[1][w] = made.super.least[lower][w]; }
      const float2 factors[2] = {made.super.factors[upper], made.super.factors[lower]};
#pragma unroll
      for (int i = 0; i < PARTS; i++)
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const uint32_t n = i * 8 + 2 * t + c;
          const float scale = scales[n];
          uint32_t of[2 * WORDS + 1];
#pragma unroll
          for (int w = 0; w < WORDS; w += 2) {
            const uint4 v = load16((T::SUB == 32 ? (const uint8_t*)made.super.sums[n] : stage + S::SUMS + n * 32u) + w * 8);
            of[2 * w] = v.x; of[2 * w + 1] = v.y; of[2 * w + 2] = v.z; of[2 * w + 3] = v.w;
          }
#pragma unroll
          for (int h = 0; h < 2; h++) {
            int minimums = 0;
#pragma unroll
            for (int w = 0; w < WORDS; w++) minimums = dp2a_hi((int)of[2 * w + 1], (int)least[h][w], dp2a_lo((int)of[2 * w], (int)least[h][w], minimums));
            float& s = sum[i][2 * h + c];
            s = chained<T>(s, factors[h], scale, whole[i][2 * h + c], minimums);
          }
        }
    }
  }
#pragma unroll
  for (int i = 0; i < PARTS; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const uint32_t n = first + i * 8 + 2 * t + (e & 1), row = top + warp * 16 + g + (e < 2 ? 0 : 8);
      if (n < job.tokens && row < m.rows) m.out[(size_t)n * m.stride + row] = m.bias ? sum[i][e] + m.bias[row] : sum[i][e];
    }
}

template <int KIND> DEVICE void plain_tile_of(const Products& job, const Matrix& m, uint32_t block) {
  for (uint32_t n = blockIdx.y * TILE_TOKENS; n < min(job.tokens, (blockIdx.y + 1u) * TILE_TOKENS); n += 8u)
    for (uint32_t r = 0; r < 4u; r++)
      if ((block * 4u + r) * 4u * WARPS < m.rows) plain_rows_of<KIND, 8>(job, m, block * 4u + r, n);
}

// Quantised types on tensor cores; other types in the tiles of the kernels for a few tokens.
extern "C" __global__ void __launch_bounds__(WARPS * 32, 3) product_tiles(const Products job) {
  DYNAMIC_SHARED(memory);
  const Matrix& m = job.matrix[matrix_of(job, blockIdx.x)];
  const uint32_t block = blockIdx.x - m.first_block;
  switch (m.type) {
#define OF(type) case TYPE_##type: if constexpr (CASE(type)) tile_of<type>(job, m, block, (uint8_t*)memory); break;
    FOR_EACH_QUANTISED(OF)
#undef OF
#define OF(type) case TYPE_##type: if constexpr (CASE(type)) plain_tile_of<TYPE_##type>(job, m, block); break;
    OF(F16) OF(BF16) OF(F32)
#undef OF
  }
}
SIMT_EXPORT(product_tiles)

// Combines gate and upper projection of prompts: 256 columns per warp.
extern "C" __global__ void __launch_bounds__(128, 4) activate(const float* __restrict__ gate, const float* __restrict__ up, uint32_t stride,
    uint32_t activation, const Copies to) {
  const uint32_t chunk = blockIdx.x * 4u + (threadIdx.x >> 5), token = blockIdx.y;
  if (chunk * 256u >= to.columns) return;
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t at = chunk * 256u + (threadIdx.x & 31u) * 8u + i;
    v[i] = at < to.columns ? activated(activation, gate[(size_t)token * stride + at], up[(size_t)token * stride + at]) : 0.0f;
  }
  put_copies(to, token, chunk, v);
}
SIMT_EXPORT(activate)
#endif
#undef WARPS
#undef MATRICES_MAX
#undef FILE_PAGE
#undef SEGMENT_MAX
#undef ROWS_OF_BLOCK
#undef STAGES_OF
#undef CASE
#undef FOR_EACH_QUANTISED
#undef PRODUCT
#undef TILE_ROWS
#undef TILE_TOKENS
#undef ROWS_OF_ONE
#undef COPY_STRIDE
