-- Values of the usual types, and their edges.
CREATE TABLE kinds (id $big PRIMARY KEY, i $int, b $big, d $double, t $text, x $bytes, f $bool, n $decimal, day $date, at $time);
INSERT INTO kinds VALUES (1, 2147483647, 9223372036854775807, 1.5, 'ü € 😀', ${hex}00ff10', '1', '12345.6789', '2024-02-29', '2024-02-29 12:34:56.789012');
INSERT INTO kinds VALUES (2, -2147483648, -9223372036854775808, -0.1, '', ${hex}', '0', '-0.0001', '1969-12-31', '1969-12-31 23:59:59.999999');
INSERT INTO kinds VALUES (3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
-- stream
INSERT INTO kinds SELECT id + 10, i, b, d, t, x, f, n, day, at FROM kinds;
-- then
UPDATE kinds SET t = 'a tab	and a line
and no backslash', d = 1e300 WHERE id = 11;
UPDATE kinds SET i = 0, b = 0, d = 0, t = '0', x = ${hex}30', f = '0', n = '0.0000', day = '0001-01-01', at = '9999-12-31 23:59:59.999999' WHERE id = 13;
-- then
DELETE FROM kinds WHERE id < 10;
-- expect kinds: c c c u u d d d
