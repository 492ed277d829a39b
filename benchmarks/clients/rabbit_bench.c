/*
 * RabbitMQ queues over AMQP 0.9.1 through librabbitmq: persistent messages, publisher confirms
 * with a window of unconfirmed ones, manual acknowledgements by the consumer.
 * kind=classic or kind=quorum says which queue `create` declares. A queue is emptied by reading:
 * `consume` needs its own `produce`.
 */
#include "bench.h"

#include <amqp.h>
#include <amqp_tcp_socket.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/time.h>

static char client_name[64];

static void check(int status, const char *what) {
    if (status < 0) die("%s: %s", what, amqp_error_string2(status));
}

static void check_reply(amqp_rpc_reply_t reply, const char *what) {
    if (reply.reply_type == AMQP_RESPONSE_NORMAL) return;
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION)
        die("%s: %s", what, amqp_error_string2(reply.library_error));
    die("%s: refused by the server", what);
}

static amqp_connection_state_t connect_new(void) {
    char host[64];
    int port;
    arg_addr(host, sizeof host, &port);
    amqp_connection_state_t connection = amqp_new_connection();
    amqp_socket_t *socket = amqp_tcp_socket_new(connection);
    if (!socket) die("no socket");
    check(amqp_socket_open(socket, host, port), "connect");
    check_reply(amqp_login(connection, "/", 0, 131072, 0, AMQP_SASL_METHOD_PLAIN, "guest", "guest"),
                "login");
    amqp_channel_open(connection, 1);
    check_reply(amqp_get_rpc_reply(connection), "channel");
    return connection;
}

static void create(void) {
    amqp_connection_state_t connection = connect_new();
    amqp_table_entry_t type = {.key = amqp_cstring_bytes("x-queue-type")};
    type.value.kind = AMQP_FIELD_KIND_UTF8;
    type.value.value.bytes = amqp_cstring_bytes(arg_need("kind"));
    amqp_table_t arguments = {1, &type};
    amqp_queue_declare(connection, 1, amqp_cstring_bytes(arg_need("topic")), 0, 1, 0, 0, arguments);
    check_reply(amqp_get_rpc_reply(connection), "declare queue");
    printf("{\"topic\": \"%s\"}\n", arg_need("topic"));
}

static void delete(void) {
    amqp_connection_state_t connection = connect_new();
    amqp_queue_delete(connection, 1, amqp_cstring_bytes(arg_need("topic")), 0, 0);
    check_reply(amqp_get_rpc_reply(connection), "delete queue");
    printf("{\"topic\": \"%s\"}\n", arg_need("topic"));
}

/* ---- publishing ---- */

struct publisher {
    amqp_connection_state_t connection;
    amqp_bytes_t queue, body;
    amqp_basic_properties_t properties;
    int64_t sent, confirmed; /* every tag up to and including `confirmed` is confirmed */
    int64_t room;
    uint8_t *early; /* by tag modulo room: confirmed ahead of its turn */
};

static struct publisher publisher_new(int64_t window) {
    size_t size = (size_t)arg_int("size", 100);
    struct publisher p = {.connection = connect_new(), .room = window + 1};
    p.queue = amqp_cstring_bytes(arg_need("topic"));
    p.body.len = size;
    p.body.bytes = payload_new(size);
    p.properties._flags = AMQP_BASIC_DELIVERY_MODE_FLAG;
    p.properties.delivery_mode = 2;
    p.early = calloc((size_t)p.room, 1);
    if (!p.early) die("out of memory");
    amqp_confirm_select(p.connection, 1);
    check_reply(amqp_get_rpc_reply(p.connection), "confirm.select");
    return p;
}

static void publish(struct publisher *p) {
    check(amqp_basic_publish(p->connection, 1, amqp_empty_bytes, p->queue, 0, 0, &p->properties,
                             p->body),
          "publish");
    p->sent++;
}

static void on_confirm(struct publisher *p, const amqp_basic_ack_t *ack) {
    int64_t tag = (int64_t)ack->delivery_tag;
    if (ack->multiple) {
        for (; p->confirmed < tag; p->confirmed++) p->early[(p->confirmed + 1) % p->room] = 0;
    } else {
        p->early[tag % p->room] = 1;
    }
    while (p->early[(p->confirmed + 1) % p->room]) p->early[++p->confirmed % p->room] = 0;
}

/* Takes what confirms there are; waits for one if `wait`. */
static void confirms(struct publisher *p, int wait) {
    amqp_frame_t frame;
    struct timeval none = {0, 0}, long_enough = {30, 0};
    for (;;) {
        int status =
            amqp_simple_wait_frame_noblock(p->connection, &frame, wait ? &long_enough : &none);
        if (status == AMQP_STATUS_TIMEOUT && !wait) return;
        check(status, "confirm");
        if (frame.frame_type == AMQP_FRAME_METHOD) {
            if (frame.payload.method.id != AMQP_BASIC_ACK_METHOD)
                die("the server answered with method %#x", frame.payload.method.id);
            on_confirm(p, frame.payload.method.decoded);
        }
        amqp_maybe_release_buffers(p->connection);
        wait = 0;
    }
}

static void produce(void) {
    int64_t window = arg_int("window", 10000);
    char settings[128];
    struct publisher p = publisher_new(window);
    struct budget budget = budget_start(1000000, 60);
    uint64_t start = now_ns();
    while (!budget_over(&budget, p.sent)) {
        publish(&p);
        if (p.sent - p.confirmed >= window) confirms(&p, 1);
        else if (p.sent % 256 == 0) confirms(&p, 0);
    }
    while (p.confirmed < p.sent) confirms(&p, 1);
    snprintf(settings, sizeof settings, "persistent, publisher confirms, window %lld",
             (long long)window);
    print_rate(p.sent, p.sent * (int64_t)p.body.len, now_ns() - start, client_name, settings);
}

