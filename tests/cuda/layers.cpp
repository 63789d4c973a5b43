// Embeddings, norms, head norms with rotation and the KV cache, its conversion, and the end of the head.
#include "tests.h"
#include "cells.h"

struct Embed { const uint64_t* parts; uint64_t offset; const uint32_t* tokens; float* stream; float scale; uint32_t part, type, width, row_bytes, unused; };
struct Norm { float* stream; const float* other; const float* post; const float* weight; Copies to; uint32_t stride; float scale, epsilon; uint32_t unused; };
struct Heads {
  const float *query, *key, *value, *query_norm, *key_norm, *angles, *back, *growth; float *out, *out_back;
  const uint64_t* blocks; const uint32_t* position; uint32_t* not_finite; uint64_t key_offset, value_offset;
  uint32_t heads, kv_heads, dim, rotary, query_stride, kv_stride, head_step, adjacent, kind, unused; float epsilon, spare;
};
struct Range { uint32_t from, to; };
struct Finish { float* logits; const Range* ranges; uint32_t *partial, *counter, *result; uint32_t ranges_count, vocabulary; float scale, cap; };

static void embeddings() {
  for (auto& type : TYPES) {
    rng.seed(20);
    const int width = type.block == 256 ? 512 : 352, rows = 7;
    const std::vector<uint8_t> w = random_weights(type, rows * width);
    const std::vector<double> v = widened(type, w, rows * width);
    const std::vector<uint32_t> tokens{6, 0, 3};
    const uint32_t row_bytes = width / type.block * type.bytes;
    for (bool listed : {true, false}) {
      UPLOAD(weights, w); UPLOAD(t, tokens);
      Buffer out(3 * width * 4);
      std::vector<uint64_t> at{(uint64_t)weights.p}; UPLOAD(parts, at);
      run("embed", (width + 1023) / 1024, 3, 1, 128, 0, Embed{parts.as<uint64_t>(), 0, listed ? t.as<uint32_t>() : nullptr, out.as<float>(), 1.5f, 0, (uint32_t)type.number, (uint32_t)width, row_bytes, 0});
      double worst = 0;
      for (int n = 0; n < 3; n++) for (int i = 0; i < width; i++) {
        const double want = v[(listed ? tokens[n] : n) * width + i] * 1.5;
        // Two terms if a type has a minimum: at most 4 in these blocks.
        most(worst, std::fabs(out.as<float>()[n * width + i] - want) / (std::fabs(want) + (type.block > 1 ? 1.0 : 0.0) + 1e-30));
      }
      expect(worst <= 1e-6, std::string("embedding of ") + type.name, worst, listed ? 1e-6 : 0);
    }
  }
}

static void norms() {
  for (int width : {2560, 96, 9216, 1003}) for (int kind = 0; kind < 4; kind++) {
    if (width % 8 && kind != 3) continue;                                  // such rows are added to alone
    const int rows = 3, formats = width % 256 ? FORMAT_F32 | FORMAT_Q8_0 : 31;
    const uint32_t stride = copies_stride(width, formats);
    const bool added = kind > 0, post = kind > 1, last = kind == 3;        // last: no norm behind the addition
    std::vector<uint8_t> first; Floats first_stream;
    for (uint64_t order = 0; order < 5; order++) {
      rng.seed(21);
      simt_order(order);
      const Floats s = numbers(width * rows, -3, 3), o = numbers((width + 8) * rows, -1, 1), w = numbers(width, 0.5, 1.5), p = numbers(width, 0.5, 1.5);
      UPLOAD(bs, s); UPLOAD(bo, o); UPLOAD(bw, w); UPLOAD(bp, p);
      Buffer to(rows * stride);
      run("residual_norm", rows, 1, 1, 512, 0, Norm{bs.as<float>(), added ? bo.as<float>() : nullptr, post ? bp.as<float>() : nullptr, last ? nullptr : bw.as<float>(),
        {to.as<uint8_t>(), (uint32_t)formats, (uint32_t)width, stride, 0}, (uint32_t)width + 8, 0.75f, 1e-6f, 0});
      const Floats stream = bs.read<float>(); std::vector<uint8_t> made = to.read<uint8_t>();
      if (order == 0) {
        double worst = 0; Floats values;
        for (int r = 0; r < rows; r++) {
          double squares = 0, sum = 0;
          for (int i = 0; i < width; i++) squares += (double)o[r * (width + 8) + i] * o[r * (width + 8) + i];
          std::vector<double> v(width), size(width);
          for (int i = 0; i < width; i++) {
            double other = added ? o[r * (width + 8) + i] : 0;
            if (post) other = other / std::sqrt(squares / width + 1e-6) * p[i];
            v[i] = s[r * width + i] + other * 0.75; size[i] = std::fabs(s[r * width + i]) + std::fabs(other * 0.75); sum += v[i] * v[i];
            most(worst, std::fabs(stream[r * width + i] - v[i]) / size[i]);
          }
          if (!last) for (int i = 0; i < width; i++) {
            const double factor = w[i] / std::sqrt(sum / width + 1e-6);
            float got; memcpy(&got, &made[r * stride + i * 4], 4); values.push_back(got);
            most(worst, std::fabs(got - v[i] * factor) / (size[i] * factor));
          }
        }
        expect(worst <= 1e-6, "norm of " + std::to_string(width) + ", kind " + std::to_string(kind), worst, 1e-6);
        if (!last) expect(different(all_copies(values, width, formats), made.data()) == 0, "copies of a norm are those of the CPU backend's rule");
        first = made; first_stream = stream;
      }
      expect(same(first, made) && same(first_stream, stream), "norm: the same bits in any order");
    }
  }
  simt_order(0);
}

