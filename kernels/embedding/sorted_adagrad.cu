// Embedding backward and exact element-wise Adagrad over sorted ids; see sorted_adagrad.py, whose partial sums these are.
//
// COLUMNS / 4 lanes, a group, walk over a chunk of positions and add up runs of equal ids, four columns each. Rows are
// at random addresses: a group loads the gradients of UNROLL positions, and weights and state of the runs that end
// there, before it uses the first. Meanwhile the ids of the next positions are loaded.
//
// Chunks end near multiples of CHUNK, where the run of that position has its next multiple of CHUNK, counted from the
// run's start, or else its end: the sum of a run does not depend on where the run is.
//
// No headers: NVRTC comes with none. Macros: COLUMNS, BF16 (gradients, else fp32), CHUNK, UNROLL, TIERED (some rows are
// in host memory).

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int THREADS = 128, LANES = COLUMNS / 4, GROUPS = THREADS / LANES;

struct Arguments {
  float *weights, *state, *partials;
  const int *ids, *bags;
  const void* grad;
  const float* learning_rate;
  const int* stopped;
  u64* bad;
  int flags;
  float eps;
  int count, stride;  // number of ids; row stride of weights and state
  int device_rows;    // rows from this number on are in host memory,
  long long in_host;  // this number of elements further

  __device__ __forceinline__ u64 row(int id) const {
    return u64(u32(id)) * u32(stride) + (TIERED && id >= device_rows ? u64(in_host) : 0);
  }
};

__device__ __forceinline__ float4 load_once(const float* at) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at));
  return v;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Four columns of a gradient as stored in memory.
struct Piece {
  uint4 bits;

  __device__ __forceinline__ void load(const void* grad, int bag, int lane) {
    const u64 at = u64(u32(bag)) * COLUMNS + lane * 4;
    if (BF16)
      asm volatile("ld.global.v2.u32 {%0, %1}, [%2];"
                   : "=r"(bits.x), "=r"(bits.y)
                   : "l"(static_cast<const char*>(grad) + 2 * at));
    else
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
                   : "l"(static_cast<const char*>(grad) + 4 * at));
  }
  __device__ __forceinline__ void add_to(float4& sum) const {
    if (BF16) {
      sum.x += low(bits.x), sum.y += high(bits.x), sum.z += low(bits.y), sum.w += high(bits.y);
    } else {
      sum.x += __uint_as_float(bits.x), sum.y += __uint_as_float(bits.y);
      sum.z += __uint_as_float(bits.z), sum.w += __uint_as_float(bits.w);
    }
  }
};

constexpr u32 INFINITE = 0x7f800000;

// largest: of the states' bits, which order like non-negative numbers; Infinity and NaN come last.
__device__ __forceinline__ void step(float& weight, float& state, float g, float rate, float eps, u32& largest) {
  float root;
  state += g * g;
  largest = max(largest, __float_as_uint(state));
  asm("sqrt.approx.f32 %0, %1;" : "=f"(root) : "f"(state));
  float quotient;
  asm("div.full.f32 %0, %1, %2;" : "=f"(quotient) : "f"(rate * g), "f"(root + eps));
  weight -= quotient;
}

// Keeps weight and state of elements whose state would not be finite.
__device__ __forceinline__ void keep(const Arguments& p, u64 at, float4& weights, float4& state) {
  *p.bad = 1;
  if (__float_as_uint(state.x) >= INFINITE) state.x = p.state[at], weights.x = p.weights[at];
  if (__float_as_uint(state.y) >= INFINITE) state.y = p.state[at + 1], weights.y = p.weights[at + 1];
  if (__float_as_uint(state.z) >= INFINITE) state.z = p.state[at + 2], weights.z = p.weights[at + 2];
  if (__float_as_uint(state.w) >= INFINITE) state.w = p.state[at + 3], weights.w = p.weights[at + 3];
}

