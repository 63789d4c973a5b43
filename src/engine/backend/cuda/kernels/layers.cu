// Kernels between products: embeddings, the residual stream with its norms, head norms with rotation and the KV cache, conversion of
// the cache, and the final step of the output head.
#include "cells.cuh"
#include "copies.cuh"
#include "weights.cuh"

// Eight columns per lane, 256 per warp, of a row of weights, from column `chunk` * 256 on.
template <class T> DEVICE void eight_of(const uint8_t* row, uint32_t chunk, float (&v)[8]) {
  const int lane = threadIdx.x & 31, p = lane >> 2, w = (lane & 3) * 2;
  const uint8_t* step = row + (size_t)chunk * T::STEP;
  uint32_t q[2];
  T::template quads<2>(step, p, w, q);
  float scale, least;
  if constexpr (T::SUPER) {
    uint32_t scales[T::WORDS], leasts[T::WORDS];
    T::scales(step, p >> 2, scales, leasts);
    const float2 f = T::factors(step);
    scale = f.x * (float)T::scale_of(scales, p & 3, w >> 2); least = f.y * (float)T::scale_of(leasts, p & 3, w >> 2);
  } else {
    const float2 f = T::factors(step, p);
    scale = f.x; least = -f.y;
  }
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t word = T::centred(q[i >> 2]);
    v[i] = scale * (float)signed_byte(word, i & 3) - least;
  }
}
template <int KIND> DEVICE void eight_plain(const uint8_t* row, uint32_t at, float (&v)[8]) {
  const uint8_t* p = row + (size_t)at * Plain<KIND>::BYTES;
  Plain<KIND>::eight(load16(p), KIND == TYPE_F32 ? load16(p + 16) : make_uint4(0, 0, 0, 0), v);
}

// Rows of the embedding: one per token, or consecutive rows if they were read from the file.
struct Embed {
  const uint64_t* parts; uint64_t offset; const uint32_t* tokens;      // `tokens` null: rows 0, 1, 2, …
  float* stream; float scale; uint32_t part, type, width, row_bytes, unused;
};
extern "C" __global__ void __launch_bounds__(128) embed(const Embed job) {
  const uint32_t chunk = blockIdx.x * 4u + (threadIdx.x >> 5), at = chunk * 256u + (threadIdx.x & 31u) * 8u;
  if (at >= job.width) return;
  const uint8_t* row = (const uint8_t*)job.parts[job.part] + job.offset + (size_t)(job.tokens ? job.tokens[blockIdx.y] : blockIdx.y) * job.row_bytes;
  float v[8];
  switch (job.type) {
#define OF(type) case TYPE_##type: eight_of<type>(row, chunk, v); break;
    OF(Q4_K) OF(Q6_K) OF(Q5_K) OF(Q3_K) OF(Q2_K) OF(Q8_0) OF(Q4_0) OF(Q4_1) OF(Q5_0) OF(Q5_1)
    OF(IQ4_NL) OF(IQ4_XS) OF(MXFP4)
#undef OF
    case TYPE_F16: eight_plain<TYPE_F16>(row, at, v); break;
    case TYPE_BF16: eight_plain<TYPE_BF16>(row, at, v); break;
    default: eight_plain<TYPE_F32>(row, at, v);
  }
  float* out = job.stream + (size_t)blockIdx.y * job.width + at;
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] *= job.scale;
  store16(out, make_uint4(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3])));
  store16(out + 4, make_uint4(as_bits(v[4]), as_bits(v[5]), as_bits(v[6]), as_bits(v[7])));
}
SIMT_EXPORT(embed)

