-- capture heartbeat_ms = 200
-- Tables that are made while the capture runs.
CREATE TABLE old (id $int PRIMARY KEY, v $text);
INSERT INTO old VALUES (1, 'a');
-- stream
CREATE TABLE young (id $int PRIMARY KEY, v $text);
INSERT INTO young VALUES (1, 'a');
UPDATE old SET v = 'b';
-- then
INSERT INTO young VALUES (2, 'b');
UPDATE young SET v = 'c' WHERE id = 1;
-- then
CREATE TABLE younger (id $int PRIMARY KEY, v $text);
INSERT INTO younger VALUES (1, 'x');
DELETE FROM young WHERE id = 2;
