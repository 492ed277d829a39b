-- The truncate itself has an event as well, after the deletes.
-- capture skip = ["none"]
CREATE TABLE cart (id $int PRIMARY KEY, item $text);
INSERT INTO cart VALUES (1, 'apple'), (2, 'pear');
-- stream
INSERT INTO cart VALUES (3, 'quince');
-- then
$truncate cart;
INSERT INTO cart VALUES (1, 'new');
-- then
UPDATE cart SET item = 'newer';
-- expect cart: c d d d t c u
-- expect sqlite cart: c d d d c u
