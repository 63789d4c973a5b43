// Products of every type: against double-precision sums, in five thread orders, with identical bits for any number of tokens.
#include "tests.h"
#include <memory>
#include "blocks.h"

struct Matrix { uint64_t offset; float* out; const float* bias; uint32_t part, type, rows, stride, first_block, tiles; };
struct Pair { Copies to; uint32_t* counters; uint32_t activation, unused; };
struct Products { const uint64_t* parts; Copies input; Pair pair; uint32_t tokens, matrices; Matrix matrix[8]; };

static unsigned rows_of_block(const std::string& kernel) { return kernel == "product_tiles" ? 64 : kernel == "product_narrow" ? 8 : 32; }
static unsigned tokens_of_block(const std::string& kernel) { return kernel == "product_tiles" ? 32 : kernel == "product_narrow" ? 1 : kernel.back() - '0'; }
// Shared memory as requested by the backend (`narrow_bytes` and `tiles_bytes` of parameters.rs).
static unsigned shared_bytes(const std::string& kernel, const TypeInfo& type) {
  if (type.block == 1) return 0;
  const bool super = type.block == 256, minimum = type.number == 8 || type.number == 10 || type.number == 11;
  const unsigned step = type.bytes * (256 / type.block), units = (step + 29) / 16;
  const unsigned together = step > 210 ? 1 : step > 110 ? 2 : step > 84 ? 3 : 4, several = (together * step + 29) / 16;
  if (kernel == "product_narrow") return 2 * 32 * (several | 1) * 16 + 32 * 4 * together * (8 / together) * 4 * (super ? minimum ? 4 : 2 : 1);
  if (kernel == "product_tiles") return 2 * (64 * (units | 1) * 16 + 32 * (272 + 32 + (super ? 4 : 32))) + 5120;
  return 0;
}
static void launch(const std::string& kernel, Products job) {
  unsigned blocks = 0;
  for (unsigned i = 0; i < job.matrices; i++) {
    job.matrix[i].first_block = blocks;
    const unsigned tile = job.matrix[i].tiles ? job.matrix[i].tiles / 4096 : job.matrix[i].rows, each = rows_of_block(kernel);
    for (unsigned row = 0; row < job.matrix[i].rows; row += tile) blocks += (std::min(tile, job.matrix[i].rows - row) + each - 1) / each;
  }
  unsigned shared = 0;
  for (unsigned i = 0; i < job.matrices; i++) for (auto& type : TYPES) if (type.number == (int)job.matrix[i].type) shared = std::max(shared, shared_bytes(kernel, type));
  run(kernel.c_str(), blocks, (job.tokens + tokens_of_block(kernel) - 1) / tokens_of_block(kernel), 1, 128, shared, job);
}

struct Case {
  const TypeInfo& type; int rows, columns, tokens, formats;
  std::vector<uint8_t> w; Floats x; std::vector<uint8_t> copies;
  Case(const char* name, int rows, int columns, int tokens, int formats = 0) : type(type_of(name)), rows(rows), columns(columns), tokens(tokens), formats(formats ? formats : type_of(name).format) {
    rng.seed(7);
    w = random_weights(type, (size_t)rows * columns);
    x = numbers((size_t)tokens * columns, -2, 2);
    copies = all_copies(x, columns, this->formats);
  }
  // `count` tokens from `first` on.
  Floats product(const std::string& kernel, int first, int count) {
    const size_t stride = copies.size() / tokens;
    Buffer weights(w.size(), w.data(), true), input(count * stride, &copies[first * stride]), out((size_t)count * rows * 4);
    std::vector<uint64_t> at{0, (uint64_t)weights.p};
    UPLOAD(parts, at);
    Products job{};
    job.parts = parts.as<uint64_t>();
    job.input = {input.as<uint8_t>(), (uint32_t)formats, (uint32_t)columns, (uint32_t)stride, 0};
    job.tokens = count; job.matrices = 1;
    job.matrix[0] = {0, out.as<float>(), nullptr, 1, (uint32_t)type.number, (uint32_t)rows, (uint32_t)rows, 0, 0};
    launch(kernel, job);
    return out.read<float>();
  }
  double error(const Floats& y) {
    const std::vector<double> v = widened(type, w, (size_t)rows * columns);
    double worst = 0;
    for (size_t n = 0; n < y.size() / rows; n++) {
      const std::vector<double> in = seen(type, &x[n * columns], columns);
      for (int r = 0; r < rows; r++) {
        double sum = 0, size = 0;
        for (int c = 0; c < columns; c++) { const double t = v[(size_t)r * columns + c] * in[c]; sum += t; size += std::fabs(t); }
        most(worst, std::fabs(y[n * rows + r] - sum) / size);
      }
    }
    return worst;
  }
};

