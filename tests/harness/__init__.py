"""How the tests are run: profiles and budgets, shared servers, the order of work, second chances.

`python -m tests.harness PROFILE` is what `make check`, `make test` and `make proof` call. All of it
also works under a plain `pytest`, which runs with the budgets of `test`.

| module      | what lives there                                                          |
|-------------|---------------------------------------------------------------------------|
| `profiles`  | the table of budgets: how many kills, frames and examples each profile has |
| `needs`     | which tests need Java or a database server; the guard that keeps it true  |
| `servers`   | real servers, started once per run by the controller, lent to the workers |
| `schedule`  | which worker gets which file: one owns Spark, slow work goes first        |
| `failures`  | failed tests, kept with their seeds, to be run once more                  |
| `plugin`    | pytest's hooks, which call the modules above                              |
| `__main__`  | the two runs and the verdict                                              |
"""
