-- A table without any key: its rows are told all the same, equal ones as often as they are there.
CREATE TABLE visits (page $text, seconds $int);
-- on postgresql
ALTER TABLE visits REPLICA IDENTITY FULL;
INSERT INTO visits VALUES ('home', 1), ('home', 1), ('shop', 2);
-- stream
INSERT INTO visits VALUES ('home', 1), ('shop', NULL);
-- then
UPDATE visits SET seconds = 3 WHERE page = 'shop';
-- then
DELETE FROM visits WHERE page = 'home';
INSERT INTO visits VALUES ('home', 1);
-- expect visits: c c u u d d d c
