/*
 * librdkafka against any broker that speaks the Kafka protocol; the same program measures Apache
 * Kafka and Penstock. Besides the four modes of bench.h: `create` and `delete` a topic, `offsets`
 * prints the first and the next offset of its partition 0.
 *
 * Throughput uses librdkafka's own batching (linger.ms=5, everything else its default but for the
 * two limits named in SETTINGS); latency uses linger.ms=0 and one message in flight.
 */
#include "bench.h"

#include <librdkafka/rdkafka.h>
#include <pthread.h>
#include <semaphore.h>

static char client_name[64];
static int64_t acked;
static int64_t failed;
static rd_kafka_resp_err_t last_error;

static void on_delivery(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque) {
    (void)rk;
    (void)opaque;
    if (message->err) {
        failed++;
        last_error = message->err;
    } else {
        acked++;
    }
}

static void conf_set(rd_kafka_conf_t *conf, const char *key, const char *value) {
    char error[256];
    if (rd_kafka_conf_set(conf, key, value, error, sizeof error) != RD_KAFKA_CONF_OK)
        die("%s=%s: %s", key, value, error);
}

static rd_kafka_t *handle_new(rd_kafka_type_t type, const char *linger_ms) {
    char error[256];
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    conf_set(conf, "bootstrap.servers", arg_need("addr"));
    conf_set(conf, "broker.address.family", "v4");
    if (type == RD_KAFKA_PRODUCER) {
        conf_set(conf, "acks", "all");
        conf_set(conf, "linger.ms", linger_ms);
        rd_kafka_conf_set_dr_msg_cb(conf, on_delivery);
    } else {
        conf_set(conf, "group.id", "bench");
        conf_set(conf, "enable.auto.commit", "false");
        conf_set(conf, "fetch.min.bytes", "1");
        /* The default of 100000 makes the client pause fetching for its back-off. */
        conf_set(conf, "queued.min.messages", "1000000");
    }
    for (int i = 0; arg_nth("set", i); i++) { /* set=key=value */
        char pair[256];
        snprintf(pair, sizeof pair, "%s", arg_nth("set", i));
        char *equals = strchr(pair, '=');
        if (!equals) die("set= needs key=value");
        *equals = 0;
        conf_set(conf, pair, equals + 1);
    }
    rd_kafka_t *rk = rd_kafka_new(type, conf, error, sizeof error);
    if (!rk) die("librdkafka: %s", error);
    return rk;
}

/* ---- topics ---- */

static void admin(int create) {
    char error[256];
    const char *name = arg_need("topic");
    rd_kafka_t *rk = handle_new(RD_KAFKA_PRODUCER, "0");
    rd_kafka_queue_t *queue = rd_kafka_queue_new(rk);
    if (create) {
        rd_kafka_NewTopic_t *topic = rd_kafka_NewTopic_new(
            name, (int)arg_int("partitions", 1), 1, error, sizeof error);
        for (int i = 0; arg_nth("config", i); i++) {
            char pair[256];
            snprintf(pair, sizeof pair, "%s", arg_nth("config", i));
            char *equals = strchr(pair, '=');
            if (!equals) die("config= needs key=value");
            *equals = 0;
            rd_kafka_NewTopic_set_config(topic, pair, equals + 1);
        }
        rd_kafka_CreateTopics(rk, &topic, 1, NULL, queue);
    } else {
        rd_kafka_DeleteTopic_t *topic = rd_kafka_DeleteTopic_new(name);
        rd_kafka_DeleteTopics(rk, &topic, 1, NULL, queue);
    }
    rd_kafka_event_t *event = rd_kafka_queue_poll(queue, 30000);
    if (!event) die("no answer about topic %s", name);
    if (rd_kafka_event_error(event)) die("topic %s: %s", name, rd_kafka_event_error_string(event));
    size_t n = 0;
    const rd_kafka_topic_result_t **results =
        create ? rd_kafka_CreateTopics_result_topics(rd_kafka_event_CreateTopics_result(event), &n)
               : rd_kafka_DeleteTopics_result_topics(rd_kafka_event_DeleteTopics_result(event), &n);
    for (size_t i = 0; i < n; i++)
        if (rd_kafka_topic_result_error(results[i]))
            die("topic %s: %s %s", name, rd_kafka_err2name(rd_kafka_topic_result_error(results[i])),
                rd_kafka_topic_result_error_string(results[i])
                    ? rd_kafka_topic_result_error_string(results[i])
                    : "");
    /* A topic is there before its leader is: a client without retries would be refused. */
    int64_t low, high;
    rd_kafka_resp_err_t err = 0;
    for (int tries = 0; create && tries < 100; tries++) {
        if (!(err = rd_kafka_query_watermark_offsets(rk, name, 0, &low, &high, 1000))) break;
        nanosleep(&(struct timespec){0, 50000000}, NULL);
    }
    if (err) die("topic %s got no leader: %s", name, rd_kafka_err2str(err));
    printf("{\"topic\": \"%s\"}\n", name);
}

