// Attention of queries over the blocks of a KV cache.
//
// Rows are the queries of all heads that share a key head, token by token, in tiles of 4 (one or two tokens) or 16 (prompts). A part is
// one block of the cache, 64 tokens; a span is eight parts; both start at fixed positions. Eight warps divide the tokens of a part:
// each lane holds eight elements of a row, L lanes hold a row, and each group of L lanes processes a chain of L / 4 tokens. A score is
// a pairwise sum over its lanes; the values of a part are the sums of its chains; parts and spans are joined in order. Hence results are
// bit-identical for any chunk, any tile, and any number of parts per block: one, a span, or all.
#include "cells.cuh"
#include "copies.cuh"

#define PART KV_BLOCK_TOKENS
#define SPAN 8u
#define WARPS 8
#define THREADS (WARPS * 32)

struct Attend {
  const float* query; const float* query_back;       // rotated queries; the same rotated back by the gap, or null
  const uint64_t* blocks; const uint32_t* position;
  float* partial;                                     // per token, head and block: `dim` values; followed by all maxima and weights
  uint64_t key_offset, value_offset;
  uint32_t tokens, heads, kv_heads, dim, kind, window, gap_after, run;         // window 0: none; run: parts per block, 0: all
  float scale; uint32_t unused;
};

// Joins a later part: computes the factors of the earlier result and of the part. The first part is unchanged, since e^0 is 1.
DEVICE void joined(float& most, float& weight, float other_most, float other_weight, float& old, float& fresh) {
  const float top = fmaxf(most, other_most);
  old = most == LEAST ? 0.0f : exp_of(most - top); fresh = other_most == LEAST ? 0.0f : exp_of(other_most - top);
  most = top; weight = fmaf(weight, old, other_weight * fresh);
}
// State of an online softmax: maximum score, sum of weights, and N sums of weighted values.
template <int N> struct Fold {
  float most, weight, v[N];
  DEVICE void clear() {
    most = LEAST; weight = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = 0.0f;
  }
  DEVICE void add(float other_most, float other_weight, const float (&other)[N]) {
    float old, fresh;
    joined(most, weight, other_most, other_weight, old, fresh);
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = fmaf(v[i], old, other[i] * fresh);
  }
};

DEVICE float4 load_floats(const float* p) { const uint4 v = load16(p); return make_float4(as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w)); }
DEVICE float2 load_two(const float* p) { const uint2 v = load8(p); return make_float2(as_float(v.x), as_float(v.y)); }
DEVICE void load_eight(const float* first, const float* second, float (&v)[8]) {
  const float4 a = load_floats(first), b = load_floats(second);
  v[0] = a.x; v[1] = a.y; v[2] = a.z; v[3] = a.w; v[4] = b.x; v[5] = b.y; v[6] = b.z; v[7] = b.w;
}
DEVICE void store_four(float* p, float a, float b, float c, float d) { store16(p, make_uint4(as_bits(a), as_bits(b), as_bits(c), as_bits(d))); }

// Eight elements of a row in cache format: f16 in four words; for other types, bytes in two words and their scale.
template <bool HALVES> struct Cells {
  uint32_t at, scale, second, shift, second_shift, mask; float minus;
  DEVICE Cells(uint32_t kind, uint32_t element, uint32_t dim) {
    const uint32_t group = element / 32u, i = element % 32u, half = (min(32u, dim - group * 32u) + 1u) / 2u;
    if (HALVES) { at = element * 2u; return; }
    scale = group * cell_group_bytes(kind, 32u);
    const bool four = kind == CELL_Q4;
    // The upper four bits store the second half of a group; half a group is a multiple of four elements.
    const bool upper = four && i >= half, second_upper = four && i + 4u >= half;
    at = scale + 2u + i - (upper ? half : 0u); second = scale + 2u + i + 4u - (second_upper ? half : 0u);
    shift = upper ? 4u : 0u; second_shift = second_upper ? 4u : 0u;
    mask = four ? 0x0f0f0f0fu : ALL; minus = four ? 8.0f : 0.0f;
  }
  DEVICE uint4 unit(const uint8_t* row, bool is_there) const {
    if (!is_there) return make_uint4(0u, 0u, 0u, 0u);
    if (HALVES) return load16(row + at);
    const uint16_t *p = (const uint16_t*)(row + at), *q = (const uint16_t*)(row + second);
    const uint32_t a = p[0], b = p[1], c = q[0], d = q[1];
    return make_uint4((a | b << 16) >> shift & mask, (c | d << 16) >> second_shift & mask, *(const uint16_t*)(row + scale), 0u);
  }
  DEVICE void widen(uint4 u, float (&v)[8]) const {
    const uint32_t words[4] = {u.x, u.y, u.z, u.w};
    const float factor = HALVES ? 0.0f : half_bits(u.z);
#pragma unroll
    for (int e = 0; e < 8; e++)
      v[e] = HALVES ? half_bits(e & 1 ? words[e >> 1] >> 16 : words[e >> 1]) : ((float)signed_byte(words[e >> 2], e & 3) - minus) * factor;
  }
};

