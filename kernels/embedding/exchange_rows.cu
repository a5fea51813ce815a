// Exchange of rows between the device's memory and the host's; see tiered_rows.py.
//
// Warps are independent of one another. They have at most 32 registers per thread and no shared memory: many fit on one
// multiprocessor, which products then do without, and one fits beside a product's block that leaves a few registers.
//
// No headers: NVRTC comes with none. Macros: ELEMENTS, the number of fp32 elements of a row, weights and state.

using u64 = unsigned long long;

constexpr int WARP = 32;
constexpr int QUADS = ELEMENTS / 4;                      // per row
constexpr int EACH = (QUADS + WARP - 1) / WARP;          // per lane, at most
constexpr int AT_ONCE = EACH < 2 ? EACH : 2;             // in flight per lane, from either side
static_assert(ELEMENTS % 4 == 0, "rows of 16 bytes each");

struct Arguments {
  float4 *device, *host;
  const int *on_device, *in_host, *bounds;
};

__device__ __forceinline__ float4 load(const float4* at) {
  float4 v;
  asm volatile("ld.global.L1::no_allocate.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

extern "C" __global__ void __maxnreg__(32) exchange_rows(const __grid_constant__ Arguments of) {
  const int lane = threadIdx.x % WARP, last = of.bounds[1];
  const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / WARP, warps = gridDim.x * blockDim.x / WARP;
  // Rows go to the warps in turn: no warp has two more than another.
  for (int first = of.bounds[0] + warp; first < last; first += warps * WARP) {
    const int rows = min(WARP, (last - first + warps - 1) / warps);
    const int k = first + min(lane, rows - 1) * warps;
    const int on_device = of.on_device[k], in_host = of.in_host[k];
    for (int row = 0; row < rows; ++row) {
      float4* device = of.device + u64(__shfl_sync(~0u, on_device, row)) * QUADS + lane;
      float4* host = of.host + u64(__shfl_sync(~0u, in_host, row)) * QUADS + lane;
#pragma unroll
      for (int piece = 0; piece < EACH; piece += AT_ONCE) {
        float4 incoming[AT_ONCE], leaving[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int quad = (piece + i) * WARP;
          if (quad + lane < QUADS) incoming[i] = load(host + quad), leaving[i] = load(device + quad);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          const int quad = (piece + i) * WARP;
          if (quad + lane < QUADS) device[quad] = incoming[i], host[quad] = leaving[i];
        }
      }
    }
  }
}
