/*
 * The Kafka protocol over bare sockets: what the broker can do when no client library stands in
 * the way. Requests are built once and sent again and again; one thread drives all connections.
 *
 *   produce  addr= topic= conns= depth= bytes= record= seconds= [acks=-1] [requests=]
 *            Produce v7, one record batch of at most `bytes` (records of `record` bytes) each;
 *            `requests` ends it earlier, on each connection
 *   fetch    addr= topic= conns= depth= max_bytes= batch_bytes= batch_records= batches= seconds=
 *            Fetch v11 over a log that `produce` wrote; the three batch figures are in its answer
 *
 * A connection keeps `depth` requests in flight. Its outgoing bytes are a ring of equally long
 * requests, so sending is a matter of counting: allowed = (answered + depth) * request length.
 * Of an answer only the first bytes are looked at (error code, length); the rest is received and
 * dropped. Every error code is checked: a broker that refuses is not fast.
 */
#include "bench.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { HEAD_BYTES = 512, RECEIVE_BYTES = 256 * 1024 };

/* ---- building requests ---- */

struct buffer {
    uint8_t *at;
    size_t used, room;
};

static void put(struct buffer *b, const void *bytes, size_t n) {
    if (b->used + n > b->room) {
        b->room = (b->used + n) * 2;
        b->at = realloc(b->at, b->room);
        if (!b->at) die("out of memory");
    }
    memcpy(b->at + b->used, bytes, n);
    b->used += n;
}

static void put_i8(struct buffer *b, int8_t v) { put(b, &v, 1); }

static void put_i16(struct buffer *b, int16_t v) {
    uint16_t be = htobe16((uint16_t)v);
    put(b, &be, 2);
}

static void put_i32(struct buffer *b, int32_t v) {
    uint32_t be = htobe32((uint32_t)v);
    put(b, &be, 4);
}

static void put_i64(struct buffer *b, int64_t v) {
    uint64_t be = htobe64((uint64_t)v);
    put(b, &be, 8);
}

static void put_string(struct buffer *b, const char *s) {
    put_i16(b, (int16_t)strlen(s));
    put(b, s, strlen(s));
}

static void put_varint(struct buffer *b, int64_t v) {
    uint64_t zigzag = ((uint64_t)v << 1) ^ (uint64_t)(v >> 63);
    for (; zigzag >= 0x80; zigzag >>= 7) put_i8(b, (int8_t)(zigzag | 0x80));
    put_i8(b, (int8_t)zigzag);
}

static void set_i32(struct buffer *b, size_t at, int32_t v) {
    uint32_t be = htobe32((uint32_t)v);
    memcpy(b->at + at, &be, 4);
}

static uint32_t crc32c(const uint8_t *bytes, size_t n) {
    uint32_t table[256], crc = ~0u;
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t c = i;
        for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ 0x82f63b78u : c >> 1;
        table[i] = c;
    }
    for (size_t i = 0; i < n; i++) crc = table[(crc ^ bytes[i]) & 0xff] ^ (crc >> 8);
    return ~crc;
}

static void put_record(struct buffer *b, const char *payload, size_t size, int64_t offset_delta) {
    struct buffer body = {0};
    put_i8(&body, 0);
    put_varint(&body, 0);
    put_varint(&body, offset_delta);
    put_varint(&body, -1);
    put_varint(&body, (int64_t)size);
    put(&body, payload, size);
    put_varint(&body, 0);
    put_varint(b, (int64_t)body.used);
    put(b, body.at, body.used);
    free(body.at);
}

/* A record batch v2 of at most max_bytes (but at least one record). */
static struct buffer batch_build(size_t max_bytes, size_t record_bytes, int32_t *records) {
    struct buffer b = {0};
    char *payload = payload_new(record_bytes);
    struct timespec ts;
    clock_gettime(CLOCK_REALTIME, &ts);
    int64_t time_ms = (int64_t)ts.tv_sec * 1000 + ts.tv_nsec / 1000000;
    put_i64(&b, 0);  /* base offset: the broker's to set */
    put_i32(&b, 0);  /* length, below */
    put_i32(&b, -1); /* leader epoch */
    put_i8(&b, 2);   /* magic */
    put_i32(&b, 0);  /* CRC, below */
    put_i16(&b, 0);  /* attributes */
    put_i32(&b, 0);  /* last offset delta, below */
    put_i64(&b, time_ms);
    put_i64(&b, time_ms);
    put_i64(&b, -1); /* producer id, epoch, sequence: none */
    put_i16(&b, -1);
    put_i32(&b, -1);
    put_i32(&b, 0); /* record count, below */
    for (*records = 0;; ++*records) {
        size_t before = b.used;
        put_record(&b, payload, record_bytes, *records);
        if (*records > 0 && b.used > max_bytes) {
            b.used = before;
            break;
        }
    }
    set_i32(&b, 8, (int32_t)(b.used - 12));
    set_i32(&b, 23, *records - 1);
    set_i32(&b, 57, *records);
    set_i32(&b, 17, (int32_t)crc32c(b.at + 21, b.used - 21));
    free(payload);
    return b;
}

