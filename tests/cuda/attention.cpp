// Attention and delta rule.
#include "tests.h"
#include "cells.h"

struct Attend {
  const float *query, *query_back; const uint64_t* blocks; const uint32_t* position; float* partial; uint64_t key_offset, value_offset;
  uint32_t tokens, heads, kv_heads, dim, kind, window, gap_after, run; float scale; uint32_t unused;
};
struct Join { const float *partial, *gate; Copies to; const uint32_t* position; uint32_t heads, dim, groups, gate_stride, gate_step, run; };

struct Context {
  int kind, dim, heads, kv_heads, seen, window, gap; bool gated;
  std::vector<uint8_t> cache; Floats query, back, gate; uint32_t row, block_bytes, key_offset, value_offset; int blocks;
  // Queries of the last `tokens` of `seen` tokens.
  Context(int kind, int dim, int heads, int kv_heads, int seen, int tokens, int window, int gap, bool gated) : kind(kind), dim(dim), heads(heads), kv_heads(kv_heads), seen(seen), window(window), gap(gap), gated(gated) {
    rng.seed(30);
    row = cell_row_bytes(kind, dim); block_bytes = 2 * 2 * kv_heads * 64 * row; key_offset = 2 * kv_heads * 64 * row; value_offset = key_offset + kv_heads * 64 * row;
    blocks = (seen + 63) / 64;
    cache.assign((size_t)blocks * block_bytes, 0);
    for (int b = 0; b < blocks; b++) for (int part = 0; part < 2; part++) for (int h = 0; h < kv_heads; h++) for (int t = 0; t < 64 && b * 64 + t < seen; t++) {
      const auto bytes = store_cells(kind, numbers(dim, -1, 1).data(), dim);
      memcpy(&cache[(size_t)b * block_bytes + (part ? value_offset : key_offset) + (h * 64 + t) * row], bytes.data(), row);
    }
    query = numbers((size_t)tokens * heads * dim, -2, 2); back = numbers((size_t)tokens * heads * dim, -2, 2); gate = numbers((size_t)tokens * heads * 2 * dim, -2, 2);
  }
  double cell(int part, int h, int t, int e) const { return load_cell(kind, &cache[(size_t)(t / 64) * block_bytes + (part ? value_offset : key_offset) + (h * 64 + t % 64) * row], e, dim); }
  // `count` of `tokens` queries from `first` on, in tiles of 16 or 4 rows, and blocks that compute `run` parts, 0: all of them;
  // only the memory that they read exists.
  Floats attend(int tokens, int first, int count, bool many, uint32_t run_of, std::vector<uint8_t>* copies = nullptr) {
    const int columns = heads * dim, formats = columns % 256 ? FORMAT_F32 | FORMAT_Q8_0 : FORMAT_F32 | FORMAT_Q8K | FORMAT_Q8_0;
    const uint32_t stride = copies_stride(columns, formats), position = seen - tokens + first;
    std::vector<Buffer*> memory; std::vector<uint64_t> table(blocks);
    for (int i = 0; i < blocks; i++) {
      const int b = (i * 3 + 1) % blocks, at = blocks % 3 ? b : i;                                    // scattered
      memory.push_back(new Buffer(block_bytes, nullptr, true));
      memcpy(memory.back()->p, &cache[(size_t)at * block_bytes], block_bytes);
      simt_memory_remove(memory.back()->p); simt_memory_add(memory.back()->p, block_bytes, true, true);
      table[at] = (uint64_t)memory.back()->p;
    }
    Floats q(&query[(size_t)first * heads * dim], &query[(size_t)first * heads * dim] + (size_t)count * heads * dim), qb(&back[(size_t)first * heads * dim], &back[(size_t)first * heads * dim] + (size_t)count * heads * dim);
    Floats g(&gate[(size_t)first * heads * 2 * dim], &gate[(size_t)first * heads * 2 * dim] + (size_t)count * heads * 2 * dim);
    UPLOAD(bq, q); UPLOAD(bqb, qb); UPLOAD(bg, g); UPLOAD(bt, table); std::vector<uint32_t> at{position}; UPLOAD(bp, at);
    // A few more blocks than parts.
    const uint32_t groups = run_of ? (position + count + 64 * run_of - 1) / (64 * run_of) + 2 : 1;
    Buffer partial((size_t)count * heads * groups * (dim + 2) * 4), to((size_t)count * stride);
    const unsigned rows = many ? 16 : 4, tiles = (count * (heads / kv_heads) + rows - 1) / rows, shared = (many ? 320 : 256) * (dim > 128 ? 256 : 128) + (many || dim > 128 ? 0 : 16384);
    run(many ? dim > 128 ? "attend_256" : "attend_128" : dim > 128 ? "attend_few_256" : "attend_few_128", kv_heads, tiles, groups, 256, shared, Attend{bq.as<float>(), gap ? bqb.as<float>() : nullptr, bt.as<uint64_t>(), bp.as<uint32_t>(), partial.as<float>(), key_offset, value_offset,
      (uint32_t)count, (uint32_t)heads, (uint32_t)kv_heads, (uint32_t)dim, (uint32_t)kind, (uint32_t)window, (uint32_t)gap, run_of, 0.0625f, 0});
    run("attend_join", groups == 1 ? (columns + 2047) / 2048 : (columns + 255) / 256, count, 1, 256, 0, Join{partial.as<float>(), gated ? bg.as<float>() + dim : nullptr, {to.as<uint8_t>(), (uint32_t)formats, (uint32_t)columns, stride, 0}, bp.as<uint32_t>(), (uint32_t)heads, (uint32_t)dim, groups, (uint32_t)(heads * 2 * dim), 2 * (uint32_t)dim, run_of});
    Floats out;
    for (int n = 0; n < count; n++) { const float* row_of = (const float*)(to.p + (size_t)n * stride); out.insert(out.end(), row_of, row_of + columns); }
    if (copies) expect(different(all_copies(out, columns, formats), to.as<uint8_t>()) == 0, "copies of attention are those of the CPU backend's rule");
    for (Buffer* b : memory) delete b;
    return out;
  }
  double error(int tokens, const Floats& got) const {
    double worst = 0;
    for (int n = 0; n < tokens; n++) for (int h = 0; h < heads; h++) {
      const int end = seen - tokens + n + 1, begin = window ? std::max(0, end - window) : 0, kv = h / (heads / kv_heads);
      std::vector<double> p(end); double top = -1e30, all = 0;
      for (int t = begin; t < end; t++) {
        const Floats& q = t < gap ? back : query;
        p[t] = 0; for (int e = 0; e < dim; e++) p[t] += (double)q[(n * heads + h) * dim + e] * 0.0625 * cell(0, kv, t, e);
        top = std::max(top, p[t]);
      }
      for (int t = begin; t < end; t++) { p[t] = std::exp(p[t] - top); all += p[t]; }
      for (int e = 0; e < dim; e++) {
        double o = 0, size = 0; for (int t = begin; t < end; t++) { const double one = p[t] / all * cell(1, kv, t, e); o += one; size += std::fabs(one); }
        const double factor = gated ? 1 / (1 + std::exp(-(double)gate[(n * heads + h) * 2 * dim + dim + e])) : 1;
        most(worst, std::fabs(o * factor - got[(n * heads + h) * dim + e]) / (size * factor));
      }
    }
    return worst;
  }
};

