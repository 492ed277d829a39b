/*
 * Redis Streams through hiredis: XADD pipelined with a window of unanswered commands, XREAD in
 * large counts, blocking XREAD for latency.
 */
#include "bench.h"

#include <hiredis/hiredis.h>
#include <pthread.h>
#include <semaphore.h>

#define CLIENT "hiredis (C)"

static redisContext *connect_new(void) {
    char host[64];
    int port;
    arg_addr(host, sizeof host, &port);
    redisContext *context = redisConnect(host, port);
    if (!context || context->err) die("connect: %s", context ? context->errstr : "no memory");
    return context;
}

static redisReply *reply_next(redisContext *context) {
    void *answer = NULL;
    if (redisGetReply(context, &answer) != REDIS_OK) die("redis: %s", context->errstr);
    redisReply *reply = answer;
    if (reply->type == REDIS_REPLY_ERROR) die("redis: %s", reply->str);
    return reply;
}

static void add(redisContext *context, const char *payload, size_t size) {
    const char *argv[] = {"XADD", arg_need("topic"), "*", "v", payload};
    size_t lengths[] = {4, strlen(argv[1]), 1, 1, size};
    redisAppendCommandArgv(context, 5, argv, lengths);
}

static void flush(redisContext *context) {
    for (int done = 0; !done;)
        if (redisBufferWrite(context, &done) != REDIS_OK) die("redis: %s", context->errstr);
}

static void produce(void) {
    size_t size = (size_t)arg_int("size", 100);
    int64_t window = arg_int("window", 4000), burst = window / 4, sent = 0, answered = 0;
    char *payload = payload_new(size), settings[128];
    redisContext *context = connect_new();
    struct budget budget = budget_start(1000000, 60);
    uint64_t start = now_ns();
    /* A burst goes out while the answers to earlier bursts are still under way. */
    for (int over = 0; !over || answered < sent;) {
        for (int64_t i = 0; i < burst && !(over = over || budget_over(&budget, sent)); i++, sent++)
            add(context, payload, size);
        flush(context);
        int64_t until = over ? sent : sent - (window - burst);
        for (; answered < until; answered++) freeReplyObject(reply_next(context));
    }
    snprintf(settings, sizeof settings, "pipelined XADD, window %lld", (long long)window);
    print_rate(sent, sent * (int64_t)size, now_ns() - start, CLIENT, settings);
}

static void ack(void) {
    size_t size = (size_t)arg_int("size", 100);
    char *payload = payload_new(size);
    redisContext *context = connect_new();
    struct samples samples = {0};
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        add(context, payload, size);
        freeReplyObject(reply_next(context));
        if (i >= 50) samples_add(&samples, now_ns() - start);
    }
    print_latency(&samples, CLIENT, "XADD, one message in flight");
}

/* Entries of the one stream in an XREAD answer: [[name, [[id, [field, value]], ...]]] */
static redisReply *entries_of(redisReply *reply) {
    if (reply->type == REDIS_REPLY_NIL) return NULL;
    return reply->element[0]->element[1];
}

static void consume(void) {
    int64_t count = arg_int("count", 1000000), got = 0, bytes = 0;
    char last[64] = "0";
    redisContext *context = connect_new();
    uint64_t start = now_ns();
    while (got < count) {
        redisAppendCommand(context, "XREAD COUNT 1000 STREAMS %s %s", arg_need("topic"), last);
        redisReply *reply = reply_next(context), *entries = entries_of(reply);
        if (!entries) die("only %lld of %lld messages came", (long long)got, (long long)count);
        for (size_t i = 0; i < entries->elements; i++, got++)
            bytes += (int64_t)entries->element[i]->element[1]->element[1]->len;
        snprintf(last, sizeof last, "%s", entries->element[entries->elements - 1]->element[0]->str);
        freeReplyObject(reply);
    }
    print_rate(got, bytes, now_ns() - start, CLIENT, "XREAD COUNT 1000");
}

struct receiver {
    redisContext *context;
    char last[64];
    struct samples samples;
    sem_t received;
    volatile int stop;
};

static void *receive(void *arg) {
    struct receiver *r = arg;
    for (int64_t i = 0; !r->stop;) {
        redisAppendCommand(r->context, "XREAD COUNT 10 BLOCK 100 STREAMS %s %s", arg_need("topic"),
                           r->last);
        redisReply *reply = reply_next(r->context), *entries = entries_of(reply);
        if (entries) {
            uint64_t now = now_ns(), sent;
            redisReply *entry = entries->element[entries->elements - 1];
            memcpy(&sent, entry->element[1]->element[1]->str, sizeof sent);
            snprintf(r->last, sizeof r->last, "%s", entry->element[0]->str);
            if (i++ >= 50) samples_add(&r->samples, now - sent);
            sem_post(&r->received);
        }
        freeReplyObject(reply);
    }
    return NULL;
}

static void e2e(void) {
    size_t size = (size_t)arg_int("size", 100);
    char *payload = payload_new(size);
    redisContext *context = connect_new();
    struct receiver r = {.context = connect_new(), .last = "0"};
    pthread_t thread;
    /* Whatever is in the stream already must not be read as new. */
    redisAppendCommand(context, "XREVRANGE %s + - COUNT 1", arg_need("topic"));
    redisReply *reply = reply_next(context);
    if (reply->elements) snprintf(r.last, sizeof r.last, "%s", reply->element[0]->element[0]->str);
    freeReplyObject(reply);
    sem_init(&r.received, 0, 0);
    pthread_create(&thread, NULL, receive, &r);
    struct budget budget = budget_start(5000, 10);
    for (int64_t i = 0; i < budget.count + 50 && now_ns() < budget.end_ns; i++) {
        uint64_t start = now_ns();
        memcpy(payload, &start, sizeof start);
        add(context, payload, size);
        freeReplyObject(reply_next(context));
        sem_wait(&r.received);
    }
    r.stop = 1;
    pthread_join(thread, NULL);
    print_latency(&r.samples, CLIENT, "XADD, blocking XREAD");
}

static void delete(void) {
    redisContext *context = connect_new();
    redisAppendCommand(context, "DEL %s", arg_need("topic"));
    freeReplyObject(reply_next(context));
    printf("{\"topic\": \"%s\"}\n", arg_need("topic"));
}

int main(int argc, char **argv) {
    args_init(argc, argv);
    if (mode_is("create") || mode_is("delete")) delete(); /* a stream is made by its first XADD */
    else if (mode_is("produce")) produce();
    else if (mode_is("consume")) consume();
    else if (mode_is("ack")) ack();
    else if (mode_is("e2e")) e2e();
    else die("unknown mode %s", argv[1]);
    return 0;
}
