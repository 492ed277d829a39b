-- Thousands of changes in one transaction, which is one piece in the log.
-- capture batch_changes = 200
CREATE TABLE items (id $int PRIMARY KEY, n $int, note $text);
-- repeat 20
INSERT INTO items VALUES ({i}, 0, 'before');
-- stream
BEGIN;
-- repeat 1500
INSERT INTO items VALUES (100 + {i}, {i}, 'some text that takes some room in the database: {i}');
UPDATE items SET n = n + 1;
DELETE FROM items WHERE id > 600;
COMMIT;
-- then
UPDATE items SET note = 'after' WHERE id <= 20;
-- then
BEGIN;
UPDATE items SET n = n + 1;
UPDATE items SET n = n + 1;
COMMIT;