static void head_norms(bool all) {
  for (int kind = 0; kind < 3; kind++) for (int dim : {64, 80, 256}) {
    if (!all && (dim != 80 || kind != 1)) continue;
    const int H = 5, KV = 2, T = 4, rotary = dim == 80 ? 48 : dim, position = 62, layers = 2, layer = 1;     // over the border of a block
    const bool adjacent = dim == 64, normed = dim != 64, gap = dim == 256, grown = dim == 80;
    const uint32_t row = cell_row_bytes(kind, dim), block_bytes = layers * 2 * KV * 64 * row, step = 2 * dim;
    std::vector<uint8_t> first; Floats first_out;
    for (uint64_t order = 0; order < (all ? 5 : 1); order++) {
      rng.seed(22); simt_order(order);
      const Floats q = numbers(T * H * step, -2, 2), k = numbers(T * KV * dim, -2, 2), v = numbers(T * KV * dim, -2, 2), qn = numbers(dim, 0.5, 1.5), kn = numbers(dim, 0.5, 1.5), growth = numbers(T, 1, 2);
      Floats angles, back;
      for (int i = 0; i < T * rotary / 2; i++) { const float a = uniform(0, 6); angles.push_back(std::cos(a)); angles.push_back(std::sin(a)); }
      for (int i = 0; i < rotary / 2; i++) { const float a = uniform(0, 6); back.push_back(std::cos(a)); back.push_back(std::sin(a)); }
      UPLOAD(bq, q); UPLOAD(bk, k); UPLOAD(bv, v); UPLOAD(bqn, qn); UPLOAD(bkn, kn); UPLOAD(ba, angles); UPLOAD(bb, back); UPLOAD(bg, growth);
      std::vector<uint8_t> old(2 * block_bytes, 0xee); UPLOAD(cache, old);
      std::vector<uint64_t> table{(uint64_t)cache.p + block_bytes, (uint64_t)cache.p}; UPLOAD(blocks, table);
      std::vector<uint32_t> at{(uint32_t)position}, zero{0}; UPLOAD(bp, at); UPLOAD(flag, zero);
      Buffer out(T * H * dim * 4), out_back(T * H * dim * 4);
      const uint64_t key_offset = layer * 2 * KV * 64 * row, value_offset = key_offset + KV * 64 * row;
      run("heads", (H + 2 * KV + 3) / 4, T, 1, 128, 0, Heads{bq.as<float>(), bk.as<float>(), bv.as<float>(), normed ? bqn.as<float>() : nullptr, normed ? bkn.as<float>() : nullptr, ba.as<float>(), gap ? bb.as<float>() : nullptr, grown ? bg.as<float>() : nullptr,
        out.as<float>(), out_back.as<float>(), blocks.as<uint64_t>(), bp.as<uint32_t>(), flag.as<uint32_t>(), key_offset, value_offset,
        H, KV, (uint32_t)dim, (uint32_t)rotary, H * step, (uint32_t)(KV * dim), step, adjacent, (uint32_t)kind, 0, 1e-6f, 0});
      const std::vector<uint8_t> stored = cache.read<uint8_t>(); const Floats turned = out.read<float>();
      if (order == 0) {
        auto turn = [&](std::vector<double> h, const float* a) {
          for (int p = 0; p < rotary / 2; p++) { const int i = adjacent ? 2 * p : p, j = adjacent ? 2 * p + 1 : p + rotary / 2; const double x = h[i], y = h[j]; h[i] = x * a[2 * p] - y * a[2 * p + 1]; h[j] = x * a[2 * p + 1] + y * a[2 * p]; }
          return h;
        };
        auto ready = [&](const float* x, const Floats* weight, int t) {
          std::vector<double> h(x, x + dim); double s = 0;
          for (double d : h) s += d * d;
          if (weight) for (int i = 0; i < dim; i++) h[i] *= (*weight)[i] / std::sqrt(s / dim + 1e-6);
          return turn(h, &angles[t * rotary]);
        };
        double worst = 0, size = 0; int wrong = 0, touched = 0;
        std::vector<uint8_t> expected = old;
        for (int t = 0; t < T; t++) {
          for (int h = 0; h < H; h++) {
            Floats x(&q[(t * H + h) * step], &q[(t * H + h) * step] + dim); if (grown) for (auto& f : x) f *= growth[t];
            const std::vector<double> want = ready(x.data(), normed ? &qn : nullptr, t), turned_back = turn(want, back.data());
            for (int i = 0; i < dim; i++) {
              size = 6; most(worst, std::fabs(turned[(t * H + h) * dim + i] - want[i]) / size);
              if (gap) most(worst, std::fabs(out_back.as<float>()[(t * H + h) * dim + i] - turned_back[i]) / size);
            }
          }
          for (int h = 0; h < KV; h++) for (int part = 0; part < 2; part++) {
            const int place = position + t; uint8_t* to = &expected[(place / 64 == 0 ? block_bytes : 0) + (part ? value_offset : key_offset) + (h * 64 + place % 64) * row];
            const uint8_t* got = &stored[to - expected.data()];
            const std::vector<double> want = part ? std::vector<double>(&v[(t * KV + h) * dim], &v[(t * KV + h) * dim] + dim) : ready(&k[(t * KV + h) * dim], normed ? &kn : nullptr, t);
            // Values are stored unchanged, byte for byte; keys within half a step.
            Floats exact(want.begin(), want.end()); std::vector<uint8_t> bytes = store_cells(kind, exact.data(), dim);
            if (part) wrong += memcmp(bytes.data(), got, row) != 0;
            else for (int i = 0; i < dim; i++) wrong += std::fabs(load_cell(kind, got, i, dim) - want[i]) > cell_step(kind, bytes.data(), i, dim);
            memcpy(to, got, row);
          }
        }
        touched = memcmp(expected.data(), stored.data(), stored.size()) != 0;
        expect(worst <= 1e-6, "heads of " + std::to_string(dim) + ", kind " + std::to_string(kind), worst, 1e-6);
        expect(wrong == 0, "keys and values in the cache, kind " + std::to_string(kind)); expect(!touched, "nothing else of the cache is written");
        expect(flag.as<uint32_t>()[0] == 0, "finite keys raise no flag");
        first = stored; first_out = turned;
      }
      expect(same(first, stored) && same(first_out, turned), "heads: the same bits in any order");
    }
  }
  simt_order(0);
  if (!all) return;
  for (float wrong : {(float)INFINITY, (float)NAN}) {
    Floats x(3 * 32, 1.0f), v(32, 1.0f); v[7] = wrong; Floats angles(32, 1.0f);
    UPLOAD(bx, x); UPLOAD(bv, v); UPLOAD(ba, angles);
    Buffer cache(2 * 64 * 64), out(32 * 4); std::vector<uint64_t> table{(uint64_t)cache.p}; UPLOAD(blocks, table); std::vector<uint32_t> zero{0}; UPLOAD(at, zero); UPLOAD(flag, zero);
    Heads job{}; job.query = job.key = bx.as<float>(); job.value = bv.as<float>(); job.angles = ba.as<float>(); job.out = out.as<float>(); job.blocks = blocks.as<uint64_t>(); job.position = at.as<uint32_t>();
    job.not_finite = flag.as<uint32_t>(); job.value_offset = 64 * 64; job.heads = job.kv_heads = 1; job.dim = job.rotary = job.query_stride = job.kv_stride = job.head_step = 32; job.epsilon = 1e-6f;
    run("heads", 1, 1, 1, 128, 0, job);
    expect(flag.as<uint32_t>()[0] == 1, "a value that is no finite number raises the flag");
  }
}

