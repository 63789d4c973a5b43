// Attention of queries over the blocks of a KV cache.
//
// Rows are queries of all heads that share a key head, token by token, in tiles of 16: one shape for one token and for many. Tokens
// go in tiles of 32 and parts of 256 from fixed positions. A score is four sums over elements; a part's softmax and weighted values
// are one chain over its tiles; parts are joined in their order. So the bits depend neither on the chunk nor on how many parts a
// block computes: one (few tokens, parts beside each other) or all (prompts).
#include "cells.cuh"
#include "copies.cuh"

#define ROWS 16
#define TILE 32
#define PART 256u
#define THREADS 128

struct Attend {
  const float* query; const float* query_back;       // turned queries; the same turned back by the gap, or null
  const uint64_t* blocks; const uint32_t* position;
  float* partial;                                     // of each token, head and group of parts: maximum, weight, `dim` values
  uint64_t key_offset, value_offset;
  uint32_t tokens, heads, kv_heads, dim, kind, window, gap_after, all_parts;   // window 0: none; all_parts: a block computes all of them
  float scale; uint32_t unused;
};
struct Part { float most, weight; };

// Joins a part that comes behind others; the first one is taken as it is.
DEVICE void joined(float& most, float& weight, float other_most, float other_weight, float& old, float& fresh) {
  if (other_most == LEAST) { old = 1.0f; fresh = 0.0f; return; }
  if (most == LEAST) { most = other_most; weight = other_weight; old = 0.0f; fresh = 1.0f; return; }
  const float top = fmaxf(most, other_most);
  old = exp_of(most - top); fresh = exp_of(other_most - top);
  most = top; weight = fmaf(weight, old, other_weight * fresh);
}

// Rows of a tile of tokens into shared memory as they lie: `bytes` from an address that is a multiple of 16.
DEVICE void fetch_rows(uint8_t* to, const uint8_t* from, uint32_t bytes) {
  for (uint32_t u = threadIdx.x * 16u; u < bytes; u += THREADS * 16u) {
    if (u + 16u <= bytes) copy16_async(shared_of(to) + u, from + u);
    else for (uint32_t i = u; i < bytes; i += 2u) *(uint16_t*)(to + i) = *(const uint16_t*)(from + i);
  }
  copies_commit();
}
// Brings `count` rows to floats, `step` apart.
DEVICE void widen_rows(float* to, const uint8_t* from, uint32_t count, uint32_t kind, uint32_t dim, uint32_t step) {
  const uint32_t eights = dim / 8u, row_bytes = cell_row_bytes(kind, dim);
  for (uint32_t i = threadIdx.x; i < count * eights; i += THREADS) {
    const uint32_t row = i / eights, at = i % eights * 8u;
    const uint8_t* bytes = from + row * row_bytes;
    float v[8];
    if (kind == CELL_F16) {
      const uint4 h = load16(bytes + at * 2u);
      const uint32_t words[4] = {h.x, h.y, h.z, h.w};
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = half_bits(e & 1 ? words[e >> 1] >> 16 : words[e >> 1]);
    } else {
#pragma unroll
      for (int e = 0; e < 8; e++) v[e] = read_cell(kind, bytes, at + e, dim);
    }
    float* out = to + row * step + at;
    store16(out, make_uint4(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])));
    store16(out + 4, make_uint4(as_bits(v[4]), as_bits(v[5]), as_bits(v[6]), as_bits(v[7])));
  }
}
DEVICE float4 load_floats(const float* p) { const uint4 v = load16(p); return make_float4(as_float(v.x), as_float(v.y), as_float(v.z), as_float(v.w)); }