// Exchanges half of the sums with the lane that differs in `bit`: each lane keeps the half selected by its own bit.
DEVICE float exchanged(float low, float high, int bit) {
  const bool upper = threadIdx.x & bit;
  return (upper ? high : low) + __shfl_xor_sync(ALL, upper ? low : high, bit);
}
template <int M, int N> DEVICE void exchange_halves(float (&sums)[N]) {
  if constexpr (M > 0) {
#pragma unroll
    for (int j = 0; j < M; j++) { const float low = sums[j], high = sums[j + M]; sums[j] = exchanged(low, high, M); }
    exchange_halves<M / 2>(sums);
  }
}
// Dot products of four rows with L / 4 tokens, `count` of them present, per group of L lanes; lane 4 * token + row receives that product.
template <int L, bool HALVES> DEVICE float dots(const Cells<HALVES>& cells, const uint8_t* keys, uint32_t row_bytes, uint32_t count, const float (&query)[4][8]) {
  float sums[L / 2];
#pragma unroll
  for (int i = 0; i < L / 8; i++) {
    float two[2][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      float k[8];
      const uint32_t token = i + h * (L / 8);
      cells.widen(cells.unit(keys + token * row_bytes, token < count), k);
#pragma unroll
      for (int r = 0; r < 4; r++) {
        float dot = query[r][0] * k[0];
#pragma unroll
        for (int e = 1; e < 8; e++) dot = fmaf(query[r][e], k[e], dot);
        two[h][r] = dot;
      }
    }
#pragma unroll
    for (int r = 0; r < 4; r++) sums[i * 4 + r] = exchanged(two[0][r], two[1][r], L / 2);
  }
  exchange_halves<L / 4>(sums);
  return sums[0];
}
// Reductions over the eight tokens of a warp, among lanes with the same row.
DEVICE float tokens_max(float v) {
#pragma unroll
  for (int m = 16; m > 2; m >>= 1) v = fmaxf(v, __shfl_xor_sync(ALL, v, m));
  return v;
}
DEVICE float tokens_sum(float v) {
#pragma unroll
  for (int m = 16; m > 2; m >>= 1) v += __shfl_xor_sync(ALL, v, m);
  return v;
}
// Adds the weighted values of a token to its chain.
DEVICE void weigh(const float* weights, const float (&v)[8], float (&chain)[4][8]) {
  const float4 p = load_floats(weights);
  const float four[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int e = 0; e < 8; e++) chain[r][e] = fmaf(four[r], v[e], chain[r][e]);
}
DEVICE void clear(float (&chain)[4][8]) {
#pragma unroll
  for (int r = 0; r < 4; r++)
#pragma unroll
    for (int e = 0; e < 8; e++) chain[r][e] = 0.0f;
}

// Copies the rows of a warp's tokens to shared memory unchanged, from an address that is a multiple of 16.
DEVICE void bring(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  const uint32_t lane = threadIdx.x & 31u, rest = bytes & 15u;
#pragma unroll 2
  for (uint32_t u = lane * 16u; u + 16u <= bytes; u += 512u) copy16_async(shared_of(to) + u, from + u);
  if (lane * 2u < rest) *(uint16_t*)(to + (bytes - rest) + lane * 2u) = *(const uint16_t*)(from + (bytes - rest) + lane * 2u);
  copies_commit();
}

