// The split AdamW update on a CPU, and AdamW with 8-bit moments on an fp32 weight: one pass over memory. The arithmetic and its
// order are those of arithmetic.py; it is compiled with -ffp-contract=off, so that every operation rounds on its own and fused
// multiply-adds stand only where they are written.
//
// A thread works on pieces of PIECE elements, whose fp32 temporaries stay in its first-level cache. The square root of such a
// piece is torch's own, because on x86 it is MKL's, one unit off in 0.6 % of the numbers: only so are the bits those of
// torch.optim.AdamW. With `exact` it is the correctly rounded one, as on a GPU.

#include <ATen/Functions.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// MKL's vector square root, where torch contains and exports it: torch's own calls it so (ATen/cpu/vml.h), and a direct call costs
// less than one through torch for so few numbers. Accuracy high, denormals kept, no error callbacks.
extern "C" void vmsSqrt(int n, const float* a, float* r, long long mode) __attribute__((weak));
constexpr long long ROOT_MODE = 0x2 | 0x140000 | 0x100;

#define SIMD _Pragma("omp simd")

namespace {

constexpr int64_t BLOCK = 256;    // elements that share a scale (optim/table.py, BLOCK_ELEMS)
constexpr int64_t PIECE = 2048;   // a multiple of BLOCK

struct Scalars {
  float factor, decay, weight1, weight1_less, beta2, weight2, root2, eps, step_size;
};

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

inline float load(const uint16_t* p, int64_t i) { return float_of(uint32_t(p[i]) << 16); }
inline float load(const float* p, int64_t i) { return p[i]; }

// arithmetic.py, dither_bits
inline uint32_t dither(uint32_t index, uint32_t salt) {
  uint32_t h = index * 0x9E3779B1u + salt;
  h = (h ^ (h >> 15)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// x / d by multiplications, correctly rounded: two residues by fused multiply-adds after x * RN(1/d) (Markstein, IBM J. Res. Dev.
// 34(1), 1990). For x zero or above 2^-100 and d between 2^-60 and 2^60, so that no residue underflows.
inline float divide(float x, float d, float inverse) {
#ifdef __FMA__
  float q = x * inverse;
  q = std::fma(std::fma(-q, d, x), inverse, q);
  return std::fma(std::fma(-q, d, x), inverse, q);
#else
  return x / d;
#endif
}

// Ask for `n` values from `p` on, into the first-level cache.
template <class T>
inline void fetch(const T* p, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(p + i, 0, 2);
}

// One thread's temporaries; `root` belongs to a tensor, so that torch can take its square root.
struct Scratch {
  alignas(64) float w[PIECE];
  alignas(64) float m[PIECE];
  at::Tensor root = at::empty({PIECE}, at::kFloat);
};

// ------------------------------------------------------------ moments: how they are kept, by blocks of at most BLOCK elements

struct Fp32 {
  static constexpr bool tie_in_sign = true;
  float *m, *v;
  struct Block {
    const float *m, *v;
    float first(int64_t i) const { return m[i]; }
    float second(int64_t i) const { return float_of(bits_of(v[i]) & 0x7FFFFFFFu); }
    uint32_t tie(int64_t i) const { return bits_of(v[i]) >> 31; }
  };
  Block block(int64_t at) const { return {m + at, v + at}; }
  void put(int64_t i, float fm, float fv) const { m[i] = fm, v[i] = fv; }
  void close(int64_t, int64_t, const float*, const float*) const {}
  void mark_tie(int64_t at) const { v[at] = float_of(bits_of(v[at]) | 0x80000000u); }
};

struct Bf16 {
  static constexpr bool tie_in_sign = true;
  uint16_t *m, *v;
  uint32_t start, salt;  // position in the partition of element 0, and the step's salt
  struct Block {
    const uint16_t *m, *v;
    float first(int64_t i) const { return float_of(uint32_t(m[i]) << 16); }
    float second(int64_t i) const { return float_of((v[i] & 0x7FFFu) << 16); }
    uint32_t tie(int64_t i) const { return uint32_t(v[i]) >> 15; }
  };
  Block block(int64_t at) const { return {m + at, v + at}; }
  void put(int64_t i, float fm, float fv) const {
    const uint32_t h = dither(start + uint32_t(i), salt);
    m[i] = uint16_t((bits_of(fm) + (h & 0xFFFFu)) >> 16);
    v[i] = uint16_t((bits_of(fv) + (h >> 16)) >> 16);
  }
  void close(int64_t, int64_t, const float*, const float*) const {}
  void mark_tie(int64_t at) const { v[at] |= 0x8000u; }
};

// Tables as arrays of their size, with signed indices: only so does GCC use the instructions that gather a vector from one.
struct Codes { float at[256]; };
template <bool Signed>
struct Cells {
  static constexpr int bits = Signed ? 9 : 10;
  int32_t at[1 << bits];
};

struct Coded {
  static constexpr bool tie_in_sign = false;
  uint8_t *m, *v;
  float *scale_m, *scale_v;
  const Codes *codes_m, *codes_v;
  const Cells<true>* cells_m;
  const Cells<false>* cells_v;
  struct Block {
    const uint8_t *m, *v;
    const Codes &codes_m, &codes_v;
    float scale_m, scale_v;
    float first(int64_t i) const { return codes_m.at[m[i]] * scale_m; }
    float second(int64_t i) const { return codes_v.at[v[i]] * scale_v; }
    uint32_t tie(int64_t) const { return 0; }
  };
  Block block(int64_t at) const { return {m + at, v + at, *codes_m, *codes_v, scale_m[at / BLOCK], scale_v[at / BLOCK]}; }
  void put(int64_t, float, float) const {}
  void close(int64_t at, int64_t n, const float* fm, const float* fv) const {
    encode<true>(fm, n, m + at, scale_m + at / BLOCK, *cells_m);
    encode<false>(fv, n, v + at, scale_v + at / BLOCK, *cells_v);
  }
  template <bool Signed>
  static void encode(const float* x, int64_t n, uint8_t* out, float* scale, const Cells<Signed>& cells) {
    uint32_t largest = 0;  // magnitudes of finite numbers order as their bits do
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < n; ++i) largest = std::max(largest, bits_of(x[i]) & 0x7FFFFFFFu);
    *scale = float_of(largest);
    const float divisor = largest == 0 ? 1.0f : float_of(largest);
    const bool plain = divisor < 0x1p-60f || divisor > 0x1p60f;  // a residue could underflow, the inverse overflow
    if (plain) encode_by<Signed, true>(x, n, out, divisor, cells);
    else encode_by<Signed, false>(x, n, out, divisor, cells);
  }
  // arithmetic.py, nearest and cell_of
  template <bool Signed, bool Plain>
  static void encode_by(const float* x, int64_t n, uint8_t* out, float divisor, const Cells<Signed>& cells) {
    constexpr int32_t step = 1 << (23 - Cells<Signed>::bits), start = int32_t(127u * 11 << 19) - step - 4096, smallest = 103 << 23;
    const float inverse = 1.0f / divisor;
    SIMD
    for (int64_t i = 0; i < n; ++i) {
      const float ratio = Plain ? x[i] / divisor : divide(x[i], divisor, inverse);
      const int32_t bits = int32_t(bits_of(ratio)), below = Signed ? bits >> 31 : 0;
      const int32_t size = std::max((bits & 0x7FFFFFFF) - below, smallest);
      const float power = float_of(uint32_t((size >> 2) + (size >> 4) + start)) + float(step);
      const int32_t carried = cells.at[int32_t(bits_of(power)) & ((1 << Cells<Signed>::bits) - 1)];
      const int32_t number = int32_t((uint32_t(carried) + uint32_t(size)) >> 24);
      out[i] = uint8_t(Signed ? std::max(127 + (number ^ below) - below, 0) : std::max(number, int32_t(x[i] > 0.0f)));
    }
  }
  void mark_tie(int64_t) const {}
};

// ------------------------------------------------------------ masters: how they are kept

struct Split {  // bf16 weight and the int16 rest
  uint16_t* weight;
  int16_t* low;
  float load(int64_t i, uint32_t tie) const {
    return float_of((uint32_t(weight[i]) << 16) + uint32_t(int32_t(low[i])) + (tie << 16));
  }
  void ask(int64_t i, int64_t n) const { fetch(weight + i, n), fetch(low + i, n); }
  template <bool TieInSign>
  uint32_t store(int64_t i, float w) const {
    const uint32_t bits = bits_of(w);
    uint32_t high = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    high = w == w ? high : 0x7FC0u;
    const int32_t rest = int32_t(bits - (high << 16));
    weight[i] = uint16_t(high);
    low[i] = int16_t(TieInSign ? rest : std::min(rest, 32767));
    return rest == 32768;
  }
  bool tied(int64_t i, float w) const { return bits_of(w) - (uint32_t(weight[i]) << 16) == 32768u; }
};

struct Whole {  // an fp32 weight
  float* weight;
  float load(int64_t i, uint32_t) const { return weight[i]; }
  void ask(int64_t i, int64_t n) const { fetch(weight + i, n); }
  template <bool>
  uint32_t store(int64_t i, float w) const { weight[i] = w; return 0; }
  bool tied(int64_t, float) const { return false; }
};

// ------------------------------------------------------------ the update

// Masters and moments of a piece: new moments are written, decayed masters, first and second moments left in `t`. Meanwhile the
// moments of the next piece are fetched from memory. `master` is a copy and its `store` tells a number: by reference and with a
// bool, bf16 and fp32 moments took three times as long.
template <class Master, class Moments, class Grad>
void new_moments(const Master master, const Grad* grad, const Moments& moments, int64_t at, int64_t n, bool more,
                 const Scalars& s, Scratch& t) {
  float* second = t.root.data_ptr<float>();
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    const int64_t count = std::min(n - begin, BLOCK), here = at + begin;
    const auto old = moments.block(here);
    if (more) fetch(moments.m + here + PIECE, BLOCK), fetch(moments.v + here + PIECE, BLOCK);
    float *w = t.w + begin, *m = t.m + begin, *v = second + begin;
    SIMD
    for (int64_t i = 0; i < count; ++i) {
      const float g = load(grad, here + i) * s.factor, before = old.first(i), difference = g - before;
      w[i] = master.load(here + i, old.tie(i)) * s.decay;
      m[i] = s.weight1 < 0.5f ? std::fma(s.weight1, difference, before) : std::fma(s.weight1_less, difference, g);
      v[i] = std::fma(s.weight2 * g, g, old.second(i) * s.beta2);
      moments.put(here + i, m[i], v[i]);
    }
    moments.close(here, count, m, v);
  }
}

// New masters from the roots of the second moments, split again if they were. Meanwhile the rest of the next piece is fetched.
template <class Master, class Moments, class Grad>
void new_weights(const Master master, const Grad* grad, const Moments& moments, int64_t at, int64_t n, bool more,
                 const Scalars& s, Scratch& t) {
  const float* root = t.root.data_ptr<float>();
  const float inverse = 1.0f / s.root2;
  for (int64_t begin = 0; begin < n; begin += 64) {
    const int64_t end = std::min(n, begin + 64), next = at + begin + PIECE;
    if (more) master.ask(next, 64), fetch(grad + next, 64);
    uint32_t ties = 0;
#pragma omp simd reduction(| : ties)
    for (int64_t i = begin; i < end; ++i) {
      const float d = divide(root[i], s.root2, inverse) + s.eps;
      const float w = t.w[i] + (s.step_size * t.m[i]) / d;
      ties |= master.template store<Moments::tie_in_sign>(at + i, w);
      t.w[i] = w;
    }
    if (ties)  // one master in 2^17
      for (int64_t i = begin; i < end; ++i)
        if (master.tied(at + i, t.w[i])) moments.mark_tie(at + i);
  }
}

void take_root(at::Tensor& values, int64_t n, bool exact) {
  float* x = values.data_ptr<float>();
  if (exact) {
    SIMD
    for (int64_t i = 0; i < n; ++i) x[i] = std::sqrt(x[i]);
  } else if (vmsSqrt != nullptr) {
    vmsSqrt(int(n), x, x, ROOT_MODE);
  } else if (n == PIECE) {
    at::sqrt_(values);
  } else {
    at::Tensor part = values.narrow(0, 0, n);
    at::sqrt_(part);
  }
}

template <class Master, class Moments, class Grad>
void update_all(const Master& master, const Grad* grad, const Moments& moments, int64_t n, const Scalars& s, bool exact) {
  const int64_t pieces = (n + PIECE - 1) / PIECE;
  at::parallel_for(0, pieces, 1, [&](int64_t begin, int64_t end) {
    at::NoGradGuard no_grad;
    thread_local Scratch scratch;
    for (int64_t p = begin; p < end; ++p) {
      const int64_t at = p * PIECE, count = std::min(PIECE, n - at);
      const bool more = p + 1 < end && n >= at + 2 * PIECE;
      new_moments(master, grad, moments, at, count, more, s, scratch);
      take_root(scratch.root, count, exact);
      new_weights(master, grad, moments, at, count, more, s, scratch);
    }
  });
}

template <class Master, class Moments>
void update_any(const Master& master, const at::Tensor& grad, const Moments& moments, const Scalars& s, bool exact) {
  if (grad.scalar_type() == at::kBFloat16)
    update_all(master, static_cast<const uint16_t*>(grad.data_ptr()), moments, grad.numel(), s, exact);
  else
    update_all(master, grad.data_ptr<float>(), moments, grad.numel(), s, exact);
}

template <class Table>
const Table* table(const at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous() && t.numel() * 4 == int64_t(sizeof(Table)) && t.element_size() == 4, "a code table of another size");
  return static_cast<const Table*>(t.data_ptr());
}

