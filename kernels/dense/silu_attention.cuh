// bf16 warpgroup products for silu_attention.cu beyond those of hopper.cuh: with 64 columns, and with the first factor
// in registers; and fences that keep the compiler from moving an accumulator while the tensor cores use it.

#include "hopper.cuh"

#define R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define R16(i) R4(i), R4(i + 4), R4(i + 8), R4(i + 12)

__device__ __forceinline__ void fence_registers() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups of products are in flight. d: the result of the finished groups.
template <int PENDING>
__device__ __forceinline__ void wait_products(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : R16(0), R16(16), R16(32), R16(48) : "n"(PENDING) : "memory");
}

template <int PENDING>
__device__ __forceinline__ void wait_products(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : R16(0), R16(16) : "n"(PENDING) : "memory");
}

// d (or 0) + 64 rows of a times 64 or 128 rows of b, over 16 columns of both.
__device__ __forceinline__ void multiply_rows(float (&d)[32], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, accumulate, 1, 1, 0, 0;\n"
      "}\n"
      : R16(0), R16(16)
      : "l"(a), "l"(b), "r"(accumulate));
}

__device__ __forceinline__ void multiply_rows(float (&d)[64], u64 a, u64 b, int accumulate) {
  multiply<BF16, false>(d, a, b, accumulate);
}

// d (or 0) + 64 rows of a, in registers, times 16 rows of 128 columns of b.
__device__ __forceinline__ void multiply_columns(float (&d)[64], const u32* a, u64 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, accumulate, 1, 1, 1;\n"
      "}\n"
      : R16(0), R16(16), R16(32), R16(48)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

// The same with a as 16 rows of 64 columns in shared memory.
__device__ __forceinline__ void multiply_columns(float (&d)[64], u64 a, u64 b, int accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred accumulate;\n"
      "setp.ne.b32 accumulate, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, accumulate, 1, 1, 1, 1;\n"
      "}\n"
      : R16(0), R16(16), R16(32), R16(48)
      : "l"(a), "l"(b), "r"(accumulate));
}

#undef R16
#undef R4

// Relative error at most 2^-11, while bf16 has 2^-9; silu through exp would take two such operations.
__device__ __forceinline__ float fast_tanh(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