static void ack(void) {
    struct publisher p = publisher_new(1);
    struct samples samples = {0};
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        publish(&p);
        while (p.confirmed < p.sent) confirms(&p, 1);
        if (i >= 50) samples_add(&samples, now_ns() - start);
    }
    print_latency(&samples, client_name, "persistent, publisher confirm, one message in flight");
}

/* ---- consuming ---- */

static amqp_connection_state_t consumer_new(uint16_t prefetch) {
    amqp_connection_state_t connection = connect_new();
    amqp_basic_qos(connection, 1, 0, prefetch, 0);
    check_reply(amqp_get_rpc_reply(connection), "qos");
    amqp_basic_consume(connection, 1, amqp_cstring_bytes(arg_need("topic")), amqp_empty_bytes, 0, 0,
                       0, amqp_empty_table);
    check_reply(amqp_get_rpc_reply(connection), "consume");
    return connection;
}

static void consume(void) {
    int64_t count = arg_int("count", 1000000), bytes = 0;
    struct timeval patience = {30, 0};
    uint64_t start = now_ns();
    amqp_connection_state_t connection = consumer_new(2000);
    for (int64_t got = 1; got <= count; got++) {
        amqp_envelope_t envelope;
        amqp_maybe_release_buffers(connection);
        check_reply(amqp_consume_message(connection, &envelope, &patience, 0), "message");
        bytes += (int64_t)envelope.message.body.len;
        if (got % 500 == 0 || got == count)
            check(amqp_basic_ack(connection, 1, envelope.delivery_tag, 1), "ack");
        amqp_destroy_envelope(&envelope);
    }
    print_rate(count, bytes, now_ns() - start, client_name,
               "prefetch 2000, manual acknowledgement of 500 at a time");
}

/* Some consumers of one queue, each message acknowledged by itself. */

static int64_t drained, drain_count;

static void *drain_some(void *arg) {
    amqp_connection_state_t connection = consumer_new(1000);
    struct timeval slice = {0, 100000};
    (void)arg;
    while (__atomic_load_n(&drained, __ATOMIC_RELAXED) < drain_count) {
        amqp_envelope_t envelope;
        amqp_maybe_release_buffers(connection);
        amqp_rpc_reply_t reply = amqp_consume_message(connection, &envelope, &slice, 0);
        if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION &&
            reply.library_error == AMQP_STATUS_TIMEOUT)
            continue;
        check_reply(reply, "message");
        check(amqp_basic_ack(connection, 1, envelope.delivery_tag, 0), "ack");
        amqp_destroy_envelope(&envelope);
        __atomic_fetch_add(&drained, 1, __ATOMIC_RELAXED);
    }
    return NULL;
}

static void drain(void) {
    int64_t consumers = arg_int("consumers", 1), size = arg_int("size", 100);
    pthread_t threads[64];
    if (consumers < 1 || consumers > 64) die("1 to 64 consumers");
    drain_count = arg_int("count", 100000);
    uint64_t start = now_ns();
    for (int64_t i = 0; i < consumers; i++) pthread_create(&threads[i], NULL, drain_some, NULL);
    for (int64_t i = 0; i < consumers; i++) pthread_join(threads[i], NULL);
    print_rate(drain_count, drain_count * size, now_ns() - start, client_name,
               "prefetch 1000, every message acknowledged by itself");
}

struct receiver {
    amqp_connection_state_t connection;
    struct samples samples;
    sem_t received;
    volatile int stop;
};

static void *receive(void *arg) {
    struct receiver *r = arg;
    struct timeval slice = {0, 100000};
    for (int64_t i = 0; !r->stop;) {
        amqp_envelope_t envelope;
        amqp_maybe_release_buffers(r->connection);
        amqp_rpc_reply_t reply = amqp_consume_message(r->connection, &envelope, &slice, 0);
        if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION &&
            reply.library_error == AMQP_STATUS_TIMEOUT)
            continue;
        uint64_t now = now_ns(), sent;
        check_reply(reply, "message");
        memcpy(&sent, envelope.message.body.bytes, sizeof sent);
        check(amqp_basic_ack(r->connection, 1, envelope.delivery_tag, 0), "ack");
        amqp_destroy_envelope(&envelope);
        if (i++ >= 50) samples_add(&r->samples, now - sent);
        sem_post(&r->received);
    }
    return NULL;
}

static void e2e(void) {
    struct publisher p = publisher_new(1);
    struct receiver r = {.connection = consumer_new(10)};
    pthread_t thread;
    sem_init(&r.received, 0, 0);
    pthread_create(&thread, NULL, receive, &r);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        memcpy(p.body.bytes, &start, sizeof start);
        publish(&p);
        while (p.confirmed < p.sent) confirms(&p, 1);
        sem_wait(&r.received);
    }
    r.stop = 1;
    pthread_join(thread, NULL);
    print_latency(&r.samples, client_name, "persistent, publisher confirm, manual acknowledgement");
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    snprintf(client_name, sizeof client_name, "librabbitmq %s (C)", amqp_version());
    if (mode_is("create")) create();
    else if (mode_is("delete")) delete();
    else if (mode_is("produce")) produce();
    else if (mode_is("consume")) consume();
    else if (mode_is("ack")) ack();
    else if (mode_is("drain")) drain();
    else if (mode_is("e2e")) e2e();
    else die("unknown mode %s", argv[1]);
    fflush(stdout);
    _Exit(0);
}