static void each_type() {
  for (auto& type : TYPES) {
    const std::string name = type.name;
    const int columns = type.block == 256 ? 1280 : 800;
    Case c(type.name, 37, columns, 65, type.number == 10 ? 31 : 0);
    Floats all;
    for (uint64_t order = 0; order < 5; order++) {
      simt_order(order);
      const Floats y = c.product("product_tiles", 0, 65);
      if (order == 0) { all = y; const double e = c.error(y); expect(e <= 1e-6, name + " tiles", e, 1e-6); }
      expect(same(all, y), name + " tiles: the same bits in any order");
      for (const char* kernel : {"product_narrow", "product_1", "product_4", "product_8"}) {
        if (kernel[8] == 'n' && type.block == 1) continue;
        const int n = (int)tokens_of_block(kernel), count = n == 1 ? 1 : n - 1;
        const Floats few = c.product(kernel, 0, count);
        expect(same(few, Floats(all.begin(), all.begin() + count * c.rows)), name + " " + kernel + ": the bits of tiles, in any order");
      }
    }
    simt_order(0);
    for (int chunk : {1, 2, 3, 8, 63, 64}) {
      // The last chunk of 65 tokens, and the second one of small chunks.
      for (int first : {chunk < 9 ? chunk : 0, 65 / chunk * chunk}) {
        const int count = std::min(chunk, 65 - first);
        if (count <= 0) continue;
        const char* few = count == 1 ? "product_1" : count <= 4 ? "product_4" : "product_8";
        for (const char* kernel : {few, "product_tiles"}) {
          if (count > 8 && kernel != few && type.number < 3) continue;
          const Floats y = c.product(kernel, first, count);
          expect(same(y, Floats(all.begin() + first * c.rows, all.begin() + (first + count) * c.rows)), name + " " + kernel + ": the same bits in chunks of " + std::to_string(chunk));
        }
      }
    }
    Case wide(type.name, 64, type.block == 256 ? 2048 : 1024, 8);
    counted(name + " product_1", type.sectors, type.number < 3 ? 1.1 : 4.2, [&] { wide.product("product_1", 0, 1); });
    if (type.block > 1) counted(name + " product_narrow", type.sectors, 4.2, [&] { wide.product("product_narrow", 0, 1); });
    counted(name + " product_tiles", type.sectors, type.number < 3 ? 1.1 : 2.5, [&] { wide.product("product_tiles", 0, 8); });
  }
}

// Matrices of several types in one launch, with a bias, at offsets within parts, and rows of less than a step.
static void several() {
  rng.seed(8);
  const int columns = 256, tokens = 3, formats = FORMAT_F32 | FORMAT_Q8K | FORMAT_Q8_0;
  const Floats x = numbers(tokens * columns, -2, 2), bias = numbers(40, -1, 1);
  const std::vector<uint8_t> copies = all_copies(x, columns, formats);
  const char* names[] = {"Q4_K", "Q6_K", "F32", "Q8_0"};
  const int rows[] = {40, 17, 5, 1};
  std::vector<uint8_t> part(64, 0); std::vector<std::vector<uint8_t>> w; std::vector<uint64_t> offsets;
  for (int i = 0; i < 4; i++) {
    w.push_back(random_weights(type_of(names[i]), rows[i] * columns));
    offsets.push_back(part.size());
    part.insert(part.end(), w[i].begin(), w[i].end());
    part.resize((part.size() + 31) / 32 * 32);
  }
  std::vector<Floats> first;
  for (const char* kernel : {"product_4", "product_1", "product_8", "product_tiles"}) {
    UPLOAD(weights, part); UPLOAD(input, copies); UPLOAD(b, bias);
    Buffer out(tokens * 63 * 4);
    std::vector<uint64_t> at{(uint64_t)weights.p};
    UPLOAD(parts, at);
    Products job{};
    job.parts = parts.as<uint64_t>(); job.tokens = tokens; job.matrices = 4;
    job.input = {input.as<uint8_t>(), (uint32_t)formats, (uint32_t)columns, (uint32_t)(copies.size() / tokens), 0};
    int before = 0;
    for (int i = 0; i < 4; i++) { job.matrix[i] = {offsets[i], out.as<float>() + before, i ? nullptr : b.as<float>(), 0, (uint32_t)type_of(names[i]).number, (uint32_t)rows[i], 63, 0, 0}; before += rows[i]; }
    launch(kernel, job);
    const Floats y = out.read<float>();
    double worst = 0; before = 0;
    for (int i = 0; i < 4; i++) {
      const std::vector<double> v = widened(type_of(names[i]), w[i], rows[i] * columns);
      for (int n = 0; n < tokens; n++) {
        const std::vector<double> in = seen(type_of(names[i]), &x[n * columns], columns);
        for (int r = 0; r < rows[i]; r++) {
          double sum = i ? 0 : bias[r], size = std::fabs(sum);
          for (int c = 0; c < columns; c++) { const double t = v[r * columns + c] * in[c]; sum += t; size += std::fabs(t); }
          most(worst, std::fabs(y[n * 63 + before + r] - sum) / size);
        }
      }
      before += rows[i];
    }
    expect(worst <= 1e-6, std::string("four matrices in one launch of ") + kernel, worst, 1e-6);
    first.push_back(y);
    expect(same(y, first[0]), "four matrices in one launch: the same bits");
  }
}