#define NORM_THREADS 512
// stream += scale * other, normalised first if `post` is given; then the copies of rms(stream) * weight.
struct Norm {
  float* stream; const float* other; const float* post; const float* weight; Copies to;
  uint32_t stride; float scale, epsilon; uint32_t unused;               // stride: elements between rows of `other`
};
DEVICE float block_sum(float v, float* sums) {
  v = warp_sum(v);
  if ((threadIdx.x & 31u) == 0u) sums[threadIdx.x >> 5] = v;
  if (!PLANTED(NO_SUM_BARRIER)) __syncthreads();
  float all = 0.0f;
#pragma unroll
  for (int w = 0; w < NORM_THREADS / 32; w++) all += sums[w];
  return all;
}
// Eight elements of a row from `at` on, zeros beyond its end. `whole`: loads of 16 bytes.
DEVICE void eight_floats(const float* row, uint32_t at, uint32_t width, bool whole, float (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = 0.0f;
  if (whole) {
    if (at < width) {
      const uint4 a = load16(row + at), b = load16(row + at + 4u);
      v[0] = as_float(a.x); v[1] = as_float(a.y); v[2] = as_float(a.z); v[3] = as_float(a.w); v[4] = as_float(b.x); v[5] = as_float(b.y); v[6] = as_float(b.z); v[7] = as_float(b.w);
    }
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8u; i++) if (at + i < width) v[i] = row[at + i];
  }
}
DEVICE float squares(const float (&v)[8]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = fmaf(v[i], v[i], sum);
  return sum;
}
// A thread keeps eight columns in registers, a block 4096. Further columns are read again.
extern "C" __global__ void __launch_bounds__(NORM_THREADS, 2) residual_norm(const Norm job) {
  __shared__ float sums[2][NORM_THREADS / 32];
  const uint32_t width = job.to.columns, first = threadIdx.x * 8u, step = NORM_THREADS * 8u;
  float* row = job.stream + (size_t)blockIdx.x * width;
  const float* other = job.other ? job.other + (size_t)blockIdx.x * job.stride : nullptr;
  const bool whole = width % 8u == 0u && (((size_t)row | (size_t)other | (size_t)job.post | (size_t)job.weight) & 15u) == 0u;
  float v[8], o[8], w[8], factor = 1.0f;
  eight_floats(row, first, width, whole, v);
  if (other) eight_floats(other, first, width, whole, o);
  if (job.weight) eight_floats(job.weight, first, width, whole, w);
  if (job.post) {
    float sum = squares(o);
    for (uint32_t at = first + step; at < width; at += step) {
      float more[8];
      eight_floats(other, at, width, whole, more);
      sum += squares(more);
    }
    factor = 1.0f / sqrtf(block_sum(sum, sums[0]) / (float)width + job.epsilon);
  }
  auto add = [&](uint32_t at, float (&to)[8], const float (&more)[8]) {
    float post[8];
    if (job.post) eight_floats(job.post, at, width, whole, post);
#pragma unroll
    for (int i = 0; i < 8; i++) to[i] += (job.post ? more[i] * factor * post[i] : more[i]) * job.scale;
    if (whole) {
      if (at < width) {
        store16(row + at, make_uint4(as_bits(to[0]), as_bits(to[1]), as_bits(to[2]), as_bits(to[3])));
        store16(row + at + 4u, make_uint4(as_bits(to[4]), as_bits(to[5]), as_bits(to[6]), as_bits(to[7])));
      }
    } else {
#pragma unroll
      for (uint32_t i = 0; i < 8u; i++) if (at + i < width) row[at + i] = to[i];
    }
  };
  if (other) add(first, v, o);
  float sum = squares(v);
  for (uint32_t at = first + step; at < width; at += step) {
    float more[8];
    eight_floats(row, at, width, whole, more);
    if (other) {
      float others[8];
      eight_floats(other, at, width, whole, others);
      add(at, more, others);
    }
    sum += squares(more);
  }
  if (!job.weight) return;
  factor = 1.0f / sqrtf(block_sum(sum, sums[1]) / (float)width + job.epsilon);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = v[i] * factor * w[i];
  for (uint32_t chunk = threadIdx.x >> 5; chunk * 256u < width;) {
    put_copies(job.to, blockIdx.x, chunk, v);
    chunk += NORM_THREADS / 32;
    const uint32_t at = chunk * 256u + (threadIdx.x & 31u) * 8u;
    if (chunk * 256u < width) {
      float more[8];
      eight_floats(row, at, width, whole, v);
      eight_floats(job.weight, at, width, whole, more);
#pragma unroll
      for (int i = 0; i < 8; i++) v[i] = v[i] * factor * more[i];
    }
  }
}
SIMT_EXPORT(residual_norm)

