// Selection of the level of instructions.
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

#include "handlers.h"

namespace ed {

#if defined(__x86_64__)
// `__builtin_cpu_supports` of clang before 17 does not support "avxvnni".
static bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// Return whether the processor has AMX for bfloat16 and int8, and Linux permits tiles for this
// process. A process requests the permission once, because the state of a thread is large.
static bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kFeatures = 1u << 22 | 1u << 24 | 1u << 25;  // bfloat16, tiles, bytes
  constexpr long kRequestPermission = 0x1023,
                 kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kFeatures) == kFeatures &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}
#endif

const Level& level() {
  static const Level* selected = [] {
    const char* requested = std::getenv("ED_LAYERS_NATIVE_LEVEL");
    auto supports = [&](const Level& l, bool has_dotprod) {
      return has_dotprod && (!requested || !std::strcmp(requested, l.name));
    };
    const Level* best = &kBaseLevel;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (supports(kAvx2Level, avx2)) best = &kAvx2Level;
    if (supports(kAvxVnniLevel, avx2 && has_avx_vnni())) best = &kAvxVnniLevel;
    if (supports(kAvx512Level, avx512)) best = &kAvx512Level;
    if (supports(kAvx512VnniLevel, vnni)) best = &kAvx512VnniLevel;
    bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
    if (supports(kAvx512Bf16Level, bf16)) best = &kAvx512Bf16Level;
    if (supports(kAmxLevel, bf16 && has_amx())) best = &kAmxLevel;
#elif defined(__aarch64__)
#if defined(__linux__)
    bool has_dotprod = (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    bool has_dotprod = true;  // every Apple processor that runs macOS
#endif
    if (supports(kDotprodLevel, has_dotprod)) best = &kDotprodLevel;
#endif
    return best;
  }();
  return *selected;
}

}  // namespace ed