// A matrix in three parts, each at its own offset within a page of the file, like the tiles of the head, and one after it.
static void tiles() {
  const int columns = 256, tile = 37, rows = 2 * tile + 20, behind = 40;
  const TypeInfo& type = type_of("Q6_K");
  Case c("Q6_K", rows + behind, columns, 1);
  const size_t row_bytes = c.w.size() / (rows + behind);
  const Floats want = c.product("product_1", 0, 1), bias = numbers(rows, -1, 1);
  std::vector<std::unique_ptr<Buffer>> parts; std::vector<uint64_t> at{0, 0};
  for (int first = 0; first < rows + behind; first += first + tile < rows ? tile : first < rows ? rows - first : behind) {
    const size_t begin = first < rows ? (4000 + first * row_bytes) % 4096 : 0, end = first + tile < rows ? first + tile : first < rows ? rows : rows + behind;
    std::vector<uint8_t> part(begin, 0);
    part.insert(part.end(), &c.w[first * row_bytes], &c.w[0] + end * row_bytes);
    part.resize((part.size() + 15) / 16 * 16);
    parts.push_back(std::make_unique<Buffer>(part.size(), part.data(), true)); at.push_back((uint64_t)parts.back()->p);
  }
  UPLOAD(table, at); UPLOAD(input, c.copies); UPLOAD(b, bias);
  Buffer out((rows + behind) * 4);
  Products job{};
  job.parts = table.as<uint64_t>(); job.tokens = 1; job.matrices = 2;
  job.input = {input.as<uint8_t>(), (uint32_t)c.formats, (uint32_t)columns, (uint32_t)c.copies.size(), 0};
  job.matrix[0] = {4000, out.as<float>(), b.as<float>(), 2, (uint32_t)type.number, (uint32_t)rows, (uint32_t)rows, 0, tile * 4096u + (uint32_t)(tile * row_bytes % 4096)};
  job.matrix[1] = {0, out.as<float>() + rows, nullptr, 5, (uint32_t)type.number, (uint32_t)behind, (uint32_t)behind, 0, 0};
  launch("product_1", job);
  Floats got = out.read<float>(), sum = want;
  for (int r = 0; r < rows; r++) sum[r] += bias[r];
  expect(same(got, sum), "a matrix in several parts: the same bits");
}

