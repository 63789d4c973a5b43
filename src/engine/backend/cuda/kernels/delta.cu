// A Gated DeltaNet layer: convolution, SiLU, norms of query and key, decay, correction, answer, output norm and gate, and the copies
// for the next product. Rows of the (transposed) state are independent: a block holds 32 rows of a value head in registers, eight lanes
// per row. A single token takes one launch, `delta_*`. For several, `delta_inputs_*` computes everything independent of the state, for
// all tokens at once, `delta_chunk_*` iterates over the tokens, and `delta_results_*` computes their results. Both paths call the same
// functions, so their results are bit-identical.
#include "copies.cuh"

#define THREADS 128
#define ROWS 32                // per block
#define TOGETHER 8             // tokens copied to shared memory at once
#define TILE 16                // tokens per block of `delta_inputs_*`; at least TAPS_MAX - 1
#define TAPS_MAX 16

struct Delta {
  const float* mixed; const float* gate; const float* alpha; const float* beta;       // projected
  const float* taps; const float* decay_bias; const float* decay; const float* norm;
  float* state; float* history;                        // history: the last inputs of the convolution, oldest first
  // The rule's inputs in the order of `mixed`; answers overwrite the values. Until it contains a token's copies, `to` stores the decay,
  // the strength, and the product of key and query of each value head.
  float* made; Copies to;
  uint32_t* counters;                                  // one per key head, then one per 256 results; zero before and after a launch
  uint32_t key_heads, value_heads, taps_count, tokens, mixed_stride, gate_stride, alpha_stride, beta_stride; float epsilon; uint32_t unused;
};

template <int N> DEVICE void load_floats(const float* p, float (&v)[N]) {
  if (N == 1) v[0] = *p;
  else if (N == 2) { const uint2 b = load8(p); v[0] = as_float(b.x); v[N > 1] = as_float(b.y); }
  else {
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) { const uint4 b = load16(p + i); v[i] = as_float(b.x); v[i + 1] = as_float(b.y); v[i + 2] = as_float(b.z); v[i + 3] = as_float(b.w); }
  }
}
template <int N> DEVICE void store_floats(float* p, const float (&v)[N]) {
  if (N == 1) *p = v[0];
  else if (N == 2) store8(p, make_uint2(as_bits(v[0]), as_bits(v[N > 1])));
  else {
#pragma unroll
    for (int i = 0; i + 3 < N; i += 4) store16(p + i, make_uint4(as_bits(v[i]), as_bits(v[i + 1]), as_bits(v[i + 2]), as_bits(v[i + 3])));
  }
}
DEVICE uint32_t channels_of(const Delta& job, uint32_t dim) { return (2u * job.key_heads + job.value_heads) * dim; }
// Row `at` of the history followed by the chunk.
DEVICE const float* input_of(const Delta& job, uint32_t at, uint32_t channels) {
  return at + 1u < job.taps_count ? job.history + (size_t)at * channels : job.mixed + (size_t)(at + 1u - job.taps_count) * job.mixed_stride;
}
// Writes the history of N channels after the chunk, except channels owned by other threads. In order of time, four inputs at once: each
// input read is later than those written, or part of the chunk.
template <int N> DEVICE void remember(const Delta& job, const uint32_t (&channel)[N], const bool (&ours)[N], uint32_t channels) {
  for (uint32_t first = 0; first + 1u < job.taps_count; first += 4u) {
    float x[4][N] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++)
#pragma unroll
      for (int e = 0; e < N; e++) if (ours[e] && first + i + 1u < job.taps_count) x[i][e] = input_of(job, job.tokens + first + i, channels)[channel[e]];
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++)
#pragma unroll
      for (int e = 0; e < N; e++) if (ours[e] && first + i + 1u < job.taps_count) job.history[(size_t)(first + i) * channels + channel[e]] = x[i][e];
  }
}
// Normalisation factors of a warp's query and key, and the product of the normalised two; each lane holds some elements of both.
template <int D> DEVICE void lengths(const Delta& job, const float (&q)[D / 32], const float (&k)[D / 32], float& of_q, float& of_k, float& both) {
  float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
  for (int e = 0; e < D / 32; e++) { qq = fmaf(q[e], q[e], qq); kk = fmaf(k[e], k[e], kk); qk = fmaf(q[e], k[e], qk); }
#pragma unroll
  for (int m = 16; m > 0; m >>= 1) { qq += __shfl_xor_sync(ALL, qq, m); kk += __shfl_xor_sync(ALL, kk, m); qk += __shfl_xor_sync(ALL, qk, m); }
  // Odd lanes compute the factor of the key.
  const bool odd = threadIdx.x & 1u;
  const float length = 1.0f / sqrtf((odd ? kk : qq) + job.epsilon), other = __shfl_xor_sync(ALL, length, 1);
  of_q = (odd ? other : length) * (1.0f / sqrtf((float)D)); of_k = odd ? length : other;
  both = qk * of_q * of_k;
}
// Decay and strength of a head.
struct Pace {
  float alpha, bias, rate, beta;
  DEVICE Pace(const Delta& job, uint32_t n, uint32_t head)
    : alpha(job.alpha[(size_t)n * job.alpha_stride + head]), bias(job.decay_bias[head]), rate(job.decay[head]), beta(job.beta[(size_t)n * job.beta_stride + head]) {}
  DEVICE float decay() const { return exp_of(rate * softplus_of(alpha + bias)); }
  DEVICE float strength() const { return sigmoid_of(beta); }
};
// `silu_of` of each. A division may branch, so independent exponentials are computed before it.
template <int N> DEVICE void silus(float (&v)[N]) {
  float below[N];
#pragma unroll
  for (int i = 0; i < N; i++) below[i] = 1.0f + exp_of(-v[i]);
#pragma unroll
  for (int i = 0; i < N; i++) v[i] = v[i] / below[i];
}
// Inputs of the rule for N channels: sums of `count` taps in order, then the activation. Loads of four taps are issued together.
template <int N, class Inputs, class Taps> DEVICE void convolve(uint32_t count, const Inputs& inputs, const Taps& taps, float (&sums)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) sums[e] = 0.0f;
  for (uint32_t first = 0; first < count; first += 4u) {
    float x[4][N] = {}, w[4][N] = {};
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++) if (first + i < count) { inputs(first + i, x[i]); taps(first + i, w[i]); }
#pragma unroll
    for (uint32_t i = 0; i < 4u; i++)
