/* CRC-32, see crc32.h.
 *
 * The algebra. A message is a polynomial over GF(2), its first bit the highest power; the CRC is the message
 * times x^32, modulo P. Bits are reflected: in a 32-bit value bit 31 stands for x^0 and bit 0 for x^31, so
 * "times x" is a shift to the right, and P without its x^32 is 0xedb88320.
 *
 * Every constant below is x^n mod P for some n, which ten lines of any language give:
 *     v = 0x80000000 (that is x^0); n times: v = v & 1 ? (v >> 1) ^ 0xedb88320 : v >> 1
 */
#include "crc32.h"

#define POLYNOMIAL 0xedb88320u
#define ONE 0x80000000u /* x^0 */

#if defined(__GNUC__) && defined(__x86_64__)
#define BUILT_X86 1
#include <immintrin.h>
#elif defined(__GNUC__) && defined(__aarch64__) && defined(__AARCH64EL__)
#define BUILT_ARM 1
#include <arm_acle.h>
#ifdef __linux__
#include <sys/auxv.h>
#endif
#endif

/* ---- portable ------------------------------------------------------------------------------------------
 *
 * table[k][byte] is what `byte`, followed by k zero bytes, leaves in the register. It is linear in the bits of
 * the byte: bit j alone leaves x^(39 - j + 8k) mod P, and those eight powers are what a ROW is written with.
 */
#define BIT(i, j, power) ((i) >> (j) & 1 ? (power) : 0u)
#define ENTRY(i, a, b, c, d, e, f, g, h)                                                           \
    (BIT(i, 0, a) ^ BIT(i, 1, b) ^ BIT(i, 2, c) ^ BIT(i, 3, d) ^ BIT(i, 4, e) ^ BIT(i, 5, f) ^     \
     BIT(i, 6, g) ^ BIT(i, 7, h))
#define ENTRIES4(i, ...)                                                                           \
    ENTRY((i), __VA_ARGS__), ENTRY((i) + 1, __VA_ARGS__), ENTRY((i) + 2, __VA_ARGS__),             \
        ENTRY((i) + 3, __VA_ARGS__)
#define ENTRIES16(i, ...)                                                                          \
    ENTRIES4((i), __VA_ARGS__), ENTRIES4((i) + 4, __VA_ARGS__), ENTRIES4((i) + 8, __VA_ARGS__),    \
        ENTRIES4((i) + 12, __VA_ARGS__)
#define ENTRIES64(i, ...)                                                                          \
    ENTRIES16((i), __VA_ARGS__), ENTRIES16((i) + 16, __VA_ARGS__),                                 \
        ENTRIES16((i) + 32, __VA_ARGS__), ENTRIES16((i) + 48, __VA_ARGS__)
#define ROW(...)                                                                                   \
    { ENTRIES64(0, __VA_ARGS__), ENTRIES64(64, __VA_ARGS__), ENTRIES64(128, __VA_ARGS__),          \
      ENTRIES64(192, __VA_ARGS__) }

