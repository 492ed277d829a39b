/*
 * NATS JetStream through its C client: a stream in file storage, asynchronous publishing with a
 * window of unacknowledged messages, an ordered push consumer (what JetStream offers for reading
 * a log from the beginning without per-message acknowledgements).
 */
#include "bench.h"

#include <nats/nats.h>
#include <pthread.h>
#include <semaphore.h>

static char client_name[64];

static void check(natsStatus status, const char *what) {
    if (status != NATS_OK) die("%s: %s", what, natsStatus_GetText(status));
}

static volatile int publish_errors;

static void on_publish_error(jsCtx *js, jsPubAckErr *error, void *closure) {
    (void)js;
    (void)closure;
    if (!publish_errors++) fprintf(stderr, "publish: %s\n", natsStatus_GetText(error->Err));
}

static natsConnection *connect_new(jsCtx **js, int64_t window) {
    char url[128];
    natsConnection *connection;
    jsOptions options;
    snprintf(url, sizeof url, "nats://%s", arg_need("addr"));
    check(natsConnection_ConnectTo(&connection, url), "connect");
    jsOptions_Init(&options);
    options.PublishAsync.MaxPending = window;
    options.PublishAsync.StallWait = 30000;
    options.PublishAsync.ErrHandler = on_publish_error;
    check(natsConnection_JetStream(js, connection, &options), "JetStream");
    return connection;
}

static void create(void) {
    jsCtx *js;
    jsErrCode code = 0;
    jsStreamConfig config;
    const char *subject = arg_need("topic");
    connect_new(&js, 0);
    jsStreamConfig_Init(&config);
    config.Name = subject;
    config.Subjects = &subject;
    config.SubjectsLen = 1;
    config.Storage = js_FileStorage;
    check(js_AddStream(NULL, js, &config, NULL, &code), "add stream");
    printf("{\"topic\": \"%s\"}\n", subject);
}

static void delete(void) {
    jsCtx *js;
    connect_new(&js, 0);
    check(js_DeleteStream(js, arg_need("topic"), NULL, NULL), "delete stream");
    printf("{\"topic\": \"%s\"}\n", arg_need("topic"));
}

static void produce(void) {
    int size = (int)arg_int("size", 100);
    int64_t window = arg_int("window", 10000), sent = 0;
    char *payload = payload_new((size_t)size), settings[128];
    const char *subject = arg_need("topic");
    jsCtx *js;
    connect_new(&js, window);
    jsPubOptions wait;
    jsPubOptions_Init(&wait);
    wait.MaxWait = 60000;
    struct budget budget = budget_start(1000000, 60);
    uint64_t start = now_ns();
    for (; !budget_over(&budget, sent); sent++)
        check(js_PublishAsync(js, subject, payload, size, NULL), "publish");
    check(js_PublishAsyncComplete(js, &wait), "publish complete");
    uint64_t elapsed = now_ns() - start;
    if (publish_errors) die("%d messages failed", publish_errors);
    snprintf(settings, sizeof settings, "js_PublishAsync, window %lld", (long long)window);
    print_rate(sent, sent * size, elapsed, client_name, settings);
}

static void ack(void) {
    int size = (int)arg_int("size", 100);
    char *payload = payload_new((size_t)size);
    const char *subject = arg_need("topic");
    jsCtx *js;
    struct samples samples = {0};
    connect_new(&js, 0);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        check(js_Publish(NULL, js, subject, payload, size, NULL, NULL), "publish");
        if (i >= 50) samples_add(&samples, now_ns() - start);
    }
    print_latency(&samples, client_name, "js_Publish, one message in flight");
}

static natsSubscription *subscribe(jsCtx *js, jsDeliverPolicy policy) {
    natsSubscription *subscription;
    jsErrCode code = 0;
    jsSubOptions options;
    jsSubOptions_Init(&options);
    options.Ordered = true;
    options.Config.DeliverPolicy = policy;
    check(js_SubscribeSync(&subscription, js, arg_need("topic"), NULL, &options, &code),
          "subscribe");
    /* Flow control bounds what is under way; the default limit would drop and start over. */
    check(natsSubscription_SetPendingLimits(subscription, -1, -1), "pending limits");
    return subscription;
}

static void consume(void) {
    int64_t count = arg_int("count", 1000000), bytes = 0;
    jsCtx *js;
    natsMsg *message;
    connect_new(&js, 0);
    uint64_t start = now_ns();
    natsSubscription *subscription = subscribe(js, js_DeliverAll);
    for (int64_t got = 0; got < count; got++) {
        check(natsSubscription_NextMsg(&message, subscription, 30000), "next message");
        bytes += natsMsg_GetDataLength(message);
        natsMsg_Destroy(message);
    }
    print_rate(count, bytes, now_ns() - start, client_name, "ordered push consumer");
}

struct receiver {
    natsSubscription *subscription;
    struct samples samples;
    sem_t received;
    volatile int stop;
};

static void *receive(void *arg) {
    struct receiver *r = arg;
    natsMsg *message;
    for (int64_t i = 0; !r->stop;) {
        natsStatus status = natsSubscription_NextMsg(&message, r->subscription, 100);
        if (status == NATS_TIMEOUT) continue;
        uint64_t now = now_ns(), sent;
        check(status, "next message");
        memcpy(&sent, natsMsg_GetData(message), sizeof sent);
        natsMsg_Destroy(message);
        if (i++ >= 50) samples_add(&r->samples, now - sent);
        sem_post(&r->received);
    }
    return NULL;
}

static void e2e(void) {
    int size = (int)arg_int("size", 100);
    char *payload = payload_new((size_t)size);
    jsCtx *publisher, *consumer;
    struct receiver r = {0};
    pthread_t thread;
    connect_new(&publisher, 0);
    connect_new(&consumer, 0);
    r.subscription = subscribe(consumer, js_DeliverNew);
    sem_init(&r.received, 0, 0);
    pthread_create(&thread, NULL, receive, &r);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        memcpy(payload, &start, sizeof start);
        check(js_Publish(NULL, publisher, arg_need("topic"), payload, size, NULL, NULL), "publish");
        sem_wait(&r.received);
    }
    r.stop = 1;
    pthread_join(thread, NULL);
    print_latency(&r.samples, client_name, "js_Publish, ordered push consumer");
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    snprintf(client_name, sizeof client_name, "nats.c %s (C)", nats_GetVersion());
    if (mode_is("create")) create();
    else if (mode_is("delete")) delete();
    else if (mode_is("produce")) produce();
    else if (mode_is("consume")) consume();
    else if (mode_is("ack")) ack();
    else if (mode_is("e2e")) e2e();
    else die("unknown mode %s", argv[1]);
    fflush(stdout);
    _Exit(0);
}