#pragma unroll
      for (int e = 0; e < N; e++) sums[e] = first + i < count ? fmaf(x[i][e], w[i][e], sums[e]) : sums[e];
  }
  silus(sums);
}

// Rows of a block: two per eight lanes; each lane holds four of every 32 columns.
template <int D> struct Rows {
  uint32_t head, key_head, first;                      // first: the first of this thread's two rows
  int column;
  float s[2][D / 8];
  // The grid iterates over rows, heads with the same key, and keys, so that blocks with the same inputs are neighbours.
  DEVICE Rows(const Delta& job) {
    const uint32_t lane = threadIdx.x & 31u;
    key_head = blockIdx.z; head = key_head + blockIdx.y * job.key_heads;
    first = blockIdx.x * ROWS + threadIdx.x / 32u * 8u + lane / 8u * 2u;
    column = (int)(lane & 7u) * 4;
  }
  // This lane's columns of a vector.
  DEVICE void columns(const float* p, float (&v)[D / 8]) const {
#pragma unroll
    for (int c = 0; c < D / 8; c += 4) { const uint4 b = load16(p + c * 8 + column); v[c] = as_float(b.x); v[c + 1] = as_float(b.y); v[c + 2] = as_float(b.z); v[c + 3] = as_float(b.w); }
  }
  DEVICE float* row(const Delta& job, int r) const { return job.state + ((size_t)head * D + first + r) * D; }
  DEVICE void load(const Delta& job) {
#pragma unroll
    for (int r = 0; r < 2; r++) columns(row(job, r), s[r]);
  }
  DEVICE void store(const Delta& job) const {
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int c = 0; c < D / 8; c += 4) store16(row(job, r) + c * 8 + column, make_uint4(as_bits(s[r][c]), as_bits(s[r][c + 1]), as_bits(s[r][c + 2]), as_bits(s[r][c + 3])));
  }
  // Processes a token. The answer is computed from the old state together with the prediction, then corrected: one exchange between lanes.
  DEVICE void step(const float (&q)[D / 8], const float (&k)[D / 8], const float (&v)[2], float decay, float strength, float both, float (&answer)[2]) {
    float known[2] = {0.0f, 0.0f}, asked[2] = {0.0f, 0.0f};
#pragma unroll
    for (int c = 0; c < D / 8; c++)
#pragma unroll
      for (int r = 0; r < 2; r++) { known[r] = fmaf(s[r][c], k[c], known[r]); asked[r] = fmaf(s[r][c], q[c], asked[r]); }
    // Overlaps with the exchange of sums.
#pragma unroll
    for (int c = 0; c < D / 8; c++)
#pragma unroll
      for (int r = 0; r < 2; r++) s[r][c] *= decay;
#pragma unroll
    for (int m = 4; m > 0; m >>= 1)
#pragma unroll
      for (int r = 0; r < 2; r++) { known[r] += __shfl_xor_sync(ALL, known[r], m); asked[r] += __shfl_xor_sync(ALL, asked[r], m); }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float change = strength * (v[r] - known[r] * decay);
      answer[r] = fmaf(change, both, asked[r] * decay);
#pragma unroll
      for (int c = 0; c < D / 8; c++) s[r][c] = fmaf(k[c], change, s[r][c]);
    }
  }
};