static const uint32_t table[16][256] = {
    ROW(0x77073096, 0xee0e612c, 0x076dc419, 0x0edb8832, 0x1db71064, 0x3b6e20c8, 0x76dc4190, 0xedb88320),
    ROW(0x191b3141, 0x32366282, 0x646cc504, 0xc8d98a08, 0x4ac21251, 0x958424a2, 0xf0794f05, 0x3b83984b),
    ROW(0x01c26a37, 0x0384d46e, 0x0709a8dc, 0x0e1351b8, 0x1c26a370, 0x384d46e0, 0x709a8dc0, 0xe1351b80),
    ROW(0xb8bc6765, 0xaa09c88b, 0x8f629757, 0xc5b428ef, 0x5019579f, 0xa032af3e, 0x9b14583d, 0xed59b63b),
    ROW(0x3d6029b0, 0x7ac05360, 0xf580a6c0, 0x30704bc1, 0x60e09782, 0xc1c12f04, 0x58f35849, 0xb1e6b092),
    ROW(0xcb5cd3a5, 0x4dc8a10b, 0x9b914216, 0xec53826d, 0x03d6029b, 0x07ac0536, 0x0f580a6c, 0x1eb014d8),
    ROW(0xa6770bb4, 0x979f1129, 0xf44f2413, 0x33ef4e67, 0x67de9cce, 0xcfbd399c, 0x440b7579, 0x8816eaf2),
    ROW(0xccaa009e, 0x4225077d, 0x844a0efa, 0xd3e51bb5, 0x7cbb312b, 0xf9766256, 0x299dc2ed, 0x533b85da),
    ROW(0x177b1443, 0x2ef62886, 0x5dec510c, 0xbbd8a218, 0xacc04271, 0x82f182a3, 0xde920307, 0x6655004f),
    ROW(0xefc26b3e, 0x04f5d03d, 0x09eba07a, 0x13d740f4, 0x27ae81e8, 0x4f5d03d0, 0x9eba07a0, 0xe6050901),
    ROW(0xc18edfc0, 0x586cb9c1, 0xb0d97382, 0xbac3e145, 0xaef6c4cb, 0x869c8fd7, 0xd64819ef, 0x77e1359f),
    ROW(0x9ba54c6f, 0xec3b9e9f, 0x03063b7f, 0x060c76fe, 0x0c18edfc, 0x1831dbf8, 0x3063b7f0, 0x60c76fe0),
    ROW(0xdd96d985, 0x605cb54b, 0xc0b96a96, 0x5a03d36d, 0xb407a6da, 0xb37e4bf5, 0xbd8d91ab, 0xa06a2517),
    ROW(0x9d0fe176, 0xe16ec4ad, 0x19ac8f1b, 0x33591e36, 0x66b23c6c, 0xcd6478d8, 0x41b9f7f1, 0x8373efe2),
    ROW(0xb9fbdbe8, 0xa886b191, 0x8a7c6563, 0xcf89cc87, 0x44629f4f, 0x88c53e9e, 0xcafb7b7d, 0x4e87f0bb),
    ROW(0xae689191, 0x87a02563, 0xd4314c87, 0x73139f4f, 0xe6273e9e, 0x173f7b7d, 0x2e7ef6fa, 0x5cfdedf4),
};

/* From here on `state` is the bare register, not inverted. */
static inline uint32_t four_bytes(uint32_t state, const uint8_t *p, int k) {
    return table[k + 3][(state & 255) ^ p[0]] ^ table[k + 2][(state >> 8 & 255) ^ p[1]] ^
           table[k + 1][(state >> 16 & 255) ^ p[2]] ^ table[k][(state >> 24) ^ p[3]];
}

static uint32_t portable(uint32_t state, const uint8_t *p, size_t nbytes) {
    for (; nbytes >= 16; p += 16, nbytes -= 16)
        state = four_bytes(state, p, 12) ^ four_bytes(0, p + 4, 8) ^ four_bytes(0, p + 8, 4) ^
                four_bytes(0, p + 12, 0);
    for (; nbytes; nbytes--)
        state = table[0][(state & 255) ^ *p++] ^ state >> 8;
    return state;
}

/* ---- joining ------------------------------------------------------------------------------------------ */

/* a times b mod P. */
static uint32_t multiply(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    for (; a; a <<= 1) {
        product ^= b & -(a >> 31);
        b = b >> 1 ^ (POLYNOMIAL & -(b & 1));
    }
    return product;
}

/* What `nbytes` zero bytes do to a register: times x^(8 nbytes). */
static uint32_t shift(uint32_t state, uint64_t nbytes) {
    uint32_t power = ONE >> 8;
    for (; nbytes; nbytes >>= 1) {
        if (nbytes & 1) state = multiply(state, power);
        power = multiply(power, power);
    }
    return state;
}

uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_nbytes) {
    return first ? shift(first, second_nbytes) ^ second : second;
}

/* ---- x86-64: folding ----------------------------------------------------------------------------------
 *
 * A 128-bit register R, loaded as bytes lie, is a polynomial of degree 127; its low half L holds the upper
 * powers, R = L x^64 + H. Whatever lies D bits further on in the message, R may be replaced there by anything
 * congruent to R x^D = L x^(D+64) + H x^D: two carry-less products, 128 bits again. The product of two
 * reflected 64-bit values comes out times x, and a 32-bit value v in the low half of a 64-bit one reads as
 * v x^32, shifted left by one as v x^31. So the factors are (x^(D+32) mod P) << 1 for L and
 * (x^(D-32) mod P) << 1 for H. What is left in the end is 16 bytes long and goes through the tables.
 */