// Returns how far the run of equal ids at position `at` reaches in a direction of 1 or -1: up to `most` positions. Called
// by a whole group. At each step, lane n looks n + 1 strides ahead; strides grow until one is outside, then shrink.
__device__ __forceinline__ int reach(const int* ids, int at, int direction, int most, int lane) {
  const u32 group = (LANES == 32 ? ~0u : (1u << LANES % 32) - 1) << threadIdx.x % 32 / LANES * LANES;
  const int id = ids[at];
  int reached = 0, stride = 1;
  bool grows = true;
  while (true) {
    const long long ahead = reached + (lane + 1ll) * stride;
    const bool same = ahead <= most && ids[at + direction * int(ahead)] == id;
    const int count = __popc(__ballot_sync(group, same));
    reached += count * stride;
    grows = grows && count == LANES;
    if (!grows && stride == 1) return reached;
    stride = grows ? stride * LANES : stride / LANES;
  }
}

// Returns the first position of the chunk whose nominal one is `at`.
__device__ __forceinline__ int border(const Arguments& p, int at, int lane) {
  if (at <= 0 || at >= p.count) return min(at, p.count);
  if (p.ids[at - 1] != p.ids[at]) return at;
  const int past = reach(p.ids, at, -1, at, lane) % CHUNK;
  if (past == 0) return at;
  const int missing = CHUNK - past;  // reach: of the positions after this one
  return at + 1 + reach(p.ids, at, 1, min(missing, p.count - at) - 1, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS) sorted_adagrad(const __grid_constant__ Arguments p) {
  const int lane = threadIdx.x % LANES;
  const int chunk = blockIdx.x * GROUPS + threadIdx.x / LANES;
  for (int i = 0; i < p.flags; ++i)
    if (p.stopped[i]) return;
  const int start = border(p, chunk * CHUNK, lane), end = border(p, (chunk + 1) * CHUNK, lane);
  if (start >= end) return;
  const float rate = *p.learning_rate;
  // No id is less than -1, which is padding.
  const int id_before = start > 0 ? p.ids[start - 1] : -2;
  int previous = id_before;
  float4 sum = make_float4(0, 0, 0, 0);
  int ids[UNROLL + 1], bags[UNROLL];
#pragma unroll
  for (int i = 0; i <= UNROLL; ++i) {
    const int at = start + i;
    ids[i] = at < p.count ? p.ids[at] : -1;
    if (i < UNROLL) bags[i] = at < end ? p.bags[at] : 0;
  }
  for (int first = start; first < end; first += UNROLL) {
    int next_ids[UNROLL], next_bags[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int at = first + UNROLL + i;
      next_ids[i] = at + 1 < p.count ? p.ids[at + 1] : -1;
      next_bags[i] = at < end ? p.bags[at] : 0;
    }
    Piece g[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i)
      if (first + i < end && ids[i] >= 0) g[i].load(p.grad, bags[i], lane);
    float4 w[UNROLL], s[UNROLL];
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      // A run that ends here and began in this chunk.
      if (first + i < end && ids[i] >= 0 && ids[i] != ids[i + 1] && ids[i] != id_before) {
        const u64 at = p.row(ids[i]) + lane * 4;
        w[i] = load_once(p.weights + at), s[i] = load_once(p.state + at);
      }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      const int id = ids[i];
      if (first + i >= end || id < 0) continue;
      if (id != previous) sum = make_float4(0, 0, 0, 0);
      previous = id;
      g[i].add_to(sum);
      const bool ends = id != ids[i + 1], comes_in = id == id_before;
      if (ends && !comes_in) {
        u32 largest = 0;
        step(w[i].x, s[i].x, sum.x, rate, p.eps, largest), step(w[i].y, s[i].y, sum.y, rate, p.eps, largest);
        step(w[i].z, s[i].z, sum.z, rate, p.eps, largest), step(w[i].w, s[i].w, sum.w, rate, p.eps, largest);
        const u64 at = p.row(id) + lane * 4;
        if (largest >= INFINITE && p.flags > 0) keep(p, at, w[i], s[i]);
        *reinterpret_cast<float4*>(p.weights + at) = w[i];
        *reinterpret_cast<float4*>(p.state + at) = s[i];
      } else if (ends || first + i == end - 1) {
        *reinterpret_cast<float4*>(p.partials + (2ll * chunk + !comes_in) * COLUMNS + lane * 4) = sum;
      }
    }
#pragma unroll
    for (int i = 0; i < UNROLL; ++i) {
      ids[i] = i == 0 ? ids[UNROLL] : next_ids[i - 1];
      bags[i] = next_bags[i];
    }
    ids[UNROLL] = next_ids[UNROLL - 1];
  }
}
