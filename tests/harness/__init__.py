"""How the tests are run: profiles and budgets, shared servers, the order of work, second chances.

`python -m tests.harness PROFILE` is what `make check`, `make test` and `make proof` call. All of it
also works under a plain `pytest`, which runs with the budgets of `test`.

| module      | what lives there                                                            |
|-------------|-----------------------------------------------------------------------------|
| `profiles`  | the table of budgets: how many kills, frames and examples each profile has  |
| `seeds`     | one seed for the run; that of each test follows from it                     |
| `needs`     | which tests need Java or a database server; the guard that keeps it true    |
| `servers`   | real servers, started once per run by the controller, lent to the workers   |
| `parallel`  | the controller and its forked workers, what becomes of those that die       |
| `schedule`  | which worker gets which file: one owns Spark, slow work goes first          |
| `failures`  | failed tests, kept to be run once more                                      |
| `flaky`     | tests that failed once and then passed: `tests/flaky.md`                    |
| `costs`     | `--costs`: the processor time of each test, and the files it leaves open    |
| `forks`     | what the process has imported that others are forked from                   |
| `clients`   | collects Kafka clients that tests leave behind                              |
| `terminal`  | lines that are shown while tests still run                                  |
| `plugin`    | pytest's hooks, which call the modules above                                |
| `__main__`  | the run, the second run of each failed test, and the verdict                |
| `suites`    | small suites that the harness' own tests run                                |
"""
