/*
 * RabbitMQ streams over their own binary protocol, spoken directly: there is no C client, and
 * AMQP 0.9.1 on a stream queue would measure the AMQP layer. Messages are published a hundred to
 * a frame (what the official clients do by default) and wrapped as AMQP 1.0 data, so that any of
 * those clients could read them.
 */
#include "bench.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/socket.h>
#include <unistd.h>

#define CLIENT "stream protocol (C)"

enum {
    DECLARE_PUBLISHER = 1,
    PUBLISH = 2,
    PUBLISH_CONFIRM = 3,
    SUBSCRIBE = 7,
    DELIVER = 8,
    CREDIT = 9,
    CREATE = 13,
    DELETE = 14,
    PEER_PROPERTIES = 17,
    SASL_HANDSHAKE = 18,
    SASL_AUTHENTICATE = 19,
    TUNE = 20,
    OPEN = 21,
    HEARTBEAT = 23,
    RESPONSE = 0x8000,
    OFFSET_FIRST = 1,
    OFFSET_NEXT = 3,
    PER_FRAME = 100,
    IN_BYTES = 32 * 1024 * 1024
};

struct conn {
    int fd;
    uint8_t *out;
    size_t out_used, out_room;
    uint8_t *in; /* in_at..in_used is received and not yet taken */
    size_t in_at, in_used;
};

/* ---- frames out ---- */

static void put(struct conn *c, const void *bytes, size_t n) {
    if (c->out_used + n > c->out_room) {
        c->out_room = (c->out_used + n) * 2;
        c->out = realloc(c->out, c->out_room);
        if (!c->out) die("out of memory");
    }
    memcpy(c->out + c->out_used, bytes, n);
    c->out_used += n;
}

static void put_u8(struct conn *c, uint8_t v) { put(c, &v, 1); }

static void put_u16(struct conn *c, uint16_t v) {
    v = htobe16(v);
    put(c, &v, 2);
}

static void put_u32(struct conn *c, uint32_t v) {
    v = htobe32(v);
    put(c, &v, 4);
}

static void put_u64(struct conn *c, uint64_t v) {
    v = htobe64(v);
    put(c, &v, 8);
}

static void put_string(struct conn *c, const char *s) {
    put_u16(c, (uint16_t)strlen(s));
    put(c, s, strlen(s));
}

static void frame_begin(struct conn *c, uint16_t key) {
    c->out_used = 0;
    put_u32(c, 0);
    put_u16(c, key);
    put_u16(c, 1);
}

static void frame_send(struct conn *c) {
    uint32_t length = htobe32((uint32_t)(c->out_used - 4));
    memcpy(c->out, &length, 4);
    for (size_t at = 0; at < c->out_used;) {
        ssize_t n = send(c->fd, c->out + at, c->out_used - at, MSG_NOSIGNAL);
        if (n < 0 && errno != EINTR) die("send: %s", strerror(errno));
        if (n > 0) at += (size_t)n;
    }
}

/* ---- frames in ---- */

static uint16_t get_u16(const uint8_t *at) {
    uint16_t v;
    memcpy(&v, at, 2);
    return be16toh(v);
}

static uint32_t get_u32(const uint8_t *at) {
    uint32_t v;
    memcpy(&v, at, 4);
    return be32toh(v);
}

/* The next frame without its length, or NULL if there is none (and wait is 0). The pointer is
 * good until the next call. */
static uint8_t *frame_next(struct conn *c, int wait, uint32_t *length) {
    for (;;) {
        size_t have = c->in_used - c->in_at;
        if (have >= 4) {
            *length = get_u32(c->in + c->in_at);
            if (*length > IN_BYTES - 4) die("a frame of %u bytes", *length);
            if (have >= 4 + (size_t)*length) {
                uint8_t *frame = c->in + c->in_at + 4;
                c->in_at += 4 + *length;
                return frame;
            }
        }
        if (c->in_at > 0) memmove(c->in, c->in + c->in_at, have);
        c->in_at = 0;
        c->in_used = have;
        ssize_t n = recv(c->fd, c->in + have, IN_BYTES - have, wait ? 0 : MSG_DONTWAIT);
        if (n < 0 && errno == EAGAIN) {
            if (wait) die("no answer for 30 s");
            return NULL;
        }
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) die("the server closed the connection");
        c->in_used += (size_t)n;
    }
}