#define HEAD_MAX 256
// Norm and rotation of queries and keys; stores keys and values in the cache. One warp per head and token.
struct Heads {
  const float* query; const float* key; const float* value;            // projected; queries with their gates if `gated`
  const float* query_norm; const float* key_norm;                      // or null
  const float* angles; const float* back;                              // cosine and sine of each pair: per token; of the gap, or null
  const float* growth;                                                 // factor of the queries of each token, or null
  float* out; float* out_back;                                         // queries, and the same rotated back by the gap
  const uint64_t* blocks;                                              // address of each block of the cache
  const uint32_t* position;                                            // tokens before this chunk
  uint32_t* not_finite;                                                // set if a key or value is not finite
  uint64_t key_offset, value_offset;                                   // of the layer in a block
  uint32_t heads, kv_heads, dim, rotary, query_stride, kv_stride, head_step, adjacent, kind, unused; float epsilon, spare;
};
DEVICE void turn_pair(const float* head, float* turned, uint32_t pair, float cosine, float sine, uint32_t half, uint32_t adjacent) {
  const uint32_t i = adjacent ? 2u * pair : pair, j = adjacent ? 2u * pair + 1u : pair + half;
  const float x = head[i], y = head[j];
  turned[i] = x * cosine - y * sine; turned[j] = x * sine + y * cosine;
}
// Rotates all pairs of a head by their angles; `turned` must not overlap `head`.
DEVICE void turn(const float* head, float* turned, const float* angles, uint32_t rotary, uint32_t dim, uint32_t adjacent) {
  const uint32_t lane = threadIdx.x & 31u, half = rotary / 2u;
  for (uint32_t pair = lane; pair < half; pair += 32u) {
    turn_pair(head, turned, pair, angles[2u * pair], angles[2u * pair + 1u], half, adjacent);
  }
  for (uint32_t i = 2u * half + lane; i < dim; i += 32u) turned[i] = head[i];
}
extern "C" __global__ void __launch_bounds__(128) heads(const Heads job) {
  __shared__ float memory[4][2][HEAD_MAX];
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, head = blockIdx.x * 4u + warp, token = blockIdx.y, dim = job.dim;
  if (head >= job.heads + 2u * job.kv_heads) return;
  const uint32_t part = head < job.heads ? 0u : head < job.heads + job.kv_heads ? 1u : 2u;
  const uint32_t number = head - (part == 0u ? 0u : part == 1u ? job.heads : job.heads + job.kv_heads);
  const float* source = part == 0u ? job.query + (size_t)token * job.query_stride + number * job.head_step
    : (part == 1u ? job.key : job.value) + (size_t)token * job.kv_stride + number * dim;
  float *mine = memory[warp][0], *turned = memory[warp][1];
  const float* weight = part == 0u ? job.query_norm : part == 1u ? job.key_norm : nullptr;
  // Independent loads are issued together.
  const float growth = part == 0u && job.growth ? job.growth[token] : 1.0f;
  const uint32_t at = part == 0u ? 0u : job.position[0] + token;
  const uint64_t block_at = part == 0u ? 0u : job.blocks[at / KV_BLOCK_TOKENS];
  float v[HEAD_MAX / 32], weights[HEAD_MAX / 32];
#pragma unroll
  for (uint32_t j = 0; j < HEAD_MAX / 32; j++) {
    const uint32_t i = j * 32u + lane;
    v[j] = i < dim ? source[i] : 0.0f; weights[j] = weight && i < dim ? weight[i] : 1.0f;
  }
  float2 angles[HEAD_MAX / 64];
#pragma unroll
  for (uint32_t j = 0; j < HEAD_MAX / 64; j++) {
    const uint32_t pair = j * 32u + lane;
    const uint2 angle = part != 2u && pair < job.rotary / 2u ? load8(job.angles + (size_t)token * job.rotary + 2u * pair) : make_uint2(0u, 0u);
    angles[j] = make_float2(as_float(angle.x), as_float(angle.y));
  }
  float sum = 0.0f; uint32_t largest = 0u;
#pragma unroll
  for (uint32_t j = 0; j < HEAD_MAX / 32; j++) {
    v[j] *= growth; sum = fmaf(v[j], v[j], sum);
    const uint32_t size = as_bits(v[j]) & 0x7fffffffu;
    largest = size > largest ? size : largest;
  }
  sum = warp_sum(sum);
  largest = group_max<32>(largest);
  if (part != 0u && lane == 0u && largest >= 0x7f800000u) atomic_or(job.not_finite, 1u);
  const float factor = 1.0f / sqrtf(sum / (float)dim + job.epsilon);
#pragma unroll
  for (uint32_t j = 0; j < HEAD_MAX / 32; j++) {
    const uint32_t i = j * 32u + lane;
    if (i < dim) mine[i] = weight ? v[j] * factor * weights[j] : v[j];
  }
  __syncwarp();
  const float* ready = mine;
  if (part != 2u) {
    const uint32_t half = job.rotary / 2u;
#pragma unroll
    for (uint32_t j = 0; j < HEAD_MAX / 64; j++) {
      const uint32_t pair = j * 32u + lane;
      if (pair < half) turn_pair(mine, turned, pair, angles[j].x, angles[j].y, half, job.adjacent);
    }
    for (uint32_t i = 2u * half + lane; i < dim; i += 32u) turned[i] = mine[i];
    ready = turned;
    if (!PLANTED(NO_TURN_BARRIER)) __syncwarp();
  }
  if (part == 0u) {
    float* out = job.out + ((size_t)token * job.heads + number) * dim;
    for (uint32_t i = lane; i < dim; i += 32u) out[i] = turned[i];
    if (job.back) turn(turned, job.out_back + ((size_t)token * job.heads + number) * dim, job.back, job.rotary, dim, job.adjacent);
    return;
  }
  const uint32_t row_bytes = cell_row_bytes(job.kind, dim);
  uint8_t* block = (uint8_t*)block_at + (part == 1u ? job.key_offset : job.value_offset);
  uint8_t* row = block + (size_t)(number * KV_BLOCK_TOKENS + at % KV_BLOCK_TOKENS + (PLANTED(ROW_INDEX) ? 1u : 0u)) * row_bytes;
  for (uint32_t group = 0; group * 32u < dim; group++) {
    const uint32_t i = group * 32u + lane;
    write_cells(job.kind, i < dim ? ready[i] : 0.0f, min(32u, dim - group * 32u), row + group * cell_group_bytes(job.kind, 32u));
  }
}
SIMT_EXPORT(heads)