// Position of a block within a tile of `tile` rows.
template <int L> struct Place {
  uint32_t lane, warp, group, unit, first_token, kv_head, row_bytes, sharing, first_row, count, position, seen_end, unseen, part_from, part_to;
  DEVICE Place(const Attend& job, uint32_t tile) {
    lane = threadIdx.x & 31u; warp = threadIdx.x >> 5; group = lane / L; unit = lane % L;
    first_token = (warp * (32 / L) + group) * (L / 4);                                              // start of this lane's chain in a part
    kv_head = blockIdx.x; row_bytes = cell_row_bytes(job.kind, job.dim); sharing = job.heads / job.kv_heads;
    const uint32_t rows = job.tokens * sharing;
    first_row = blockIdx.y * tile; count = min(tile, rows - first_row); position = job.position[0];
    seen_end = position + (first_row + count - 1u) / sharing + 1u;                                  // end of the tokens seen by the last row
    const uint32_t first_end = position + first_row / sharing + 1u;                                 // by the first row
    unseen = job.window && first_end > job.window ? first_end - job.window : 0u;
    const uint32_t all = (seen_end + PART - 1u) / PART;
    part_from = max(unseen / PART, job.run * blockIdx.z); part_to = job.run ? min(all, job.run * (blockIdx.z + 1u)) : all;
  }
  // Number of visible tokens among the `some` tokens from `first` on.
  DEVICE uint32_t there(uint32_t first, uint32_t some) const { return first + some <= unseen || first >= seen_end ? 0u : min(some, seen_end - first); }
  DEVICE bool sees(const Attend& job, uint32_t row, uint32_t token) const {
    const uint32_t end = position + (first_row + row) / sharing + 1u, begin = job.window && end > job.window ? end - job.window : 0u;
    return row < count && token < end && token >= begin;
  }
  DEVICE const uint8_t* rows_of(const Attend& job, uint32_t part, uint64_t offset) const {
    return (const uint8_t*)job.blocks[part] + offset + (size_t)(kv_head * PART + warp * 8u) * row_bytes;
  }
  DEVICE size_t head_of(const Attend& job, uint32_t row) const {                                    // index among the heads of all tokens
    const uint32_t at = first_row + row;
    return (size_t)(at / sharing) * job.heads + kv_head * sharing + at % sharing;
  }
  DEVICE size_t slot(const Attend& job, uint32_t row) const { return head_of(job, row) * gridDim.z + blockIdx.z; }
  // An invisible part has the maximum LEAST, and zeros.
  template <int N> DEVICE void put(const Attend& job, uint32_t row, uint32_t element, const Fold<N>& fold) const {
    const size_t at = slot(job, row);
    if (element < job.dim) {
#pragma unroll
      for (int i = 0; i < N; i += 4) store_four(job.partial + at * job.dim + element + i, fold.v[i], fold.v[i + 1], fold.v[i + 2], fold.v[i + 3]);
    }
    if (element == 0u) {
      float* out = job.partial + (size_t)job.tokens * job.heads * gridDim.z * job.dim + at * 2u;
      store8(out, make_uint2(as_bits(fold.most), as_bits(fold.weight)));
    }
  }
};