// Gate and up projection, activated and quantised by the last block.
static void pairs() {
  rng.seed(9);
  const int columns = 256, rows = 512, tokens = 2, formats = FORMAT_F32 | FORMAT_Q8K | FORMAT_Q8_0 | FORMAT_F16 | FORMAT_BF16;
  const TypeInfo& type = type_of("Q4_K");
  const Floats x = numbers(tokens * columns, -2, 2);
  const std::vector<uint8_t> copies = all_copies(x, columns, FORMAT_Q8K), gate = random_weights(type, rows * columns), up = random_weights(type, rows * columns);
  const uint32_t stride = copies_stride(rows, formats);
  for (uint32_t activation : {1u, 2u}) {
    std::vector<uint8_t> first;
    for (uint64_t order : {0, 1, 2}) {
      simt_order(order);
      UPLOAD(g, gate); UPLOAD(u, up); UPLOAD(input, copies);
      std::vector<uint32_t> zero(4, 0); UPLOAD(counters, zero);
      Buffer a(tokens * rows * 4), b(tokens * rows * 4), to(tokens * stride), again(tokens * stride);
      std::vector<uint64_t> at{(uint64_t)g.p, (uint64_t)u.p}; UPLOAD(parts, at);
      Products job{};
      job.parts = parts.as<uint64_t>(); job.tokens = tokens; job.matrices = 2;
      job.input = {input.as<uint8_t>(), FORMAT_Q8K, (uint32_t)columns, (uint32_t)(copies.size() / tokens), 0};
      job.pair = {{to.as<uint8_t>(), (uint32_t)formats, (uint32_t)rows, stride, 0}, counters.as<uint32_t>(), activation, 0};
      job.matrix[0] = {0, a.as<float>(), nullptr, 0, 10, rows, rows, 0, 0};
      job.matrix[1] = {0, b.as<float>(), nullptr, 1, 10, rows, rows, 0, 0};
      launch("product_4", job);
      const Floats ga = a.read<float>(), ua = b.read<float>();
      const std::vector<uint8_t> made = to.read<uint8_t>();
      expect(same(counters.read<uint32_t>(), zero), "counters are zero again");
      Floats values; double worst = 0;
      for (int n = 0; n < tokens; n++) for (int r = 0; r < rows; r++) {
        float got; memcpy(&got, &made[n * stride + r * 4], 4);
        const double v = ga[n * rows + r], s = std::sqrt(2 / M_PI) * v * (1 + 0.044715 * v * v);
        const double want = (activation == 1 ? v / (1 + std::exp(-v)) : 0.5 * v * (1 + std::tanh(s))) * ua[n * rows + r];
        most(worst, std::fabs(got - want) / (std::fabs(v * ua[n * rows + r]) + 1e-30)); values.push_back(got);
      }
      expect(worst <= 1e-6, activation == 1 ? "gate and up, SiLU" : "gate and up, GELU", worst, 1e-6);
      expect(different(all_copies(values, rows, formats), made.data()) == 0, "copies are those of the CPU backend's rule");
      run("activate", 1, tokens, 1, 128, 0, (const float*)a.p, (const float*)b.p, (uint32_t)rows, activation, Copies{again.as<uint8_t>(), (uint32_t)formats, (uint32_t)rows, stride, 0});
      expect(same(made, again.read<uint8_t>()), "activated apart: the same bits");
      if (first.empty()) first = made;
      expect(same(first, made), "gate and up: the same bits in any order");
    }
  }
  simt_order(0);
}

// Quantisation of rows that are zero, huge, tiny, tied or shorter than a step.
static void extremes() {
  rng.seed(10);
  for (int columns : {256, 96, 768}) {
    const int formats = columns % 256 ? FORMAT_Q8_0 | FORMAT_F16 | FORMAT_F32 : 31;
    const uint32_t stride = copies_stride(columns, formats);
    std::vector<Floats> rows(6, numbers(columns, -1, 1));
    rows[0].assign(columns, 0.0f);
    for (int i = 0; i < columns; i++) { rows[1][i] *= 60000; rows[2][i] *= 1e-30f; rows[3][i] = i % 2 ? 1.5f : -1.5f; rows[4][i] *= std::ldexp(1.0f, i % 40 - 20); }
    rows[5][17] = -rows[5][40];
    Floats gate, one;
    for (auto& r : rows) gate.insert(gate.end(), r.begin(), r.end());
    // silu(88) is 88: with an up projection of x / 88 the result is x except for rounding, given by the floats.
    for (auto& v : gate) one.push_back(v / 88.0f);
    const Floats high(gate.size(), 88.0f);
    UPLOAD(a, high); UPLOAD(b, one);
    const int with = formats | FORMAT_F32;
    const uint32_t wide = copies_stride(columns, with);
    Buffer to(6 * wide);
    run("activate", (columns + 1023) / 1024, 6, 1, 128, 0, (const float*)a.p, (const float*)b.p, (uint32_t)columns, 1u, Copies{to.as<uint8_t>(), (uint32_t)with, (uint32_t)columns, wide, 0});
    Floats values;
    for (int n = 0; n < 6; n++) { const float* row = (const float*)(to.p + n * wide); values.insert(values.end(), row, row + columns); }
    expect(different(all_copies(values, columns, with), to.as<uint8_t>()) == 0, "copies of extreme rows are those of the CPU backend's rule");
    (void)stride;
  }
}

void test_products() { each_type(); several(); tiles(); pairs(); extremes(); }
// The tests that must detect a planted fault.
void probe_products() {
  for (const char* name : {"Q4_K", "Q6_K", "Q8_0"}) {
    Case c(name, 37, 1280, 5);
    for (const char* kernel : {"product_1", "product_narrow", "product_tiles"}) { const int n = kernel[8] == 't' ? 5 : 1; const Floats y = c.product(kernel, 0, n); expect(c.error(y) <= 1e-6, "error"); }
  }
  pairs();
}
