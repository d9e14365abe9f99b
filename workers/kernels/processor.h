// What the processor that is compiled for can do.

#pragma once

// AVX-512 with products of bytes and of words.
#if defined(__AVX512VNNI__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && defined(__AVX512BW__)
#define HEADRACE_HAS_VNNI 1
#else
#define HEADRACE_HAS_VNNI 0
#endif

// And with those of bfloat16.
#if HEADRACE_HAS_VNNI && defined(__AVX512BF16__)
#define HEADRACE_HAS_BF16 1
#else
#define HEADRACE_HAS_BF16 0
#endif
