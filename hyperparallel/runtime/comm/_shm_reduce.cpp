// Reductions of dense parts in member order, so that every member gets the same bits. 16-bit floats
// are summed in float32 and rounded once. NaN wins over any number in max and min. Part of
// _shm.cpp.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

using u8 = uint8_t;
using u32 = uint32_t;
using u64 = uint64_t;

enum Type : u32 { kF32, kF64, kBF16, kI64, kI32, kI16, kI8, kU8 };
enum Reduce : u32 { kSum, kMax, kMin, kProd, kAvg };

inline float widen(uint16_t bits) {
  u32 word = static_cast<u32>(bits) << 16;
  float out;
  std::memcpy(&out, &word, 4);
  return out;
}

inline uint16_t narrow(float value) {  // round to nearest even; NaN stays NaN
  u32 word;
  std::memcpy(&word, &value, 4);
  // Just under half of the last bit kept, plus that bit: ties go to even.
  u32 rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0u : rounded);
}

template <typename T>
inline T combine(T a, T b, u32 how) {
  if constexpr (std::is_integral_v<T>) {
    // Unsigned: torch wraps, signed overflow is undefined. The product in 64 bits: two 16-bit
    // factors would be multiplied as int.
    using U = std::make_unsigned_t<T>;
    switch (how) {
      case kMax: return a > b ? a : b;
      case kMin: return a < b ? a : b;
      case kProd: return static_cast<T>(static_cast<u64>(static_cast<U>(a)) * static_cast<U>(b));
      default: return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
    }
  } else {
    switch (how) {
      case kMax: return (a > b || a != a) ? a : b;  // NaN wins, as in torch
      case kMin: return (a < b || a != a) ? a : b;
      case kProd: return a * b;
      default: return a + b;
    }
  }
}

constexpr size_t kBlock = 2048;  // elements: a block of sums stays in the first-level cache

// `how` is known to the compiler, so that the loops become vector code.
template <typename T, u32 how>
void reduce_dense(T* into, const u8* const* parts, int n, size_t count) {
  auto* first = reinterpret_cast<const T*>(parts[0]);
  auto* second = reinterpret_cast<const T*>(parts[1]);
  if (n == 2) {
    // `into` may be one of the parts, element on element, which keeps no iteration from another.
#pragma GCC ivdep
    for (size_t i = 0; i < count; i++) into[i] = combine<T>(first[i], second[i], how);
    return;
  }
  // Block by block through all parts: each sum is read and written in the nearest cache.
  T sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    size_t size = std::min(kBlock, count - at);
    for (size_t i = 0; i < size; i++) sums[i] = combine<T>(first[at + i], second[at + i], how);
    for (int p = 2; p < n; p++) {
      auto* next = reinterpret_cast<const T*>(parts[p]) + at;
      for (size_t i = 0; i < size; i++) sums[i] = combine<T>(sums[i], next[i], how);
    }
    std::memcpy(into + at, sums, size * sizeof(T));
  }
}

template <u32 how>
void reduce_bf16(uint16_t* into, const u8* const* parts, int n, size_t count, float scale) {
  float sums[kBlock];
  for (size_t at = 0; at < count; at += kBlock) {
    size_t size = std::min(kBlock, count - at);
    auto* first = reinterpret_cast<const uint16_t*>(parts[0]) + at;
    for (size_t i = 0; i < size; i++) sums[i] = widen(first[i]);
    for (int p = 1; p < n; p++) {
      auto* next = reinterpret_cast<const uint16_t*>(parts[p]) + at;
      for (size_t i = 0; i < size; i++) sums[i] = combine<float>(sums[i], widen(next[i]), how);
    }
    for (size_t i = 0; i < size; i++) into[at + i] = narrow(sums[i] / scale);
  }
}

template <u32 how>
void reduce_as(u32 type, u8* into, const u8* const* parts, int n, size_t bytes, float scale) {
  switch (type) {
    case kF32: return reduce_dense<float, how>((float*)into, parts, n, bytes / 4);
    case kF64: return reduce_dense<double, how>((double*)into, parts, n, bytes / 8);
    case kBF16: return reduce_bf16<how>((uint16_t*)into, parts, n, bytes / 2, scale);
    case kI64: return reduce_dense<int64_t, how>((int64_t*)into, parts, n, bytes / 8);
    case kI32: return reduce_dense<int32_t, how>((int32_t*)into, parts, n, bytes / 4);
    case kI16: return reduce_dense<int16_t, how>((int16_t*)into, parts, n, bytes / 2);
    case kI8: return reduce_dense<int8_t, how>((int8_t*)into, parts, n, bytes);
    case kU8: return reduce_dense<u8, how>(into, parts, n, bytes);
  }
}

void reduce(u32 type, u32 how, u8* into, const u8* const* parts, int n, size_t bytes) {
  switch (how) {
    case kMax: return reduce_as<kMax>(type, into, parts, n, bytes, 1);
    case kMin: return reduce_as<kMin>(type, into, parts, n, bytes, 1);
    case kProd: return reduce_as<kProd>(type, into, parts, n, bytes, 1);
    default: break;
  }
  reduce_as<kSum>(type, into, parts, n, bytes, how == kAvg ? static_cast<float>(n) : 1.0f);
  if (how != kAvg) return;
  if (type == kF32) for (size_t i = 0; i < bytes / 4; i++) ((float*)into)[i] /= n;
  if (type == kF64) for (size_t i = 0; i < bytes / 8; i++) ((double*)into)[i] /= n;
}

}  // namespace