// EACH rows of a thread for two columns: 16 where heads have more than 128 elements, else 8.
template <int EACH> DEVICE void attend(const Attend& job, float* memory, float (*weights)[ROWS + 4], float* factors, float* parts) {
  const uint32_t dim = job.dim, step = dim + 4u, group = job.heads / job.kv_heads, row_bytes = cell_row_bytes(job.kind, dim);
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, kv_head = blockIdx.x, rows = job.tokens * group;
  const uint32_t first_row = blockIdx.y * ROWS, count = min((uint32_t)ROWS, rows - first_row), position = job.position[0];
  float *query = memory, *wide = memory + ROWS * step;
  uint8_t* raw = (uint8_t*)(wide + TILE * step);
  const uint32_t seen_end = position + (first_row + count - 1u) / group + 1u;                       // by the last row
  const uint32_t first_end = position + first_row / group + 1u;                                     // by the first one
  const uint32_t unseen = job.window && first_end > job.window ? first_end - job.window : 0u;
  const uint32_t all = (seen_end + PART - 1u) / PART, part_from = job.all_parts ? 0u : blockIdx.z, part_to = job.all_parts ? all : min(all, part_from + 1u);
  const uint32_t columns = threadIdx.x % (EACH == ROWS ? 128u : 64u) * 2u, row_from = EACH == ROWS ? 0u : threadIdx.x / 64u * EACH;
  // Of the four rows of this warp: what is added to their tokens' positions, and the softmax so far.
  float total_most[4], total_weight[4], sum[EACH][2], total[EACH][2];
#pragma unroll
  for (int r = 0; r < 4; r++) { total_most[r] = LEAST; total_weight[r] = 0.0f; }
#pragma unroll
  for (int r = 0; r < EACH; r++) total[r][0] = total[r][1] = 0.0f;
  uint32_t loaded = 0u;                                                                             // 1: queries; 2: those turned back
  for (uint32_t part = part_from; part < part_to; part++) {
    const uint32_t from = max(part * PART, unseen / TILE * TILE), to = min((part + 1u) * PART, seen_end);
    float most[4], weight[4];
#pragma unroll
    for (int r = 0; r < 4; r++) { most[r] = LEAST; weight[r] = 0.0f; }
#pragma unroll
    for (int r = 0; r < EACH; r++) sum[r][0] = sum[r][1] = 0.0f;
    for (uint32_t start = from; start < to; start += TILE) {
      const uint32_t here = min((uint32_t)TILE, to - start);
      const uint8_t* block = (const uint8_t*)job.blocks[start / KV_BLOCK_TOKENS] + (size_t)(kv_head * KV_BLOCK_TOKENS + start % KV_BLOCK_TOKENS) * row_bytes;
      const uint32_t wanted = job.query_back && start < job.gap_after ? 2u : 1u;
      __syncthreads();
      fetch_rows(raw, block + job.key_offset, here * row_bytes);
      if (loaded != wanted) {
        const float* source = wanted == 2u ? job.query_back : job.query;
        for (uint32_t i = threadIdx.x; i < count * (dim / 4u); i += THREADS) {
          const uint32_t r = i / (dim / 4u), at = i % (dim / 4u) * 4u, row = first_row + r;
          store16(query + r * step + at, load16(source + ((size_t)(row / group) * job.heads + kv_head * group + row % group) * dim + at));
        }
        loaded = wanted;
      }
      copies_wait<0>();
      __syncthreads();
      widen_rows(wide, raw, here, job.kind, dim, step);
#ifndef MUTANT_NO_KEY_BARRIER
      __syncthreads();
#endif
      fetch_rows(raw, block + job.value_offset, here * row_bytes);
      // Scores: a lane has a token, a warp four rows.
      float score[4];
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint32_t row = warp * 4u + r;
        float dot = 0.0f;
        if (row < count && lane < here) {
          float d0 = 0.0f, d1 = 0.0f, d2 = 0.0f, d3 = 0.0f;
          for (uint32_t at = 0; at < dim; at += 4u) {
            const float4 k = load_floats(wide + lane * step + at), q = load_floats(query + row * step + at);
            d0 = fmaf(q.x, k.x, d0); d1 = fmaf(q.y, k.y, d1); d2 = fmaf(q.z, k.z, d2); d3 = fmaf(q.w, k.w, d3);
          }
          dot = ((d0 + d1) + (d2 + d3)) * job.scale;
        }
        score[r] = dot;
      }
#pragma unroll
      for (int r = 0; r < 4; r++) {
        const uint32_t row = warp * 4u + r, end = position + (first_row + row) / group + 1u, token = start + lane;
        const uint32_t begin = job.window && end > job.window ? end - job.window : 0u;
        const bool sees = row < count && lane < here && token < end && token >= begin;
        const float top = fmaxf(most[r], warp_max(sees ? score[r] : LEAST));
        float old = 1.0f, p = 0.0f;
        if (top != LEAST) {
          old = most[r] == LEAST ? 0.0f : exp_of(most[r] - top);
          p = sees ? exp_of(score[r] - top) : 0.0f;
        }
        const float all_of_tile = warp_sum(p);
        most[r] = top; weight[r] = fmaf(weight[r], old, all_of_tile);
        weights[lane][row] = p;
        if (lane == 0u) factors[row] = old;
      }
      copies_wait<0>();
      __syncthreads();
      widen_rows(wide, raw, here, job.kind, dim, step);
      __syncthreads();
      if (columns < dim) {
#pragma unroll
        for (int r = 0; r < EACH; r++) { const float old = factors[row_from + r]; sum[r][0] *= old; sum[r][1] *= old; }
        for (uint32_t token = 0; token < here; token++) {
          const uint2 v = load8(wide + token * step + columns);
#pragma unroll
          for (int r = 0; r < EACH; r += 4) {
            const float4 p = load_floats(&weights[token][row_from + r]);
            const float four[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
              sum[r + e][0] = fmaf(four[e], as_float(v.x), sum[r + e][0]); sum[r + e][1] = fmaf(four[e], as_float(v.y), sum[r + e][1]);
            }
          }
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < 4; r++) {
      float old, fresh;
      joined(total_most[r], total_weight[r], most[r], weight[r], old, fresh);
      if (lane == 0u) { factors[warp * 4u + r] = old; parts[warp * 4u + r] = fresh; }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < EACH; r++) {
      const float old = factors[row_from + r], fresh = parts[row_from + r];
#pragma unroll
      for (int e = 0; e < 2; e++) total[r][e] = old == 0.0f ? sum[r][e] : fresh == 0.0f ? total[r][e] : fmaf(total[r][e], old, sum[r][e] * fresh);
    }
  }
  // An unseen part has a maximum below all, and its values are not read.
  const uint32_t groups = job.all_parts ? 1u : gridDim.z, at = job.all_parts ? 0u : blockIdx.z;
  auto place = [&](uint32_t r) {
    const uint32_t row = first_row + r;
    return job.partial + (((size_t)(row / group) * job.heads + kv_head * group + row % group) * groups + at) * (dim + 2u);
  };
#pragma unroll
  for (int r = 0; r < 4; r++)
    if (lane == 0u && warp * 4u + r < count) { float* out = place(warp * 4u + r); out[0] = total_most[r]; out[1] = total_weight[r]; }
  if (columns < dim)
#pragma unroll
    for (int r = 0; r < EACH; r++)
      if (row_from + r < count) { float* out = place(row_from + r) + 2u + columns; store8(out, make_uint2(as_bits(total[r][0]), as_bits(total[r][1]))); }
}
#define ATTEND(name, EACH, blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks) name(const Attend job) { \
  DYNAMIC_SHARED(memory); \
  __shared__ uint4 weights[TILE * (ROWS + 4) / 4]; __shared__ float factors[ROWS], parts[ROWS]; \
  attend<EACH>(job, (float*)memory, (float (*)[ROWS + 4])weights, factors, parts); } SIMT_EXPORT(name)
