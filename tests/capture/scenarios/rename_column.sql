-- A column has another name from some moment on; two columns change their names.
CREATE TABLE people (id $int PRIMARY KEY, a $text, b $text);
INSERT INTO people VALUES (1, 'first', 'second'), (2, 'first', 'second');
-- stream
UPDATE people SET a = 'FIRST' WHERE id = 1;
-- then
ALTER TABLE people RENAME COLUMN a TO c;
ALTER TABLE people RENAME COLUMN b TO a;
ALTER TABLE people RENAME COLUMN c TO b;
-- then
UPDATE people SET b = 'first again';
INSERT INTO people (id, a, b) VALUES (3, 'second', 'first');