static void put_header(struct buffer *b, int16_t api_key, int16_t api_version) {
    put_i32(b, 0); /* frame length, below */
    put_i16(b, api_key);
    put_i16(b, api_version);
    put_i32(b, 7); /* correlation id: answers come in order, so one will do */
    put_string(b, "bench");
}

static struct buffer produce_build(const char *topic, const struct buffer *batch) {
    struct buffer b = {0};
    put_header(&b, 0, 7);
    put_i16(&b, -1); /* no transaction */
    put_i16(&b, (int16_t)arg_int("acks", -1));
    put_i32(&b, 30000);
    put_i32(&b, 1);
    put_string(&b, topic);
    put_i32(&b, 1);
    put_i32(&b, 0);
    put_i32(&b, (int32_t)batch->used);
    put(&b, batch->at, batch->used);
    set_i32(&b, 0, (int32_t)(b.used - 4));
    return b;
}

/* The fetch offset lies at *offset_at, to be set for each request. */
static struct buffer fetch_build(const char *topic, int32_t max_bytes, size_t *offset_at) {
    struct buffer b = {0};
    put_header(&b, 1, 11);
    put_i32(&b, -1);  /* replica id: a consumer */
    put_i32(&b, 500); /* max wait */
    put_i32(&b, 1);   /* min bytes */
    put_i32(&b, max_bytes);
    put_i8(&b, 0);
    put_i32(&b, 0); /* no fetch session */
    put_i32(&b, -1);
    put_i32(&b, 1);
    put_string(&b, topic);
    put_i32(&b, 1);
    put_i32(&b, 0);
    put_i32(&b, -1);
    *offset_at = b.used;
    put_i64(&b, 0);
    put_i64(&b, -1);
    put_i32(&b, max_bytes);
    put_i32(&b, 0);
    put_string(&b, "");
    set_i32(&b, 0, (int32_t)(b.used - 4));
    return b;
}

/* ---- the load ---- */

struct load {
    size_t request_bytes; /* length of one request on the wire */
    size_t slots;         /* requests in each connection's ring */
    int64_t depth;
    int64_t limit; /* requests of a connection */
    int fetch;
    size_t topic_bytes;
    /* fetch: where the nth request reads */
    size_t offset_at;
    int64_t batches, batch_bytes, batch_records, batches_per_fetch;
    int64_t useful_bytes; /* per fetch */
    int64_t bytes;        /* received, whole batches only */
    struct samples latencies;
};

struct conn {
    int fd;
    uint8_t *ring;
    int64_t sent_bytes;
    int64_t started, answered; /* requests */
    uint64_t *started_ns;      /* by request number modulo depth */
    uint8_t head[HEAD_BYTES];
    size_t head_used;
    int64_t frame_left; /* bytes of the current answer still to come; -1: length not known yet */
    int64_t first_fetch;
};

static int32_t get_i32(const uint8_t *at) {
    uint32_t be;
    memcpy(&be, at, 4);
    return (int32_t)be32toh(be);
}

static int16_t get_i16(const uint8_t *at) {
    uint16_t be;
    memcpy(&be, at, 2);
    return (int16_t)be16toh(be);
}

static void check_produced(const struct load *load, const struct conn *c) {
    size_t at = 4 + 4 + 4 + 2 + load->topic_bytes + 4 + 4;
    if (c->head_used < at + 2) die("short Produce answer");
    if (get_i16(c->head + at)) die("Produce: error code %d", get_i16(c->head + at));
}

static void check_fetched(struct load *load, const struct conn *c) {
    size_t at = 4 + 4 + 4;
    if (c->head_used < at + 2 || get_i16(c->head + at))
        die("Fetch: error code %d", get_i16(c->head + at));
    at += 2 + 4 + 4 + 2 + load->topic_bytes + 4 + 4;
    if (c->head_used < at + 2 || get_i16(c->head + at))
        die("Fetch: partition error code %d", get_i16(c->head + at));
    at += 2 + 8 + 8 + 8;
    int32_t aborted = get_i32(c->head + at);
    if (aborted > 0) die("Fetch: aborted transactions in a plain log");
    at += 4 + 4;
    if (c->head_used < at + 4) die("short Fetch answer");
    int32_t records_bytes = get_i32(c->head + at);
    if (records_bytes < load->batch_bytes)
        die("Fetch: %d bytes where %lld were asked for", records_bytes,
            (long long)load->useful_bytes);
    /* Fewer are right at the end of a segment; a batch cut off at the end counts for nothing. */
    int64_t whole = records_bytes / load->batch_bytes * load->batch_bytes;
    load->bytes += whole < load->useful_bytes ? whole : load->useful_bytes;
}