// Eight results per lane, 256 of a token per warp, from its answers: norm, gates and copies.
DEVICE bool has_results(const Delta& job, uint32_t chunk) { return chunk * 256u + (threadIdx.x & 31u) * 8u < job.to.columns; }
template <int D> DEVICE void load_gates(const Delta& job, uint32_t n, uint32_t chunk, float (&gates)[8], float (&norms)[8]) {
  const uint32_t at = chunk * 256u + (threadIdx.x & 31u) * 8u;
#pragma unroll
  for (int i = 0; i < 8; i++) gates[i] = norms[i] = 0.0f;
  if (has_results(job, chunk)) { load_floats<8>(job.gate + (size_t)n * job.gate_stride + at, gates); load_floats<8>(job.norm + at % D, norms); }
}
DEVICE void open_gates(float (&gates)[8], const float (&norms)[8]) {
  silus(gates);
#pragma unroll
  for (int i = 0; i < 8; i++) gates[i] *= norms[i];
}
template <int D> DEVICE void put_results(const Delta& job, uint32_t n, uint32_t chunk, const float (&answers)[8], const float (&gates)[8]) {
  float squares = 0.0f, v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) squares = fmaf(answers[i], answers[i], squares);
#pragma unroll
  for (int m = D / 16; m > 0; m >>= 1) squares += __shfl_xor_sync(ALL, squares, m);
  const float factor = 1.0f / sqrtf(squares / (float)D + job.epsilon);
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = answers[i] * factor * gates[i];
  put_copies(job.to, n, chunk, v);
}

