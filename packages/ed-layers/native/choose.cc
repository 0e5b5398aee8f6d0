// Which level of instructions is taken.
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

#include "library.h"

namespace ed {

#if defined(__x86_64__)
// `__builtin_cpu_supports` of clang before 17 does not know "avxvnni".
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// Whether the processor has AMX for bfloat16 and bytes, and Linux lets this process use the tiles: the
// state of a thread is large, so a process asks once.
static bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kNeeded = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
  constexpr long kAskForState = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kNeeded) == kNeeded &&
         syscall(SYS_arch_prctl, kAskForState, kTileData) == 0;
#else
  return false;
#endif
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
    bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (takes(kAvx512Bf16Level, bf16)) best = &kAvx512Bf16Level;
    if (takes(kAmxLevel, bf16 && has_amx())) best = &kAmxLevel;
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