struct Few { float tops[WARPS][4], weights[WARPS][4]; uint4 shares[WARPS * 8]; };
// Tiles of four rows. `memory`: keys and values in cache format, fetched together.
template <int L, bool HALVES> DEVICE void attend_few(const Attend& job, float* memory, Few& shared) {
  const Place<L> here(job, 4u);
  const uint32_t lane = here.lane, warp = here.warp, element = here.unit * 8u, token = here.unit >> 2, row = here.unit & 3u;
  const bool inside = element < job.dim;
  const Cells<HALVES> cells(job.kind, element, job.dim);
  float* shares = (float*)shared.shares;
  // One thread sums four columns of a row.
  const uint32_t my_row = threadIdx.x / (L * 2), my_four = threadIdx.x % (L * 2), my_element = my_four % L * 8u + my_four / L * 4u;
  Fold<4> span, total;
  span.clear(); total.clear();
  // Each warp has its own keys and values. Its chains later overwrite its values.
  float* chains = memory + WARPS * L * 32;
  uint8_t *keys = (uint8_t*)(memory + warp * (L * 32)), *values = (uint8_t*)(chains + warp * 1024);
  float query[4][8];
  const float* loaded = nullptr;
  for (uint32_t part = here.part_from; part < here.part_to; part++) {
    const uint32_t start = part * PART;
    const uint8_t *key = here.rows_of(job, part, job.key_offset), *value = here.rows_of(job, part, job.value_offset);
    if (part != here.part_from) __syncthreads();
    const uint32_t first = start + here.first_token, bytes = here.there(start + warp * 8u, 8u) * here.row_bytes;
    const uint32_t count = inside ? here.there(first, L / 4) : 0u;
    bring(keys, key, bytes);
    bring(values, value, bytes);
    const float* source = job.query_back && start < job.gap_after ? job.query_back : job.query;
    if (loaded != source) {
      loaded = source;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const float* from = source + here.head_of(job, r) * job.dim + element;
        if (inside && (uint32_t)r < here.count) load_eight(from, from + 4, query[r]);
        else {
#pragma unroll
          for (int e = 0; e < 8; e++) query[r][e] = 0.0f;
        }
      }
    }
    copies_wait<1>();
    __syncwarp();
    const float score = dots<L, HALVES>(cells, keys + here.group * (L / 4) * here.row_bytes, here.row_bytes, count, query) * job.scale;
    const bool sees = here.sees(job, row, first + token);
    const float top = tokens_max(sees ? score : LEAST);
    if (lane < 4u) shared.tops[warp][lane] = top;
    if (!PLANTED(NO_KEY_BARRIER)) __syncthreads();
    float most = LEAST;
#pragma unroll
    for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.tops[w][row]);
    const float share = sees && most != LEAST ? exp_of(score - most) : 0.0f, sum = tokens_sum(share);
    if (lane < 4u) shared.weights[warp][lane] = sum;
    shares[warp * 32u + lane] = share;
    copies_wait<0>();
    __syncwarp();
    float chain[4][8];
    clear(chain);
#pragma unroll (L / 16)
    for (int i = 0; i < L / 4; i++) {
      float v[8];
      cells.widen(cells.unit(values + (here.group * (L / 4) + i) * here.row_bytes, (uint32_t)i < count), v);
      weigh(shares + warp * 32u + here.group * L + i * 4, v, chain);
    }
    __syncwarp();
    float* mine = chains + (warp * (32 / L) + here.group) * (L * 32) + here.unit * 4u;
#pragma unroll
    for (int r = 0; r < 4; r++) {
      store_four(mine + r * (L * 8), chain[r][0], chain[r][1], chain[r][2], chain[r][3]);
      store_four(mine + r * (L * 8) + L * 4, chain[r][4], chain[r][5], chain[r][6], chain[r][7]);
    }
    if (!PLANTED(NO_VALUE_BARRIER)) __syncthreads();
    if (my_row < here.count) {
      float sums[2][4], weight = 0.0f; most = LEAST;
#pragma unroll
      for (int w = 0; w < WARPS; w++) { most = fmaxf(most, shared.tops[w][my_row]); weight += shared.weights[w][my_row]; }
#pragma unroll
      for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int g = 0; g < 32 / L; g++) {
          float of_group[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
          for (int w = 0; w < WARPS / 2; w++) {
            const float4 c = load_floats(chains + ((half * (WARPS / 2) + w) * (32 / L) + g) * (L * 32) + my_row * (L * 8) + my_four * 4u);
            const float four[4] = {c.x, c.y, c.z, c.w};
#pragma unroll
            for (int e = 0; e < 4; e++) of_group[e] += four[e];
          }
#pragma unroll
          for (int e = 0; e < 4; e++) sums[half][e] = g == 0 ? of_group[e] : sums[half][e] + of_group[e];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; e++) sums[0][e] += sums[1][e];
      span.add(most, weight, sums[0]);
      if ((part + 1u) % SPAN == 0u || part + 1u == here.part_to) { total.add(span.most, span.weight, span.v); span.clear(); }
    }
  }
  if (my_row < here.count) here.put(job, my_row, my_element, total);
}

