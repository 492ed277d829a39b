-- Keys of several columns, in another order than the table's, with text.
CREATE TABLE line_items (amount $int, item $key NOT NULL, orders $int NOT NULL, PRIMARY KEY (orders, item));
INSERT INTO line_items VALUES (1, 'apple', 1), (2, 'pear', 1), (3, 'apple', 2);
-- stream
UPDATE line_items SET amount = amount + 10 WHERE item = 'apple';
-- then
UPDATE line_items SET item = 'quince' WHERE orders = 1 AND item = 'pear';
INSERT INTO line_items VALUES (4, 'pear', 1);
-- then
DELETE FROM line_items WHERE orders = 1;
-- expect line_items: u u d c c d d d