// A single token. Loads from memory are issued first.
template <int D> DEVICE void delta(const Delta& job, float* made, float* scalars, uint32_t* slots) {
  constexpr uint32_t COUNT = 2 * D + ROWS, OTHERS = THREADS - 32, EACH = (COUNT + OTHERS - 1) / OTHERS;
  const uint32_t t = threadIdx.x, lane = t & 31u, channels = channels_of(job, D);
  const bool last_warp = t >= OTHERS;
  Rows<D> rows(job);
  rows.load(job);
  const uint32_t values = (2u * job.key_heads + rows.head) * D, block_row = blockIdx.x * ROWS;
  auto channel_of = [&](uint32_t i) {                  // channel of element i of query, key and this block's values
    return i < D ? rows.key_head * D + i : i < 2u * D ? (job.key_heads + rows.key_head) * D + i - D : values + block_row + i - 2u * D;
  };
  const uint32_t chunk = rows.head * D / 256u;
  float gates[8], norms[8];
  uint32_t channel[EACH] = {};
  if (last_warp) {
    const Pace pace(job, 0, rows.head);
    load_gates<D>(job, 0, chunk, gates, norms);
    const float decay = pace.decay(), strength = pace.strength();
    if (lane == 0u) { scalars[0] = decay; scalars[1] = strength; }
  } else {
    float sums[EACH];
#pragma unroll
    for (uint32_t e = 0; e < EACH; e++) channel[e] = channel_of(min(t + e * OTHERS, COUNT - 1u));
    auto inputs = [&](uint32_t tap, float (&x)[EACH]) {
      const float* row = input_of(job, tap, channels);
#pragma unroll
      for (uint32_t e = 0; e < EACH; e++) x[e] = row[channel[e]];
    };
    auto taps = [&](uint32_t tap, float (&w)[EACH]) {
#pragma unroll
      for (uint32_t e = 0; e < EACH; e++) w[e] = job.taps[(size_t)channel[e] * job.taps_count + tap];
    };
    convolve<EACH>(job.taps_count, inputs, taps, sums);
#pragma unroll
    for (uint32_t e = 0; e < EACH; e++) if (t + e * OTHERS < COUNT) made[t + e * OTHERS] = sums[e];
  }
  if (!PLANTED(NO_CONVOLUTION_BARRIER)) __syncthreads();
  // Each warp computes the norms itself.
  float some_q[D / 32], some_k[D / 32], of_q, of_k, both, q[D / 8], k[D / 8], v[2], answer[2];
  load_floats<D / 32>(made + lane * (D / 32), some_q); load_floats<D / 32>(made + D + lane * (D / 32), some_k);
  rows.columns(made, q); rows.columns(made + D, k); load_floats<2>(made + 2 * D + rows.first - block_row, v);
  lengths<D>(job, some_q, some_k, of_q, of_k, both);
#pragma unroll
  for (int c = 0; c < D / 8; c++) { q[c] *= of_q; k[c] *= of_k; }
  rows.step(q, k, v, scalars[0], scalars[1], both, answer);
  if (rows.column == 0) store_floats<2>(job.made + values + rows.first, answer);
  // The last block of a key head writes the history, after all of them have read it; the last block of 256 results writes the copies.
  // Both are determined in one round, while the state is being stored.
  __syncthreads();
  if (t == 0u) {
    if (!PLANTED(NO_ANSWER_FENCE)) fence();
    uint32_t *of_key = job.counters + rows.key_head, *of_chunk = job.counters + job.key_heads + chunk;
    const uint32_t blocks = gridDim.y * gridDim.x, heads = min(256u / D, job.value_heads - chunk * 256u / D) * gridDim.x;
    const bool history = atomic_add(of_key, 1u) == blocks - 1u, copies = atomic_add(of_chunk, 1u) == heads - 1u;
    slots[0] = history; slots[1] = copies;
    fence();
    if (history) atomic_add(of_key, 0u - blocks);      // reset for the next launch
    if (copies) atomic_add(of_chunk, 0u - heads);
  }
  rows.store(job);
  if (last_warp) open_gates(gates, norms);
  __syncthreads();
  if (last_warp) {
    if (slots[1] == 0u) return;
    float answers[8];
#pragma unroll
    for (int i = 0; i < 8; i++) answers[i] = has_results(job, chunk) ? load_shared_by_blocks(job.made + 2u * job.key_heads * D + chunk * 256u + lane * 8u + i) : 0.0f;
    put_results<D>(job, 0, chunk, answers, gates);
    return;
  }
  const bool last = slots[0] != 0u || PLANTED(HISTORY_TOO_EARLY);
  bool ours[EACH];
#pragma unroll
  for (uint32_t e = 0; e < EACH; e++) ours[e] = t + e * OTHERS < COUNT && (last || t + e * OTHERS >= 2u * D);
  remember<EACH>(job, channel, ours, channels);
}

