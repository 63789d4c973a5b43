/* A worker with none of our code. It holds KEEP and SPARE MiB, and gives SPARE back when $MEMORY_PRESSURE_WATCH can be
   read; with a third argument it reads and gives nothing back. Whatever happens, it never asks anybody for anything. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char *hold(size_t bytes) {
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? exit(1), NULL : memset(memory, 1, bytes);
}

static int watch(const char *path) {
    struct stat status;
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || !strcmp(path, "/dev/null") || stat(path, &status)) exit(2);
    if (S_ISFIFO(status.st_mode)) return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    strncpy(address.sun_path, path, sizeof address.sun_path - 1);
    return connect(fd, (struct sockaddr *)&address, sizeof address) ? exit(3), -1 : fd;
}

int main(int count, char **arguments) {
    size_t spare = (size_t)atol(arguments[2]) << 20;
    char sink[64], *kept = hold((size_t)atol(arguments[1]) << 20), *cache = hold(spare);
    struct pollfd pressure = {.fd = watch(getenv("MEMORY_PRESSURE_WATCH")), .events = POLLIN};
    printf("holding, from %p\n", (void *)kept);
    fflush(stdout);
    while (poll(&pressure, 1, -1) > 0 && read(pressure.fd, sink, sizeof sink) > 0)
        if (cache && count == 3) cache = (munmap(cache, spare), NULL);
    return 0;
}
