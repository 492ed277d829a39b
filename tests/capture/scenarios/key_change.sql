-- A row whose key changes is another row: the old one is deleted, the new one created.
CREATE TABLE orders (id $int PRIMARY KEY, note $text);
INSERT INTO orders VALUES (1, 'one'), (2, 'two');
-- stream
UPDATE orders SET id = 10 WHERE id = 1;
-- then
UPDATE orders SET id = 1, note = 'back' WHERE id = 10;
UPDATE orders SET note = 'the same key' WHERE id = 2;
-- then
-- Two rows change places, within one transaction.
BEGIN;
UPDATE orders SET id = -1 WHERE id = 1;
UPDATE orders SET id = 1 WHERE id = 2;
UPDATE orders SET id = 2 WHERE id = -1;
COMMIT;
-- expect orders: d c d c u d c d c d c