static void conn_open(struct conn *c, const struct load *load, const struct buffer *request) {
    char host[64];
    int port, one = 1;
    struct sockaddr_in address = {.sin_family = AF_INET};
    arg_addr(host, sizeof host, &port);
    address.sin_port = htons((uint16_t)port);
    if (inet_pton(AF_INET, host, &address.sin_addr) != 1) die("not an IPv4 address: %s", host);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address))
        die("connect %s:%d: %s", host, port, strerror(errno));
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    c->ring = malloc(load->request_bytes * load->slots);
    c->started_ns = calloc((size_t)load->depth, sizeof *c->started_ns);
    if (!c->ring || !c->started_ns) die("out of memory");
    for (size_t i = 0; i < load->slots; i++)
        memcpy(c->ring + i * load->request_bytes, request->at, request->used);
    c->frame_left = -1;
}

/* Point the request about to be sent at its place in the log. */
static void fetch_aim(const struct load *load, struct conn *c, int64_t number) {
    int64_t rounds = load->batches / load->batches_per_fetch;
    int64_t batch = ((c->first_fetch + number) % rounds) * load->batches_per_fetch;
    uint64_t offset = htobe64((uint64_t)(batch * load->batch_records));
    memcpy(c->ring + (size_t)number % load->slots * load->request_bytes + load->offset_at, &offset,
           8);
}

/* How many bytes may be out by now. When stopping, only the request begun is completed. */
static int64_t conn_allowed(const struct load *load, const struct conn *c, int stopping) {
    int64_t requests = c->answered + load->depth;
    if (requests > load->limit) requests = load->limit;
    return (stopping ? c->started : requests) * (int64_t)load->request_bytes;
}

static void conn_send(struct load *load, struct conn *c, int stopping) {
    int64_t length = (int64_t)load->request_bytes, ring = length * (int64_t)load->slots;
    for (;;) {
        int64_t allowed = conn_allowed(load, c, stopping);
        if (c->sent_bytes >= allowed) return;
        uint64_t now = now_ns();
        int64_t from = c->sent_bytes % ring, n = allowed - c->sent_bytes;
        if (n > ring - from) n = ring - from;
        int64_t last = (c->sent_bytes + n + length - 1) / length;
        for (int64_t number = c->started; number < last; number++) {
            if (load->fetch) fetch_aim(load, c, number);
            c->started_ns[number % load->depth] = now;
        }
        ssize_t done = send(c->fd, c->ring + from, (size_t)n, MSG_NOSIGNAL);
        if (done < 0) {
            if (errno == EAGAIN || errno == EINTR) return;
            die("send: %s", strerror(errno));
        }
        c->sent_bytes += done;
        int64_t begun = (c->sent_bytes + length - 1) / length;
        if (begun > c->started) c->started = begun;
    }
}

static void conn_answered(struct load *load, struct conn *c, uint64_t now) {
    if (load->fetch) check_fetched(load, c);
    else check_produced(load, c);
    samples_add(&load->latencies, now - c->started_ns[c->answered % load->depth]);
    c->answered++;
    c->head_used = 0;
    c->frame_left = -1;
}

static void conn_receive(struct load *load, struct conn *c) {
    static uint8_t received[RECEIVE_BYTES];
    ssize_t n = recv(c->fd, received, sizeof received, 0);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n <= 0) die("the broker closed the connection");
    uint64_t now = now_ns();
    for (uint8_t *at = received, *end = received + n; at < end;) {
        size_t take = (size_t)(end - at);
        if (c->frame_left < 0) { /* the 4 bytes of length */
            if (take > 4 - c->head_used) take = 4 - c->head_used;
        } else if ((int64_t)take > c->frame_left) {
            take = (size_t)c->frame_left;
        }
        size_t keep = HEAD_BYTES - c->head_used < take ? HEAD_BYTES - c->head_used : take;
        memcpy(c->head + c->head_used, at, keep);
        c->head_used += keep;
        at += take;
        if (c->frame_left >= 0) c->frame_left -= (int64_t)take;
        else if (c->head_used == 4) c->frame_left = get_i32(c->head);
        if (c->frame_left == 0) conn_answered(load, c, now);
    }
}

