/* CRC-32 as ZIP means it: x^32+x^26+x^23+x^22+x^16+x^12+x^11+x^10+x^8+x^7+x^5+x^4+x^2+x+1, bits reflected,
 * register inverted before and after (zlib's crc32).
 *
 * No state: the kernel is an argument, so one choice holds wherever this file is linked in. All kernels
 * give identical results. The caller passes a kernel that crc32_usable() calls usable; nothing is checked here.
 */
#ifndef CRC32_H
#define CRC32_H

#include <stddef.h>
#include <stdint.h>

enum {
    CRC32_PORTABLE, /* sixteen tables, any CPU */
    CRC32_PCLMUL,   /* x86-64: carry-less multiply of 128 bits */
    CRC32_VPCLMUL,  /* x86-64: the same on 512 bits */
    CRC32_ARMV8,    /* AArch64: the crc32x instruction, three streams */
    CRC32_KERNELS
};

/* What crc32_usable() answers. */
enum { CRC32_NOT_BUILT = -1, CRC32_NOT_ON_THIS_CPU = 0, CRC32_USABLE = 1 };

const char *crc32_kernel_name(int kernel);
int crc32_usable(int kernel);

/* The fastest kernel of this CPU. */
int crc32_best(void);

/* The CRC of nbytes more bytes after those whose CRC is `crc` (0 before the first). */
uint32_t crc32_update(int kernel, uint32_t crc, const void *data, size_t nbytes);

/* The CRC of two pieces put together, from theirs and the length of the second. O(log nbytes). */
uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_nbytes);

#endif
