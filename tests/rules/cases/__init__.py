"""Cases and flips of every rule, a file per group; test_every_rule.py collects and runs them."""