// Flat contiguous tensors of one length, but for the scales. `scalars`: those of arithmetic.Scalars in its order.
// `tables`: codes and cells of arithmetic.code_tables, signed then unsigned; empty without 8-bit moments. `low`: empty for an fp32
// weight, which has 8-bit moments.
void update(
    const at::Tensor& weight, const at::Tensor& low, const at::Tensor& m, const at::Tensor& v, const at::Tensor& scale_m,
    const at::Tensor& scale_v, const at::Tensor& grad, double factor, at::ArrayRef<double> scalars, int64_t first, int64_t salt,
    bool exact, at::TensorList tables) {
  TORCH_CHECK(scalars.size() == 7, "seven scalars are needed");
  const bool whole = weight.scalar_type() == at::kFloat;
  for (const auto& t : {weight, whole ? weight : low, m, v, grad})
    TORCH_CHECK(t.is_contiguous() && t.numel() == weight.numel(), "flat contiguous tensors of one length are needed");
  const float weight1 = float(scalars[1]);
  const Scalars s{float(factor), float(scalars[0]), weight1, weight1 - 1.0f, float(scalars[2]), float(scalars[3]),
                  float(scalars[4]), float(scalars[5]), float(scalars[6])};
  if (m.scalar_type() == at::kByte) {
    TORCH_CHECK(tables.size() == 4, "8-bit moments need their code tables");
    const Coded moments{m.data_ptr<uint8_t>(), v.data_ptr<uint8_t>(), scale_m.data_ptr<float>(), scale_v.data_ptr<float>(),
                        table<Codes>(tables[0]), table<Codes>(tables[2]), table<Cells<true>>(tables[1]), table<Cells<false>>(tables[3])};
    if (whole) return update_any(Whole{weight.data_ptr<float>()}, grad, moments, s, exact);
    return update_any(Split{static_cast<uint16_t*>(weight.data_ptr()), low.data_ptr<int16_t>()}, grad, moments, s, exact);
  }
  const Split master{static_cast<uint16_t*>(weight.data_ptr()), low.data_ptr<int16_t>()};
  if (m.scalar_type() == at::kFloat)
    update_any(master, grad, Fp32{m.data_ptr<float>(), v.data_ptr<float>()}, s, exact);
  else
    update_any(master, grad, Bf16{static_cast<uint16_t*>(m.data_ptr()), static_cast<uint16_t*>(v.data_ptr()), uint32_t(first),
                                  uint32_t(salt)}, s, exact);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(bigtrain, library) {
  library.def(
      "adamw_split(Tensor(a!) weight, Tensor(b!) low, Tensor(c!) m, Tensor(d!) v, Tensor(e!) scale_m, Tensor(f!) scale_v, "
      "Tensor grad, float factor, float[] scalars, int first, int salt, bool exact, Tensor[] tables) -> ()",
      &update);
}
