// Which level of instructions is taken.
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#endif

#include "library.h"

namespace ed {

#if defined(__x86_64__)
// `__builtin_cpu_supports` of clang before 17 does not know "avxvnni".
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}
#endif

const Level& level() {
  static const Level* chosen = [] {
    const char* asked = std::getenv("ED_LAYERS_NATIVE_LEVEL");
    auto takes = [&](const Level& l, bool has) {
      return has && (!asked || !std::strcmp(asked, l.name));
    };
    const Level* best = &kBaseLevel;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (takes(kAvx2Level, avx2)) best = &kAvx2Level;
    if (takes(kAvxVnniLevel, avx2 && has_avx_vnni())) best = &kAvxVnniLevel;
    if (takes(kAvx512Level, avx512)) best = &kAvx512Level;
    if (takes(kAvx512VnniLevel, vnni)) best = &kAvx512VnniLevel;
    if (takes(kAvx512Bf16Level, vnni && __builtin_cpu_supports("avx512bf16")))
      best = &kAvx512Bf16Level;
#elif defined(__aarch64__)
#if defined(__linux__)
    bool has = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    bool has = true;  // every processor of Apple's that runs macOS
#endif
    if (takes(kDotprodLevel, has)) best = &kDotprodLevel;
#endif
    return best;
  }();
  return *chosen;
}

}  // namespace ed
