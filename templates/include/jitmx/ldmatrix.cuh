// Fragments of m16n8k16 from rows of 128 bytes, 64 values of 16 bits, in shared memory.
#pragma once
#include "jitmx/ptx.cuh"

namespace jitmx {

// Where vector v (16 bytes) of a row lies: the eight lanes that read the same vector of eight neighbouring rows touch every bank
// once.
__device__ __forceinline__ u32 swizzled(int row, int v) { return row * 128 + ((v ^ row % 8) * 16); }

// Four 8 x 8 matrices; lane 8 i + r gives the address of row r of matrix i, and register i of lane 4 g + t holds elements 2 t
// and 2 t + 1 of its row g.
__device__ __forceinline__ void load_matrices(u32 address, u32 (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(address) : "memory");
}

}  // namespace jitmx
