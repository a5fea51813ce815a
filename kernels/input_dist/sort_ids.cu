// A stable radix sort of ids and their bags by the rows that the ids name; see sort_ids.py.
//
// sort_ids_count counts the digits of all passes and clears the shared memory of the passes. Each sort_ids_pass then
// sorts by one digit in a single sweep over the ids ("onesweep", Adinets and Merrill 2022): a block ranks its tile's
// ids, publishes its count of each digit, and adds up the counts of earlier tiles (decoupled look-back).
//
// Keys are rows + 1, so that the -1 of padding comes first. The first pass makes keys from the batch's ids, the last
// pass turns them back into rows.
//
// No headers: NVRTC comes with none. Macros: BITS of a digit, PASSES, ITEMS per thread.

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int THREADS = 256, WARPS = THREADS / 32, BINS = 1 << BITS, TILE = THREADS * ITEMS;
constexpr int PER_THREAD = (BINS + THREADS - 1) / THREADS;  // bins
constexpr int WINDOW = 32;  // tiles that one step of the look-back reads at once
// State of a published count: none yet, the tile's own, or that of all tiles up to it.
constexpr u32 OWN = 1u << 30, ALL = 2u << 30, COUNT = OWN - 1;

struct Arguments {
  const int *ids, *first_rows, *bags;
  u32 *keys[2];  // the output's, and those of intermediate passes
  int* values[2];
  u32 *digits, *starts;  // [PASSES, BINS]: how often each digit occurs, zero between sorts; where its ids start
  u32 *tickets;          // [PASSES] of tiles, then of blocks that have counted
  u32 *published;        // [PASSES, tiles, BINS]
  int count, tiles, pass;
};

__device__ __forceinline__ u32 key_of(const Arguments& p, int at) {
  return u32(p.ids[at] + p.first_rows[at] + 1);
}

__device__ __forceinline__ u32 digit_of(u32 key, int pass) { return key >> pass * BITS & (BINS - 1); }