static void attention(bool all) {
  struct Shape { int kind, dim, heads, kv_heads, seen, tokens, window, gap; bool gated; };
  const Shape shapes[] = {
    {0, 256, 8, 2, 330, 3, 0, 0, true}, {1, 256, 4, 2, 70, 2, 0, 0, false}, {2, 256, 4, 2, 40, 2, 0, 0, true},
    {0, 128, 7, 1, 300, 5, 0, 64, false}, {1, 64, 4, 2, 140, 4, 50, 0, false}, {2, 80, 4, 2, 600, 2, 0, 128, true}, {0, 24, 20, 1, 9, 9, 3, 0, false}, {0, 128, 2, 2, 560, 1, 20, 0, false},
    {1, 256, 4, 2, 1100, 2, 0, 0, true}, {0, 64, 4, 2, 4700, 1, 0, 0, false}, {2, 64, 4, 2, 1300, 3, 700, 640, false},
  };
  for (const Shape& s : shapes) {
    if (!all && !(s.kind == 1 && s.dim == 256)) continue;
    const std::string name = "attention kind " + std::to_string(s.kind) + ", " + std::to_string(s.heads) + "/" + std::to_string(s.kv_heads) + " heads of " + std::to_string(s.dim);
    Context c(s.kind, s.dim, s.heads, s.kv_heads, s.seen, s.tokens, s.window, s.gap, s.gated);
    Floats first; std::vector<uint8_t> copies;
    for (uint64_t order = 0; order < (all ? 5 : 2); order++) {
      simt_order(order);
      const Floats y = c.attend(s.tokens, 0, s.tokens, order % 2, order < 2 ? 1 : order == 4 ? 8 : 0, &copies);
      if (order == 0) { first = y; const double e = c.error(s.tokens, y); expect(e <= 1e-6, name, e, 1e-6); }
      expect(same(first, y), name + ": the same bits in any order, parts beside or behind each other");
    }
    simt_order(0);
    for (int n = 0; n < s.tokens; n++) {
      const Floats one = c.attend(s.tokens, n, 1, n % 2, n % 3 ? n % 3 == 1 ? 8 : 0 : 1);
      expect(same(one, Floats(first.begin() + n * s.heads * s.dim, first.begin() + (n + 1) * s.heads * s.dim)), name + ": the same bits for one token");
    }
    if (all && s.seen > 60) counted(name, 0.95, 3.0, [&] { c.attend(s.tokens, s.tokens - 1, 1, false, 1); });
  }
  if (!all) return;
  Context c(1, 64, 2, 1, 65, 65, 0, 0, false);
  const Floats whole = c.attend(65, 0, 65, true, 0);
  const double e = c.error(65, whole); expect(e <= 1e-6, "attention of 65 tokens", e, 1e-6);
  for (int chunk : {1, 2, 3, 8, 63, 64}) {
    Floats parts;
    for (int n = 0; n < 65; n += chunk) { const Floats some = c.attend(65, n, std::min(chunk, 65 - n), chunk > 3, chunk % 2 ? 0 : 1); parts.insert(parts.end(), some.begin(), some.end()); }
    expect(same(whole, parts), "attention: the same bits in chunks of " + std::to_string(chunk));
  }
}

