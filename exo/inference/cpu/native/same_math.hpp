// Functions that C's library has too, but not with the same bits on every machine: here they are
// sums and products of doubles, good to some units of a double's last place, so that the float they
// are rounded to is the nearest one but once in many millions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace exo::same {

// c[0] + x (c[1] + x (c[2] + ...))
template <int N>
double polynomial(const double (&c)[N], double x) {
  double sum = c[N - 1];
  for (int i = N - 2; i >= 0; i--) sum = sum * x + c[i];
  return sum;
}

// e^x = 2^n e^r, |r| <= ln(2) / 2; Taylor's series of e^r. ln(2) in two parts keeps r exact.
inline double exp(double x) {
  static constexpr double kSeries[] = {
      1.,        1.,         1. / 2,      1. / 6,       1. / 24,       1. / 120,      1. / 720,
      1. / 5040, 1. / 40320, 1. / 362880, 1. / 3628800, 1. / 39916800, 1. / 479001600};
  if (!(x > -700.)) return x == x ? 0. : x;
  if (x > 700.) return INFINITY;
  const double n = std::floor(x * 1.4426950408889634 + 0.5);
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  return std::ldexp(polynomial(kSeries, r), static_cast<int>(n));
}

inline float exp(float x) { return static_cast<float>(exp(static_cast<double>(x))); }

inline float sigmoid(float x) {
  return static_cast<float>(1. / (1. + exp(-static_cast<double>(x))));
}

inline float tanh(float x) {
  const double e = exp(-2. * std::fabs(static_cast<double>(x)));
  return static_cast<float>(std::copysign((1. - e) / (1. + e), static_cast<double>(x)));
}

// log(1 + x), x >= 0. 1 + x = 2^n m, 1/sqrt(2) <= m < sqrt(2); log m = 2 artanh((m - 1) / (m + 1)).
inline double log1p(double x) {
  static constexpr double kSeries[] = {2.,      2. / 3,  2. / 5,  2. / 7,  2. / 9, 2. / 11,
                                       2. / 13, 2. / 15, 2. / 17, 2. / 19, 2. / 21};
  if (x < 1e-5) return x - x * x / 2 + x * x * x / 3;
  int n;
  double m = std::frexp(1. + x, &n);
  if (m < 0.70710678118654752) m *= 2, n--;
  const double s = (m - 1.) / (m + 1.);
  return s * polynomial(kSeries, s * s) + n * 0.69314718055994531;
}

inline float softplus(float x) {
  const double wide = x;
  return static_cast<float>(std::max(wide, 0.) + log1p(exp(-std::fabs(wide))));
}

struct SinCos {
  float sin, cos;
};

// The quarter turns of `angle`, radians, are taken off in three parts of pi / 2, of which the first
// two have 33 bits: what is left is exact up to 2^20 of them. Taylor's series of the rest.
inline SinCos sin_cos(double angle) {
  static constexpr double kSin[] = {
      1.,          -1. / 6,        1. / 120,        -1. / 5040,
      1. / 362880, -1. / 39916800, 1. / 6227020800, -1. / 1307674368000};
  static constexpr double kCos[] = {1.,
                                    -1. / 2,
                                    1. / 24,
                                    -1. / 720,
                                    1. / 40320,
                                    -1. / 3628800,
                                    1. / 479001600,
                                    -1. / 87178291200,
                                    1. / 20922789888000};
  const double turns = std::floor(angle * 6.36619772367581382433e-01 + 0.5);
  const double r =
      ((angle - turns * 1.57079632673412561417e+00) - turns * 6.07710050630396597660e-11) -
      turns * 2.02226624879595063154e-21;
  const double sin = r * polynomial(kSin, r * r), cos = polynomial(kCos, r * r);
  switch (static_cast<int64_t>(turns) & 3) {
    case 0:
      return {static_cast<float>(sin), static_cast<float>(cos)};
    case 1:
      return {static_cast<float>(cos), static_cast<float>(-sin)};
    case 2:
      return {static_cast<float>(-sin), static_cast<float>(-cos)};
    default:
      return {static_cast<float>(-cos), static_cast<float>(sin)};
  }
}

}  // namespace exo::same