static void conversions(bool all) {
  for (int dim : {80, 128}) for (int from = 0; from < 3; from++) for (int to = 0; to < 3; to++) {
    if (from == to || (!all && (from != 1 || to != 0))) continue;
    const int rows = 37; const size_t had = cell_row_bytes(from, dim), has = cell_row_bytes(to, dim);
    for (uint64_t order = 0; order < 3; order++) {
      rng.seed(23); simt_order(order);
      std::vector<uint8_t> old(rows * std::max(had, has), 0), expected;
      for (int r = 0; r < rows; r++) { const Floats x = numbers(dim, -3, 3); const auto one = store_cells(from, x.data(), dim); memcpy(&old[r * had], one.data(), had); }
      for (int r = 0; r < rows; r++) { Floats x; for (int i = 0; i < dim; i++) x.push_back((float)load_cell(from, &old[r * had], i, dim)); const auto one = store_cells(to, x.data(), dim); expected.insert(expected.end(), one.begin(), one.end()); }
      UPLOAD(memory, old);
      // Waves as in the CPU backend: no write overlaps the old place of a row that is still needed.
      auto wave = [&](int first, int end) { run("convert", (end - first + 3) / 4, 1, 1, 128, 0, memory.as<uint8_t>(), (uint64_t)first, (uint32_t)(end - first), (uint32_t)dim, (uint32_t)from, (uint32_t)to); };
      if (has <= had) for (int done = 0; done < rows;) { const int end = std::min(rows, std::max(done + 1, (int)(done * had / has))); wave(done, end); done = end; }
      else for (int left = rows; left > 0;) { const int first = std::min(left - 1, (int)((left * had + has - 1) / has)); wave(first, left); left = first; }
      expect(!memcmp(memory.p, expected.data(), expected.size()), "conversion of " + std::to_string(dim) + " from " + std::to_string(from) + " to " + std::to_string(to));
    }
  }
  simt_order(0);
}