/* Sends the request begun and waits for its answer, which must be the code for success. */
static void call(struct conn *c, uint16_t key, const char *what) {
    uint32_t length;
    frame_send(c);
    for (;;) {
        uint8_t *frame = frame_next(c, 1, &length);
        if (get_u16(frame) != (key | RESPONSE)) continue;
        if (get_u16(frame + 8) != 1) die("%s: response code %d", what, get_u16(frame + 8));
        return;
    }
}

static struct conn *connect_new(void) {
    char host[64];
    int port, one = 1;
    uint32_t length;
    struct timeval patience = {30, 0};
    struct sockaddr_in address = {.sin_family = AF_INET};
    struct conn *c = calloc(1, sizeof *c);
    if (!c || !(c->in = malloc(IN_BYTES))) die("out of memory");
    arg_addr(host, sizeof host, &port);
    address.sin_port = htons((uint16_t)port);
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die("not an IPv4 address: %s", host);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address))
        die("connect %s:%d: %s", host, port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    frame_begin(c, PEER_PROPERTIES);
    put_u32(c, 1);
    put_u32(c, 0);
    call(c, PEER_PROPERTIES, "peer properties");
    frame_begin(c, SASL_HANDSHAKE);
    put_u32(c, 2);
    call(c, SASL_HANDSHAKE, "SASL handshake");
    frame_begin(c, SASL_AUTHENTICATE);
    put_u32(c, 3);
    put_string(c, "PLAIN");
    put_u32(c, 12);
    put(c, "\0guest\0guest", 12);
    call(c, SASL_AUTHENTICATE, "login");
    uint8_t *tune = frame_next(c, 1, &length);
    if (get_u16(tune) != TUNE) die("expected Tune, got %d", get_u16(tune));
    uint32_t frame_max = get_u32(tune + 4);
    frame_begin(c, TUNE);
    put_u32(c, frame_max);
    put_u32(c, 0); /* no heartbeats */
    frame_send(c);
    frame_begin(c, OPEN);
    put_u32(c, 4);
    put_string(c, "/");
    call(c, OPEN, "open");
    return c;
}

static void manage(uint16_t key) {
    struct conn *c = connect_new();
    frame_begin(c, key);
    put_u32(c, 5);
    put_string(c, arg_need("topic"));
    if (key == CREATE) put_u32(c, 0);
    call(c, key, key == CREATE ? "create" : "delete");
    printf("{\"topic\": \"%s\"}\n", arg_need("topic"));
}

/* ---- publishing ---- */

struct publisher {
    struct conn *conn;
    size_t size;
    char *payload;
    int64_t sent, confirmed;
};

static struct publisher publisher_new(void) {
    struct publisher p = {.conn = connect_new(), .size = (size_t)arg_int("size", 100)};
    p.payload = payload_new(p.size);
    frame_begin(p.conn, DECLARE_PUBLISHER);
    put_u32(p.conn, 6);
    put_u8(p.conn, 0);
    put_string(p.conn, ""); /* no name: no deduplication */
    put_string(p.conn, arg_need("topic"));
    call(p.conn, DECLARE_PUBLISHER, "declare publisher");
    return p;
}

static void publish(struct publisher *p, uint32_t count) {
    static const uint8_t data_section[] = {0x00, 0x53, 0x75, 0xb0};
    struct conn *c = p->conn;
    frame_begin(c, PUBLISH);
    put_u8(c, 0);
    put_u32(c, count);
    for (uint32_t i = 0; i < count; i++) {
        put_u64(c, (uint64_t)p->sent++);
        put_u32(c, (uint32_t)(sizeof data_section + 4 + p->size));
        put(c, data_section, sizeof data_section);
        put_u32(c, (uint32_t)p->size);
        put(c, p->payload, p->size);
    }
    frame_send(c);
}

static void confirms(struct publisher *p, int wait) {
    uint32_t length;
    uint8_t *frame;
    for (; (frame = frame_next(p->conn, wait, &length)); wait = 0) {
        if (get_u16(frame) == HEARTBEAT) continue;
        if (get_u16(frame) != PUBLISH_CONFIRM)
            die("expected a confirm, got command %d", get_u16(frame));
        p->confirmed += get_u32(frame + 5);
    }
}

static void produce(void) {
    struct publisher p = publisher_new();
    int64_t window = arg_int("window", 2000);
    char settings[128];
    struct budget budget = budget_start(1000000, 60);
    uint64_t start = now_ns();
    while (p.sent < budget.count && now_ns() < budget.end_ns) {
        int64_t left = budget.count - p.sent;
        publish(&p, left < PER_FRAME ? (uint32_t)left : PER_FRAME);
        confirms(&p, 0);
        while (p.sent - p.confirmed > window - PER_FRAME) confirms(&p, 1);
    }
    while (p.confirmed < p.sent) confirms(&p, 1);
    snprintf(settings, sizeof settings, "%d messages a frame, confirms, window %lld", PER_FRAME,
             (long long)window);
    print_rate(p.sent, p.sent * (int64_t)p.size, now_ns() - start, CLIENT, settings);
}