#ifdef BUILT_X86

#define BY_128 0x0ccaa009e, 0x1751997d0 /* the factor for H, the factor for L */
#define BY_512 0x1c6e41596, 0x154442bd4
#define BY_4096 0x1d741f35c, 0x01072db28

/* AVX is asked for its encoding of the same instructions: 17 GB/s, and 9 without (EPYC, Zen 5). */
#define TARGET_128 __attribute__((target("pclmul,avx")))
#define TARGET_512 __attribute__((target("avx512f,vpclmulqdq,pclmul,avx")))

TARGET_128 static inline __m128i load_128(const uint8_t *p) {
    return _mm_loadu_si128((const __m128i *)p);
}

TARGET_128 static inline __m128i fold_128(__m128i r, __m128i factors, __m128i next) {
    __m128i low = _mm_clmulepi64_si128(r, factors, 0x00), high = _mm_clmulepi64_si128(r, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* The rest of a message, after what is in r. */
TARGET_128 static inline uint32_t finish_128(__m128i r, const uint8_t *p, size_t nbytes) {
    uint8_t left[16];
    for (; nbytes >= 16; p += 16, nbytes -= 16)
        r = fold_128(r, _mm_set_epi64x(BY_128), load_128(p));
    _mm_storeu_si128((__m128i *)left, r);
    return portable(portable(0, left, 16), p, nbytes);
}

/* Four registers: eight are no faster (17 GB/s). */
TARGET_128 static uint32_t pclmul(uint32_t state, const uint8_t *p, size_t nbytes) {
    const __m128i by_512 = _mm_set_epi64x(BY_512), by_128 = _mm_set_epi64x(BY_128);
    const __m128i start = _mm_cvtsi32_si128((int)state);
    __m128i r[4];
    if (nbytes < 16) return portable(state, p, nbytes);
    if (nbytes < 64) return finish_128(_mm_xor_si128(load_128(p), start), p + 16, nbytes - 16);
    for (int i = 0; i < 4; i++) r[i] = load_128(p + 16 * i);
    r[0] = _mm_xor_si128(r[0], start);
    for (p += 64, nbytes -= 64; nbytes >= 64; p += 64, nbytes -= 64)
        for (int i = 0; i < 4; i++) r[i] = fold_128(r[i], by_512, load_128(p + 16 * i));
    for (int i = 1; i < 4; i++) r[i] = fold_128(r[i - 1], by_128, r[i]);
    return finish_128(r[3], p, nbytes);
}

TARGET_512 static inline __m512i fold_512(__m512i r, __m512i factors, __m512i next) {
    __m512i low = _mm512_clmulepi64_epi128(r, factors, 0x00), high = _mm512_clmulepi64_epi128(r, factors, 0x11);
    return _mm512_ternarylogic_epi64(low, high, next, 0x96); /* exclusive or of all three */
}

/* Eight registers of four 128-bit lanes each. */
TARGET_512 static uint32_t vpclmul(uint32_t state, const uint8_t *p, size_t nbytes) {
    const __m512i by_4096 = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_4096));
    const __m512i by_512 = _mm512_broadcast_i32x4(_mm_set_epi64x(BY_512));
    const __m128i by_128 = _mm_set_epi64x(BY_128);
    __m512i r[8];
    if (nbytes < 512) return pclmul(state, p, nbytes);
    for (int i = 0; i < 8; i++) r[i] = _mm512_loadu_si512(p + 64 * i);
    r[0] = _mm512_xor_si512(r[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)state)));
    for (p += 512, nbytes -= 512; nbytes >= 512; p += 512, nbytes -= 512)
        for (int i = 0; i < 8; i++) r[i] = fold_512(r[i], by_4096, _mm512_loadu_si512(p + 64 * i));
    for (int i = 1; i < 8; i++) r[i] = fold_512(r[i - 1], by_512, r[i]);
    for (; nbytes >= 64; p += 64, nbytes -= 64) r[7] = fold_512(r[7], by_512, _mm512_loadu_si512(p));
    __m128i left = _mm512_extracti32x4_epi32(r[7], 0);
    left = fold_128(left, by_128, _mm512_extracti32x4_epi32(r[7], 1));
    left = fold_128(left, by_128, _mm512_extracti32x4_epi32(r[7], 2));
    left = fold_128(left, by_128, _mm512_extracti32x4_epi32(r[7], 3));
    return finish_128(left, p, nbytes);
}
#endif