static int64_t run(struct load *load, const struct buffer *request, uint64_t *elapsed) {
    int conns = (int)arg_int("conns", 1);
    int64_t answered = 0, in_flight;
    struct conn *all = calloc((size_t)conns, sizeof *all);
    struct pollfd *polls = calloc((size_t)conns, sizeof *polls);
    if (!all || !polls) die("out of memory");
    for (int i = 0; i < conns; i++) {
        conn_open(&all[i], load, request);
        if (load->fetch)
            all[i].first_fetch = load->batches / load->batches_per_fetch * i / conns;
    }
    uint64_t start = now_ns(), end = start + (uint64_t)(arg_double("seconds", 2) * 1e9);
    do {
        int stopping = now_ns() >= end;
        in_flight = 0;
        for (int i = 0; i < conns; i++) {
            conn_send(load, &all[i], stopping);
            in_flight += all[i].started - all[i].answered;
            int more = all[i].sent_bytes < conn_allowed(load, &all[i], stopping);
            polls[i].fd = all[i].fd;
            polls[i].events = (short)(POLLIN | (more ? POLLOUT : 0));
        }
        if (in_flight == 0) break; /* past the end or at the limit, and all is answered */
        if (poll(polls, (nfds_t)conns, 30000) == 0) die("no answer for 30 s");
        for (int i = 0; i < conns; i++)
            if (polls[i].revents & (POLLIN | POLLHUP | POLLERR)) conn_receive(load, &all[i]);
    } while (1);
    *elapsed = now_ns() - start;
    for (int i = 0; i < conns; i++) {
        answered += all[i].answered;
        close(all[i].fd);
    }
    return answered;
}

static void print(struct load *load, int64_t requests, int64_t bytes, uint64_t elapsed,
                  int64_t batch_bytes, int64_t batch_records) {
    double seconds = (double)elapsed / 1e9;
    struct samples *s = &load->latencies;
    qsort(s->ns, s->used, sizeof *s->ns, samples_compare);
    printf("{\"requests\": %lld, \"bytes\": %lld, \"seconds\": %.6f, \"requests_per_s\": %.1f, "
           "\"mb_per_s\": %.3f, \"p50_us\": %.1f, \"p99_us\": %.1f, \"batch_bytes\": %lld, "
           "\"batch_records\": %lld, \"client\": \"raw sockets (C)\", "
           "\"settings\": \"%s, %lld connections, depth %lld\"}\n",
           (long long)requests, (long long)bytes, seconds, (double)requests / seconds,
           (double)bytes / 1e6 / seconds, samples_us(s, 0.50), samples_us(s, 0.99),
           (long long)batch_bytes, (long long)batch_records,
           load->fetch ? "Fetch v11" : "Produce v7 acks=all", (long long)arg_int("conns", 1),
           (long long)load->depth);
}

static void produce(void) {
    const char *topic = arg_need("topic");
    int32_t records;
    uint64_t elapsed;
    struct buffer batch =
        batch_build((size_t)arg_int("bytes", 65536), (size_t)arg_int("record", 1024), &records);
    struct buffer request = produce_build(topic, &batch);
    struct load load = {.request_bytes = request.used,
                        .depth = arg_int("depth", 1),
                        .topic_bytes = strlen(topic)};
    load.limit = arg_int("requests", INT64_MAX);
    /* Large requests are all the same bytes: one copy stays in the processor's cache. */
    load.slots = request.used >= 32768 ? 1 : (size_t)load.depth;
    int64_t requests = run(&load, &request, &elapsed);
    print(&load, requests, requests * (int64_t)batch.used, elapsed, (int64_t)batch.used, records);
}

static void fetch(void) {
    const char *topic = arg_need("topic");
    uint64_t elapsed;
    int32_t max_bytes = (int32_t)arg_int("max_bytes", 1048576);
    struct load load = {.fetch = 1, .depth = arg_int("depth", 1), .topic_bytes = strlen(topic)};
    struct buffer request = fetch_build(topic, max_bytes, &load.offset_at);
    load.request_bytes = request.used;
    load.slots = (size_t)load.depth;
    load.limit = INT64_MAX;
    load.batches = arg_int("batches", 0);
    load.batch_records = arg_int("batch_records", 0);
    load.batch_bytes = arg_int("batch_bytes", 0);
    if (load.batch_bytes <= 0 || load.batches <= 0 || load.batch_records <= 0)
        die("fetch needs batch_bytes=, batch_records= and batches=");
    load.batches_per_fetch = max_bytes / load.batch_bytes ? max_bytes / load.batch_bytes : 1;
    load.useful_bytes = load.batches_per_fetch * load.batch_bytes;
    if (load.batches < load.batches_per_fetch) die("the log is smaller than one fetch");
    int64_t requests = run(&load, &request, &elapsed);
    print(&load, requests, load.bytes, elapsed, load.batch_bytes, load.batch_records);
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    if (mode_is("produce")) produce();
    else if (mode_is("fetch")) fetch();
    else die("unknown mode %s", argv[1]);
    return 0;
}
