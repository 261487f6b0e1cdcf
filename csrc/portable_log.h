// The natural logarithm with the same bits on every machine: built for host and device from IEEE operations
// alone, none of them fused (g++ -ffp-contract=off, nvcc -fmad=false). Within 2 ulp of the true value.
#pragma once
#include <cstdint>
#include <cstring>

#include "philox.h"

namespace megatron_replay {

// x must be positive and finite. With x = 2^e m, m in [sqrt(1/2), sqrt(2)), f = m - 1 and s = f / (2 + f):
//   log x = e log 2 + 2 atanh(s),   2 atanh(s) = f - s (f - r),   r = 2 (s^2 / 3 + s^4 / 5 + ...)
// s^2 < 0.0295, so that the first term left out is below 2^-60 of the sum.
MR_HOST_DEVICE double portable_log(double x) {
    constexpr uint64_t kSqrtHalf = 0x3FE6A09E667F3BCDu, kOne = 0x3FF0000000000000u;
    constexpr double kLog2High = 0x1.62E42FEEp-1, kLog2Low = 0x1.A39EF35793C76p-33;  // e kLog2High is exact
    const bool subnormal = x < 0x1p-1022;
    const double scaled = subnormal ? x * 0x1p54 : x;
    uint64_t bits;
    memcpy(&bits, &scaled, sizeof bits);
    const uint64_t shifted = bits + (kOne - kSqrtHalf);  // the exponent counts from sqrt(1/2)
    const double e = double(int32_t(shifted >> 52) - (subnormal ? 1077 : 1023));
    bits = (shifted & 0x000FFFFFFFFFFFFFu) + kSqrtHalf;
    double m;
    memcpy(&m, &bits, sizeof m);
    const double f = m - 1.0;
    const double s = f / (2.0 + f);
    const double z = s * s;
    double r = 2.0 / 21.0;
    r = r * z + 2.0 / 19.0;
    r = r * z + 2.0 / 17.0;
    r = r * z + 2.0 / 15.0;
    r = r * z + 2.0 / 13.0;
    r = r * z + 2.0 / 11.0;
    r = r * z + 2.0 / 9.0;
    r = r * z + 2.0 / 7.0;
    r = r * z + 2.0 / 5.0;
    r = r * z + 2.0 / 3.0;
    r = r * z;
    return e * kLog2High + ((f - s * (f - r)) + e * kLog2Low);
}

}  // namespace megatron_replay
