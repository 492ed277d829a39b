"""How live a pipeline is: the shop of `penstock demo`, and fifty small flows on one driver."""