struct Many { float tops[WARPS][16], weights[WARPS][16]; };
// Tiles of 16 rows, four at a time. `memory`: queries as floats; values and keys in cache format. A warp's keys are overwritten by the
// weights of its tokens, 16 each, and by two rows of sums for another warp. Two blocks fit a multiprocessor with 164 KiB.
template <int L, bool HALVES> DEVICE void attend_many(const Attend& job, float* memory, Many& shared) {
  constexpr int GROUPS = 32 / L, OWN = 2 / GROUPS, KEYS = L * 8;                                   // 16-byte units of a warp's keys
  const Place<L> here(job, 16u);
  const uint32_t lane = here.lane, warp = here.warp, unit = here.unit, element = unit * 8u, token = unit >> 2, row = unit & 3u;
  const bool inside = element < job.dim;
  const Cells<HALVES> cells(job.kind, element, job.dim);
  float* query = memory;
  uint4* keys = (uint4*)(memory + 16 * L * 8) + PART * L;
  uint8_t* values = (uint8_t*)(memory + 16 * L * 8);
  auto share = [&](uint32_t of_token) { return (float*)(keys + of_token / 8u * KEYS) + of_token % 8u * 16u; };
  auto exchange = [&](uint32_t of_warp, uint32_t among) { return (float*)(keys + of_warp * KEYS) + 128 + among * (L * 8) + unit * 4u; };
  // Each warp finally owns the sums of two rows; with two groups, one row per group.
  const uint32_t quad = warp & 3u, half = warp >> 2;
  Fold<8> span[OWN];
  float total_most[OWN], total_weight[OWN];
#pragma unroll
  for (int o = 0; o < OWN; o++) { span[o].clear(); total_most[o] = LEAST; total_weight[o] = 0.0f; }
  const float* loaded = nullptr;
  for (uint32_t part = here.part_from; part < here.part_to; part++) {
    const uint32_t start = part * PART;
    const uint8_t *key = here.rows_of(job, part, job.key_offset), *value = here.rows_of(job, part, job.value_offset);
    if (part != here.part_from) __syncthreads();
    const uint32_t first = start + here.first_token, bytes = here.there(start + warp * 8u, 8u) * here.row_bytes;
    const uint32_t count = inside ? here.there(first, L / 4) : 0u;
    uint8_t* my_keys = (uint8_t*)(keys + warp * KEYS);
    bring(my_keys, key, bytes);
    bring(values + warp * 8u * here.row_bytes, value, bytes);
    const float* source = job.query_back && start < job.gap_after ? job.query_back : job.query;
    if (loaded != source) {
      loaded = source;
      for (uint32_t i = threadIdx.x; i < 16 * L * 2; i += THREADS) {
        const uint32_t r = i / (L * 2), four = i % (L * 2), at = four % L * 8u + four / L * 4u;
        store16(query + r * (L * 8) + four * 4u, at < job.dim && r < here.count ? load16(source + here.head_of(job, r) * job.dim + at) : make_uint4(0u, 0u, 0u, 0u));
      }
      __syncthreads();
    }
    copies_wait<1>();
    float score[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
    for (uint32_t q = 0; q * 4u < here.count; q++) {
      __syncwarp();
      float four[4][8];
#pragma unroll
      for (int r = 0; r < 4; r++) load_eight(query + (q * 4u + r) * (L * 8) + unit * 4u, query + (q * 4u + r) * (L * 8) + L * 4 + unit * 4u, four[r]);
      const float one = dots<L, HALVES>(cells, my_keys + here.group * (L / 4) * here.row_bytes, here.row_bytes, count, four) * job.scale;
      const float top = tokens_max(here.sees(job, q * 4u + row, first + token) ? one : LEAST);
      if (lane < 4u) shared.tops[warp][q * 4u + lane] = top;
#pragma unroll
      for (uint32_t s = 0; s < 4u; s++) score[s] = s == q ? one : score[s];
    }
    if (!PLANTED(NO_KEY_BARRIER)) __syncthreads();
#pragma unroll
    for (uint32_t q = 0; q < 4u; q++) {
      float most = LEAST;
      if (q * 4u < here.count) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.tops[w][q * 4u + row]);
      }
      const float p = here.sees(job, q * 4u + row, first + token) && most != LEAST ? exp_of(score[q] - most) : 0.0f;
      const float sum = tokens_sum(p);
      if (lane < 4u) shared.weights[warp][q * 4u + lane] = sum;
      share(here.first_token + token)[q * 4u + row] = p;
    }
    copies_wait<0>();
    if (!PLANTED(NO_VALUE_BARRIER)) __syncthreads();
    float kept[OWN][8];
#pragma unroll
    for (int o = 0; o < OWN; o++)
#pragma unroll
      for (int e = 0; e < 8; e++) kept[o][e] = 0.0f;
    float sums[4][8];
    clear(sums);
    if (quad * 4u < here.count) {
#pragma unroll 1
      for (uint32_t w = 0; w < WARPS / 2; w++) {
        const uint32_t of_chain = ((half * (WARPS / 2) + w) * GROUPS + here.group) * (L / 4), some = inside ? here.there(start + of_chain, L / 4) : 0u;
        float chain[4][8];
        clear(chain);
#pragma unroll 2
        for (int i = 0; i < L / 4; i++) {
          float v[8];
          cells.widen(cells.unit(values + (of_chain + i) * here.row_bytes, (uint32_t)i < some), v);
          weigh(share(of_chain + i) + quad * 4u, v, chain);
        }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
          for (int e = 0; e < 8; e++) sums[r][e] += chain[r][e];
      }
    }
    if (GROUPS == 2) {
#pragma unroll
      for (int r = 0; r < 4; r++)
#pragma unroll
        for (int e = 0; e < 8; e++) sums[r][e] += __shfl_xor_sync(ALL, sums[r][e], 16);
    }
    if (quad * 4u < here.count) {
      // The warp of the other half finally owns the other two rows.
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        const uint32_t among = GROUPS == 2 ? here.group : o;
        float* out = exchange(warp, among);
        float given[8];
#pragma unroll
        for (int e = 0; e < 8; e++) {
          const float a = sums[o][e], b = sums[1][e], c = sums[2 + o][e], d = sums[3][e];
          const float lower = GROUPS == 2 && among ? b : a, higher = GROUPS == 2 && among ? d : c;
          given[e] = half ? lower : higher; kept[o][e] = half ? higher : lower;
        }
        store_four(out, given[0], given[1], given[2], given[3]); store_four(out + L * 4, given[4], given[5], given[6], given[7]);
      }
    }
    if (!PLANTED(NO_EXCHANGE_BARRIER)) __syncthreads();
    if (quad * 4u < here.count) {
#pragma unroll
      for (int o = 0; o < OWN; o++) {
        const uint32_t among = GROUPS == 2 ? here.group : o, my_row = quad * 4u + half * 2u + among;
        float other[8], most = LEAST, weight = 0.0f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) { most = fmaxf(most, shared.tops[w][my_row]); weight += shared.weights[w][my_row]; }
        const float* in = exchange(warp ^ 4u, among);
        load_eight(in, in + L * 4, other);
#pragma unroll
        for (int e = 0; e < 8; e++) other[e] += kept[o][e];
        span[o].add(most, weight, other);
        if ((part + 1u) % SPAN == 0u || part + 1u == here.part_to) {
          // Earlier spans are where this thread stored them.
          if (inside && total_most[o] != LEAST) {
            float old, fresh;
            joined(total_most[o], total_weight[o], span[o].most, span[o].weight, old, fresh);
            span[o].most = total_most[o]; span[o].weight = total_weight[o];
            const float* before = job.partial + here.slot(job, my_row) * job.dim + element;
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
              const float4 t = load_floats(before + i);
              const float four[4] = {t.x, t.y, t.z, t.w};
#pragma unroll
              for (int e = 0; e < 4; e++) span[o].v[i + e] = fmaf(four[e], old, span[o].v[i + e] * fresh);
            }
          }
          total_most[o] = span[o].most; total_weight[o] = span[o].weight;
          if (my_row < here.count) here.put(job, my_row, element, span[o]);
          span[o].clear();
        }
      }
    }
  }
  if (here.part_from >= here.part_to)
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      const uint32_t my_row = quad * 4u + half * 2u + (GROUPS == 2 ? here.group : o);
      if (my_row < here.count) here.put(job, my_row, element, span[o]);
    }
}
#define FEW(name, L) extern "C" __global__ void __launch_bounds__(THREADS, 2) name(const Attend job) { \
  DYNAMIC_SHARED(memory); \
  __shared__ Few shared; \
  if (job.kind == CELL_F16) attend_few<L, true>(job, (float*)memory, shared); else attend_few<L, false>(job, (float*)memory, shared); } SIMT_EXPORT(name)
