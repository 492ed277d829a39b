-- Values so large that the database keeps them elsewhere, and does not tell them when an UPDATE
-- leaves them alone; the topic has them all the same.
-- capture unavailable = "fill"
CREATE TABLE files (id $int PRIMARY KEY, n $int, content $large);
-- on postgresql
ALTER TABLE files ALTER content SET STORAGE EXTERNAL;
-- on postgresql mysql
INSERT INTO files VALUES (1, 0, repeat('ä1', 20000)), (2, 0, repeat('b', 30000)), (3, 0, 'small');
-- on sqlite
INSERT INTO files VALUES (1, 0, replace(hex(zeroblob(10000)), '0', 'ä1')), (2, 0, hex(zeroblob(15000))), (3, 0, 'small');
-- stream
UPDATE files SET n = 1;
-- then
UPDATE files SET id = 20 WHERE id = 2;
UPDATE files SET n = 2;
-- then
-- on postgresql mysql
UPDATE files SET content = repeat('c', 50000) WHERE id = 3;
-- on sqlite
UPDATE files SET content = hex(zeroblob(25000)) WHERE id = 3;
UPDATE files SET n = 3;
DELETE FROM files WHERE id = 1;
-- expect files: u u u d c u u u u u u u d