static void ends() {
  const uint32_t vocabulary = 5000;
  for (float cap : {0.0f, 30.0f}) for (int odd = 0; odd < 2; odd++) for (uint64_t order = 0; order < 5; order++) {
    rng.seed(24); simt_order(order);
    Floats logits = numbers(vocabulary, -90, 90);
    logits[4000] = logits[3000] = 95; if (odd) logits[17] = NAN;
    const std::vector<Range> ranges = odd ? std::vector<Range>{{0, vocabulary}} : std::vector<Range>{{5, 1200}, {2000, 2001}, {2500, 4990}};
    const uint32_t blocks = (vocabulary + 1023) / 1024;
    UPLOAD(b, logits); UPLOAD(r, ranges); std::vector<uint32_t> zero{0}; UPLOAD(counter, zero); Buffer partial(blocks * 12), result(12);
    run("finish", blocks, 1, 1, 256, 0, Finish{b.as<float>(), r.as<Range>(), partial.as<uint32_t>(), counter.as<uint32_t>(), result.as<uint32_t>(), (uint32_t)ranges.size(), vocabulary, 3.0f, cap});
    double worst = 0; bool left = true;
    for (uint32_t i = 0; i < vocabulary; i++) {
      bool in = false; for (auto& range : ranges) in |= i >= range.from && i < range.to;
      if (!in) { left &= b.as<float>()[i] == logits[i]; continue; }
      if (std::isnan(logits[i])) continue;
      double want = logits[i] / 3.0; if (cap) want = cap * std::tanh(want / cap);
      most(worst, std::fabs(b.as<float>()[i] - want) / std::max(1e-3, std::fabs(want)));
    }
    const uint32_t* got = result.as<uint32_t>();
    expect(worst <= 1e-6 && left, "end of the head, cap " + std::to_string((int)cap), worst, order ? 0 : 1e-6);
    expect(got[0] == 3000 && got[2] == (uint32_t)odd, "the first of the greatest logits, and the flag");
  }
  simt_order(0);
}

void test_layers() { embeddings(); norms(); head_norms(true); conversions(true); ends(); }
void probe_layers() { norms(); head_norms(false); conversions(false); }
