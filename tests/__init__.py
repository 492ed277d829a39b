"""The tests: folders mirror `src/penstock`. Helpers are imported as `tests.<room>.<module>`."""
