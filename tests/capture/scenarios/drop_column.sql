-- A column goes; the columns behind it keep their values.
-- skip sqlite: SQLite refuses to drop a column that triggers name
CREATE TABLE people (id $int PRIMARY KEY, secret $text, name $text, age $int);
INSERT INTO people VALUES (1, 'x', 'Ada', 36), (2, 'y', 'Grace', 85);
-- stream
UPDATE people SET age = 37 WHERE id = 1;
ALTER TABLE people DROP COLUMN secret;
-- then
UPDATE people SET age = 38 WHERE id = 1;
INSERT INTO people VALUES (3, 'Edsger', 72);
-- then
UPDATE people SET name = 'Grace H.' WHERE id = 2;
-- expect people: u u c u