// Converts rows of the cache from `first` on in place, one row per warp; all are read before any is written. The caller passes only as
// many rows as do not overwrite rows of later launches.
extern "C" __global__ void __launch_bounds__(128) convert(uint8_t* memory, uint64_t first, uint32_t count, uint32_t dim, uint32_t from, uint32_t to) {
  __shared__ float wide[4][HEAD_MAX];
  const uint32_t lane = threadIdx.x & 31u, warp = threadIdx.x >> 5, at = blockIdx.x * 4u + warp;
  const uint32_t had = cell_row_bytes(from, dim), has = cell_row_bytes(to, dim);
  if (at < count)
    for (uint32_t i = lane; i < dim; i += 32u) wide[warp][i] = read_cell(from, memory + (size_t)(first + at) * had, i, dim);
  if (!PLANTED(NO_CONVERT_BARRIER)) __syncthreads();
  if (at < count)
    for (uint32_t group = 0; group * 32u < dim; group++) {
      const uint32_t i = group * 32u + lane;
      write_cells(to, i < dim ? wide[warp][i] : 0.0f, min(32u, dim - group * 32u), memory + (size_t)(first + at) * has + group * cell_group_bytes(to, 32u));
    }
}
SIMT_EXPORT(convert)

// Final step of the output head: scale and cap of the logits, whether all are finite, and the index of the greatest, the first of equals.
struct Finish {
  float* logits; const uint2* ranges;                                  // computed logits: first, and one past the last
  uint32_t* partial; uint32_t* counter; uint32_t* result;              // 3 words per block; zero before and after; index, value, not finite
  uint32_t ranges_count, vocabulary; float scale, cap;                 // divided by `scale`; `cap` 0: none
};
DEVICE bool greater(float a, uint32_t i, float b, uint32_t j) { return a > b || (a == b && i < j); }
extern "C" __global__ void __launch_bounds__(256) finish(const Finish job) {
  __shared__ float values[8]; __shared__ uint32_t indices[8], odd[8]; __shared__ uint32_t slot;
  const uint32_t begin = blockIdx.x * 1024u, end = min(begin + 1024u, job.vocabulary), lane = threadIdx.x & 31u, warp = threadIdx.x >> 5;
  float best = LEAST; uint32_t index = ALL, wrong = 0u;
  for (uint32_t r = 0; r < job.ranges_count; r++) {
    const uint2 range = load8(job.ranges + r);
    const uint32_t to = min(end, range.y);
    for (uint32_t i = max(begin, range.x) + threadIdx.x; i < to; i += 256u) {
      float v = job.logits[i] / job.scale;
      if (job.cap != 0.0f) v = job.cap * tanh_of(v / job.cap);
      job.logits[i] = v;
      wrong |= (as_bits(v) & 0x7fffffffu) >= 0x7f800000u ? 1u : 0u;
      if (greater(v, i, best, index)) { best = v; index = i; }
    }
  }
  auto join = [&] {
#pragma unroll
    for (int m = 16; m > 0; m >>= 1) {
      const float v = __shfl_xor_sync(ALL, best, m); const uint32_t i = __shfl_xor_sync(ALL, index, m);
      wrong |= __shfl_xor_sync(ALL, wrong, m);
      if (greater(v, i, best, index)) { best = v; index = i; }
    }
  };
  join();
  if (lane == 0u) { values[warp] = best; indices[warp] = index; odd[warp] = wrong; }
  __syncthreads();
  if (threadIdx.x == 0u) {
    for (int w = 1; w < 8; w++) { wrong |= odd[w]; if (greater(values[w], indices[w], best, index)) { best = values[w]; index = indices[w]; } }
    uint32_t* mine = job.partial + blockIdx.x * 3u;
    mine[0] = as_bits(best); mine[1] = index; mine[2] = wrong;
  }
  if (!last_to_arrive(job.counter, gridDim.x, &slot) || warp != 0u) return;
  best = LEAST; index = ALL; wrong = 0u;
  for (uint32_t b = lane; b < gridDim.x; b += 32u) {
    const float* one = (const float*)job.partial + b * 3u;
    const float v = load_shared_by_blocks(one); const uint32_t i = as_bits(load_shared_by_blocks(one + 1));
    wrong |= as_bits(load_shared_by_blocks(one + 2));
    if (greater(v, i, best, index)) { best = v; index = i; }
  }
  join();
  if (lane == 0u) { job.result[0] = index; job.result[1] = as_bits(best); job.result[2] = wrong; }
}
SIMT_EXPORT(finish)
#undef NORM_THREADS
#undef HEAD_MAX
