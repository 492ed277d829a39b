/*
 * What every load generator shares: arguments, clock, latency samples, the answer.
 *
 * A client is called as `client MODE key=value ...` and prints one JSON object on one line.
 * The modes are the same for every system, so that the driver treats all alike:
 *   produce   publish up to count messages of size bytes, at most seconds; the clock stops
 *             when the last one is acknowledged
 *   consume   read count messages from the beginning
 *   ack       one message at a time: publish, wait for the acknowledgement
 *   e2e       one message at a time: publish in one thread, receive in another
 * An error prints a sentence on stderr and exits with 1.
 */
#ifndef PENSTOCK_BENCH_H
#define PENSTOCK_BENCH_H

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline uint64_t now_ns(void) {
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000ull + (uint64_t)ts.tv_nsec;
}

__attribute__((noreturn, format(printf, 1, 2))) static inline void die(const char *format, ...) {
    va_list ap;
    va_start(ap, format);
    vfprintf(stderr, format, ap);
    va_end(ap);
    fputc('\n', stderr);
    exit(1);
}

/* ---- arguments ---- */

static int arg_count;
static char **arg_values;

static inline void args_init(int argc, char **argv) {
    if (argc < 2) die("usage: %s MODE key=value ...", argv[0]);
    arg_count = argc;
    arg_values = argv;
}

/* The nth value given for key, or NULL. */
static inline const char *arg_nth(const char *key, int nth) {
    size_t len = strlen(key);
    for (int i = 2; i < arg_count; i++)
        if (strncmp(arg_values[i], key, len) == 0 && arg_values[i][len] == '=' && nth-- == 0)
            return arg_values[i] + len + 1;
    return NULL;
}

static inline const char *arg_str(const char *key, const char *fallback) {
    const char *value = arg_nth(key, 0);
    return value ? value : fallback;
}

static inline int64_t arg_int(const char *key, int64_t fallback) {
    const char *value = arg_nth(key, 0);
    return value ? strtoll(value, NULL, 10) : fallback;
}

static inline double arg_double(const char *key, double fallback) {
    const char *value = arg_nth(key, 0);
    return value ? strtod(value, NULL) : fallback;
}

static inline const char *arg_need(const char *key) {
    const char *value = arg_nth(key, 0);
    if (!value) die("missing argument %s=", key);
    return value;
}

static inline int mode_is(const char *mode) { return strcmp(arg_values[1], mode) == 0; }

/* addr=host:port */
static inline void arg_addr(char *host, size_t host_size, int *port) {
    const char *addr = arg_need("addr");
    const char *colon = strrchr(addr, ':');
    if (!colon || (size_t)(colon - addr) >= host_size) die("addr must be host:port, not %s", addr);
    memcpy(host, addr, (size_t)(colon - addr));
    host[colon - addr] = 0;
    *port = atoi(colon + 1);
}

/* A payload that no layer can compress or share by accident. */
static inline char *payload_new(size_t size) {
    char *payload = malloc(size + 8);
    uint64_t x = 0x9e3779b97f4a7c15ull;
    if (!payload) die("out of memory");
    for (size_t i = 0; i < size; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        payload[i] = (char)x;
    }
    return payload;
}

/* A run ends at count messages or after seconds, whichever comes first. The clock is read every
 * 64th time only, so that it costs nothing beside the work measured. */
struct budget {
    int64_t count;
    uint64_t end_ns;
    unsigned ticks;
    int over;
};

static inline struct budget budget_start(int64_t default_count, double default_seconds) {
    struct budget b = {arg_int("count", default_count), 0, 0, 0};
    b.end_ns = now_ns() + (uint64_t)(arg_double("seconds", default_seconds) * 1e9);
    return b;
}

static inline int budget_over(struct budget *b, int64_t done) {
    if (done >= b->count) return 1;
    if ((b->ticks++ & 63) == 0) b->over = now_ns() >= b->end_ns;
    return b->over;
}

/* ---- latency samples ---- */

struct samples {
    uint32_t *ns;
    size_t used, room;
};

static inline void samples_add(struct samples *s, uint64_t ns) {
    if (s->used == s->room) {
        s->room = s->room ? s->room * 2 : 4096;
        s->ns = realloc(s->ns, s->room * sizeof *s->ns);
        if (!s->ns) die("out of memory");
    }
    s->ns[s->used++] = ns > UINT32_MAX ? UINT32_MAX : (uint32_t)ns;
}

static inline int samples_compare(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static inline double samples_us(const struct samples *s, double quantile) {
    if (!s->used) return 0;
    size_t at = (size_t)(quantile * (double)s->used);
    return s->ns[at < s->used ? at : s->used - 1] / 1000.0;
}

/* ---- the answer ---- */

static inline void print_rate(int64_t count, int64_t bytes, uint64_t elapsed_ns, const char *client,
                              const char *settings) {
    double seconds = (double)elapsed_ns / 1e9;
    printf("{\"count\": %lld, \"bytes\": %lld, \"seconds\": %.6f, \"msgs_per_s\": %.1f, "
           "\"mb_per_s\": %.3f, \"client\": \"%s\", \"settings\": \"%s\"}\n",
           (long long)count, (long long)bytes, seconds, (double)count / seconds,
           (double)bytes / 1e6 / seconds, client, settings);
}

static inline void print_latency(struct samples *s, const char *client, const char *settings) {
    qsort(s->ns, s->used, sizeof *s->ns, samples_compare);
    printf("{\"count\": %zu, \"p50_us\": %.1f, \"p99_us\": %.1f, \"max_us\": %.1f, "
           "\"client\": \"%s\", \"settings\": \"%s\"}\n",
           s->used, samples_us(s, 0.50), samples_us(s, 0.99), samples_us(s, 1.0), client, settings);
}

#endif
