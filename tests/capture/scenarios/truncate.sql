-- A table is emptied at once, and filled again: each row that was there is told to be gone.
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
-- then
$truncate cart;
-- then
$truncate cart;
INSERT INTO cart VALUES (7, 'last');
-- expect cart: c d d d c u d c
-- expect kept:
