/* The reference of bench/drain: publish what the relay would publish, as fast as a C client can.
 *
 *     publish URL EXCHANGE AGGREGATE_TYPE EVENT_TYPE APP_ID BODY_BYTES WINDOW < rows
 *
 * One row a line: id, lane, message_id, aggregate_id, with tabs between them. Each becomes one persistent,
 * mandatory message with the relay's exchange, routing key, properties and headers; tests/bench compares the
 * two. At most WINDOW messages are unconfirmed at any time.
 *
 * Prints {"messages": n, "seconds": s, "cpu_seconds": c}: from the first publish to the last confirm.
 * A message that is returned or refused, or a lost connection, ends it with exit code 1.
 */

#define _GNU_SOURCE
#if __has_include(<rabbitmq-c/amqp.h>) /* since release 0.12 */
#include <rabbitmq-c/amqp.h>
#include <rabbitmq-c/tcp_socket.h>
#else
#include <amqp.h>
#include <amqp_tcp_socket.h>
#endif
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <time.h>

enum { CHANNEL = 1, FRAME_MAX = 131072, LARGEST_AGGREGATE_ID = 255, LARGEST_ROLE = 63 };

struct row {
    int64_t id;
    int16_t lane;
    char message_id[37];
    char aggregate_id[LARGEST_AGGREGATE_ID + 1];
    char written_as[LARGEST_ROLE + 1];
};

struct route {
    amqp_bytes_t exchange, routing_key, aggregate_type, event_type, app_id;
};

/* Delivery tags count from 1. The broker confirms them in any order, or many with one ack. */
struct confirms {
    char *done;       /* by tag */
    uint64_t through; /* every tag up to this one is done */
    uint64_t count;
};

static void die(const char *what, const char *why) {
    fprintf(stderr, "publish: %s: %s\n", what, why);
    exit(1);
}

static void check(int status, const char *what) {
    if (status < 0) die(what, amqp_error_string2(status));
}

static void check_reply(amqp_rpc_reply_t reply, const char *what) {
    if (reply.reply_type == AMQP_RESPONSE_LIBRARY_EXCEPTION) die(what, amqp_error_string2(reply.library_error));
    if (reply.reply_type != AMQP_RESPONSE_NORMAL) die(what, "the broker refused");
}

static struct row *read_rows(FILE *input, uint64_t *count) {
    uint64_t room = 1024;
    struct row *rows = malloc(room * sizeof *rows);
    char line[512];

    *count = 0;
    while (rows != NULL && fgets(line, sizeof line, input) != NULL) {
        struct row *row = &rows[*count];
        if (sscanf(line, "%" SCNd64 "\t%" SCNd16 "\t%36[^\t]\t%255[^\t]\t%63[^\n]", &row->id, &row->lane, row->message_id,
                   row->aggregate_id, row->written_as) != 5)
            die("this row cannot be read", line);
        if (++*count == room) rows = realloc(rows, (room *= 2) * sizeof *rows);
    }
    if (rows == NULL) die("reading the rows", "out of memory");
    return rows;
}

static amqp_connection_state_t connect_to(char *url) {
    struct amqp_connection_info at;
    if (amqp_parse_url(url, &at) != AMQP_STATUS_OK) die("no AMQP URL", url);

    amqp_connection_state_t connection = amqp_new_connection();
    amqp_socket_t *socket = amqp_tcp_socket_new(connection);
    if (socket == NULL) die("opening a socket", "out of memory");
    check(amqp_socket_open(socket, at.host, at.port), "connecting");
    check_reply(
        amqp_login(connection, at.vhost, 0, FRAME_MAX, 0, AMQP_SASL_METHOD_PLAIN, at.user, at.password), "logging in");
    amqp_channel_open(connection, CHANNEL);
    check_reply(amqp_get_rpc_reply(connection), "opening a channel");
    amqp_confirm_select(connection, CHANNEL);
    check_reply(amqp_get_rpc_reply(connection), "asking for confirms");
    return connection;
}