/* ---- AArch64: ZIP's polynomial in hardware ------------------------------------------------------------
 *
 * crc32x takes eight bytes, and its result is there three cycles later: three streams keep it busy. They are
 * joined by x^(8 STREAM) and x^(16 STREAM).
 */
#ifdef BUILT_ARM

enum { STREAM = 4096 };
#define BY_STREAM 0x09fe548fu
#define BY_TWO_STREAMS 0x83852d0fu
#define TARGET_CRC __attribute__((target("+crc")))

static inline uint64_t eight_bytes(const uint8_t *p) {
    uint64_t value;
    __builtin_memcpy(&value, p, 8);
    return value;
}

TARGET_CRC static uint32_t armv8(uint32_t a, const uint8_t *p, size_t nbytes) {
    for (; nbytes >= 3 * STREAM; p += 3 * STREAM, nbytes -= 3 * STREAM) {
        uint32_t b = 0, c = 0;
        for (int i = 0; i < STREAM; i += 8) {
            a = __crc32d(a, eight_bytes(p + i));
            b = __crc32d(b, eight_bytes(p + STREAM + i));
            c = __crc32d(c, eight_bytes(p + 2 * STREAM + i));
        }
        a = multiply(a, BY_TWO_STREAMS) ^ multiply(b, BY_STREAM) ^ c;
    }
    for (; nbytes >= 8; p += 8, nbytes -= 8) a = __crc32d(a, eight_bytes(p));
    for (; nbytes; nbytes--) a = __crc32b(a, *p++);
    return a;
}
#endif

/* ---- choosing ----------------------------------------------------------------------------------------- */

const char *crc32_kernel_name(int kernel) {
    static const char *const names[CRC32_KERNELS] = {"portable", "pclmul", "vpclmul", "armv8"};
    return names[kernel];
}

int crc32_usable(int kernel) {
    switch (kernel) {
    case CRC32_PORTABLE:
        return CRC32_USABLE;
#ifdef BUILT_X86
    case CRC32_PCLMUL:
        return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx");
    case CRC32_VPCLMUL:
        return __builtin_cpu_supports("vpclmulqdq") && __builtin_cpu_supports("avx512f") &&
               __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx");
#endif
#ifdef BUILT_ARM
    case CRC32_ARMV8:
#ifdef __linux__
        return (getauxval(AT_HWCAP) >> 7 & 1) != 0; /* HWCAP_CRC32 */
#elif defined(__APPLE__)
        return CRC32_USABLE; /* every 64-bit Apple CPU has it */
#else
        return CRC32_NOT_ON_THIS_CPU;
#endif
#endif
    }
    return CRC32_NOT_BUILT;
}

/* In cache, GB/s for 256 B, 1 KiB, 256 KiB (EPYC, Zen 5): portable 6, 6, 6; pclmul 11, 17, 17;
 * vpclmul 11, 33, 69. The widest is never slower, as short pieces go to pclmul. */
int crc32_best(void) {
    static const uint8_t order[] = {CRC32_VPCLMUL, CRC32_PCLMUL, CRC32_ARMV8};
    for (size_t i = 0; i < sizeof order; i++)
        if (crc32_usable(order[i]) == CRC32_USABLE) return order[i];
    return CRC32_PORTABLE;
}

uint32_t crc32_update(int kernel, uint32_t crc, const void *data, size_t nbytes) {
    switch (kernel) {
#ifdef BUILT_X86
    case CRC32_PCLMUL:
        return ~pclmul(~crc, data, nbytes);
    case CRC32_VPCLMUL:
        return ~vpclmul(~crc, data, nbytes);
#endif
#ifdef BUILT_ARM
    case CRC32_ARMV8:
        return ~armv8(~crc, data, nbytes);
#endif
    default:
        return ~portable(~crc, data, nbytes);
    }
}
