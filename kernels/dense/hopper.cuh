// Hopper instructions (sm_90a) for tiled products: bulk tensor copies, barriers, warpgroup products, and the 8 x 8
// matrices that warps read and write. Included by kernels that NVRTC compiles: no headers.

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// Formats of a matrix; as in fp8.py.
enum Format { BF16 = 0, E4M3 = 1, E5M2 = 2 };

struct alignas(64) TensorMap {
  u64 words[16];
};

__device__ __forceinline__ void init_barrier(u32 barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra end;\n"
      "bra again;\n"
      "end:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

__device__ __forceinline__ void load(u32 to, const TensorMap* from, int column, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :
      : "r"(to), "l"(from), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void copy(u32 to, const void* from, int bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {  // 128-byte swizzle
  return u64(1) << 62 | u64(stride >> 4) << 32 | u64(leading >> 4) << 16 | address >> 4;
}

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)
#define PRODUCT(kind, layouts) \
  asm volatile( \
      "{\n" \
      ".reg .pred accumulate;\n" \
      "setp.ne.b32 accumulate, %66, 0;\n" \
      "wgmma.mma_async.sync.aligned.m64n128" kind " " \
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
      "%64, %65, accumulate, 1, 1" layouts ";\n" \
      "}\n" \
      : R16(0), R16(16), R16(32), R16(48) \
      : "l"(a), "l"(b), "r"(accumulate))

// Keeps the compiler from moving reads and writes of an accumulator past the instructions around products in flight,
// which write it later than their instruction suggests.
__device__ __forceinline__ void keep_in_place(float (&acc)[64]) {
#pragma unroll
  for (float& sum : acc) asm volatile("" : "+f"(sum)::"memory");
}

// d (or 0) + 64 rows of a times 128 columns of b, over the 32 bytes of each row that the descriptors point to.
template <Format A, bool B_ROWS_ARE_DEPTH>
__device__ __forceinline__ void multiply(float (&d)[64], u64 a, u64 b, int accumulate) {
  if constexpr (A == E4M3)
    PRODUCT("k32.f32.e4m3.e4m3", "");
  else if constexpr (A == E5M2)
    PRODUCT("k32.f32.e5m2.e4m3", "");
  else if constexpr (B_ROWS_ARE_DEPTH)
    PRODUCT("k16.f32.bf16.bf16", ", 0, 1");
  else
    PRODUCT("k16.f32.bf16.bf16", ", 0, 0");
}

#undef PRODUCT
#undef R16
#undef R4

// Reads 16 rows of two blocks of 8 columns: each lane's column pairs, as in an accumulator fragment.
__device__ __forceinline__ void read(u32 address, u32* pairs) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(pairs[0]), "=r"(pairs[1]), "=r"(pairs[2]), "=r"(pairs[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ u32 pack(float low, float high) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ void write(u32 address, const u32* pairs) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// Writes 16-bit values: the lane's pairs belong to two columns, whose eight rows become 16 bytes of memory each.
__device__ __forceinline__ void write_transposed(u32 address, const u32* pairs) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(pairs[0]),
               "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

__device__ __forceinline__ uint4 words_at(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address)
               : "memory");
  return words;
}

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

// Two numbers times scale, rounded to F; out-of-range numbers saturate.
template <Format F>
__device__ __forceinline__ u32 quantise(float first, float second, float scale) {
  first *= scale, second *= scale;
  u16 result;
  if constexpr (F == E4M3)
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
  else
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(result) : "f"(second), "f"(first));
  return result;
}

template <Format F>
__device__ __forceinline__ u32 quantise(u32 pair, float scale) {
  return quantise<F>(low(pair), high(pair), scale);
}

__device__ __forceinline__ void from_e4m3(u32 pair, float& first, float& second) {  // of the lower 16 bits
  asm("{\n"
      ".reg .b16 low, high;\n"
      ".reg .b32 halves;\n"
      "cvt.rn.f16x2.e4m3x2 halves, %2;\n"
      "mov.b32 {low, high}, halves;\n"
      "cvt.f32.f16 %0, low;\n"
      "cvt.f32.f16 %1, high;\n"
      "}\n"
      : "=f"(first), "=f"(second)
      : "h"(u16(pair)));
}

__device__ __forceinline__ u32 word(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Regroups the bytes of four rows and eight columns by column, into word `at` of each; pairs: column pairs, by row.
__device__ __forceinline__ void transpose(const u32 (&pairs)[4][4], u32 (&columns)[8][4], int at) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 upper = pairs[0][i] | pairs[1][i] << 16, lower = pairs[2][i] | pairs[3][i] << 16;
    columns[2 * i][at] = __byte_perm(upper, lower, 0x6420);
    columns[2 * i + 1][at] = __byte_perm(upper, lower, 0x7531);
  }
}

// Stores eight columns of a row, given as pairs.
__device__ __forceinline__ void store_row(u8* to, const u32 (&pairs)[4]) {
  *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
}

// Detection of numbers that 8 bits cannot represent. A bf16 magnitude is its bits without the sign. In bit order,
// numbers within the range come first, then those beyond `limit` (the format's maximum divided by its scale), Infinity
// and NaN.
constexpr u32 NOT_FINITE = 0x7f80;

// Per half, the larger of the magnitude `largest` and the pair's magnitude; NaN is the largest. One instruction.
__device__ __forceinline__ u32 larger(u32 largest, u32 pair) {
  u32 result;
  asm("{\n"
      ".reg .b32 magnitudes;\n"
      "abs.bf16x2 magnitudes, %2;\n"
      "max.NaN.bf16x2 %0, %1, magnitudes;\n"
      "}\n"
      : "=r"(result)
      : "r"(largest), "r"(pair));
  return result;
}

