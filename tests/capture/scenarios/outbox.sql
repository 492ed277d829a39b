-- Rows of an outbox become records of their aggregates' topics; that they are deleted tells nothing.
-- capture outbox = {"table": "@outbox", "expand_json": true, "topic": "PREFIX.events.${routedByValue}"}
CREATE TABLE outbox (id $key PRIMARY KEY, aggregatetype $text, aggregateid $text, type $text, payload $text);
CREATE TABLE orders (id $int PRIMARY KEY, total $int);
-- stream
BEGIN;
INSERT INTO orders VALUES (1, 10);
INSERT INTO outbox VALUES ('e1', 'order', '1', 'created', '{"total": 10}');
COMMIT;
-- then
BEGIN;
UPDATE orders SET total = 11;
INSERT INTO outbox VALUES ('e2', 'order', '1', 'changed', '{"total": 11}');
INSERT INTO outbox VALUES ('e3', 'bill', '7', 'sent', '{"to": "Ada"}');
DELETE FROM outbox WHERE id = 'e1';
COMMIT;
-- then
BEGIN;
INSERT INTO outbox VALUES ('e4', 'order', '2', 'never', '{}');
ROLLBACK;
DELETE FROM outbox;
-- expect orders: c u
-- records events.order: 1 {"total": 10}
-- records events.order: 1 {"total": 11}
-- records events.bill: 7 {"to": "Ada"}