// Inputs of the rule for each token: normalised queries and keys, values, and scalars. A block computes query and key of a head, or its
// value, for some tokens; a warp computes one token at a time.
template <int D> DEVICE void delta_inputs(const Delta& job, float (*taps)[2 * D + 8]) {
  constexpr int EACH = D / 32;
  const uint32_t t = threadIdx.x, lane = t & 31u, unit = blockIdx.x, channels = channels_of(job, D);
  const bool is_key = unit < job.key_heads;
  const uint32_t wide = is_key ? 2u * D : (uint32_t)D, second = (job.key_heads + unit) * D;     // second: first channel of the key, or of the value
  auto channel_of = [&](uint32_t i) { return !is_key ? second + i : i < D ? unit * D + i : second + i - D; };
  for (uint32_t i = t; i < wide; i += THREADS)
    for (uint32_t tap = 0; tap < job.taps_count; tap++) taps[tap][i] = job.taps[(size_t)channel_of(i) * job.taps_count + tap];
  __syncthreads();
  // This lane's share of D channels from `channel` on, with their taps from index `i` on.
  auto one = [&](uint32_t n, uint32_t channel, uint32_t i, float (&sums)[EACH]) {
    auto inputs = [&](uint32_t tap, float (&x)[EACH]) { load_floats<EACH>(input_of(job, n + tap, channels) + channel + lane * EACH, x); };
    auto those = [&](uint32_t tap, float (&w)[EACH]) { load_floats<EACH>(taps[tap] + i + lane * EACH, w); };
    convolve<EACH>(job.taps_count, inputs, those, sums);
  };
  for (uint32_t n = blockIdx.y * TILE + t / 32u; n < min(job.tokens, (blockIdx.y + 1u) * TILE); n += THREADS / 32) {
    float* made = job.made + (size_t)n * channels + lane * EACH;
    float q[EACH], k[EACH], of_q, of_k, both;
    one(n, second, is_key ? D : 0u, k);
    if (is_key) {
      one(n, unit * D, 0u, q);
      lengths<D>(job, q, k, of_q, of_k, both);
#pragma unroll
      for (int e = 0; e < EACH; e++) { q[e] *= of_q; k[e] *= of_k; }
      store_floats<EACH>(made + unit * D, q);
      for (uint32_t head = unit + lane * job.key_heads; head < job.value_heads; head += 32u * job.key_heads) {
        const Pace pace(job, n, head);
        store16(job.to.base + (size_t)n * job.to.stride + head * 16u, make_uint4(as_bits(pace.decay()), as_bits(pace.strength()), as_bits(both), 0u));
      }
    }
    store_floats<EACH>(made + second, k);
  }
  // Only this block reads the history of its channels.
  if (blockIdx.y != 0u) return;
  if (!PLANTED(NO_HISTORY_BARRIER)) __syncthreads();
  constexpr int PARTS = (2 * D + THREADS - 1) / THREADS;
  uint32_t channel[PARTS];
  bool ours[PARTS];
#pragma unroll
  for (int e = 0; e < PARTS; e++) { const uint32_t i = t + e * THREADS; ours[e] = i < wide; channel[e] = ours[e] ? channel_of(i) : 0u; }
  remember<PARTS>(job, channel, ours, channels);
}