static void offsets(void) {
    int64_t low, high;
    rd_kafka_t *rk = handle_new(RD_KAFKA_PRODUCER, "0");
    rd_kafka_resp_err_t err =
        rd_kafka_query_watermark_offsets(rk, arg_need("topic"), 0, &low, &high, 30000);
    if (err) die("offsets: %s", rd_kafka_err2str(err));
    printf("{\"low\": %lld, \"high\": %lld}\n", (long long)low, (long long)high);
}

/* ---- produce ---- */

/* Metadata first, so that no run measures the connection set-up. */
static rd_kafka_topic_t *topic_open(rd_kafka_t *rk) {
    const struct rd_kafka_metadata *metadata;
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, arg_need("topic"), NULL);
    rd_kafka_resp_err_t err = rd_kafka_metadata(rk, 0, topic, &metadata, 30000);
    if (err) die("metadata: %s", rd_kafka_err2str(err));
    rd_kafka_metadata_destroy(metadata);
    return topic;
}

static void publish(rd_kafka_t *rk, rd_kafka_topic_t *topic, int32_t partition, char *payload,
                    size_t size) {
    while (rd_kafka_produce(topic, partition, 0, payload, size, NULL, 0, NULL) != 0) {
        if (rd_kafka_last_error() != RD_KAFKA_RESP_ERR__QUEUE_FULL)
            die("produce: %s", rd_kafka_err2str(rd_kafka_last_error()));
        rd_kafka_poll(rk, 1);
    }
}

static void produce(void) {
    size_t size = (size_t)arg_int("size", 100);
    char *payload = payload_new(size);
    rd_kafka_t *rk = handle_new(RD_KAFKA_PRODUCER, "5");
    rd_kafka_topic_t *topic = topic_open(rk);
    int32_t partitions = (int32_t)arg_int("partitions", 1);
    int64_t sent = 0;
    struct budget budget = budget_start(1000000, 60);
    uint64_t start = now_ns();
    while (!budget_over(&budget, sent)) {
        publish(rk, topic, (int32_t)((sent >> 10) % partitions), payload, size);
        if ((++sent & 1023) == 0) rd_kafka_poll(rk, 0);
    }
    while (acked + failed < sent) rd_kafka_poll(rk, 100);
    uint64_t elapsed = now_ns() - start;
    if (failed) die("%lld messages failed: %s", (long long)failed, rd_kafka_err2str(last_error));
    print_rate(acked, acked * (int64_t)size, elapsed, client_name,
               "acks=all linger.ms=5, batching of librdkafka's defaults, no compression");
}

static void ack(void) {
    size_t size = (size_t)arg_int("size", 100);
    char *payload = payload_new(size);
    rd_kafka_t *rk = handle_new(RD_KAFKA_PRODUCER, "0");
    rd_kafka_topic_t *topic = topic_open(rk);
    struct samples samples = {0};
    for (int64_t i = 0; i < 50; i++) { /* the connection to the leader, and warm caches */
        publish(rk, topic, 0, payload, size);
        while (acked + failed <= i) rd_kafka_poll(rk, 100);
    }
    acked = 0;
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        publish(rk, topic, 0, payload, size);
        while (acked + failed <= i) rd_kafka_poll(rk, 100);
        samples_add(&samples, now_ns() - start);
    }
    if (failed) die("%lld messages failed: %s", (long long)failed, rd_kafka_err2str(last_error));
    print_latency(&samples, client_name, "acks=all linger.ms=0, one message in flight");
}

/* ---- consume ---- */

static void assign(rd_kafka_t *rk, int32_t partitions, int64_t offset) {
    rd_kafka_topic_partition_list_t *list = rd_kafka_topic_partition_list_new(partitions);
    for (int32_t p = 0; p < partitions; p++)
        rd_kafka_topic_partition_list_add(list, arg_need("topic"), p)->offset = offset;
    rd_kafka_resp_err_t err = rd_kafka_assign(rk, list);
    if (err) die("assign: %s", rd_kafka_err2str(err));
    rd_kafka_topic_partition_list_destroy(list);
}