__device__ __forceinline__ u32 largest_of(u32 largest, const uint4& pairs) {
  return larger(larger(larger(larger(largest, pairs.x), pairs.y), pairs.z), pairs.w);
}

__device__ __forceinline__ bool beyond(u32 largest, u32 limit) {
  return max(largest & 0x7fff, largest >> 16 & 0x7fff) > limit;
}

struct Beyond {  // counts
  u32 large = 0, not_finite = 0;

  __device__ __forceinline__ void add(u32 magnitude, u32 limit) {
    if (magnitude >= NOT_FINITE)
      ++not_finite;
    else if (magnitude > limit)
      ++large;
  }
  __device__ __forceinline__ void add_pair(u32 pair, u32 limit) {
    add(pair & 0x7fff, limit), add(pair >> 16 & 0x7fff, limit);
  }
  // tally: a tensor's numbers that were too large, and its non-finite ones.
  __device__ __forceinline__ void add_to(u64* tally) const {
    if (large) atomicAdd(tally, u64(large));
    if (not_finite) atomicAdd(tally + 1, u64(not_finite));
  }
};

// Stores the 16 rows that `transpose` has regrouped to the transposed matrix, whose rows are `stride` bytes apart.
__device__ __forceinline__ void store_columns(u8* to, int stride, int row, int column, const u32 (&columns)[8][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    *reinterpret_cast<uint4*>(to + u64(column + i) * stride + row) =
        make_uint4(columns[i][0], columns[i][1], columns[i][2], columns[i][3]);
}

// Stores a piece: 64 rows of 64 columns, 128 bytes each, with the 128-byte swizzle. The warp's 16 rows go to `to`,
// [batch, width], if IN_BF16, and, scaled and rounded to F, to `quantised`. `p` is read by these field names: passed as
// separate parameters, the values would make the compiler branch for each row.
template <Format F, bool IN_BF16, class Arguments>
__device__ __forceinline__ void store(const Arguments& p, u16* to, u32 piece, int first_row, int first_column) {
  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16, column = first_column + lane % 8 * 8;
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 16; i += 4) {
    const int row = warp_row + i + lane / 8;
    const uint4 values = words_at(piece + row * 128 + ((lane ^ row) % 8 << 4));
    if (F != BF16) largest = largest_of(largest, values);
    if (IN_BF16 && first_row + row < p.batch && column < p.width)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to + u64(first_row + row) * p.width + column),
                   "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                   : "memory");
    if constexpr (F != BF16) {
      const u32 left = quantise<F>(values.x, p.scale) | quantise<F>(values.y, p.scale) << 16;
      const u32 right = quantise<F>(values.z, p.scale) | quantise<F>(values.w, p.scale) << 16;
      if (first_row + row < p.batch && column < p.width)
        asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p.quantised + u64(first_row + row) * p.width + column),
                     "r"(left), "r"(right)
                     : "memory");
    }
  }
  if constexpr (F != BF16) {
    if (!beyond(largest, p.limit)) return;
    Beyond counts;
#pragma unroll 1
    for (int i = 0; i < 16; i += 4) {
      const int row = warp_row + i + lane / 8;
      if (first_row + row >= p.batch || column >= p.width) continue;
      const uint4 values = words_at(piece + row * 128 + ((lane ^ row) % 8 << 4));
      counts.add_pair(values.x, p.limit), counts.add_pair(values.y, p.limit);
      counts.add_pair(values.z, p.limit), counts.add_pair(values.w, p.limit);
    }
    counts.add_to(p.tally);
  }
}

// The same numbers, 8-bit and transposed: a run of 64 rows for each of 64 columns. A sum over the batch may be in any
// order that both factors share: each 16 rows are stored as 0, 8, 1, 9 and so on, as an accumulator fragment has rows r
// and r + 8 in one lane.
constexpr int TRANSPOSED_PIECE = 64 * 64;

__device__ __forceinline__ u32 in_transposed(u32 piece, int column, int run) {  // of 16 rows, without bank conflicts
  return piece + column * 64 + ((run ^ column / 2 % 4) << 4);
}

// Called by a warpgroup whose warps hold an accumulator's `pairs` of 16 rows each: [8 columns][row, row 8 below].
// Alternates between two pieces: the barrier of one call makes it safe for the call after next to overwrite its piece.
template <Format F, class Arguments>
__device__ __forceinline__ void store_transposed(const Arguments& p, const u32 (&pairs)[16], u32 piece, int warpgroup,
                                                 int first_row, int first_column) {
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  __syncwarp();  // lanes that count values out of range come later, and stmatrix needs the whole warp at once
#pragma unroll
  for (int block = 0; block < 8; block += 4) {
    u32 rows[4];  // row pairs, of two columns
#pragma unroll
    for (int i = 0; i < 4; ++i)
      rows[i] = __byte_perm(quantise<F>(pairs[2 * (block + i)], p.scale),
                            quantise<F>(pairs[2 * (block + i) + 1], p.scale), 0x5140);
    write_transposed(in_transposed(piece, block * 8 + lane, warp), rows);
  }
  asm volatile("bar.sync %0, 128;" ::"r"(1 + warpgroup) : "memory");
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = i * 32 + thread / 4, run = thread % 4;
    const uint4 values = words_at(in_transposed(piece, column, run));
    if (first_row + run * 16 < p.batch && first_column + column < p.width)
      asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p.transposed +
                                                                    u64(first_column + column) * p.transposed_stride +
                                                                    first_row + run * 16),
                   "r"(values.x), "r"(values.y), "r"(values.z), "r"(values.w)
                   : "memory");
  }
}
