// Runs a forward kernel on the arguments of a file: words, then arrays, relocated here. Prints out and lse to a file.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

extern void KERNEL(void *);

int main(int argc, char **argv) {
    (void)argc;
    FILE *f = fopen(argv[1], "rb");
    int64_t head[5]; // words, pointers among them, pointers in memory, bytes of memory, bytes of results at its end
    if (!f || fread(head, 8, 5, f) != 5) return 1;
    int64_t *words = aligned_alloc(64, (head[0] * 8 + 63) / 64 * 64), *which = malloc((head[1] + head[2]) * 8);
    int64_t pointers = head[1] + head[2];
    char *memory = aligned_alloc(64, (head[3] + 63) / 64 * 64);
    if (fread(words, 8, head[0], f) != (size_t)head[0] || fread(which, 8, pointers, f) != (size_t)pointers) return 1;
    if (fread(memory, 1, head[3], f) != (size_t)head[3]) return 1;
    fclose(f);
    for (int64_t i = 0; i < head[1]; i++) words[which[i]] += (int64_t)memory; // offsets become addresses
    for (int64_t i = head[1]; i < pointers; i++) *(int64_t *)(memory + which[i]) += (int64_t)memory;
    KERNEL(words);
    f = fopen(argv[2], "wb");
    return fwrite(memory + head[3] - head[4], 1, head[4], f) != (size_t)head[4];
}
