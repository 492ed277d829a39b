-- A column is added while rows are written.
CREATE TABLE people (id $int PRIMARY KEY, name $text);
INSERT INTO people VALUES (1, 'Ada');
-- stream
INSERT INTO people VALUES (2, 'Grace');
ALTER TABLE people ADD COLUMN age $int;
-- then
INSERT INTO people (id, name, age) VALUES (3, 'Edsger', 72);
UPDATE people SET age = 36 WHERE id = 1;
-- then
UPDATE people SET age = 85 WHERE id = 2;