static void publish(amqp_connection_state_t connection, const struct route *route, const struct row *row,
                    uint64_t timestamp, amqp_bytes_t body) {
    amqp_table_entry_t headers[] = {
        {amqp_cstring_bytes("x-aggregate-type"), {.kind = AMQP_FIELD_KIND_UTF8, .value.bytes = route->aggregate_type}},
        {amqp_cstring_bytes("x-outbox-id"), {.kind = AMQP_FIELD_KIND_I64, .value.i64 = row->id}},
        {amqp_cstring_bytes("x-outbox-lane"), {.kind = AMQP_FIELD_KIND_I16, .value.i16 = row->lane}},
        {amqp_cstring_bytes("x-aggregate-id"),
         {.kind = AMQP_FIELD_KIND_UTF8, .value.bytes = amqp_cstring_bytes(row->aggregate_id)}},
        {amqp_cstring_bytes("x-outbox-writer"),
         {.kind = AMQP_FIELD_KIND_UTF8, .value.bytes = amqp_cstring_bytes(row->written_as)}},
    };
    amqp_basic_properties_t properties = {
        ._flags = AMQP_BASIC_CONTENT_TYPE_FLAG | AMQP_BASIC_HEADERS_FLAG | AMQP_BASIC_DELIVERY_MODE_FLAG |
                  AMQP_BASIC_MESSAGE_ID_FLAG | AMQP_BASIC_TIMESTAMP_FLAG | AMQP_BASIC_TYPE_FLAG |
                  AMQP_BASIC_APP_ID_FLAG,
        .content_type = amqp_cstring_bytes("application/json"),
        .headers = {.num_entries = sizeof headers / sizeof *headers, .entries = headers},
        .delivery_mode = AMQP_DELIVERY_PERSISTENT,
        .message_id = amqp_cstring_bytes(row->message_id),
        .timestamp = timestamp,
        .type = route->event_type,
        .app_id = route->app_id,
    };
    const amqp_boolean_t mandatory = 1, immediate = 0;
    check(amqp_basic_publish(connection, CHANNEL, route->exchange, route->routing_key, mandatory, immediate,
                             &properties, body),
          "publishing");
}

static void wait_for_confirm(amqp_connection_state_t connection, struct confirms *confirms) {
    amqp_frame_t frame;
    check(amqp_simple_wait_frame(connection, &frame), "waiting for a confirm");
    if (frame.frame_type != AMQP_FRAME_METHOD) die("waiting for a confirm", "a frame that nobody asked for");
    switch (frame.payload.method.id) {
    case AMQP_BASIC_ACK_METHOD: {
        const amqp_basic_ack_t *ack = frame.payload.method.decoded;
        for (uint64_t tag = ack->multiple ? confirms->through + 1 : ack->delivery_tag; tag <= ack->delivery_tag; tag++) {
            confirms->count += !confirms->done[tag];
            confirms->done[tag] = 1;
        }
        while (confirms->done[confirms->through + 1]) confirms->through++;
        break;
    }
    case AMQP_BASIC_NACK_METHOD:
        die("a message", "the broker refused it (nack)");
        break;
    case AMQP_BASIC_RETURN_METHOD:
        die("a message came back: no queue is bound for it", "bind one");
        break;
    default:
        die("waiting for a confirm", amqp_method_name(frame.payload.method.id));
    }
    amqp_maybe_release_buffers(connection);
}

static double seconds_of(struct timeval time) { return time.tv_sec + time.tv_usec / 1e6; }

static double wall_seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static double cpu_seconds(void) {
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return seconds_of(used.ru_utime) + seconds_of(used.ru_stime);
}

int main(int argc, char **argv) {
    if (argc != 8) die("usage", "publish URL EXCHANGE AGGREGATE_TYPE EVENT_TYPE APP_ID BODY_BYTES WINDOW < rows");
    char routing_key[256];
    snprintf(routing_key, sizeof routing_key, "%s.%s", argv[3], argv[4]);
    const struct route route = {
        .exchange = amqp_cstring_bytes(argv[2]),
        .routing_key = amqp_cstring_bytes(routing_key),
        .aggregate_type = amqp_cstring_bytes(argv[3]),
        .event_type = amqp_cstring_bytes(argv[4]),
        .app_id = amqp_cstring_bytes(argv[5]),
    };
    const amqp_bytes_t body = amqp_bytes_malloc(strtoul(argv[6], NULL, 10));
    const uint64_t window = strtoull(argv[7], NULL, 10);
    uint64_t count;
    const struct row *rows = read_rows(stdin, &count);
    /* The tag after the last one stays undone and stops the search for the first that is not. */
    struct confirms confirms = {.done = calloc(count + 2, 1)};
    if (body.bytes == NULL || confirms.done == NULL || window == 0) die("usage", "BODY_BYTES and WINDOW are numbers");
    memset(body.bytes, 'x', body.len);
    amqp_connection_state_t connection = connect_to(argv[1]);

    const double started = wall_seconds(), cpu_before = cpu_seconds();
    const uint64_t timestamp = time(NULL);
    for (uint64_t sent = 0; sent < count; sent++) {
        while (sent - confirms.count >= window) wait_for_confirm(connection, &confirms);
        publish(connection, &route, &rows[sent], timestamp, body);
    }
    while (confirms.count < count) wait_for_confirm(connection, &confirms);
    const double seconds = wall_seconds() - started, cpu = cpu_seconds() - cpu_before;

    check_reply(amqp_connection_close(connection, AMQP_REPLY_SUCCESS), "closing");
    amqp_destroy_connection(connection);
    printf("{\"messages\": %" PRIu64 ", \"seconds\": %.6f, \"cpu_seconds\": %.6f}\n", count, seconds, cpu);
    return 0;
}
