#include "harness.h"
#include "tests.h"
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc > 1 && !strcmp(argv[1], "probe")) {
    quiet = true;
    const char* of = argc > 2 ? argv[2] : "";
    if (!strcmp(of, "products")) probe_products();
    else if (!strcmp(of, "layers")) probe_layers();
    else probe_attention();
    printf("%d found\n", bad);
    for (auto& f : all_findings) printf("  %s\n", f.c_str());
    return bad == 0;
  }
  const std::string only = argc > 1 ? argv[1] : "";
  if (only.empty() || only == "products") test_products();
  if (only.empty() || only == "layers") test_layers();
  if (only.empty() || only == "attention") test_attention();
  printf(bad ? "FAILED: %d\n" : "passed\n", bad);
  return bad != 0;
}