#define MANY(name, L, blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const Attend job) { \
  DYNAMIC_SHARED(memory); \
  __shared__ Many shared; \
  if (job.kind == CELL_F16) attend_many<L, true>(job, (float*)memory, shared); else attend_many<L, false>(job, (float*)memory, shared); } SIMT_EXPORT(name)
FEW(attend_few_128, 16) FEW(attend_few_256, 32) MANY(attend_128, 16, 1) MANY(attend_256, 32, 2)

// Joins the parts of a head, divides by the weight, applies the gate, and writes the copies for the next product.
struct Join {
  const float* partial; const float* gate;            // gate: nullable
  Copies to;
  const uint32_t* position;
  uint32_t heads, dim, groups, gate_stride, gate_step, run;             // groups: blocks per head; run: as in Attend
};
// 256 columns per block, each warp joining a span; without parts to join, 256 columns per warp.
extern "C" __global__ void __launch_bounds__(THREADS) attend_join(const Join job) {
  __shared__ uint4 spans[WARPS][64]; __shared__ float mosts[WARPS][32], weights[WARPS][32];
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, token = blockIdx.y, dim = job.dim;
  const uint32_t chunk = job.groups == 1u ? blockIdx.x * WARPS + warp : blockIdx.x;
  if (chunk * 256u >= job.to.columns) return;
  const uint32_t at = chunk * 256u + lane * 8u;                        // head sizes are multiples of eight, so eight elements belong to one head
  const bool inside = at < job.to.columns;
  const uint32_t head = at / dim, element = at % dim;
  const size_t slot = ((size_t)token * job.heads + head) * job.groups;
  const float *values = job.partial + slot * dim + element, *stats = job.partial + (size_t)gridDim.y * job.heads * job.groups * dim + slot * 2u;
  float gate[8];
  if (job.gate && inside && (warp == 0u || job.groups == 1u)) {
    const float* from = job.gate + (size_t)token * job.gate_stride + head * job.gate_step + element;
    load_eight(from, from + 4, gate);
  }
  Fold<8> all;
  all.clear();
  if (job.groups == 1u) {
    if (inside) { const float2 s = load_two(stats); all.weight = s.y; load_eight(values, values + 4, all.v); }
  } else {
    const uint32_t run = job.run * PART, parts = min(job.groups, (job.position[0] + token + run) / run), each = job.run == 1u ? SPAN : 1u;
    const uint32_t count = (parts + each - 1u) / each;
    for (uint32_t first = 0; first < count; first += WARPS) {
      const uint32_t from = (first + warp) * each, to = min(parts, from + each);
      Fold<8> span;
      span.clear();
      if (inside && from < to) {
        float2 stat[SPAN]; float one[SPAN][8];
#pragma unroll
        for (uint32_t p = 0; p < SPAN; p++)
          if (from + p < to) { stat[p] = load_two(stats + (from + p) * 2u); const float* v = values + (size_t)(from + p) * dim; load_eight(v, v + 4, one[p]); }
#pragma unroll
        for (uint32_t p = 0; p < SPAN; p++) if (from + p < to) span.add(stat[p].x, stat[p].y, one[p]);
      }
      if (first) __syncthreads();
      mosts[warp][lane] = span.most; weights[warp][lane] = span.weight;
      store_four((float*)&spans[warp][lane], span.v[0], span.v[1], span.v[2], span.v[3]);
      store_four((float*)&spans[warp][32u + lane], span.v[4], span.v[5], span.v[6], span.v[7]);
      if (!PLANTED(NO_SPAN_BARRIER)) __syncthreads();
      if (warp == 0u)
        for (uint32_t w = 0; w < min((uint32_t)WARPS, count - first); w++) {
          float v[8];
          load_eight((const float*)&spans[w][lane], (const float*)&spans[w][32u + lane], v);
          all.add(mosts[w][lane], weights[w][lane], v);
        }
    }
    if (warp != 0u) return;
  }
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.0f;
  if (inside) {
    const float inverse = 1.0f / all.weight;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = all.v[i] * inverse;
    if (job.gate)
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] *= sigmoid_of(gate[i]);
  }
  put_copies(job.to, token, chunk, v);
}
SIMT_EXPORT(attend_join)
#undef PART
#undef SPAN
#undef WARPS
#undef THREADS
#undef FEW
#undef MANY