static void consume(void) {
    enum { BATCH = 10000 };
    static rd_kafka_message_t *messages[BATCH];
    int64_t count = arg_int("count", 1000000), got = 0, bytes = 0;
    rd_kafka_t *rk = handle_new(RD_KAFKA_CONSUMER, NULL);
    rd_kafka_topic_destroy(topic_open(rk));
    rd_kafka_poll_set_consumer(rk);
    rd_kafka_queue_t *queue = rd_kafka_queue_get_consumer(rk);
    uint64_t start = now_ns(), heard = start;
    assign(rk, (int32_t)arg_int("partitions", 1), arg_int("offset", RD_KAFKA_OFFSET_BEGINNING));
    while (got < count) {
        ssize_t n = rd_kafka_consume_batch_queue(queue, 50, messages, BATCH);
        if (n < 0) die("consume: %s", rd_kafka_err2str(rd_kafka_last_error()));
        for (ssize_t i = 0; i < n; i++) {
            if (messages[i]->err) {
                if (messages[i]->err != RD_KAFKA_RESP_ERR__PARTITION_EOF)
                    die("consume: %s", rd_kafka_message_errstr(messages[i]));
            } else {
                got++;
                bytes += (int64_t)messages[i]->len;
            }
            rd_kafka_message_destroy(messages[i]);
        }
        if (n > 0) heard = now_ns();
        if (now_ns() - heard > 30000000000ull)
            die("only %lld of %lld messages came", (long long)got, (long long)count);
    }
    print_rate(got, bytes, now_ns() - start, client_name,
               "assign, librdkafka's default fetch sizes, queued.min.messages=1000000");
}

struct receiver {
    rd_kafka_t *rk;
    int64_t first;
    struct samples samples;
    sem_t received;
    volatile int stop;
};

static void *receive(void *arg) {
    struct receiver *r = arg;
    assign(r->rk, 1, r->first);
    for (int64_t i = 0; !r->stop;) {
        rd_kafka_message_t *message = rd_kafka_consumer_poll(r->rk, 100);
        if (!message) continue;
        uint64_t now = now_ns(), sent;
        if (message->err) die("consume: %s", rd_kafka_message_errstr(message));
        memcpy(&sent, message->payload, sizeof sent);
        rd_kafka_message_destroy(message);
        if (i++ >= 50) samples_add(&r->samples, now - sent);
        sem_post(&r->received);
    }
    return NULL;
}

static void e2e(void) {
    size_t size = (size_t)arg_int("size", 100);
    char *payload = payload_new(size);
    rd_kafka_t *rk = handle_new(RD_KAFKA_PRODUCER, "0");
    rd_kafka_topic_t *topic = topic_open(rk);
    int64_t low;
    struct receiver r = {.rk = handle_new(RD_KAFKA_CONSUMER, NULL)};
    rd_kafka_poll_set_consumer(r.rk);
    rd_kafka_resp_err_t err =
        rd_kafka_query_watermark_offsets(rk, arg_need("topic"), 0, &low, &r.first, 30000);
    if (err) die("offsets: %s", rd_kafka_err2str(err));
    sem_init(&r.received, 0, 0);
    pthread_t thread;
    pthread_create(&thread, NULL, receive, &r);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        memcpy(payload, &start, sizeof start);
        publish(rk, topic, 0, payload, size);
        sem_wait(&r.received);
        while (acked + failed <= i) rd_kafka_poll(rk, 100); /* the payload is not copied */
        if (failed) die("publish: %s", rd_kafka_err2str(last_error));
    }
    r.stop = 1;
    pthread_join(thread, NULL);
    print_latency(&r.samples, client_name,
                  "acks=all linger.ms=0 fetch.min.bytes=1 fetch.wait.max.ms=500 (default)");
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    snprintf(client_name, sizeof client_name, "librdkafka %s (C)", rd_kafka_version_str());
    if (mode_is("create")) admin(1);
    else if (mode_is("delete")) admin(0);
    else if (mode_is("offsets")) offsets();
    else if (mode_is("produce")) produce();
    else if (mode_is("consume")) consume();
    else if (mode_is("ack")) ack();
    else if (mode_is("e2e")) e2e();
    else die("unknown mode %s", argv[1]);
    fflush(stdout);
    _Exit(0); /* tearing the handles down costs seconds and measures nothing */
}
