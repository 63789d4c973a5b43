// A Gated DeltaNet layer for some tokens, one after the other: convolution, SiLU, norms of query and key, decay, correction, answer,
// output norm and gate, and the copies that the next product takes. A block has a value head, a warp some rows of its (transposed)
// state in registers. The chunk is a loop over tokens, so its bits are those of tokens one by one.
#include "copies.cuh"

#define WARPS 8
#define TAPS_MAX 16

struct Delta {
  const float* mixed; const float* gate; const float* alpha; const float* beta;       // projected
  const float* taps; const float* decay_bias; const float* decay; const float* norm;
  float* state; float* history;                        // history: the last inputs of the convolution, oldest first
  float* out; Copies to;                               // results of all heads, `to.columns` for each token, and their copies
  uint32_t* counters;                                  // of each key head, then of each 256 results; zero before and after
  uint32_t key_heads, value_heads, taps_count, tokens, mixed_stride, gate_stride, alpha_stride, beta_stride; float epsilon; uint32_t unused;
};

template <int D> DEVICE void delta(const Delta& job, float (*part)[D], float (*sums)[WARPS], uint32_t* slot) {
  constexpr int ROWS = D / WARPS, EACH = D / 32;
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const uint32_t head = blockIdx.x, key_head = head % job.key_heads, before = job.taps_count - 1u;
  const uint32_t channels = (2u * job.key_heads + job.value_heads) * D;
  auto channel_of = [&](uint32_t i) {                  // element i of query, key and value
    return i < D ? key_head * D + i : i < 2 * D ? (job.key_heads + key_head) * D + i - D : (2u * job.key_heads + head) * D + i - 2 * D;
  };
  // Input `at` of history and chunk together.
  auto input = [&](uint32_t at, uint32_t channel) {
    return at < before ? job.history[(size_t)at * channels + channel] : job.mixed[(size_t)(at - before) * job.mixed_stride + channel];
  };
  float s[ROWS][EACH];
  float* mine = job.state + ((size_t)head * D + warp * ROWS) * D;
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) s[r][e] = mine[r * D + e * 32 + lane];
  for (uint32_t n = 0; n < job.tokens; n++) {
    for (uint32_t i = t; i < 3 * D; i += WARPS * 32) {
      const uint32_t channel = channel_of(i);
      float sum = 0.0f;
      for (uint32_t tap = 0; tap <= before; tap++) sum = fmaf(input(n + tap, channel), job.taps[(size_t)channel * job.taps_count + tap], sum);
      part[i / D][i % D] = silu_of(sum);
    }
#ifndef MUTANT_NO_CONVOLUTION_BARRIER
    __syncthreads();
#endif
    // Each warp has the norms by itself.
    float q[EACH], k[EACH], qq = 0.0f, kk = 0.0f;
#pragma unroll
    for (int e = 0; e < EACH; e++) { q[e] = part[0][e * 32 + lane]; k[e] = part[1][e * 32 + lane]; qq = fmaf(q[e], q[e], qq); kk = fmaf(k[e], k[e], kk); }
    qq = 1.0f / sqrtf(warp_sum(qq) + job.epsilon) * (1.0f / sqrtf((float)D)); kk = 1.0f / sqrtf(warp_sum(kk) + job.epsilon);
#pragma unroll
    for (int e = 0; e < EACH; e++) { q[e] *= qq; k[e] *= kk; }
    const float decay = exp_of(job.decay[head] * softplus_of(job.alpha[(size_t)n * job.alpha_stride + head] + job.decay_bias[head]));
    const float strength = sigmoid_of(job.beta[(size_t)n * job.beta_stride + head]);
    float squares = 0.0f;
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
      float known = 0.0f, answer = 0.0f;
#pragma unroll
      for (int e = 0; e < EACH; e++) known = fmaf(s[r][e], k[e], known);
      const float change = strength * (part[2][warp * ROWS + r] - warp_sum(known) * decay);
#pragma unroll
      for (int e = 0; e < EACH; e++) { s[r][e] = fmaf(k[e], change, s[r][e] * decay); answer = fmaf(s[r][e], q[e], answer); }
      answer = warp_sum(answer);
      squares = fmaf(answer, answer, squares);
      if (lane == 0) part[3][warp * ROWS + r] = answer;
    }
    if (lane == 0) sums[n & 1u][warp] = squares;
    __syncthreads();
    if (t < D) {
      float all = 0.0f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) all += sums[n & 1u][w];
      const float factor = 1.0f / sqrtf(all / (float)D + job.epsilon);
      const uint32_t at = head * D + t;
      job.out[(size_t)n * job.to.columns + at] = part[3][t] * factor * job.norm[t] * silu_of(job.gate[(size_t)n * job.gate_stride + at]);
    }
    // The next token's barrier comes before any of its answers, and this token's came behind all that was read of its inputs.
  }
#pragma unroll
  for (int r = 0; r < ROWS; r++)
#pragma unroll
    for (int e = 0; e < EACH; e++) mine[r * D + e * 32 + lane] = s[r][e];
  // History of values is this block's; that of queries and keys is read by all heads that share them, so the last one writes it.
#ifdef MUTANT_HISTORY_TOO_EARLY
  const bool last = true;
#else
  const bool last = last_to_arrive(job.counters + key_head, job.value_heads / job.key_heads, slot);
#endif
  for (uint32_t i = (last ? 0u : 2u * D) + t; i < 3u * D; i += WARPS * 32) {
    const uint32_t channel = channel_of(i);
    // In the order of time: what is read is a later one, or of the chunk.
    for (uint32_t tap = 0; tap < before; tap++) job.history[(size_t)tap * channels + channel] = input(job.tokens + tap, channel);
  }
  // 256 results are of several heads where these are shorter: the last one makes the copies.
  const uint32_t chunk = head * D / 256u, first = chunk * 256u / D, heads = min(256u / D, job.value_heads - first);
  if (!last_to_arrive(job.counters + job.key_heads + chunk, heads, slot)) return;
  for (uint32_t n = warp; n < job.tokens; n += WARPS) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const uint32_t at = chunk * 256u + lane * 8u + i;
      v[i] = at < job.to.columns ? load_shared_by_blocks(job.out + (size_t)n * job.to.columns + at) : 0.0f;
    }
    put_copies(job.to, n, chunk, v);
  }
}
#define DELTA(D) extern "C" __global__ void __launch_bounds__(WARPS * 32) delta_##D(const Delta job) { \
  __shared__ float part[4][D], sums[2][WARPS]; __shared__ uint32_t slot; delta<D>(job, part, sums, &slot); } SIMT_EXPORT(delta_##D)
DELTA(32) DELTA(64) DELTA(128)
#undef WARPS
#undef TAPS_MAX
#undef DELTA