// The recurrence only.
template <int D> DEVICE void delta_chunk(const Delta& job, uint4 (*ring)[TOGETHER][(2 * D + ROWS + 4) / 4]) {
  const uint32_t t = threadIdx.x, channels = channels_of(job, D);
  Rows<D> rows(job);
  rows.load(job);
  const uint32_t block_row = blockIdx.x * ROWS;
  float* values = job.made + (2u * job.key_heads + rows.head) * D + block_row;
  // Pieces of 16 bytes: D / 2 for query and key, ROWS / 4 for values, and one for the scalars.
  const uint32_t piece = t % (D / 2u), at = t / (D / 2u);
  const float* vectors = job.made + (piece < D / 4u ? rows.key_head * D : (job.key_heads + rows.key_head - 1u) * D) + piece * 4u;
  auto bring = [&](uint32_t first, uint32_t stage) {
#pragma unroll
    for (uint32_t i = 0; i < TOGETHER; i += 256u / D)
      if (first + at + i < job.tokens) copy16_async(shared_of(&ring[stage][at + i][piece]), vectors + (size_t)(first + at + i) * channels);
    if (t < TOGETHER * 8u && first + t / 8u < job.tokens) copy16_async(shared_of(&ring[stage][t / 8u][D / 2 + t % 8u]), values + (size_t)(first + t / 8u) * channels + t % 8u * 4u);
    if (t / 8u == TOGETHER && first + t % 8u < job.tokens) copy16_async(shared_of(&ring[stage][t % 8u][D / 2 + ROWS / 4]), job.to.base + (size_t)(first + t % 8u) * job.to.stride + rows.head * 16u);
    copies_commit();
  };
  float* answers = values + rows.first - block_row;
  bring(0, 0);
  for (uint32_t first = 0; first < job.tokens; first += TOGETHER) {
    const uint32_t stage = first / TOGETHER & 1u, count = min(job.tokens - first, (uint32_t)TOGETHER);
    copies_wait<0>();
    if (!PLANTED(NO_STAGE_BARRIER)) __syncthreads();
    if (first + TOGETHER < job.tokens) bring(first + TOGETHER, stage ^ 1u);
    // The next token is read before the current one is computed.
    float q[2][D / 8], k[2][D / 8], v[2][2], scalars[2][4], answer[2];
    auto read = [&](uint32_t n, float (&q)[D / 8], float (&k)[D / 8], float (&v)[2], float (&scalars)[4]) {
      const float* token = (const float*)ring[stage][min(n, count - 1u)];
      rows.columns(token, q); rows.columns(token + D, k);
      load_floats<2>(token + 2 * D + rows.first - block_row, v); load_floats<4>(token + 2 * D + ROWS, scalars);
    };
    read(0, q[0], k[0], v[0], scalars[0]);
    auto compute = [&](uint32_t n, int i) {
      read(n + 1u, q[i ^ 1], k[i ^ 1], v[i ^ 1], scalars[i ^ 1]);
      rows.step(q[i], k[i], v[i], scalars[i][0], scalars[i][1], scalars[i][2], answer);
      if (rows.column == 0) store_floats<2>(answers, answer);
      answers += channels;
    };
    for (uint32_t n = 0; n + 1u < count; n += 2) { compute(n, 0); compute(n + 1u, 1); }
    if (count % 2u != 0u) compute(count - 1u, 0);
  }
  rows.store(job);
}

template <int D> DEVICE void delta_results(const Delta& job) {
  const uint32_t chunk = blockIdx.x, n = blockIdx.y * (THREADS / 32) + threadIdx.x / 32u;
  if (n >= job.tokens) return;
  float answers[8], gates[8], norms[8];
#pragma unroll
  for (int i = 0; i < 8; i++) answers[i] = 0.0f;
  if (has_results(job, chunk)) load_floats<8>(job.made + (size_t)n * channels_of(job, D) + 2u * job.key_heads * D + chunk * 256u + (threadIdx.x & 31u) * 8u, answers);
  load_gates<D>(job, n, chunk, gates, norms);
  open_gates(gates, norms);
  put_results<D>(job, n, chunk, answers, gates);
}

#define DELTA(D) extern "C" __global__ void __launch_bounds__(THREADS, 4) delta_##D(const Delta job) { \
  __shared__ uint4 made[(2 * D + ROWS) / 4]; __shared__ float scalars[2]; __shared__ uint32_t slots[2]; \
  delta<D>(job, (float*)made, scalars, slots); } SIMT_EXPORT(delta_##D) \
extern "C" __global__ void __launch_bounds__(THREADS) delta_inputs_##D(const Delta job) { \
  __shared__ uint4 taps[TAPS_MAX * (2 * D + 8) / 4]; delta_inputs<D>(job, (float (*)[2 * D + 8])taps); } SIMT_EXPORT(delta_inputs_##D) \
extern "C" __global__ void __launch_bounds__(THREADS, 4) delta_chunk_##D(const Delta job) { \
  __shared__ uint4 ring[2][TOGETHER][(2 * D + ROWS + 4) / 4]; delta_chunk<D>(job, ring); } SIMT_EXPORT(delta_chunk_##D) \
extern "C" __global__ void __launch_bounds__(THREADS) delta_results_##D(const Delta job) { delta_results<D>(job); } SIMT_EXPORT(delta_results_##D)
DELTA(32) DELTA(64) DELTA(128)
#undef THREADS
#undef ROWS
#undef TOGETHER
#undef TILE
#undef TAPS_MAX
#undef DELTA