static void ack(void) {
    struct publisher p = publisher_new();
    struct samples samples = {0};
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        publish(&p, 1);
        while (p.confirmed < p.sent) confirms(&p, 1);
        if (i >= 50) samples_add(&samples, now_ns() - start);
    }
    print_latency(&samples, CLIENT, "confirm, one message in flight");
}

/* ---- consuming ---- */

static struct conn *subscribe(uint16_t offset, uint16_t credit) {
    struct conn *c = connect_new();
    frame_begin(c, SUBSCRIBE);
    put_u32(c, 7);
    put_u8(c, 0);
    put_string(c, arg_need("topic"));
    put_u16(c, offset);
    put_u16(c, credit);
    put_u32(c, 0); /* no properties */
    call(c, SUBSCRIBE, "subscribe");
    return c;
}

/* The entries of the next chunk: count, their bytes in *at. Gives back the credit it used. */
static uint32_t chunk_next(struct conn *c, uint8_t **at) {
    enum { HEADER = 2 + 2 + 1, CHUNK_HEADER = 1 + 1 + 2 + 4 + 8 + 8 + 8 + 4 + 4 + 4 + 4 };
    uint32_t length;
    uint8_t *frame;
    while ((frame = frame_next(c, 1, &length)), get_u16(frame) != DELIVER)
        if (get_u16(frame) != HEARTBEAT) die("expected Deliver, got command %d", get_u16(frame));
    frame_begin(c, CREDIT);
    put_u8(c, 0);
    put_u16(c, 1);
    frame_send(c);
    *at = frame + HEADER + CHUNK_HEADER;
    return get_u16(frame + HEADER + 2);
}

/* The payload of one entry; moves *at past it. */
static uint8_t *entry_next(uint8_t **at, uint32_t *size) {
    uint32_t length = get_u32(*at);
    if (length & 0x80000000u) die("a sub-entry batch where none was published");
    uint8_t *payload = *at + 4 + 8;
    *size = get_u32(*at + 4 + 4);
    *at += 4 + length;
    return payload;
}

static void consume(void) {
    int64_t count = arg_int("count", 1000000), got = 0, bytes = 0;
    uint64_t start = now_ns();
    struct conn *c = subscribe(OFFSET_FIRST, 10);
    while (got < count) {
        uint8_t *at;
        uint32_t size;
        for (uint32_t entries = chunk_next(c, &at); entries > 0; entries--, got++) {
            entry_next(&at, &size);
            bytes += size;
        }
    }
    print_rate(got, bytes, now_ns() - start, CLIENT, "credit of 10 chunks");
}

struct receiver {
    struct conn *conn;
    struct samples samples;
    sem_t received;
};

static void *receive(void *arg) {
    struct receiver *r = arg;
    for (int64_t i = 0;;) {
        uint8_t *at;
        uint32_t size;
        uint64_t sent;
        for (uint32_t entries = chunk_next(r->conn, &at); entries > 0; entries--) {
            uint64_t now = now_ns();
            memcpy(&sent, entry_next(&at, &size), sizeof sent);
            if (i++ >= 50) samples_add(&r->samples, now - sent);
            sem_post(&r->received);
        }
    }
    return NULL;
}

static void e2e(void) {
    struct publisher p = publisher_new();
    struct receiver r = {.conn = subscribe(OFFSET_NEXT, 10)};
    pthread_t thread;
    sem_init(&r.received, 0, 0);
    pthread_create(&thread, NULL, receive, &r);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        memcpy(p.payload, &start, sizeof start);
        publish(&p, 1);
        while (p.confirmed < p.sent) confirms(&p, 1);
        sem_wait(&r.received); /* the sample is taken before this is posted */
    }
    print_latency(&r.samples, CLIENT, "confirm, credit of 10 chunks");
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    if (mode_is("create")) manage(CREATE);
    else if (mode_is("delete")) manage(DELETE);
    else if (mode_is("produce")) produce();
    else if (mode_is("consume")) consume();
    else if (mode_is("ack")) ack();
    else if (mode_is("e2e")) e2e();
    else die("unknown mode %s", argv[1]);
    fflush(stdout);
    _Exit(0); /* the receiving thread is left where it waits */
}
