/* Preloaded, this library hides AVX-512, VNNI and AMX from the process: CPUID traps (arch_prctl), and the handler
   clears the bits. Linux on x86 only. Libraries that look at CPUID when they are loaded then use AVX2 at most. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>
#include <cpuid.h>

#define ARCH_SET_CPUID 0x1012

static void allow(long yes) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, yes); }

static void handle(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *code = (const unsigned char *)r[REG_RIP];
    if (code[0] != 0x0f || code[1] != 0xa2) { /* a real fault */
        signal(number, SIG_DFL);
        return;
    }
    unsigned leaf = r[REG_RAX], sub = r[REG_RCX], a, b, c, d;
    allow(1);
    __cpuid_count(leaf, sub, a, b, c, d);
    allow(0);
    if (leaf == 7 && sub == 0) {
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31); /* AVX-512 */
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);                                    /* VBMI, VNNI */
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);               /* AMX, FP16 */
    } else if (leaf == 7 && sub == 1) {
        a &= ~(1u << 4 | 1u << 5 | 1u << 21 | 1u << 23); /* AVX-VNNI, BF16 */
        d &= ~(1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19);
    }
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void) {
    struct sigaction action = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSEGV, &action, NULL);
    allow(0);
}
