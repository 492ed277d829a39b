-- Emptied in the middle of a transaction: what it wrote before is gone, what it writes after is not.
-- capture batch_changes = 200
CREATE TABLE cart (id $int PRIMARY KEY, item $text);
INSERT INTO cart VALUES (1, 'apple'), (2, 'pear');
CREATE TABLE items (id $int PRIMARY KEY, note $text);
-- repeat 20
INSERT INTO items VALUES ({i}, 'before');
-- stream
BEGIN;
INSERT INTO cart VALUES (3, 'quince');
UPDATE cart SET item = 'apples' WHERE id = 1;
$truncate cart;
INSERT INTO cart VALUES (1, 'new');
COMMIT;
-- then
BEGIN;
-- repeat 700
INSERT INTO items VALUES (100 + {i}, 'some text that takes some room in the database: {i}');
$truncate items;
-- repeat 300
INSERT INTO items VALUES (50 + {i}, 'again: {i}');
COMMIT;
-- then
BEGIN;
$truncate items;
INSERT INTO items VALUES (60, 'once more');
ROLLBACK;
-- then
UPDATE items SET note = 'after' WHERE id = 60;
-- expect cart: c u d d d c
