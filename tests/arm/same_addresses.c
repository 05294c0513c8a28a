// Runs a kernel on another process's memory: a file has it, and is mapped where that process has it.
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

extern void KERNEL(void *);

int main(int argc, char **argv) {
    (void)argc;
    FILE *list = fopen(argv[1], "r"); // addresses, bytes and places in the file, in hexadecimal
    int memory = open(argv[2], O_RDWR);
    unsigned long at, size, place;
    while (fscanf(list, "%lx %lx %lx", &at, &size, &place) == 3)
        if (mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory, place) != (void *)at) return 1;
    KERNEL((void *)strtoul(argv[3], 0, 16));
    return 0;
}
