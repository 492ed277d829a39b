-- A column's type changes: rows of both sides are read right.
-- skip sqlite: SQLite does not change types of columns
CREATE TABLE sizes (id $int PRIMARY KEY, size $int, name $text);
INSERT INTO sizes VALUES (1, 10, 'a'), (2, 20, 'b');
-- stream
UPDATE sizes SET size = 11 WHERE id = 1;
-- on postgresql
ALTER TABLE sizes ALTER size TYPE text;
-- on mysql
ALTER TABLE sizes MODIFY size VARCHAR(20);
UPDATE sizes SET size = 'large' WHERE id = 1;
-- then
UPDATE sizes SET size = '20!' WHERE id = 2;
