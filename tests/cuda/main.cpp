#include "harness.h"
#include "tests.h"
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  if (argc > 1 && !strcmp(argv[1], "probe")) {
    quiet = true;
    probe_products();
    printf("%d found\n", bad);
    for (auto& f : all_findings) printf("  %s\n", f.c_str());
    return bad == 0;
  }
  test_products();
  printf(bad ? "FAILED: %d\n" : "passed\n", bad);
  return bad != 0;
}