struct Delta {
  const float *mixed, *gate, *alpha, *beta, *taps, *decay_bias, *decay, *norm; float *state, *history, *out; Copies to; uint32_t* counters;
  uint32_t key_heads, value_heads, taps_count, tokens, mixed_stride, gate_stride, alpha_stride, beta_stride; float epsilon; uint32_t unused;
};
struct Layer {
  int D, KH, VH, taps_count, T, C; Floats mixed, gate, alpha, beta, taps, bias, decay, norm, state, history;
  Layer(int D, int KH, int VH, int taps_count, int T) : D(D), KH(KH), VH(VH), taps_count(taps_count), T(T), C((2 * KH + VH) * D) {
    rng.seed(31);
    mixed = numbers(T * C, -1, 1); gate = numbers(T * VH * D, -1, 1); alpha = numbers(T * VH, -1, 1); beta = numbers(T * VH, -1, 1); taps = numbers(C * taps_count, -1, 1); bias = numbers(VH, -1, 1);
    decay = numbers(VH, -2, -0.2); norm = numbers(D, 0.5, 1.5); state = numbers((size_t)VH * D * D, -1, 1); history = numbers((taps_count - 1) * C, -1, 1);
  }
  // All tokens in chunks: results, then state and history.
  Floats in_chunks(int chunk) {
    const int columns = VH * D, formats = columns % 256 ? FORMAT_F32 | FORMAT_Q8_0 : FORMAT_F32 | FORMAT_Q8K;
    const uint32_t stride = copies_stride(columns, formats), chunks = (columns + 255) / 256;
    const std::string of = std::to_string(D);
    UPLOAD(bm, mixed); UPLOAD(bg, gate); UPLOAD(ba, alpha); UPLOAD(bb, beta); UPLOAD(bt, taps); UPLOAD(bi, bias); UPLOAD(bd, decay); UPLOAD(bn, norm); UPLOAD(bh, history);
    Buffer bs(state.size() * 4, state.data(), true), to(T * stride);
    std::vector<uint32_t> zero(KH + chunks, 0); UPLOAD(counters, zero);
    for (int t = 0; t < T; t += chunk) {
      const uint32_t count = std::min(chunk, T - t);
      Buffer made(count * C * 4);
      const Delta job{bm.as<float>() + t * C, bg.as<float>() + t * columns, ba.as<float>() + t * VH, bb.as<float>() + t * VH, bt.as<float>(), bi.as<float>(), bd.as<float>(), bn.as<float>(), bs.as<float>(), bh.as<float>(), made.as<float>(),
        {to.as<uint8_t>() + t * stride, (uint32_t)formats, (uint32_t)columns, stride, 0}, counters.as<uint32_t>(), (uint32_t)KH, (uint32_t)VH, (uint32_t)taps_count, count, (uint32_t)C, (uint32_t)columns, (uint32_t)VH, (uint32_t)VH, 1e-6f, 0};
      if (count == 1) { run(("delta_" + of).c_str(), D / 32, VH / KH, KH, 128, 0, job); continue; }
      run(("delta_inputs_" + of).c_str(), KH + VH, (count + 15) / 16, 1, 128, 0, job);
      run(("delta_chunk_" + of).c_str(), D / 32, VH / KH, KH, 128, 0, job);
      run(("delta_results_" + of).c_str(), chunks, (count + 3) / 4, 1, 128, 0, job);
    }
    Floats all;
    for (int t = 0; t < T; t++) { const float* row = (const float*)(to.p + (size_t)t * stride); all.insert(all.end(), row, row + columns); }
    expect(same(counters.read<uint32_t>(), zero), "counters of the delta rule are zero again");
    expect(different(all_copies(all, columns, formats), to.as<uint8_t>()) == 0, "copies of the delta rule are those of the CPU backend's rule");
    for (Buffer* b : {&bs, &bh}) { const Floats more = b->read<float>(); all.insert(all.end(), more.begin(), more.end()); }
    return all;
  }
  double error(const Floats& got) const {
    auto silu = [](double x) { return x / (1 + std::exp(-x)); };
    double worst = 0; std::vector<double> S(state.begin(), state.end());
    auto input = [&](int t, int i) { return (double)(t < 0 ? history[(t + taps_count - 1) * C + i] : mixed[t * C + i]); };
    for (int t = 0; t < T; t++) {
      std::vector<double> c(C);
      for (int i = 0; i < C; i++) { double s = 0; for (int k = 0; k < taps_count; k++) s += taps[i * taps_count + k] * input(t - taps_count + 1 + k, i); c[i] = silu(s); }
      for (int h = 0; h < VH; h++) {
        const double *q = &c[h % KH * D], *k = &c[(KH + h % KH) * D], *v = &c[(2 * KH + h) * D]; double qq = 1e-6, kk = 1e-6, oo = 0, sizes = 0; std::vector<double> o(D), size(D);
        for (int i = 0; i < D; i++) { qq += q[i] * q[i]; kk += k[i] * k[i]; }
        const double g = std::exp(decay[h] * std::log1p(std::exp((double)alpha[t * VH + h] + bias[h]))), b = 1 / (1 + std::exp(-(double)beta[t * VH + h]));
        for (int j = 0; j < D; j++) {
          double* row = &S[((size_t)h * D + j) * D], known = 0;
          for (int i = 0; i < D; i++) { row[i] *= g; known += row[i] * k[i] / std::sqrt(kk); }
          const double change = b * (v[j] - known);
          for (int i = 0; i < D; i++) { row[i] += change * k[i] / std::sqrt(kk); const double one = row[i] * q[i] / std::sqrt(qq) / std::sqrt((double)D); o[j] += one; size[j] += std::fabs(one); }
          oo += o[j] * o[j]; sizes += size[j] * size[j];
        }
        for (int j = 0; j < D; j++) {
          const double gates = norm[j] * silu(gate[(t * VH + h) * D + j]), want = o[j] / std::sqrt(oo / D + 1e-6) * gates;
          // The norm divides by the magnitude of all results, and each error includes terms of all of them.
          most(worst, std::fabs(got[(t * VH + h) * D + j] - want) / (std::sqrt(sizes / oo) * (size[j] / std::sqrt(oo / D) + std::fabs(want / gates)) * std::fabs(gates)));
        }
      }
    }
    for (size_t i = 0; i < S.size(); i++) most(worst, std::fabs(got[(size_t)T * VH * D + i] - S[i]) / 4);
    for (int tap = 0; tap + 1 < taps_count; tap++) for (int i = 0; i < C; i++) if (got[(size_t)T * VH * D + S.size() + tap * C + i] != (float)input(T - taps_count + 1 + tap, i)) worst = 1;
    return worst;
  }
};
static void rule(bool all) {
  struct Shape { int D, KH, VH, taps, T; };
  for (const Shape& s : {Shape{128, 2, 4, 4, 6}, Shape{32, 1, 3, 2, 9}, Shape{64, 2, 2, 7, 18}}) {
    if (!all && s.D == 64) continue;
    const std::string name = "delta rule of " + std::to_string(s.D);
    Layer layer(s.D, s.KH, s.VH, s.taps, s.T);
    Floats first;
    for (uint64_t order = 0; order < (all ? 5 : 1); order++) {
      simt_order(order);
      for (int chunk : {s.T, 2, 1}) {
        const Floats y = layer.in_chunks(chunk);
        if (first.empty()) { first = y; const double e = layer.error(y); expect(e <= 1e-6, name, e, 1e-6); }
        expect(same(first, y), name + ": the same bits in any order and chunk");
      }
    }
    simt_order(0);
    if (all) for (int chunk : {1, s.T}) counted(name, 0.95, 1.5, [&] { layer.in_chunks(chunk); });
  }
  if (!all) return;
  Layer longer(32, 1, 1, 4, 65);
  const Floats whole = longer.in_chunks(65);
  const double e = longer.error(whole); expect(e <= 1e-6, "delta rule of 65 tokens", e, 1e-6);
  for (int chunk : {1, 2, 3, 8, 63, 64}) expect(same(whole, longer.in_chunks(chunk)), "delta rule: the same bits in chunks of " + std::to_string(chunk));
}

void test_attention() { attention(true); rule(true); }
void probe_attention() { attention(false); rule(false); }