ATTEND(attend_128, 8, 4) ATTEND(attend_256, 16, 2)

// Joins the parts of a head, divides by the weight, applies the gate, and makes the copies that the next product takes.
struct Join {
  const float* partial; const float* gate;            // gate: or null
  Copies to;
  const uint32_t* position;
  uint32_t heads, dim, groups, gate_stride, gate_step, unused;
};
extern "C" __global__ void __launch_bounds__(128) attend_join(const Join job) {
  const uint32_t lane = threadIdx.x & 31u, chunk = blockIdx.x * 4u + (threadIdx.x >> 5), token = blockIdx.y, dim = job.dim;
  if (chunk * 256u >= job.to.columns) return;
  const uint32_t at = chunk * 256u + lane * 8u;                        // a head is a multiple of eight: one head for eight elements
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.0f;
  if (at < job.to.columns) {
    const uint32_t head = at / dim, element = at % dim;
    const uint32_t parts = job.groups == 1u ? 1u : min(job.groups, (job.position[0] + token) / PART + 1u);
    const float* one = job.partial + ((size_t)token * job.heads + head) * job.groups * (dim + 2u);
    float most = LEAST, weight = 0.0f;
    for (uint32_t p = 0; p < parts; p++, one += dim + 2u) {
      float old, fresh;
      joined(most, weight, one[0], one[1], old, fresh);
      if (fresh == 0.0f) continue;
#pragma unroll
      for (int i = 0; i < 8; i++) { const float s = one[2u + element + i]; v[i] = old == 0.0f ? s : fmaf(v[i], old, s * fresh); }
    }
    const float inverse = 1.0f / weight;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] *= inverse;
    if (job.gate)
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] *= sigmoid_of(job.gate[(size_t)token * job.gate_stride + head * job.gate_step + element + i]);
  }
  put_copies(job.to, token, chunk, v);
}
SIMT_EXPORT(attend_join)
#undef ROWS
#undef TILE
#undef PART
#undef THREADS
#undef ATTEND