__device__ __forceinline__ u32 look(const u32* at) {
  u32 value;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ void publish(u32* at, u32 value) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

// Returns the sum over the threads before this one; all threads call it. Uses `of_warps`, [WARPS].
__device__ __forceinline__ u32 sum_before(u32 value, u32* of_warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u32 sum = value;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u32 other = __shfl_up_sync(~0u, sum, distance);
    if (lane >= distance) sum += other;
  }
  __syncthreads();
  if (lane == 31) of_warps[warp] = sum;
  __syncthreads();
  u32 before = sum - value;
  for (int i = 0; i < warp; ++i) before += of_warps[i];
  return before;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_ids_count(const __grid_constant__ Arguments p) {
  __shared__ u32 digits[PASSES * BINS], of_warps[WARPS];
  __shared__ bool last;
  for (int i = threadIdx.x; i < PASSES * BINS; i += THREADS) digits[i] = 0;
  const int thread = blockIdx.x * THREADS + threadIdx.x, threads = gridDim.x * THREADS;
  for (int i = thread; i < PASSES * p.tiles * BINS; i += threads) p.published[i] = 0;
  __syncthreads();
  for (int base = thread - int(threadIdx.x % 32); base < p.count; base += threads) {
    const int at = base + threadIdx.x % 32;
    const u32 active = __ballot_sync(~0u, at < p.count);
    if (at >= p.count) continue;
    const u32 key = key_of(p, at);
#pragma unroll
    for (int pass = 0; pass < PASSES; ++pass) {
      // Neighbouring ids belong to one table: their upper digits are equal, and one addition counts all of them.
      const u32 digit = digit_of(key, pass);
      int alike;
      __match_all_sync(active, digit, &alike);
      if (!alike)
        atomicAdd(&digits[pass * BINS + digit], 1);
      else if (threadIdx.x % 32 == 0)
        atomicAdd(&digits[pass * BINS + digit], __popc(active));
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < PASSES * BINS; i += THREADS)
    if (digits[i]) atomicAdd(&p.digits[i], digits[i]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(&p.tickets[PASSES], 1) == gridDim.x - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int pass = 0; pass < PASSES; ++pass) {
    u32 own[PER_THREAD], sum = 0;
    for (int i = 0; i < PER_THREAD; ++i) {
      const int digit = threadIdx.x * PER_THREAD + i;
      own[i] = digit < BINS ? look(&p.digits[pass * BINS + digit]) : 0;
      sum += own[i];
    }
    u32 start = sum_before(sum, of_warps);
    for (int i = 0; i < PER_THREAD; ++i) {
      const int digit = threadIdx.x * PER_THREAD + i;
      if (digit < BINS) p.starts[pass * BINS + digit] = start, p.digits[pass * BINS + digit] = 0;
      start += own[i];
    }
  }
  if (threadIdx.x <= PASSES) p.tickets[threadIdx.x] = 0;
}

extern "C" __global__ void __launch_bounds__(THREADS) sort_ids_pass(const __grid_constant__ Arguments p) {
  extern __shared__ u32 shared[];
  u32* const keys = shared;               // [TILE], in the order of their digits
  u32* const values = keys + TILE;        // [TILE]
  u32* const counts = values + TILE;      // [WARPS, BINS]: how many a warp has; then, of the tile's, how many come before
  u32* const tile_starts = counts + WARPS * BINS;  // [BINS]
  u32* const out_starts = tile_starts + BINS;      // [BINS]: of the output, less those of the tile
  u32* const of_warps = out_starts + BINS;         // [WARPS]
  __shared__ int ticket;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pass = p.pass;
  const int to = (PASSES - 1 - pass) % 2, from = 1 - to;
  // Tiles are assigned in the order in which blocks start: so the tiles that a block waits for have started.
  if (threadIdx.x == 0) ticket = atomicAdd(&p.tickets[pass], 1);
  for (int i = threadIdx.x; i < WARPS * BINS; i += THREADS) counts[i] = 0;
  __syncthreads();
  const int tile = ticket, first = tile * TILE + warp * 32 * ITEMS + lane;
  u32 key[ITEMS];
  int value[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const int at = first + 32 * i;
    const bool inside = at < p.count;
    // Items outside have the greatest key, so they come last in their tile, which is the last tile.
    key[i] = !inside ? ~0u : pass == 0 ? key_of(p, at) : p.keys[from][at];
    value[i] = !inside ? 0 : pass == 0 ? p.bags[at] : p.values[from][at];
  }
  u32* const of_warp = counts + warp * BINS;
  int rank[ITEMS];
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 digit = digit_of(key[i], pass);
    const u32 alike = __match_any_sync(~0u, digit);
    const int before = __popc(alike & ((1u << lane) - 1));
    const u32 sofar = of_warp[digit];
    rank[i] = sofar + before;
    __syncwarp();
    if (before == 0) of_warp[digit] = sofar + __popc(alike);
    __syncwarp();
  }
  __syncthreads();
  u32* const published = p.published + u64(pass) * p.tiles * BINS;
  u32 own[PER_THREAD], sum = 0;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int digit = threadIdx.x * PER_THREAD + i;
    own[i] = 0;
    if (digit < BINS) {
      for (int w = 0; w < WARPS; ++w) {
        const u32 mine = counts[w * BINS + digit];
        counts[w * BINS + digit] = own[i];
        own[i] += mine;
      }
      publish(published + u64(tile) * BINS + digit, tile == 0 ? ALL | own[i] : OWN | own[i]);
    }
    sum += own[i];
  }
  u32 start = sum_before(sum, of_warps);
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int digit = threadIdx.x * PER_THREAD + i;
    if (digit < BINS) tile_starts[digit] = start;
    start += own[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ITEMS; ++i) {
    const u32 digit = digit_of(key[i], pass);
    const int at = tile_starts[digit] + of_warp[digit] + rank[i];
    keys[at] = key[i];
    values[at] = value[i];
  }
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int digit = threadIdx.x * PER_THREAD + i;
    if (digit >= BINS) break;
    u32 before = 0;
    int next = tile - 1;
    while (next >= 0) {
      u32 words[WINDOW];
#pragma unroll
      for (int j = 0; j < WINDOW; ++j)
        words[j] = next - j >= 0 ? look(published + u64(next - j) * BINS + digit) : 0;
      bool waits = false;
#pragma unroll
      for (int j = 0; j < WINDOW; ++j) {
        if (waits || next < 0) continue;
        if (words[j] < OWN) {
          waits = true;
        } else {
          before += words[j] & COUNT;
          next = words[j] >= ALL ? -1 : next - 1;
        }
      }
    }
    if (tile > 0) publish(published + u64(tile) * BINS + digit, ALL | (before + own[i]));
    out_starts[digit] = p.starts[pass * BINS + digit] + before - tile_starts[digit];
  }
  __syncthreads();
  const int inside = min(TILE, p.count - tile * TILE);
  const u32 shift = pass == PASSES - 1;
  for (int i = threadIdx.x; i < inside; i += THREADS) {
    const u32 sorted = keys[i], at = out_starts[digit_of(sorted, pass)] + i;
    p.keys[to][at] = sorted - shift;
    p.values[to][at] = values[i];
  }
}
