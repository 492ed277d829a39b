-- A table is emptied at once, and filled again.
-- capture skip = ["none"]
CREATE TABLE cart (id $int PRIMARY KEY, item $text);
CREATE TABLE kept (id $int PRIMARY KEY, item $text);
INSERT INTO cart VALUES (1, 'apple'), (2, 'pear');
INSERT INTO kept VALUES (1, 'plum');
-- stream
INSERT INTO cart VALUES (3, 'quince');
-- then
$truncate cart;
INSERT INTO cart VALUES (1, 'new');
-- then
UPDATE cart SET item = 'newer';
-- expect cart: c t c u
-- expect sqlite cart: c d d d c u
-- expect kept:
