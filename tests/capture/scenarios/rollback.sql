-- What is rolled back, as a whole or to a savepoint, has not happened.
CREATE TABLE accounts (id $int PRIMARY KEY, balance $int);
INSERT INTO accounts VALUES (1, 100), (2, 100);
-- stream
BEGIN;
UPDATE accounts SET balance = 0;
INSERT INTO accounts VALUES (3, 200);
ROLLBACK;
BEGIN;
UPDATE accounts SET balance = balance - 10 WHERE id = 1;
SAVEPOINT a;
UPDATE accounts SET balance = balance + 99 WHERE id = 2;
SAVEPOINT b;
DELETE FROM accounts;
ROLLBACK TO SAVEPOINT b;
ROLLBACK TO SAVEPOINT a;
UPDATE accounts SET balance = balance + 10 WHERE id = 2;
COMMIT;
-- then
BEGIN;
DELETE FROM accounts;
ROLLBACK;
BEGIN;
INSERT INTO accounts VALUES (4, 1);
SAVEPOINT a;
INSERT INTO accounts VALUES (5, 1);
RELEASE SAVEPOINT a;
COMMIT;
-- expect accounts: u u c c
