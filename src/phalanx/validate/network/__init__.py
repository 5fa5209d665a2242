"""Network claims of others, one row each, against what Phalanx computes."""
