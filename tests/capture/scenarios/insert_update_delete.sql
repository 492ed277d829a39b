-- Rows that come, change and go; some of them before the capture starts.
CREATE TABLE orders (id $int PRIMARY KEY, customer $text, total $double);
INSERT INTO orders VALUES (1, 'Ada', 10.5), (2, 'Grace', 0.25), (3, 'a quote '' and "', NULL);
-- stream
INSERT INTO orders VALUES (4, 'Edsger', 7);
-- then
UPDATE orders SET total = 11 WHERE id = 1;
UPDATE orders SET customer = NULL WHERE id = 4;
-- then
DELETE FROM orders WHERE id = 2;
INSERT INTO orders VALUES (2, 'Grace again', 1);
-- expect orders: c u u d c
